# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The program that publishes weights, compiled for devices that may be absent: who sends how much.

The trainer's stacked fp32 becomes the engine's bf16, layer by layer, over the same devices.
"""

from earl_jax.dispatch.plan import plan_dispatch
from earl_jax.dispatch.weights import program_of
from earl_jax.models.config import ModelConfig
from earl_jax.models.engine_parameters import engine_shapes, engine_specs
from earl_jax.models.parameters import parameter_shapes, parameter_shardings, parameter_specs
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import placed_shapes
from tests.support.traffic import collectives


def times_the_plan(model: ModelConfig, vocab_size: int, source: Layout, target: Layout) -> float:
    """Returns the bytes of the program's collectives, over the fewest bytes that would do."""
    specs = parameter_specs(model, vocab_size)
    wanted = engine_specs(model, vocab_size, "compute")
    shapes, goal = engine_shapes(wanted, "bfloat16"), parameter_shardings(wanted, target)
    params = placed_shapes(parameter_shapes(specs), parameter_shardings(specs, source))
    compiled = program_of(params, shapes, goal).lower(params).compile()
    found = collectives(compiled.as_text(), source.shape.num_devices)
    plan = plan_dispatch(placed_shapes(shapes, parameter_shardings(wanted, source)), goal)
    return sum(each.received_bytes for each in found) / plan.moved_bytes
