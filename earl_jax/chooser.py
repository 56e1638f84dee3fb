# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the selector: what it chooses from, in this world, on the first rung where anything fits.

Nothing is remembered here but what is measured; placement.py knows where the stages are.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from earl_jax.calibrate import Calibration
from earl_jax.rollout.seat import Seat
from earl_jax.selector.choose import BudgetTooSmall, Decision, Settings, choose, obstacle
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.step_choice import Pair, StepDecision, Work, choose_step
from earl_jax.selector.tail import choose_tail
from earl_jax.sharding.layout import MeshShape
from earl_jax.survival import Ladder
from earl_jax.telemetry.load import Load
from earl_jax.world import World

Rung = TypeVar("Rung")
# What a program takes that this process has not run yet: it was compiled when it was measured, and
# comes from the user's cache folder (0.05 s for a tiny model on a CPU; larger ones take longer).
LOADING_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepChoice:
    """The meshes of a step, the rungs that they fit on, and what the step is expected to be."""

    decision: StepDecision
    rollout: RolloutRung
    train: TrainRung
    work: Work


@dataclasses.dataclass(frozen=True)
class Chooser:
    """The selector's questions for one world."""

    world: World
    calibration: Calibration
    ladder: Ladder
    settings: Settings

    def choose_step(
        self, places: int, length: int, load: Load | None, pages: int, pair: Pair | None, calm: int
    ) -> StepChoice:
        """Both meshes, for rollouts with `places` of room and rows of `length`.

        `pages` are those of a lane that are wanted; `pair` has been in use for `calm` steps.

        Raises BudgetTooSmall where no rung is left.
        """
        rollout, contexts = self.world.config.rollout, _contexts(load)
        down = self.ladder.rollout_rungs(places, [pages])
        train_down = self.ladder.train_rungs(length)
        work = Work(
            load=load,
            rollout_places=places,
            train_places=length,
            rollout_tokens=self._rollout_tokens(load),
            train_tokens=rollout.episodes_per_step * length * self.world.config.train.epochs,
        )
        while True:
            rung = down[0]
            options = self.calibration.rollout_options(
                places, 0, rung.pages, rung.num_slots, contexts, offload=rung.offload
            )
            trains = self.calibration.train_options(length, train_down[0])
            try:
                decision = choose_step(
                    options,
                    trains,
                    resident_bytes=[
                        self.ladder.trainer_bytes(option.mesh, rung.offload) for option in trains
                    ],
                    current=pair,
                    calm_steps=calm,
                    work=work,
                    settings=self.settings,
                )
                return StepChoice(decision=decision, rollout=rung, train=train_down[0], work=work)
            except BudgetTooSmall:
                stuck = all(obstacle(option, self.settings) for option in trains)
                shorter = train_down if stuck else down
                if len(shorter) == 1:
                    raise
                del shorter[0]

    def choose_training(
        self, length: int, load: Load | None, current: MeshShape | None
    ) -> tuple[Decision, TrainRung]:
        """A mesh for rows of this length, if `current` must be left. Raises BudgetTooSmall."""
        tokens = self.world.config.rollout.episodes_per_step * length

        def on(rung: TrainRung) -> Decision:
            return choose(
                "train",
                self.calibration.train_options(length, rung),
                current=current,
                places=length,
                load=load,
                step_tokens=tokens,
                switch_s=math.inf,
                settings=self.settings,
            )

        return _first_that_fits(self.ladder.train_rungs(length), on)

    def choose_rollout(
        self,
        places: int,
        rungs: Sequence[RolloutRung],
        load: Load | None,
        current: MeshShape | None,
        trainer: MeshShape,
    ) -> tuple[Decision, RolloutRung]:
        """A mesh beside this trainer's, if `current` must be left. Raises BudgetTooSmall."""
        contexts = _contexts(load)

        def on(rung: RolloutRung) -> Decision:
            resident = self.ladder.trainer_bytes(trainer, rung.offload)
            return choose(
                "rollout",
                self.calibration.rollout_options(
                    places, resident, rung.pages, rung.num_slots, contexts, offload=rung.offload
                ),
                current=current,
                places=places,
                load=load,
                step_tokens=self._rollout_tokens(load),
                switch_s=math.inf,
                settings=self.settings,
            )

        return _first_that_fits(rungs, on)

    def choose_tail(
        self,
        seat: Seat,
        live: int,
        longest: int,
        load: Load,
        trainer: MeshShape,
        offload: bool,
        has_played: Callable[[MeshShape], bool],
    ) -> Decision | None:
        """A mesh for the last episodes of a rollout; None where no rounds were measured.

        They go on until the longest is as long as episodes are expected to become.
        """
        current, slots = seat.engine.layout.shape, seat.engine.config.num_slots
        rung = RolloutRung(slots, seat.pool.pages, offload)
        resident = self.ladder.trainer_bytes(trainer, offload)
        options = [
            option
            if has_played(option.mesh)
            else dataclasses.replace(option, move_s=option.move_s + LOADING_S)
            for option in self.calibration.tail_options(seat.places, resident, rung, current)
        ]
        if not options:
            return None
        left = max(0, load.context_tokens_max - longest)
        return choose_tail(
            options,
            current=current,
            places=seat.places,
            live=live,
            num_slots=slots,
            rounds_left=left // self.world.config.rollout.round_tokens,
            settings=self.settings,
        )

    def _rollout_tokens(self, load: Load | None) -> int:
        rollout = self.world.config.rollout
        return load.rollout_tokens if load else rollout.episodes_per_step * rollout.max_turn_tokens


def _contexts(load: Load | None) -> tuple[float, ...]:
    return load.context_tokens_quantiles if load else ()


def _first_that_fits(
    rungs: Sequence[Rung], on: Callable[[Rung], Decision]
) -> tuple[Decision, Rung]:
    for rung in rungs[:-1]:
        try:
            return on(rung), rung
        except BudgetTooSmall:
            continue
    return on(rungs[-1]), rungs[-1]
