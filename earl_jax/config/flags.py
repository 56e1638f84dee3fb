# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of a command that takes a config: --config=FILE and --config.section.key=value."""

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.keys import all_keys, settings_help
from earl_jax.config.names import meant_by
from earl_jax.settings.errors import InputError


def config_parser(module: str, description: str, default: Path | None) -> argparse.ArgumentParser:
    """Returns a parser with the flag --config, whose --help lists every setting.

    Args:
        module: the command, as in `python -m earl_jax.MODULE`.
        description: the text of --help before the flags.
        default: the config file of a command without --config; None: the settings' own defaults.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m earl_jax.{module}",
        description=description,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shown = f"configs/{default.name}" if default else "the settings' own defaults"
    parser.add_argument(
        "--config", type=Path, default=default, help=f"a config file (default: {shown})"
    )
    return parser


def parse_with_overrides(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the overrides of the config ("section.key=value").

    Exits with status 2 for a flag that does not exist.

    Raises:
        InputError: a setting that is not written as --config.section.key=value; a flag whose value
            is empty.
    """
    overrides, others = [], []
    for number, argument in enumerate(arguments):
        if not argument.startswith("--config."):
            others.append(argument)
            continue
        following = [word for word in arguments[number + 1 :][:2] if word != "="]
        if "=" not in argument and following and not following[0].startswith("--"):
            raise InputError(
                f"{argument} {following[0]}: write it with = and without a blank, "
                f"{argument}={following[0].removeprefix('=')}"
            )
        overrides.append(argument.removeprefix("--config."))
    for before, argument in zip(["", *others], others, strict=False):
        if not argument or re.fullmatch(r"--\w+=", argument):
            # As a folder it would be the current one.
            raise InputError(
                f"{argument or before} has an empty value, as of a shell variable that is not set; "
                "give it one, or leave the flag out"
            )
    flags, unknown = parser.parse_known_args(others)
    if unknown:
        raise InputError(_unknown_flag(parser, unknown))
    return flags, overrides


def _unknown_flag(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Returns the message about arguments that are no flags, with what to write instead."""
    first = unknown[0]
    message = f"unrecognized arguments: {' '.join(unknown)}"
    if not first.startswith("-"):
        is_file = first.endswith(".py")
        return f"{message}; " + (
            f"write --config={first}" if is_file else "a flag is written --NAME=VALUE"
        )
    name, equals, value = first.lstrip("-").partition("=")
    if not equals:
        value = unknown[1] if len(unknown) > 1 else "VALUE"
    if f"config.{name}" in all_keys():
        return f"{message}; a setting is written --config.{name}={value}"
    known = re.findall(r"--\w+", parser.format_usage())
    near = difflib.get_close_matches(f"--{name}", known, n=1)
    if near:
        return f"{message}; did you mean {near[0]}?"
    hint = meant_by(f"config.{name}")
    return f"{message}; {hint or 'see --help'}" + (
        ", written --config.KEY=VALUE" if hint and "config." in hint else ""
    )
