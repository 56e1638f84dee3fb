# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations: what the next request finds in the KV cache of those before it."""

import dataclasses
import functools
import random

import numpy as np
import pytest

from earl_jax.engine.engine import Policy
from earl_jax.engine.host_pages import HostPages
from earl_jax.rollout.config import CacheRules, Limits
from earl_jax.rollout.host_sessions import HostSessions, IdleSession
from earl_jax.rollout.task import Prompt, Task
from earl_jax.serving.driver import open_service
from earl_jax.sharding.layout import MeshShape
from tests.support.continuations import CONTEXT_TOKENS, continuations, policy, prompt, served
from tests.support.episodes import MODEL, WINDOWED

# Pages have 8 tokens and chunks 16: less than a chunk is not taken over.
REPLY, SLOTS = 12, 4
# Fourteen pages: a whole context and two more.
SHORT = CONTEXT_TOKENS + 16


@functools.cache
def player(mesh=MeshShape(), model=MODEL):  # noqa: B008
    return served(mesh, num_slots=SLOTS, model=model)


def open_served(mesh=MeshShape(), model=MODEL, **serving):  # noqa: B008
    engine = player(mesh, model)
    sizes = dataclasses.replace(engine.serving, **serving)
    engine = dataclasses.replace(engine, serving=sizes)
    return open_service(engine, policy(engine), lambda ticket, tokens: None)


class Chat:
    """A conversation: each request has all ids so far, and five more."""

    def __init__(self, number: int, length: int = 20) -> None:
        self.number, self.ids = number, prompt(number, length).tolist()

    def task(self, reply: int = REPLY) -> Task:
        limits = Limits(max_turn_tokens=reply, max_episode_tokens=CONTEXT_TOKENS)
        return Task(
            episode=self.number, group=self.number, seed=self.number,
            prompt=Prompt(token_ids=tuple(self.ids)), limits=limits,
        )  # fmt: skip

    def take(self, turn) -> None:
        self.ids += [*turn.token_ids, *prompt(100 + len(self.ids), 5).tolist()]


def say(service, chat, reply: int = REPLY):
    """Plays a request alone. Returns its reply, and the tokens that were read and taken over."""
    before = service.stats.prefill_tokens, service.stats.shared_tokens
    service.submit([chat.task(reply)])
    [finished] = [each for some in service.drain() for each in some]
    service.release(finished.row)
    turn = finished.trajectory.turns[-1]
    chat.take(turn)
    stats = service.stats
    return turn, stats.prefill_tokens - before[0], stats.shared_tokens - before[1]


def test_prompts_are_found_again_whatever_order_conversations_go_on_in():
    """Fewer than slots: each begins in the slot whose cache is the least likely to be of use."""
    service = open_served()
    chats = [Chat(number) for number in range(SLOTS - 1)]
    for chat in chats:
        assert say(service, chat)[1:] == (20, 0)
    # All but the last token, which went in with a decode step.
    known = dict.fromkeys(chats, 19)
    for chat in (chats[2], chats[2], chats[0], chats[1], chats[0], chats[2]):
        number = len(chat.ids)
        assert say(service, chat)[1:] == (number - known[chat], known[chat])
        known[chat] = number - 1


def test_a_fifth_conversation_takes_the_slot_of_the_one_that_ended_first():
    service = open_served()
    chats = [Chat(number) for number in range(SLOTS + 1)]
    for chat in chats:
        say(service, chat)
    assert say(service, chats[0])[2] == 0
    assert [say(service, chat)[2] for chat in chats[2:]] == [19, 19, 19]


def test_with_replies_kept_a_request_reads_only_what_is_new():
    """And samples what full forward passes over all of its ids give."""
    service = open_served(keep_replies=True)
    chats = [Chat(number) for number in range(SLOTS - 1)]
    for chat in chats:
        say(service, chat)
    for _ in range(2):
        for chat in reversed(chats):
            ids = list(chat.ids)
            turn, read, taken = say(service, chat)
            # Five new ones, and the token that was sampled last and never appended.
            assert (read, taken) == (6, len(ids) - 6)
            length = len(turn.token_ids)
            [expected] = continuations([np.array(ids)], [chat.number], length)
            assert list(turn.token_ids) == expected.tolist()


def test_without_it_a_reply_is_the_same_to_the_last_bit_whatever_is_in_the_caches():
    used, chat = open_served(), Chat(1)
    say(used, chat)
    again = Chat(1)
    again.ids = list(chat.ids)
    turn, _, taken = say(used, chat)
    fresh, _, nothing = say(open_served(), again)
    assert (taken, nothing) == (19, 0)
    assert turn.token_ids == fresh.token_ids and turn.logprobs == fresh.logprobs


def test_kv_cache_of_older_weights_is_not_reused():
    """The prompt was read before the update, and half of the reply sampled behind it."""
    service, chat = open_served(keep_replies=True), Chat(1)
    service.submit([chat.task()])
    service.step()
    service.step()
    params = service.session.policy.params
    service.update_weights(Policy(params=params, version=1), "keep")
    [finished] = [each for some in service.drain() for each in some]
    service.release(finished.row)
    turn = finished.trajectory.turns[-1]
    assert set(turn.versions) == {0, 1}, "or the test shows nothing"
    chat.take(turn)
    assert say(service, chat)[2] == 0
    assert say(service, chat)[2] > 0


@pytest.mark.parametrize("keep_replies", [False, True])
def test_the_oldest_conversation_gives_up_its_pages_first(keep_replies):
    """The pool has 12 pages, two short ones keep 3 or 4 each, and a long one needs 8."""
    service = open_served(keep_replies=keep_replies, cache_tokens=CONTEXT_TOKENS)
    assert service.session.pool.total == 12
    first, second = Chat(0), Chat(1)
    say(service, first)
    say(service, second)
    say(service, Chat(2, 56), reply=4)
    pages = service._blocks._pages
    kept = 4 if keep_replies else 3
    assert [pages.num_held(slot) for slot in (0, 1)] == [0, kept]


@pytest.mark.parametrize("common", [36, 15, 7])
def test_two_requests_go_on_from_one_conversation_where_pages_are_short(common):
    """The first takes over what the second was to go on from in its own slot, which waits then.

    The second has the first `common` tokens of the conversation; those of less than a chunk it
    reads anew.
    """
    service = open_served(keep_replies=True, cache_tokens=SHORT)
    # Slot 0 is free again when the conversation in slot 3 ends, and the others still play.
    chats = [Chat(number, 3) for number in range(3)]
    kept = Chat(3, 30)
    tickets = service.submit([chats[0].task(1), *(c.task(60) for c in chats[1:]), kept.task(7)])
    ended = {}
    while tickets[3] not in ended:
        for finished in service.step():
            ended[finished.ticket] = finished.trajectory
            service.release(finished.row)
    assert tickets[1] not in ended and tickets[2] not in ended, "or the test shows nothing"
    begin = [*kept.ids, *ended[tickets[3]].turns[-1].token_ids][:36]
    branches = [Chat(4), Chat(5)]
    for chat, number in zip(branches, (36, common), strict=True):
        chat.ids = [*begin[:number], 1 + chat.number]
    before = service.submit([chat.task(8) for chat in branches])
    for finished in [each for some in service.drain() for each in some]:
        ended[finished.ticket] = finished.trajectory
        service.release(finished.row)
    for ticket, chat in zip(before, branches, strict=True):
        reply = list(ended[ticket].turns[-1].token_ids)
        [expected] = continuations([np.array(chat.ids)], [chat.number], len(reply))
        assert reply == expected.tolist()


@pytest.mark.timeout(60)
def test_a_request_goes_on_from_its_own_slot_where_pages_for_a_longer_beginning_are_short(
    monkeypatch,
):
    """The longer one is in the other row shard; its copy would need 9 pages besides the slot's."""
    rules = functools.partial(CacheRules, copy_prefixes="on")
    monkeypatch.setattr("earl_jax.serving.driver.CacheRules", rules)
    service = open_served(MeshShape(data=2), keep_replies=True, cache_tokens=2 * CONTEXT_TOKENS)
    near, far = Chat(0, 80), Chat(1, 80)
    far.ids[:17] = near.ids[:17]
    for chat, reply in ((near, 6), (Chat(2, 3), 1), (far, 6), (Chat(3, 3), 1)):
        say(service, chat, reply)
    pages = service._blocks._pages
    assert [pages.num_held(slot) for slot in (0, 2)] == [11, 11], "or the test shows nothing"
    last = Chat(4)
    last.ids = [*far.ids[:65], *last.ids[:4]]
    ids = list(last.ids)
    turn, read, taken = say(service, last, reply=3)
    assert (read, taken) == (len(ids) - 17, 17)
    [expected] = continuations([np.array(ids)], [last.number], len(turn.token_ids))
    assert list(turn.token_ids) == expected.tolist()


def test_a_slot_that_has_begun_counts_pages_from_what_it_has_read_since():
    """Not from what it went on from, which is less, and fewer pages for the rounds to come."""
    service, chats = open_served(keep_replies=True), [Chat(4 + number) for number in range(SLOTS)]
    for chat in chats:
        say(service, chat)
    # The first is in the slot that is used next.
    service.submit([chats[0].task()])
    service.step()
    assert (service.num_live, service.stats.shared_tokens) == (1, 31), "or the test shows nothing"
    assert [service._blocks._idle.own(slot) for slot in range(SLOTS)] == [0] * SLOTS


def test_a_request_that_fills_its_table_to_the_last_token_does_not_widen_it():
    """Rounds have four tokens, and three are left of the turn in the last one."""
    service = open_served(first_context_tokens=48)
    chat = Chat(0, 37)
    turn, _, _ = say(service, chat, reply=11)
    assert len(turn.token_ids) == 11, "or the test shows nothing"
    assert service.session.max_tokens == 48


def test_more_conversations_than_slots_are_found_again_in_host_memory():
    """Each reads what is new, and goes on as full forward passes over all of its ids do."""
    service = open_served(keep_replies=True)
    chats = [Chat(number) for number in range(2 * SLOTS + 1)]
    for chat in chats:
        assert say(service, chat)[1:] == (20, 0)
    for _ in range(2):
        for chat in chats:
            ids = list(chat.ids)
            turn, read, taken = say(service, chat)
            # Five new ones, and the token that was sampled last and never appended.
            assert (read, taken) == (6, len(ids) - 6)
            [expected] = continuations([np.array(ids)], [chat.number], len(turn.token_ids))
            assert list(turn.token_ids) == expected.tolist()
    blocks = service._blocks
    # Four are in slots.
    assert len(blocks._idle.store) == len(chats) - SLOTS and blocks._host.moved_bytes > 0


def test_the_session_that_is_found_is_that_of_comparing_with_each():
    """The first of those with the most in common; some need more of it. 300 come, 100 go."""
    rng, least, kept = np.random.default_rng(0), 2, {}
    store = HostSessions(HostPages(0, num_slots=1), least)

    def ids(longest: int) -> np.ndarray:
        return rng.integers(0, 3, rng.integers(least, longest)).astype(np.int32)

    for step in range(300):
        if step % 3 == 2:
            store.remove(*rng.choice([*kept], 1))
        needs = int(rng.integers(0, 6))
        store.add(IdleSession(ids=ids(12), parts=[], gone=(), least=needs))
        prompt, kept = ids(14), dict(store._sessions)
        found, most = -1, least - 1
        for number, other in kept.items():
            pairs = zip(prompt[:-1], other.ids, strict=False)
            common = [*(a == b for a, b in pairs), False].index(False)
            if common > most and common >= other.least:
                found, most = number, common
        assert store.find(prompt) == (found, most if found >= 0 else 0)
        begins = prompt[:4]
        assert store.holds(begins) == any(
            np.array_equal(other.ids[: len(begins)], begins) and other.least <= len(begins)
            for other in kept.values()
        )
    assert len(kept) == 200


def test_a_full_host_memory_drops_the_least_recently_used_conversation():
    """There is room for the blocks of two conversations."""
    service = open_served(keep_replies=True)
    blocks = service._blocks
    chats = [Chat(number) for number in range(SLOTS + 3)]
    for chat in chats[: SLOTS + 1]:
        say(service, chat)
    assert len(blocks._idle.store) == 1
    blocks._host._limit_bytes = 2 * blocks._host.held_bytes
    for chat in chats[SLOTS + 1 :]:
        say(service, chat)
    assert len(blocks._idle.store) == 2 and blocks._host.held_bytes <= blocks._host._limit_bytes
    # The first conversation is gone; it takes the slot of the fourth, for which the second goes.
    assert say(service, chats[0])[2] == 0
    assert say(service, chats[2])[2] == 31


def test_new_weights_have_read_nothing_that_is_in_host_memory():
    service = open_served(keep_replies=True)
    chats = [Chat(number) for number in range(SLOTS + 2)]
    for chat in chats:
        say(service, chat)
    assert len(service._blocks._idle.store) == 2
    params = service.session.policy.params
    service.update_weights(Policy(params=params, version=1), "keep")
    assert len(service._blocks._idle.store) == 0 and service._blocks._host.held_bytes == 0
    assert say(service, chats[0])[2] == 0


@pytest.mark.slow_except("full")
@pytest.mark.parametrize(
    ("model", "cache_tokens"), [(MODEL, SHORT), (WINDOWED, 48)], ids=["full", "windows"]
)
def test_random_conversations_go_on_as_without_a_cache(model, cache_tokens):
    """Ten, some at once, one of them aborted at times, with few pages and little host memory.

    With windows pages hold 48 tokens in all layers, and one conversation of 96.
    """
    rng = random.Random(0)
    service = open_served(model=model, keep_replies=True, cache_tokens=cache_tokens)
    blocks, chats = service._blocks, {number: Chat(number) for number in range(10)}
    longest = CONTEXT_TOKENS - REPLY - 6
    for turn in range(25):
        if turn == 5:
            # Room for about three of them from now on.
            blocks._host._limit_bytes = 3 * blocks._host.held_bytes // len(blocks._idle.store)
        some = rng.sample(sorted(chats), rng.randint(1, SLOTS))
        tickets = service.submit([chats[number].task() for number in some])
        found = []
        if rng.random() < 0.3:
            found += service.step()
            service.abort([tickets[0]])
        for finished in found + [each for some in service.drain() for each in some]:
            service.release(finished.row)
            if finished.trajectory.stop_reason == "aborted":
                continue
            chat = chats[finished.trajectory.episode]
            reply = finished.trajectory.turns[-1]
            ids, steps = [np.array(chat.ids)], len(reply.token_ids)
            [expected] = continuations(ids, [chat.number], steps, model=model)
            assert list(reply.token_ids) == expected.tolist()
            chat.take(reply)
            if len(chat.ids) > longest:
                chats[chat.number] = Chat(chat.number)
    assert blocks._host.moved_bytes > 0 and len(blocks._idle.store) > 0
    assert blocks._host.held_bytes <= blocks._host._limit_bytes
    for slot in range(SLOTS):
        blocks._pages.keep(slot, 0)
    assert not np.array(blocks._pages.holders()).any()
