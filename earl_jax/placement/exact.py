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
from earl_jax.placement.facts import with_failure, with_program_bytes
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
    devices, number = _devices(problem.hardware, topology), problem.num_players
    # Those of one process that plays, and all that train.
    players = devices[: (problem.num_rollout or len(devices)) // number]
    trainers = devices[problem.num_rollout :]

    def lowered_update(plan: TrainPlan, length: int) -> Any:
        learner = Learner(
            model,
            config.train,
            config.make_algorithm(),
            vocab_size=vocab_size,
            temperature=config.train_temperature,
            importance_cap=config.importance_cap,
            has_versions=config.asynchrony.max_staleness > 0,
            layout=lambda mesh: make_layout(mesh, trainers, row_axes=TRAINING_ROWS),
        )
        # Kernels ask JAX's default device which chip they are for.
        with jax.default_device(trainers[0]):
            return learner.lower(plan, config.rollout.episodes_per_step, length)

    def lowered_round(plan: RolloutPlan, max_tokens: int) -> Any:
        """Lowers a round of one process, which plays its part of the episodes on its devices."""
        mesh = dataclasses.replace(plan.mesh, data=plan.mesh.data // number)
        slots = plan.num_slots // number
        # End-of-turn ids and allowed replies take next to no memory.
        engine_config = make_engine_config(
            dataclasses.replace(config.rollout.part(number), num_slots=slots),
            model,
            vocab_size,
            num_devices=len(players),
            seed=config.seed,
            model_logprobs=config.train.ratio == "model",
        )
        engine = Engine(engine_config, make_layout(mesh, players))
        return engine.lower_play(max_tokens, Pool(mesh.data, plan.pages))

    def compile_plan(table: ThroughputTable, plan: Plan, tokens: int) -> ThroughputTable:
        """Returns the table with the bytes of a plan's program, or with its failure."""
        start_s, quick = time.perf_counter(), Candidates(problem, ThroughputTable())
        if isinstance(plan, RolloutPlan):
            lowered, (computed, _) = lowered_round(plan, tokens), quick.round_bytes(plan, tokens)
            if problem.hardware.platform == "tpu":
                # At full effort minutes more for the same bytes: see benchmarks/compile.py.
                jax.config.update("jax_optimization_level", "O1")
        else:
            lowered, (computed, _) = lowered_update(plan, tokens), quick.update_bytes(plan, tokens)
        try:
            num_bytes = unless_out_of_memory(lambda: program_bytes(lowered.compile()))
        finally:
            jax.config.update("jax_optimization_level", "UNKNOWN")
        words = "does not fit" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
        print(
            f"compiled {plan.stage} on {plan.mesh}, context {tokens}: {words} per device (computed:"
            f" {computed / 2**30:.2f}), in {time.perf_counter() - start_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        if num_bytes is None:
            return with_failure(problem, table, plan, tokens)
        return with_program_bytes(problem, table, plan, tokens, num_bytes)

    return compile_plan


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
