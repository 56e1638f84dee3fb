# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a room before steps are chosen there: what would be chosen, and what may be faster."""

import contextlib
from collections.abc import Hashable

import numpy as np

from earl_jax.calibrate import USUAL_S
from earl_jax.chooser import Chooser, StepChoice
from earl_jax.selector.choose import BudgetTooSmall, Option
from earl_jax.selector.guesses import (
    MOST_TRIED,
    beside_fastest,
    rivals,
    tried_ways,
    worth_trying,
)
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.pairs import Pair

# Candidates are compared so often at most, until none is slower than this part of its best speed.
MOST_PASSES, STEADY = 4, 0.93


class Trials:
    """What is measured before it is needed, room by room."""

    def __init__(self, chooser: Chooser) -> None:
        """Of the candidates that this chooser has."""
        self._chooser = chooser
        # Seconds that trying ways took, by length of the rows.
        self._tries_s: dict[int, float] = {}
        # Seconds that it took to measure rivals once more, or more often.
        self._again_s = 0.0

    def measure_ahead(self) -> None:
        """Measures what each configured room would be chosen by, so that no step waits.

        On the way that a run goes through them.
        """
        pair = None
        for places in self._chooser.world.config.rollout.context_buckets:
            pair = self.measure_room(places, self._chooser.ladder.wanted_pages(places, 0), pair)

    def measure_room(self, places: int, pages: int, pair: Pair | None) -> Pair | None:
        """Measures what this room would be chosen by, by someone who comes from `pair`.

        Ways to train are tried beside what would be chosen, and what is nearly as fast as the best
        is measured once more, where that pays. Returns the pair that is then; a room where nothing
        fits is left to who comes to it.
        """
        if self._chooser.calibration.by_order:
            return pair
        with contextlib.suppress(BudgetTooSmall):
            choice = self._chooser.choose_step(places, places, None, pages, pair, 0)
            self._try_fewer_slots(choice, pages)
            self._try_ways(choice, pages)
            while self._confirm(choice, pages):
                # Another way may be the fastest now.
                self._try_ways(choice, pages)
            return self._chooser.choose_step(places, places, None, pages, pair, 0).decision.pair
        return pair

    def _try_fewer_slots(self, choice: StepChoice, pages: int) -> None:
        """Measures half as many slots on the mesh that would be chosen, if steps pay for that.

        Of few long episodes most slots see nothing (`selector.waves`): what a step's are like is
        known later, when nothing should wait.
        """
        chooser, rung = self._chooser, choice.rollout
        if not chooser.calibration.measures_all:
            return
        offers = chooser.offers(choice.work, pages)
        wanted = choice.decision.rollout.mesh, rung.num_slots // 2, rung.page_size, True
        for option, can in zip(
            offers.rollouts, offers.room(chooser.settings).possible_R, strict=True
        ):
            way = option.rung
            assert isinstance(way, RolloutRung)
            if can and (option.mesh, way.num_slots, way.page_size, option.is_guess) == wanted:
                if self._is_worth(USUAL_S, choice):
                    chooser.ask([("rollout", option, choice.work.rollout_places)], set())
                return

    def _try_ways(self, choice: StepChoice, pages: int) -> None:
        """Measures ways to train that are beside the fastest, uphill, until none is faster.

        As long as the run's steps pay for it and for what was tried at other rooms, now or in an
        earlier run: one that knows them tries no others.
        """
        chooser = self._chooser
        world, calibration = chooser.world, chooser.calibration
        if not calibration.measures_all:
            return
        length, asked = choice.work.train_places, set[Hashable]()

        def try_s(option: Option) -> float:
            assert isinstance(option.rung, TrainRung)
            return calibration.try_s(option.mesh, length, option.rung)

        while True:
            offers = chooser.offers(choice.work, pages)
            tried = tried_ways(offers.trains, world.first_train_rung)
            self._tries_s[length] = sum(map(try_s, tried))
            failed = [o.is_guess and ("train", o.mesh, o.rung) in asked for o in offers.trains]
            possible = offers.room(chooser.settings).possible_T & ~np.array(failed)
            number = beside_fastest(offers.trains, possible)
            if number is None or len(tried) >= MOST_TRIED:
                return
            wanted = offers.trains[number]
            if not self._is_worth(try_s(wanted), choice):
                return
            chooser.ask([("train", wanted, length)], asked)

    def _confirm(self, choice: StepChoice, pages: int) -> bool:
        """Measures what may be the fastest of a stage once more, side by side; whether any was.

        Again where the machine was slower meanwhile than it had been, which is no candidate's
        fault. As far as the steps pay for that too.
        """
        calibration, was_slower, number = self._chooser.calibration, False, 0
        while number < MOST_PASSES and not calibration.is_apart:
            near = self._rivals(choice, pages)
            known = [calibration.known_of(*one)[1] for one in near]
            is_new = any(found and found.times == 1 for found in known)
            took_s = sum(found.took_s or USUAL_S for found in known if found)
            if not (is_new or was_slower) or not self._is_worth(took_s, choice):
                break
            parts = [calibration.confirm(*one) for one in near]
            was_slower = min(parts, default=1.0) < STEADY
            self._again_s += took_s
            number += 1
        return number > 0

    def _rivals(self, choice: StepChoice, pages: int) -> list[tuple[str, Option, int]]:
        """What may be the fastest of its stage, and for which room; each candidate once."""
        chooser, work = self._chooser, choice.work
        offers = chooser.offers(work, pages)
        room = offers.room(chooser.settings)
        found: dict[str, tuple[str, Option, int]] = {}
        for stage, options, possible, places in (
            ("rollout", offers.rollouts, room.possible_R, work.rollout_places),
            ("train", offers.trains, room.possible_T, work.train_places),
        ):
            for number in rivals(options, possible):
                one = (stage, options[number], places)
                found.setdefault(chooser.calibration.known_of(*one)[0], one)
        return list(found.values())

    def _is_worth(self, more_s: float, choice: StepChoice) -> bool:
        """Whether the run's steps pay for so many seconds beside those that trying took so far."""
        config, step_s = self._chooser.world.config, choice.decision.predicted_s or 0.0
        if config.selector.measure != "auto":
            return True
        so_far_s = sum(self._tries_s.values()) + self._again_s
        return worth_trying(so_far_s + more_s, step_s, config.num_steps)
