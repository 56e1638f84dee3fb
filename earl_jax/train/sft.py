# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of examples for supervised updates.

Those of an environment (envs/examples.py) teach what a reply looks like; conversations of a file
(envs/text/chat_dataset.py) teach what they say.
"""

from collections.abc import Sequence

import numpy as np

from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import place
from earl_jax.trajectory import TrajectoryBatch


def sft_batch(
    examples: Sequence[tuple[Sequence[int], Sequence[int]]], layout: Layout, length: int
) -> TrajectoryBatch:
    """Returns the batch on the devices, in rows of `length` tokens; longer examples are cut there.

    So an environment's never need longer rows than the policy's own episodes.

    Args:
        examples: for each row its token ids, and who wrote each: 0 or the policy's turn.
        layout: the trainer's.
        length: tokens of a row.
    """
    tokens = np.zeros((len(examples), length), np.int32)
    turn_ids, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, (ids, turns) in enumerate(examples):
        tokens[row, : len(ids)] = ids[:length]
        turn_ids[row, : len(ids)] = turns[:length]
        segment_ids[row, : len(ids)] = 1
    zeros = np.zeros(tokens.shape, np.float32)
    rows = (tokens, segment_ids, turn_ids, zeros, np.zeros_like(tokens), zeros)
    names = ("tokens", "segment_ids", "turn_ids", "logprobs", "versions", "advantages")
    placed = [place(field, layout.activations("NS")) for field in rows]
    return TrajectoryBatch(**dict(zip(names, placed, strict=True)))
