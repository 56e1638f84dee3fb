# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rollout service: tasks come and episodes leave while others play; weights change between."""

import dataclasses
import gc
import itertools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.engine.engine import Engine, Policy
from earl_jax.envs.text.conversation import Completion
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from tests.support.allocator import live_bytes
from tests.support.environments import Talker
from tests.support.episodes import (
    GrowPool,
    assert_same_episodes,
    check_nothing_is_held,
    check_row,
    collect,
    engine,
    open_service,
    renderer,
    tasks,
    weights,
)
from tests.support.scores import gaps

SLOTS = 8
# Lectures are 50 tokens and more.
LONG = 64


class Lecture(Talker):
    """Begins with the same long words for every fourth task."""

    def start(self):
        start = super().start()
        return dataclasses.replace(start, text="012345678012345678012345" + str(self.seed % 4))


def lecture(task):
    return Lecture(task.args["seed"])


def small(mesh: MeshShape = MeshShape(data=8)) -> Engine:  # noqa: B008
    """Eight slots: on eight data shards a row and a spare one for each, on one eight rows."""
    return engine(SLOTS, mesh, episodes=SLOTS)


def open_small(pool, make=lecture, mesh=MeshShape(data=8), **changes) -> RolloutService:  # noqa: B008
    given = {"max_tokens": LONG, "share_prefixes": True, "episodes_per_step": SLOTS}
    given |= {"player": small(mesh), "num_slots": SLOTS, "num_devices": mesh.data}
    return open_service(pool, make, **{**given, **changes})


def in_order(found) -> list:
    """Trajectories by ticket, whose rows are no matter."""
    ordered = sorted(found, key=lambda finished: finished.ticket)
    assert len({finished.ticket for finished in ordered}) == len(ordered)
    return [dataclasses.replace(f.trajectory, row=i) for i, f in enumerate(ordered)]


def take(service: RolloutService, finished) -> list:
    """Reads the rows of finished episodes, and gives them back."""
    for each in finished:
        check_row(service, each)
        service.release(each.row)
    return finished


# Tasks that come while others play.


def test_the_oldest_version_of_an_episode_is_known_until_it_is_handed_out():
    """Also while what was sampled behind its last stop string is still to be discarded."""
    service = open_service(
        None,
        None,
        stop_strings=tuple("012345678"),
        new_conversation=lambda: Completion(renderer().decode, renderer().end_of_turn_ids),
    )
    prompt = Prompt(token_ids=(5, 6, 7))
    service.submit([Task(episode=n, group=n, prompt=prompt) for n in range(24)])
    known, held_back = set(), 0
    while service.is_busy:
        handed_out = {finished.ticket for finished in take(service, service.step())}
        known -= handed_out
        held_back += len(service._ended)
        assert known <= service.oldest_versions().keys()
        known = set(service.oldest_versions())
    assert held_back, "or the test shows nothing"


def test_tasks_that_come_one_by_one_play_as_in_a_closed_list(pool):
    closed = collect(pool, tasks(40), max_tokens=LONG)
    service = open_service(pool, max_tokens=LONG)
    found, todo = [], tasks(40)
    while todo:
        assert service.submit([todo.pop(0)]) == [39 - len(todo)]
        found += take(service, service.step())
    assert found and service.is_busy, "some are over before others have come"
    for finished in service.drain():
        found += take(service, finished)
    assert_same_episodes(closed.trajectories, in_order(found))
    assert not service.is_busy and service.step() == []
    check_nothing_is_held(service, LONG)


def test_a_client_that_holds_rows_holds_up_no_slot_that_can_have_another(pool):
    """Rows that are held stay what they are, moved or not; with all of them held nothing begins."""
    service, held = open_small(pool), []
    service.submit(tasks(30))
    with pytest.raises(RuntimeError, match="14 tasks wait, and all 16 rows are held"):
        for finished in service.drain():
            held += finished
            for each in held:
                check_row(service, each)
    assert len(held) == 16 == len({each.row for each in held})
    take(service, held)
    with pytest.raises(InputError, match="holds no finished episode"):
        service.release(held[0].row)
    for finished in service.drain():
        held += take(service, finished)
    assert len(held) == 30
    expected = collect(pool, tasks(30), lecture, max_tokens=LONG)
    assert_same_episodes(expected.trajectories, in_order(held))


def test_prompts_are_not_taken_over_from_rows_that_held_ones_moved_to(pool):
    """A slot's last prompt is in a row that is free; a held row may move there meanwhile."""
    rng, held, moved = random.Random(4), [], 0
    service = open_small(pool)
    service.submit(tasks(80))
    while service.is_busy:
        rows = [each.row for each in held]
        held += service.step()
        moved += sum(each.row != row for each, row in zip(held, rows, strict=False))
        for each in held:
            check_row(service, each)
        rng.shuffle(held)
        while len(held) > 6:
            service.release(held.pop().row)
    assert moved and service.stats.shared_tokens, "or the test shows nothing"


def test_waiting_is_bounded_and_groups_share_their_prompts(pool):
    """A task comes each round; each begins before all that come `batch_size` later."""
    service, begun = open_small(pool), []
    todo = [
        dataclasses.replace(task, group=task.episode // 4, args={"seed": 4 * (task.episode // 4)})
        for task in tasks(60)
    ]
    service.submit([todo.pop(0) for _ in range(20)])
    while service.is_busy:
        take(service, service.step())
        live = {episode.ticket for episode in service._slots if episode is not None}
        begun += sorted(live - set(begun))
        service.submit([todo.pop(0) for _ in range(2) if todo])
    bound = service.rows.batch_size + SLOTS
    seen = {ticket: index for index, ticket in enumerate(begun)}
    assert len(seen) >= 50
    for ticket, later in itertools.combinations(sorted(seen), 2):
        assert later - ticket < bound or seen[ticket] < seen[later]
    assert service.stats.shared_tokens > 0


def test_a_paused_service_keeps_its_live_episodes(pool):
    """Without a step nothing changes, also when an environment answers; then the same tokens come.

    Episode 0 waits for its environment until the pause.
    """
    opened, answered = threading.Event(), threading.Event()

    class Gated(Lecture):
        def step(self, reply):
            assert opened.wait(60)
            result = super().step(reply)
            answered.set()
            return result

    def make(task):
        return lecture(task) if task.episode else Gated(task.args["seed"])

    def facts():
        live = [each and (each.ticket, each.length, each.waits) for each in service._slots]
        tokens = np.asarray(service.session.state.experience.tokens).tolist()
        return live, service.stats.rounds, service.oldest_versions(), tokens

    expected = collect(pool, tasks(24), lecture, max_tokens=LONG)
    service, found = open_small(pool, make, patience_s=0.0), []
    service.submit(tasks(24))
    while service.stats.rounds < 8:
        found += take(service, service.step())
    before = facts()
    opened.set()
    assert answered.wait(60)
    assert facts() == before and service.num_live == SLOTS
    for finished in service.drain():
        found += take(service, finished)
    assert_same_episodes(expected.trajectories, in_order(found))
    check_nothing_is_held(service, LONG)


def test_none_waits_in_its_slot_while_those_behind_it_begin(pool):
    """In an open queue, with pages for few of those in slots; prompts are equally long."""
    mesh, pages, begun = MeshShape(data=2), 10, []
    service = open_small(pool, mesh=mesh, pages=pages, grow=GrowPool(most_pages=pages))
    todo = tasks(60)
    while todo or service.is_busy:
        service.submit([todo.pop(0) for _ in range(SLOTS - service.num_live) if todo])
        take(service, service.step())
        playing = [each.ticket for each in service._slots if each is not None and not each.fresh]
        begun += sorted(set(playing) - set(begun))
    assert len(begun) > 50
    seen = {ticket: index for index, ticket in enumerate(begun)}
    bound = service.rows.batch_size + SLOTS
    for ticket, later in itertools.combinations(sorted(seen), 2):
        assert later - ticket < bound or seen[ticket] < seen[later]


# Tasks that are given up.


def test_an_aborted_task_frees_slot_pages_and_row(pool):
    """Some play and some wait; given again they play as if nothing had been."""
    expected = collect(pool, tasks(24), lecture, max_tokens=LONG)
    service, found = open_small(pool), []
    tickets = service.submit(tasks(24))
    for _ in range(6):
        found += take(service, service.step())
    live = [episode.ticket for episode in service._slots if episode is not None]
    assert len(live) == SLOTS
    chosen = [*live[::2], *tickets[-3:]]
    given_up = service.abort(chosen)
    assert [task.episode for task in given_up] == sorted(chosen)
    assert service.num_live == SLOTS - len(live[::2])
    again = dict(zip(service.submit(given_up), sorted(chosen), strict=True))
    for finished in service.drain():
        found += take(service, finished)
    for each in found:
        each.ticket = again.get(each.ticket, each.ticket)
    assert_same_episodes(expected.trajectories, in_order(found))
    check_nothing_is_held(service, LONG)


def test_tokens_of_an_aborted_task_are_not_those_of_the_next_in_its_slot(pool):
    """The next one waits until another has read their prompt; the slot is still in a turn."""

    class Another(Talker):
        def start(self):
            return dataclasses.replace(super().start(), text="876543210876543210876543210")

    def make(task):
        return Another(task.args["seed"]) if task.episode >= 50 else lecture(task)

    later = tasks(SLOTS, first=50)
    expected = collect(pool, later, make, max_tokens=LONG)
    mesh = MeshShape(data=2)
    a_token_a_round = engine(SLOTS, mesh, episodes=SLOTS, burst=1)
    service, found = open_small(pool, make, mesh, player=a_token_a_round, patience_s=9.0), []
    service.submit(tasks(40))
    # Slots 0 and 4, one of each data shard, will be those that read the prompt.
    while not any(each is not None and each.in_turn for each in service._slots[1:4]):
        assert service.is_busy
        take(service, service.step())
    service.abort()
    service.submit(later)
    for finished in service.drain():
        found += take(service, finished)
    assert_same_episodes(expected.trajectories, in_order(found))
    check_nothing_is_held(service, LONG)


# Weights that change while episodes play.


def play_through_updates(pool, kv: str, **changes):
    """Three versions of the weights, the later two from the 8th and from the 16th round on.

    The last eight episodes are submitted behind the last update.
    """
    service, found = open_small(pool, **changes), []
    service.submit(tasks(32))
    for number in itertools.count():
        found += take(service, service.step())
        if not service.is_busy:
            break
        if number in (6, 14):
            version = 1 + number // 14
            service.update_weights(Policy(params=weights(version), version=version), kv)
            if version == 2:
                service.submit(tasks(SLOTS, first=32))
    check_nothing_is_held(service, LONG)
    return service, in_order(found)


@pytest.mark.parametrize("preemption", ["no", "recompute", "host"])
def test_recomputed_caches_are_those_of_the_new_weights(pool, preemption):
    """Every log-prob is that of a full forward pass of the trainer's decoder.

    With few pages some episodes are preempted meanwhile.
    """
    changes = {}
    if preemption != "no":
        mesh = MeshShape(data=2)
        changes = {"mesh": mesh, "pages": 10, "grow": GrowPool(most_pages=10)}
        changes["preemption"] = preemption
    service, episodes = play_through_updates(pool, "recompute", **changes)
    found = gaps(episodes)
    assert {version for own in found for version, _ in own} == {0, 1, 2}
    assert sum(len({version for version, _ in own}) > 1 for own in found) >= 2
    assert max(gap for own in found for _, gap in own) < 5e-5
    assert service.stats.recomputed_tokens > 0
    assert (service.stats.preempted_episodes > 0) == (preemption != "no")
    # Versions never decrease within an episode.
    assert all([v for v, _ in own] == sorted(v for v, _ in own) for own in found)


def test_kept_caches_go_on_with_the_new_weights(pool):
    """Tokens before the update are exact, and those of episodes that begin after it.

    Of the others the versions are right, and the gap is that of another policy.
    """
    service, episodes = play_through_updates(pool, "keep")
    assert service.stats.recomputed_tokens == 0
    found = gaps(episodes)
    assert max(gap for own in found for version, gap in own if version == 0) < 5e-5
    assert {version for own in found[-SLOTS:] for version, _ in own} == {2}
    assert max(gap for own in found[-SLOTS:] for _, gap in own) < 5e-5
    later = [gap for own in found for version, gap in own if version > own[0][0]]
    assert {version for own in found for version, _ in own} == {0, 1, 2}
    assert later and np.isfinite(later).all()
    assert max(later) > 1e-2, "the claims above can fail"


def test_weights_that_are_let_go_free_their_memory_before_the_next_arrive(pool):
    """All of it, on each device: nothing else holds them, and episodes go on with the next."""
    service = open_small(pool, params=jax.tree.map(jnp.copy, weights()))
    service.submit(tasks(16))
    found = [finished for _ in range(3) for finished in take(service, service.step())]
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(service.session.policy.params))
    gc.collect()
    before = live_bytes()
    service.release_weights()
    assert before - live_bytes() == dict.fromkeys(jax.devices(), num_bytes)
    service.update_weights(Policy(params=weights(1), version=1), "recompute")
    found += [each for finished in service.drain() for each in take(service, finished)]
    assert len(found) == 16


def test_unknown_kv_of_an_update_is_an_error(pool):
    service = open_small(pool)
    with pytest.raises(InputError, match='kv is \'drop\'; it must be "keep" or "recompute"'):
        service.update_weights(Policy(params=weights(), version=1), "drop")  # pyright: ignore
    assert service.session.policy.version == 0
