# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The growing run: contexts lengthen 16 times because the policy learns, under a byte budget.

    uv run python -m benchmarks.growing [--seeds=0,1,2] [--turns=2] [--in=DIR] [--only=ARMS]
        [--no_fixed] [--again]

The arms, each a run of configs/trail_tiny_cpu.py as its own process, with four training meshes to
choose from by speed and more updates a step (`BY_SPEED` in growing_runs.py):

- `ours`: that; `unconstrained`: without a budget;
- `held A + B`: on these two meshes from the first step to the last, under the same budget, for
  every pair of the meshes that `ours` may choose from. How they are used may change, as in `ours`:
  fewer slots and pages, more micro-batches, activations computed again;
- `fixed A + B, WAY`: these two meshes in one way from the first step to the last, for the pairs
  that so fit the budget at every length: what somebody would set by hand who knows how long
  contexts become;
- `limit N` and `no limit`: EARL's collapse, on one device (see growing_runs.py).

A run that is timed counts all that its steps take, choosing, moving and loading programs included.
It is made in a cache folder of its arm, and once more if it found that empty, or compiled more
than a few programs that were not there: the second counts. How long the first took, in an empty
folder, is said too. Then `ours` and the static arms that fit the budget are run again by turns,
`--turns` times with each seed: what is said of one beside the other is of these.

Each run is a line of benchmarks/growing.jsonl as soon as it is made. The same command goes on where
it was stopped and makes none of these again; with --again it starts over. Arms that are timed and
arms that are not may be made side by side on two cores, with --only=ours,held,fixed and
--only=unconstrained,limit,no; the command without it then writes growing.svg and growing.md, which
with --no_fixed are without the `fixed` arms. DIR is where runs and cache folders are (default: a
temporary folder).
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.growing_page import curves, page
from benchmarks.growing_pairs import fitting, static_pairs
from benchmarks.growing_runs import (
    arms,
    growing_config,
    make_runs,
    pairs_of,
    take_turns,
    write_rows,
)
from earl_jax.main import exit_status, start_jax

HERE = Path(__file__).parent
ROWS = HERE / "growing.jsonl"


def command(arguments: Sequence[str]) -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--turns", type=int, default=2, help="runs by turns with each seed")
    parser.add_argument("--in", dest="folder", type=Path, help="where runs and caches are")
    parser.add_argument("--again", action="store_true", help="forget the runs that were made")
    parser.add_argument("--only", help="arms that begin with these words, as ours,held; no page")
    parser.add_argument("--no_fixed", action="store_true", help="without the 'fixed' arms")
    parser.add_argument("--note", default="", help="a sentence for the page, on the machine's load")
    flags = parser.parse_args(arguments)
    if flags.again:
        ROWS.unlink(missing_ok=True)
    config = growing_config()
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="earl_jax_growing_"))
    seeds = [int(seed) for seed in flags.seeds.split(",")]
    only = flags.only.split(",") if flags.only else []
    budget = config.selector.budget_bytes_per_device
    without_fixed = flags.no_fixed or (only and "fixed" not in only)
    pairs = [] if without_fixed else static_pairs(config)
    fixed = fitting(pairs, budget)
    all_arms = arms(pairs_of(config), fixed)
    chosen = [arm for arm in all_arms if not only or arm.kind in only]
    runs = make_runs(ROWS, chosen, seeds, folder)
    if not only:
        # Without what earlier configs left.
        write_rows(ROWS, runs)
    runs = take_turns(ROWS, runs, chosen, folder, flags.turns, budget)
    if only:
        return
    (HERE / "growing.svg").write_text(curves(runs))
    (HERE / "growing.md").write_text(page(runs, pairs, config, flags.note))
    print((HERE / "growing.md").read_text())


if __name__ == "__main__":
    sys.exit(exit_status(lambda: command(sys.argv[1:])))
