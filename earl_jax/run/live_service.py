# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rollout service of an asynchronous run, which stays open from step to step.

It is opened on the plans in use, gets new weights, grows, and moves to another split of the devices
or to the mesh of another process; live episodes go on. Where no later ones follow, the last of a
step may move to where so few are faster, and the next step begins where this one began. Its events
are noted, or come again in a replay (rollout/events.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.algorithms.advantages import is_useless
from earl_jax.config.config import Config
from earl_jax.config.resume import replayed_settings
from earl_jax.dispatch.weights import program_of
from earl_jax.engine.engine import Session
from earl_jax.models.engine_parameters import engine_specs
from earl_jax.models.fingerprint import fingerprint
from earl_jax.models.parameters import parameter_shardings
from earl_jax.placement.moves import (
    grow_noted,
    move_session,
    move_state,
    note_plans,
    open_session,
    publish_policy,
    relocate_session,
    restore_plans,
    shrink_noted,
)
from earl_jax.placement.placement import Placement
from earl_jax.rollout.actor import Actor
from earl_jax.rollout.event_files import Begun
from earl_jax.rollout.gather import furthest
from earl_jax.rollout.load import expected_load, expected_tokens
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.results import Rollout
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.rollout.tasks import Tasks
from earl_jax.run.position import Position
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.settings.errors import RunError
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.host_bytes import only_on_devices
from earl_jax.telemetry.load import Load
from earl_jax.trajectory import Experience


class Part(NamedTuple):
    """Episodes that a step takes at once from this process's service, and copies of their rows."""

    episodes: list[Finished]
    experience: Experience
    rollout: Rollout


class LiveService:
    """The open service of this process, and the mesh and slots of those of all processes.

    Every process has one, and calls it alike; those that only train have no `service`.
    `open_groups` are those of all processes, when the last updates had ended, and `oldest_step` is
    the oldest step with an open group, or one that is yet to be begun. `has_next_step` is True
    where all groups of the next step were finished then.
    """

    def __init__(
        self,
        config: Config,
        tasks: Tasks,
        actor: Actor,
        placement: Placement,
        begun: Begun | None = None,
    ) -> None:
        """Begins without a service, which the first `publish` opens; `begun` as in `OpenGroups`."""
        self._config, self._actor, self._events = config, actor, placement.events
        self._placement, self._stages = placement, placement.stages
        self._settings = config.asynchrony
        self.groups = OpenGroups(
            tasks,
            self._settings,
            placement.events,
            is_useless=functools.partial(is_useless, self._stages.learner.algorithm),
            part=self._stages.cluster.part,
            begun=begun,
        )
        self.service: RolloutService | None = None
        self.open_groups: tuple[int, ...] = ()
        self.oldest_step = 0
        self.has_next_step = False
        # What a round beside an update raised: the next step deals with it.
        self.error: Exception | None = None
        # The mesh and slots of all processes' services; None: they are to be opened.
        self._where: tuple[MeshShape, int] | None = None
        # The load that was expected when the weights came.
        self._load: Load | None = None
        # The service's counts when a step took its episodes.
        self._counted = RolloutStats()
        # With config.asynchrony.checksums: those of the policy that was published last, as the
        # trainer has it (None in a process that does not train) and as the service has it.
        self._trained_checksum: jax.Array | None = None
        self._checksum = 0

    @property
    def is_open(self) -> bool:
        """True where the processes that play have a service."""
        return self._where is not None

    def is_given_up(self) -> bool:
        """Returns True in a replay where memory was too short for some process's service here.

        Every process calls it.
        """
        own = self.service is not None and self.groups.is_given_up
        any_of = self._stages.cluster.any
        return self._events.is_replay and any_of(own, "the end of a rollout that is replayed")

    def close(self) -> None:
        """Gives the service up: the next `publish` opens one, which plays its groups again."""
        self._where = self.service = None
        self.has_next_step = False
        self.groups.close()

    def end_rounds(self) -> None:
        """Ends the rounds with the weights before; raises what one beside the last update raised.

        Where new weights interrupt no episode, live ones are played to their end.
        """
        error, self.error = self.error, None
        if error is not None:
            raise error
        if (service := self.service) is None:
            return
        if not self._settings.interrupts:
            self.groups.finish_live()
        assert self._where is not None, "the service is open"
        if service.session.engine is not self._stages.engines.engine(*self._where):
            # The last episodes of the step before have moved; new weights come behind the way back.
            service.release_weights()
            placement = self._placement
            service.move(relocate_session(placement, service.session, placement.rollout))

    def expected_load(self, position: Position) -> Load | None:
        """Returns the load to choose plans by; the split of the devices by the mean of steps."""
        load = expected_load(self._stages.rollout, position.history)
        if load is None or not self._stages.problem.splits:
            return load
        return position.history.averaged(load)

    # New weights.

    def publish(self, position: Position) -> int:
        """Gives the service the weights of the position; opens one with them where there is none.

        Returns the bytes of weights that changed device.
        """
        placement, version = self._placement, position.step
        self.groups.lengths = position.lengths
        self._load = expected_load(self._stages.rollout, position.history)
        params = self._stages.learner.policy(position.state)
        if self._where is None:
            settings = replayed_settings(self._config)
            self._events.note("open", version=version, settings=settings)
            restore_plans(placement)
            note_plans(placement, version)
            self._sum_up(params, *self._mesh_and_slots())
            session, num_bytes = open_session(placement, params, version)
            self._where = self._mesh_and_slots()
            if session is not None:
                self.service = self._open(session, position)
            return num_bytes
        if self.service is not None:
            # Where this fails for lack of memory, the service is given up and opened anew.
            self.service.release_weights()
        mesh, num_slots = self._where
        self._sum_up(params, mesh, num_slots)
        engine = self._stages.engines.engine(mesh, num_slots)
        policy, num_bytes = publish_policy(placement, engine, mesh, params, version)
        if self.service is not None:
            self.groups.publish(version)
            recompute = self._settings.kv == "recompute"
            self.service.update_weights(policy, "recompute" if recompute else "keep")
        return num_bytes

    def _sum_up(self, params: Any, mesh: MeshShape, num_slots: int) -> None:
        """Computes the checksum of the trainer's weights, with config.asynchrony.checksums.

        They are cast or quantised as for the engine on `mesh`, and stay on the trainer's devices.
        """
        if not self._settings.checksums or not self._stages.cluster.trains:
            return
        engine = self._stages.engines.engine(mesh, num_slots)
        # In a replay the state may not have moved to the plans of then yet.
        here = MeshShape(**jax.tree.leaves(params)[0].sharding.mesh.shape)
        config, layout = engine.config, self._stages.learner.layout(here)
        specs = engine_specs(config.model, config.vocab_size, config.weight_dtype)
        cast = program_of(params, engine.parameter_shapes, parameter_shardings(specs, layout))
        self._trained_checksum = fingerprint(cast(params))

    def note_checksum(self, version: int) -> None:
        """Notes the checksum of the weights that were published, with config.asynchrony.checksums.

        Every process calls it.

        Raises:
            RunError: the weights that some process plays with are not those that are trained.
        """
        if not self._settings.checksums:
            return
        trained, played = self._trained_checksum, None
        if self.service is not None:
            played = self._checksum = self._played_checksum(self.service)
        own = [None if trained is None else int(trained), played]
        each = self._stages.cluster.gather(own, "the checksums of new weights")
        right = next(found for found, _ in each if found is not None)
        wrong = next((found for _, found in each if found not in (None, right)), None)
        if wrong is not None:
            raise RunError(
                f"the weights of version {version} have checksum {wrong} where they are played and "
                f"{right} where they are trained: they were not published whole"
            )
        if played is not None:
            self._events.note("checksum", version=version, sum=played)

    def check_checksum(self, step: int) -> None:
        """Raises RunError where the weights that a step played with are not as published."""
        if not self._settings.checksums or self.service is None:
            return
        found = self._played_checksum(self.service)
        if found != self._checksum:
            raise RunError(
                f"the weights that step {step} played with have checksum {found} at its end, "
                f"and had {self._checksum} when they were published: something overwrote them"
            )

    def _played_checksum(self, service: RolloutService) -> int:
        return int(fingerprint(service.session.policy.params))

    def _mesh_and_slots(self) -> tuple[MeshShape, int]:
        plan = self._placement.rollout
        return plan.mesh, plan.num_slots

    def _open(self, session: Session, position: Position) -> RolloutService:
        """Returns a service in which the open groups go on from the position."""
        service = self._actor.open(
            session,
            grow=self._grow,
            shrink=self._shrink,
            events=self._events,
        )
        self._counted = RolloutStats()
        self.groups.open(
            service,
            position.step,
            position.open_groups,
            position.oldest_step,
            position.open_episodes,
        )
        return service

    def _grow(self, session: Session, tokens: int, pages: int) -> Session:
        placement, events = self._placement, self._events
        grown = grow_noted(placement, session, tokens, pages, self._load, events)
        self._where = self._mesh_and_slots()
        return grown

    def _shrink(self, session: Session, live: int, longest: int) -> Session:
        placement, events = self._placement, self._events
        return shrink_noted(placement, session, live, longest, self._load, events)

    # What a step takes.

    def take(self, left: int, *, whole: bool, is_ready: Callable[[], bool]) -> Part | None:
        """Plays until the step, which takes `left` more groups of this process, can take some.

        `whole` and `is_ready` as of `OpenGroups.next_episodes`. None in a process that only trains,
        and in a replay where the service `is_given_up`.
        """
        service = self.service
        if service is None:
            return None
        # Until further tasks are submitted.
        service.is_draining = not (self._settings.max_staleness or self._settings.refill)
        if not (episodes := self.groups.next_episodes(left, whole=whole, is_ready=is_ready)):
            return None
        rows = [each.row for each in episodes]
        experience = service.session.engine.row_copies.gather(
            service.session.state.experience, rows
        )
        if self._settings.rule == "mask":
            oldest = self.groups.version - self._settings.max_staleness
            experience = since_version(experience, oldest)
        num_hung = self._actor.pool.num_hung
        rollout = Rollout(
            trajectories=[each.trajectory for each in episodes],
            session=service.session,
            rows=rows,
            stats=dataclasses.replace(service.stats.since(self._counted), hung_calls=num_hung),
            dropped=self.groups.dropped,
            refilled=self.groups.refilled,
            num_reused=self.groups.num_reused,
        )
        return Part(episodes, experience, rollout)

    def count_from_here(self) -> None:
        """Counts what the service does from now on for the next step."""
        self.groups.count_from_here()
        if self.service is not None:
            self._counted = dataclasses.replace(self.service.stats)

    def placement_of_rows(self) -> dict[str, Any]:
        """Returns the placement, with the length of the rows that this process plays in."""
        where = self._placement.as_dict()
        if self.service is not None:
            where["max_tokens"] = self.service.session.max_tokens
        return where

    # Moves, and what the processes agree on.

    def split(self, position: Position) -> Position:
        """Moves both stages where another split of the devices is so much faster.

        Live episodes move along, within their process. Returns the position, whose state has moved.
        In a replay they move where they did then. Where memory is too short for the move in some
        process, both stages stay; and so they do where a round beside an update failed.
        """
        placement, events, state = self._placement, self._events, position.state
        service, any_of = self.service, self._stages.cluster.any
        assert service is not None and self._where is not None, "every process plays and trains"
        if any_of(self.error is not None, "the rounds beside an update"):
            return position
        before, event = placement.as_dict(), events.coming("split")
        with only_on_devices():
            if event is not None:
                placement.restore(event["placement"])
            else:
                load = self.expected_load(position)
                tokens = expected_tokens(self._stages.rollout, load)
                # All processes know the same, and choose alike.
                if events.is_replay or not placement.choose_split(tokens, load):
                    return position
            # New ones arrive behind the move.
            service.release_weights()
            if placement.rollout.mesh.num_devices > self._where[0].num_devices:
                # The trainer leaves the devices first that the episodes move to.
                state = move_state(placement, state, to_play=True)
            session = move_session(placement, service.session)
            is_short = any_of(session is None, "the move of live episodes")
            if session is None or is_short:
                session = None
                placement.restore(before | {"calm_steps": 0})
            else:
                service.move(session)
                self._where = self._mesh_and_slots()
            state = move_state(placement, state, to_play=True)
        if session is not None:
            facts = {"version": position.step, "round": self.groups.num_rounds}
            events.note("split", **facts, placement=placement.as_dict())
        return dataclasses.replace(position, state=state)

    def meet(self, what: str) -> None:
        """Takes over the placement, and the mesh, of the process whose episodes need the most."""
        own, placement = None, self._placement
        if self._stages.cluster.count == 1:
            self.open_groups = tuple(self.groups.numbers)
            self.oldest_step = self.groups.oldest_step
            self.has_next_step = self.service is not None and self.groups.has_next_step
            return
        if self.service is not None and self._where is not None:
            mesh, slots = self._where
            own = {
                "placement": placement.as_dict(),
                "outgrown": placement.outgrown,
                "live": [str(mesh), slots],
                "groups": self.groups.numbers,
                "oldest_step": self.groups.oldest_step,
                "has_next_step": self.groups.has_next_step,
            }
        cluster = self._stages.cluster
        each = cluster.of_players(cluster.gather(own, what))
        self.open_groups = tuple(sorted(number for one in each for number in one["groups"]))
        self.oldest_step = min(one["oldest_step"] for one in each)
        self.has_next_step = all(one["has_next_step"] for one in each)
        chosen = each[furthest([one["placement"] for one in each])]
        placement.restore(chosen["placement"])
        placement.outgrown = chosen["outgrown"]
        before, (mesh, slots) = self._where, chosen["live"]
        self._where = MeshShape.parse(mesh), slots
        if self.service is not None and self._where != before and self.error is None:
            self._follow(self.service)

    def _follow(self, service: RolloutService) -> None:
        """Moves live episodes to the mesh to which those of another process have grown."""
        placement = self._placement
        try:
            if (session := move_session(placement, service.session)) is None:
                raise BudgetTooSmall(placement.log.failures[-1])
            service.move(session)
        except (jax.errors.JaxRuntimeError, BudgetTooSmall) as error:
            self.error = error


@jax.jit
def since_version(experience: Experience, oldest: int) -> Experience:
    """Returns the rows as if the policy had sampled no token before version `oldest`."""
    is_kept = experience.versions >= oldest
    return dataclasses.replace(experience, turn_ids=jnp.where(is_kept, experience.turn_ids, 0))
