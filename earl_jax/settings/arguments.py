# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments from a config for a class or function that a setting names, checked before its call."""

import difflib
import inspect
import json
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from earl_jax.settings.errors import InputError

_PLAIN = (bool, int, float, str)


def argument_names(function: Callable[..., Any]) -> set[str] | None:
    """Returns the names that `function` takes by keyword; None where it takes any (`**kwargs`)."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the offered arguments that `function` has a parameter for."""
    names = argument_names(function)
    return {name: value for name, value in offered.items() if names is None or name in names}


def check_json(given: Mapping[str, Any], path: str) -> None:
    """Raises ValueError for arguments that JSON cannot hold."""
    try:
        json.dumps(dict(given), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} must hold what JSON can say: {error}") from error


def check_arguments(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    path: str,
    *,
    reserved: Collection[str] = (),
) -> None:
    """Raises ValueError for an argument that `function` does not take, or of another type.

    Args:
        function: the class or function; of its annotations bool, int, float and str are checked.
        given: the arguments, by name.
        path: where they are given, for errors, such as "config.env.args".
        reserved: parameters that are not the config's to give.
    """
    check_json(given, path)
    names = argument_names(function)
    what = getattr(getattr(function, "func", function), "__name__", "it")
    for name in given:
        if name in reserved or (names is not None and name not in names):
            known = sorted((names or set()) - set(reserved))
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
            )
            raise InputError(f"{path}.{name} is not an argument of {what}; {hint}")
    for name, kind in _annotations(function).items():
        if name in given and kind in _PLAIN and not _is_of(given[name], kind):
            value = given[name]
            raise InputError(
                f"{path}.{name} is {value!r}, of type {type(value).__name__}; it must be of type "
                f"{kind.__name__}"
            )


def check_call(function: Callable[..., Any], call: str, /, *given: Any, **named: Any) -> None:
    """Raises ValueError where `function` does not take these arguments; `call` is for the error."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A function written in C need not have one.
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise InputError(f"{call} cannot be called: {error}") from error


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of its parameters that JSON can hold."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty and _json(parameter.default)
    }


def without_defaults(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments but for defaults as JSON writes them, which a run's config.json has.

    A default need not be of the annotated type, and JSON makes a list of a tuple.
    """
    own = {name: _json(default) for name, default in defaults_of(function).items()}
    return {name: value for name, value in given.items() if own.get(name, "") != _json(value)}


def _json(value: Any) -> str | None:
    """Returns the value as JSON; None where that cannot hold it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return None


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    function = getattr(function, "func", function)
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError):
        # Annotations that cannot be evaluated check nothing.
        return {}


def _is_of(value: Any, kind: type) -> bool:
    if kind is not bool and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
