# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""The bytes of a decode step by the accounting of the chip's own compiler, without the chip.

    uv run --extra=tpu-topology --extra=gpu-topology python -m benchmarks.decode_bytes [--only=TEXT]

Compiles one decode step of the engine, in which every slot reads a full context, and prints the
bytes that the compiled program accesses beside those of weights and live KV. For GPUs they are the
"bytes accessed" of XLA's cost analysis, which counts a write of a few tokens into a pool as if all
of the pool were read and written, which is done in place, and a kernel as nothing: the former are
taken away, and the pages that the kernel reads are added. The analysis of TPUs' compiler counts the
calls of a kernel once, whatever their number and heads: there they are those of the program's text
(hlo.py) without the kernel's, and the pages. It also counts loops, conditionals, and copies and
transpositions as large as a layer's keys or a matrix of width x width.
No slot truncates, so that the step has no branches for that (`SlotRules.truncates`).
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from benchmarks.compile import print_each
from benchmarks.hlo import bytes_accessed, read_program, runs, xla_analysis
from earl_jax.models.presets import preset_named, preset_vocab_size
from earl_jax.sharding.layout import MeshShape

PAGE, BURST = 128, 16
GB = 1e9


class Point(NamedTuple):
    """A decode step of `slots` full contexts on each row shard.

    `layers` are the first ones of the model, 0: all; `attention` is config.rollout.attention.
    """

    topology: str
    mesh: MeshShape
    slots: int
    context: int
    model: str = "qwen2.5-7b"
    layers: int = 0
    attention: Literal["auto", "blockwise"] = "auto"

    def __str__(self) -> str:
        model = f"{self.model}, {self.layers} layers" if self.layers else self.model
        if self.attention != "auto":
            model += f", {self.attention}"
        cells = (model, self.topology, str(self.mesh), f"{self.slots} x {self.context:,}")
        return " | ".join(cells)


POINTS = (
    Point("h100:1x1", MeshShape(), 128, 4096),
    Point("h200:1x1", MeshShape(), 256, 4096),
    Point("h200:1x1", MeshShape(), 64, 32768),
    Point("v5e:2x2", MeshShape(tensor=4), 32, 4096),
    Point("v6e:2x2", MeshShape(data=2, tensor=2), 32, 4096),
    # One block of blockwise attention, whose loop the analysis counts once.
    Point("h100:1x1", MeshShape(), 512, 1024, "deepseek-v2-lite", 2),
    Point("h100:1x1", MeshShape(), 512, 1024, "deepseek-v2-lite", 2, "blockwise"),
)


def measure(point: Point) -> dict[str, Any]:
    """Compiles the point's step and round in this process. Returns bytes and counts."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    from earl_jax.engine.config import EngineConfig, SlotRules
    from earl_jax.engine.decoding import decode_plain, nothing_sampled
    from earl_jax.engine.engine import Engine
    from earl_jax.sharding.layout import ROLLOUT_ROWS, make_layout
    from earl_jax.sharding.placing import placed_shapes
    from earl_jax.sharding.topology import make_topology

    topology = make_topology(point.topology)
    model = preset_named(point.model)
    if point.layers:
        model = dataclasses.replace(model, num_layers=point.layers)
    layout = make_layout(point.mesh, topology.devices(), row_axes=ROLLOUT_ROWS)
    slots = point.slots * layout.num_row_shards
    config = EngineConfig(
        model=model,
        vocab_size=preset_vocab_size(point.model),
        num_slots=slots,
        num_rows=slots,
        chunk_size=128,
        page_size=PAGE,
        rules=SlotRules(
            burst=BURST, end_of_turn_ids=(0,), truncates=False, attention=point.attention
        ),
        seed=0,
    )
    engine = Engine(config, layout)

    def step(decoder: Any, state: Any, inputs: Any, shard: Any) -> Any:
        sampled = nothing_sampled(len(state.cached), 1, model_logprobs=False)
        state, sampled = decode_plain(decoder, state, sampled, inputs[:, 0] > 0)
        return state, sampled.tokens

    if topology.chip.platform == "tpu":
        jax.config.update("jax_optimization_level", "O1")
    inputs = (
        placed_shapes(engine.parameter_shapes, engine.parameter_shardings),
        placed_shapes(engine.state_shapes(point.context), engine.state_shardings),
        jax.ShapeDtypeStruct((slots, 1), jnp.int32, sharding=engine.row_sharding),
        jax.ShapeDtypeStruct(engine.key_data.shape, engine.key_data.dtype),
    )
    # Kernels ask JAX's default device which chip they are for, on which nothing can be computed.
    with jax.default_device(layout.mesh.devices.flat[0]):
        program = jax.jit(engine.decoding_program(step, config.rules), donate_argnums=1)
        lowered = program.lower(*inputs)
        compiled = lowered.compile()
    text = compiled.as_text()
    sizes: dict[str, list[int]] = {}
    parsed = read_program(text)
    for each in parsed.instructions:
        sizes.setdefault(each.kind, []).append(each.num_bytes)
    # A row shard's devices have all weights between them.
    devices = point.mesh.tensor * point.mesh.context * point.mesh.expert
    # Latents are whole on each device of the tensor axis.
    cut = point.mesh.context * (1 if model.latent_size else point.mesh.tensor)
    kv = point.slots * point.context * model.num_layers * model.cached_size * 2 // cut
    leaves = jax.tree.leaves(engine.parameter_shapes)
    numbers = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    # Of the embedding a step reads a row a slot.
    embedding = math.prod(engine.parameter_shapes["embed"].shape) * 2
    keys = kv // model.num_layers // (1 if model.latent_size else 2)
    if topology.chip.platform == "gpu":
        in_place = [size for size in sizes.get("scatter", []) if size >= keys]
        accessed = xla_analysis(compiled, "gpu")["bytes accessed"]
        accessed += kv * ("paged_attention" in text) - 2 * sum(in_place)
    else:
        accessed = kv + sum(
            run.times * bytes_accessed(parsed, run)
            for run in runs(parsed)
            if "tpu_custom_call" not in run.instruction.attributes
        )
    least = min(keys, model.width * model.width * 2 // devices)
    return {
        "accessed": accessed,
        "weights": (sum(numbers) - embedding) // devices,
        "kv": kv,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "loops": len(sizes.get("while", [])),
        "conditionals": len(sizes.get("conditional", [])),
        "copies": sum(
            size >= least for kind in ("copy", "transpose") for size in sizes.get(kind, [])
        ),
    }


def main() -> None:
    """Compiles the points one after the other and prints the table."""
    header = "| model | topology | mesh | slots | weights, GB | live KV, GB | accessed, GB |"
    header += " accessed / both | temporaries, GB | loops | conditionals | large copies |"
    print_each("benchmarks.decode_bytes", __doc__ or "", header, POINTS, measure, _cells)


def _cells(found: dict[str, Any]) -> list[str]:
    both = found["weights"] + found["kv"]
    sizes = [found["weights"], found["kv"], found["accessed"]]
    cells = [f"{number / GB:.2f}" for number in sizes] + [f"{found['accessed'] / both:.2f}"]
    cells.append(f"{found['temporaries'] / GB:.2f}")
    return [*cells, *(str(found[name]) for name in ("loops", "conditionals", "copies"))]


if __name__ == "__main__":
    main()
