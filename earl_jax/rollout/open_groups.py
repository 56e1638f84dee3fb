# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Open groups of an asynchronous run: which are begun, given up and taken, and when. Host-side.

All decisions of an asynchronous run that do not concern devices are made here, between two rounds
of a service: the loop (loop_async.py) and simulations drive the same code.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from earl_jax.rollout.event_files import Begun
from earl_jax.rollout.events import Events
from earl_jax.rollout.open_episodes import OpenEpisode, open_episode
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.staleness import (
    AsynchronyConfig,
    Group,
    choose_groups,
    choose_part,
    choose_with_reuse,
    overdue,
)
from earl_jax.rollout.task import Task
from earl_jax.rollout.tasks import DrawnTasks, Part, Tasks, with_lengths
from earl_jax.settings.errors import InputError
from earl_jax.trajectory import Outcome, Trajectory


class Service(Protocol):
    """The parts of a `RolloutService` that the groups use."""

    holds_tasks: bool

    @property
    def num_live(self) -> int:
        """The number of episodes in slots."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while a task waits or plays, or a finished episode was not handed out yet."""
        ...

    def submit(self, tasks: Sequence[Task]) -> list[int]:
        """Queues tasks. Returns their tickets."""
        ...

    def step(self) -> list[Finished]:
        """Plays one round, and returns the episodes that are finished behind it."""
        ...

    def oldest_versions(self) -> dict[int, int]:
        """Returns the oldest version in each episode that was not handed out, by ticket."""
        ...

    def open_episodes(self) -> dict[int, OpenEpisode]:
        """Returns what episodes that were not handed out have, by their numbers."""
        ...

    def release(self, row: int) -> None:
        """Gives back the row of a finished episode."""
        ...


@dataclasses.dataclass(kw_only=True)
class _Open:
    """A group's tickets, its finished episodes by ticket, and when the last of them ended.

    `uses` is the number of steps that took it.
    """

    tickets: list[int]
    episodes: dict[int, Finished] = dataclasses.field(default_factory=dict)
    rank: int | None = None
    uses: int = 0


class OpenGroups:
    """Groups by number: group g is the g % n-th of step g // n, of n groups (`Tasks.training`).

    One of several processes has a part of each step, `size` groups that follow each other. Within
    it numbers are those of a run whose steps are the part; elsewhere they are those of the run.

    `version` is that of the policy with which the service plays and which the next step trains; it
    changes in `open` and `publish` only. `num_rounds` are those of this service. `dropped` are the
    episodes that were given up because they were too old, and `refilled` those of groups in whose
    place others were played, since `count_from_here`. `num_reused` is the number of groups of the
    last step that earlier ones had trained on. `lengths` are the last ones of tasks that steps had
    taken when the weights came (`scheduler.next_lengths`).

    With settings.reuse groups that a step took are kept, which are open no longer: their rows stay
    held until they are of no use. A new service knows nothing of them, so that a run that goes on
    from a checkpoint, or plays on with another plan, trains on them no more.
    """

    def __init__(
        self,
        tasks: Tasks,
        settings: AsynchronyConfig,
        events: Events | None = None,
        *,
        is_useless: Callable[[Sequence[Trajectory]], bool] = lambda group: False,
        part: tuple[int, int] = (0, 1),
        begun: Begun | None = None,
    ) -> None:
        """Begins with none; they are numbered as those of `tasks`. `events` None: go nowhere.

        `is_useless` says of a finished group that nothing is learnt from it (settings.refill).
        `part` is the index of this process's part of each step, and their number. `begun` are the
        groups of a run that goes on, whose parts may have been others.
        """
        self._tasks, self._settings, self._events = tasks, settings, events or Events()
        self.group_size = tasks.rollout.group_size
        index, count = part
        self.size = tasks.rollout.episodes_per_step // self.group_size // count
        self._part = Part(index, count, self.size)
        self._begun = begun
        self.version = self.num_rounds = self.num_reused = 0
        self.dropped: list[Outcome] = []
        self.refilled: list[Outcome] = []
        self.lengths: Mapping[int, int] = {}
        self._is_useless = is_useless
        # Groups that were given up for others since the last step took its own.
        self._num_refilled = 0
        self._service: Service | None = None
        self._groups: dict[int, _Open] = {}
        # Groups that were trained on and may be again, in the order of their last use.
        self._kept: dict[int, _Open] = {}
        # New groups of which a step has taken the episodes, and not copied their rows yet.
        self._in_hand: list[int] = []
        # Open groups that the service does not have yet, in order.
        self._waiting: list[int] = []
        # The number of the next group; None before the first service.
        self._next: int | None = None
        self._num_finished = 0
        number = self.size * self.group_size
        self._drawn = DrawnTasks(tasks, slice(index * number, (index + 1) * number))
        # What episodes had in a service before, that this one does not have yet.
        self._resumes: dict[int, OpenEpisode] = {}

    def open_episodes(self) -> dict[int, OpenEpisode]:
        """Returns what the episodes of open groups have, by number, for a service that goes on."""
        done = [each for group in self._groups.values() for each in group.episodes.values()]
        found = {each.trajectory.episode: open_episode(each.trajectory.turns) for each in done}
        playing = {} if self._service is None else self._service.open_episodes()
        return self._resumes | playing | {n: each for n, each in found.items() if each is not None}

    @property
    def numbers(self) -> list[int]:
        """The numbers of the open groups in the run, in order."""
        return self._part.in_run(self._open)

    @property
    def oldest_step(self) -> int:
        """The oldest step of which a group is open, or is yet to be begun."""
        assert self._next is not None, "a service was opened"
        return min(self._open, default=self._next) // self.size

    @property
    def _open(self) -> list[int]:
        """The numbers of the open groups, in order."""
        return sorted([*self._groups, *self._waiting])

    # Services and weights.

    def open(
        self,
        service: Service,
        version: int,
        resumed: Collection[int] = (),
        next_drawn: int | None = None,
        episodes: Mapping[int, OpenEpisode] | None = None,
    ) -> None:
        """Has a new service, with weights of `version`, play the open groups again.

        They go on behind what their `episodes` had, and the others from their beginning. `resumed`
        are those of the run's position, which count for the first service, and `next_drawn` is the
        step whose tasks their source gives next; None: this `oldest_step`.

        Raises:
            InputError: other processes have played so far, and what is left cannot be shared out.
        """
        self._service, self.version, self.num_rounds = service, version, 0
        self._waiting = sorted([*self._open, *self._in_hand])
        self._groups, self._kept, self._in_hand = {}, {}, []
        if self._next is None:
            # All groups before the next one are open, or were trained on or dropped.
            if self._begun is None:
                # Without events up to here no step took groups again or dropped any.
                self._waiting = sorted(self._part.in_part(resumed))
                self._next = version * self.size + len(self._waiting)
            else:
                self._waiting = self._part.in_part(self._begun.open_groups)
                self._next = len(self._part.in_part(range(self._begun.last + 1)))
                self._check_parts(self._begun)
            self._drawn.next_step = self.oldest_step if next_drawn is None else next_drawn
        ours = set(self.numbers)
        self._resumes = {
            number: each
            for number, each in (episodes or {}).items()
            if number // self.group_size in ours
        }

    def _check_parts(self, begun: Begun) -> None:
        """Raises ValueError where the groups that are left do not go into equal parts."""
        known = range(begun.first, begun.last + 1)
        num_over = len(self._part.in_part(known)) - len(self._waiting)
        all_over = len(known) - len(begun.open_groups)
        if self._settings.rule != "drop" and num_over * self._part.count != all_over:
            raise InputError(
                f"config.asynchrony.rule is {self._settings.rule!r}, by which steps take groups as "
                "they finish, and another number of processes has played this run so far: the "
                f"groups that are left do not go into {self._part.count} equal parts; go on with "
                "as many processes that play as before, or with one"
            )

    def close(self) -> None:
        """Lets the service go, with all that it has on the devices."""
        self._service = None

    def finish_live(self) -> None:
        """Plays live episodes to their end; tasks that wait begin with the next weights."""
        service = self._playing
        service.holds_tasks = True
        while service.num_live and not self.is_given_up:
            self.play_round()
        service.holds_tasks = False

    def publish(self, version: int) -> None:
        """Notes that from now on the service plays with weights of `version`."""
        self.version = version
        self._events.note("publish", version=version, round=self.num_rounds)

    # What a step does.

    @property
    def has_next_step(self) -> bool:
        """True if all groups of the next step, those of the lowest numbers, are finished."""
        first = sorted(self._described())[: self.size]
        return len(first) == self.size and all(group.finished is not None for group in first)

    def next_episodes(
        self, left: int, *, whole: bool = False, is_ready: Callable[[], bool] = lambda: True
    ) -> list[Finished]:
        """Plays until the step, which takes `left` more groups, can take some.

        With settings.parts those are a part, or as a `whole` all that are left. It plays on until
        the trainer `is_ready` for them, as long as there is something to play; in a replay until it
        was.

        Returns:
            Their episodes, in the order of their tasks; the groups are open no longer. Their rows
            are held until they are `copied`; where another service is opened before that, the step
            takes groups again. [] in a replay where this service `is_given_up`.
        """
        self._expire()
        # In a replay another service may come before the step takes any.
        recorded = self._events.later("take", "open")
        while not self.is_given_up:
            self._drop()
            self._refill()
            self._admit(self.size - left)
            chosen = self._choose(left, whole=whole)
            if chosen is not None and self._playing.is_busy:
                ready = is_ready() if recorded is None else self._has_come_to(recorded)
                chosen = chosen if ready else None
            if chosen is not None:
                numbers = [group.number for group in chosen]
                self._num_refilled = 0
                self._note("take", numbers)
                return [] if self.is_given_up else self._take(numbers)
            self.play_round()
        return []

    @property
    def is_given_up(self) -> bool:
        """True in a replay where memory was too short for this service: another is opened next."""
        return self._events.coming("open") is not None

    def copied(self, episodes: Sequence[Finished]) -> None:
        """Gives back the rows of episodes that a step took, but for groups that are kept."""
        self._in_hand = []
        self._release(episodes)

    def _release(self, episodes: Sequence[Finished]) -> None:
        kept = {id(each) for group in self._kept.values() for each in group.episodes.values()}
        for each in episodes:
            if id(each) not in kept:
                self._playing.release(each.row)

    def play_round(self) -> None:
        """Plays one round, and adds the finished episodes to their groups."""
        service = self._playing
        assert service.is_busy, "a batch is there, or some of its groups play"
        finished = service.step()
        # A round that raises, as at a signal, is none.
        self.num_rounds += 1
        self._add(finished)

    def _has_come_to(self, event: Mapping[str, Any]) -> bool:
        """Returns whether the rounds of this service are those behind which the event was noted."""
        return event["event"] != "open" and self.num_rounds >= event["round"]

    def play_beside(self, is_over: Callable[[], bool]) -> None:
        """Plays rounds until an update `is_over`; in a replay as many as then."""
        recorded = self._events.later("trained")
        while self._playing.is_busy:
            over = is_over() if recorded is None else self._has_come_to(recorded)
            if over:
                return
            self.play_round()

    def count_from_here(self) -> None:
        """Counts the episodes that are given up from now on for the next step."""
        self.dropped, self.refilled = [], []

    def end_step(self, step: int, oldest: int) -> dict[str, Any] | None:
        """Notes that `step` steps have ended, with which `oldest` is the oldest open one of all.

        Returns the state that the tasks' source had before it gave that step's; None: it has none.
        """
        self._events.note("trained", step=step, round=self.num_rounds)
        return self._drawn.forget_before(oldest)

    # Its parts.

    @property
    def _playing(self) -> Service:
        assert self._service is not None, "a service was opened"
        return self._service

    def _note(self, event: str, numbers: Sequence[int]) -> None:
        """Notes an event of these groups."""
        self._events.note(event, groups=self._part.in_run(numbers), round=self.num_rounds)

    def _submit(self, numbers: Sequence[int]) -> None:
        """Has the service play these groups, or go on with them."""
        self._note("submit", numbers)
        for number in numbers:
            step, place = divmod(number, self.size)
            first = place * self.group_size
            tasks = self._drawn.of_step(step)[first : first + self.group_size]
            tasks = [
                dataclasses.replace(task, resumes=self._resumes.pop(task.episode, None))
                for task in with_lengths(tasks, self.lengths)
            ]
            self._groups[number] = _Open(tickets=self._playing.submit(tasks))

    def _admit(self, num_taken: int) -> None:
        """Submits as many groups as may be open now; those that the step has taken count still."""
        assert self._next is not None, "a service was opened"
        # The steps that are left need no more; where groups are dropped, as many others follow.
        num_steps = min(self._settings.batches, self._tasks.num_steps - self.version)
        more = num_steps * self.size - len(self._groups) - num_taken
        if more > 0:
            old, self._waiting = self._waiting[:more], self._waiting[more:]
            first, self._next = self._next, self._next + more - len(old)
            self._submit([*old, *range(first, self._next)])

    def _drop(self) -> None:
        """Gives up finished groups beyond the bound, if that is the rule."""
        if self._settings.rule != "drop":
            return
        finished = [group for group in self._described() if group.finished is not None]
        stale = overdue(finished, self.version, self._settings.max_staleness)
        if not stale:
            return
        self.dropped += self._give_up(stale)

    def _refill(self) -> None:
        """Gives up finished groups that nothing is learnt from, first those that finished first."""
        left = self._settings.refill * self.size - self._num_refilled
        if left <= 0:
            return
        finished = [group for group in self._described() if group.finished is not None]
        useless = [group for group in finished if self._is_useless(self._trajectories(group))]
        useless = sorted(useless, key=lambda group: group.finished or 0)[:left]
        if useless:
            self._num_refilled += len(useless)
            self.refilled += self._give_up(useless)

    def _give_up(self, groups: Sequence[Group]) -> list[Outcome]:
        """Removes finished groups, whose rows are free then. Returns their outcomes."""
        numbers = [group.number for group in groups]
        self._note("drop", numbers)
        episodes = self._remove(groups)
        self._release(episodes)
        return [each.trajectory.outcome for each in episodes]

    def _trajectories(self, group: Group) -> list[Trajectory]:
        return [each.trajectory for each in self._groups[group.number].episodes.values()]

    def _choose(self, left: int, *, whole: bool) -> list[Group] | None:
        """Returns the groups that the step, which takes `left` more, takes now; None: none yet."""
        settings, groups = self._settings, self._described()
        if settings.reuse > 1:
            kept, uses = self._kept, {number: group.uses for number, group in self._kept.items()}
            again = [Group(number, None, group.rank) for number, group in kept.items()]
            return choose_with_reuse(groups, again, uses, self.size, settings.reuse)
        if settings.parts > 1:
            return choose_part(groups, left, left if whole else self.size // settings.parts)
        return choose_groups(settings.rule, groups, self.version, settings.max_staleness, self.size)

    def _add(self, finished: Sequence[Finished]) -> None:
        """Adds finished episodes to their groups."""
        if not finished:
            return
        owners = {ticket: group for group in self._groups.values() for ticket in group.tickets}
        for each in finished:
            group = owners[each.ticket]
            group.episodes[each.ticket] = each
            if len(group.episodes) == self.group_size:
                group.rank, self._num_finished = self._num_finished, self._num_finished + 1

    def _described(self) -> list[Group]:
        """Returns the open groups as the rules see them."""
        live = self._playing.oldest_versions()
        return [
            Group(number, min(_versions(group, live), default=None), group.rank)
            for number, group in self._groups.items()
        ]

    def _take(self, numbers: Sequence[int]) -> list[Finished]:
        """Returns the episodes of these groups. They are open no longer, and kept if of use."""
        settings, taken = self._settings, []
        self._in_hand = [number for number in numbers if number in self._groups]
        for number in numbers:
            group = self._kept.pop(number, None) or self._groups.pop(number)
            group.uses += 1
            taken.append(group)
            if group.uses < settings.reuse:
                self._kept[number] = group
        self.num_reused = sum(group.uses > 1 for group in taken)
        while len(self._kept) > self.size:
            # It is none of those that were taken now, which are `size`.
            self._forget(next(iter(self._kept)))
        return [group.episodes[ticket] for group in taken for ticket in group.tickets]

    def _expire(self) -> None:
        """Gives back the rows of kept groups that are beyond the bound now."""
        oldest = self.version - self._settings.max_staleness
        for number, group in list(self._kept.items()):
            if min(_versions(group, {}), default=oldest) < oldest:
                self._forget(number)

    def _forget(self, number: int) -> None:
        self._release(list(self._kept.pop(number).episodes.values()))

    def _remove(self, chosen: Sequence[Group]) -> list[Finished]:
        """Returns the episodes of these groups, which are over and open no longer."""
        groups = [self._groups.pop(group.number) for group in chosen]
        return [group.episodes[ticket] for group in groups for ticket in group.tickets]


def _versions(group: _Open, live: dict[int, int]) -> Iterator[int]:
    for ticket in group.tickets:
        if ticket in live:
            yield live[ticket]
        elif ticket in group.episodes:
            oldest = group.episodes[ticket].trajectory.oldest_version
            if oldest is not None:
                yield oldest
