# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Trains: python -m earl_jax.main [--config=FILE] [--config.KEY=VALUE ...] [--workdir=DIR]."""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config import Config
from earl_jax.config.file import DEFAULT_CONFIG, given_config, make_config, read_workdir_config
from earl_jax.config.flags import config_parser, parse_with_overrides
from earl_jax.launch.start import STOPPED, exit_status, start_jax
from earl_jax.settings.errors import InputError

_HELP = """\
Trains a language-model policy on multi-turn episodes, from a config file.

examples:
  python -m earl_jax.main
      the default: configs/trail_tiny_cpu.py, about three minutes on a laptop; with
      --config.model.path=... or .preset=... and no --config, the settings' own defaults
  python -m earl_jax.main --config=configs/connect_four_tiny_cpu.py --workdir=runs/c4
  python -m earl_jax.main --config.num_steps=50 --workdir=runs/short

A workdir that holds a checkpoint of the same config is resumed; num_steps, budgets, the number of
devices and some others may change (docs/howto/resume.md). In the workdir: metrics.jsonl,
report.html, trajectories/, checkpoints/, config.json.

Ctrl-C or SIGTERM ends the run, saved, and says how to go on; a rollout under way is given up, and
played again then. A second Ctrl-C ends it at once. Exit status: 0 when done; 75 when a signal
stopped it and it is saved: the same command goes on; 2 for a mistake in what was given; 1 where the
run failed, or another process of it was lost or had too little memory for an update: start all
again, and the run resumes, with less where memory was short (gpu_scripts/slurm.sbatch does).

With --check it looks at every host before hours are spent: the same command on each.

Over several hosts it is the same command on each:
  python -m earl_jax.main --config.distributed.coordinator=HOST0:8476 \\
      --config.distributed.num_processes=2 --config.distributed.process_id=0   (1 on the other)
Under Slurm, Open MPI or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set,
without these. All hosts must see the workdir.
"""


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the overrides ("section.key=value").

    Exits with status 2 for a flag that does not exist.
    """
    parser = config_parser("main", _HELP, DEFAULT_CONFIG)
    parser.set_defaults(config=None)
    parser.add_argument(
        "--workdir", type=Path, help="where the run lives (default: runs/NAME_OF_THE_CONFIG)"
    )
    parser.add_argument(
        "--init_from",
        metavar="WORKDIR[@STEP]",
        help="begin a new run with the weights of another run (default step: its newest)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="begin again from step 0; what is in the workdir is kept as WORKDIR.old_N",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="WORKDIR",
        help="repeat an asynchronous run with its config and by its events, in a new --workdir",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="look at devices, hosts, links, storage and the first programs, and train nothing",
    )
    flags, overrides = parse_with_overrides(parser, arguments)
    if flags.init_from is not None:
        overrides.append(f"init_from={flags.init_from!r}")
    return flags, overrides


def replayed_config(
    replay: Path, flags: argparse.Namespace, overrides: Sequence[str]
) -> tuple[Config, Path]:
    """Returns the config of the run that is replayed, and the workdir of its replay."""
    workdir = flags.workdir or replay.with_name(f"{replay.name}.replay")
    if flags.config or overrides:
        raise InputError("--replay takes the config of that run; leave out --config and settings")
    if (workdir / "config.json").exists():
        raise InputError(f"--replay begins in a new workdir, and {workdir} holds a run")
    return read_workdir_config(replay), workdir


def train_command(arguments: Sequence[str]) -> int:
    """Runs the whole command, from its flags to its last line. Returns the exit status."""
    start_s = time.perf_counter()
    flags, overrides = parse_flags(arguments)
    from earl_jax.telemetry.progress import shown

    if flags.replay:
        config, workdir = replayed_config(flags.replay, flags, overrides)
    else:
        given, name = given_config(flags.config, overrides)
        config, workdir = make_config(given, overrides), flags.workdir or Path("runs") / name
    start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)
    import jax

    from earl_jax.launch.ending import end_together
    from earl_jax.launch.signals import StopSignals
    from earl_jax.preflight.preflight import check
    from earl_jax.training import train
    from earl_jax.workdir import saved_in_words

    if flags.check:
        with end_together():
            check(config, workdir)
        return 0
    with end_together(), StopSignals(lambda: saved_in_words(workdir)) as signals:
        end = train(
            config, workdir, lambda: signals.received, restart=flags.restart, replay=flags.replay
        )
    status = STOPPED if end.stopped else 0
    if status:
        # A launcher that sees the first status above 0 ends the processes that are still here.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if jax.process_index() > 0:
        return status
    if evaluation := end.evaluation:
        print(f"{evaluation['episodes']} episodes of {evaluation['name']}: {shown(evaluation)}")
    if end.stopped:
        all_of_them = "on each host, with its own process_id: " if jax.process_count() > 1 else ""
        again = shlex.join(each for each in sys.orig_argv if each != "--restart")
        print(f"{end.stopped}. To go on: {all_of_them}{again}")
    else:
        print(f"done in {time.perf_counter() - start_s:.0f} s; look at {workdir / 'report.html'}")
    return status


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: train_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
