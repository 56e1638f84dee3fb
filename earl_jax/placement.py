# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which mesh each stage is on, and what moves when that changes.

The only place where a Decision becomes arrays on other devices: weights and live KV caches of a
rollout, parameters and optimiser state of the trainer. And where it is remembered what the devices
had no memory for.
"""

import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from earl_jax.calibrate import Calibration
from earl_jax.chooser import Chooser, StepChoice
from earl_jax.joint import RolloutShort, Shortage, send_weights, shortage_of
from earl_jax.rest import from_rest, is_at_rest, to_rest
from earl_jax.rollout.pages import Pool, roomier_pages
from earl_jax.rollout.seat import Policy, Seat, open_seat, vacate
from earl_jax.selector.choose import BudgetTooSmall, Decision, Settings
from earl_jax.selector.ladder import Failure, RolloutRung, TrainRung, rollout_size, train_size
from earl_jax.selector.memory import is_out_of_memory, resident_bytes
from earl_jax.selector.step_choice import Pair, StepDecision
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import absent_tree
from earl_jax.sharding.reshard import reshard
from earl_jax.survival import (
    Ladder,
    ShortAlone,
    Spares,
    carry,
    check_budget,
    is_placed,
)
from earl_jax.telemetry.load import Load
from earl_jax.train.step import TrainState
from earl_jax.world import World

Result = TypeVar("Result")


@dataclasses.dataclass(kw_only=True)
class SwitchLog:
    """What changed since the last step was logged.

    `comparison` is the newest choice's with the others, in words; `failures` say what ran out of
    memory.
    """

    decisions: list[Decision] = dataclasses.field(default_factory=list)
    comparison: str = ""
    failures: list[str] = dataclasses.field(default_factory=list)
    switch_s: float = 0.0
    bytes_per_device: int = 0


class Placement:
    """The meshes in use. Host-side state only; all of it is in `as_dict`, for the checkpoint."""

    def __init__(self, world: World, calibration: Calibration) -> None:
        self._world, self.calibration = world, calibration
        self._ladder = Ladder(world)
        self.spares = Spares(world.processes.count == 1)
        selector = world.config.selector
        settings = Settings(
            budget_bytes=world.budget_bytes,
            hysteresis=selector.hysteresis,
            horizon_steps=selector.horizon_steps,
        )
        self._chooser = Chooser(world, calibration, self._ladder, settings)
        self.rollout_mesh: MeshShape | None = None
        self.train_mesh: MeshShape | None = None
        self.places = self.pages = 0
        self.num_slots = world.own_rollout.num_slots
        self.train_rung = world.first_train_rung
        # Whether the optimizer's moments are in host memory while episodes are played.
        self.offload = False
        self.calm_steps = 0
        # Tokens a row of the batches that the training mesh was chosen for.
        self._length = 0
        # Room that a rollout came to which ran out of memory: it is played again from the start.
        self._outgrown = 0
        # Where this process has played: elsewhere a program is loaded or compiled first.
        self._played: set[tuple[MeshShape, int, Pool]] = set()
        # What was expected of the step, for the tokens that it would have.
        self._expected: StepChoice | None = None
        # What the rollout before has read, for another under the same weights.
        self._kept: Seat | None = None
        self.log = SwitchLog()

    def as_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on choosing alike."""
        return {
            "rollout_mesh": str(self.rollout_mesh),
            "train_mesh": str(self.train_mesh),
            "places": self.places,
            "pages": self.pages,
            "num_slots": self.num_slots,
            "train_rung": list(self.train_rung),
            "calm_steps": self.calm_steps,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """The inverse of `as_dict`. Raises ValueError where something is missing."""
        if absent := self.as_dict().keys() - saved.keys():
            raise ValueError(f"its placement is without {', '.join(sorted(absent))}")
        self.rollout_mesh = MeshShape.parse(saved["rollout_mesh"])
        self.train_mesh = MeshShape.parse(saved["train_mesh"])
        self.places, self.pages = saved["places"], saved["pages"]
        self.num_slots, self.calm_steps = saved["num_slots"], saved["calm_steps"]
        self.train_rung = TrainRung(*saved["train_rung"])

    @property
    def in_rollout(self) -> MeshShape:
        """The rollout mesh in use; one must have been chosen."""
        assert self.rollout_mesh is not None
        return self.rollout_mesh

    @property
    def in_training(self) -> MeshShape:
        """The training mesh in use; one must have been chosen."""
        assert self.train_mesh is not None
        return self.train_mesh

    @property
    def room(self) -> int:
        """The most tokens an episode that it has come to, or must have room for from the start."""
        configured = self._world.config.rollout.context_buckets[-1]
        return max(configured, self.places, self._outgrown)

    @property
    def rung(self) -> str:
        """What a run does with less than its config says, because memory is short; "" for no."""
        return self._ladder.words(self.num_slots, self.train_rung, self.offload)

    def take_log(self) -> SwitchLog:
        """What was decided since the last call."""
        log, self.log = self.log, SwitchLog()
        return log

    def check_budget(self) -> None:
        """Raises BudgetTooSmall where some room that is configured fits no mesh on any rung."""
        check_budget(self._ladder, self.calibration, self._chooser.settings.budget_bytes)

    # Choosing.

    def choose_step(self, tokens: int, load: Load | None) -> StepDecision:
        """The meshes of the next step, with room for rollouts of `tokens` tokens an episode.

        On the first rung of the ladder where any fit. Where none fits what contexts are expected to
        grow to, for contexts as they are: this step can still be played.

        Raises:
            BudgetTooSmall: no rung is left.
        """
        try:
            return self._choose_step(tokens, load)
        except BudgetTooSmall:
            if load is None or not load.growth_tokens:
                raise
        ahead = math.ceil(load.growth_tokens)
        shorter = dataclasses.replace(
            load, context_tokens_max=load.context_tokens_max - ahead, growth_tokens=0.0
        )
        return self._choose_step(tokens - ahead, shorter)

    def _choose_step(self, tokens: int, load: Load | None) -> StepDecision:
        rollout = self._world.config.rollout
        places = max(rollout.places_for(tokens), self._outgrown)
        length = rollout.places_for(load.context_tokens_max if load else 1)
        pages = self._ladder.wanted_pages(places, self.pages)
        known = self.rollout_mesh is not None and self.train_mesh is not None
        pair = Pair(self.in_rollout, self.in_training) if known else None
        choice = self._chooser.choose_step(places, length, load, pages, pair, self.calm_steps)
        decision = choice.decision
        switched = decision.rollout.switched or decision.train.switched
        self.calm_steps = 0 if switched else self.calm_steps + 1
        self.rollout_mesh, self.train_mesh = decision.pair
        self.places, self._length, self._expected = places, length, choice
        (self.num_slots, self.pages, self.offload), self.train_rung = choice.rollout, choice.train
        self._note(decision.rollout)
        self._note(decision.train)
        self.log.comparison = decision.reason
        return decision

    def unexplained_s(self, load: Load, stage_s: Mapping[str, float]) -> float:
        """Seconds of a step's rollout and training that its meshes' speeds do not explain."""
        if self._expected is None or self._expected.decision.predicted_s is None:
            return 0.0
        decision, work = self._expected.decision, self._expected.work
        rollout_s, train_s = decision.rollout.predicted_s, decision.train.predicted_s
        assert rollout_s is not None and train_s is not None
        explained_s = rollout_s * load.rollout_tokens / work.rollout_tokens + train_s
        return max(0.0, stage_s["rollout"] + stage_s["train"] - explained_s)

    def choose_training(self, load: Load | None) -> Decision:
        """The training mesh for rows as long as the longest of recent steps.

        The one in use stays unless it must be left: a step's meshes are chosen together. By recent
        steps and not by the batch at hand: where the longest episode comes and goes, the mesh must
        not.
        """
        rollout = self._world.config.rollout
        return self._choose_training(
            rollout.places_for(load.context_tokens_max if load else 1), load
        )

    def choose_training_again(self) -> Decision:
        """Another mesh or rung for rows of the same length, behind a failure."""
        return self._choose_training(self._length, None)

    def _choose_training(self, length: int, load: Load | None) -> Decision:
        decision, rung = self._chooser.choose_training(length, load, self.train_mesh)
        # Rows that are shorter than was foreseen are no news.
        if decision.switched or self.train_mesh is None or length > self._length:
            self._note(decision)
        self.train_mesh, self.train_rung, self._length = decision.mesh, rung, length
        self.calm_steps = 0 if decision.switched else self.calm_steps
        return decision

    def choose_rollout(self, tokens: int, load: Load | None) -> Decision:
        """The rollout mesh for episodes of up to `tokens` tokens, and the pages of its KV cache.

        As many as the rollout before had in the end, if the budget allows. The mesh in use stays
        unless it must be left.
        """
        places = max(self._world.config.rollout.places_for(tokens), self._outgrown)
        pages = self._ladder.wanted_pages(places, self.pages)
        rungs = self._ladder.rungs_as(self.offload, places, [pages])
        return self._choose_rollout(places, rungs, load, self.rollout_mesh)

    def _choose_rollout(
        self,
        places: int,
        rungs: Sequence[RolloutRung],
        load: Load | None,
        current: MeshShape | None,
    ) -> Decision:
        decision, rung = self._chooser.choose_rollout(
            places, rungs, load, current, self.in_training
        )
        self._note(decision)
        if decision.switched or self.rollout_mesh is None:
            self.rollout_mesh, self.calm_steps = decision.mesh, 0
        self.places, (self.num_slots, self.pages, _) = places, rung
        return decision

    # The ladder.

    def survive(
        self, stage: str, attempt: Callable[[], Result], places: int | None = None
    ) -> Result | None:
        """What the attempt returns; None where the devices had too little memory for it.

        That is remembered: choose again then, and do it again from its inputs, which the attempt
        must not have given up. So it is where a rollout outgrew its meshes and none is left for its
        live episodes: from the start there may be one, with fewer slots. `places`: tokens a row of
        what is trained on.

        Of several processes one that is short in a rollout tells the others at its end, and all
        play again alike.

        Raises:
            BudgetTooSmall: no mesh is left.
            ShortAlone: of several processes this one failed in a program that they run together.
        """
        try:
            result = self._unless_short(stage, attempt, places)
        except BudgetTooSmall:
            if stage != "rollout" or not self._outgrown:
                raise
            result = None
        except RolloutShort as error:
            self._agree(error.shortage)
            result = None
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._alone(stage, places or self._length) from error
        if stage == "rollout" and result is not None:
            self._outgrown = 0
        return result

    # Of several processes.

    def shortage(self, error: Exception) -> Shortage | None:
        """What this process tells the others of a rollout that ended so (`joint.shortage_of`)."""
        return shortage_of(self._world, error, self.as_dict(), self._outgrown)

    def _agree(self, shortage: Shortage) -> None:
        """All go on from where the rollout ended that was short, and remember the same."""
        self.restore(shortage.placement)
        self._outgrown = shortage.outgrown
        if shortage.failed:
            self._fail("rollout", 0)
        gc.collect()

    def _alone(self, stage: str, length: int) -> ShortAlone:
        """The end of this process: others may wait in the program that failed here."""
        self._fail(stage, length)
        processes = self._world.processes
        return ShortAlone(f"process {processes.index} of {processes.count}", self.log.failures[-1])

    def _unless_short(
        self, stage: str, attempt: Callable[[], Result], places: int | None = None
    ) -> Result | None:
        """What the attempt returns; None where memory was short, which is noted.

        Of several processes the others may not have failed: this one raises, to tell them.
        """
        try:
            return attempt()
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or self._world.processes.count > 1:
                raise
        self._fail(stage, places or self._length)
        # What the failed attempt had on the devices is gone with its frames.
        gc.collect()
        return None

    def _fail(self, stage: str, length: int) -> None:
        rows = self._world.config.rollout.episodes_per_step
        if stage == "tail":
            self.log.failures.append(
                f"{self.log.decisions[-1].reason}: there was too little memory"
            )
            return
        if stage == "rollout":
            mesh = self.in_rollout
            rung = RolloutRung(self.num_slots, self.pages, self.offload)
            size = rollout_size(self.places, rung)
            self._outgrown = self.places
        else:
            mesh, size = self.in_training, train_size(length, rows, self.train_rung)
        failure = Failure(stage=stage, mesh=str(mesh), size=size)
        self.calibration.note_failure(failure)
        self.log.failures.append(f"{stage} on {mesh} {failure}")

    # Moving.

    def move_state(self, state: TrainState, *, to_play: bool = False) -> TrainState:
        """Parameters and optimiser state on the training mesh in use; `state` is given up.

        Where memory is too short to go there, even piece by piece, on another mesh. With `to_play`
        the moments then go to the host's memory, if the rollout needs the room.

        Raises:
            BudgetTooSmall: no mesh is left.
        """
        resting = to_play and self.offload
        where = self._world.train_state_shardings(self.in_training)
        if resting and is_at_rest(state) and is_placed(state.params, where.params):
            return state
        state = self._to_mesh(from_rest(state))
        return to_rest(state) if resting else state

    def _to_mesh(self, state: TrainState) -> TrainState:
        world, whole = self._world, False
        while not whole:
            shardings = world.train_state_shardings(self.in_training)
            if not world.processes.trains:
                return absent_tree(world.train_state_shapes(), shardings)
            if is_placed(state, shardings):
                return state
            start = time.perf_counter()
            if world.processes.count > 1:
                again = functools.partial(self._to_mesh_together, state, shardings)
                moved = self.survive("train", again)
                assert moved is not None, "of several processes one that is short ends"
                state, whole = moved, True
            else:
                state, whole = carry(state, shardings, self._chunk_bytes)
            self.log.switch_s += time.perf_counter() - start
            if not whole:
                self._fail("train", self._length)
                self.choose_training_again()
        return state

    def _to_mesh_together(self, state: TrainState, shardings: Any) -> TrainState:
        state = reshard(state, shardings, chunk_bytes=self._chunk_bytes, donate=True)
        self._world.processes.wait(state, "the switch of the trainer")
        return state

    @property
    def _chunk_bytes(self) -> int | None:
        return self._world.config.dispatch.chunk_bytes or None

    @property
    def _pool(self) -> Pool:
        return Pool(lanes=len(self._world.processes.lanes), pages=self.pages)

    def open_seat(self, params: Any, version: int) -> tuple[Seat | None, int]:
        """An empty seat on the rollout mesh in use, with this policy published to it.

        Every process calls it.

        Returns:
            The seat, None in a process that does not play, and the bytes of weights that changed
            device, of all processes.
        """
        world = self._world
        engine = world.engine(self.in_rollout, self.num_slots)
        published = send_weights(
            world, params, self.in_rollout, self.num_slots, chunk_bytes=self._chunk_bytes
        )
        if not world.processes.plays:
            return None, published.moved_bytes
        policy = Policy(params=published.params, version=version)
        pool = self._pool
        self._played.add((self.in_rollout, self.places, pool))
        kept, self._kept = self._kept, None
        seat = open_seat(engine, policy, self.places, pool, kept)
        return seat, published.moved_bytes

    def keep(self, seat: Seat) -> None:
        """What this seat's caches hold is there for the next seat, if that has the same weights.

        Unless there is too little memory for another seat beside them.
        """
        budget, engine = self._chooser.settings.budget_bytes, seat.engine
        taken = resident_bytes(seat.state, engine.state_shardings)
        taken += resident_bytes(seat.policy.params, engine.parameter_shardings)
        need = self._ladder.trainer_bytes(self.in_training) + 2 * taken
        if not self.offload and (budget is None or need <= budget):
            self._kept = vacate(seat)

    def forget(self) -> None:
        """Nothing is kept any more."""
        self._kept = None

    def make_room(self, seat: Seat, tokens: int, pages: int, load: Load | None) -> Seat:
        """A seat with room for `tokens` tokens an episode: the live episodes move along.

        It has `pages` pages a lane, and some more so that it does not grow often (`roomier_pages`),
        if the budget allows them on any mesh; else as many as before.

        Chooses anew for the larger room: if the budget does not hold it on this mesh, weights and
        live KV caches go to another one and the episodes continue there.
        """
        slots = seat.engine.config.num_slots
        places = self._world.config.rollout.places_for(tokens)
        roomy = min(roomier_pages(pages), self._world.pool_for(places, slots).pages)
        has = seat.pool.pages
        wanted = [max(roomy, pages), pages, has] if pages > has else [has]
        least = self._ladder.least_pages(places)
        numbers = dict.fromkeys(max(number, least) for number in wanted)
        rungs = [RolloutRung(slots, number, self.offload) for number in numbers]
        self._outgrown = places
        grown = None
        while grown is None:
            with self.calibration.apart():
                self._choose_rollout(places, rungs, load, self._mesh_of(seat))
            # Nothing is donated: where memory is short the live episodes are still there.
            grown = self._unless_short("rollout", functools.partial(self._grow_seat, seat))
        return grown

    def foresee(self, room: int, pages: int) -> tuple[MeshShape, int]:
        """The mesh where live episodes would go on with this room, and the pages of a lane there.

        As `make_room` chooses, where it would for a room that is configured: there all is measured.
        """
        world, here = self._world, self.in_rollout
        known = room <= world.config.rollout.context_buckets[-1]
        known &= self.num_slots == world.own_rollout.num_slots
        if world.budget_bytes is None or not known:
            return here, pages
        least = min(pages, max(self.pages, self._ladder.least_pages(room)))
        rungs = [
            RolloutRung(self.num_slots, n, self.offload) for n in dict.fromkeys((pages, least))
        ]
        try:
            found = self._chooser.choose_rollout(room, rungs, None, here, self.in_training)
        except BudgetTooSmall:
            return here, pages
        return found[0].mesh, found[1].pages

    def _mesh_of(self, seat: Seat) -> MeshShape:
        """The rollout mesh that a seat is on. Of several processes none goes its own way."""
        several = self._world.processes.count > 1
        return self.in_rollout if several else seat.engine.layout.shape

    def _grow_seat(self, seat: Seat) -> Seat:
        moved, pool = self.move_seat(seat, self.in_rollout), self._pool
        state = moved.engine.grow(moved.state, self.places, seat.pool, pool)
        return dataclasses.replace(
            moved, state=jax.block_until_ready(state), places=self.places, pool=pool
        )

    def thin_out(self, seat: Seat, live: int, longest: int, load: Load | None) -> Seat:
        """A seat for the last `live` episodes of a rollout; the longest has so many tokens.

        They go to another mesh if rounds of so few are so much faster there that the move is earned
        back until the longest is as long as episodes are expected to become. The next rollout
        begins where this one began.
        """
        world = self._world
        if load is None or world.config.selector.order == "listed" or world.processes.count > 1:
            return seat
        decision = self._chooser.choose_tail(
            seat,
            live,
            longest,
            load,
            self.in_training,
            self.offload,
            lambda mesh: (mesh, seat.places, seat.pool) in self._played,
        )
        if decision is None or not decision.switched:
            return seat
        self._note(decision)
        moved = self._unless_short("tail", lambda: self.move_seat(seat, decision.mesh))
        return moved or seat

    def move_seat(self, seat: Seat, mesh: MeshShape) -> Seat:
        """The same weights and live episodes on this mesh. `seat` stays as it is."""
        engine = self._world.engine(mesh, seat.engine.config.num_slots)
        self._played.add((mesh, seat.places, seat.pool))
        if engine is seat.engine:
            return seat
        start = time.perf_counter()
        params, state = jax.block_until_ready(
            reshard(
                (seat.policy.params, seat.state),
                (engine.parameter_shardings, engine.state_shardings),
                chunk_bytes=self._chunk_bytes,
            )
        )
        self.log.switch_s += time.perf_counter() - start
        policy = dataclasses.replace(seat.policy, params=params)
        return dataclasses.replace(seat, engine=engine, policy=policy, state=state)

    def _note(self, decision: Decision) -> None:
        self.log.decisions.append(decision)
        self.log.bytes_per_device = max(self.log.bytes_per_device, decision.bytes_per_device)
