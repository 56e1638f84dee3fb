# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A policy's own Python: as a tool that runs it, and as a reply that tests judge."""

import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from earl_jax.envs.processes.sandbox import check_sandbox, run_python
from earl_jax.settings.errors import InputError

# A block with its mark and language; the last one may be open.
_BLOCK = re.compile(
    r"^[ \t]*(?P<mark>`{3,}|~{3,})[ \t]*(?P<language>[\w.+-]*)[^\n]*\n(?P<text>.*?)"
    r"(?:^[ \t]*(?P=mark)[ \t]*$|\Z)",
    re.S | re.M,
)
_PYTHON = re.compile(r"py(thon)?[\d.]*", re.I)
# Behind a program: calls a function of it, or a method of its class Solution.
_CALL = """
def _call(names, name, arguments):
    import json

    function = names[name] if name in names else getattr(names["Solution"](), name)
    print("\\n" + json.dumps(function(*json.loads(arguments))))


_call(globals(), {name!r}, {arguments!r})
"""


class Python:
    """The tool `python`, for config.env.args.tools: "earl_jax.envs.code:Python"."""

    def __init__(self) -> None:
        """Raises InputError where there is no sandbox."""
        check_sandbox()

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints and the value of its last expression.

        Each program begins anew. It has no files and no network.

        Args:
            code: the program
        """
        if not isinstance(code, str):
            raise TypeError("code must be a text")
        ran = await run_python(code, show_last=True)
        if ran.ended:
            return f"{ran.output}\n[the program {ran.ended}]".lstrip("\n")
        return ran.output or "[the program printed nothing]"


async def passes(
    reply: str,
    *,
    tests: str = "",
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    fn_name: str | None = None,
    **row: Any,
) -> dict[str, float]:
    """Pays 1 for a program that passes all tests, else 0; for config.tasks.reward.

    The program is the last block of Python in the reply (`program_of`). It passes `tests`,
    Python such as "assert add(1, 2) == 3", if it and they run to their end, and an input if it
    prints the output that belongs to it, but for space at the ends of lines and of the whole. With
    `fn_name` an input is a list of arguments, and the output what that function, or that method of
    a class Solution, returns for them, or a list of that alone (as in APPS); or both are texts of
    JSON, with an argument a line (as in LiveCodeBench). Tuples are lists. The metric `passed` is
    the share of the tests before the first that fails: `tests` is one, and each input is.

    `tests` run in the process of the program, which may deceive them: it may replace what they
    call, return what equals everything, or read them. What is compared with `outputs` it never
    sees.

    Raises ValueError for a row without tests, or with other numbers of inputs and outputs.
    """
    del row
    if not tests and not inputs:
        raise InputError(
            "a row of config.tasks has neither 'tests' nor 'inputs'; earl_jax.envs.code:passes "
            "needs one of them"
        )
    _check_row(tests, inputs, outputs, fn_name)
    if len(inputs) != len(outputs):
        raise InputError(
            f"a row of config.tasks has {len(inputs)} inputs and {len(outputs)} outputs; each "
            "input needs an output"
        )
    code, passed, total = program_of(reply), 0, len(inputs) + bool(tests)
    if tests:
        passed += (await run_python(code, tests=tests)).completed
    if passed == bool(tests):
        for given, wanted in zip(inputs, outputs, strict=True):
            if not await _is_answered(code, given, wanted, fn_name):
                break
            passed += 1
    return {"reward": float(passed == total), "passed": passed / total}


async def _is_answered(code: str, given: Any, wanted: Any, fn_name: str | None) -> bool:
    """Returns True if a program makes of an input what is wanted, which it does not see."""
    if not fn_name:
        ran = await run_python(code, stdin=given, stderr=False)
        return ran.completed and _lines(ran.output) == _lines(wanted)
    if isinstance(given, str):
        given, wanted = _values(given), json.loads(wanted)
    call = _CALL.format(name=fn_name, arguments=json.dumps(given))
    ran = await run_python(code, tests=call, stderr=False)
    try:
        result = json.loads(ran.output.rstrip().rpartition("\n")[2])
    # What a program prints may be nested without end.
    except (ValueError, RecursionError):
        return False
    return ran.completed and wanted in (result, [result])


def _check_row(tests: object, inputs: Any, outputs: Any, fn_name: object) -> None:
    """Raises InputError unless the fields are of their types: see `passes`."""
    if not isinstance(tests, str):
        raise InputError(
            f"'tests' of a row of config.tasks is {tests!r:.60}; it must be a text, lines of Python"
        )
    if not isinstance(fn_name, str | None):
        raise InputError(
            f"'fn_name' of a row of config.tasks is {fn_name!r:.60}; it must be a function's name"
        )
    for name, given in (("inputs", inputs), ("outputs", outputs)):
        kind = ((list, str) if name == "inputs" else object) if fn_name else str
        if isinstance(given, str) or not (
            isinstance(given, Sequence) and all(isinstance(each, kind) for each in given)
        ):
            what = "a list of lists of arguments" if fn_name else "a list of texts"
            raise InputError(
                f"{name!r} of a row of config.tasks is {given!r:.60}; it must be {what}"
            )
    for given, wanted in zip(inputs, outputs, strict=False):
        is_text = fn_name is not None and isinstance(given, str)
        if is_text and not _is_json(given, wanted):
            raise InputError(
                f"an input of a row of config.tasks with 'fn_name' is {given!r:.60}, and its "
                f"output {wanted!r:.60}; as texts they must be JSON, with an argument a line"
            )


def _values(text: str) -> list[Any]:
    """Returns the values of a text with one of JSON a line. Raises ValueError for another text."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _is_json(given: str, wanted: object) -> bool:
    """Returns True for an input of values of JSON, and an output of one."""
    try:
        return isinstance(wanted, str) and len([_values(given), *_values(wanted)]) == 2
    except ValueError:
        return False


def program_of(reply: str) -> str:
    """Returns the last block of Python of a reply; without any its last block without a language.

    Without blocks the reply is the program.
    """
    blocks = [(each["language"], textwrap.dedent(each["text"])) for each in _BLOCK.finditer(reply)]
    for is_meant in (_PYTHON.fullmatch, lambda language: not language):
        if texts := [text for language, text in blocks if is_meant(language)]:
            return texts[-1]
    return reply


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
