# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Publishing weights as the compilers of chips that are not here make it: who sends how much.

The program that a run publishes with (`weights.program_of`): the trainer's stacked fp32 to the
engine's bf16, layer by layer, over the same devices. Its collectives are read from the compiled
text, beside the fewest bytes that can do, which are the plan's.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks.dispatch.publishing import cut_model
from benchmarks.dispatch.traffic import collectives
from earl_jax.dispatch.plan import plan_dispatch
from earl_jax.dispatch.weights import program_of
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import parameter_shapes, parameter_shardings, parameter_specs
from earl_jax.models.quantization import engine_shapes, engine_specs
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from earl_jax.sharding.topology import make_topology, missing_compiler

# One of each family.
MODELS = (
    "qwen2.5-7b",
    "qwen3-8b",
    "llama3.1-8b",
    "mistral-7b",
    "gemma3-12b",
    "qwen3-30b-a3b",
)
TOPOLOGIES = ("v5p:2x2x4", "h100:2x8")


def measure(
    presets: Sequence[str], topologies: Sequence[str], cut: int
) -> Iterator[dict[str, Any]]:
    """A row for each topology, model and trainer's mesh."""
    for name in topologies:
        topology = make_topology(name)
        if missing := missing_compiler(topology):
            print(f"{missing}; left out", file=sys.stderr)
            continue
        devices = topology.devices()
        for preset in presets:
            model, vocab_size = cut_model(preset, cut)
            for trainer, rollout in meshes(model, len(devices)):
                source = make_layout(trainer, devices, row_axes=TRAINING_ROWS)
                found = compiled_publish(model, vocab_size, source, make_layout(rollout, devices))
                yield {
                    "model": preset,
                    "layers": model.num_layers,
                    "topology": name,
                    "trainer": str(trainer),
                    "rollout": str(rollout),
                    **found,
                }


def meshes(model: ModelConfig, num: int) -> list[tuple[MeshShape, MeshShape]]:
    """Trainers cut over fsdp alone, and over what the rollout is cut over too.

    Rollouts are cut over experts or heads, in four where the heads can be.
    """
    if model.num_experts:
        cut, axis = math.gcd(num, 4), "expert"
    else:
        cut, axis = math.gcd(num, model.num_kv_heads, 4), "tensor"
    rollout = MeshShape(data=num // cut, **{axis: cut})
    same = MeshShape(fsdp=num // cut, **{axis: cut})
    return [(trainer, rollout) for trainer in dict.fromkeys((MeshShape(fsdp=num), same))]


def compiled_publish(
    model: ModelConfig, vocab_size: int, source: Layout, target: Layout
) -> dict[str, Any]:
    """What the program sends, and what it must."""
    specs = parameter_specs(model, vocab_size)
    wanted = engine_specs(model, vocab_size, "compute")
    shapes, max_tokens = engine_shapes(wanted, "bfloat16"), parameter_shardings(wanted, target)
    params = _placed(parameter_shapes(specs), parameter_shardings(specs, source))
    compiled = program_of(params, shapes, max_tokens).lower(params).compile()
    num = source.shape.num_devices
    found = collectives(compiled.as_text(), num)
    received = sum(each.received_bytes for each in found)
    plan = plan_dispatch(_placed(shapes, parameter_shardings(wanted, source)), max_tokens)
    kinds = Counter(each.kind for each in found)
    return {
        "collectives": ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none",
        "received GB": received / 1e9,
        "the plan's GB": plan.moved_bytes / 1e9,
        "times the plan's": received / plan.moved_bytes if plan.moved_bytes else None,
        "a device's GB": received / num / 1e9,
        "temporaries a device GB": compiled.memory_analysis().temp_size_in_bytes / 1e9,
    }


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        shapes,
        shardings,
    )
