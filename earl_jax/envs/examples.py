# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes of an environment's own example replies: for supervised steps, and for a tokenizer."""

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from earl_jax.envs.environment import (
    Author,
    Environment,
    OffersExamples,
    Start,
    check_start,
    check_step,
)
from earl_jax.envs.event_loop import settle
from earl_jax.envs.tasks import TaskArgs, TaskSource
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.chat_template import Content, messages_of
from earl_jax.envs.text.conversation import Conversation
from earl_jax.settings.errors import InputError

# An example that takes more replies has no end.
_MOST_REPLIES = 10_000

# Token ids of an example, and who wrote each: 0 or the number of the policy's turn.
Ids = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A whole episode: the messages in order, those of `start` first, the policy's reply last.

    `roles` has the side that each turn is of or for; `reward` is that of the last reply.
    """

    start: Start
    turns: tuple[tuple[Author, Content], ...]
    roles: tuple[str, ...]
    reward: float
    stop_reason: str

    @property
    def texts(self) -> list[str]:
        """Returns all texts in order."""
        return [message.text for _, content in self.turns for message in messages_of(content)]

    @property
    def conversations(self) -> tuple[tuple[tuple[Author, Content], ...], ...]:
        """Returns the turns of each side, the one that begins first; of a single one, all turns."""
        pairs = tuple(zip(self.roles, self.turns, strict=True))
        sides = dict.fromkeys(self.roles)
        return tuple(tuple(turn for role, turn in pairs if role == side) for side in sides)


def play_example(environment: Environment, rng: random.Random) -> Example:
    """Plays a fresh environment to its end with its own example replies (`OffersExamples`).

    Raises ValueError where they lead to no end.
    """
    assert isinstance(environment, OffersExamples), "the config was not validated"
    start = check_start(settle(environment.start()))
    turns: list[tuple[Author, Content]] = [("environment", start.messages or start.text)]
    roles = [start.role]
    for _ in range(_MOST_REPLIES):
        reply = environment.example_reply(rng)
        turns.append(("policy", reply))
        roles.append(roles[-1])
        result = check_step(settle(environment.step(reply)))
        if result.done:
            return Example(
                start=start,
                turns=tuple(turns),
                roles=tuple(roles),
                reward=result.reward,
                stop_reason=result.stop_reason,
            )
        if result.new_context:
            raise InputError(
                "its example_reply leads to a new_context, and an example is one conversation; "
                "leave out example_reply, and give conversations (config.train.sft_path)"
            )
        turns.append(("environment", result.messages or result.text))
        roles.append(result.role or roles[-1])
    raise InputError(
        f"it is not done after {_MOST_REPLIES} replies of its example_reply, which must lead to an "
        "end: supervised examples, and the text for a tokenizer, are whole episodes"
    )


def example_ids(example: Example, renderer: ChatRenderer, side: int = 0) -> Ids:
    """Returns the token ids of the episode, or of the conversation of one of its sides.

    Sides are counted on from the first one after the last. Raises as `sample_ids`.
    """
    conversations = example.conversations
    turns = conversations[side % len(conversations)]
    (ids,) = sample_ids(turns, example.start.tools, Conversation(renderer))
    return ids


def sample_ids(
    turns: Sequence[tuple[Author, Any]],
    tools: Sequence[Mapping[str, Any]],
    conversation: Conversation,
) -> list[Ids]:
    """Returns the token ids of an episode with these turns, the environment's first, by sample.

    A turn of the environment is a `Content`, one of the policy a text, or its ids with an end of
    turn.

    There are several samples where the fresh `conversation` forks. Raises ValueError for messages
    that the chat template does not take.
    """
    (_, first), *others = turns
    opened = conversation.open(first, tools).ids
    samples: list[Ids] = [(list(opened), [0] * len(opened))]
    turn = 0
    for author, content in others:
        if author == "policy":
            turn += 1
            is_text = isinstance(content, str)
            written = conversation.choices((content,))[0] if is_text else content
            conversation.reply(written)
        else:
            answer = conversation.answer(content)
            written = answer.ids
            if answer.forks:
                samples.append(([], []))
        ids, turn_ids = samples[-1]
        ids += written
        turn_ids += [turn if author == "policy" else 0] * len(written)
    return samples


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
    of an environment that offers no examples, its first messages and the tools' descriptions. The
    same arguments give the same list. An episode whose environment fails is left out.

    Raises what the first episode raised where all fail, and InputError for what an environment must
    not return.
    """
    rng = random.Random(seed)
    texts: list[str] = []
    failures: list[Exception | SystemExit] = []
    for number, task in enumerate(_first_tasks(tasks, num_steps, num_episodes)):
        try:
            environment = make(**task)
            if len(failures) == number:
                texts += getattr(environment, "all_replies", list)()
            texts += _texts_of(environment, rng)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own environment
            failures.append(error)
    if len(failures) == num_episodes:
        raise failures[0]
    return texts


def _texts_of(environment: Environment, rng: random.Random) -> Sequence[str]:
    """Returns the messages of an episode with example replies, or the first ones and the tools."""
    if isinstance(environment, OffersExamples):
        return play_example(environment, rng).texts
    start = check_start(settle(environment.start()))
    # A line each, as the template of `build_tokenizer` writes them.
    tools = [f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in start.tools]
    return [*tools, *(message.text for message in messages_of(start.messages or start.text))]


def _first_tasks(tasks: TaskSource, num_steps: int, number: int) -> Iterator[TaskArgs]:
    """Yields the first tasks, again from the first one where they are too few."""
    batches = (tasks.batch(step) for step in itertools.cycle(range(num_steps)))
    return itertools.islice(itertools.chain.from_iterable(batches), number)
