# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of a step: by hand, and the real decisions driven over a simulated service."""

import collections
import copy
import dataclasses
import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.rollout.event_files import (
    EVENTS,
    Begun,
    begun_groups,
    drop_events,
    events_file,
    read_events,
    set_events_aside,
)
from earl_jax.rollout.events import Events
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.staleness import (
    AsynchronyConfig,
    Group,
    choose_groups,
    choose_with_reuse,
    overdue,
)
from earl_jax.settings.errors import InputError, RunError
from tests.support.simulated import Fate, SimulatedService, Source, check_events, tasks_of


def numbers(chosen):
    return chosen and [group.number for group in chosen]


def test_in_order_takes_the_oldest_tasks_when_all_of_them_are_over():
    groups = [Group(4, 0, 1), Group(5, 1, 0), Group(6, 1, None)]
    assert numbers(choose_groups("in_order", groups, 2, 1, 2)) == [4, 5]
    assert choose_groups("in_order", groups, 2, 1, 3) is None
    assert choose_groups("in_order", groups[1:], 2, 1, 2) is None
    assert choose_groups("in_order", groups[:1], 2, 1, 2) is None


@pytest.mark.parametrize("rule", ["admission", "mask", "drop", "wait"])
def test_the_oldest_finished_groups_are_taken_and_of_these_the_first_that_finished(rule):
    """With a bound of 9 nothing is due yet. In 8 all episodes failed before their first token."""
    groups = [Group(4, 0, 7), Group(5, 1, 2), Group(6, 0, None), Group(7, 1, 1), Group(9, 2, 0)]
    assert numbers(choose_groups(rule, groups, 2, 9, 1)) == [4]
    assert numbers(choose_groups(rule, groups, 2, 9, 2)) == [4, 7]
    assert numbers(choose_groups(rule, groups, 2, 9, 3)) == [4, 5, 7]
    assert numbers(choose_groups(rule, [*groups, Group(8, None, 9)], 2, 9, 2)) == [4, 8]
    assert choose_groups(rule, groups, 2, 9, 5) is None


def test_groups_that_would_be_too_old_later_are_waited_for():
    """Version 3, bound 1: what version 2 began must be in this batch, what 3 began in the next."""
    due = Group(0, 2, None)
    assert choose_groups("wait", [due, Group(1, 3, 0)], 3, 1, 1) is None
    assert numbers(choose_groups("wait", [due._replace(finished=9), Group(1, 3, 0)], 3, 1, 1)) == [
        0
    ]
    # Nothing is due now, but two are due by the next step, which can take one.
    later = [Group(0, 3, None), Group(1, 3, 4), Group(2, None, None)]
    assert numbers(choose_groups("wait", later, 3, 1, 1)) == [1]
    assert choose_groups("wait", [Group(0, 3, None), Group(1, 3, None)], 3, 1, 1) is None
    # Three are due by the next step, which can take two; of the same version two are finished.
    three = [Group(0, 3, None), Group(1, 3, 4), Group(2, 3, 5)]
    assert numbers(choose_groups("wait", three, 3, 1, 2)) == [1, 2]


def test_groups_beyond_the_bound():
    groups = [Group(0, 2, 0), Group(1, 3, None), Group(2, None, None)]
    assert numbers(overdue(groups, 5, 2)) == [0]
    assert numbers(overdue(groups, 6, 2)) == [0, 1]
    assert overdue(groups, 4, 2) == []


def test_groups_are_taken_again_where_too_few_are_finished():
    """Group 6 finished before 4, which is older; 1 to 3 were used once, once and twice."""
    groups = [Group(4, 0, 3), Group(5, 1, None), Group(6, 1, 1)]
    kept, uses = [Group(1, 0, 0), Group(2, 0, 2), Group(3, 0, 4)], {1: 1, 2: 1, 3: 2}
    choose = choose_with_reuse
    assert numbers(choose(groups, kept, uses, 1, 3)) == [4]
    assert numbers(choose(groups, kept, uses, 2, 3)) == [4, 6]
    # The least used first, and of these the one that finished last.
    assert numbers(choose(groups, kept, uses, 3, 3)) == [2, 4, 6]
    assert numbers(choose(groups, kept, uses, 4, 3)) == [1, 2, 4, 6]
    assert numbers(choose(groups, kept, uses, 5, 3)) == [1, 2, 3, 4, 6]
    # Two of six are a third; of seven they are less, and six is all there is.
    assert choose(groups, [*kept, Group(0, 0, 5)], {**uses, 0: 1}, 6, 3) is not None
    assert choose(groups, kept, uses, 6, 3) is None
    assert choose(groups, [*kept, Group(0, 0, 5), Group(7, 0, 6)], {**uses, 0: 1, 7: 1}, 7, 3) is (
        None
    )
    assert choose(groups[:2], kept, uses, 3, 2) is None


class Killed(Exception):
    """The process ended."""


NUM_STEPS = 6
RULES = ["in_order", "wait", "drop", "mask", "admission"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A run: its settings, how its episodes go, and what the machine does meanwhile."""

    rule: str
    bound: int
    size: int
    group_size: int
    parts: int
    order: str
    slots: int
    devices: int
    # Of episode e the e-th, modulo their number.
    fates: list[Fate]
    # Rounds beside each update, and looks at a signal in which the process is killed.
    beside: list[int]
    kills: list[int]
    checkpoint_every: int
    refill: int = 0
    reuse: int = 1
    kv: str = "keep"
    num_steps: int = NUM_STEPS
    # Of group g whether nothing is learnt from it is the g-th, modulo their number.
    useless: tuple[bool, ...] = (False,)
    # Processes that play, each `size` groups of a step; and after each kill, if others.
    players: int = 1
    later_players: tuple[int, ...] = ()

    @property
    def step_size(self) -> int:
        return self.size * self.players

    def is_useless(self, group: int) -> bool:
        return self.useless[group % len(self.useless)]

    @property
    def is_bounded(self) -> bool:
        return self.rule in ("in_order", "wait", "drop")


class Driven:
    """The calls of each process's AsyncPlayer in their order, over simulated services.

    Where one is killed all are resumed.
    """

    def __init__(self, shape: Shape, workdir: Path, replayed=()) -> None:
        self.shape, self.workdir, self.replayed = shape, workdir, list(replayed)
        self.kills = [] if replayed else list(shape.kills)
        self.num_looks = 0
        self.taken: list[list[int]] = []
        self.lost: list[int] = []
        self.lags: list[int] = []
        self.checkpoint = (0, (), 0, Source(shape.step_size).state(), [])
        self.begun = None

    def run(self) -> None:
        self.open_files(self.replayed or [()] * self.shape.players)
        while len(self.taken) < self.shape.num_steps:
            try:
                self.go_on()
            except Killed:
                self.resume()

    def resume(self) -> None:
        """From the checkpoint, of which all that is behind it is dropped."""
        step = self.checkpoint[0]
        self.taken, self.lost = self.taken[:step], list(self.checkpoint[4])
        drop_events(self.workdir, step)
        self.begun = begun_groups(self.workdir, step)
        if self.shape.later_players:
            players, *later = self.shape.later_players
            size = self.shape.step_size // players
            changes = {"players": players, "size": size, "later_players": tuple(later)}
            self.shape = dataclasses.replace(self.shape, **changes)
        self.open_files([()] * self.shape.players)

    def open_files(self, replayed) -> None:
        self.events = [
            Events(events_file(self.workdir, player), events)
            for player, events in enumerate(replayed)
        ]

    def look(self) -> None:
        self.num_looks += 1
        if self.num_looks in self.kills:
            raise Killed

    def new_groups(self, player: int, source: Source) -> OpenGroups:
        shape = self.shape
        settings = AsynchronyConfig(
            max_staleness=shape.bound,
            rule=shape.rule,
            parts=shape.parts,
            refill=shape.refill,
            reuse=shape.reuse,
            kv=shape.kv,
        )
        settings.validate()
        tasks = tasks_of(
            source, size=shape.step_size, group_size=shape.group_size, num_steps=shape.num_steps
        )
        return OpenGroups(
            tasks,
            settings,
            self.events[player],
            is_useless=lambda group: shape.is_useless(group[0].group),
            part=(player, shape.players),
            begun=self.begun,
        )

    def go_on(self) -> None:
        """From the checkpoint on, in new processes."""
        shape, (step, resumed, oldest, state, _) = self.shape, self.checkpoint
        sources = [Source(shape.step_size, copy.deepcopy(state)) for _ in range(shape.players)]
        players = [self.new_groups(player, source) for player, source in enumerate(sources)]
        services, is_whole = [], False
        for version in range(step, shape.num_steps):
            if not services or self.events[0].coming("open"):
                services, is_whole = [self.new_service(version) for _ in players], False
                for groups, service, events in zip(players, services, self.events, strict=True):
                    events.note("open", version=version)
                    groups.open(service, version, resumed, oldest)
            else:
                for groups, service in zip(players, services, strict=True):
                    if shape.kv == "finish":
                        groups.finish_live()
                    groups.publish(version)
                    service.version = version
            self.taken.append([])
            for groups, service in zip(players, services, strict=True):
                self.taken[-1] += self.take_part(groups, service, is_whole=is_whole)
            for player, (groups, service) in enumerate(zip(players, services, strict=True)):
                beside = shape.beside[(version + player) % len(shape.beside)]
                wanted = service.num_steps + beside
                groups.play_beside(lambda: service.num_steps >= wanted)  # noqa: B023
            oldest = min(groups.oldest_step for groups in players)
            is_whole = all(groups.has_next_step for groups in players)
            states = [groups.end_step(version + 1, oldest) for groups in players]
            then = states[0] or sources[0].state()
            if (version + 1) % shape.checkpoint_every == 0:
                numbers = tuple(number for groups in players for number in groups.numbers)
                self.checkpoint = (version + 1, numbers, oldest, then, list(self.lost))

    def new_service(self, version: int) -> SimulatedService:
        shape = self.shape
        return SimulatedService(
            num_slots=shape.slots,
            num_devices=shape.devices,
            num_rows=shape.size * shape.group_size,
            batches=shape.bound + 1 + (shape.reuse > 1),
            fate_of=lambda episode: shape.fates[episode % len(shape.fates)],
            version=version,
            order=shape.order,
            look=self.look,
        )

    def take_part(
        self, groups: OpenGroups, service: SimulatedService, *, is_whole: bool
    ) -> list[int]:
        """Takes a step's groups, in parts unless all is there; the trainer is busy between them."""
        shape, taken, ready_at = self.shape, [], 0
        before = service.num_steps
        while left := shape.size - len(taken):
            is_ready = lambda: service.num_steps >= ready_at  # noqa: B023, E731
            episodes = groups.next_episodes(left, whole=is_whole, is_ready=is_ready)
            number = left if is_whole else shape.size // shape.parts
            assert shape.parts == 1 or len(episodes) == number * shape.group_size
            if is_whole and shape.parts > 1:
                assert service.num_steps == before, "a step that is there waits for no round"
            ready_at = service.num_steps + shape.beside[len(taken) % len(shape.beside)]
            for each in episodes:
                check_episode(each.trajectory, service.tasks[each.ticket], groups.version, shape)
                self.lags += [groups.version - v for v in versions_of(each.trajectory)]
            groups.copied(episodes)
            numbers = [each.trajectory.group for each in episodes[:: shape.group_size]]
            assert (
                len(episodes)
                == len(numbers) * shape.group_size
                == len(set(numbers)) * (shape.group_size)
            )
            taken += numbers
            new = len(taken) - groups.num_reused
            assert len(groups._groups) + new <= (shape.bound + 1) * shape.size
            assert new * shape.reuse >= len(taken)
            self.check_rows(groups, service)
        refilled = [lost.group for lost in groups.refilled[:: shape.group_size]]
        assert all(shape.is_useless(number) for number in refilled)
        most = shape.refill * shape.size
        assert len(refilled) <= most
        if shape.refill and any(shape.is_useless(number) for number in taken):
            assert len(refilled) == most
        self.lost += [lost.group for lost in groups.dropped[:: shape.group_size]] + refilled
        groups.count_from_here()
        # Each round plays on some episode, or ends or hands out one.
        begun = [service.tasks[ticket].episode for ticket in service.begun]
        most = sum(service.fate_of(episode).most_rounds for episode in begun)
        assert service.num_steps <= most
        return taken

    def check_rows(self, groups: OpenGroups, service: SimulatedService) -> None:
        """Rows are held for finished episodes of open groups and of kept ones, and no others."""
        kept = groups._kept.values()
        assert len(kept) <= self.shape.size * (self.shape.reuse > 1)
        assert all(0 < group.uses < self.shape.reuse for group in kept)
        held = {row for rows in service._rows._held for row in rows}
        assert held == {
            each.row
            for group in [*groups._groups.values(), *kept]
            for each in group.episodes.values()
        }


def versions_of(trajectory) -> list[int]:
    return [version for turn in trajectory.turns for version in turn.versions]


def check_episode(trajectory, task, version: int, shape: Shape) -> None:
    """Its task is that of its number, and no token is newer than the step, or too old."""
    versions = versions_of(trajectory)
    assert versions == sorted(versions) and all(v <= version for v in versions)
    assert trajectory.episode == task.episode and trajectory.group == task.group
    assert task.args == {"number": task.group}
    assert shape.kv == "keep" or len(set(versions)) <= 1, "new weights interrupted it"
    if shape.is_bounded and versions:
        assert version - versions[0] <= shape.bound


@st.composite
def shapes(draw) -> Shape:
    rule = draw(st.sampled_from(RULES))
    reuse = draw(st.integers(1, 3)) if rule == "drop" else 1
    is_long = draw(st.sampled_from([False, False, False, True]))
    bound = draw(st.integers(5, 16) if is_long else st.integers(int(reuse > 1), 4))
    # A run that can reach its bound; where it is long, of few groups a step.
    num_steps = max(NUM_STEPS, bound + 2)
    size = draw(st.integers(1, 2 if is_long else 4))
    parts = [parts for parts in range(1, size + 1) if size % parts == 0]
    devices = draw(st.integers(1, 3))
    ends = st.sampled_from(["end", "end", "late", "failed", "hung"])
    useless = st.lists(st.booleans(), min_size=1, max_size=5)
    fate = st.builds(Fate, rounds=st.integers(1, 24), idle=st.integers(0, 2), ends=ends)
    return Shape(
        rule=rule,
        bound=bound,
        num_steps=num_steps,
        size=size,
        group_size=draw(st.integers(1, 3)),
        parts=draw(st.sampled_from(parts)) if rule == "in_order" else 1,
        order=draw(st.sampled_from(["fifo", "longest"])),
        slots=draw(st.integers(1, 4)) * devices,
        devices=devices,
        fates=draw(st.lists(fate, min_size=1, max_size=24)),
        beside=draw(st.lists(st.integers(0, 90 if is_long else 12), min_size=1, max_size=4)),
        kills=draw(st.lists(st.integers(1, 120), max_size=2)),
        checkpoint_every=draw(st.integers(1, 3)),
        refill=draw(st.integers(0, 2)) if rule == "drop" and reuse == 1 else 0,
        reuse=reuse,
        kv=draw(st.sampled_from(["keep", "keep", "finish"])),
        useless=tuple(draw(useless)),
        players=draw(st.sampled_from([1, 1, 2] if is_long else [1, 1, 2, 3])),
    )


@given(shape=shapes())
@settings(max_examples=50, deadline=None)
def test_every_task_is_trained_on_once_within_the_bound_through_failures_and_kills(shape):
    """A run of any lengths, with hung, failed and slow episodes, ends and can be replayed."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        run = Driven(shape, Path(first))
        run.run()
        taken = [number for step in run.taken for number in step]
        everything, size = list(range(shape.num_steps * shape.step_size)), shape.step_size
        assert [len(step) for step in run.taken] == [size] * shape.num_steps
        assert len(set(run.lost)) == len(run.lost) and not {*taken} & {*run.lost}
        assert all(len(set(step)) == size for step in run.taken)
        assert max(collections.Counter(taken).values()) <= shape.reuse
        if shape.rule == "in_order":
            assert [sorted(step) for step in run.taken] == [
                everything[i : i + size] for i in range(0, len(everything), size)
            ]
        if shape.rule != "drop":
            assert sorted(taken) == everything and not run.lost
        # Tasks come again only in the place of those that were given up.
        assert len({*taken} - {*everything}) <= len(run.lost)
        events = [read_events(Path(first), player) for player in range(shape.players)]
        for player, own in enumerate(events):
            check_events(own)
            check_submitted(own, shape, player)
        # A replay does the same, whatever the updates take.
        other = dataclasses.replace(shape, beside=[7], kills=[], checkpoint_every=1)
        again = Driven(other, Path(second), events)
        again.run()
        assert all(own.is_over for own in again.events)
        assert (again.taken, again.lost) == (run.taken, run.lost)


@pytest.mark.parametrize(
    ("players", "later", "rule"),
    [
        *itertools.product([1, 2, 4], [(2, 1), (4, 2)], ["in_order", "drop"]),
        *itertools.product([4], [(1,)], ["wait", "mask", "admission"]),
    ],
)
def test_a_run_goes_on_with_other_numbers_of_players(tmp_path, rule, players, later):
    """Killed at any of some moments: each task is played to its end once, within the bound."""
    for first in range(5, 34, 7):
        run = driven(
            tmp_path / str(first),
            rule=rule,
            bound=2,
            size=8 // players,
            players=players,
            later_players=later,
            kills=[first, first + 20],
            checkpoint_every=2,
            fates=[Fate(rounds=n) for n in (9, 2, 3, 2, 1)],
        )
        taken = [number for step in run.taken for number in step]
        assert [len(step) for step in run.taken] == [8] * NUM_STEPS
        assert len(set(taken + run.lost)) == len(taken) + len(run.lost)
        if rule in ("in_order", "wait", "drop"):
            assert max(run.lags) <= 2
        if rule != "drop":
            assert sorted(taken) == list(range(8 * NUM_STEPS)) and not run.lost
        assert run.shape.players in later, "it was killed"


def test_events_of_a_round_that_came_to_no_end_are_left_out_of_a_replay():
    """But only where the service was opened anew behind it."""
    answers = {"event": "answers", "version": 0, "call": 1}
    trained = {"event": "trained", "version": 0, "step": 1, "round": 2}
    for behind in ([], [{"event": "open", "version": 1}]):
        events = Events(replayed=[answers, trained, *behind])
        events.note("trained", step=1, round=2)
        assert events.is_over == (not behind)
    events = Events(replayed=[answers, trained, {"event": "publish", "version": 1}])
    with pytest.raises(RunError, match="event 1 of the run that is replayed is .*answers"):
        events.note("trained", step=1, round=2)


def test_groups_that_finished_as_they_liked_are_not_shared_out_among_others(tmp_path):
    given = {"rule": "wait", "size": 8, "later_players": (2,), "kills": [29], "bound": 2}
    with pytest.raises(InputError, match="go on with as many processes that play as before"):
        driven(tmp_path / "run", fates=[Fate(rounds=n) for n in (9, 2, 3, 2, 1)], **given)


def test_a_run_may_have_been_synchronous_and_have_had_another_rule(tmp_path):
    """Steps before the first event are known by their number, and dropped groups are over."""
    given = {"rule": "drop", "bound": 1, "fates": [Fate(rounds=n) for n in (30, 2, 2, 2)]}
    run = driven(tmp_path / "run", **given)
    assert run.lost
    drop_events(tmp_path / "run", 3)
    begun = begun_groups(tmp_path / "run", 3)
    run.shape = dataclasses.replace(run.shape, rule="in_order")
    run.begun, run.events = begun, [Events()]
    groups = run.new_groups(0, Source(2))
    groups.open(run.new_service(3), 3, (), 0)
    assert groups.numbers == begun.open_groups
    # As if the first two steps had been played by another loop.
    path = tmp_path / "run" / EVENTS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [each for each in lines if min(each.get("groups", [4])) >= 4]
    path.write_text("".join(json.dumps(each) + "\n" for each in kept))
    assert begun_groups(tmp_path / "run", 3).first == 4
    assert begun_groups(tmp_path / "run", 5) is None, "there are no events up to there"


def test_events_of_a_rollout_that_was_stopped_are_not_replayed(tmp_path):
    """Nor a line that was cut short; a run without a step that has ended cannot be."""
    run = driven(tmp_path / "run")
    path = tmp_path / "run" / EVENTS
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"event": "publish", "version": 6, "round": 9}\n{"event": "answ')
    events = read_events(tmp_path / "run")
    assert events == [json.loads(line) for line in whole.splitlines()]
    assert events[-1]["event"] == "trained" and events[-1]["step"] == NUM_STEPS
    (tmp_path / "again").mkdir()
    again = Driven(run.shape, tmp_path / "again", [events])
    again.run()
    assert again.taken == run.taken and again.events[0].is_over
    path.write_text(whole.splitlines()[0] + "\n")
    with pytest.raises(InputError, match="no step that has ended"):
        read_events(tmp_path / "run")
    path.write_text(whole.replace('"version": 0, "groups"', '"groups"'))
    with pytest.raises(InputError, match="of an earlier version of earl_jax"):
        read_events(tmp_path / "run")


def test_groups_that_were_open_before_a_synchronous_step_are_over_behind_it(tmp_path):
    """By the file of a process, too, that had no part in that step."""
    driven(tmp_path / "run")
    workdir, step = tmp_path / "run", NUM_STEPS + 1
    other = Events(events_file(workdir, 1))
    other.note("submit", groups=[100])
    other.note("trained", step=NUM_STEPS, round=9)
    assert begun_groups(workdir, NUM_STEPS).last == 100
    events = Events(workdir / EVENTS)
    events.note("trained", step=step)
    assert begun_groups(workdir, step) is None
    events.note("submit", groups=[4, 5, 6])
    events.note("take", groups=[5])
    events.note("trained", step=step + 1, round=9)
    assert begun_groups(workdir, step + 1) == Begun(4, 6, [4, 6])


def test_events_that_end_before_a_run_goes_on_are_set_aside(tmp_path):
    """It cannot be replayed."""
    driven(tmp_path / "run")
    workdir, path = tmp_path / "run", tmp_path / "run" / EVENTS
    events = [json.loads(line) for line in path.read_text().splitlines()]
    set_events_aside(workdir, NUM_STEPS)
    assert (workdir / f"until_{NUM_STEPS}" / EVENTS).exists() and not path.exists()
    assert begun_groups(workdir, NUM_STEPS) is None
    later = [event | {"version": 7} if event["event"] == "open" else event for event in events]
    path.write_text("".join(json.dumps(event) + "\n" for event in later))
    with pytest.raises(InputError, match="begins with step 8: the run has no events of the steps"):
        read_events(workdir)


def check_submitted(events: list[dict], shape: Shape, player: int) -> None:
    """Tasks begin in order and none is left out; none begins again that was trained on."""
    taken, submitted, size = set(), set(), shape.size
    parts = range(player, 1000, shape.players)
    own = [number for part in parts for number in range(part * size, (part + 1) * size)]
    for event in events:
        if event["event"] == "submit":
            assert not taken & {*event["groups"]}
            submitted |= {*event["groups"]}
            assert submitted == {*own[: len(submitted)]}
        elif event["event"] == "take":
            taken |= {*event["groups"]}


def driven(folder: Path, **changes) -> Driven:
    """A run of groups of one, of which the first of every four is long."""
    given = {
        "rule": "in_order", "bound": 1, "size": 2, "group_size": 1, "parts": 1, "order": "fifo",
        "slots": 4,
        "devices": 1, "beside": [2], "kills": [], "checkpoint_every": 1,
        "fates": [Fate(rounds=n) for n in (30, 2, 2, 2)],
    }  # fmt: skip
    folder.mkdir()
    run = Driven(Shape(**{**given, **changes}), folder)
    run.run()
    return run


def test_admission_exceeds_the_bound_and_drop_drops_late_groups(tmp_path):
    """A long group outlives the bound: AReaL's rule trains on it, "drop" gives it up."""
    assert max(driven(tmp_path / "admission", rule="admission").lags) > 1
    run = driven(tmp_path / "drop", rule="drop")
    assert max(run.lags) <= 1 and run.lost and set(run.lost) <= {0, 4, 8, 12, 16}
    for rule in ("in_order", "wait"):
        run = driven(tmp_path / rule, rule=rule)
        assert max(run.lags) == 1 and not run.lost


def test_tasks_come_again_only_in_the_place_of_those_that_were_given_up(tmp_path):
    """Groups 0, 4 and 8 of twelve are long, and are dropped; no other one is left out."""
    for bound in (1, 2):
        run = driven(tmp_path / str(bound), rule="drop", bound=bound)
        assert run.lost == [0, 4, 8]
        taken = sorted(number for step in run.taken for number in step)
        assert taken == [n for n in range(15) if n not in run.lost]


def test_groups_that_nothing_is_learnt_from_are_replaced_up_to_the_bound(tmp_path):
    """Steps of two groups that are over at once; of 0 to 2 and 7 nothing is learnt."""
    useless = (True, True, True, False, False, False, False, True, False, False)
    given = {"rule": "drop", "bound": 0, "fates": [Fate(rounds=2)], "useless": useless}
    # 2 and 12 are taken where two groups were given up in their step already.
    run = driven(tmp_path / "once", refill=1, **given)
    assert run.taken == [[2, 3], [4, 5], [6, 8], [9, 12], [13, 14], [15, 16]]
    assert run.lost == [0, 1, 7, 10, 11]
    run = driven(tmp_path / "twice", refill=2, **given)
    assert run.taken == [[3, 4], [5, 6], [8, 9], [13, 14], [15, 16], [18, 19]]
    assert run.lost == [0, 1, 2, 7, 10, 11, 12, 17]
    assert driven(tmp_path / "none", **given).taken == [[i, i + 1] for i in range(0, 12, 2)]


def test_each_step_takes_a_group_of_the_one_before_where_the_player_is_slow(tmp_path):
    """One slot, steps of two groups, three rounds each: the trainer waits for one new group a step.

    Of 0 and 1, which step 0 took, 1 finished last, so that step 1 takes it again.
    """
    given = {"rule": "drop", "slots": 1, "fates": [Fate(rounds=3)], "beside": [0]}
    run = driven(tmp_path / "twice", bound=1, reuse=2, **given)
    assert run.taken == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert collections.Counter(run.lags) == {0: 7 * 3, 1: 5 * 3} and not run.lost
    # Steps of four: a third of them, rounded up, is two. The least used ones are taken again.
    run = driven(tmp_path / "thrice", bound=4, reuse=3, **{**given, "size": 4})
    assert run.taken[:3] == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    # Where the player is fast enough, none is.
    run = driven(tmp_path / "fast", bound=1, reuse=2, **{**given, "beside": [6]})
    assert run.taken == [[i, i + 1] for i in range(0, 12, 2)] and set(run.lags) <= {0, 1}


def test_a_group_is_not_taken_again_beyond_the_bound(tmp_path):
    """Three slots. Group 2 begins at version 0 beside 0 and 1, and ends behind 3, at version 1.

    Step 1 takes both. By step 2 one new group is finished, 5; of those that it could take again 2
    finished last, but it has tokens of version 0, and the bound is 1.
    """
    fates = [Fate(rounds=n) for n in (2, 2, 4, 2, 9, 2, 9, *[2] * 9)]
    run = driven(tmp_path / "run", rule="drop", bound=1, reuse=2, slots=3, fates=fates, beside=[0])
    assert run.taken[:3] == [[0, 1], [2, 3], [3, 5]]
    # With a greater bound it is.
    run = driven(tmp_path / "more", rule="drop", bound=2, reuse=2, slots=3, fates=fates, beside=[0])
    assert run.taken[:3] == [[0, 1], [2, 3], [2, 5]]


@pytest.mark.parametrize(("rule", "reuse"), [("in_order", 1), ("drop", 2)])
def test_groups_whose_rows_could_not_be_copied_are_played_again(tmp_path, rule, reuse):
    """Memory is too short for the copies: a new service plays what the step took, and the rest."""
    given = {"rule": rule, "bound": 1, "reuse": reuse, "fates": [Fate(rounds=1)]}
    run = driven(tmp_path / "run", **given)
    events = Events(tmp_path / EVENTS)
    settings = AsynchronyConfig(max_staleness=1, rule=rule, reuse=reuse)
    source = Source(2, {"next": 0})
    groups = OpenGroups(
        tasks_of(source, size=2, group_size=1, num_steps=NUM_STEPS), settings, events
    )
    groups.open(run.new_service(0), 0)
    assert [each.trajectory.group for each in groups.next_episodes(2)] == [0, 1]
    groups.open(service := run.new_service(0), 0)
    first = groups.next_episodes(2)
    assert [each.trajectory.group for each in first] == [0, 1]
    groups.copied(first)
    assert groups.numbers == [2, 3]
    groups.publish(1)
    service.version = 1
    assert [each.trajectory.group for each in groups.next_episodes(2)] == [2, 3]
    # Those that were trained on have no rows in another service.
    groups.open(run.new_service(1), 1)
    assert groups.numbers == [2, 3, 4, 5]


def test_groups_that_were_taken_in_vain_are_open_where_the_run_goes_on(tmp_path):
    """Memory was too short for the copies of 0 and 1, and behind it 2 and 3 were over first."""
    events = Events(tmp_path / EVENTS)
    for taken in ([0, 1], [2, 3]):
        events.note("open", version=0)
        events.note("submit", groups=[0, 1, 2, 3], round=0)
        events.note("take", groups=taken, round=2)
    events.note("trained", step=1, round=2)
    assert begun_groups(tmp_path, 1) == Begun(0, 3, [0, 1])
    # Another process had 2 before, when there were more of them.
    other = Events(events_file(tmp_path, 1))
    other.note("submit", groups=[2], round=0)
    other.note("trained", step=1, round=2)
    assert begun_groups(tmp_path, 1) == Begun(0, 3, [0, 1])


@pytest.mark.parametrize("looks", [1, 3, None])
def test_a_replay_gives_a_service_up_where_memory_was_too_short(tmp_path, looks):
    """In the first round, in the third of six, or behind them, when groups were taken."""
    run = driven(tmp_path / "run", fates=[Fate(rounds=6)])

    def play(events: Events) -> list[int]:
        source = Source(2, {"next": 0})
        groups = OpenGroups(
            tasks_of(source, size=2, group_size=1, num_steps=NUM_STEPS),
            AsynchronyConfig(max_staleness=1),
            events,
        )
        events.note("open", version=0)
        service = run.new_service(0)
        run.num_looks, run.kills = 0, [] if events.is_replay else [looks]
        groups.open(service, 0)
        if looks is None or events.is_replay:
            assert len(groups.next_episodes(2)) == 2 * (not events.is_replay)
        else:
            with pytest.raises(Killed):
                groups.next_episodes(2)
        events.note("open", version=0)
        groups.open(run.new_service(0), 0)
        taken = groups.next_episodes(2)
        groups.copied(taken)
        groups.end_step(1, 0)
        return [each.trajectory.group for each in taken]

    play(Events(tmp_path / EVENTS))
    events = Events(replayed=read_events(tmp_path))
    assert play(events) == [0, 1] and events.is_over


def test_a_run_that_goes_on_trains_on_groups_again_that_it_plays_itself(tmp_path):
    """Killed in step 2, which was to take group 2 again: its rows are gone."""
    given = {"rule": "drop", "slots": 1, "fates": [Fate(rounds=3)], "beside": [0]}
    run = driven(tmp_path / "killed", bound=1, reuse=2, kills=[11], **given)
    assert run.taken == [[0, 1], [1, 2], [3, 4], [4, 5], [5, 6], [6, 7]]


@pytest.mark.parametrize("killed", [12, 20])
def test_players_with_groups_of_different_steps_go_on_with_the_same_tasks(tmp_path, killed):
    """Two players have a group a step each; the second one's first takes the whole run.

    It is open where they go on, so that its step is the oldest, whose tasks the source gives first.
    """
    fates = [Fate(rounds=n) for n in (2, 200, *[2] * 30)]
    given = {"rule": "admission", "size": 1, "players": 2, "fates": fates, "kills": [killed]}
    run = driven(tmp_path / "killed", **given)
    assert run.taken == [[0, 3], [2, 5], [4, 7], [6, 9], [8, 11], [10, 1]]


def test_open_groups_of_a_greater_bound_wait_for_their_turn_within_the_new_one(tmp_path):
    """Resumed with max_staleness 0 where six groups of three steps are open."""
    shape = driven(tmp_path / "before", bound=2).shape
    run = Driven(dataclasses.replace(shape, bound=0), tmp_path)
    run.taken, run.checkpoint = [[0, 1]], (1, tuple(range(2, 8)), 1, {"next": 2}, [])
    run.run()
    assert run.taken[1:] == [[i, i + 1] for i in range(2, 12, 2)]
    assert set(run.lags) == {0}


def test_tasks_are_the_same_behind_steps_of_which_no_group_was_open_where_a_run_went_on(tmp_path):
    """Killed where 1 and 3 of four groups are open, and again behind a step with max_staleness 0.

    That one plays 1, and draws no tasks of the step of 2, which was taken before 1.
    """
    shape = driven(
        tmp_path / "whole", rule="admission", bound=2, size=1, beside=[0], slots=2,
        fates=[Fate(rounds=n) for n in (2, 20, 2, 2, 2, 2)],
    ).shape  # fmt: skip
    run = Driven(dataclasses.replace(shape, kills=[6]), tmp_path)
    run.open_files([()])
    with pytest.raises(Killed):
        run.go_on()
    assert run.checkpoint[:3] == (2, (1, 3), 1)
    run.resume()
    run.shape, run.kills = dataclasses.replace(shape, bound=0), [run.num_looks + 22]
    with pytest.raises(Killed):
        run.go_on()
    assert run.checkpoint[:4] == (3, (3,), 3, {"next": 3})
    run.resume()
    run.go_on()
    assert run.taken == [[0], [2], [1], [3], [4], [5]]


def test_values_out_of_range_are_refused():
    with pytest.raises(InputError, match="max_staleness is -1; it must be at least 0"):
        AsynchronyConfig(max_staleness=-1).validate()
    with pytest.raises(InputError, match="refill is -1; it must be at least 0"):
        AsynchronyConfig(refill=-1, rule="drop").validate()
    with pytest.raises(InputError, match="reuse is 0; it must be at least 1"):
        AsynchronyConfig(reuse=0).validate()
    with pytest.raises(InputError, match="parts is 0; it must be at least 1"):
        AsynchronyConfig(parts=0).validate()
    with pytest.raises(InputError, match="config.asynchrony.rule is 'first'"):
        AsynchronyConfig(rule="first").validate()  # pyright: ignore[reportArgumentType]
