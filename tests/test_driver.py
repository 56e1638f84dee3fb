# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The thread that plays requests: whose turn it is, what they sample, its memory, its failures."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import queue
import threading
from typing import Any, cast

import grpc
import jax
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine, Policy
from earl_jax.engine.relocation import relocate
from earl_jax.envs.text.conversation import Completion
from earl_jax.rollout.config import Limits, make_engine_config
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from earl_jax.serving import _jetstream
from earl_jax.serving.driver import Driver, FairQueue, Request, open_service
from earl_jax.serving.requests import RequestError, RequestOptions
from earl_jax.serving.served_engine import ServedEngine
from earl_jax.serving.server import open_driver
from earl_jax.serving.service import Service
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.allocator import memory_limit
from tests.support.continuations import (
    CONTEXT_TOKENS,
    NUM_SLOTS,
    PAGE_SIZE,
    SEED,
    VOCAB,
    pages_in_use,
    policy,
    prompt,
    scored_continuations,
    served,
)
from tests.support.episodes import CONFIG, MODEL, NUM_DEVICES, collect, tokenizer
from tests.support.serving_here import until

# Cold, where a random model repeats itself, so that drafts are accepted now and then.
COLD = Sampling(temperature=0.3, top_k=20)


# Whose turn it is.


def ask(client: str, number: int = 0) -> Request:
    task = Task(episode=number, group=number, prompt=Prompt(token_ids=(5,)))
    return Request(client=client, task=task, put=lambda event: None)


def test_clients_take_turns_whatever_the_number_of_their_requests():
    waiting = FairQueue()
    asked = [ask("::1", i) for i in range(6)] + [ask("b", i) for i in range(2)] + [ask("c")]
    for each in asked:
        waiting.add(each)
    assert len(waiting) == 9
    taken = [waiting.take() for _ in asked]
    names = [f"{request.client}/{request.task.episode}" for request in taken]
    assert names == ["::1/0", "b/0", "c/0", "::1/1", "b/1", "::1/2", "::1/3", "::1/4", "::1/5"]
    assert len(waiting) == 0


def test_the_client_with_the_fewest_requests_in_slots_is_next():
    waiting = FairQueue()
    held = [ask("a", i) for i in range(3)]
    for each in held:
        waiting.add(each)
        assert waiting.take() is each
    last = ask("a", 3)
    waiting.add(last)
    later = [ask("b", i) for i in range(4)]
    for each in later:
        waiting.add(each)
    assert [waiting.take() for _ in range(3)] == later[:3]
    assert waiting.take() is last
    # Those that are over count no more; one that waits is only taken from the queue.
    gone = ask("c")
    waiting.add(gone)
    waiting.remove(gone)
    waiting.remove(gone)
    last = ask("a", 4)
    waiting.add(last)
    for each in held:
        waiting.end(each)
    assert waiting.take() is last and waiting.take() is later[3]
    waiting.add(gone)
    assert waiting.take_all() == [gone] and len(waiting) == 0


# What requests sample.


class Asked:
    """A request of a client, and what came of it."""

    def __init__(self, number: int, length: int, count: int) -> None:
        self.ids, self.count = prompt(number, length), count
        self.events: queue.Queue = queue.Queue()
        task = Task(
            episode=number,
            group=number,
            prompt=Prompt(token_ids=tuple(self.ids.tolist())),
            seed=1000 + number,
            limits=Limits(max_turn_tokens=count),
            sampling=COLD,
        )
        self.request = Request(client=f"client {number % 3}", task=task, put=self.events.put)

    def rounds(self) -> list:
        """The tokens of each round, up to the end; raises what ended it otherwise."""
        found = []
        while (event := self.events.get(timeout=600)) is not None:
            if isinstance(event, RequestError):
                raise event
            found.append(event)
        return found

    def tokens(self) -> list[int]:
        return [token for each in self.rounds() for token in each.token_ids]


@contextlib.contextmanager
def driving(engine: ServedEngine, failures: list | None = None):
    """A driver that plays requests, and ends."""
    driver = Driver(engine, policy(engine))

    def deliver(events):
        for request, event in events:
            request.put(event)

    driver.start(deliver, lambda: failures.append(driver.failure) if failures is not None else None)
    try:
        yield driver
    finally:
        driver.stop()
    assert (driver.failure is not None) == bool(failures)


@functools.cache
def expected(asked: tuple[tuple[int, int, int], ...]):
    """Token ids, log-probs and model log-probs of requests, up to the end of turn."""
    prompts = [prompt(number, length) for number, length, _ in asked]
    seeds = [1000 + number for number, _, _ in asked]
    steps = max(count for _, _, count in asked)
    columns = scored_continuations(prompts, seeds, steps, COLD)
    found = []
    for row, (_, _, count) in enumerate(asked):
        ids = columns[0][row, :count].tolist()
        end = tokenizer().eos_token_id
        size = ids.index(end) + 1 if end in ids else count
        found.append((ids[:size], *(column[row, :size] for column in columns[1:])))
    return found


# Twelve on eight slots.
SIZES = tuple((number, 5 + 4 * number, 40 - 2 * number) for number in range(12))


def answered(engine: ServedEngine) -> tuple[list[Asked], list]:
    """Requests of SIZES, where pages are short, and the rounds of each."""
    asked = [Asked(*size) for size in SIZES]
    with driving(engine) as driver:
        for each in asked:
            driver.submit(each.request)
        played = [each.rounds() for each in asked]
        assert until(lambda: not driver._playing and pages_in_use(driver) == 0)
        assert driver._service.stats.preempted_episodes > 0
        assert driver._service.session.pool == engine.pool
    return asked, played


@pytest.fixture(scope="module")
def short_of_pages():
    """An engine on one device with pages for one context: most requests wait."""
    engine = served(cache_tokens=CONTEXT_TOKENS)
    return engine, *answered(engine)


def check_answers(played) -> None:
    """The tokens are the policy's, as are their log-probs."""
    for rounds, (ids, *scores) in zip(played, expected(SIZES), strict=True):
        assert [token for each in rounds for token in each.token_ids] == ids
        assert max(len(each.token_ids) for each in rounds) <= 4
        for name, wanted in zip(("logprobs", "model_logprobs"), scores, strict=True):
            values = [value for each in rounds for value in getattr(each, name)]
            np.testing.assert_allclose(values, wanted, atol=2e-4)


def test_requests_have_the_tokens_of_the_policy_where_pages_are_short(short_of_pages):
    _, _, played = short_of_pages
    check_answers(played)


def rollouts_engine(mesh: MeshShape) -> Engine:
    """The engine of a rollout of the served policy, made as runs make it."""
    config = make_engine_config(
        dataclasses.replace(CONFIG, num_slots=NUM_SLOTS, episodes_per_step=NUM_SLOTS),
        MODEL,
        VOCAB,
        num_devices=NUM_DEVICES,
        seed=SEED,
        model_logprobs=False,
    )
    rules = config.rules._replace(end_of_turn_ids=(tokenizer().eos_token_id,))
    layout = make_layout(mesh, jax.devices()[: mesh.num_devices])
    return Engine(dataclasses.replace(config, rules=rules), layout)


def test_served_tasks_have_the_tokens_of_a_rollout_on_another_mesh(short_of_pages):
    """On one device, where pages are short and requests are preempted; and on four."""
    engine, asked, replies = short_of_pages
    rollout = collect(
        None,
        [each.request.task for each in asked],
        None,
        params=policy(engine).params,
        max_tokens=CONTEXT_TOKENS,
        num_slots=NUM_SLOTS,
        episodes_per_step=NUM_SLOTS,
        player=rollouts_engine(MeshShape(data=2, tensor=2)),
        new_conversation=lambda: Completion(engine.tokenizer.decode, engine.tokenizer.ends),
    )
    assert rollout.stats.preempted_episodes == 0
    lengths = []
    for trajectory, rounds in zip(rollout.trajectories, replies, strict=True):
        _, turn = trajectory.turns
        assert list(turn.token_ids) == [token for each in rounds for token in each.token_ids]
        logprobs = [value for each in rounds for value in each.logprobs]
        np.testing.assert_allclose(turn.logprobs, logprobs, atol=5e-5)
        lengths.append(len(turn.token_ids))
    assert sum(lengths) > 60 and len({*lengths}) > 3, "or the test shows nothing"


class Changing(RolloutService):
    """Goes on in the middle on another mesh, and there with other weights."""

    steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 4:
            there = served(MeshShape(tensor=2), cache_tokens=CONTEXT_TOKENS).engine
            session = self.session
            self.move(relocate(session, there, session.max_tokens, session.pool))
        if self.steps == 6:
            self.release_weights()
            values = jax.tree.map(lambda leaf: 0.9 * leaf, policy(served()).params)
            self.update_weights(Policy(params=values, version=1), "recompute")
        return super().step()


def test_served_and_rolled_out_tokens_are_the_same_through_a_move_and_an_update(monkeypatch):
    """At the same rounds, with pages for one context, so that episodes are preempted."""
    engine = served(cache_tokens=CONTEXT_TOKENS)
    todo = [Asked(*size).request.task for size in SIZES[-NUM_SLOTS:]]
    monkeypatch.setattr("earl_jax.serving.driver.RolloutService", Changing)
    monkeypatch.setattr("tests.support.episodes.RolloutService", Changing)
    replies = collections.defaultdict(list)
    service = open_service(
        engine, policy(engine), lambda ticket, tokens: replies[ticket].extend(tokens.token_ids)
    )
    service.submit(todo)
    turns = {each.ticket: each.trajectory.turns[-1] for some in service.drain() for each in some}
    rollout = collect(
        None,
        todo,
        None,
        params=policy(engine).params,
        max_tokens=CONTEXT_TOKENS,
        num_slots=NUM_SLOTS,
        episodes_per_step=NUM_SLOTS,
        chunk_size=engine.rollout.chunk_size,
        pages=engine.pool.pages,
        grow=lambda session, tokens, pages: session,
        num_devices=1,
        on_tokens=None,
        player=engine.engine,
        new_conversation=lambda: Completion(engine.tokenizer.decode, engine.tokenizer.ends),
    )
    for ticket, trajectory in enumerate(rollout.trajectories):
        turn = trajectory.turns[-1]
        assert list(turn.token_ids) == replies[ticket] == list(turns[ticket].token_ids)
        assert turn.versions == turns[ticket].versions
        np.testing.assert_allclose(turn.logprobs, turns[ticket].logprobs, atol=5e-5)
    versions = [{*turn.versions} for turn in turns.values()]
    assert {0, 1} in versions and {1} in versions, "or the test shows nothing"
    for stats in (service.stats, rollout.stats):
        assert stats.preempted_episodes > 0 and stats.recomputed_tokens > 0


def test_requests_that_are_withdrawn_leave_nothing_behind():
    """In slots and while they wait; those that stay are as they were."""
    engine = served(cache_tokens=CONTEXT_TOKENS)
    asked = [Asked(*size) for size in SIZES]
    with driving(engine) as driver:
        for each in asked:
            driver.submit(each.request)
        asked[0].events.get(timeout=600)
        for each in (*asked[1::2], *asked[1::2]):
            driver.withdraw(each.request)
        stay = [each.tokens() for each in asked[2::2]]
        asked[0].rounds()
        driver.withdraw(asked[0].request)
        assert until(lambda: not driver._playing and pages_in_use(driver) == 0)
        assert not driver._queue and not driver._queue._num_taken
    assert stay == [ids for ids, *_ in expected(SIZES)[2::2]]


# Its memory.


@pytest.mark.slow
def test_tables_widen_for_a_long_request_and_the_pool_stays(few_objects):
    """From 48 tokens to 96, of which the pool holds one request: the other waits for its pages.

    All of it takes no more memory than the server took when it began.
    """
    given = served(MeshShape(), first_context_tokens=48, cache_tokens=1)
    sizes = ((1, 5, 12), (2, 45, 20), (3, 37, 40), (4, 37, 6), *((n, 5, 4) for n in range(5, 11)))
    asked, wanted = [Asked(*size) for size in sizes], [ids for ids, *_ in expected(sizes)]
    gc.collect()
    with memory_limit(None) as allocator, driving(given) as driver:
        assert (driver._service.session.max_tokens, driver._service.session.pool.pages) == (48, 12)
        at_first = allocator.peak_bytes
        for each in asked:
            driver.submit(each.request)
        assert [each.tokens() for each in asked] == wanted
        session = driver._service.session
        assert (session.max_tokens, session.pool.pages) == (96, 12)
        assert driver._service.stats.preempted_episodes > 0
        assert allocator.peak_bytes == at_first


def test_a_round_with_the_longest_context_runs_before_requests_come(few_objects):
    """As much memory as rounds of 48 tokens take, which is too little for those of 96."""
    long = served(first_context_tokens=48, cache_tokens=CONTEXT_TOKENS)
    serving = dataclasses.replace(long.serving, context_tokens=48)
    short, weights = dataclasses.replace(long, serving=serving), policy(long)
    assert short.pool == long.pool
    gc.collect()
    with memory_limit(None) as allocator:
        open_driver(short, weights)
        gc.collect()
    with memory_limit(allocator.peak_bytes) as limited:
        open_driver(short, weights)
        gc.collect()
        assert limited.refused == []
        with pytest.raises(
            InputError, match=r"of 96 tokens and a context of 96 \(.* --max_context"
        ):
            open_driver(long, weights)
    assert limited.refused


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 4 * 12), (1, 12), (2 * 12 * 8, 12), (2 * 20 * 8, 20), (10**9, 4 * 12)]
)
def test_pool_holds_a_context_per_data_shard_and_at_most_those_of_all_slots(tokens, pages):
    engine = served(MeshShape(data=2))
    assert (CONTEXT_TOKENS, PAGE_SIZE, NUM_SLOTS) == (96, 8, 8)
    serving = dataclasses.replace(engine.serving, cache_tokens=tokens)
    assert dataclasses.replace(engine, serving=serving).pool == (2, pages)


# Its failures.


def test_an_error_of_the_devices_ends_all_requests(capfd):
    engine, failures = served(cache_tokens=CONTEXT_TOKENS), []
    asked = [Asked(number, 9, 40) for number in range(NUM_SLOTS + 2)]
    threads = threading.active_count()
    with driving(engine, failures) as driver:

        def lost(*given):
            raise RuntimeError("the device is lost\nand more")

        driver._service._rounds.play = lost
        for each in asked[:-1]:
            driver.submit(each.request)
        for each in asked[:-1]:
            with pytest.raises(RequestError, match=r"ends \(RuntimeError: the device is lost\)$"):
                each.rounds()
        assert until(lambda: failures) and not driver.live
        with pytest.raises(RequestError, match="the server failed, and ends") as late:
            driver.submit(asked[-1].request)
        assert late.value.code == grpc.StatusCode.INTERNAL
    assert until(lambda: threading.active_count() <= threads)
    assert "the server cannot go on:" in capfd.readouterr().err


def test_a_request_that_begins_when_the_server_has_closed_is_refused():
    """As one whose streamed answer was begun just before."""
    driver, refusal = (
        Driver(served(), policy(served())),
        RequestError(grpc.StatusCode.UNAVAILABLE, ""),
    )

    async def ask_late() -> None:
        service = Service(driver, cast(Any, None), max_waiting=4, max_waiting_per_client=4)
        name = service.enter("client")
        reply = service.reply(name, [5], 4, RequestOptions(sampling=COLD), is_text=False)
        service.close(refusal)
        async with contextlib.aclosing(reply.pieces()) as pieces, asyncio.timeout(10):
            await anext(pieces)

    with pytest.raises(RequestError) as late:
        asyncio.run(ask_late())
    assert late.value is refusal and len(driver._queue) == 0


# JetStream's messages.


def test_another_version_of_jetstream_is_refused_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(ImportError, match=r"google-jetstream 0\.3\.0 .* 0\.2\.2; run `uv sync`"):
        _jetstream.import_messages()

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match=r"google-jetstream 0\.2\.2 is not installed"):
        _jetstream.import_messages()
