# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Train states to save, and the comparison of what comes back."""

import jax
import numpy as np

from earl_jax.models.config import ModelConfig
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import state_shapes, state_shardings

MODEL = ModelConfig(num_layers=2, width=16, num_heads=2, num_kv_heads=2, head_size=8, ffn_size=16)
TRAIN = TrainConfig()
VOCAB = 64
D8 = make_layout(MeshShape(data=8))
CUBE = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
POSITION = {
    "placement": {"rollout_mesh": "data=8", "max_tokens": 16, "pages": 4},
    "history": [{"context_tokens_mean": 12.345678901234567}],
    "throughput": {},
}


def made(seed):
    """A state in which every leaf has values of its own: parameters, moments, counters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf, where: jax.device_put(
            (100 * rng.standard_normal(leaf.shape)).astype(leaf.dtype), where
        ),
        state_shapes(MODEL, TRAIN, VOCAB),
        state_shardings(MODEL, TRAIN, VOCAB, D8),
    )


def restored(checkpoints, step, layout=D8):
    return checkpoints.state(
        step, state_shapes(MODEL, TRAIN, VOCAB), state_shardings(MODEL, TRAIN, VOCAB, layout)
    )


def assert_bitwise_equal(expected, got):
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    for old, new in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert np.array(old).tobytes() == np.array(new).tobytes()
