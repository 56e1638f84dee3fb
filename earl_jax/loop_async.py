# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The asynchronous RL loop: episodes of later steps are played while a step plays and learns.

A step is that of loop.py (`rl_step`); what differs is where its episodes come from. One open
rollout service plays tasks of up to config.asynchrony.max_staleness steps ahead. Each step gives it
the newest weights, between two rounds, and takes the groups that the rule chooses
(rollout/staleness.py). AReaL (arXiv 2505.24298) calls this interruptible generation.

Where rollouts have devices of their own (config.devices.num_rollout), rounds are played while an
update is under way: both are only dispatched, so one thread is enough, and the events of a run have
one order, in which they can be replayed (rollout/events.py). With "auto" the selector says how many
they are, and between two steps both stages move where the balance has shifted. Where they share
devices, the stages take turns, and live episodes wait for the update.

Of several processes the first ones play and the others train. All go through the same steps, and
meet for what moves between them: the weights at the beginning of a step, its episodes when they are
finished, and the end of its updates, until which those that play play on. A round is a program of
one process, so that it needs no other one.

With config.asynchrony.parts a step's groups go to the trainer's devices as they are finished, and
their gradients are computed while the others are played (StreamRL, arXiv 2504.15930).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.algorithms.advantages import is_useless
from earl_jax.engine.session import Session
from earl_jax.loop import PlayedStep, StepStopped
from earl_jax.models.lora import fingerprint
from earl_jax.placement.delivery import send_rows
from earl_jax.placement.moves import move_state
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import ends_of
from earl_jax.placement.updates import StepUpdate, Wait
from earl_jax.rollout.actor import Stopped
from earl_jax.rollout.collect import Rollout
from earl_jax.rollout.events import Events
from earl_jax.rollout.gather import Played, furthest, gather_ends, gather_outcomes
from earl_jax.rollout.load import expected_load, expected_tokens, measure_load
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.run.build import Run
from earl_jax.run.workdir import Position
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import RunError
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.host_bytes import only_on_devices
from earl_jax.telemetry.load import Load
from earl_jax.telemetry.timing import StageTimer
from earl_jax.train.state import TrainState
from earl_jax.trajectory import Experience, Outcome, Trajectory


class _Part(NamedTuple):
    """Episodes that a step takes at once from this process's service, and copies of their rows."""

    episodes: list[Finished]
    experience: Experience
    rollout: Rollout


@dataclasses.dataclass(kw_only=True)
class _Taken:
    """What a step has taken so far; its rows are in the `update`, if there is one.

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

    def __init__(self, run: Run, placement: Placement, events: Events | None = None) -> None:
        """Begins without a service, which the first step opens; `events` None: they go nowhere."""
        self._run, self._placement = run, placement
        self._events = events or Events()
        self._settings = run.config.asynchrony
        self._groups = OpenGroups(
            run.tasks,
            self._settings,
            self._events,
            is_useless=functools.partial(is_useless, run.learner.algorithm),
            part=run.cluster.part,
        )
        self._service: RolloutService | None = None
        # The mesh and slots of all processes' services; None: they are to be opened.
        self._live: tuple[MeshShape, int] | None = None
        self._has_grown = False
        # The open groups of all processes, when the last updates had ended.
        self._open_groups: tuple[int, ...] = ()
        # The service's counts when a step took its episodes.
        self._counted = RolloutStats()
        self._timer = StageTimer()
        # What a step has taken, until it is played to its end.
        self._taken: _Taken | None = None
        # Of the weights that were published last, with config.asynchrony.checksums.
        self._checksum = 0
        # What a round beside an update raised: the next step deals with it.
        self._error: Exception | None = None

    def play(self, position: Position, timer: StageTimer) -> tuple[TrainState, PlayedStep]:
        """Publishes the weights, and plays until the step's groups are finished.

        Where memory is too short, all open groups are played again with another plan.

        Raises:
            StepStopped: a signal stopped the rollout.
        """
        self._timer, done = timer, None
        while done is None:
            if self._live is None or self._events.coming("open"):
                position = self._choose(position)
            elif self._run.problem.splits:
                assert self._service is not None, "one process plays and trains"
                position = self._split(self._service, position)
            try:
                done = self._placement.attempt("rollout", lambda: self._play(position))  # noqa: B023
            except Stopped as stop:
                raise StepStopped(str(stop), position) from None
            if done is None:
                self._live = self._service = None
        return position.state, done

    def plans_chosen(self) -> None:
        """Notes the plans in use; in a replay they are those of then."""
        event = self._events.coming("plans")
        if event is not None:
            self._placement.restore(event["placement"])
        self._events.note("plans", placement=self._placement.as_dict())

    def open_groups(self) -> tuple[int, ...]:
        """Returns the numbers of the open groups of all processes."""
        return self._open_groups

    def step_ended(self, step: int) -> dict[str, Any] | None:
        """Notes that a step has ended. Returns the state that its tasks' source goes on from.

        None in a process that only trains. Raises RunError where the weights that were played with
        are not those that were published.
        """
        if self._service is None:
            return None
        if self._settings.checksums:
            found = int(fingerprint(self._service.session.policy.params))
            if found != self._checksum:
                raise RunError(
                    f"the weights that step {step} played with have checksum {found} at its end, "
                    f"and had {self._checksum} when they were published: something overwrote them"
                )
        return self._groups.end_step(step)

    @property
    def is_replayed(self) -> bool:
        """True where a run is replayed, and all of its events have come again."""
        return self._events.is_over

    @property
    def wait(self) -> Wait | None:
        """Plays rounds while an update is under way, where rollouts have their own devices."""
        if self._run.cluster.count > 1 or not self._run.cluster.disjoint:
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
        counter = cluster.new_counter() if cluster.count > 1 else 0
        try:
            yield
        finally:
            if cluster.count > 1 and cluster.trains:
                cluster.add_to(counter, 1, what)
        if cluster.count > 1 and self._service is not None:
            number = len(cluster.trainers)
            self._play_beside(lambda: cluster.add_to(counter, 0, what) == number)
        self._meet(what)

    def _meet(self, what: str) -> None:
        """Takes over the placement, and the mesh, of the process whose episodes need the most."""
        own, placement = None, self._placement
        if self._run.cluster.count == 1:
            self._open_groups = tuple(self._groups.numbers)
            return
        if self._service is not None and self._live is not None:
            mesh, slots = self._live
            own = {
                "placement": placement.as_dict(),
                "outgrown": placement.outgrown,
                "table": placement.observations.table.as_dict() if self._has_grown else None,
                "live": [str(mesh), slots],
                "groups": self._groups.numbers,
            }
        each = self._run.cluster.of_players(self._run.cluster.gather(own, what))
        self._open_groups = tuple(sorted(number for one in each for number in one["groups"]))
        chosen = each[furthest([one["placement"] for one in each])]
        self._adopt(chosen["placement"])
        placement.outgrown, self._has_grown = chosen["outgrown"], False
        for table in (one["table"] for one in each if one["table"]):
            # With the bytes of programs that only the process that has grown has compiled.
            known = placement.observations.table
            placement.observations.table = ThroughputTable.from_dict(table).over(known)
        before, (mesh, slots) = self._live, chosen["live"]
        self._live = MeshShape.parse(mesh), slots
        if self._service is not None and self._live != before and self._error is None:
            self._follow(self._service)

    def _follow(self, service: RolloutService) -> None:
        """Moves live episodes to the mesh to which those of another process have grown."""
        sessions, log = self._placement.sessions, self._placement.log
        try:
            if (session := sessions.move(service.session)) is None:
                raise BudgetTooSmall(log.failures[-1])
            service.move(session)
        except (jax.errors.JaxRuntimeError, BudgetTooSmall) as error:
            self._error = error

    def _adopt(self, placement: dict[str, Any]) -> None:
        if placement != self._placement.as_dict():
            self._placement.restore(placement)

    # The parts of a step.

    def _choose(self, position: Position) -> Position:
        """Chooses plans for a service that is opened anew. Returns the position, moved to them."""
        placement, rollout = self._placement, self._run.config.rollout
        self._live = self._service = None
        load = self._expected_load(position)
        with self._timer("select"):
            placement.choose_step(expected_tokens(rollout, load), load)
            # A prompt that is kept here would not be in a run that goes on from its checkpoint.
            placement.sessions.forget()
            state = move_state(placement, position.state, to_play=True)
        return dataclasses.replace(position, state=state)

    def _expected_load(self, position: Position) -> Load | None:
        """Returns the load to choose plans by; the split of the devices by the mean of steps."""
        load = expected_load(self._run.config.rollout, position.history)
        if load is None or not self._run.problem.splits:
            return load
        return position.history.averaged(load)

    def _split(self, service: RolloutService, position: Position) -> Position:
        """Moves both stages where another split of the devices is so much faster.

        Live episodes move along. Returns the position, whose state has moved. In a replay they move
        where they did then. Where memory is too short for the move, both stages stay.
        """
        placement, events, state = self._placement, self._events, position.state
        before, event = placement.as_dict(), events.coming("split")
        with self._timer("select"), only_on_devices(self._run.config.dispatch.forbid_host_bytes):
            if event is not None:
                placement.restore(event["placement"])
            else:
                load = self._expected_load(position)
                tokens = expected_tokens(self._run.config.rollout, load)
                if events.is_replay or not placement.choose_split(tokens, load, service.session):
                    return position
            # New ones arrive behind the move.
            service.release_weights()
            here = service.session.engine.layout.shape
            if placement.rollout.mesh.num_devices > here.num_devices:
                # The trainer leaves the devices first that the episodes move to.
                state = move_state(placement, state, to_play=True)
            session = placement.sessions.move(service.session)
            if session is None:
                placement.restore(before | {"calm_steps": 0})
            else:
                service.move(session)
                self._live = self._mesh_and_slots()
            state = move_state(placement, state, to_play=True)
        if session is not None:
            facts = {"version": position.step, "round": self._groups.num_rounds}
            events.note("split", **facts, placement=placement.as_dict())
        return dataclasses.replace(position, state=state)

    def _play(self, position: Position) -> PlayedStep:
        """Plays until a batch can be taken; raises what a round beside the last update raised."""
        groups, placement, cluster = self._groups, self._placement, self._run.cluster
        _, shortage, stopped = ends_of(placement, self._raise_error)
        gather_ends(cluster, None, "the rounds beside an update", shortage, stopped)
        forbid = self._run.config.dispatch.forbid_host_bytes
        with self._timer("publish"), only_on_devices(forbid) as reads:
            num_bytes = self._publish(position)
        if self._settings.checksums and self._service is not None:
            self._checksum = int(fingerprint(self._service.session.policy.params))
            self._events.note("checksum", version=position.step, sum=self._checksum)
        taken = self._taken = self._taken or _Taken(update=self._new_update(position))
        number = groups.group_size * len(cluster.players)
        while (left := groups.size - taken.num_episodes // number) > 0:
            with self._timer("rollout"):
                next_part = functools.partial(self._next_part, left)
                part, shortage, stopped = ends_of(placement, next_part)
                rollout, where = part and part.rollout, self._where()
                played = gather_outcomes(cluster, rollout, where, shortage, stopped)
            self._adopt(played.placement)
            taken.played.append(played)
            if part is not None:
                groups.copied(part.episodes)
                taken.trajectories += part.rollout.trajectories
            experience = part and part.experience
            if taken.update is None:
                taken.experience = experience
            else:
                self._stream(taken.update, position, played.outcomes, experience)
        self._taken = None
        if self._service is not None:
            self._counted = dataclasses.replace(self._service.stats)
        dropped, groups.dropped = groups.dropped, []
        refilled, groups.refilled = groups.refilled, []
        trajectories, played = taken.in_order()
        return PlayedStep(
            plan=placement.rollout,
            max_tokens=played.placement["max_tokens"],
            trajectories=trajectories,
            experience=taken.experience,
            played=played,
            load=measure_load(played, placement.rollout.num_slots),
            publish_bytes=num_bytes,
            publish_host_bytes=reads.num_bytes,
            dispatch_host_bytes=taken.dispatch_host_bytes,
            update=taken.update,
            dropped=dropped,
            refilled=refilled,
            num_reused=groups.num_reused,
        )

    def _raise_error(self) -> None:
        """Raises what a round beside the last update raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _where(self) -> dict[str, Any]:
        """Returns the placement, with the length of the rows that this process plays in."""
        where = self._placement.as_dict()
        if self._service is not None:
            where["max_tokens"] = self._service.session.max_tokens
        return where

    def _next_part(self, left: int) -> _Part | None:
        """Plays until the step, which takes `left` more groups of this process, can take some.

        None in a process that only trains.
        """
        service = self._service
        if service is None:
            return None
        episodes = self._groups.next_episodes(left)
        rows = [each.row for each in episodes]
        experience = service.session.engine.row_copies.gather(
            service.session.state.experience, rows
        )
        if self._settings.rule == "mask":
            oldest = self._groups.version - self._settings.max_staleness
            experience = _since_version(experience, oldest)
        rollout = Rollout(
            trajectories=[each.trajectory for each in episodes],
            session=service.session,
            rows=rows,
            stats=service.stats.since(self._counted),
        )
        return _Part(episodes, experience, rollout)

    def _new_update(self, position: Position) -> StepUpdate | None:
        """Returns the update that a step's groups go to as they are finished; None: all at once."""
        if self._settings.parts == 1:
            return None
        config = self._run.config
        controls = self._run.learner.controls(position.step, config.num_steps)
        return StepUpdate(placement=self._placement, controls=controls, wait=self.wait)

    def _stream(
        self,
        update: StepUpdate,
        position: Position,
        outcomes: Sequence[Outcome],
        experience: Experience | None,
    ) -> None:
        """Sends these episodes to the trainer, which starts on their gradients."""
        config, taken = self._run.config, self._taken
        assert taken is not None, "the step has begun"
        length = config.rollout.max_tokens_for(max(outcome.num_tokens for outcome in outcomes))
        forbid = config.dispatch.forbid_host_bytes
        with self._timer("dispatch"), only_on_devices(forbid) as reads:
            part = send_rows(self._placement, experience, outcomes, length, {}, wait=False)
        counted = (taken.dispatch_host_bytes, reads.num_bytes)
        taken.dispatch_host_bytes = None if None in counted else sum(filter(None, counted))
        with self._timer("train"):
            update.add(position.state, part)

    def _publish(self, position: Position) -> int:
        """Gives the service the weights of the position; opens one with them where there is none.

        Returns the bytes of weights that changed device.
        """
        placement, version = self._placement, position.step
        params = self._run.learner.policy(position.state)
        if self._live is None:
            self._events.note("open", version=version)
            self.plans_chosen()
            session, num_bytes = placement.sessions.open(params, version)
            self._live = self._mesh_and_slots()
            if session is not None:
                self._service = self._open(session, position)
            return num_bytes
        if self._service is not None:
            # Where this fails for lack of memory, the service is given up and opened anew.
            self._service.release_weights()
        mesh, num_slots = self._live
        engine = self._run.stages.engines.engine(mesh, num_slots)
        policy, num_bytes = placement.sessions.publish(engine, mesh, params, version)
        if self._service is not None:
            self._groups.publish(version)
            self._service.update_weights(policy, self._settings.kv)
        return num_bytes

    def _mesh_and_slots(self) -> tuple[MeshShape, int]:
        plan = self._placement.rollout
        return plan.mesh, plan.num_slots

    def _open(self, session: Session, position: Position) -> RolloutService:
        """Returns a service that plays the open groups from their beginning."""
        load = expected_load(self._run.config.rollout, position.history)
        service = self._run.actor.open(
            session,
            grow=lambda session, tokens, pages: self._grow(session, tokens, pages, load),
            record_calls=self._events.record_calls,
        )
        self._counted = RolloutStats()
        self._groups.open(service, position.step, position.open_groups)
        return service

    def _grow(self, session: Session, tokens: int, pages: int, load: Load | None) -> Session:
        grown = self._placement.sessions.grow(session, tokens, pages, load)
        self._live, self._has_grown = self._mesh_and_slots(), True
        self._events.note("grow", plan=str(self._placement.rollout), round=self._groups.num_rounds)
        return grown

    # While an update is under way.

    def _play_beside(self, is_over: Callable[[], bool]) -> None:
        """Plays rounds until the update is over. What a round raises is left to the next step.

        In a replay it plays as many rounds as then.
        """
        if self._error is not None:
            return
        with self._timer("overlap"):
            try:
                self._groups.play_beside(is_over)
            except Exception as error:  # noqa: BLE001 - raised again by the next step
                self._error = error


@jax.jit
def _since_version(experience: Experience, oldest: int) -> Experience:
    """Returns the rows as if the policy had sampled no token before version `oldest`."""
    is_kept = experience.versions >= oldest
    return dataclasses.replace(experience, turn_ids=jnp.where(is_kept, experience.turn_ids, 0))
