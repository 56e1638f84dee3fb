# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Logits that are not finite: they end the episode that they are of, and no other.

A token whose embedding is NaN, or overflows, stands for what a model cannot compute.
"""

import contextlib
import dataclasses
import functools
import queue

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.engine import Policy
from earl_jax.envs.environment import Start, StepResult
from earl_jax.rollout.config import Limits
from earl_jax.rollout.task import Prompt, Task
from earl_jax.serving.driver import Driver, Request, open_service
from earl_jax.serving.requests import RequestError
from earl_jax.settings.errors import RunError
from tests.support.continuations import CONTEXT_TOKENS, policy, prompt, served
from tests.support.episodes import (
    LATENT,
    LINEAR,
    WINDOWED,
    check_nothing_is_held,
    check_rows,
    collect,
    tasks,
    tokenizer,
    weight_values,
)

# No prompt or reply of the tests has it but where it is put.
POISON = 319


def poisoned(engine, fault: float = np.nan) -> Policy:
    whole = policy(engine)
    embed = whole.params["embed"].at[POISON].set(fault)
    return dataclasses.replace(whole, params={**whole.params, "embed": embed})


def asked(number: int, *, spoiled: bool = False, count: int = 12) -> Task:
    """A prompt of which all have the first 20 tokens; `spoiled`: token 22 is the poison."""
    ids = [*prompt(0, 20).tolist(), *prompt(number, 9).tolist()]
    ids = [5 if token == POISON else token for token in ids]
    if spoiled:
        ids[22] = POISON
    limits = Limits(max_turn_tokens=count)
    prompted = Prompt(token_ids=tuple(ids))
    return Task(episode=number, group=number, prompt=prompted, seed=1000 + number, limits=limits)


def play(engine, weights: Policy, todo: list[Task]) -> dict[int, tuple]:
    """Returns the stop reason of each task, its reply, and the log-probs."""
    service = open_service(engine, weights, lambda ticket, tokens: None)
    service.submit(todo)
    found = {}
    for finished in service.drain():
        for each in finished:
            reply = [turn for turn in each.trajectory.turns if turn.author == "policy"]
            found[each.trajectory.episode] = (
                each.trajectory.stop_reason,
                [token for turn in reply for token in turn.token_ids],
                [value for turn in reply for value in turn.logprobs],
            )
            service.release(each.row)
    assert service.num_live == 0 and not service.is_busy
    return found


@pytest.mark.slow_except("short of pages-nan")
@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize(
    "settings",
    [
        {"cache_tokens": CONTEXT_TOKENS},
        {"draft": 3},
        {"model": LATENT, "cache_tokens": CONTEXT_TOKENS},
        {"model": WINDOWED, "cache_tokens": CONTEXT_TOKENS},
        {"model": LINEAR},
        {"kv_dtype": "int8", "cache_tokens": CONTEXT_TOKENS},
        {"keep_replies": True, "cache_tokens": CONTEXT_TOKENS},
    ],
    ids=["short of pages", "drafts", "latent", "windowed", "linear", "int8", "keep replies"],
)
def test_a_prompt_without_finite_logits_ends_alone(settings, fault):
    """Every third of 18 prompts on eight slots, whose pages and beginnings others take over."""
    engine = served(**settings)
    healthy = play(engine, policy(engine), [asked(n) for n in range(18) if n % 3 != 1])
    assert all(POISON not in ids for _, ids, _ in healthy.values())
    found = play(engine, poisoned(engine, fault), [asked(n, spoiled=n % 3 == 1) for n in range(18)])
    for number, of_it in found.items():
        if number % 3 == 1:
            assert of_it == ("nonfinite_logits", [], [])
        else:
            assert of_it[:2] == healthy[number][:2], number
            np.testing.assert_array_equal(of_it[2], healthy[number][2])
    assert len(found) == 18


def test_a_fault_that_has_passed_is_not_kept_in_the_cache():
    """As of a device that failed once: the same beginnings are read again, and not taken over."""
    service = open_service(served(), poisoned(served()), lambda ticket, tokens: None)
    spoiled = [asked(n, spoiled=n > 0) for n in (0, 1, 1, 4)]

    def reasons() -> list[str]:
        service.submit(spoiled)
        found = [each for some in service.drain() for each in some]
        for each in found:
            service.release(each.row)
        return [each.trajectory.stop_reason for each in sorted(found, key=lambda f: f.ticket)]

    assert reasons()[1:] == ["nonfinite_logits"] * 3
    service.session = dataclasses.replace(service.session, policy=policy(served()))
    assert "nonfinite_logits" not in reasons()


@contextlib.contextmanager
def driving(weights: Policy):
    """A driver, and a function that submits a task and returns a queue of its events."""
    driver = Driver(served(), weights)
    driver.warm_up()

    def deliver(events):
        for request, event in events:
            request.put(event)

    def submit(task: Task) -> queue.Queue:
        events = queue.Queue()
        driver.submit(Request(client="a", task=task, put=events.put))
        return events

    driver.start(deliver, lambda: None)
    try:
        yield driver, submit
    finally:
        driver.stop()


def replied(events: queue.Queue) -> list[int] | RequestError:
    ids = []
    while not isinstance(event := events.get(timeout=600), RequestError):
        if event is None:
            return ids
        ids += event.token_ids
    return event


def test_a_server_goes_on_behind_a_request_without_finite_logits():
    """Also where no other is open: one prompt that is sent often says nothing of the weights."""
    healthy = play(served(), policy(served()), [asked(n) for n in range(6)])
    with driving(poisoned(served())) as (driver, submit):
        for numbers in (range(8), (1, 4), (2,)):
            found = {
                n: submit(asked(n, spoiled=n % 3 == 1)) for n in numbers if n < 6 or n % 3 == 1
            }
            for number, events in found.items():
                answer = replied(events)
                if number % 3 != 1:
                    assert answer == healthy[number][1]
                    continue
                assert isinstance(answer, RequestError) and answer.code is grpc.StatusCode.INTERNAL
                assert "logits behind token 29 of this context are not finite" in answer.words
        assert driver.live and not driver._playing and not driver._queue._num_taken


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_weights_that_give_no_finite_logits_are_an_error(fault):
    """In a rollout, and before a server takes requests."""
    whole = policy(served())
    broken = {**whole.params, "embed": jnp.full_like(whole.params["embed"], fault)}
    broken = dataclasses.replace(whole, params=broken)
    with pytest.raises(RunError, match="look for NaN or huge weights in the checkpoint"):
        play(served(), broken, [asked(n) for n in range(6)])
    with pytest.raises(RunError, match="the policy's logits are not finite"):
        Driver(served(), broken).warm_up()


class Quiet:
    """Says a word without a digit, twice; `spoils`: the second time the poison."""

    def __init__(self, *, spoils: bool) -> None:
        self.replies, self.spoils = 0, spoils

    def start(self) -> Start:
        return Start(text="x", role="x")

    def step(self, reply: str) -> StepResult:
        self.replies += 1
        if self.replies == 3:
            return StepResult(reward=0.25, done=True, stop_reason="win")
        text = "7" if self.spoils and self.replies == 1 else "o"
        return StepResult(text=text, reward=0.25, done=False)


@functools.cache
def seven_spoils():
    """Weights with which nothing can be said behind a 7."""
    values = weight_values()
    embed = values["embed"].copy()
    embed[tokenizer().convert_tokens_to_ids("7")] = np.nan
    return jax.tree.map(jnp.asarray, {**values, "embed": embed})


@pytest.mark.parametrize("stop", [(), ("7",)])
def test_an_episode_without_finite_logits_is_data_with_a_stop_reason(pool, stop):
    """In the middle of a turn, and at the first token of one. Other episodes are as they were.

    A stop string before the fault ends the turn as it would; the next one has no first token.
    """

    def make(task: Task) -> Quiet:
        return Quiet(spoils=task.episode % 5 == 0)

    services, seven = [], tokenizer().convert_tokens_to_ids("7")
    sound = collect(pool, tasks(30), make, stop_strings=stop)
    rollout = collect(
        pool, tasks(30), make, params=seven_spoils(), stop_strings=stop, services=services
    )
    check_rows(rollout, 30)
    check_nothing_is_held(services[0])
    lengths = set()
    for trajectory, whole in zip(rollout.trajectories, sound.trajectories, strict=True):
        # Nothing is sampled behind the last turn, which a stop string ends.
        before = whole.turns[:-1] if stop else whole.turns
        if not any(seven in turn.token_ids for turn in before):
            assert [t.token_ids for t in trajectory.turns] == [t.token_ids for t in whole.turns]
            assert [t.logprobs for t in trajectory.turns] == [t.logprobs for t in whole.turns]
            assert trajectory.stop_reason == whole.stop_reason == "win"
            continue
        assert trajectory.stop_reason == "nonfinite_logits"
        assert "are not finite" in trajectory.detail
        lengths.add(len(trajectory.turns))
        for turn, same in zip(trajectory.turns, whole.turns, strict=False):
            assert turn.token_ids == same.token_ids[: len(turn.token_ids)]
        replies = [turn for turn in trajectory.turns if turn.author == "policy"]
        is_cut = trajectory.turns[-1].author == "policy"
        assert len(trajectory.turn_rewards) == len(replies) - is_cut
        # Behind a stop string the reply is whole, and the episode ends in the next turn.
        assert not (is_cut and stop)
    assert len(lengths) > 1, "or the test shows little"
