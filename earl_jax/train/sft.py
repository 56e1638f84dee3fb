# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of example episodes on the host, for the supervised updates of a run's first steps.

They teach what a reply looks like (envs/examples.py).
"""

import dataclasses

import numpy as np

from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import place
from earl_jax.trajectory import TrajectoryBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBatch:
    """Rows of token ids of different lengths, and who wrote each: 0 or the player's turn."""

    token_ids: tuple[tuple[int, ...], ...]
    turn_ids: tuple[tuple[int, ...], ...]

    def on(self, layout: Layout, length: int) -> TrajectoryBatch:
        """The batch on the devices, in rows of `length` tokens; longer games are cut there.

        So demonstrations never need more room than the policy's own episodes: they teach longer
        games as it comes to play them.
        """
        tokens = np.zeros((len(self.token_ids), length), np.int32)
        turn_ids, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, (ids, turns) in enumerate(zip(self.token_ids, self.turn_ids, strict=True)):
            tokens[row, : len(ids)] = ids[:length]
            turn_ids[row, : len(ids)] = turns[:length]
            segment_ids[row, : len(ids)] = 1
        zeros = np.zeros(tokens.shape, np.float32)
        rows = (tokens, segment_ids, turn_ids, zeros, np.zeros_like(tokens), zeros)
        names = ("tokens", "segment_ids", "turn_ids", "logprobs", "versions", "advantages")
        placed = [place(field, layout.activations("NS")) for field in rows]
        return TrajectoryBatch(**dict(zip(names, placed, strict=True)))
