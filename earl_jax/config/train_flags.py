# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of `python -m earl_jax.main`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.config import Config
from earl_jax.config.file import DEFAULT_CONFIG, read_sources, read_workdir_config
from earl_jax.config.flags import config_parser, parse_with_overrides
from earl_jax.settings.errors import InputError

# Overrides that a replay may have: which processes run it.
_OF_PROCESSES = ("distributed.", "devices.num_cpu_devices=")
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
stopped it and it is saved: the same command goes on; 143 for a replay that a signal stopped, which
begins again, in a new workdir; 2 for a mistake in what was given; 1 where the run failed, or
another process of it was lost or had too little memory for an update: start all again, and the run
resumes, with less where memory was short (gpu_scripts/slurm.sbatch does).

With --check it looks at every host before hours are spent: the same command on each.

Over several hosts it is the same command on each:
  python -m earl_jax.main --config.distributed.coordinator=HOST0:8476 \\
      --config.distributed.num_processes=2 --config.distributed.process_id=0   (1 on the other)
Under Slurm, Open MPI 4 or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set,
without these; under Open MPI 5 with the coordinator alone. All hosts must see the workdir.
"""


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the overrides ("section.key=value").

    Raises InputError for a flag that does not exist.
    """
    parser = config_parser("main", _HELP, DEFAULT_CONFIG)
    parser.set_defaults(config=None)
    parser.add_argument(
        "--workdir", type=_folder, help="where the run lives (default: runs/NAME_OF_THE_CONFIG)"
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
        type=_folder,
        metavar="WORKDIR",
        help="repeat a run with its config and by its events, in a new --workdir",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="look at devices, hosts, links, storage, programs and kernels; train nothing",
    )
    flags, overrides = parse_with_overrides(parser, arguments)
    if flags.init_from is not None:
        overrides.append(f"init_from={flags.init_from!r}")
    return flags, overrides


def _folder(text: str) -> Path:
    """Returns the path of a folder that has a name, which "." and ".." have not.

    A run puts folders beside it, and may rename it.
    """
    path = Path(text)
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def replayed_config(
    replay: Path, flags: argparse.Namespace, overrides: Sequence[str]
) -> tuple[Config, Path]:
    """Returns the config of the run that is replayed, and the workdir of its replay."""
    workdir = flags.workdir or replay.with_name(f"{replay.name}.replay")
    if flags.config or not all(each.startswith(_OF_PROCESSES) for each in overrides):
        raise InputError(
            "--replay takes the config of that run; leave out --config and settings, but for those "
            "of the processes (config.distributed and config.devices.num_cpu_devices)"
        )
    if (workdir / "config.json").exists():
        raise InputError(f"--replay begins in a new workdir, and {workdir} holds a run")
    if not (replay / "config.json").is_file():
        raise InputError(f"--replay={replay} holds no run: there is no {replay / 'config.json'}")
    config, steps = read_workdir_config(replay, overrides), read_sources(replay)
    # The other runs that it began with may have gone on since.
    for name in ("init_from", "reference_from"):
        text = getattr(config, name)
        if text in steps and not text.endswith(f"@{steps[text]}"):
            overrides = [*overrides, f"{name}={f'{text}@{steps[text]}'!r}"]
    return read_workdir_config(replay, overrides), workdir
