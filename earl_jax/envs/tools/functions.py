# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Functions that a policy may call: found by name, described to it, called, and their answers."""

import functools
import inspect
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from earl_jax.envs.single_turn import Reward
from earl_jax.settings.arguments import accepted, check_call
from earl_jax.settings.errors import InputError
from earl_jax.settings.named import find_named

# A tool that raises one of these, or something because of one, is away: that was no mistake of the
# policy's. Clients of HTTP raise errors of their own because of one.
OUTAGES = (ConnectionError, TimeoutError, socket.gaierror)
# Bases of what httpx and httpcore raise for these: they hide the error that was the reason. A
# library of that name may have a number behind it.
_HTTP_LIBRARIES = ("httpx", "httpcore")
_HTTP_OUTAGES = frozenset(("NetworkError", "TimeoutException", "RemoteProtocolError"))
_SETTING = "config.env.args.tools"
_CALLABLE: Any = Callable
# The descriptions of tools, by name and function.
_DESCRIBED = dict[tuple[str, Callable[..., Any]], dict[str, Any]]()


class Tool(NamedTuple):
    """A function that the policy may call, and its description for `Start.tools`.

    It is called with the arguments by name; with `takes_all`, with all of them as one mapping.
    """

    function: Callable[..., Any]
    description: dict[str, Any]
    takes_all: bool = False


class Answer(NamedTuple):
    """The text that a call is answered with, and True if the call failed."""

    text: str
    failed: bool = False


def open_tools(
    names: Sequence[str], task: Mapping[str, Any]
) -> tuple[dict[str, Tool], list[Reward]]:
    """Returns the tools by name, and the methods `reward` of classes among them.

    Of a class it makes an object, with those of the `task`'s arguments that the constructor names;
    its public methods are tools. Where it has `describe` and `call`, the tools are those that
    `describe()` returns, and are called by `call(name, arguments)`.

    Raises ValueError for a name of no function or class, a class without a tool, and a function
    that cannot be described to the policy, or that no call could reach.
    """
    tools, rewards = dict[str, Tool](), list[Reward]()
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{_SETTING} is {names!r:.80}; it must name functions or classes, such as "
            '("module:function", "module:Class")'
        )
    for name in names:
        found = find_named(name, {}, _CALLABLE, _SETTING)
        if isinstance(found, type):
            made = found(**accepted(found, task))
            methods = {each: getattr(made, each) for each in _methods_of(found)}
            if "reward" in methods:
                call = f"reward(reply), a method of {_SETTING} {name!r},"
                check_call(methods["reward"], call, "")
                rewards.append(methods.pop("reward"))
            if methods.keys() >= {"describe", "call"}:
                own = _served_tools(name, methods["describe"], methods["call"])
            else:
                own = {key: Tool(each, describe(key, each)) for key, each in methods.items()}
            if not own:
                raise InputError(
                    f"{_SETTING} has {name!r}, a class without a public method that could be a tool"
                )
        elif inspect.isfunction(found):
            short = name.rpartition(":")[2]
            own = {short: Tool(found, describe(short, found))}
        else:
            raise InputError(
                f"{_SETTING} has {name!r}, which is of type {type(found).__name__}; it must be a "
                "function (def or async def) or a class"
            )
        if both := tools.keys() & own.keys():
            raise InputError(f"{_SETTING} has two tools of the name {min(both)!r}")
        tools |= own
    return tools, rewards


def _served_tools(
    name: str, describe_all: Callable[[], Any], call: Callable[..., Any]
) -> dict[str, Tool]:
    """Returns the tools that a class describes itself. Raises ValueError for no descriptions."""
    check_call(call, f"call(name, arguments), a method of {_SETTING} {name!r},", "", {})
    found, descriptions = dict[str, Tool](), describe_all()
    for each in descriptions if isinstance(descriptions, list | tuple) else (descriptions,):
        function = each.get("function") if isinstance(each, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        own = function.get("name")
        if not isinstance(own, str) or not own or "parameters" not in function:
            raise InputError(
                f"{_SETTING} has {name!r}, whose describe() returned {each!r:.80}; it must return "
                'a list of {"type": "function", "function": {"name": ..., "description": ..., '
                '"parameters": a JSON schema}}'
            )
        found[own] = Tool(functools.partial(call, own), dict(each), takes_all=True)
    return found


def _methods_of(found: type) -> list[str]:
    """Returns the names of a class's public methods, those of its parents too, in their order."""
    kinds = (staticmethod, classmethod)
    return [
        name
        for name, value in inspect.getmembers_static(found)
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    ]


def describe(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Returns the description of a function or method as the tool that is called `name`.

    Raises ValueError where it has none.
    """
    # Methods are new objects in each episode; the function that they are of is not.
    key = name, getattr(tool, "__func__", tool)
    if key not in _DESCRIBED:
        schema = _schema_of(name, tool)
        # A decorated function, or an alias, may have another name of its own.
        _DESCRIBED[key] = {**schema, "function": {**schema["function"], "name": name}}
    return _DESCRIBED[key]


def _schema_of(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(
                f"{_SETTING} has {name!r} with the parameter {str(parameter)!r}, which a call "
                "cannot give by name; each argument needs a name and a type of its own"
            )
    try:
        return get_json_schema(tool)
    except Exception as error:  # noqa: BLE001 - annotations and docstrings are the user's
        raise InputError(
            f"{_SETTING} has {name!r}, which cannot be described to the policy: "
            f"{type(error).__name__}: {error}; it needs type hints, and a docstring with a line "
            'for each argument under "Args:"'
        ) from error


def call_tool(name: str, tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """Returns the `Answer` of a call, or the coroutine of a tool that is one (`when_there`).

    Raises what the tool raises if it is away (`is_outage`).
    """
    try:
        if not tool.takes_all:
            inspect.signature(tool.function).bind(**arguments)
    except TypeError as error:
        return failure(f"{name}: {error}")
    try:
        result = tool.function(arguments) if tool.takes_all else tool.function(**arguments)
        return result if inspect.isawaitable(result) else Answer(_text_of(result))
    except Exception as error:  # noqa: BLE001 - a user's own function
        return _failed(error)


async def when_there(answer: Answer | Awaitable[Any]) -> Answer:
    """Returns an answer of `call_tool`, which may have to be waited for. Raises as that."""
    if isinstance(answer, Answer):
        return answer
    try:
        return Answer(_text_of(await answer))
    except Exception as error:  # noqa: BLE001 - a user's own function
        return _failed(error)


def failure(why: str) -> Answer:
    """Returns the answer to a call that failed."""
    return Answer(f"error: {why}", failed=True)


def is_outage(error: BaseException | None) -> bool:
    """Returns True if this, what it was raised because of, or one of a group is in OUTAGES."""
    while error is not None:
        group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        bases = (base for base in type(error).__mro__ if base.__name__ in _HTTP_OUTAGES)
        of_http = any(base.__module__.startswith(_HTTP_LIBRARIES) for base in bases)
        if isinstance(error, OUTAGES) or of_http or any(map(is_outage, group)):
            return True
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    return False


def _failed(error: Exception) -> Answer:
    """Returns the answer to a call that raised this. Raises it if it is an outage."""
    if is_outage(error):
        raise error
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - a user's own exception
        words = "its text cannot be made"
    return failure(f"{type(error).__name__}: {words}")


def _text_of(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Returns numpy's numbers and arrays as Python's, and anything else as a text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
