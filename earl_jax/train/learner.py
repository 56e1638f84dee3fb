# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The learner: the programs of one policy's training, made for a plan when it is first used."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import Networks, networks_of, scored_passes
from earl_jax.models.checkpoints.hf_read import Checkpoint, load_parameters
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import Params
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import Layout, MeshShape
from earl_jax.sharding.placing import absent_tree, placed_shapes
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import (
    critic_learning_rate,
    entropy_coefficient,
    learning_rate,
)
from earl_jax.train.saved_state import spread_over
from earl_jax.train.scoring import make_estimator, make_scorer
from earl_jax.train.state import (
    TrainState,
    init_state,
    policy_parameters,
    state_of,
    state_shapes,
    state_shardings,
    trained_specs,
)
from earl_jax.train.step import (
    PartSteps,
    batch_shapes,
    make_loss_sums,
    make_part_steps,
    make_stream_step,
    make_train_step,
    totals_shardings,
)
from earl_jax.train.update import Totals, Update
from earl_jax.trajectory import TrajectoryBatch


class Learner:
    """Updates a TrainState by an algorithm. Holds programs, no state."""

    def __init__(
        self,
        model: ModelConfig,
        config: TrainConfig,
        algorithm: Algorithm,
        *,
        vocab_size: int,
        temperature: float,
        importance_cap: float,
        layout: Callable[[MeshShape], Layout],
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        trains: bool = True,
        has_versions: bool = False,
        networks: Networks | None = None,
        choice_width: int = 0,
    ) -> None:
        """`layout` returns the trainer's layout of a mesh; see `make_train_step` for the others.

        Training begins with the weights of `checkpoint`, or without one with those of `seed`. A
        process that never `trains` has no part of any state. Updates that have versions
        (`has_versions`) are given that of the weights that the step begins with. `networks` None
        are those that the algorithm needs; a teacher among them begins with zeros. Batches have
        `choice_width` arrays of `TrajectoryBatch.allowed`.

        Raises:
            ValueError: adapters that this model cannot have.
        """
        self.model, self.config, self.algorithm = model, config, algorithm
        self.vocab_size, self.temperature = vocab_size, temperature
        self.importance_cap, self.layout = importance_cap, layout
        self.seed, self.checkpoint, self.trains = seed, checkpoint, trains
        # Now, because it raises.
        trained_specs(model, config, vocab_size)
        needed = networks_of(algorithm, has_base=config.lora.rank > 0)
        self.networks = needed if networks is None else networks
        self.has_versions, self.choice_width = has_versions, choice_width
        assert has_versions or config.proximal == "recompute", "the config was not validated"
        self.scored = scored_passes(
            algorithm,
            updates=config.epochs * config.mini_batches,
            corrects=importance_cap > 0,
            recomputes=config.proximal == "recompute",
        )

    def state_shapes(self) -> TrainState:
        """Returns a TrainState as shapes."""
        return state_shapes(self.model, self.config, self.vocab_size, self.networks)

    @functools.cache  # noqa: B019 - a Learner lives as long as the run
    def state_shardings(self, mesh: MeshShape) -> TrainState:
        """Returns the shardings of a TrainState on this mesh."""
        return self._shardings(self.layout(mesh))

    def _shardings(self, layout: Layout) -> TrainState:
        return state_shardings(self.model, self.config, self.vocab_size, layout, self.networks)

    def init_state(self, mesh: MeshShape) -> TrainState:
        """Returns a state with random weights; the same values on every mesh."""
        if not self.trains:
            return absent_tree(self.state_shapes(), self.state_shardings(mesh))
        sizes = (self.model, self.config, self.vocab_size)
        return init_state(*sizes, self.layout(mesh), self.seed, self.networks)

    def first_state(self, mesh: MeshShape) -> TrainState:
        """Returns the state that a run begins with: of the checkpoint's weights, if there is one.

        The same bits at every call: they come from the same files, or the same seed.
        """
        if self.checkpoint is None or not self.trains:
            return self.init_state(mesh)
        return self.state_of(self._read_parameters(self.checkpoint, mesh), mesh)

    def _read_parameters(self, checkpoint: Checkpoint, mesh: MeshShape) -> Params:
        dtype = self.model.compute_dtype if self.config.lora.rank else "float32"
        return load_parameters(checkpoint, self.layout(mesh), dtype)

    def state_of(self, params: Params, mesh: MeshShape) -> TrainState:
        """Returns the state of these parameters before the first update (`train.state.state_of`).

        They are on this mesh; of adapters they are the base.
        """
        if not self.trains:
            return absent_tree(self.state_shapes(), self.state_shardings(mesh))
        sizes = (self.model, self.config, self.vocab_size)
        return state_of(params, *sizes, self.layout(mesh), self.seed, self.networks)

    def with_policy_as_reference(self, state: TrainState, mesh: MeshShape) -> TrainState:
        """Returns the state with a copy of its policy for its reference, which it gives up.

        The same state where it has no reference; adapters have their base instead.
        """
        if state.reference is None or not self.trains:
            return state
        reference = self.reference_copy(mesh)(state.params, state.reference)
        return dataclasses.replace(state, reference=reference)

    @functools.cache  # noqa: B019
    def reference_copy(self, mesh: MeshShape) -> Any:
        """Returns the jitted copy of a policy in the type of its reference, given both."""
        return jax.jit(
            lambda params, reference: jax.tree.map(
                lambda leaf, old: jnp.copy(leaf.astype(old.dtype)), params, reference
            ),
            out_shardings=self.state_shardings(mesh).reference,
            donate_argnums=1,
            keep_unused=True,
        )

    def frozen_base(self, mesh: MeshShape) -> Params:
        """Returns the base of the adapters as the run began with it; None without adapters."""
        if self.config.lora.rank == 0:
            return None
        if not self.trains:
            return self.first_state(mesh).base
        if self.checkpoint is not None:
            return self._read_parameters(self.checkpoint, mesh)
        # Beside a restored state there may be no memory for a second critic or teacher.
        sizes = (self.model, self.config, self.vocab_size)
        return init_state(*sizes, self.layout(mesh), self.seed).base

    def policy(self, state: TrainState) -> Params:
        """Returns the parameters that the decoder computes with, for engines and exports."""
        return policy_parameters(self.config, state.params, state.base)

    def spread_over(
        self, devices: Sequence[Any], is_possible: Callable[[MeshShape], bool]
    ) -> TrainState:
        """Returns shardings of a TrainState cut over these devices, for files (`spread_over`)."""
        return spread_over(devices, self._shardings, is_possible)

    def _config_of(self, plan: TrainPlan) -> TrainConfig:
        # Programs take states without `sft_optimizer`: they are the same behind a warm start.
        plan_says = {"micro_batches": plan.micro_batches, "remat": plan.remat}
        return dataclasses.replace(self.config, **plan_says, sft_steps=0)

    @functools.cache  # noqa: B019
    def program(self, plan: TrainPlan, *, sft: bool = False) -> Any:
        """Returns the jitted update of a plan: by the algorithm, or on supervised batches."""
        return make_train_step(self._update(plan, sft=sft))

    @functools.cache  # noqa: B019
    def part_steps(self, plan: TrainPlan) -> PartSteps:
        """Returns the jitted functions of an update by the algorithm whose batch comes in parts."""
        return make_part_steps(self._update(plan))

    def _update(self, plan: TrainPlan, *, sft: bool = False) -> Update:
        config = self._config_of(plan)
        # Nobody sampled the examples, so that there is no ratio.
        config = dataclasses.replace(config, ess_scaling="none") if sft else config
        return Update(
            self.model,
            config,
            self.layout(plan.mesh),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            algorithm=ALGORITHMS["sft"] if sft else self.algorithm,
            importance_cap=0.0 if sft else self.importance_cap,
            networks=Networks() if sft else self.networks,
            has_versions=self.has_versions and not sft,
        )

    @functools.cache  # noqa: B019
    def stream_step(self, plan: TrainPlan) -> Any:
        """Returns the jitted function that adds a supervised batch to the totals of an update."""
        supervised = self._update(plan, sft=True)
        return make_stream_step(self._update(plan), supervised, self.config.sft_weight)

    @functools.cache  # noqa: B019
    def loss_sums(self, plan: TrainPlan) -> Any:
        """Returns the jitted sums of the losses of a supervised batch, see `make_loss_sums`."""
        return make_loss_sums(self._update(plan, sft=True))

    @functools.cache  # noqa: B019
    def scorer(self, plan: TrainPlan, scored: tuple[str, ...]) -> Any:
        """Returns the jitted scoring of a batch for the fields that `scored` names."""
        return make_scorer(
            self.model,
            self._config_of(plan),
            self.layout(plan.mesh),
            temperature=self.temperature,
            scored=scored,
            teacher=self.networks.teacher and self.networks.teacher[0],
        )

    @functools.cache  # noqa: B019
    def estimator(self, mesh: MeshShape) -> Any:
        """Returns the jitted estimates of advantages of a step's parts on this mesh."""
        return make_estimator(self.algorithm, self.layout(mesh))

    def batch_shapes(self, plan: TrainPlan, rows: int, length: int) -> TrajectoryBatch:
        """Returns an update's batch of `rows` rows of `length` tokens as placed shapes."""
        layout, width = self.layout(plan.mesh), self.choice_width
        return batch_shapes(rows, length, layout, scored=self.scored, choice_width=width)

    def lower(self, plan: TrainPlan, rows: int, length: int) -> Any:
        """Lowers the update of `rows` rows of `length` tokens, from shapes alone.

        With a supervised stream that is the fullest of the update's programs: the one that adds the
        stream to the totals.
        """
        state = jax.tree.map(
            lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
            self.state_shapes().without_sft(),
            self.state_shardings(plan.mesh).without_sft(),
        )
        batch = self.batch_shapes(plan, rows, length)
        # Nothing is computed here: the default device may be of a chip that is only compiled for.
        controls = jax.ShapeDtypeStruct((self.num_controls,), np.float32)
        if self.config.sft_weight:
            totals = jax.eval_shape(self.part_steps(plan).accumulate, state, batch, controls, None)
            totals = jax.tree.map(
                lambda where, part: placed_shapes(part, jax.tree.map(lambda _: where, part)),
                totals_shardings(self._update(plan)),
                totals,
            )
            batch = batch_shapes(rows, length, self.layout(plan.mesh))
            controls = jax.ShapeDtypeStruct((2,), np.float32)
            return self.stream_step(plan).lower(state, batch, controls, totals)
        return self.program(plan).lower(state, batch, controls)

    @property
    def num_controls(self) -> int:
        """The length of `controls`."""
        return 2 + bool(self.networks.critic) + self.has_versions

    def controls(self, step: int, num_steps: int) -> np.ndarray:
        """Returns f32[2] for RL step `step` of `num_steps`: learning rate, entropy coefficient.

        With a critic one more, its learning rate; with versions one more, which is the step's.
        """
        config = self.config
        values = [learning_rate(config, step, num_steps)]
        values.append(entropy_coefficient(config, step, num_steps))
        if self.networks.critic:
            values[0] *= step >= config.critic.pretrain_steps
            values.append(critic_learning_rate(config, step))
        if self.has_versions:
            values.append(step)
        return np.array(values, np.float32)

    def sft_controls(self) -> np.ndarray:
        """Returns f32[2] for supervised updates."""
        return np.array([self.config.sft_learning_rate, 0.0], np.float32)

    def score(
        self, plans: Sequence[TrainPlan], state: TrainState, parts: Sequence[TrajectoryBatch]
    ) -> list[TrajectoryBatch]:
        """Returns a step's parts with the fields that updates need and only this state gives.

        `plans` are those of the parts, all on one mesh. Advantages that are made on the devices are
        made of all parts together.
        """
        if not self.scored:
            return list(parts)
        state = state.without_sft()
        each = zip(plans, parts, strict=True)
        scored = tuple(self.scorer(plan, self.scored)(state, part) for plan, part in each)
        if not {"advantages", "returns"} & set(self.scored):
            return list(scored)
        return list(self.estimator(plans[0].mesh)(scored))

    def update(
        self,
        plan: TrainPlan,
        state: TrainState,
        batch: TrajectoryBatch,
        controls: np.ndarray,
        *,
        sft: bool = False,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Makes one update; donates what of `state` it changes, and passes on the rest.

        Metrics are on the devices (see `read_metrics`).
        """
        program = self.program(plan, sft=sft)
        if sft:
            assert state.sft_optimizer is not None, "supervised updates need config.train.sft_steps"
            part, metrics = program(state.for_sft(), batch, controls)
            return state.after_sft(part), metrics
        after, metrics = program(state.without_sft(), batch, controls)
        return dataclasses.replace(after, sft_optimizer=state.sft_optimizer), metrics

    def add_part(
        self,
        plan: TrainPlan,
        state: TrainState,
        part: TrajectoryBatch,
        controls: np.ndarray,
        totals: Totals | None,
    ) -> Totals:
        """Returns the totals with those of a further part of a batch; gives `totals` up."""
        return self.part_steps(plan).accumulate(state.without_sft(), part, controls, totals)

    def add_stream(
        self, plan: TrainPlan, state: TrainState, batch: TrajectoryBatch, totals: Totals
    ) -> Totals:
        """Returns the totals with config.train.sft_weight times the loss of a supervised batch.

        Gives `totals` up, which are those of all parts.
        """
        return self.stream_step(plan)(state.without_sft(), batch, self.sft_controls(), totals)

    def apply(
        self, plan: TrainPlan, state: TrainState, totals: Totals, controls: np.ndarray
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Makes the update of these totals; as `update`."""
        after, metrics = self.part_steps(plan).apply(state.without_sft(), totals, controls)
        return dataclasses.replace(after, sft_optimizer=state.sft_optimizer), metrics
