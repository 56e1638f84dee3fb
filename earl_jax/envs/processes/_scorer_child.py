# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Process that scores answers of a policy by a library; `scorers.Scorer` starts it.

Libraries take seconds to import, and may evaluate what they are given. So this process imports one
and says "ready", and forks for each answer: the child confines itself as a policy's program is
(`_sandbox_child`), scores, and ends. Each line of the input is the arguments of one of SCORERS as a
JSON array; each is answered with a line, null where the child was ended.
"""

import ast
import base64
import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import random
import select
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def math() -> Callable[..., Any]:
    """Returns the comparison of an answer with a reply by math-verify."""
    from math_verify import parse, verify

    # Its own limits are signals, of which the process has none but its end.
    limits = {"parsing_timeout": None, "raise_on_error": False}

    def compare(gold: str, reply: str) -> list[bool]:
        right = parse(f"${gold}$", **limits) or parse(gold, **limits)
        found = parse(reply, **limits)
        equal = verify(right, found, timeout_seconds=None, raise_on_error=False)
        return [bool(right), bool(found), bool(equal)]

    return compare


def reasoning_gym() -> Callable[..., Any]:
    """Returns the score of an answer by the verifier of a generator of reasoning-gym."""
    with warnings.catch_warnings(action="ignore"):
        library = importlib.import_module("reasoning_gym")
    # They mean lists, and would run anything, among it what gives itself a score.
    for name in ("spiral_matrix", "binary_matrix", "string_insertion"):
        module = sys.modules[library.factory.DATASETS[name][0].__module__]
        vars(module)["eval"] = ast.literal_eval

    def score(name: str, settings: dict[str, Any], entry_base64: str, answer: str) -> float:
        generator = library.create_dataset(name, **settings, seed=0, size=1)
        # Not made again by its seed: some depend on Python's hashes, too.
        entry = pickle.loads(base64.b64decode(entry_base64))
        try:
            return float(generator.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - some verifiers raise for what is no answer
            return 0.0

    return score


SCORERS = {"math": math, "reasoning_gym": reasoning_gym}


def main(kind: str, limits: dict[str, Any]) -> None:
    """Answers until the input ends; `limits` are the arguments of `_sandbox_child.confine`."""
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    score, confine = SCORERS[kind](), _sandbox().confine
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        found = _in_a_fork(lambda given=line: score(*json.loads(given)), limits, confine)
        print(found, file=answers, flush=True)


def _sandbox() -> Any:
    """Returns the module beside this one; a package of that name there is none."""
    path = Path(__file__).with_name("_sandbox_child.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_a_fork(
    score: Callable[[], Any], limits: dict[str, Any], confine: Callable[..., None]
) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # Nothing of it is to come back to the loop.
        with contextlib.suppress(BaseException):
            nothing = os.open(os.devnull, os.O_RDWR)
            for file in (0, 1, 2):
                os.dup2(nothing, file)
            os.closerange(3, writer)
            os.closerange(writer + 1, 64)
            confine(**limits)
            random.seed(0)
            os.write(writer, json.dumps(score()).encode())
        os._exit(0)
    os.close(writer)
    found = b""
    if select.select([reader], [], [], 4 * limits["seconds"])[0]:
        found = os.read(reader, 4096)
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.dumps(_valid(found))


def _valid(message: bytes) -> Any:
    """Returns the score in a child's message; None where it is none.

    The child is not trusted: what it evaluated may have written.
    """
    try:
        score = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if isinstance(score, list):
        return score if len(score) == 3 and all(type(each) is bool for each in score) else None
    is_score = type(score) in (int, float) and 0 <= score <= 1
    return score if is_score else None


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
