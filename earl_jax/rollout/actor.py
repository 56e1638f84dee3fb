# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Actor: plays tasks with environments on the host and a session of the engine on the devices."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Session
from earl_jax.envs.environment import Environment
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.conversation import Conversation
from earl_jax.launch.cluster import Cluster
from earl_jax.rollout.block_manager import Grow
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.end import Stopped
from earl_jax.rollout.events import Events
from earl_jax.rollout.lockstep import Lockstep
from earl_jax.rollout.results import Rollout
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService, Shrink
from earl_jax.rollout.share import Share
from earl_jax.rollout.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Actor:
    """Plays this process's episodes.

    `rollout` are the settings of all processes' rollout; `make` makes an environment from a task's
    `args`; the model reads at most `max_context` tokens; `history` is config.chat.history. Rows of
    `batches` steps' episodes are there at once. `stop()` is the name of a signal to stop, "" before
    there is one.
    """

    rollout: RolloutConfig
    cluster: Cluster
    renderer: ChatRenderer
    history: str
    pool: EnvironmentPool
    make: Callable[..., Environment]
    max_context: int
    batches: int = 1
    stop: Callable[[], str] = lambda: ""

    def new_conversation(self) -> Conversation:
        """Returns the conversation of one episode."""
        return Conversation(self.renderer, self.history)  # pyright: ignore[reportArgumentType]

    def make_environment(self, task: Task) -> Environment:
        """Returns a fresh environment for this task."""
        return self.make(**task.args)

    def open(
        self,
        session: Session,
        *,
        sampling: Sampling | None = None,
        grow: Grow,
        shrink: Shrink | None = None,
        events: Events | None = None,
        more: Callable[[int], Sequence[Task]] = lambda num_free: (),
    ) -> RolloutService:
        """Returns a service that plays tasks from this session, which may move meanwhile.

        Where its engine spans processes, these play the same tasks in lockstep.
        """
        spans = session.engine.layout.spans_processes
        parts = 1 if spans else len(self.cluster.players)
        own = self.rollout.part(parts)
        pool, make, look = self.pool, self.make_environment, self._look_for_a_signal
        # Rows that are on their way to processes that train, or a round of all, wait for others.
        wait = functools.partial(self.cluster.wait, what="a round of the rollout")
        if spans:
            pool = Lockstep(self.cluster, self.pool, self.make_environment, self.stop)
            make, look = pool.make_environment, lambda: None
        return RolloutService(
            session,
            dataclasses.replace(own, num_slots=session.engine.config.num_slots),
            self.new_conversation,
            pool,
            make,
            grow,
            num_devices=self.cluster.num_row_devices(parts),
            sampling=sampling or self.rollout.sampling,
            max_context=self.max_context,
            shrink=shrink,
            look=look,
            batches=self.batches,
            events=events,
            more=more,
            wait=wait,
        )

    def play(
        self,
        session: Session,
        tasks: Sequence[Task],
        share: Share,
        *,
        sampling: Sampling | None = None,
        grow: Grow,
        shrink: Shrink,
        events: Events | None = None,
    ) -> Rollout:
        """Plays this process's share of the tasks from this session to its end; see `open`.

        Raises Stopped before the next round when there is a signal to stop.
        """

        def more(num_free: int) -> list[Task]:
            return [tasks[number] for number in share.take(num_free)]

        service = self.open(
            session,
            sampling=sampling,
            grow=grow,
            shrink=shrink,
            events=events,
            more=more,
        )
        rollout = collect(service, [tasks[number] for number in share.numbers])
        rollout.stats.hung_calls = self.pool.num_hung
        return rollout.sorted_by(share.numbers)

    def _look_for_a_signal(self) -> None:
        if signal_name := self.stop():
            raise Stopped(signal_name)


def collect(service: RolloutService, tasks: Sequence[Task]) -> Rollout:
    """Plays every task to its end on a fresh service.

    There are at most `service.rows.total` tasks, with those that the service takes from elsewhere;
    these come last.
    """
    service.submit(tasks)
    found: dict[int, Finished] = {}
    for finished in service.drain():
        # Between two rounds.
        found.update((each.ticket, each) for each in finished)
    assert len(found) >= len(tasks), f"{len(found)} of {len(tasks)} tasks were played"
    done = [found[ticket].trajectory for ticket in range(len(found))]
    return Rollout(
        trajectories=[dataclasses.replace(each, row=index) for index, each in enumerate(done)],
        session=service.close(),
        rows=[each.row for each in done],
        stats=service.stats,
    )
