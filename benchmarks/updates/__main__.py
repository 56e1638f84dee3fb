# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Updates of one model on one batch, side by side: ours, `transformers` with torch, and Tunix's.

    uv run python -m benchmarks.updates --torch_python=PATH --tunix_python=PATH \
        [--cores=1,2] [--repeats=4] [--write] [--profile]

Forward and backward pass, PPO's clipped loss, AdamW in fp32; nothing is recomputed. Each trainer is
a process of its own on the same cores; they take turns. Of each the fastest update counts. Exits
if the losses of the updates differ.

With --profile the operations of one update by ours and by torch are printed instead, those with the
most seconds first: of the first shape, on each number of cores.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import machine, replace_table, table
from benchmarks.rollout.engines import Contestant, Engine, take_turns

HERE = Path(__file__).parent
SHAPES = ((16, 256), (4, 1024), (64, 64))
UPDATES = 4
# Of a profile, those with the most time.
OPERATIONS = 16
# The most by which the losses of an update may differ.
SAME = 1e-4


def rows_of(
    cores: Sequence[int], folder: Path, torch_python: str, tunix_python: str, repeats: int
) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows of trainers on these cores, and the versions."""
    # Processes that are started have the same.
    os.sched_setaffinity(0, cores)
    ours = Engine("ours", [sys.executable, "-m", "benchmarks.updates.ours", str(folder)])
    # It writes the checkpoint before it answers.
    ours.versions()
    script = str(HERE / "torch_updates.py")
    torch = Engine("torch", [torch_python, script, str(folder), str(len(cores))])
    script = str(HERE / "tunix_updates.py")
    tunix = Engine("Tunix", [tunix_python, script, str(folder)])
    trainers = (ours, torch, tunix)
    versions = [trainer.versions() for trainer in trainers]
    rows = []
    for count, length in SHAPES:
        job = {"rows": count, "length": length, "updates": UPDATES}
        best = take_turns([Contestant(e.name, e, job, job) for e in trainers], repeats)
        losses = [best[trainer.name]["losses"] for trainer in trainers]
        difference = max(max(each) - min(each) for each in zip(*losses, strict=True))
        if difference > SAME:
            sys.exit(f"the losses differ: {losses}")
        seconds = {name: found["seconds"] for name, found in best.items()}
        rows.append(
            {"cores": len(cores), "rows": f"{count} of {length}"}
            | {f"{name}, s": f"{spent:.3f}" for name, spent in seconds.items()}
            | {
                f"{other.name} / ours": f"{seconds[other.name] / seconds['ours']:.2f}"
                for other in (torch, tunix)
            }
            | {"largest difference of losses": f"{difference:.0e}"}
        )
        print(rows[-1], flush=True)
    for trainer in trainers:
        trainer.close()
    return rows, "; ".join(versions)


def profiles_of(cores: Sequence[int], folder: Path, torch_python: str) -> str:
    """Returns a table for ours and one for torch on these cores: operations with the most time."""
    os.sched_setaffinity(0, cores)
    (rows, length), tables = SHAPES[0], []
    ours = Engine("ours", [sys.executable, "-m", "benchmarks.updates.ours", str(folder)])
    ours.versions()
    script = str(HERE / "torch_updates.py")
    torch = Engine("torch", [torch_python, script, str(folder), str(len(cores))])
    for trainer in (ours, torch):
        found = trainer.ask({"rows": rows, "length": length, "profile": True})
        most = sorted(found["operations"].items(), key=lambda pair: -pair[1])[:OPERATIONS]
        lines = [("the update that was profiled", found["seconds"]), *most]
        tables.append(table([{trainer.name: name, "s": seconds} for name, seconds in lines]))
        trainer.close()
    return "\n\n".join([f"{rows} of {length}, {len(cores)} cores:", *tables])


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch_python", required=True, help="Python with torch and transformers")
    parser.add_argument("--tunix_python", default="", help="Python with google-tunix")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--profile", action="store_true")
    flags = parser.parse_args()
    if not (flags.profile or flags.tunix_python):
        parser.error("give --tunix_python, or --profile")
    rows, versions, every = [], "", sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        for cores in (every[:number] for number in map(int, flags.cores.split(","))):
            if flags.profile:
                print(profiles_of(cores, folder, flags.torch_python), flush=True)
                continue
            pythons = flags.torch_python, flags.tunix_python
            found, versions = rows_of(cores, folder, *pythons, flags.repeats)
            rows += found
    if flags.profile:
        return
    text = table(rows)
    print(text, versions, machine(), sep="\n")
    if flags.write:
        replace_table(HERE.parent / "updates.md", f"{text}\n\n{versions}")


if __name__ == "__main__":
    main()
