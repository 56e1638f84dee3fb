# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times one stage: python -m earl_jax.bench {rollout,train,dispatch,switch} [--json]."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.main import DEFAULT_CONFIG, exit_status, start_jax

_HELP = """\
Times a stage and prints Markdown tables, or with --json an object a line. Run it in the root of the
repository, where benchmarks/ is.

  python -m earl_jax.bench rollout --config=configs/tictactoe_tiny_cpu.py
      a rollout on each mesh that the config may use; --config.section.key=value too
  python -m earl_jax.bench train --config=configs/tictactoe_tiny_cpu.py
      an update on each mesh that the config may use
  python -m earl_jax.bench dispatch --only=processes --workers=16
      worker processes on hosts of their own (network namespaces, which need root) against rank 0
      that gathers and scatters
  python -m earl_jax.bench dispatch --only=links --workers=16
      bare sockets on the same hosts: what their links carry
  python -m earl_jax.bench dispatch --only=within --platform=cpu --devices=8
      every rollout mesh to every training mesh, beside a plain copy
  python -m earl_jax.bench dispatch --only=weights --platform=gpu --models=llama3.2-1b,qwen2.5-7b
      publishing weights, beside a plain copy
  python -m earl_jax.bench dispatch --only=compiled --topologies=v5p:2x2x4,h100:2x8
      what publishing sends on chips that are not here, by their compilers (extras tpu-topology and
      gpu-topology), beside the fewest bytes that do
  python -m earl_jax.bench dispatch --only=paper
      1,024 devices by the planner
  python -m earl_jax.bench switch --config=configs/tictactoe_tiny_cpu.py
      from the first mesh of each stage to the others that the config may choose from: new weights,
      the trainer with its optimizer, weights with live KV caches
"""
PARTS = {
    "rollout": ("rollout",),
    "train": ("train",),
    "dispatch": ("processes", "links", "within", "weights", "compiled", "paper"),
    "switch": ("switch",),
}
STAGES = tuple(PARTS)


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Exits with status 2 for a flag that does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m earl_jax.bench",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--only", default="", help="parts, separated by commas (all)")
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many (3)")
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, help="of rollout, train, switch: a file"
    )
    between = parser.add_argument_group("processes, links")
    between.add_argument("--workers", default="4,8,16", help="numbers of processes")
    between.add_argument(
        "--scale", type=float, default=16, help="divides EARL's 46, 93 and 187 MiB a worker (16)"
    )
    between.add_argument("--tensor", type=int, default=4, help="members of a trainer's group (4)")
    between.add_argument("--mbit", type=float, default=100, help="rate of a link, Mbit/s (100)")
    between.add_argument(
        "--window", type=int, default=64, help="KiB of a TCP connection under way; 0: the kernel's"
    )
    between.add_argument("--loopback", action="store_true", help="no namespaces")
    inside = parser.add_argument_group("within, weights, compiled")
    inside.add_argument("--platform", default="auto", help="auto, cpu, gpu or tpu")
    inside.add_argument("--devices", type=int, default=8, help="virtual CPU devices (8)")
    inside.add_argument("--mib", default="0.25,4,64", help="sizes of the array within a process")
    inside.add_argument("--models", default="", help="presets whose weights go")
    inside.add_argument("--cut", type=int, default=1, help="divides layers and vocabulary (1)")
    inside.add_argument("--topologies", default="", help="of compiled: what to compile for")
    flags = parser.parse_args([a for a in arguments if not a.startswith("--config.")])
    flags.overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    flags.only = flags.only or ",".join(PARTS[flags.stage])
    return flags


def rows_of(part: str, flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a part measures, a dict a row."""
    if part in ("processes", "links"):
        from benchmarks.dispatch import links, processes

        settings = processes.Settings(
            workers=tuple(map(int, flags.workers.split(","))),
            scale=flags.scale,
            tensor=flags.tensor,
            mbit_per_s=flags.mbit,
            window_kib=flags.window,
            repeats=flags.repeats,
            loopback=flags.loopback,
        )
        return (links if part == "links" else processes).measure(settings)
    if part == "paper":
        from benchmarks.dispatch.paper import tables

        return tables()
    if part in ("rollout", "train", "switch"):
        return _config_rows(part, flags)
    models = tuple(filter(None, flags.models.split(",")))
    if part == "compiled":
        # First of all: else the compilers of other platforms look for their chips.
        start_jax("cpu", flags.devices)
        from benchmarks.dispatch import compiled

        topologies = tuple(filter(None, flags.topologies.split(","))) or compiled.TOPOLOGIES
        return compiled.measure(models or compiled.MODELS, topologies, flags.cut)
    start_jax(flags.platform, flags.devices)
    if part == "within":
        from benchmarks.dispatch.within import measure as measure_within

        return measure_within(tuple(map(float, flags.mib.split(","))), flags.repeats)
    import jax

    from benchmarks.dispatch import publishing

    num = len(jax.devices())
    return publishing.measure(models or publishing.MODELS, num, flags.cut, flags.repeats)


def _config_rows(part: str, flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from earl_jax.config_file import load_config_file, make_config

    config = make_config(load_config_file(flags.config), flags.overrides)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    from benchmarks import stages, switch

    rows = {"rollout": stages.rollout_rows, "train": stages.train_rows, "switch": switch.measure}
    return rows[part](config, flags.repeats)


def write_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """Markdown, a line as soon as it is known."""
    names: list[str] = []
    for row in rows:
        if not names:
            names = [name for name in row if not name.endswith("spans_s")]
            print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
        print(f"| {' | '.join(_cell(row[name]) for name in names)} |", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def bench_command(arguments: Sequence[str]) -> None:
    """The whole command."""
    flags = parse_flags(arguments)
    parts = flags.only.split(",")
    known = PARTS[flags.stage]
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ValueError(f"--only={flags.only}: {unknown[0]!r} is no part of {', '.join(known)}")
    if importlib.util.find_spec("benchmarks") is None:
        raise ValueError("there is no folder benchmarks/ here; run this in the repository's root")
    for part in parts:
        rows = rows_of(part, flags)
        if flags.json:
            for row in rows:
                print(json.dumps({"part": part, **row}), flush=True)
        else:
            print(f"\n## {part}\n")
            write_table(rows)


def main() -> None:
    """The entry point."""
    sys.exit(exit_status(lambda: bench_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
