# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""XLA's bytes of a plan's programs, from the compiler of chips that need not be here.

The programs are those that a run compiles (`make_train_step`, `PolicyEngine.lower_play`), lowered
from shapes alone.
"""

import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.config import Config
from earl_jax.main import start_jax
from earl_jax.models.config import ModelConfig
from earl_jax.placement.observations import with_failure, with_program_bytes
from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.engine_config import EngineConfig
from earl_jax.rollout.pages import Pool
from earl_jax.rollout.scheduler import make_rows
from earl_jax.rollout.slots import SlotRules
from earl_jax.selector.hardware import Hardware
from earl_jax.selector.memory import program_bytes, unless_out_of_memory
from earl_jax.selector.plans import Plan, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import Compile
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import TRAINING_ROWS, make_layout
from earl_jax.sharding.topology import make_topology, missing_compiler
from earl_jax.train.step import batch_shapes, make_train_step, state_shapes, state_shardings


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
    trainers = devices[problem.num_rollout :]

    def compiled(table: ThroughputTable, plan: Plan, tokens: int) -> ThroughputTable:
        start_s = time.perf_counter()
        if isinstance(plan, RolloutPlan):
            lowered = _lower_round(problem, config, model, vocab_size, players, plan, tokens)
        else:
            lowered = _lower_update(config, model, vocab_size, trainers, plan, tokens)
        if problem.hardware.platform == "tpu" and isinstance(plan, RolloutPlan):
            # At full effort minutes more for the same bytes: see benchmarks/compile.py.
            jax.config.update("jax_optimization_level", "O1")
        try:
            num_bytes = unless_out_of_memory(lambda: program_bytes(lowered.compile()))
        finally:
            jax.config.update("jax_optimization_level", "UNKNOWN")
        stage = "rollout" if isinstance(plan, RolloutPlan) else "train"
        words = f"compiled {stage} on {plan.mesh}, context {tokens}, in"
        print(f"{words} {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
        if num_bytes is None:
            return with_failure(problem, table, plan, tokens)
        return with_program_bytes(problem, table, plan, tokens, num_bytes)

    return compiled


def _devices(hardware: Hardware, topology: str) -> list[Any]:
    """The devices to compile for; those of this machine where virtual CPU devices are planned for.

    JAX itself runs on the CPU: looking for chips that are not here takes minutes, or fails.
    """
    if hardware.platform == "cpu":
        start_jax("cpu", hardware.num_devices)
        return jax.devices()[: hardware.num_devices]
    chips = make_topology(topology)
    if missing := missing_compiler(chips):
        raise ValueError(f"--exact: {missing}")
    start_jax("cpu", 1)
    return chips.devices()


def _lower_update(
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    devices: list[Any],
    plan: TrainPlan,
    length: int,
) -> Any:
    layout = make_layout(plan.mesh, devices, row_axes=TRAINING_ROWS)
    step = make_train_step(
        model,
        dataclasses.replace(config.train, micro_batches=plan.micro_batches, remat=plan.remat),
        layout,
        vocab_size=vocab_size,
        temperature=config.rollout.temperature if config.train.ratio == "behaviour" else 1.0,
        objective="policy_gradient",
        importance_cap=config.importance_cap,
    )
    state = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        state_shapes(model, config.train, vocab_size),
        state_shardings(model, config.train, vocab_size, layout),
    )
    batch = batch_shapes(
        config.rollout.episodes_per_step,
        length,
        layout,
        with_proximal=config.importance_cap > 0 and config.train.epochs > 1,
    )
    # Kernels ask JAX's default device which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):  # pyright: ignore
        return step.lower(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32))


def _lower_round(
    problem: Problem,
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    devices: list[Any],
    plan: RolloutPlan,
    max_tokens: int,
) -> Any:
    """A round of one process, which plays its part of the episodes on its own devices."""
    rollout, number = config.rollout, problem.num_players
    mesh = dataclasses.replace(plan.mesh, data=plan.mesh.data // number)
    slots = plan.num_slots // number
    rows = make_rows(
        num_rows=rollout.episodes_per_step // number, num_slots=slots, num_lanes=len(devices)
    )
    engine = PolicyEngine(
        EngineConfig(
            model=dataclasses.replace(
                model, compute_dtype=rollout.computes_as(model.compute_dtype)
            ),
            vocab_size=vocab_size,
            weight_dtype=rollout.weight_dtype,
            kv_dtype=rollout.kv_dtype,
            num_slots=slots,
            num_rows=rows.total,
            chunk_size=rollout.chunk_size,
            # Which ids end a turn, and which replies are allowed, take no memory to speak of.
            rules=SlotRules(
                burst=rollout.burst,
                end_of_turn_ids=(0,),
                append_rows=rollout.append_rows,
                model_logprobs=rollout.model_logprobs,
                ngram=rollout.speculation.ngram if rollout.max_drafts else 0,
                draft=rollout.max_drafts,
            ),
            seed=config.seed,
            step_rows=-(-rollout.step_rows // number),
            page_size=rollout.tokens_a_page,
        ),
        make_layout(mesh, devices),
    )
    return engine.lower_play(max_tokens, Pool(mesh.data, plan.pages))
