# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the selector chooses from: the candidates' bytes and speeds, each measured once and kept.

What runs out of memory while it is measured has failed, as it would in the run. What need not be
measured is guessed, by a roofline that what was measured corrects (`selector.guesses`).
"""

import dataclasses
from collections.abc import Container, Sequence

import numpy as np

from earl_jax.estimates import (
    Estimate,
    has_data_sheet,
    rollout_estimate,
    rollout_speed,
    rollout_speed_alone,
    train_estimate,
    train_speed,
)
from earl_jax.measuring import pool_bytes
from earl_jax.questions import Questions
from earl_jax.remembered import Question
from earl_jax.selector.choose import Option
from earl_jax.selector.guesses import Candidate, busy_slots, busy_tokens_per_s, fill_in
from earl_jax.selector.ladder import (
    RolloutRung,
    TrainRung,
    failure_of,
    train_words,
)
from earl_jax.selector.memory import resident_bytes as resident_bytes_of
from earl_jax.selector.tail import TailOption
from earl_jax.selector.throughput import Measurement
from earl_jax.selector.waves import times_as_long
from earl_jax.sharding.layout import MeshShape

Rung = RolloutRung | TrainRung

# What it takes to measure a candidate where nobody has written it down: most of it is a compiler's
# (a tiny model on one core).
USUAL_S = 5.0


class Calibration(Questions):
    """The options of both stages in one world: measured, or guessed from what was measured."""

    def measure_all(self) -> None:
        """Measures what is missing for the configured rooms per episode, so that no step waits.

        Of meshes that are many, on chips with a data sheet, only those that are chosen from by
        speed (`Trials.measure_ahead`).
        """
        if self.measures_all:
            for places in self._world.config.rollout.context_buckets:
                self.train_options(places)
                for page_size in self._world.page_sizes:
                    self.rollout_options(places, 0, page_size=page_size)

    @property
    def measures_all(self) -> bool:
        """Whether every mesh is timed that may fit, as the config says to use it."""
        setting = self._world.config.selector.measure
        return setting == "all" or setting == "auto" and not has_data_sheet(self._world)

    @property
    def measures_later(self) -> bool:
        """Whether rooms are measured when the run comes near to them: the first one at the start.

        Several processes measure all configured rooms before the first step: none of them compiles
        in the background, and a lack of memory beside the run's own arrays would end the run. Where
        meshes go by the order of their lists, the bytes of all rooms are asked for at the start.
        """
        return not self.by_order and not self._several

    def is_timed(self, mesh: MeshShape, places: int, rung: Rung) -> bool:
        """Whether this candidate was timed, in this run or an earlier one."""
        if isinstance(rung, RolloutRung):
            found = self.known(self._rollout_question(mesh, places, rung))
        else:
            found = self.known(self._train_question(mesh, places, rung))
        return found is not None and found.tokens_per_s is not None

    # What is asked for is measured.

    def rollout_options(
        self,
        places: int,
        resident_bytes: int,
        pages: int | None = None,
        num_slots: int | None = None,
        contexts: Sequence[float] = (),
        *,
        offload: bool = False,
        page_size: int = 0,
        compiled: Container[MeshShape] = (),
        asks: bool = True,
    ) -> list[Option]:
        """The rollout candidates at this room per episode, beside `resident_bytes` of others.

        With `pages` in each lane of the KV cache; None: enough for every episode to fill its room.
        `contexts` are lengths that episodes are expected to come to: the speed is then the mean of
        those measured at such rooms; without them it is that of episodes that fill their room.
        Those on the `compiled` meshes have a compiler's bytes however much they take; without
        `asks` the others have computed bytes, and no speed, until something asks for them.
        """
        world = self._world
        slots = num_slots or world.own_rollout.num_slots
        pages = pages or world.device_pages(places, slots, page_size)
        rung = RolloutRung(slots, pages, offload, page_size)
        options = []
        for mesh in self._players(places, rung):
            is_sure = mesh in compiled
            found = self._rollout(
                mesh, places, rung, contexts, asks=asks or is_sure, is_sure=is_sure
            )
            option = found.option
            total = option.bytes_per_device + resident_bytes
            options.append(dataclasses.replace(option, bytes_per_device=total))
        return options

    def train_options(
        self,
        places: int,
        rung: TrainRung | None = None,
        *,
        compiled: Container[MeshShape] = (),
        asks: bool = True,
    ) -> list[Option]:
        """The training candidates for rows of this length; the rest as for rollouts."""
        rung, options = rung or self._world.first_train_rung, []
        for mesh in self._trainers(places, rung):
            is_sure = mesh in compiled
            found = self._train(mesh, places, rung, asks=asks or is_sure, is_sure=is_sure)
            options.append(found.option)
        return options

    # What was not measured is guessed.

    def rollout_guesses(
        self,
        places: int,
        rungs: Sequence[RolloutRung],
        contexts: Sequence[float],
        *,
        asks: bool = True,
    ) -> list[Option]:
        """The rollout candidates on all these rungs, beside nothing: rung by rung, in their order.

        Where the first rung's pages are enough for what is expected, others let so many fewer
        episodes run at once. Without `asks` nothing is measured that is not known.
        """
        slots, wanted = self._world.own_rollout.num_slots, self._tokens(rungs[0])
        found = []
        for rung in rungs:
            first = rung.num_slots == slots and self._measures_now(asks)
            for mesh in self._players(places, rung):
                candidate = self._rollout(mesh, places, rung, contexts, asks=first)
                found.append(self._held_up(candidate, places, rung, wanted))
        return fill_in(found)

    def train_guesses(
        self, places: int, rungs: Sequence[TrainRung], *, asks: bool = True
    ) -> list[Option]:
        """The training candidates on all these rungs, as for rollouts.

        Without `asks` nothing is measured that is not known.
        """
        first = self._world.first_train_rung if self._measures_now(asks) else None
        return fill_in(
            [
                self._train(mesh, places, rung, asks=rung == first)
                for rung in rungs
                for mesh in self._trainers(places, rung)
            ]
        )

    def _measures_now(self, asks: bool) -> bool:
        return asks and self.measures_all and not self.is_urgent

    def measure(self, stage: str, option: Option, places: int) -> None:
        """Measures this guess."""
        self.answer(self._question(stage, option, places))

    def confirm(self, stage: str, option: Option, places: int) -> float:
        """Measures this once more; see `measure_again`."""
        return self.measure_again(self._question(stage, option, places))

    def known_of(self, stage: str, option: Option, places: int) -> tuple[str, Measurement | None]:
        """Under which key this is written down, and what is."""
        question = self._question(stage, option, places)
        return question.entry, self.known(question)

    def _question(self, stage: str, option: Option, places: int) -> Question:
        rung = option.rung
        if stage == "rollout":
            assert isinstance(rung, RolloutRung)
            return self._rollout_question(option.mesh, places, rung)
        assert isinstance(rung, TrainRung)
        return self._train_question(option.mesh, places, rung)

    def try_s(self, mesh: MeshShape, places: int, rung: TrainRung) -> float:
        """How long it took to measure such an update, or may take: as long as the first way."""
        for way in (rung, self._world.first_train_rung):
            known = self.known(self._train_question(mesh, places, way))
            if known and known.took_s:
                return known.took_s
        return USUAL_S

    def tail_options(
        self, places: int, resident_bytes: int, rung: RolloutRung, current: MeshShape
    ) -> list[TailOption]:
        """The rollout candidates for the last episodes of a rollout that is on `current`.

        Those whose rounds were measured; a move takes the weights and all of the KV cache, at the
        rate at which new weights came when it was measured.
        """
        world, found = self._world, []
        for mesh in self._players(places, rung):
            measured = self.known(self._rollout_question(mesh, places, rung))
            alone = measured and measured.alone_tokens_per_s
            if measured is None or not measured.tokens_per_s or not alone:
                continue
            option = self._rollout(mesh, places, rung, (), asks=True).option
            engine = world.engine(mesh, rung.num_slots, rung.page_size)
            weights = resident_bytes_of(engine.parameter_shapes, engine.parameter_shardings)
            moved = weights + pool_bytes(world, mesh, places, rung)
            burst = world.config.rollout.round_tokens
            found.append(
                TailOption(
                    mesh=mesh,
                    full_round_s=rung.num_slots * burst / measured.tokens_per_s,
                    alone_round_s=burst / alone,
                    move_s=measured.switch_s * moved / weights,
                    bytes_per_device=option.bytes_per_device + resident_bytes,
                    impossible=option.impossible,
                )
            )
        known = {option.mesh for option in found}
        return found if current in known else []

    # One candidate.

    def _players(self, places: int, rung: RolloutRung) -> list[MeshShape]:
        size = self._world.page(rung.page_size)
        return [
            mesh for mesh in self._world.rollout_candidates_for(places) if size % mesh.context == 0
        ]

    def _trainers(self, places: int, rung: TrainRung) -> list[MeshShape]:
        return [
            mesh
            for mesh in self._world.train_candidates_for(places)
            if self._world.train_obstacle(mesh, rung.micro_batches) is None
        ]

    def _rollout(
        self,
        mesh: MeshShape,
        places: int,
        rung: RolloutRung,
        contexts: Sequence[float],
        *,
        asks: bool,
        is_sure: bool = False,
    ) -> Candidate:
        """A rollout beside nothing; with `asks` it is measured unless it is known or hopeless.

        With `is_sure` also where it is hopeless.
        """
        question = self._rollout_question(mesh, places, rung)
        estimate = rollout_estimate(self._world, mesh, places, rung)
        measured = self._found(question, estimate, asks=asks, is_sure=is_sure)
        option = Option(
            mesh=mesh,
            bytes_per_device=estimate.total,
            tokens_per_s=None,
            impossible=failure_of(
                self.table.failures, "rollout", mesh, self._rollout_size(places, rung)
            ),
            is_computed=True,
            rung=rung,
            way=self._rollout_words(rung, " and ").replace("=", " "),
        )
        if measured is not None:
            more = self._more_bytes(mesh, places, rung)
            option = dataclasses.replace(
                option,
                bytes_per_device=max(0, measured.program_bytes + more),
                tokens_per_s=self._speed(measured, question, contexts, rung.num_slots),
                move_s=measured.switch_s,
                is_computed=False,
            )
        return Candidate(
            option=option,
            computed_bytes=estimate.total,
            least_bytes=estimate.least,
            computed_tokens_per_s=self._with_tail(
                rollout_speed(self._world, mesh, places, rung),
                rollout_speed_alone(self._world, mesh, places, rung),
                contexts,
                rung.num_slots,
            ),
        )

    def _train(
        self,
        mesh: MeshShape,
        places: int,
        rung: TrainRung,
        *,
        asks: bool,
        is_sure: bool = False,
    ) -> Candidate:
        """An update; `asks` and `is_sure` as for a rollout."""
        question = self._train_question(mesh, places, rung)
        estimate = train_estimate(self._world, mesh, places, rung)
        measured = self._found(question, estimate, asks=asks, is_sure=is_sure)
        option = Option(
            mesh=mesh,
            bytes_per_device=estimate.total if measured is None else measured.program_bytes,
            tokens_per_s=None if measured is None else measured.tokens_per_s,
            move_s=0.0 if measured is None else measured.switch_s,
            impossible=failure_of(self.table.failures, "train", mesh, question.size),
            is_computed=measured is None,
            rung=rung,
            way=train_words(rung, self._world.first_train_rung),
        )
        return Candidate(
            option=option,
            computed_bytes=estimate.total,
            least_bytes=estimate.least,
            computed_tokens_per_s=train_speed(self._world, mesh, places, rung),
        )

    def _found(
        self, question: Question, estimate: Estimate, *, asks: bool, is_sure: bool
    ) -> Measurement | None:
        """What is known of it, or measured now; None where it has to be guessed, or is hopeless."""
        known = self.known(question)
        hopeless = known is None and not is_sure and estimate.surely_exceeds(self.most_bytes)
        return self.answer(question) if asks and not hopeless else known

    def _held_up(
        self, candidate: Candidate, places: int, rung: RolloutRung, wanted: int
    ) -> Candidate:
        """The candidate as fast as it is with episodes that wait for pages.

        `wanted` tokens a lane are enough for all slots.
        """
        world, option = self._world, candidate.option
        slots = rung.num_slots
        busy = busy_slots(self._tokens(rung), wanted, world.own_rollout.num_slots, slots)
        if busy == slots:
            return candidate
        speed, computed = option.tokens_per_s, candidate.computed_tokens_per_s
        if speed:
            measured = self.known(self._rollout_question(option.mesh, places, rung))
            scale = speed / measured.tokens_per_s if measured and measured.tokens_per_s else 1.0
            alone = measured and measured.alone_tokens_per_s
            speed = busy_tokens_per_s(speed, alone * scale if alone else None, slots, busy)
        alone = rollout_speed_alone(world, option.mesh, places, rung)
        return dataclasses.replace(
            candidate,
            option=dataclasses.replace(option, tokens_per_s=speed),
            computed_tokens_per_s=busy_tokens_per_s(computed, alone, slots, busy),
        )

    def _speed(
        self, measured: Measurement, question: Question, contexts: Sequence[float], slots: int
    ) -> float | None:
        """Tokens per second of episodes of these lengths, from the rooms that were measured."""
        speed, table, places = measured.tokens_per_s, self.table, question.places
        if speed is None or not contexts:
            return speed
        seconds = {places: 1.0 / speed}
        for room in {*self._world.config.rollout.context_buckets, places}:
            entry = dataclasses.replace(question, places=room).entry
            found = table.measurements.get(entry)
            if found and found.tokens_per_s and room <= places:
                seconds[room] = 1.0 / found.tokens_per_s
        rooms = sorted(seconds)
        full = 1.0 / float(np.interp(contexts, rooms, [seconds[room] for room in rooms]).mean())
        scale, alone = full / speed, measured.alone_tokens_per_s
        return self._with_tail(full, alone and scale * alone, contexts, slots)

    def _with_tail(
        self, full: float, alone: float | None, contexts: Sequence[float], slots: int
    ) -> float:
        """Tokens per second, from those of full slots and of one: some are empty in the end."""
        if not contexts:
            return full
        alone_share = min(1.0, full / (slots * alone)) if alone else 1.0
        rows = self._world.own_rollout.episodes_per_step
        return full / times_as_long(contexts, rows, slots, alone_share)
