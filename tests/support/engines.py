# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One engine and its conversation on every mesh that the selector can return."""

import dataclasses
import functools

import jax

from earl_jax.engine.config import EngineConfig
from earl_jax.engine.engine import Engine
from earl_jax.models.parameters import check_tensor_axis
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.meshes import rollout_candidates
from tests.support.slots import CHUNK, MODEL, PAGE_SIZE, RULES, VOCAB, make_scripts, params

NUM_SLOTS, NUM_ROWS = 16, 32
CONFIG = EngineConfig(
    model=MODEL,
    vocab_size=VOCAB,
    num_slots=NUM_SLOTS,
    num_rows=NUM_ROWS,
    chunk_size=CHUNK,
    rules=RULES,
    seed=7,
    page_size=PAGE_SIZE,
)


# Every mesh of eight devices that the selector can return for this model.
CANDIDATES = rollout_candidates(
    8, [], lambda shape: check_tensor_axis(MODEL, VOCAB, shape.tensor, shape.fsdp)
)


@functools.cache
def engine_on(shape: MeshShape, config: EngineConfig = CONFIG) -> Engine:
    return Engine(config, make_layout(shape, jax.devices()[: shape.num_devices]))


@functools.cache
def weights_on(shape: MeshShape):
    return engine_on(shape).load_params(params())


@functools.cache
def scripts():
    """One episode a slot, in a row of the slot's data shard: data shards are 2 slots and 4 rows."""
    return {
        slot: dataclasses.replace(script, row=slot // 2 * 4 + slot % 2 + 1)
        for slot, script in make_scripts(NUM_SLOTS, turns=2).items()
    }


UNSHARDED = MeshShape()
