# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Products on chips: those of fp32 in fp32, those of bf16 in bf16, forward and backward."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.launch.start import products_precision
from earl_jax.models.config import ModelConfig
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import ROLLOUT_ROWS, TRAINING_ROWS, MeshShape, make_layout
from earl_jax.sharding.placing import placed_shapes
from earl_jax.train.config import TrainConfig
from earl_jax.train.step import batch_shapes
from tests.support.updates import plain_learner

MODEL = ModelConfig(num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=48)
VOCAB = 64
PRODUCT = re.compile(
    r"stablehlo.dot_general .*precision = \[(\w+), \w+\].* : \(tensor<\S*?(f32|bf16)>, "
)


def lowered_update(dtype: str, mesh: MeshShape, length: int) -> str:
    layout = functools.partial(make_layout, row_axes=TRAINING_ROWS)
    learner = plain_learner(
        dataclasses.replace(MODEL, compute_dtype=dtype),
        TrainConfig(),
        ALGORITHMS["grpo"],
        VOCAB,
        layout=lambda shape: layout(shape, jax.devices()[: shape.num_devices]),
    )
    state = placed_shapes(learner.state_shapes(), learner.state_shardings(mesh))
    batch = batch_shapes(2, length, learner.layout(mesh))
    step = learner.program(TrainPlan(mesh, 1, "none"))
    traced = step.trace(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def lowered_round(dtype: str) -> str:
    config = EngineConfig(
        model=dataclasses.replace(MODEL, compute_dtype=dtype),
        vocab_size=VOCAB,
        num_slots=2,
        num_rows=2,
        chunk_size=16,
        page_size=16,
        rules=SlotRules(burst=2, end_of_turn_ids=(0,)),
        seed=0,
    )
    layout = make_layout(MeshShape(), jax.devices()[:1], row_axes=ROLLOUT_ROWS)
    return Engine(config, layout).lower_play(32).as_text()


# Rows of one block, of several, and those that a ring goes round.
PROGRAMS = {
    "one block": functools.partial(lowered_update, mesh=MeshShape(), length=64),
    "blocks": functools.partial(lowered_update, mesh=MeshShape(), length=256),
    "ring": functools.partial(lowered_update, mesh=MeshShape(context=2), length=256),
    "round": lowered_round,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_model_in_fp32_has_no_product_that_chips_would_round(program):
    with jax.default_matmul_precision("highest"):
        products = PRODUCT.findall(PROGRAMS[program]("float32"))
    assert len(products) > 10
    assert set(products) == {("HIGHEST", "f32")}


# But for rows of one block, whose few scores have a gradient in fp32.
@pytest.mark.slow_except("blocks")
@pytest.mark.parametrize("program", sorted({*PROGRAMS} - {"one block"}))
def test_a_model_in_bf16_multiplies_bf16_backward_too(program):
    """A gradient in fp32 would make the head's two largest products those of fp32."""
    products = PRODUCT.findall(PROGRAMS[program]("bfloat16"))
    assert len(products) > 10
    assert set(products) == {("DEFAULT", "bf16")}


def test_the_precision_is_the_highest_where_a_chip_computes_in_fp32():
    for chip in ("gpu", "tpu"):
        assert products_precision(chip, "bfloat16", "float32") == "highest"
        assert products_precision(chip, "bfloat16", "bfloat16") is None
    assert products_precision("cpu", "float32") is None
