# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The training of a step: its updates, each done again with less where memory is short.

A step's batch comes whole, or in parts: their gradients are added up as they come, or each is a
mini-batch with an update of its own (`StepUpdate`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from earl_jax.dispatch.packing import Shape
from earl_jax.envs.examples import Ids
from earl_jax.placement.moves import move_state, note_plans, restore_plans
from earl_jax.placement.packing import (
    move_batch,
    plan_of_shape,
    supervised_parts,
    tightest_plan,
)
from earl_jax.placement.parts import Part
from earl_jax.placement.placement import Placement
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import key_of
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.metrics import Metrics
from earl_jax.train.state import TrainState
from earl_jax.train.step import read_metrics
from earl_jax.train.update import Totals

# Called with arrays under way; does something else until they are there.
Wait = Callable[[Any], None]


@dataclasses.dataclass(kw_only=True)
class StepUpdate:
    """The updates of a step, made of a batch in one or more parts. Host-side state only.

    `controls` are those of `make_train_step`. With an `rng` each part is a mini-batch: an update of
    its own, in an order that is drawn anew for every epoch. `wait` is called while an update is
    under way; None: nothing else is done. `totals` are those of the first update, of the first
    `num_added` parts on the mesh `mesh`. `streams` are supervised batches beside the parts, one for
    each update of an epoch (config.train.sft_weight). `plans` are the trainer's with which it was
    worked on, more than one where memory was short, or another one came into use.

    Where memory is too short, an update is made again on another mesh, with more remat, or in
    smaller parts, whose plan is noted unless rounds are played meanwhile. A program that fails has
    its donated arguments with it: until it has run once there is a backup of the state in host
    memory.
    """

    placement: Placement
    controls: np.ndarray
    sft: bool = False
    rng: np.random.Generator | None = None
    wait: Wait | None = None
    parts: list[Part] = dataclasses.field(default_factory=list)
    streams: list[Part] = dataclasses.field(default_factory=list)
    totals: Totals | None = None
    num_added: int = 0
    mesh: MeshShape | None = None
    plans: set[TrainPlan] = dataclasses.field(default_factory=set)

    def add(self, state: TrainState, part: Part) -> None:
        """Adds a part of the batch, and starts on its gradients; returns while they are computed.

        Parts of longer episodes than the plan in use is for wait for `finish`, and so do those
        after them. So do all where a program could not be compiled for lack of memory.
        """
        placement = self.placement
        if not placement.stages.cluster.trains:
            self.parts.append(part)
            return
        self._move_parts()
        self.parts.append(part)
        if part.length > placement.length or self.num_added < len(self.parts) - 1:
            return
        self.plans.add(placement.train)
        plan, length = self._plan(part), part.length
        if placement.attempt("train", lambda: self._add_up(state), length, plan=plan) is None:
            self.totals, self.num_added = None, 0

    def mix_in(self, examples: Sequence[Ids], length: int) -> None:
        """Adds a stream of supervised episodes, which are dealt out to the updates of an epoch."""
        number = 1 if self.rng is None else len(self.parts)
        self.streams = supervised_parts(self.placement, examples, length, number)

    def finish(self, state: TrainState) -> tuple[TrainState, list[Metrics]]:
        """Makes the updates of the step, `num_updates` in all; gives `state` up.

        Returns:
            The new state, and the metrics of each update: none in a process that does not train.

        Raises:
            BudgetTooSmall: no plan is left.
            StateLost: a program failed that had run before.
        """
        stages, updates = self.placement.stages, list[Metrics]()
        if not stages.cluster.trains:
            return state, []
        for _ in range(self.num_epochs):
            order = [None] if self.rng is None else self.rng.permutation(len(self.parts)).tolist()
            for index in order:
                state, metrics = self._update(state, index)
                updates.append(metrics)
                self.totals, self.num_added = None, 0
        return state, updates

    @property
    def num_epochs(self) -> int:
        """The number of times that each part is learnt from."""
        return 1 if self.sft else self.placement.stages.learner.config.epochs

    @property
    def num_updates(self) -> int:
        """The number of updates that `finish` makes of the parts."""
        return self.num_epochs * (1 if self.rng is None else len(self.parts))

    @property
    def _is_noted(self) -> bool:
        """True if another plan for lack of memory is noted: nothing else is, during an update.

        Of several processes one that is short ends.
        """
        return self.wait is None and self.placement.stages.cluster.count == 1

    def _update(self, state: TrainState, index: int | None) -> tuple[TrainState, Metrics]:
        """Makes the update of a mini-batch, or with `index` None of all parts together."""
        placement = self.placement
        while True:
            self._move_parts()
            self.plans.add(placement.train)
            parts = self.parts if index is None else [self.parts[index]]
            parts = parts + self.streams[index or 0 : (index or 0) + 1]
            shapes = [Shape(*part.batch.tokens.shape) for part in parts]
            largest = max(range(len(shapes)), key=lambda i: shapes[i].positions)
            shape, length = shapes[largest], max(part.length for part in parts)
            plan = self._plan(parts[largest])
            if not self.sft:
                placement.about_to_use(key_of(placement.train, length))
            placement.backup.save((plan, self.sft, shape, len(shapes) > 1), state)
            tightest = tightest_plan(placement.stages, placement.train, shape, length)
            again, before = functools.partial(self._run, plan, state, index), list(self.parts)
            # In a replay of a run that was short of memory here, plans come next.
            if not (self._is_noted and restore_plans(placement)):
                done = placement.attempt("train", again, length, plan=tightest)
                if done is not None:
                    placement.backup.discard()
                    return done
                state = placement.backup.restore(state)
                # The other plan scores them itself, as it does in a replay.
                self.parts = before
                placement.choose_training()
            self.totals, self.num_added = None, 0
            state = move_state(placement, state)
            if self._is_noted:
                note_plans(placement)

    def _move_parts(self) -> None:
        """Moves all parts to the mesh in use, where totals are computed anew."""
        placement = self.placement
        if self.mesh not in (None, placement.train.mesh):
            self.totals, self.num_added = None, 0
            for parts in (self.parts, self.streams):
                for index, part in enumerate(parts):
                    batch = move_batch(placement, part.batch, part.length)
                    parts[index] = dataclasses.replace(part, batch=batch)
        self.mesh = placement.train.mesh

    def _plan(self, part: Part) -> TrainPlan:
        placement, shape = self.placement, Shape(*part.batch.tokens.shape)
        return plan_of_shape(placement.stages, placement.train, shape, part.length)

    def _run(
        self, plan: TrainPlan, state: TrainState, index: int | None
    ) -> tuple[TrainState, Metrics]:
        """Runs the programs of one update and waits for them."""
        stages, controls = self.placement.stages, self.controls
        if index is not None or len(self.parts) == 1:
            # All before the first update, while the state is that of the step's beginning.
            self._score(state, range(len(self.parts)))
        if not self.streams and (index is not None or len(self.parts) == 1):
            batch = self.parts[index or 0].batch
            after, metrics = stages.learner.update(plan, state, batch, controls, sft=self.sft)
        else:
            totals = self._add_up(state) if index is None else self._add(state, index, None)
            if self.streams:
                stream = self.streams[index or 0]
                totals = stages.learner.add_stream(self._plan(stream), state, stream.batch, totals)
            if self.wait is not None:
                self.wait(totals)
            # A failure of theirs must not take the state with it.
            stages.cluster.wait(totals, "training")
            after, metrics = stages.learner.apply(plan, state, totals, controls)
        if self.wait is not None:
            self.wait(metrics)
        # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting raises.
        stages.cluster.wait(metrics, "training")
        return after, read_metrics(metrics)

    def _add_up(self, state: TrainState) -> Totals:
        """Adds the gradients of the parts that are not in the totals yet."""
        for index in range(self.num_added, len(self.parts)):
            self._score(state, [index])
            self.totals = self._add(state, index, self.totals)
            self.num_added += 1
        assert self.totals is not None, "there is a part"
        return self.totals

    def _add(self, state: TrainState, index: int, totals: Totals | None) -> Totals:
        """Returns the totals with those of a part; gives `totals` up."""
        learner, part = self.placement.stages.learner, self.parts[index]
        return learner.add_part(self._plan(part), state, part.batch, self.controls, totals)

    def _score(self, state: TrainState, indices: Sequence[int]) -> None:
        """Gives parts the fields that their updates need and only the first state gives."""
        parts = [self.parts[index] for index in indices]
        if self.sft or all(part.is_scored for part in parts):
            return
        plans = [self._plan(part) for part in parts]
        learner = self.placement.stages.learner
        scored = learner.score(plans, state, [part.batch for part in parts])
        for index, part, batch in zip(indices, parts, scored, strict=True):
            self.parts[index] = dataclasses.replace(part, batch=batch, is_scored=True)


def sft(
    placement: Placement,
    state: TrainState,
    batches: Iterable[Sequence[Ids]],
    length: int,
    *,
    is_last: bool = False,
) -> tuple[TrainState, list[Metrics]]:
    """Makes a supervised update of each batch of examples; `length` as of `supervised_parts`.

    The moments of these updates go behind the step that `is_last` of the warm start.

    Returns:
        As `StepUpdate.finish`.
    """
    stages, updates = placement.stages, []
    controls = stages.learner.sft_controls()
    for examples in batches:
        parts = supervised_parts(placement, examples, length, 1)
        update = StepUpdate(placement=placement, controls=controls, sft=True, parts=parts)
        state, metrics = update.finish(state)
        updates += metrics
    if is_last:
        placement.end_warm_start()
        state = state.without_sft()
    return state, updates
