# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a run that a setting names: one of ours, or a user's own as `module:name`."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from earl_jax.settings.errors import InputError


def find_named(name: str, known: Mapping[str, Any], kind: type, path: str) -> Any:
    """Returns `known[name]`, or for a name with a colon what the user's module has.

    Args:
        name: the value of the setting.
        known: what the package has, by name.
        kind: the type that is wanted.
        path: the setting, for errors.

    Raises:
        ValueError: the name is unknown, the module cannot be imported, or what it has under that
            name is of another type.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}, or"
        hint += "" if near else " give your own as 'module:name'"
        raise InputError(f"{path} is {name!r}; {hint}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises is a user's mistake
        raise InputError(
            f"{path} is {name!r}, which cannot be imported ({type(error).__name__}: {error}); give "
            "a module that Python finds from here (PYTHONPATH) and a name in it"
        ) from error
    if not isinstance(found, kind):
        raise InputError(
            f"{path} is {name!r}, which is of type {type(found).__name__}; it must be of type "
            f"{kind.__name__}"
        )
    return found
