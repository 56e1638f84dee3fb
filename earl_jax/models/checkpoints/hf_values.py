# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Values of config.json by their keys, of the type that they must have."""

from collections.abc import Mapping
from typing import Any

from earl_jax.settings.errors import InputError

# In layer_types.
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def read_size(settings: Mapping[str, Any], key: str, least: int = 1) -> int:
    """Returns a whole number of at least `least`. Raises ValueError for anything else."""
    value = settings.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{key} is {value!r}; it must be a whole number of at least {least}")
    return value


def read_number(settings: Mapping[str, Any], key: str, where: str = "") -> float:
    """Returns a number. Raises ValueError for anything else."""
    value = settings.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{where}{key} is {value!r}; it must be a number")
    return float(value)


def read_flag(settings: Mapping[str, Any], key: str, where: str = "") -> bool:
    """Returns true or false. Raises ValueError for anything else."""
    if not isinstance(value := settings.get(key), bool):
        raise InputError(f"{where}{key} is {value!r}; it must be true or false")
    return value
