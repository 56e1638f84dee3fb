# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""XLA's bytes of a plan's programs, from the compiler of chips that need not be here.

The programs are those that a run compiles (`Learner.lower`, `Engine.lower_play`), lowered
from shapes alone.
"""

import dataclasses
import sys
import time
from typing import Any

import jax

from earl_jax.config import Config
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool
from earl_jax.launch.start import start_jax
from earl_jax.models.config import ModelConfig
from earl_jax.placement.observations import with_failure, with_program_bytes
from earl_jax.rollout.config import make_engine_config
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.memory import program_bytes, unless_out_of_memory
from earl_jax.selector.plan_candidates import Candidates
from earl_jax.selector.plans import Plan, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import Compile
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import TRAINING_ROWS, make_layout
from earl_jax.sharding.topology import make_topology, missing_compiler
from earl_jax.train.learner import Learner


def compiler_for(
    problem: Problem, config: Config, model: ModelConfig, vocab_size: int, topology: str
) -> Compile:
    """Returns the compiler of a plan's programs: minutes a program of a real model.

    Raises:
        ValueError: the topology's compiler is not installed (says which extra is missing), or does
            not know the topology.
    """
    devices = _devices(problem.hardware, topology)
    players = devices[: (problem.num_rollout or len(devices)) // problem.num_players]
    return _Compiler(problem, config, model, vocab_size, players, devices[problem.num_rollout :])


def _devices(hardware: Hardware, topology: str) -> list[Any]:
    """Returns the devices to compile for; this machine's for a plan on virtual CPU devices.

    JAX itself runs on the CPU: looking for chips that are not here takes minutes, or fails.
    """
    if hardware.platform == "cpu":
        start_jax("cpu", hardware.num_devices)
        return jax.devices()[: hardware.num_devices]
    chips = make_topology(topology)
    if missing := missing_compiler(chips):
        raise InputError(f"--exact: {missing}")
    start_jax("cpu", 1)
    return chips.devices()


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Compiles plans; `players` are the devices of one process that plays."""

    problem: Problem
    config: Config
    model: ModelConfig
    vocab_size: int
    players: list[Any]
    trainers: list[Any]

    def __call__(self, table: ThroughputTable, plan: Plan, tokens: int) -> ThroughputTable:
        """Returns the table with the bytes of a plan's program, or with its failure."""
        start_s, is_rollout = time.perf_counter(), isinstance(plan, RolloutPlan)
        if isinstance(plan, RolloutPlan):
            lowered = self._round(plan, tokens)
        else:
            lowered = self._update(plan, tokens)
        if self.problem.hardware.platform == "tpu" and is_rollout:
            # At full effort minutes more for the same bytes: see benchmarks/compile.py.
            jax.config.update("jax_optimization_level", "O1")
        try:
            num_bytes = unless_out_of_memory(lambda: program_bytes(lowered.compile()))
        finally:
            jax.config.update("jax_optimization_level", "UNKNOWN")
        words = "does not fit" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
        print(
            f"compiled {plan.stage} on {plan.mesh}, context {tokens}: {words} per device "
            f"(computed: {self._computed_bytes(plan, tokens) / 2**30:.2f}), in "
            f"{time.perf_counter() - start_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        if num_bytes is None:
            return with_failure(self.problem, table, plan, tokens)
        return with_program_bytes(self.problem, table, plan, tokens, num_bytes)

    def _computed_bytes(self, plan: Plan, tokens: int) -> int:
        """Returns the bytes per device of quick mode."""
        candidates = Candidates(self.problem, ThroughputTable())
        if isinstance(plan, RolloutPlan):
            return candidates.round_bytes(plan, tokens)[0]
        return candidates.update_bytes(plan, tokens)[0]

    def _update(self, plan: TrainPlan, length: int) -> Any:
        config = self.config
        learner = Learner(
            self.model,
            config.train,
            config.make_algorithm(),
            vocab_size=self.vocab_size,
            temperature=config.train_temperature,
            importance_cap=config.importance_cap,
            has_versions=config.asynchrony.max_staleness > 0,
            layout=lambda mesh: make_layout(mesh, self.trainers, row_axes=TRAINING_ROWS),
        )
        chip = learner.layout(plan.mesh).mesh.devices.flat[0]  # pyright: ignore
        # Kernels ask JAX's default device which chip they are for.
        with jax.default_device(chip):
            return learner.lower(plan, config.rollout.episodes_per_step, length)

    def _round(self, plan: RolloutPlan, max_tokens: int) -> Any:
        """Returns a round of one process, which plays its part of the episodes on its devices."""
        number = self.problem.num_players
        mesh = dataclasses.replace(plan.mesh, data=plan.mesh.data // number)
        rollout = self.config.rollout.part(number)
        rollout = dataclasses.replace(rollout, num_slots=plan.num_slots // number)
        # End-of-turn ids and allowed replies take next to no memory.
        config = make_engine_config(
            rollout,
            self.model,
            self.vocab_size,
            num_devices=len(self.players),
            seed=self.config.seed,
            model_logprobs=self.config.train.ratio == "model",
        )
        engine = Engine(config, make_layout(mesh, self.players))
        return engine.lower_play(max_tokens, Pool(mesh.data, plan.pages))
