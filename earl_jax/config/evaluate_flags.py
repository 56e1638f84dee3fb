# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of `python -m earl_jax.evaluate`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.config import Config
from earl_jax.config.file import read_workdir_config
from earl_jax.config.flags import parse_with_overrides
from earl_jax.settings.errors import InputError

_HELP = """\
Plays evaluation episodes with the newest checkpoint of a workdir and prints the mean reward and the
means of what the environment reports: of games, the fractions won, drawn and lost. Episodes that
failed are in no mean; failed_share is their share. Nothing in the workdir is changed. The settings
are those of the run, in WORKDIR/config.json, which python -m earl_jax.main --help explains; those
of episodes can be given here too: another opponent, other tasks, another temperature, several
samples of each task.

It takes as many devices as the run had: of a run over several hosts, start it on each of them by
Slurm or Open MPI, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set.

example:
  python -m earl_jax.evaluate --workdir=runs/tictactoe_tiny_cpu --games=1000
  python -m earl_jax.evaluate --workdir=runs/connect_four_tiny_cpu --config.env.args.opponent=mcts
  python -m earl_jax.evaluate --workdir=runs/math --config.eval.samples=32 --episodes=math.jsonl
"""
# Sections of the config that do not say which policy it is.
_SECTIONS = ("env", "tasks", "eval", "rollout", "selector", "devices", "distributed")
# Settings of these that evaluations do not have, and those that take their place.
_OF_TRAINING = {
    "tasks.path": "tasks.eval_path",
    **{f"rollout.{n}": f"eval.{n}" for n in ("temperature", "top_k", "top_p", "min_p")},
}


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Returns the flags, with the number of games, and the run's config with what was given."""
    parser = argparse.ArgumentParser(
        prog="python -m earl_jax.evaluate",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", type=Path, required=True, help="the folder of a run")
    parser.add_argument(
        "--games", type=int, help="number of tasks (default: config.eval.final_games)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--episodes",
        type=Path,
        metavar="FILE",
        help="write the episodes down, one JSON object a line",
    )
    flags, overrides = parse_with_overrides(parser, arguments)
    for override in overrides:
        name = override.partition("=")[0]
        if name.partition(".")[0] not in _SECTIONS:
            raise InputError(
                f"--config.{override}: the policy is evaluated as the run trained it; settings of "
                f"{', '.join(_SECTIONS)} can be given here"
            )
        if other := _OF_TRAINING.get(name):
            raise InputError(f"--config.{override} is of training; give --config.{other} instead")
    rows = [each.partition("=")[2] for each in overrides if each.startswith("tasks.eval_path=")]
    if rows and not read_workdir_config(flags.workdir, learns=False).tasks.path:
        # A dataset needs rows of training, which a run of conversations or of seeds has not.
        overrides = [*overrides, f"tasks.path={rows[-1]}"]
    config = read_workdir_config(flags.workdir, overrides, learns=False)
    if flags.games is None:
        flags.games = config.eval.final_games
    if flags.games < 1 and not (flags.games == 0 and config.eval.sft_path):
        raise InputError(
            f"--games={flags.games}; it must be at least 1 (0 with config.eval.sft_path: nothing "
            "is played)"
        )
    if (path := flags.episodes) and (path.is_dir() or not path.parent.is_dir()):
        raise InputError(f"--episodes={path} must be a file in a folder that is there")
    return flags, config
