# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The batch of all trainers. Imports NumPy alone: trainers of other environments use it."""

from typing import Any

import numpy as np

VOCAB_SIZE = 2048
LEARNING_RATE = 1e-4
CLIP = 0.2
MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.999)
EPS = 1e-8


def make_batch(rows: int, length: int) -> dict[str, Any]:
    """Returns `tokens` i32[rows, length], and `behaviour` and `advantages` f32 of that shape.

    Every token but the first of a row is the policy's. The behaviour is a little off the uniform
    distribution, which a random model is near to, so that ratios are near 1, and a few are clipped.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB_SIZE, (rows, length)).astype(np.int32)
    behaviour = -np.log(VOCAB_SIZE) + rng.normal(0.0, 0.1, (rows, length))
    advantages = np.broadcast_to(rng.normal(size=(rows, 1)), (rows, length))
    return {
        "tokens": tokens,
        "behaviour": behaviour.astype(np.float32),
        "advantages": advantages.astype(np.float32),
    }
