# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that records of settings have in common."""

import typing
from collections.abc import Mapping
from typing import Any

from earl_jax.settings.errors import InputError


def check_choices(section: Any, path: str) -> None:
    """Raises ValueError for a field of a `Literal` type that holds something else.

    `path` is the record's name in a config, such as "config.train".
    """
    for field, kind in typing.get_type_hints(type(section)).items():
        if typing.get_origin(kind) is typing.Literal:
            check_choice(getattr(section, field), typing.get_args(kind), f"{path}.{field}")


def check_choice(value: Any, choices: tuple[Any, ...], path: str) -> None:
    """Raises ValueError, with the choices, for a value that is none of them."""
    if value not in choices:
        raise InputError(f"{path} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def check_bounds(section: Any, path: str, bounds: Mapping[str, tuple[float, float | None]]) -> None:
    """Raises ValueError for a field outside its bounds; None is no upper bound.

    An infinite number is a mistake too.
    """
    for field, (least, most) in bounds.items():
        value = getattr(section, field)
        if not least <= value <= (1e30 if most is None else most):
            upper = "" if most is None else f" and at most {most}"
            raise InputError(f"{path}.{field} is {value}; it must be at least {least}{upper}")
