# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes of an environment's own example replies: for supervised steps, and for a tokenizer."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator

from earl_jax.envs.chat import ChatRenderer
from earl_jax.envs.chat_template import Content, messages_of
from earl_jax.envs.environment import (
    Author,
    Environment,
    OffersExamples,
    Start,
    check_start,
    check_step,
)
from earl_jax.envs.tasks import TaskArgs, TaskSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A whole episode: the messages in order, those of `start` first, the policy's reply last."""

    start: Start
    turns: tuple[tuple[Author, Content], ...]
    reward: float
    stop_reason: str

    @property
    def texts(self) -> list[str]:
        """Returns all texts in order."""
        return [message.text for _, content in self.turns for message in messages_of(content)]


def play_example(environment: Environment, rng: random.Random) -> Example:
    """Plays a fresh environment to its end with its own example replies (`OffersExamples`)."""
    assert isinstance(environment, OffersExamples), "the config was not validated"
    start = check_start(environment.start())
    turns: list[tuple[Author, Content]] = [("environment", start.messages or start.text)]
    while True:
        reply = environment.example_reply(rng)
        turns.append(("policy", reply))
        result = check_step(environment.step(reply))
        if result.done:
            return Example(
                start=start,
                turns=tuple(turns),
                reward=result.reward,
                stop_reason=result.stop_reason,
            )
        turns.append(("environment", result.messages or result.text))


def example_ids(example: Example, renderer: ChatRenderer) -> tuple[list[int], list[int]]:
    """Returns the episode's token ids, and who wrote each: 0 or the number of the policy's turn.

    Raises ValueError for messages that the chat template does not take.
    """
    (_, first), *others = example.turns
    opening = renderer.opening(first, example.start.tools)
    ids = list(renderer.render_opening(opening).ids)
    turn_ids, turn = [0] * len(ids), 0
    for author, content in others:
        if author == "policy":
            assert isinstance(content, str)
            turn += 1
            written = renderer.reply(content)
        else:
            written = renderer.answer(content, opening)
        ids += written
        turn_ids += [turn if author == "policy" else 0] * len(written)
    return ids, turn_ids


def corpus(
    make: Callable[..., Environment],
    tasks: TaskSource,
    *,
    num_steps: int,
    num_episodes: int,
    seed: int,
) -> list[str]:
    """Returns text to train a tokenizer on, from the tasks of a run of `num_steps` steps.

    That is every message of their episodes with example replies, and each of `all_replies` once;
    of an environment that offers no examples, its first messages. The same arguments give the same
    list.
    """
    rng = random.Random(seed)
    texts: list[str] = []
    for number, task in enumerate(_first_tasks(tasks, num_steps, num_episodes)):
        environment = make(**task)
        if not number:
            texts += getattr(environment, "all_replies", list)()
        if isinstance(environment, OffersExamples):
            texts += play_example(environment, rng).texts
        else:
            start = check_start(environment.start())
            texts += [message.text for message in messages_of(start.messages or start.text)]
    return texts


def _first_tasks(tasks: TaskSource, num_steps: int, number: int) -> Iterator[TaskArgs]:
    """Yields the first tasks, again from the first one where they are too few."""
    batches = (tasks.batch(step) for step in itertools.cycle(range(num_steps)))
    return itertools.islice(itertools.chain.from_iterable(batches), number)
