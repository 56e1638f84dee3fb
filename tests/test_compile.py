# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's round as the compilers of real chips make it, where they are installed."""

import collections
import functools
import re

import pytest
from test_engine import COLLECTIVE
from test_topology import need_compiler

from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import cache_bytes
from earl_jax.rollout.engine import EngineConfig, PolicyEngine
from earl_jax.rollout.slots import SlotRules
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.topology import make_topology

MODEL = ModelConfig(
    num_layers=3,
    width=256,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    ffn_size=512,
    compute_dtype="bfloat16",
)
KIND = r"\b(all-reduce|all-gather)(?:-start)?\("
PLACES, SLOTS, VOCAB = 4096, 32, 1024
BOTH = [pytest.param(n, marks=need_compiler(n)) for n in ("v5e:2x4", "h100:1x8")]


@functools.cache
def compiled_round(name: str, shape: MeshShape):
    config = EngineConfig(
        model=MODEL,
        vocab_size=VOCAB,
        num_slots=SLOTS,
        num_rows=SLOTS,
        chunk_size=16,
        rules=SlotRules(burst=8, max_turn_tokens=64, end_of_turn_ids=(0,)),
        seed=0,
    )
    layout = make_layout(shape, make_topology(name).devices())
    return PolicyEngine(config, layout).lower_play(PLACES).compile()


def collectives(name: str, shape: MeshShape) -> collections.Counter[str]:
    lines = compiled_round(name, shape).as_text().splitlines()
    kinds = [re.search(KIND, line.split(" = ", 1)[1]) for line in lines if COLLECTIVE.search(line)]
    return collections.Counter(kind[1] if kind else "other" for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_without_a_tensor_axis_a_round_has_no_collective(name):
    assert not collectives(name, MeshShape(data=8))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_with_a_tensor_axis_a_round_has_those_of_its_layers_and_its_logits(name):
    """As on CPU (test_engine.py), for the chunk and for the loop over tokens."""
    counts = collectives(name, MeshShape(data=2, tensor=4))
    assert counts == {"all-reduce": 2 * (1 + 2 * MODEL.num_layers), "all-gather": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH[1:])
def test_a_round_on_gpus_holds_the_cache_once(name):
    """TPUs copy it into the order that they want inside a loop."""
    analysis = compiled_round(name, MeshShape(data=8)).memory_analysis()
    cache = cache_bytes(MODEL, SLOTS // 8, PLACES)
    assert analysis.alias_size_in_bytes > cache
    assert analysis.temp_size_in_bytes < cache / 2
