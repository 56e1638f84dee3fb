# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Real models compiled for chips that are not here: bytes per device, by the chip's own compiler.

    uv run --extra tpu-topology --extra gpu-topology python benchmarks/compile.py [--only=TEXT]

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
from typing import Any, Literal

from earl_jax.models.config import ModelConfig, RopeScaling

GIB = 2**30

_QWEN25 = ModelConfig(head_size=128, rope_theta=1e6, attention_bias=True, compute_dtype="bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model as published, and the entries of its embedding."""

    model: ModelConfig
    vocab_size: int


MODELS = {
    "Qwen2.5-7B": Sizes(
        model=dataclasses.replace(
            _QWEN25, num_layers=28, width=3584, num_heads=28, num_kv_heads=4, ffn_size=18944
        ),
        vocab_size=152064,
    ),
    "Qwen2.5-72B": Sizes(
        model=dataclasses.replace(
            _QWEN25, num_layers=80, width=8192, num_heads=64, num_kv_heads=8, ffn_size=29568
        ),
        vocab_size=152064,
    ),
    "Qwen3-8B": Sizes(
        model=ModelConfig(
            num_layers=36,
            width=4096,
            num_heads=32,
            num_kv_heads=8,
            head_size=128,
            ffn_size=12288,
            rope_theta=1e6,
            query_key_norm=True,
            compute_dtype="bfloat16",
        ),
        vocab_size=151936,
    ),
    "Llama-3.1-8B": Sizes(
        model=ModelConfig(
            num_layers=32,
            width=4096,
            num_heads=32,
            num_kv_heads=8,
            head_size=128,
            ffn_size=14336,
            rope_theta=5e5,
            rope_scaling=RopeScaling(factor=8.0),
            norm_eps=1e-5,
            compute_dtype="bfloat16",
        ),
        vocab_size=128256,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is compiled: `rows` of `length` tokens a device group that holds whole rows.

    In training `rows` are those of one update and row shard, in as many micro-batches; in a rollout
    they are slots with room for `length` tokens.
    """

    model: str
    topology: str
    mesh: str
    stage: Literal["train", "rollout"]
    rows: int
    length: int

    def __str__(self) -> str:
        what = "update" if self.stage == "train" else "round"
        return (
            f"{self.model} | {self.topology} | {what} | {self.mesh} | {self.rows} x {self.length:,}"
        )


def _cases(model: str, topology: str, train: str, rollout: str) -> tuple[Case, Case]:
    return (
        Case(model=model, topology=topology, mesh=train, stage="train", rows=4, length=4096),
        Case(model=model, topology=topology, mesh=rollout, stage="rollout", rows=32, length=8192),
    )


CASES = (
    *_cases("Qwen2.5-7B", "v5e:4x4", "fsdp=4,tensor=4", "data=4,tensor=4"),
    *_cases("Qwen2.5-7B", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("Qwen3-8B", "v5e:4x4", "fsdp=4,tensor=4", "data=2,tensor=8"),
    *_cases("Qwen3-8B", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("Llama-3.1-8B", "v6e:4x4", "fsdp=16", "data=8,tensor=2"),
    *_cases("Llama-3.1-8B", "h100:1x8", "fsdp=8", "data=4,tensor=2"),
    *_cases("Qwen2.5-72B", "v5p:4x4x4", "fsdp=16,tensor=4", "data=16,tensor=4"),
    *_cases("Qwen2.5-72B", "h100:16x8", "fsdp=16,tensor=8", "data=16,tensor=8"),
)

CHUNK, BURST = 128, 16


def lower(case: Case, layout: Any) -> Any:
    """The case's program, lowered."""
    return {"train": _lower_update, "rollout": _lower_round}[case.stage](case, layout)


def _lower_update(case: Case, layout: Any) -> Any:
    import jax
    import jax.numpy as jnp

    from earl_jax.train import step as train_step
    from earl_jax.train.config import TrainConfig

    sizes = MODELS[case.model]
    config = TrainConfig(remat=True, micro_batches=case.rows)
    step = train_step.make_train_step(
        sizes.model,
        config,
        layout,
        vocab_size=sizes.vocab_size,
        temperature=1.0,
        objective="policy_gradient",
    )
    state = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        train_step.state_shapes(sizes.model, config, sizes.vocab_size),
        train_step.state_shardings(sizes.model, config, sizes.vocab_size, layout),
    )
    batch = train_step.batch_shapes(case.rows * layout.num_row_shards, case.length, layout)
    return step.lower(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32))


def _lower_round(case: Case, layout: Any) -> Any:
    from earl_jax.rollout.engine import EngineConfig, PolicyEngine
    from earl_jax.rollout.slots import SlotRules

    sizes = MODELS[case.model]
    slots = case.rows * layout.num_row_shards
    config = EngineConfig(
        model=sizes.model,
        vocab_size=sizes.vocab_size,
        num_slots=slots,
        num_rows=slots,
        chunk_size=CHUNK,
        rules=SlotRules(burst=BURST, max_turn_tokens=1024, end_of_turn_id=0),
        seed=0,
    )
    return PolicyEngine(config, layout).lower_play(case.length)


COLLECTIVE = re.compile(
    r"= .*?\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def measure(case: Case) -> dict[str, Any]:
    """Compiles the case in this process, and reads what its compiler says."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from earl_jax.models.kernels import choose_kernel
    from earl_jax.selector.memory import program_bytes
    from earl_jax.sharding.layout import MeshShape, make_layout
    from earl_jax.sharding.topology import make_topology

    topology = make_topology(case.topology)
    layout = make_layout(MeshShape.parse(case.mesh), topology.devices())
    start = time.perf_counter()
    lowered = lower(case, layout)
    lowered_s = time.perf_counter() - start
    # At full effort a TPU compiler takes 15 s and more for each layer of an unrolled program. With
    # the least it took a tenth of that, and 1.47 GiB where it had taken 1.45 (2 layers, v5e).
    quick = topology.chip.platform == "tpu" and case.stage == "rollout"
    compiled = lowered.compile({"exec_time_optimization_effort": -1.0} if quick else None)
    analysis = compiled.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "program": program_bytes(compiled),
        "hbm": topology.chip.hbm_bytes,
        "kernel": choose_kernel("auto", layout).kernel if case.stage == "train" else "blockwise",
        "collectives": Counter(COLLECTIVE.findall(compiled.as_text())),
        "lower_s": lowered_s,
        "compile_s": time.perf_counter() - start - lowered_s,
    }


def main() -> None:
    """Compiles the cases one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose row contains this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        case = next(case for case in CASES if str(case) == flags.measure)
        print(json.dumps(measure(case)))
        return
    print("| model | topology | program | mesh | rows | attention | arguments | results |", end="")
    print(" temporaries | together | of HBM | collectives | compiled in |")
    print("|---" * 13 + "|")
    for case in CASES:
        if flags.only in str(case):
            print(f"| {case} | {_row(case)} |", flush=True)


def _row(case: Case) -> str:
    command = [sys.executable, __file__, f"--measure={case}"]
    done = subprocess.run(command, capture_output=True, text=True)
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
