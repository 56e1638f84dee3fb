# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The command `earl-jax`, which hands its arguments on to one of the commands of the package."""

import difflib
import importlib
import os
import sys

import earl_jax
from earl_jax.launch.start import exit_status
from earl_jax.settings.errors import InputError

# Each command: its module, and what it does.
COMMANDS = {
    "train": ("main", "trains a policy from a config file, or resumes the run of a workdir"),
    "evaluate": ("evaluate", "lets the newest checkpoint of a run play"),
    "serve": ("serve", "serves a policy to other programs"),
    "plan": ("plan", "plans a run for hardware that is not here"),
    "bench": ("bench", "times one stage of a config on this machine"),
    "view": ("view", "shows one or several runs on a local page"),
}
HELP = f"""\
usage: earl-jax COMMAND [FLAG ...]

commands:
{"".join(f"  {name:<10}{words}{chr(10)}" for name, (_, words) in COMMANDS.items())}
earl-jax COMMAND --help lists the flags of a command, and every setting that it takes.
earl-jax --version prints the version. `earl-jax train` is `python -m earl_jax.main`; the others are
`python -m earl_jax.COMMAND`."""


def hand_on(arguments: list[str]) -> None:
    """Runs the command that the first argument names. Raises InputError where there is none.

    Only the module of that command is imported: it chooses the devices before JAX starts.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP)
        return
    name, *rest = arguments
    if name == "--version":
        print(f"earl-jax {earl_jax.__version__}")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--version", "--help"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}"
        raise InputError(f"{name!r} is not a command of earl-jax; {hint}")
    # As `python -m` does: the user's environments and rewards may be in the current folder.
    sys.path.insert(0, os.getcwd())
    sys.argv = [f"earl-jax {name}", *rest]
    importlib.import_module(f"earl_jax.{COMMANDS[name][0]}").main()


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: hand_on(sys.argv[1:])))
