# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout service without an engine: real scheduler and rows, and episodes of given lengths."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

from earl_jax.engine.rows import make_rows
from earl_jax.rollout.row_pool import Finished, RowPool
from earl_jax.rollout.scheduler import SlotScheduler
from earl_jax.rollout.tasks import Tasks
from earl_jax.trajectory import Trajectory, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fate:
    """The rounds in which an episode samples, with so many idle ones before each; how it ends.

    A hung one samples nothing. One that is "late" is handed out a round behind its end, as a turn
    that a stop string ended.
    """

    rounds: int
    idle: int = 0
    ends: str = "end"

    @property
    def most_rounds(self) -> int:
        """The rounds that it holds a slot, or its row is awaited."""
        return self.rounds * (1 + self.idle) + 1


@dataclasses.dataclass(kw_only=True)
class _Live:
    ticket: int
    task: Any
    row: int
    fate: Fate
    age: int = 0
    versions: list[int] = dataclasses.field(default_factory=list)

    def finished(self) -> Finished:
        turn = Turn(
            author="policy",
            text="",
            token_ids=(7,) * len(self.versions),
            versions=tuple(self.versions),
        )
        failed = {"hung": "environment_timeout", "failed": "environment_error"}
        trajectory = Trajectory(
            episode=self.task.episode,
            group=self.task.group,
            role="",
            turns=(turn,) if self.versions else (),
            turn_rewards=(),
            stop_reason=failed.get(self.fate.ends, "end"),
            row=self.row,
        )
        return Finished(ticket=self.ticket, trajectory=trajectory)


class SimulatedService:
    """Plays tasks in rounds of one token; `fate_of` says how an episode goes."""

    def __init__(
        self,
        num_slots: int,
        num_devices: int,
        num_rows: int,
        batches: int,
        fate_of: Callable[[int], Fate],
        version: int,
        order: str = "fifo",
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.version, self.fate_of, self._look = version, fate_of, look
        rows = make_rows(
            num_rows=num_rows, num_slots=num_slots, num_devices=num_devices, batches=batches
        )
        self._scheduler = SlotScheduler(rows, num_slots, order)
        self._rows = RowPool(rows, num_slots, lambda row: None)
        self._slots: list[_Live | None] = [None] * num_slots
        self.tasks: list[Any] = []
        self._ended: list[Finished] = []
        # Tickets in the order in which they began, and calls of `step`.
        self.begun: list[int] = []
        self.num_steps = 0
        self.holds_tasks = False

    @property
    def is_busy(self) -> bool:
        return bool(any(self._slots) or self._scheduler.num_waiting or self._ended)

    @property
    def num_live(self) -> int:
        return sum(episode is not None for episode in self._slots)

    def submit(self, tasks: Sequence[Any]) -> list[int]:
        tickets = list(range(len(self.tasks), len(self.tasks) + len(tasks)))
        self.tasks += tasks
        for ticket, task in zip(tickets, tasks, strict=True):
            self._scheduler.submit(ticket, task.group)
        return tickets

    def oldest_versions(self) -> dict[int, int]:
        found = {e.ticket: e.versions[0] for e in self._slots if e is not None and e.versions}
        ended = ((done.ticket, done.trajectory.oldest_version) for done in self._ended)
        return found | {ticket: oldest for ticket, oldest in ended if oldest is not None}

    def release(self, row: int) -> None:
        assert self._rows.is_held(row), f"row {row} holds no finished episode"
        self._rows.release(row)

    def step(self) -> list[Finished]:
        self._look()
        self.num_steps += 1
        free = [slot for slot, episode in enumerate(self._slots) if episode is None]
        self._scheduler.play({e.ticket: len(e.versions) for e in self._slots if e is not None})
        offered = [] if self.holds_tasks else self._rows.offer(free)
        for slot, ticket in self._scheduler.assign(offered).items():
            task, row = self.tasks[ticket], self._rows.take(slot, ticket)
            fate = self.fate_of(task.episode)
            self._slots[slot] = _Live(ticket=ticket, task=task, row=row, fate=fate)
            self.begun.append(ticket)
        assert any(self._slots) or self._ended, "tasks wait, and all rows are held"
        self._rows._moves.clear()
        ready, self._ended = self._ended, []
        for slot, episode in enumerate(self._slots):
            if episode is None:
                continue
            episode.age += 1
            fate = episode.fate
            if fate.ends != "hung" and episode.age % (1 + fate.idle) == 0:
                episode.versions.append(self.version)
            if episode.age == fate.rounds * (1 + fate.idle):
                self._slots[slot] = None
                self._scheduler.end(episode.ticket, len(episode.versions))
                where = self._ended if fate.ends == "late" else ready
                where.append(episode.finished())
        for finished in ready:
            self._rows.hold(finished)
        return ready


class Source:
    """Tasks that are numbered as they are drawn, by its state: nothing else says which is next."""

    def __init__(self, size: int, state: dict[str, Any] | None = None) -> None:
        self._size, self._next = size, (state or {"next": 0})["next"]

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def batch(self, step: int) -> list[dict[str, Any]]:
        first, self._next = self._next, self._next + self._size
        return [{"number": number} for number in range(first, self._next)]


def tasks_of(source: Source, *, size: int, group_size: int, num_steps: int) -> Tasks:
    """The tasks of a run with steps of `size` groups, from this source."""
    rollout = types.SimpleNamespace(episodes_per_step=size * group_size, group_size=group_size)
    return Tasks(
        played=types.SimpleNamespace(tasks=source),  # pyright: ignore[reportArgumentType]
        rollout=rollout,  # pyright: ignore[reportArgumentType]
        renderer=None,  # pyright: ignore[reportArgumentType]
        seed=0,
        num_steps=num_steps,
    )


def check_events(events: list[dict]) -> None:
    """All events have the version that was published last, with which a step begins and ends."""
    version = None
    for event in events:
        if event["event"] in ("open", "publish"):
            version = event["version"]
        elif event["event"] == "trained":
            assert event["step"] == version + 1
        # Stages move before the next weights are published.
        assert event["version"] == version + (event["event"] == "split"), event
