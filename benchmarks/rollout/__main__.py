# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts side by side on this machine: ours, `transformers.generate`, Tunix's sampler.

    uv run python -m benchmarks.rollout [--only=equal,tail] [--tiny]
        [--torch_python=PATH] [--tunix_python=PATH]

Every engine is a process of its own, in the environment whose Python is given; one that is not
given takes no part. They take turns, and of each the fastest run counts, behind one that is not
timed. Prints Markdown tables. rollout.md says how the environments are made.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.pages import machine, parser_of
from benchmarks.rollout.engines import start_engines
from benchmarks.rollout.parts import PARTS, TINY, Bench, Sizes


def main() -> None:
    """Starts the engines, and has them play the parts that are asked for."""
    flags = _parse()
    names = flags.only.split(",") if flags.only else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"--only={flags.only}: {unknown[0]!r} is no part; there are {', '.join(PARTS)}")
    sizes = TINY if flags.tiny else Sizes()
    if flags.cores:
        # Processes that are started have the same.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.cores])
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        ours, torch, tunix = start_engines(
            Path(folder) / "checkpoint", flags.torch_python, (1, 2)[:cores], flags.tunix_python
        )
        print(f"{machine()} Cores used: {cores}.")
        for engine in (ours, *torch, *tunix):
            print(f"{engine.name}: {engine.versions()}.")
        bench = Bench(ours=ours, torch=torch, tunix=tunix, sizes=sizes)
        for name in names:
            title, play = PARTS[name]
            print(f"\n## {title}\n", flush=True)
            play(bench)
        for engine in (ours, *torch, *tunix):
            engine.close()


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--only", default="", help=f"parts of {', '.join(PARTS)}; default all")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that it runs")
    parser.add_argument("--cores", type=int, default=0, help="for every engine; default all")
    parser.add_argument("--torch_python", default="", help="Python with torch and transformers")
    parser.add_argument("--tunix_python", default="", help="Python with google-tunix")
    return parser.parse_args()


if __name__ == "__main__":
    main()
