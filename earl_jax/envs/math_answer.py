# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A reward for answers to questions of mathematics, which math-verify compares."""

import decimal
import importlib.util
import math
from typing import Any

from earl_jax.envs.processes.sandbox import check_sandbox
from earl_jax.envs.processes.scorers import Scorer
from earl_jax.settings.errors import InputError

_compare = Scorer("math")


def correct(reply: str, *, answer: str | float, **row: Any) -> dict[str, float]:
    r"""Pays 1 for a reply whose answer equals the row's, else 0; for config.tasks.reward.

    math-verify finds the answer of a reply: what is in `\boxed{}`, or else the last LaTeX between
    dollar signs, expression or number. `answer` is LaTeX or a number: "1/2", 0.5 and "\frac{1}{2}"
    are equal; "1e-5" is no number in LaTeX. Processes that may do nothing else compare them. What
    takes more than a few seconds, or too much memory, is not equal. The metric `answered` is 1 if
    the reply has an answer.

    Raises ValueError where math-verify is not installed or there is no sandbox (`check_sandbox`),
    and for an `answer` that cannot be read.
    """
    del row
    if importlib.util.find_spec("math_verify") is None:
        raise InputError(
            "math-verify is not installed; uv sync --extra math, or pip install math-verify"
        )
    check_sandbox()
    has_gold, answered, equal = _compare(_as_text(answer), reply) or (True, True, False)
    if not has_gold:
        raise InputError(f"the answer {answer!r:.60} of a row is none that math-verify can read")
    return {"reward": float(equal), "answered": float(answered)}


def _as_text(answer: object) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool | None) or not isinstance(answer, int | float):
        raise InputError(
            f"the answer of a row is {answer!r:.60}, of type {type(answer).__name__}; it must be a "
            "text or a number"
        )
    if not math.isfinite(answer):
        raise InputError(f"the answer of a row is {answer}; it must be finite")
    # No exponent, which is none in LaTeX.
    return format(decimal.Decimal(repr(answer)), "f")
