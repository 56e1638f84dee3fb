# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""XLA's bytes per device for real models on chips that are not here: the XLA column of plan.md.

    uv run --python=3.12 --extra=tpu-topology --extra=gpu-topology --extra=tokamax \
        python -m benchmarks.compile [--only=TEXT]

Compiles updates (policy gradient, AdamW, fp32 masters, bf16 compute) and rounds of the engine (a
chunk of a prompt, then a burst of decode steps) by the chip's own compiler, from shapes alone. The
programs are the rows of plan.md; each is compiled in a process of its own. `--only` takes those
whose row contains TEXT.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.plan import BURST, GIB, PAGE, VOCAB_SIZES, Point, compiled_points
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.models.config import ModelConfig
from earl_jax.models.presets import PRESETS


def lower(point: Point, layout: Any) -> tuple[Any, str]:
    """Returns the program, lowered, and the name of its attention."""
    return (_lower_update if point.is_update else _lower_round)(point, layout)


def config_of(point: Point) -> ModelConfig:
    """Returns the model, computing in bf16."""
    return dataclasses.replace(PRESETS[point.model], compute_dtype="bfloat16")


def vocab_size(point: Point) -> int:
    """Returns the entries of the model's embedding."""
    return VOCAB_SIZES[point.model.split("-")[0]]


def _lower_update(point: Point, layout: Any) -> tuple[Any, str]:
    import jax
    import jax.numpy as jnp

    from earl_jax.models.attention.kernels import choose_kernel
    from earl_jax.sharding.placing import placed_shapes
    from earl_jax.train import state as train_state
    from earl_jax.train import step as train_step
    from earl_jax.train.config import TrainConfig
    from earl_jax.train.update import Update

    attention = "triton" if "triton" in point.program else "auto"
    config = TrainConfig(remat=point.remat, micro_batches=point.micro_batches, attention=attention)
    update = Update(
        config_of(point),
        config,
        layout,
        vocab_size=vocab_size(point),
        temperature=1.0,
        algorithm=ALGORITHMS["reinforce"],
    )
    step = train_step.make_train_step(update)
    state = placed_shapes(
        train_state.state_shapes(config_of(point), config, vocab_size(point)),
        train_state.state_shardings(config_of(point), config, vocab_size(point), layout),
    )
    batch = train_step.batch_shapes(point.rows * layout.num_row_shards, point.length, layout)
    # Kernels ask JAX's default device which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):
        kernel = choose_kernel(config.attention, layout, config_of(point), point.length).kernel
        return step.lower(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32)), kernel


def _lower_round(point: Point, layout: Any) -> tuple[Any, str]:
    import jax

    from earl_jax.engine.config import EngineConfig, SlotRules
    from earl_jax.engine.engine import Engine
    from earl_jax.models.attention.kernels import choose_pages_kernel

    slots = point.rows * layout.num_row_shards
    config = EngineConfig(
        model=config_of(point),
        vocab_size=vocab_size(point),
        weight_dtype=point.weight_dtype,
        num_slots=slots,
        num_rows=slots,
        chunk_size=point.chunk,
        page_size=PAGE,
        rules=SlotRules(burst=BURST, end_of_turn_ids=(0,)),
        seed=0,
    )
    kernel = choose_pages_kernel("auto", layout, config.model, PAGE).kernel
    engine = Engine(config, layout)
    # Kernels ask JAX's default device which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):
        return engine.lower_play(point.length), f"pages, {kernel}"


COLLECTIVE = re.compile(
    r"= .*?\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def measure(point: Point) -> dict[str, Any]:
    """Compiles the program in this process, and reads what its compiler says."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from earl_jax.selector.memory import program_bytes
    from earl_jax.sharding.layout import ROLLOUT_ROWS, TRAINING_ROWS, make_layout
    from earl_jax.sharding.topology import make_topology

    topology = make_topology(point.topology)
    row_axes = TRAINING_ROWS if point.is_update else ROLLOUT_ROWS
    layout = make_layout(point.mesh, topology.devices(), row_axes=row_axes)
    start = time.perf_counter()
    lowered, kernel = lower(point, layout)
    if topology.chip.platform == "tpu" and not point.is_update:
        # At full effort a TPU compiler takes 15 s and more for each layer of an unrolled program.
        # With the least it took a tenth, and 1.47 GiB where it had taken 1.45 (2 layers, v5e).
        jax.config.update("jax_optimization_level", "O1")
    compiled = lowered.compile()
    return {
        "program": program_bytes(compiled),
        "hbm": topology.chip.hbm_bytes,
        "kernel": kernel,
        "collectives": Counter(COLLECTIVE.findall(compiled.as_text())),
        "compile_s": time.perf_counter() - start,
    }


def main() -> None:
    """Compiles the programs one after the other and prints the table."""
    header = "| model | topology | program | mesh | rows | XLA, GiB | of HBM | attention |"
    header += " collectives | compiled in |"
    print_each("benchmarks.compile", __doc__ or "", header, [*compiled_points()], measure, _cells)


def print_each(
    module: str,
    doc: str,
    header: str,
    points: Sequence[Any],
    measure: Callable[[Any], dict[str, Any]],
    cells: Callable[[dict[str, Any]], Sequence[str]],
) -> None:
    """Prints a table with a row for each point, measured in a process of `module` of its own.

    This is the whole command of that module: `--only` takes the points whose row contains a text.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose row contains this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        point = next(point for point in points if str(point) == flags.measure)
        print(json.dumps(measure(point)))
        return
    print(header)
    print("|---" * (header.count("|") - 1) + "|")
    for point in points:
        if flags.only not in str(point):
            continue
        command = [sys.executable, "-m", module, f"--measure={point}"]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stderr.splitlines() if "Error" in line or "Ran out" in line]
        row = [(lines or ["failed"])[-1][:200]]
        if not done.returncode:
            row = list(cells(json.loads(done.stdout.splitlines()[-1])))
        print(f"| {point} | {' | '.join(row)} |", flush=True)


def _cells(found: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(found["collectives"].items()))
    bytes_gib, share = found["program"] / GIB, found["program"] / found["hbm"]
    return [
        f"{bytes_gib:.2f}",
        f"{share:.0%}",
        found["kernel"],
        kinds,
        f"{found['compile_s']:.0f} s",
    ]


if __name__ == "__main__":
    main()
