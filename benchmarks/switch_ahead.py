# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a run waits for where its contexts outgrow the first room: for XLA, and how much is hidden.

    uv run python -m benchmarks.switch_ahead [--config=FILE] [--config.KEY=VALUE ...]

Two runs of a config whose contexts outgrow its first room, each in an empty cache folder, until the
first step in which the room, a mesh or the way to use it is another: with
config.selector.compile_ahead "off" and "on". A Markdown row for each, of all steps behind the first
up to that one (metrics.jsonl):

- `compile s`: what the programs took that were used for the first time, `hidden s`: of these what
  was compiled while steps ran, `waited s`: the rest;
- `that step s`: how long the run took from the step before to the end of that step, and `a step s`
  the median of those before;
- `first step s`: from the start of the run, measurements included, to the end of its first step.

On virtual CPU devices the thread that compiles takes the processor from the steps.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earl_jax.bench import write_table
from earl_jax.main import DEFAULT_CONFIG, exit_status
from earl_jax.telemetry.metrics import read_metrics

# What a row of metrics.jsonl says of where the stages are.
WHERE = ("rollout_places", "rollout_mesh", "train_mesh", "rung")
TIMEOUT_S = 3600.0


def command(arguments: Sequence[str]) -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    own = [one for one in arguments if not one.startswith("--config.")]
    overrides = [one for one in arguments if one.startswith("--config.")]
    config = parser.parse_args(own).config
    write_table(
        {"compile ahead": setting, **row_of(steps_of(config, overrides, setting))}
        for setting in ("off", "on")
    )


def steps_of(config: Path, overrides: Sequence[str], setting: str) -> list[dict[str, Any]]:
    """The steps of a run that is stopped behind the first one that is somewhere else.

    Raises:
        ValueError: the run ended before.
    """
    with tempfile.TemporaryDirectory(prefix="earl_jax_switch_") as folder:
        line = [sys.executable, "-m", "earl_jax.main", f"--config={config}"]
        line += [f"--workdir={folder}/run", *overrides]
        line += [f"--config.selector.compile_ahead={setting}"]
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
        metrics = Path(folder) / "run" / "metrics.jsonl"
        process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if metrics.exists() and len(found := until_switch(read_metrics(metrics))):
                    return found
                time.sleep(0.5)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    raise ValueError("the run ended, and no step was anywhere else than the first")


def until_switch(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps up to the first one that is somewhere else; empty where there is none yet."""
    steps = [row for row in rows if "eval" not in row]
    for number, step in enumerate(steps):
        if any(step.get(key) != steps[0].get(key) for key in WHERE):
            return steps[: number + 1]
    return []


def row_of(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the steps behind the first waited for, the last of which is somewhere else."""
    total = sum(step.get("compile_s", 0.0) for step in steps[1:])
    waited = sum(step.get("compile_waited_s", 0.0) for step in steps[1:])
    times = [step["time_s"] for step in steps]
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    return {
        "step": steps[-1]["step"],
        "room": f"{steps[0]['rollout_places']} to {steps[-1]['rollout_places']}",
        "compile s": total,
        "hidden s": total - waited,
        "waited s": waited,
        "that step s": seconds[-1],
        "a step s": statistics.median(seconds[:-1]) if seconds[:-1] else None,
        "first step s": times[0],
    }


if __name__ == "__main__":
    sys.exit(exit_status(lambda: command(sys.argv[1:])))
