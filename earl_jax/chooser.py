# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the selector: what it chooses from, in this world.

Nothing is remembered here but what is measured; placement.py knows where the stages are.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from earl_jax.calibrate import Calibration
from earl_jax.rollout.seat import Seat
from earl_jax.selector.choose import (
    BudgetTooSmall,
    Decision,
    Option,
    Settings,
    choose,
    obstacle,
)
from earl_jax.selector.guesses import worth_measuring
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.pairs import Offers, Pair, Work
from earl_jax.selector.step_choice import StepDecision, choose_step
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
        rollout = self.world.config.rollout
        work = Work(
            load=load,
            rollout_places=places,
            train_places=length,
            rollout_tokens=self._rollout_tokens(load),
            train_tokens=rollout.episodes_per_step * length * self.world.config.train.epochs,
        )
        if self.calibration.by_order:
            return self._first_pair(work, pages, pair, calm)
        return self._fastest_pair(work, pages, pair, calm)

    def _fastest_pair(self, work: Work, pages: int, pair: Pair | None, calm: int) -> StepChoice:
        """Of all meshes on all rungs, guesses measured until what is chosen is none."""
        asked: set[Hashable] = set()
        while True:
            offers = self.offers(work, pages)
            decision = choose_step(
                offers.rollouts,
                offers.trains,
                resident_bytes=offers.resident_bytes,
                kept=offers.kept,
                current=pair,
                calm_steps=calm,
                work=work,
                settings=self.settings,
            )
            room = offers.room(self.settings)
            doubtful = [
                *self._doubtful("rollout", offers.rollouts, room.possible_R, decision.rollout),
                *self._doubtful("train", offers.trains, room.possible_T, decision.train),
            ]
            if not self.ask(doubtful, asked):
                break
        rollout, train = decision.rollout.rung, decision.train.rung
        assert isinstance(rollout, RolloutRung) and isinstance(train, TrainRung)
        return StepChoice(decision=decision, rollout=rollout, train=train, work=work)

    def offers(self, work: Work, pages: int) -> Offers:
        """All meshes in all ways, as far as they are known."""
        ways = self._tried(self.ladder.rollout_ways(work.rollout_places, pages))
        train_ways = self._ways_to_train(work.train_places)
        trains = self.calibration.train_guesses(work.train_places, train_ways)
        return Offers(
            rollouts=self.calibration.rollout_guesses(
                work.rollout_places, ways, _contexts(work.load)
            ),
            trains=trains,
            resident_bytes=[self.ladder.trainer_bytes(option.mesh) for option in trains],
            kept=[self.ladder.kept(option.mesh) for option in trains],
        )

    def _ways_to_train(self, length: int) -> list[TrainRung]:
        return self._tried(self.ladder.train_ways(length))

    def _tried(self, ways: list[Rung]) -> list[Rung]:
        """Where ways are tried (trials.py) all; else all that memory may ask for."""
        return ways if self.calibration.measures_all else self._if_short(ways)

    def _if_short(self, ways: list[Rung]) -> list[Rung]:
        """All ways where memory has a limit; where none is known the first, which is the fastest.

        But for other page sizes, which are read at another speed.
        """
        if self.settings.budget_bytes is not None or self.calibration.table.failures:
            return ways
        first = ways[0]
        return [w for w in ways if w == first or _only_pages_differ(w, first)]

    def _doubtful(
        self, stage: str, options: Sequence[Option], possible: Any, chosen: Decision
    ) -> list[tuple[str, Option, int]]:
        """Options of a stage that should be measured before this is chosen, and for which room.

        `possible` has a bool for each option.
        """
        number = next(
            n
            for n, option in enumerate(options)
            if (option.mesh, option.rung) == (chosen.mesh, chosen.rung)
        )
        if self.calibration.is_urgent:
            found = [number] if options[number].is_guess else []
        else:
            doubts_all = not self.calibration.measures_all
            found = worth_measuring(options, possible, number, doubts_all=doubts_all)
        return [(stage, options[n], chosen.places) for n in found]

    def ask(self, doubtful: Sequence[tuple[str, Option, int]], asked: set[Hashable]) -> bool:
        """Measures what was not asked for before; whether there was any."""
        new = [one for one in doubtful if (one[0], one[1].mesh, one[1].rung) not in asked]
        for stage, option, places in new:
            asked.add((stage, option.mesh, option.rung))
            self.calibration.measure(stage, option, places)
        return bool(new)

    def _first_pair(self, work: Work, pages: int, pair: Pair | None, calm: int) -> StepChoice:
        """The first that fits, on the first rung where any does: nothing is measured."""
        down = self.ladder.rollout_rungs(work.rollout_places, [pages])
        train_down = self.ladder.train_rungs(work.train_places)
        while True:
            rung = down[0]
            options = self.calibration.rollout_options(
                work.rollout_places, 0, rung.pages, rung.num_slots, offload=rung.offload
            )
            trains = self.calibration.train_options(work.train_places, train_down[0])
            try:
                decision = choose_step(
                    options,
                    trains,
                    resident_bytes=[self.ladder.trainer_bytes(option.mesh) for option in trains],
                    kept=[self.ladder.kept(option.mesh) for option in trains],
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
        self, length: int, load: Load | None, current: MeshShape | None, *, is_new: bool = False
    ) -> tuple[Decision, TrainRung]:
        """A mesh for rows of this length, if `current` must be left. Raises BudgetTooSmall.

        Where `is_new` says that rows were never so long, it is left for a faster one too: other
        programs are needed anyway.
        """
        if self.calibration.by_order:
            return _first_that_fits(
                self.ladder.train_rungs(length),
                lambda rung: self._trainer_of(
                    self.calibration.train_options(length, rung), length, load, current, is_new
                ),
            )
        ways, asked = self._ways_to_train(length), set[Hashable]()
        while True:
            options = self.calibration.train_guesses(length, ways)
            decision = self._trainer_of(options, length, load, current, is_new)
            possible = [not obstacle(option, self.settings) for option in options]
            if not self.ask(self._doubtful("train", options, possible, decision), asked):
                break
        assert isinstance(decision.rung, TrainRung)
        return decision, decision.rung

    def guess_training(
        self, length: int, current: MeshShape | None, *, is_new: bool
    ) -> tuple[MeshShape, TrainRung] | None:
        """What would be chosen for such rows by what is known now; nothing is compiled or measured.

        None where nothing would fit, and where meshes are taken in the order of their list.
        """
        if self.calibration.by_order:
            return None
        ways = self._ways_to_train(length)
        options = self.calibration.train_guesses(length, ways, asks=False)
        try:
            decision = self._trainer_of(options, length, None, current, is_new)
        except BudgetTooSmall:
            return None
        assert isinstance(decision.rung, TrainRung)
        return decision.mesh, decision.rung

    def _trainer_of(
        self,
        options: Sequence[Option],
        length: int,
        load: Load | None,
        current: MeshShape | None,
        is_new: bool,
    ) -> Decision:
        """One of these options for rows of this length. Raises BudgetTooSmall."""
        return choose(
            "train",
            options,
            current=current,
            places=length,
            load=load,
            step_tokens=self.world.config.rollout.episodes_per_step * length,
            switch_s=max(option.move_s for option in options) if is_new else math.inf,
            settings=self.settings,
        )

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
            asked: set[Hashable] = set()
            while True:
                options = self._rollouts_on(rung, places, trainer, contexts)
                decision = self._player_of(options, places, load, current)
                possible = [not obstacle(option, self.settings) for option in options]
                if not self.ask(self._doubtful("rollout", options, possible, decision), asked):
                    return decision

        return _first_that_fits(rungs, on)

    def guess_rollout(
        self, places: int, rungs: Sequence[RolloutRung], current: MeshShape, trainer: MeshShape
    ) -> tuple[MeshShape, RolloutRung]:
        """What `choose_rollout` would choose by what is known now: nothing is measured.

        Where meshes are taken in the order of their list, bytes are asked for. Raises
        BudgetTooSmall where nothing would fit.
        """
        if self.calibration.by_order:
            decision, rung = self.choose_rollout(places, rungs, None, current, trainer)
            return decision.mesh, rung

        def on(rung: RolloutRung) -> Decision:
            options = self._rollouts_on(rung, places, trainer, (), asks=False)
            return self._player_of(options, places, None, current)

        decision, rung = _first_that_fits(rungs, on)
        return decision.mesh, rung

    def _player_of(
        self,
        options: Sequence[Option],
        places: int,
        load: Load | None,
        current: MeshShape | None,
    ) -> Decision:
        """One of these options for this room, if `current` must be left. Raises BudgetTooSmall."""
        return choose(
            "rollout",
            options,
            current=current,
            places=places,
            load=load,
            step_tokens=self._rollout_tokens(load),
            switch_s=math.inf,
            settings=self.settings,
        )

    def _rollouts_on(
        self,
        rung: RolloutRung,
        places: int,
        trainer: MeshShape,
        contexts: Sequence[float],
        *,
        asks: bool = True,
    ) -> list[Option]:
        """The candidates on one rung, beside this trainer; without `asks` nothing is measured."""
        resident = self.ladder.trainer_bytes(trainer, rung.offload)
        if self.calibration.by_order:
            slots, pages, offload, page_size = rung
            return self.calibration.rollout_options(
                places, resident, pages, slots, contexts, offload=offload, page_size=page_size
            )
        found = self.calibration.rollout_guesses(places, [rung], contexts, asks=asks)
        return [
            dataclasses.replace(option, bytes_per_device=option.bytes_per_device + resident)
            for option in found
        ]

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
        page = seat.engine.config.page_size
        page_size = 0 if page == self.world.page() else page
        rung = RolloutRung(
            slots, -(-seat.pool.total // len(self.world.processes.own_devices)), offload, page_size
        )
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


def _only_pages_differ(way: Any, first: Any) -> bool:
    sizes = {rung.page_size for rung in (way, first) if isinstance(rung, RolloutRung)}
    return len(sizes) > 1 and way.num_slots == first.num_slots and way.offload == first.offload


def _first_that_fits(
    rungs: Sequence[Rung], on: Callable[[Rung], Decision]
) -> tuple[Decision, Rung]:
    for rung in rungs[:-1]:
        try:
            return on(rung), rung
        except BudgetTooSmall:
            continue
    return on(rungs[-1]), rungs[-1]
