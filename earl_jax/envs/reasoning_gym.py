# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of reasoning-gym's generators (arXiv 2505.24760), paid by its verifiers."""

import base64
import functools
import json
import pickle
import random
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.processes.sandbox import check_sandbox
from earl_jax.envs.processes.scorers import Scorer
from earl_jax.settings.errors import InputError, check_choice
from earl_jax.settings.extras import import_extra

TAGGED = (
    "\n\nThink step by step, then give the final answer, and nothing else, between <answer> and "
    "</answer>."
)
_OPEN, _CLOSE = "<answer>", "</answer>"
# Generators that are none for training, and why.
_REFUSED = {
    "composite": "name several generators instead",
    "complex_arithmetic": 'its verifier pays "nan" in full',
    "game_of_life_halting": "its verifier pays any reply in full",
}
# Those whose verifiers evaluate an answer: in a process that may do nothing else, which takes some
# 15 ms.
_EVALUATING = frozenset(
    (
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"),
        *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
    )
)
_score_elsewhere = Scorer("reasoning_gym")


class ReasoningGym:
    """An episode of one question and one reply.

    `generators` names those of reasoning-gym ("chain_sum"); each episode has a question of one of
    them, which depends on `seed`, and of some on Python's hashes. `settings` are keyword arguments
    of a generator by its name, such as `{"chain_sum": {"max_terms": 3}}`. With `tags` the question
    ends with the request for an answer between <answer> and </answer>, and what the last of these
    hold is the answer; otherwise all of the reply is.

    The reward is the verifier's score, from 0 to 1, and 0 for a reply without an answer, with one
    that the verifier cannot read, or that takes it more than a few seconds. Verifiers that evaluate
    an answer run in processes that may do nothing else. Metrics are `answered`, and the score
    as `score_NAME` where there are several generators. An example reply is the answer of the
    generator, or "?" where it has none.

    Raises ValueError where reasoning-gym is not installed or there is no sandbox, for a generator
    that it does not have or that is none for training, and for settings that it does not take.
    """

    def __init__(
        self,
        *,
        generators: Sequence[str] = (),
        settings: Mapping[str, Mapping[str, Any]] = {},  # noqa: B006 - it is not changed
        tags: bool = True,
        seed: int = 0,
    ):
        library = _library()
        if isinstance(generators, str) or not generators:
            raise InputError(
                f"config.env.args.generators is {generators!r}; it must name generators of "
                'reasoning-gym, such as ("chain_sum", "leg_counting")'
            )
        known = library.factory.DATASETS
        for name in generators:
            check_choice(name, tuple(known), "config.env.args.generators")
            if why := _REFUSED.get(name):
                raise InputError(f"config.env.args.generators has {name!r}: {why}")
            if name in _EVALUATING:
                check_sandbox()
        if unused := settings.keys() - set(generators):
            raise InputError(
                f"config.env.args.settings has {min(unused)!r}, which is none of "
                f"config.env.args.generators: {', '.join(generators)}"
            )
        # The word keeps the draw apart from those of a generator, which has the same seed.
        self._name = random.Random(f"generator {seed}").choice(list(generators))
        self._has_several, self._tags = len(generators) > 1, tags
        for name, given in settings.items():
            _check_settings(name, json.dumps(given))
        self._arguments = self._name, dict(settings.get(self._name, {})), seed
        self._generator: Any = None
        self._entry: dict[str, Any] = {}

    def start(self) -> Start:
        """Returns the question."""
        name, settings, seed = self._arguments
        self._generator = _library().create_dataset(name, **settings, seed=seed, size=1)
        self._entry = self._generator[0]
        text = self._entry["question"]
        return Start(text=text + TAGGED if self._tags else text, metrics=self._metrics(False, 0.0))

    def step(self, reply: str) -> StepResult:
        """Returns the score of the reply."""
        answer = self._answer_in(reply)
        score = self._score(answer) if answer else 0.0
        return StepResult(
            reward=score,
            done=True,
            stop_reason="answered",
            metrics=self._metrics(bool(answer), score),
        )

    def example_reply(self, rng: random.Random) -> str:
        """Returns the right answer, or "?" where the generator has none."""
        del rng
        answer = self._entry["answer"] if isinstance(self._entry["answer"], str) else "?"
        return f"{_OPEN}{answer}{_CLOSE}" if self._tags else answer

    def _score(self, answer: str) -> float:
        if self._name in _EVALUATING:
            name, settings, _ = self._arguments
            entry = base64.b64encode(pickle.dumps(self._entry)).decode()
            return _score_elsewhere(name, settings, entry, answer) or 0.0
        try:
            return float(self._generator.score_answer(answer, self._entry))
        except Exception:  # noqa: BLE001 - some verifiers raise for what is no answer
            return 0.0

    def _answer_in(self, reply: str) -> str:
        if not self._tags:
            return reply.strip()
        _, opened, rest = reply.rpartition(_OPEN)
        answer, closed, _ = rest.partition(_CLOSE)
        return answer.strip() if opened and closed else ""

    def _metrics(self, answered: bool, score: float) -> dict[str, float]:
        own = {f"score_{self._name}": score} if self._has_several else {}
        return {"answered": float(answered)} | own


@functools.cache
def _check_settings(name: str, settings: str) -> None:
    """Raises InputError where the generator does not take these settings, which are JSON."""
    given = json.loads(settings)
    try:
        _library().create_dataset(name, **given, seed=0, size=1)[0]
    except Exception as error:
        raise InputError(
            f"config.env.args.settings of {name!r} are {given}, and it cannot make a question by "
            f"them: {type(error).__name__}: {error}"
        ) from error


def _library() -> ModuleType:
    return import_extra("reasoning_gym", "reasoning-gym")
