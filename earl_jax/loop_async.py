# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The asynchronous RL loop: episodes of later steps are played while a step plays and learns.

A step is that of loop.py (`rl_step`); what differs is where its episodes come from. One open
rollout service (run/live_service.py) plays tasks of up to config.asynchrony.max_staleness steps
ahead. Each step gives it the newest weights, between two rounds, and takes the groups that the rule
chooses (rollout/staleness.py). AReaL (arXiv 2505.24298) calls this interruptible generation.

Where rollouts have devices of their own (config.devices.num_rollout), rounds are played while an
update is under way: both are only dispatched, so one thread is enough, and the events of a run have
one order, in which they can be replayed (rollout/events.py). With "auto" the selector says how many
they are, and between two steps both stages move where the balance has shifted. Where they share
devices, the stages take turns, and live episodes wait for the update.

Of several processes the first ones play and the others train, or all do both: in turn, or with
"auto" on devices of their own. All go through the same steps, and meet for what moves between them:
the weights at the beginning of a step, its episodes when they are finished, and with devices apart
the end of its updates, until which those that play play on. A round is a program of one process, so
that it needs no other one.

With config.asynchrony.parts a step's groups go to the trainer's devices as they are finished, and
their gradients are computed while the others are played (StreamRL, arXiv 2504.15930).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from earl_jax.placement.delivery import send_parts
from earl_jax.placement.moves import move_state
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import end_of
from earl_jax.placement.updates import StepUpdate, Wait
from earl_jax.rollout.end import Stopped
from earl_jax.rollout.event_files import Begun
from earl_jax.rollout.gather import gather_ends, gather_outcomes
from earl_jax.rollout.load import expected_tokens, measure_load
from earl_jax.rollout.open_episodes import OpenEpisode
from earl_jax.rollout.results import Played
from earl_jax.run.build import Run
from earl_jax.run.live_service import LiveService
from earl_jax.run.position import Position
from earl_jax.run.step_end import StepStopped
from earl_jax.run.step_record import PlayedStep
from earl_jax.telemetry.host_bytes import only_on_devices
from earl_jax.telemetry.timing import StageTimer
from earl_jax.train.state import TrainState
from earl_jax.trajectory import Experience, Outcome, Trajectory

# A process that only trains looks so often whether the gradients of a part are there.
_LOOK_S = 0.001


@dataclasses.dataclass(kw_only=True)
class _Taken:
    """The episodes that a step has taken so far; their rows are in the `update`, if there is one.

    `played` are the episodes of all processes, part by part, `trajectories` those of this one.
    """

    update: StepUpdate | None
    played: list[Played] = dataclasses.field(default_factory=list)
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    experience: Experience | None = None
    dispatch_host_bytes: int | None = 0

    @property
    def num_episodes(self) -> int:
        return sum(len(each.outcomes) for each in self.played)

    def in_order(self) -> tuple[list[Trajectory], Played]:
        """Returns the episodes in the order of their tasks, or in that of the rows."""
        trajectories, outcomes = self.trajectories, [o for p in self.played for o in p.outcomes]
        if self.update is not None:
            trajectories = sorted(trajectories, key=lambda each: each.episode)
            outcomes.sort(key=lambda each: each.episode)
        numbered = [dataclasses.replace(each, row=row) for row, each in enumerate(trajectories)]
        # The counts of each part are those since the step's beginning.
        gaps = [gap for each in self.played for gap in each.gaps]
        return numbered, dataclasses.replace(self.played[-1], outcomes=outcomes, gaps=gaps)


class AsyncPlayer:
    """A `Player` whose service plays ahead of the steps. Host-side state only.

    Every process has one, and calls it alike; those that only train have no service.
    """

    def __init__(
        self,
        run: Run,
        placement: Placement,
        begun: Begun | None = None,
    ) -> None:
        """Begins without a service, which the first step opens.

        `begun` are the groups of a run that goes on.
        """
        self._run, self._placement = run, placement
        self._live = LiveService(run.config, run.tasks, run.actor, placement, begun)
        self._timer = StageTimer()
        # What a step has taken, until it is played to its end.
        self._taken: _Taken | None = None

    @property
    def is_live(self) -> bool:
        """True while episodes are open."""
        return self._live.is_open

    def play(
        self, position: Position, timer: StageTimer
    ) -> tuple[TrainState, PlayedStep, StepUpdate | None]:
        """Publishes the weights, and plays until the step's groups are finished.

        Where memory is too short, all open groups are played again with another plan.

        Raises:
            StepStopped: a signal stopped the rollout.
        """
        self._timer, done = timer, None
        while done is None:
            if not self._live.is_open or self._placement.events.coming("open"):
                self._live.close()
                position = self._choose(position)
            elif self._run.problem.splits:
                with timer("select"):
                    position = self._live.split(position)
            try:
                done = self._placement.attempt("rollout", lambda: self._play(position))  # noqa: B023
            except Stopped as stop:
                raise StepStopped(str(stop), position) from None
            if done is None:
                self._live.close()
        return position.state, *done

    def plans_chosen(self) -> None:
        """Has the length in use count as one that plans were chosen for."""
        if not self._run.problem.splits:
            # Plans of both stages are chosen when a service is opened, and not in each step.
            self._placement.most_length = max(self._placement.most_length, self._placement.length)

    def open_groups(self) -> tuple[int, ...]:
        """Returns the numbers of the open groups of all processes."""
        return self._live.open_groups

    def open_episodes(self) -> dict[int, OpenEpisode]:
        """Returns what open episodes of this process have, if they may go on with other weights."""
        interrupts = self._run.config.asynchrony.interrupts
        return self._live.groups.open_episodes() if interrupts else {}

    @property
    def oldest_step(self) -> int:
        """The oldest step of which a group is open, or is yet to be begun."""
        return self._live.oldest_step

    def step_ended(self, step: int) -> dict[str, Any] | None:
        """Notes that a step has ended. Returns the state that its tasks' source goes on from.

        None in a process that only trains. Raises RunError where the weights that were played with
        are not those that were published.
        """
        if self._live.service is None:
            return None
        self._live.check_checksum(step)
        return self._live.groups.end_step(step, self._live.oldest_step)

    def give_up(self) -> None:
        """Lets the open episodes go, for their memory: the next step plays their groups again."""
        self._live.close()

    @property
    def wait(self) -> Wait | None:
        """Plays rounds while an update is under way, where rollouts have their own devices."""
        cluster = self._run.cluster
        if not (cluster.disjoint and cluster.plays and cluster.trains):
            return None
        return lambda arrays: self._play_beside(
            lambda: all(leaf.is_ready() for leaf in jax.tree.leaves(arrays))
        )

    @contextlib.contextmanager
    def updates(self) -> Iterator[None]:
        """Encloses the updates; plays until those of other processes have ended, or failed.

        All processes have one placement behind it.
        """
        cluster, what = self._run.cluster, "the end of an update"
        beside = cluster.count > 1 and cluster.disjoint
        counter = cluster.new_counter() if beside else 0
        try:
            yield
        finally:
            if beside and cluster.trains:
                cluster.add_to(counter, 1, what)
        if beside and self._live.service is not None:
            number = len(cluster.trainers)
            self._play_beside(lambda: cluster.add_to(counter, 0, what) == number)
        self._live.meet(what)

    def _play_beside(self, is_over: Callable[[], bool]) -> None:
        """Plays rounds until the update is over. What a round raises is left to the next step.

        In a replay it plays as many rounds as then.
        """
        if self._live.error is not None:
            return
        with self._timer("overlap"):
            try:
                self._live.groups.play_beside(is_over)
            except Exception as error:  # noqa: BLE001 - raised again by the next step
                self._live.error = error

    # The parts of a step.

    def _choose(self, position: Position) -> Position:
        """Chooses plans for a service that is opened anew. Returns the position, moved to them."""
        placement, load = self._placement, self._live.expected_load(position)
        with self._timer("select"):
            placement.choose_step(expected_tokens(self._run.stages.rollout, load), load)
            state = move_state(placement, position.state, to_play=True)
        return dataclasses.replace(position, state=state)

    def _play(self, position: Position) -> tuple[PlayedStep, StepUpdate | None] | None:
        """Plays until a batch can be taken; raises what a round beside the last update raised.

        None in a replay where memory was too short for it then.
        """
        live, placement, cluster = self._live, self._placement, self._run.cluster
        groups = live.groups
        interrupts = self._run.config.asynchrony.interrupts
        with contextlib.nullcontext() if interrupts else self._timer("rollout"):
            _, end = end_of(placement, live.end_rounds)
        gather_ends(cluster, None, "the rounds with the weights before", end)
        with self._timer("publish"), only_on_devices() as reads:
            num_bytes = live.publish(position)
        if live.is_given_up():
            return None
        live.note_checksum(position.step)
        taken = self._taken = self._taken or _Taken(update=self._new_update(position))
        number = groups.group_size * len(cluster.players)
        while (left := groups.size - taken.num_episodes // number) > 0:
            with self._timer("rollout"):
                with self._trainer_ready(taken.update) as is_ready:
                    whole = taken.update is None
                    take = functools.partial(live.take, left, whole=whole, is_ready=is_ready)
                    part, end = end_of(placement, take)
                if live.is_given_up():
                    return None
                rollout, where = part and part.rollout, live.placement_of_rows()
                played = gather_outcomes(cluster, rollout, where, end)
            placement.restore(played.placement)
            experience = part and part.experience
            if taken.update is None:
                taken.experience = experience
            else:
                self._stream(taken.update, position, played.outcomes, experience)
            # Where memory was too short to send its rows, a part is taken again.
            taken.played.append(played)
            if part is not None:
                groups.copied(part.episodes)
                taken.trajectories += part.rollout.trajectories
        self._taken = None
        live.count_from_here()
        trajectories, played = taken.in_order()
        done = PlayedStep(
            plan=placement.rollout,
            max_tokens=played.placement["max_tokens"],
            trajectories=trajectories,
            experience=taken.experience,
            played=played,
            # The next episodes follow into free slots.
            load=dataclasses.replace(measure_load(played, placement.rollout.num_slots), live=None),
            publish_bytes=num_bytes,
            publish_host_bytes=reads.num_bytes,
            dispatch_host_bytes=taken.dispatch_host_bytes,
        )
        return done, taken.update

    def _new_update(self, position: Position) -> StepUpdate | None:
        """Returns the update that a step's groups go to as they are finished; None: all at once.

        Where all of them are there already, parts would only be smaller.
        """
        config = self._run.config
        if config.asynchrony.parts == 1 or self._live.has_next_step:
            return None
        controls = self._run.learner.controls(position.step, config.num_steps)
        return StepUpdate(placement=self._placement, controls=controls, wait=self.wait)

    @contextlib.contextmanager
    def _trainer_ready(self, update: StepUpdate | None) -> Iterator[Callable[[], bool]]:
        """Encloses the taking of a part; yields what says that trainers wait for it.

        Processes send each other rows by programs of both, and rows that are sent while gradients
        are computed would keep the one that sends them from playing until these are there. In one
        process nothing waits for that.
        """
        cluster, what = self._run.cluster, "the gradients of a part"
        if update is None or cluster.count == 1:
            yield lambda: True
            return
        counter, totals = cluster.new_counter(), jax.tree.leaves(update.totals)
        is_due = cluster.trains

        def is_over() -> bool:
            return all(leaf.is_ready() for leaf in totals)

        def is_ready() -> bool:
            nonlocal is_due
            own = int(is_due and is_over())
            is_due = is_due and not own
            return cluster.add_to(counter, own, what) + own == len(cluster.trainers)

        while not (cluster.plays or is_over()):
            time.sleep(_LOOK_S)
        try:
            yield is_ready
        finally:
            if is_due:
                cluster.add_to(counter, 1, what)

    def _stream(
        self,
        update: StepUpdate,
        position: Position,
        outcomes: Sequence[Outcome],
        experience: Experience | None,
    ) -> None:
        """Sends these episodes to the trainer, which starts on their gradients."""
        taken = self._taken
        assert taken is not None, "the step has begun"
        longest = max(outcome.num_tokens for outcome in outcomes)
        length = self._run.stages.rollout.max_tokens_for(longest)
        with self._timer("dispatch"), only_on_devices() as reads:
            (part,) = send_parts(self._placement, experience, outcomes, length, {}, wait=False)
        counted = (taken.dispatch_host_bytes, reads.num_bytes)
        taken.dispatch_host_bytes = None if None in counted else sum(filter(None, counted))
        start_s = time.perf_counter()
        with self._timer("train"):
            update.add(position.state, part)
        if update.totals is not None:
            self._timer.count_until_ready("gradients", start_s, update.totals.count)
