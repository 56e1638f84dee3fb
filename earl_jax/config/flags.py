# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of a command that takes a config: --config=FILE and --config.section.key=value."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.keys import all_keys, settings_help
from earl_jax.config.names import meant_by
from earl_jax.settings.errors import InputError
from earl_jax.settings.flags import parse_known


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

    Raises:
        InputError: a setting that is not written as --config.section.key=value; a flag that does
            not exist, or whose value is empty.
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
    return parse_known(parser, others, _meant), overrides


def _meant(unknown: Sequence[str], near: str) -> str:
    """Returns what to write instead of arguments that are no flags: a setting, or a near flag."""
    first = unknown[0]
    if not first.startswith("-"):
        return f"write --config={first}" if first.endswith(".py") else near
    name, equals, value = first.lstrip("-").partition("=")
    if not equals:
        value = unknown[1] if len(unknown) > 1 else "VALUE"
    if f"config.{name}" in all_keys():
        return f"a setting is written --config.{name}={value}"
    hint = near or meant_by(f"config.{name}") or ""
    return hint + (", written --config.KEY=VALUE" if "config." in hint else "")
