# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Differences between two trees of settings, in words."""

from typing import Any

_ABSENT = object()


def differences(
    there: Any, here: Any, path: str, sides: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Returns a line for each value that differs between two trees of settings."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(there.keys() | here.keys())
        return [
            line
            for name in names
            for line in differences(
                there.get(name, _ABSENT), here.get(name, _ABSENT), f"{path}.{name}", sides
            )
        ]
    words = ["absent" if value is _ABSENT else repr(value) for value in (there, here)]
    shown = ", ".join(f"{word} {place}" for word, place in zip(words, sides, strict=True))
    return [] if there == here else [f"{path} is {shown}"]
