# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times one stage of a config: python -m earl_jax.bench {dispatch,rollout,train,switch}."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from earl_jax.config.file import BENCH_CONFIG, load_config_file, make_config
from earl_jax.config.flags import config_parser, parse_with_overrides
from earl_jax.launch.start import exit_status, start_jax
from earl_jax.profiling.stages import STAGES
from earl_jax.run.build import build_run
from earl_jax.settings.errors import InputError

_HELP = """\
Times a stage of a run on this machine and prints a Markdown table, or with --json an object a line.

  rollout   the first step's episodes with random weights, on each rollout mesh of the config
  train     one update on full rows, on each training mesh of the config
  dispatch  a step's experience from each rollout mesh to each training mesh, and the weights back
  switch    the move of a trainer, or of a rollout with live KV caches, from the first mesh of the
            stage to each of the others

Episodes and rows have the length of the last of config.rollout.context_buckets. A time is the
median of --repeats runs after one that compiles. "copy ms" is a plain copy, timed in turn with the
stage, of as many bytes as change device.

example:
  python -m earl_jax.bench dispatch --config=configs/tictactoe_tiny_cpu.py --config.seed=1
"""


def bench_command(arguments: Sequence[str]) -> None:
    """Runs the whole command."""
    parser = config_parser("bench", _HELP, BENCH_CONFIG)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each row (3)")
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags, overrides = parse_with_overrides(parser, arguments)
    if flags.repeats < 1:
        raise InputError(f"--repeats={flags.repeats}; it must be at least 1")
    config = make_config(load_config_file(flags.config), overrides)
    if not config.plays and flags.stage != "train":
        raise InputError(
            f"config.algorithm {config.algorithm!r} plays nothing, so that there is no "
            f"{flags.stage} to time: take the stage train, or another algorithm"
        )
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    for number, row in enumerate(STAGES[flags.stage](build_run(config), flags.repeats)):
        if flags.json:
            print(json.dumps(row), flush=True)
            continue
        if not number:
            print(f"| {' | '.join(row)} |\n{'|---' * len(row)}|")
        print(f"| {' | '.join(map(_cell, row.values()))} |", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: bench_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
