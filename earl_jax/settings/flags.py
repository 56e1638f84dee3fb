# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands, and the mistakes in them that argparse takes or says little about."""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence

from earl_jax.settings.errors import InputError


def parse_known(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    meant: Callable[[Sequence[str], str], str] = lambda unknown, near: near,
) -> argparse.Namespace:
    """Returns the flags.

    Args:
        parser: of the command.
        arguments: those of the command line.
        meant: returns what to write instead of arguments that are no flags ("": unknown), which it
            is given with the words for the flag that is nearest.

    Raises:
        InputError: a flag that does not exist, or whose value is empty.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument or re.fullmatch(r"--\w+=", argument):
            # As a folder it would be the current one.
            raise InputError(
                f"{argument or before} has an empty value, as of a shell variable that is not set; "
                "give it one, or leave the flag out"
            )
    # Before argparse, which would say of a misspelt flag that the right one is required.
    if unknown := _unknown(parser, arguments):
        raise _unrecognized(parser, unknown, meant)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise _unrecognized(parser, unknown, meant)
    return flags


def _unrecognized(
    parser: argparse.ArgumentParser,
    unknown: Sequence[str],
    meant: Callable[[Sequence[str], str], str],
) -> InputError:
    hint = meant(unknown, _near(parser, unknown[0])) or "see --help"
    return InputError(f"unrecognized arguments: {' '.join(unknown)}; {hint}")


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the names of the parser's flags but for --help, such as "--port"."""
    return re.findall(r"--[\w-]+", parser.format_usage())


def _unknown(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Returns the flags that do not exist, each with the word behind it where it has no "="."""
    known, found = ["--help", *_flags_of(parser)], list[str]()
    for argument, behind in zip(arguments, [*arguments[1:], "--"], strict=False):
        name, equals, _ = argument.partition("=")
        if name.startswith("--") and name != "--" and name not in known:
            found += [argument] if equals or behind.startswith("-") else [argument, behind]
    return found


def _near(parser: argparse.ArgumentParser, argument: str) -> str:
    """Returns the hint to the flag that is nearest to an argument; "" for none."""
    if not argument.startswith("-"):
        return "a flag is written --NAME=VALUE"
    name = argument.lstrip("-").partition("=")[0]
    near = difflib.get_close_matches(f"--{name}", _flags_of(parser), n=1)
    return f"did you mean {near[0]}?" if near else ""
