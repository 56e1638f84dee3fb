# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Weights: the trainer's stacked fp32 to the engine's bf16, layer by layer, beside a plain copy.

Publishing reads four bytes of every number and writes two (int8: one) on every device that is to
have it. The limit is the time in which the same devices copy as many bytes, read and written.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.dispatch.within import seconds
from earl_jax.dispatch.weights import publish
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import parameter_shapes, parameter_shardings, parameter_specs
from earl_jax.models.presets import preset_named
from earl_jax.models.quantization import engine_shapes, engine_specs
from earl_jax.selector.memory import resident_bytes
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout

COLUMNS = (
    "model",
    "layers",
    "trainer",
    "rollout",
    "weights",
    "GB read",
    "GB written",
    "moved GB",
    "publish ms",
    "copy ms",
    "of a copy's speed",
)
MODELS = ("qwen2.5-0.5b",)
VOCAB = 152_064


def measure(
    presets: Sequence[str], num_devices: int, cut: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """A row for each model, rollout mesh and type of the engine's weights."""
    for preset in presets:
        model, vocab_size = cut_model(preset, cut)
        specs = parameter_specs(model, vocab_size)
        for trainer, rollout in meshes(model, num_devices):
            source = make_layout(trainer, row_axes=TRAINING_ROWS)
            target = make_layout(rollout)
            shardings = parameter_shardings(specs, source)
            shapes = parameter_shapes(specs)
            params = jax.jit(
                lambda shapes=shapes: jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes),
                out_shardings=shardings,
            )()
            for dtype in ("compute", "int8"):
                wanted = engine_specs(model, vocab_size, dtype)
                goal = engine_shapes(wanted, "bfloat16")
                max_tokens = parameter_shardings(wanted, target)
                moved = publish(params, goal, max_tokens).moved_bytes
                read = num_devices * resident_bytes(shapes, shardings)
                written = num_devices * resident_bytes(goal, max_tokens)
                ours_s, copy_s = seconds(
                    lambda p=params, g=goal, w=max_tokens: publish(p, g, w).params,
                    _copy_of((read + written) // 2),
                    repeats=repeats,
                )
                cells = (
                    preset,
                    model.num_layers,
                    str(trainer),
                    str(rollout),
                    "bf16" if dtype == "compute" else dtype,
                    read / 1e9,
                    written / 1e9,
                    moved / 1e9,
                    1e3 * ours_s,
                    1e3 * copy_s,
                    copy_s / ours_s,
                )
                yield dict(zip(COLUMNS, cells, strict=True))


def cut_model(preset: str, cut: int) -> tuple[ModelConfig, int]:
    """The preset with its layers and its vocabulary divided by `cut`, and that vocabulary."""
    model = preset_named(preset)
    num_layers = max(1, model.num_layers // cut)
    model = dataclasses.replace(model, num_layers=num_layers, windows=model.windows[:1])
    return model, VOCAB // cut // 64 * 64


def meshes(model: ModelConfig, num_devices: int) -> list[tuple[MeshShape, MeshShape]]:
    """Trainers and rollouts: from fsdp to copies and to parts of the heads, or of the experts."""
    if model.num_experts:
        four = math.gcd(num_devices, 4)
        trainer = MeshShape(fsdp=num_devices // four, expert=four)
        rollouts = [
            MeshShape(data=num_devices // expert, expert=expert) for expert in (four, num_devices)
        ]
    else:
        heads = math.gcd(num_devices, model.num_kv_heads)
        trainer = MeshShape(fsdp=num_devices)
        rollouts = [MeshShape(data=num_devices // tensor, tensor=tensor) for tensor in (1, heads)]
    return [(trainer, rollout) for rollout in dict.fromkeys(rollouts)]


def _copy_of(num_bytes: int) -> Any:
    """A copy, on each device, of its share."""
    devices = jax.devices()
    share = max(1, num_bytes // len(devices) // 4)
    parts = [jnp.ones(share, jnp.float32, device=SingleDeviceSharding(d)) for d in devices]
    return lambda: [jnp.copy(part) for part in parts]
