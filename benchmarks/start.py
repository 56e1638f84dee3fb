# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds from the command to the first step of a run, and the programs compiled before it.

    uv run python -m benchmarks.start [--config=FILE] [--config.section.key=value] [--write]

Twice: "cold" in an empty folder of compiled programs and observed speeds, and "warm" with what the
cold run left there. The run is ended after its first step. With --write the table goes into
start.md.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.pages import parser_of, show, table
from earl_jax.config.file import DEFAULT_CONFIG

PAGE = Path(__file__).with_suffix(".md")
# What JAX says of each program with JAX_LOG_COMPILES, and of one that was in the cache folder.
MADE = re.compile(r"Finished XLA compilation of jit\((\S+)\) in ([0-9.e-]+) sec")
FOUND = re.compile(r"Persistent compilation cache hit for 'jit_(\S+)'")
# The stages' programs by the names of their functions.
STAGES = {
    "on_shard": "round",
    "step": "update",
    "accumulate": "part of an update",
    "apply": "end of an update",
    "score": "log-probs",
}


def count_programs(log: str) -> dict[str, Any]:
    """Returns the stages' programs and the small ones, how many were loaded, and their seconds.

    A program that was loaded is among those that JAX finished. Small ones are the others: what
    makes, moves, packs and copies arrays, and single operations.
    """
    finished, loaded = MADE.findall(log), FOUND.findall(log)
    made = Counter(STAGES[name] for name, _ in finished if name in STAGES)
    loaded_stages = sum(name in STAGES for name in loaded)
    return {
        "stages' programs": ", ".join(f"{number} {name}" for name, number in sorted(made.items())),
        "of them loaded": loaded_stages,
        "s of them": sum(float(seconds) for name, seconds in finished if name in STAGES),
        "small programs": len(finished) - made.total(),
        "of these loaded": len(loaded) - loaded_stages,
        "s of these": sum(float(seconds) for name, seconds in finished if name not in STAGES),
    }


def start(config: Path, overrides: Sequence[str], workdir: Path, caches: Path) -> dict[str, Any]:
    """Returns a row: starts a run and ends it after its first step.

    Raises ValueError where it ends by itself before.
    """
    log = workdir.with_suffix(".log")
    flags = [f"--config={config}", f"--workdir={workdir}", *overrides]
    environment = {**os.environ, "XDG_CACHE_HOME": str(caches), "JAX_LOG_COMPILES": "1"}
    with log.open("w") as file:
        start_s = time.perf_counter()
        (run,) = runs.start(flags, env=environment, stdout=file, stderr=file)
        try:
            while not (steps := runs.steps_of(workdir)):
                if run.poll() is not None:
                    raise ValueError(f"the run ended before a step: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            seconds = time.perf_counter() - start_s
            # Read at once: it goes on.
            programs = count_programs(log.read_text())
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
    return {
        "s to the first step": seconds,
        "s of that step": sum(steps[0]["stage_s"].values()),
    } | programs


def command(arguments: Sequence[str]) -> None:
    """Runs the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    overrides = [a for a in arguments if a.startswith("--config.")]
    flags = parser.parse_args([a for a in arguments if not a.startswith("--config.")])
    rows = []
    with tempfile.TemporaryDirectory(prefix="earl_jax_start_") as folder:
        for cache in ("cold", "warm"):
            found = start(flags.config, overrides, Path(folder) / cache, Path(folder) / "cache")
            rows.append({"config": flags.config.stem, "cache": cache} | found)
    show(table(rows), PAGE, write=flags.write)


if __name__ == "__main__":
    command(sys.argv[1:])
