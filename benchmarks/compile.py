# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Real models compiled for chips that are not here: bytes per device, by the chip's own compiler.

    uv run --python=3.12 --all-extras python benchmarks/compile.py [--only=TEXT]

Training steps (policy gradient, AdamW, fp32 masters, bf16 compute, remat) and rounds of the engine
(a chunk appended, then a burst decoded). From shapes alone: no weight exists at any time. Each case
is a process of its own; prints a Markdown table. `--only` takes the cases whose row contains TEXT.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from earl_jax.models.config import ModelConfig
from earl_jax.models.presets import PRESETS

GIB = 2**30

# Entries of the published embeddings, by family.
VOCAB_SIZES = {"qwen2.5": 152_064, "qwen3": 151_936, "llama3.1": 128_256, "mistral": 32_768}
VOCAB_SIZES |= {"llama3.2": 128_256, "gemma3": 262_144}
CHUNK, BURST, PAGE = 128, 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is compiled: `rows` of `length` tokens a device group that holds whole rows.

    In training `rows` are those of one update and row shard, in as many micro-batches where
    `micro_batches` is 0; in a rollout they are slots with room for `length` tokens, and `chunk`
    tokens of a prompt are read at a time, of eight slots. `weight_dtype` is the engine's.
    """

    model: str
    topology: str
    mesh: str
    stage: Literal["train", "rollout"]
    rows: int
    length: int
    weight_dtype: Literal["compute", "int8"] = "compute"
    chunk: int = CHUNK
    micro_batches: int = 0
    remat: bool = True

    @property
    def config(self) -> ModelConfig:
        """The model, computing in bf16."""
        return dataclasses.replace(PRESETS[self.model], compute_dtype="bfloat16")

    @property
    def vocab_size(self) -> int:
        """Entries of its embedding."""
        return VOCAB_SIZES[self.model.split("-")[0]]

    def __str__(self) -> str:
        what = "update" if self.stage == "train" else "round"
        what += ", int8 weights" if self.weight_dtype == "int8" else ""
        if self.micro_batches:
            what += f", {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        what += "" if self.remat else ", no remat"
        what += f", chunks of {self.chunk:,}" if self.chunk != CHUNK else ""
        return (
            f"{self.model} | {self.topology} | {what} | {self.mesh} | {self.rows} x {self.length:,}"
        )


def _cases(model: str, topology: str, train: str, rollout: str) -> tuple[Case, Case]:
    return (
        Case(model=model, topology=topology, mesh=train, stage="train", rows=4, length=4096),
        Case(model=model, topology=topology, mesh=rollout, stage="rollout", rows=32, length=8192),
    )


CASES = (
    *_cases("qwen2.5-7b", "v5e:4x4", "fsdp=4,tensor=4", "data=4,tensor=4"),
    *_cases("qwen2.5-7b", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("qwen2.5-72b", "v5p:4x4x4", "fsdp=16,tensor=4", "data=16,tensor=4"),
    *_cases("qwen2.5-72b", "h100:16x8", "fsdp=16,tensor=8", "data=16,tensor=8"),
    *_cases("qwen3-30b-a3b", "v5p:2x2x4", "fsdp=4,expert=4", "data=4,expert=4"),
    *_cases("qwen3-30b-a3b", "h100:2x8", "fsdp=4,expert=4", "data=4,expert=4"),
    *_cases("qwen3-8b", "v5e:4x4", "fsdp=4,tensor=4", "data=2,tensor=8"),
    *_cases("qwen3-8b", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("llama3.1-8b", "v6e:4x4", "fsdp=16", "data=8,tensor=2"),
    *_cases("llama3.1-8b", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("mistral-7b", "v6e:4x4", "fsdp=16", "data=8,tensor=2"),
    *_cases("mistral-7b", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("gemma3-12b", "v5p:2x2x4", "fsdp=8,tensor=2", "data=8,tensor=2"),
    *_cases("gemma3-12b", "h100:2x8", "fsdp=16", "data=8,tensor=2"),
)

# Beside the same rounds in bf16.
CASES += tuple(
    dataclasses.replace(case, weight_dtype="int8")
    for case in CASES
    if case.stage == "rollout" and case.model in ("qwen2.5-7b", "qwen3-30b-a3b")
)


def lower(case: Case, layout: Any) -> tuple[Any, str]:
    """The case's program, lowered, and the name of its attention."""
    return {"train": _lower_update, "rollout": _lower_round}[case.stage](case, layout)


def _lower_update(case: Case, layout: Any) -> tuple[Any, str]:
    import jax
    import jax.numpy as jnp

    from earl_jax.models.attention.kernels import choose_kernel
    from earl_jax.train import step as train_step
    from earl_jax.train.config import TrainConfig

    config = TrainConfig(remat=case.remat, micro_batches=case.micro_batches or case.rows)
    step = train_step.make_train_step(
        case.config,
        config,
        layout,
        vocab_size=case.vocab_size,
        temperature=1.0,
        objective="policy_gradient",
    )
    state = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        train_step.state_shapes(case.config, config, case.vocab_size),
        train_step.state_shardings(case.config, config, case.vocab_size, layout),
    )
    batch = train_step.batch_shapes(case.rows * layout.num_row_shards, case.length, layout)
    # Kernels ask JAX's default device which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):
        kernel = choose_kernel(config.attention, layout, case.config, case.length).kernel
        return step.lower(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32)), kernel


def _lower_round(case: Case, layout: Any) -> tuple[Any, str]:
    from earl_jax.engine.config import EngineConfig, SlotRules
    from earl_jax.engine.engine import Engine

    slots = case.rows * layout.num_row_shards
    config = EngineConfig(
        model=case.config,
        vocab_size=case.vocab_size,
        weight_dtype=case.weight_dtype,
        num_slots=slots,
        num_rows=slots,
        chunk_size=case.chunk,
        page_size=PAGE,
        rules=SlotRules(burst=BURST, end_of_turn_ids=(0,)),
        seed=0,
    )
    return Engine(config, layout).lower_play(case.length), "pages"


COLLECTIVE = re.compile(
    r"= .*?\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def measure(case: Case) -> dict[str, Any]:
    """Compiles the case in this process, and reads what its compiler says."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from earl_jax.selector.memory import program_bytes
    from earl_jax.sharding.layout import ROLLOUT_ROWS, TRAINING_ROWS, MeshShape, make_layout
    from earl_jax.sharding.topology import make_topology

    topology = make_topology(case.topology)
    row_axes = {"train": TRAINING_ROWS, "rollout": ROLLOUT_ROWS}[case.stage]
    layout = make_layout(MeshShape.parse(case.mesh), topology.devices(), row_axes=row_axes)
    start = time.perf_counter()
    lowered, kernel = lower(case, layout)
    lowered_s = time.perf_counter() - start
    if topology.chip.platform == "tpu" and case.stage == "rollout":
        # At full effort a TPU compiler takes 15 s and more for each layer of an unrolled program.
        # With the least it took a tenth, and 1.47 GiB where it had taken 1.45 (2 layers, v5e).
        jax.config.update("jax_optimization_level", "O1")
    compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "program": program_bytes(compiled),
        "hbm": topology.chip.hbm_bytes,
        "kernel": kernel,
        "collectives": Counter(COLLECTIVE.findall(compiled.as_text())),
        "lower_s": lowered_s,
        "compile_s": time.perf_counter() - start - lowered_s,
    }


def main() -> None:
    """Compiles the cases one after the other and prints the table."""
    print_table(CASES, [sys.executable, __file__], __doc__)


def print_table(cases: Sequence[Case], command: list[str], words: str | None) -> None:
    """The table of these cases, each compiled in a process of its own by this same command."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--only", default="", help="cases whose row contains this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        case = next(case for case in cases if str(case) == flags.measure)
        print(json.dumps(measure(case)))
        return
    print("| model | topology | program | mesh | rows | attention | arguments | results |", end="")
    print(" temporaries | together | of HBM | collectives | compiled in |")
    print("|---" * 13 + "|")
    for case in cases:
        if flags.only in str(case):
            print(f"| {case} | {_row(case, command)} |", flush=True)


def _row(case: Case, command: list[str]) -> str:
    done = subprocess.run([*command, f"--measure={case}"], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line or "Ran out" in line]
        return f"{(lines or ['failed'])[-1][:200]} |" + " |" * 6
    found = json.loads(done.stdout.splitlines()[-1])
    columns = [found["kernel"]]
    columns += [
        f"{found[key] / GIB:.2f}" for key in ("arguments", "results", "temporaries", "program")
    ]
    columns.append(f"{found['program'] / found['hbm']:.0%}")
    columns.append(", ".join(f"{n} {kind}" for kind, n in sorted(found["collectives"].items())))
    columns.append(f"{found['compile_s']:.0f} s")
    return " | ".join(columns)


if __name__ == "__main__":
    main()
