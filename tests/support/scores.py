# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of episodes by the trainer's forward pass."""

import functools

import jax
import numpy as np

from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import stack_layers
from tests.support.episodes import MODEL, weights
from tests.support.forward import next_logprobs, row_logits

LENGTH = 64


@functools.cache
def _scores(seed: int, model: ModelConfig):
    """Log-probs of rows of ids under the weights of a seed, by the trainer's forward pass."""
    params = jax.tree.map(np.asarray, weights(seed, model=model))
    params["layers"] = jax.jit(stack_layers)(params["layers"])

    @jax.jit
    def score(tokens_BT, segments_BT):
        return next_logprobs(row_logits(model, params, tokens_BT, segments_BT), tokens_BT)

    return score


def gaps(trajectories, model: ModelConfig = MODEL) -> list[list[tuple[int, float]]]:
    """Each episode's sampled tokens: the version, and how far its log-prob is from that of it."""
    ids = np.zeros((len(trajectories), LENGTH), np.int32)
    segments = np.zeros_like(ids)
    for row, trajectory in enumerate(trajectories):
        whole = [token for turn in trajectory.turns for token in turn.token_ids]
        ids[row, : len(whole)], segments[row, : len(whole)] = whole, 1
    versions = {v for t in trajectories for turn in t.turns for v in turn.versions}
    expected = {version: np.asarray(_scores(version, model)(ids, segments)) for version in versions}
    found = []
    for row, trajectory in enumerate(trajectories):
        position, own = 0, []
        for turn in trajectory.turns:
            for offset, version in enumerate(turn.versions):
                logprob = float(expected[version][row, position + offset - 1])
                own.append((version, abs(logprob - turn.logprobs[offset])))
            position += len(turn.token_ids)
        found.append(own)
    return found


def furthest(trajectories) -> float:
    """Returns the largest distance of a log-prob from that of the weights of its version."""
    return max(gap for own in gaps(trajectories) for _, gap in own)
