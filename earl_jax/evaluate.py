# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Lets a checkpoint play: python -m earl_jax.evaluate --workdir=DIR [--config.KEY=VALUE ...]."""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from earl_jax.config.config import Config
from earl_jax.config.evaluate_flags import parse_flags
from earl_jax.launch.start import exit_status, start_jax


def evaluate_command(arguments: Sequence[str]) -> None:
    """Runs the whole command, from its flags to its last line. Raises ValueError for bad input."""
    flags, config = parse_flags(arguments)
    start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)
    from earl_jax.launch.ending import end_together
    from earl_jax.run.build import with_held_out
    from earl_jax.run.evaluation import add_lines, evaluate
    from earl_jax.run.saved_position import read_newest
    from earl_jax.telemetry.atomic import write_atomically

    lines: list[str] = []
    with end_together():
        run, position, placement = read_newest(config, flags.workdir)
        run, step = with_held_out(run), position.step
        keep = functools.partial(add_lines, lines, run.cluster) if flags.episodes else None
        evaluation = evaluate(run, placement, position, games=flags.games, keep=keep)
    if not run.cluster.is_first:
        return
    _show(flags, config, step, evaluation)
    if flags.episodes:
        # Behind what took long: this may fail.
        write_atomically(flags.episodes, "".join(f"{line}\n" for line in lines))


def _show(flags: argparse.Namespace, config: Config, step: int, evaluation: dict[str, Any]) -> None:
    if flags.json:
        print(json.dumps({"step": step, "eval": evaluation}))
        return
    from earl_jax.rollout.evaluation import why_no_means

    plural = config.env.plural
    played = f", {evaluation[plural]} {plural}" if flags.games else ""
    print(f"{evaluation['name']}{played}, policy after step {step}")
    for name, value in evaluation.items():
        if name not in ("name", "episodes", plural):
            shown = value if isinstance(value, str) else f"{value:8.3f}"
            print(f"  {name:<19} {shown}")
    if why := why_no_means(evaluation):
        print(f"  {why}")


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: evaluate_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
