# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a run that a setting names: one of ours, or a user's own as `module:name`."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from earl_jax.settings.errors import InputError, where_raised

# Types in words, for errors.
_KINDS: dict[Any, str] = {type: "a class", Callable: "a function"}


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
        near = difflib.get_close_matches(name, known)
        # One of the same letters comes first: "gpro" is as near to gspo as to grpo.
        near.sort(key=lambda each: sorted(each) != sorted(name))
        hint = f"choose one of {', '.join(known)}, or " if known else ""
        hint = f"did you mean {near[0]!r}?" if near else f"{hint}give your own as 'module:name'"
        raise InputError(f"{path} is {name!r}; {hint}")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises is a user's mistake
        raise InputError(
            f"{path} is {name!r}, which cannot be imported: {_reason(error, module)}"
        ) from error
    try:
        found = getattr(imported, attribute)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, vars(imported), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        where = getattr(imported, "__file__", None) or f"the module {module}"
        raise InputError(f"{path} is {name!r}, and {where} has no {attribute!r}{hint}") from error
    if not isinstance(found, kind):
        raise InputError(
            f"{path} is {name!r}, which is of type {type(found).__name__}; it must be "
            f"{_KINDS.get(kind) or f'of type {kind.__name__}'}"
        )
    return found


def _reason(error: Exception, module: str) -> str:
    """Returns why a module cannot be imported, with the file and line that raised."""
    words = f"{type(error).__name__}: {error}"
    if module.endswith(".py"):
        return (
            f"it is a file; write the module's name, {module.removesuffix('.py')!r}, before the :"
        )
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return f"{words}; Python looks in the current folder and those of PYTHONPATH"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    return words + where_raised(error)
