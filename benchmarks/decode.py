# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding and prefill at real sizes, against what the chip's memory and matrix units can do.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.92 uv run python benchmarks/decode.py [--only=TEXT]
    uv run --python=3.12 --all-extras python benchmarks/decode.py --topology=h100:1x1
    uv run python benchmarks/decode.py --tiny

On the chip of this machine: each cell's prompts are read by the engine's rounds, and bursts are
decoded behind them, with random weights in bf16. Beside them the rate at which the chip copies an
array and that of one large matrix product. With --topology the same rounds are compiled for a chip
that is not here: bytes by its compiler, and the least time that its data sheet allows. --tiny shows
that the script runs, on any machine.

The bytes of a step are computed: the weights that a token passes (of an embedding of its own some
rows only, which are left out), and the keys and values of all slots' contexts. The compilers' own
count ("bytes accessed") is no help: it takes the body of a loop once, however often it runs, and
attention goes over pages in a loop. Each cell is a process of its own; prints a Markdown table.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from earl_jax.models.config import ModelConfig
from earl_jax.models.presets import PRESETS

GIB, GB = 2**30, 1e9
BURST, PAGE_SIZE, REPEATS = 16, 128, 3
# Prompts are read so many at a time.
PREFILL_ROWS = 8
TINY = ModelConfig(num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_size=16, ffn_size=128)
# Entries of the published embeddings.
VOCAB_SIZES = {"tiny": 512, "llama3.2-1b": 128_256, "qwen2.5-7b": 152_064}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """`batch` slots, each `context` tokens long, of which `chunk` are read in a round."""

    model: str
    batch: int
    context: int
    chunk: int = 512

    @property
    def config(self) -> ModelConfig:
        """The model, computing in bf16."""
        model = TINY if self.model == "tiny" else PRESETS[self.model]
        return dataclasses.replace(model, compute_dtype="bfloat16")

    @property
    def vocab_size(self) -> int:
        """Entries of its embedding."""
        return VOCAB_SIZES[self.model]

    @property
    def max_tokens(self) -> int:
        """Room for the context, and for all bursts that are decoded behind it."""
        return self.context + BURST * (1 + REPEATS)

    def __str__(self) -> str:
        return f"{self.model} | {self.batch} | {self.context:,}"


CELLS = tuple(
    Cell(model=model, batch=batch, context=context)
    for model in ("llama3.2-1b", "qwen2.5-7b")
    for batch in (8, 32, 128)
    for context in (1024, 4096, 8192, 32_768)
)
TINY_CELLS = (
    Cell(model="tiny", batch=2, context=64, chunk=32),
    Cell(model="tiny", batch=10, context=32, chunk=32),
)


def make_engine(cell: Cell, layout: Any) -> Any:
    """The engine that plays the cell."""
    from earl_jax.engine.config import EngineConfig, SlotRules
    from earl_jax.engine.engine import Engine

    config = EngineConfig(
        model=cell.config,
        vocab_size=cell.vocab_size,
        num_slots=cell.batch,
        num_rows=cell.batch,
        chunk_size=cell.chunk,
        rules=SlotRules(burst=BURST, end_of_turn_ids=(), append_rows=PREFILL_ROWS),
        seed=0,
        page_size=PAGE_SIZE,
    )
    return Engine(config, layout)


def step_bytes(cell: Cell, engine: Any) -> tuple[int, int]:
    """Bytes that a device reads in a decode step: weights, and keys and values."""
    import jax

    from earl_jax.models.kv_cache import cache_bytes

    shapes = dict(engine.parameter_shapes)
    if "head" in shapes:
        del shapes["embed"]
    shardings = {name: engine.parameter_shardings[name] for name in shapes}
    weights = jax.tree.map(
        lambda leaf, where: int(leaf.dtype.itemsize * _product(where.shard_shape(leaf.shape))),
        shapes,
        shardings,
    )
    # The context grows by a burst meanwhile.
    context = cell.context + BURST // 2
    cache = cache_bytes(cell.config, cell.batch, context, page_size=1)
    return sum(jax.tree.leaves(weights)), cache // engine.layout.shape.tensor


def prompt_flops(cell: Cell) -> float:
    """Of reading a prompt as long as the context: matrices, and what attention looks at."""
    model, tokens = cell.config, cell.context
    heads = model.num_heads * model.head_size
    projections = 2 * model.width * (heads + model.num_kv_heads * model.head_size)
    matrices = projections + 3 * model.width * model.ffn_size
    attention = 2 * 2 * heads * tokens / 2
    return model.num_layers * tokens * (2.0 * matrices + attention)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


# On a chip that is here.


def best_seconds(run: Callable[[], Any]) -> float:
    """The fastest of some runs, each of which waits for its result; one before is not timed."""
    run()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def copy_rate(num_bytes: int) -> float:
    """Bytes per second, read and written, of adding one to each number of an array."""
    import jax
    import jax.numpy as jnp

    array = jnp.zeros(num_bytes // 2, jnp.bfloat16)
    add = jax.jit(lambda array: array + 1)
    return 2 * num_bytes / best_seconds(lambda: add(array).block_until_ready())


def matrix_rate(size: int) -> float:
    """Operations per second of the product of two square matrices in bf16."""
    import jax
    import jax.numpy as jnp

    left = jnp.ones((size, size), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return 2.0 * size**3 / best_seconds(lambda: multiply(left, left).block_until_ready())


def measure(cell: Cell) -> dict[str, Any]:
    """Plays the cell on this machine's first device."""
    import jax
    import numpy as np

    from earl_jax.sharding.layout import MeshShape, make_layout

    tiny = cell.model == "tiny"
    found = {
        "copy": copy_rate(2**20 if tiny else 2 * GIB),
        "matrices": matrix_rate(256 if tiny else 8192),
    }
    engine = make_engine(cell, make_layout(MeshShape(), jax.devices()[:1]))
    weights, cache = step_bytes(cell, engine)
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if room and weights + cache > 0.95 * room:
        return found | {"needs": weights + cache, "room": room}
    params = _random_weights(engine)
    state = engine.empty_state(cell.max_tokens)
    # Once to compile, once for the clock: the second reads over what the first has written.
    for _ in range(2):
        start = time.perf_counter()
        for inputs in _prompts(cell):
            state, _ = engine.play(params, state, inputs)
        found["prefill_s"] = time.perf_counter() - start
    nothing = _inputs(cell, np.zeros(cell.batch, np.int32))
    bursts = []
    for _ in range(1 + REPEATS):
        state = _all_speaking(state, cell)
        start = time.perf_counter()
        state, report = engine.play(params, state, nothing)
        bursts.append(time.perf_counter() - start)
        assert report.count.tolist() == [BURST] * cell.batch
    found["step_s"] = min(bursts[1:]) / BURST
    return found | {"weights": weights, "cache": cache, "device": jax.devices()[0].device_kind}


def _random_weights(engine: Any) -> Any:
    import jax

    shapes, tree = jax.tree.flatten(engine.parameter_shapes)

    def draw(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        pairs = zip(keys, shapes, strict=True)
        return tree.unflatten([jax.random.normal(k, s.shape, s.dtype) / 50 for k, s in pairs])

    return jax.jit(draw, out_shardings=engine.parameter_shardings)(jax.random.key(0))


def _inputs(cell: Cell, count: Any, restart: Any = 0) -> Any:
    import numpy as np

    from earl_jax.engine.config import Sampling
    from earl_jax.engine.round_inputs import RoundInputs
    from earl_jax.engine.sampling import sampling_rows

    slots = np.arange(cell.batch, dtype=np.int32)
    rng = np.random.default_rng(0)
    return RoundInputs(
        chunk=rng.integers(0, cell.vocab_size, (cell.batch, cell.chunk)).astype(np.int32),
        count=count,
        restart=restart * np.ones_like(slots),
        begin_turn=np.zeros_like(slots),
        seed=slots,
        row=slots,
        sampling=sampling_rows(Sampling(), cell.batch),
        version=0,
    )


def _prompts(cell: Cell) -> list[Any]:
    """Rounds in which the first slots read a prompt as long as the context."""
    import numpy as np

    reads = np.arange(cell.batch) < PREFILL_ROWS
    lengths = [min(cell.chunk, cell.context - at) for at in range(0, cell.context, cell.chunk)]
    return [
        _inputs(cell, np.int32(length * reads), restart=int(index == 0))
        for index, length in enumerate(lengths)
    ]


def _all_speaking(state: Any, cell: Cell) -> Any:
    """Every slot in the middle of a turn, behind a context of this length."""
    import jax.numpy as jnp

    return dataclasses.replace(
        state,
        active=jnp.ones_like(state.active),
        cached=jnp.full_like(state.cached, cell.context),
    )


# For a chip that is not here.


def compile_cell(cell: Cell, name: str, tensor: int) -> dict[str, Any]:
    """Compiles the cell's round, and reads what its compiler says."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from earl_jax.selector.memory import program_bytes
    from earl_jax.sharding.layout import MeshShape, make_layout
    from earl_jax.sharding.topology import make_topology

    topology = make_topology(name)
    layout = make_layout(MeshShape(tensor=tensor), topology.devices())
    engine = make_engine(cell, layout)
    weights, cache = step_bytes(cell, engine)
    found = {"weights": weights, "cache": cache, "hbm": topology.chip.hbm_bytes}
    found |= {"rate": topology.chip.hbm_bytes_per_s}
    if weights + cache > topology.chip.hbm_bytes:
        return found | {"needs": weights + cache, "room": topology.chip.hbm_bytes}
    start = time.perf_counter()
    lowered = engine.lower_play(cell.max_tokens)
    if topology.chip.platform == "tpu":
        # See benchmarks/compile.py.
        jax.config.update("jax_optimization_level", "O1")
    compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    return found | {
        "arguments": analysis.argument_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "program": program_bytes(compiled),
        "compile_s": time.perf_counter() - start,
    }


# The tables.


def _measured(cell: Cell, found: dict[str, Any]) -> list[str]:
    step_s, step = found["step_s"], found["weights"] + found["cache"]
    rows = min(cell.batch, PREFILL_ROWS)
    flops_per_s = rows * prompt_flops(cell) / found["prefill_s"]
    return [
        f"{1000 * step_s:.2f}",
        f"{cell.batch / step_s:,.0f}",
        f"{step / GB:.2f}",
        f"{step / step_s / GB:,.0f}",
        f"{step / step_s / found['copy']:.0%}",
        f"{rows * cell.context / found['prefill_s']:,.0f}",
        f"{flops_per_s / 1e12:,.1f}",
        f"{flops_per_s / found['matrices']:.0%}",
    ]


def _compiled(cell: Cell, found: dict[str, Any]) -> list[str]:
    step = found["weights"] + found["cache"]
    sizes = [found[key] / GIB for key in ("arguments", "temporaries", "program")]
    return [
        *(f"{size:.2f}" for size in sizes),
        f"{found['program'] / found['hbm']:.0%}",
        f"{found['weights'] / GB:.2f}",
        f"{found['cache'] / GB:.2f}",
        f"{1000 * step / found['rate']:.2f}",
        f"{cell.batch * found['rate'] / step:,.0f}",
        f"{found['compile_s']:.0f} s",
    ]


MEASURED = ("ms a step", "tokens/s", "GB a step", "GB/s", "of the copy rate")
MEASURED += ("prefill tokens/s", "prefill TFLOP/s", "of the matrix rate")
COMPILED = ("arguments, GiB", "temporaries, GiB", "together, GiB", "of HBM", "GB of weights a step")
COMPILED += ("GB of cache a step", "ms a step at least", "tokens/s at most", "compiled in")


def main() -> None:
    """Plays or compiles the cells one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose row contains this")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that it runs")
    parser.add_argument("--topology", help="a chip that is not here, such as h100:1x1 or v5e:2x2")
    parser.add_argument(
        "--tensor", type=int, default=1, help="chips of it that share the heads (%(default)s)"
    )
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.cell:
        cell = Cell(**flags.cell)
        found = (
            compile_cell(cell, flags.topology, flags.tensor) if flags.topology else measure(cell)
        )
        return print(json.dumps(found))
    columns = COMPILED if flags.topology else MEASURED
    print(f"| model | batch | context | {' | '.join(columns)} |")
    print("|---" * (3 + len(columns)) + "|")
    rates: dict[str, Any] = {}
    for cell in TINY_CELLS if flags.tiny else CELLS:
        if flags.only in str(cell):
            found = _ask(cell, flags)
            row = _row(cell, found, _compiled if flags.topology else _measured, len(columns))
            print(f"| {cell} | {row} |", flush=True)
            rates |= {key: found[key] for key in ("copy", "matrices", "device") if key in found}
    if rates:
        print(
            f"\n{rates.get('device', 'a device')}: copies {rates['copy'] / GB:,.0f} GB/s (read and "
            f"written), multiplies {rates['matrices'] / 1e12:,.1f} TFLOP/s in bf16."
        )


def _ask(cell: Cell, flags: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own finds; `failed` where it ended without a word."""
    words = [f"--cell={json.dumps(dataclasses.asdict(cell))}", f"--tensor={flags.tensor}"]
    words += [f"--topology={flags.topology}"] if flags.topology else []
    done = subprocess.run(
        [sys.executable, __file__, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line or "Ran out" in line]
        return {"failed": (lines or ["failed"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def _row(
    cell: Cell,
    found: dict[str, Any],
    columns: Callable[[Cell, dict[str, Any]], list[str]],
    width: int,
) -> str:
    if "failed" in found:
        cells = [found["failed"]]
    elif "needs" in found:
        cells = [f"{found['needs'] / GIB:.1f} GiB do not fit in {found['room'] / GIB:.1f}"]
    else:
        cells = columns(cell, found)
    return " | ".join([*cells, *[""] * (width - len(cells))])


if __name__ == "__main__":
    main()
