# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which mesh each stage is on: chosen, written down, and what the devices had no memory for."""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from earl_jax.calibrate import Calibration
from earl_jax.chooser import Chooser, StepChoice
from earl_jax.joint import RolloutShort, Shortage, shortage_of
from earl_jax.rollout.pages import Pool
from earl_jax.rollout.seat import Seat
from earl_jax.selector.choose import BudgetTooSmall, Decision, Settings
from earl_jax.selector.ladder import Failure, RolloutRung, TrainRung, rollout_size, train_size
from earl_jax.selector.memory import is_out_of_memory
from earl_jax.selector.step_choice import Pair, StepDecision
from earl_jax.sharding.layout import MeshShape
from earl_jax.survival import Ladder, ShortAlone, Spares, check_budget
from earl_jax.telemetry.load import WINDOW, Load
from earl_jax.trials import Trials
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


class Meshes:
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
        self._trials = Trials(self._chooser)
        self.rollout_mesh: MeshShape | None = None
        self.train_mesh: MeshShape | None = None
        self.places = self.pages = 0
        self.num_slots = world.own_rollout.num_slots
        # Tokens of a page, 0: as the config says.
        self.page_size = 0
        self.train_rung = world.first_train_rung
        # Whether the optimizer's moments are in host memory while episodes are played.
        self.offload = False
        self.calm_steps = 0
        # The largest room, and the longest rows, that a step was chosen for.
        self._most_places = self._most_length = 0
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
        # Rooms that were measured while the run went on.
        self._measured_rooms: set[int] = set()
        # Where the trainer's state was last.
        self._trainer_on: MeshShape | None = None
        self.log = SwitchLog()

    def as_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on choosing alike."""
        return {
            "rollout_mesh": str(self.rollout_mesh),
            "train_mesh": str(self.train_mesh),
            "places": self.places,
            "pages": self.pages,
            "num_slots": self.num_slots,
            "page_size": self.page_size,
            "train_rung": list(self.train_rung),
            "calm_steps": self.calm_steps,
            "most_places": self._most_places,
            "most_length": self._most_length,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """The inverse of `as_dict`. Raises ValueError where something is missing.

        But for what earlier versions did not say: they had pages of the config's size.
        """
        places = saved.get("places", 0)
        saved = {"page_size": 0, "most_places": places, "most_length": places, **saved}
        if absent := self.as_dict().keys() - saved.keys():
            raise ValueError(f"its placement is without {', '.join(sorted(absent))}")
        self.rollout_mesh = MeshShape.parse(saved["rollout_mesh"])
        self.train_mesh = MeshShape.parse(saved["train_mesh"])
        self.places, self.pages = saved["places"], saved["pages"]
        self.num_slots, self.page_size = saved["num_slots"], saved["page_size"]
        self.calm_steps = saved["calm_steps"]
        self._most_places, self._most_length = saved["most_places"], saved["most_length"]
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
    def rollout_rung(self) -> RolloutRung:
        """On which rung the rollout is."""
        return RolloutRung(self.num_slots, self.pages, self.offload, self.page_size)

    @property
    def rung(self) -> str:
        """What a run does otherwise than its config says, because memory is short; "" for no."""
        return self._ladder.words(self.rollout_rung, self.train_rung)

    def take_log(self) -> SwitchLog:
        """What was decided since the last call."""
        log, self.log = self.log, SwitchLog()
        return log

    def prepare(self, tokens: int) -> None:
        """What is done before the first step: rooms that nothing fits are refused.

        And the room of the first step, whose episodes have `tokens` tokens, is measured; where
        others are not measured later (`Calibration.measures_later`), all that are configured are.

        Raises:
            BudgetTooSmall: some room that is configured fits no mesh on any rung.
        """
        if self.calibration.measures_later:
            self.check_budget()
            room = self._world.config.rollout.places_for(tokens)
            self._trials.measure_room(room, self._ladder.wanted_pages(room, 0), None)
            return
        self.calibration.measure_all()
        self.check_budget()
        self.measure_ahead()

    def measure_ahead(self) -> None:
        """Measures what each configured room would be chosen by."""
        self._trials.measure_ahead()

    def check_budget(self) -> None:
        """Raises BudgetTooSmall where some room that is configured fits no mesh on any rung."""
        later = self.calibration.measures_later
        with self.calibration.apart() if later else contextlib.nullcontext():
            check_budget(self._ladder, self.calibration, self._chooser.settings.budget_bytes)

    def measure_room(self, room: int) -> None:
        """Measures what this room would be chosen by, coming from the meshes in use; once."""
        if room in self._measured_rooms or not self.calibration.measures_later:
            return
        self._measured_rooms.add(room)
        pages = self._wanted_pages(room, None)
        self._trials.measure_room(room, pages, Pair(self.in_rollout, self.in_training))

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
        pages = self._wanted_pages(places, load)
        known = self.rollout_mesh is not None and self.train_mesh is not None
        pair = Pair(self.in_rollout, self.in_training) if known else None
        # What was never come to is chosen for at once: that this pair was new where there was less
        # room, or rows were shorter, says nothing of it.
        is_new = places > self._most_places or length > self._most_length
        calm = max(WINDOW, self.calm_steps) if is_new else self.calm_steps
        choice = self._chooser.choose_step(places, length, load, pages, pair, calm)
        self._most_places = max(self._most_places, places)
        self._most_length = max(self._most_length, length)
        decision = choice.decision
        switched = decision.rollout.switched or decision.train.switched
        self.calm_steps = 0 if switched else self.calm_steps + 1
        self.rollout_mesh, self.train_mesh = decision.pair
        self.places, self._length, self._expected = places, length, choice
        self.num_slots, self.pages, self.offload, self.page_size = choice.rollout
        self.train_rung = choice.train
        self._note(decision.rollout)
        self._note(decision.train)
        self.log.comparison = decision.reason
        return decision

    def _wanted_pages(self, places: int, load: Load | None) -> int:
        """Pages of the config's size that a lane should have."""
        tokens, page = self.pages * self._world.page(self.page_size), self._world.page()
        return self._ladder.wanted_pages(places, -(-tokens // page), load)

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

        The one in use stays unless it must be left, or rows were never so long and another is
        faster: a step's meshes are chosen together. By recent steps and not by the batch at hand:
        where the longest episode comes and goes, the mesh must not.
        """
        rollout = self._world.config.rollout
        return self._choose_training(
            rollout.places_for(load.context_tokens_max if load else 1), load
        )

    def choose_training_again(self) -> Decision:
        """Another mesh or rung for rows of the same length, behind a failure."""
        return self._choose_training(self._length, None)

    def _choose_training(self, length: int, load: Load | None) -> Decision:
        is_new = length > self._most_length
        decision, rung = self._chooser.choose_training(length, load, self.train_mesh, is_new=is_new)
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
        pages = self._wanted_pages(places, None)
        rungs = self._ladder.rungs_as(self.rollout_rung, places, pages)
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
        self.places, self.num_slots, self.pages = places, rung.num_slots, rung.pages
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
            page = self._world.page(self.page_size)
            size = rollout_size(self.places, self.rollout_rung, page)
            self._outgrown = self.places
        else:
            mesh, size = self.in_training, train_size(length, rows, self.train_rung)
        failure = Failure(stage=stage, mesh=str(mesh), size=size)
        self.calibration.note_failure(failure)
        self.log.failures.append(f"{stage} on {mesh} {failure}")

    def _note(self, decision: Decision) -> None:
        self.log.decisions.append(decision)
        self.log.bytes_per_device = max(self.log.bytes_per_device, decision.bytes_per_device)
