# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device of a plan's programs, by the compiler of the chips themselves.

The programs are those that a run compiles (`make_train_step`, `PolicyEngine.lower_play`), lowered
from shapes alone for a topology that need not be here.
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
from earl_jax.rollout.engine import EngineConfig, PolicyEngine
from earl_jax.rollout.pages import Pool
from earl_jax.rollout.scheduler import make_rows
from earl_jax.rollout.slots import SlotRules
from earl_jax.scene import find_model
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.memory import program_bytes
from earl_jax.selector.prospects import Prospect, Scene
from earl_jax.selector.schedule import Exactly
from earl_jax.selector.schedule_text import way_words
from earl_jax.sharding.layout import TRAINING_ROWS, make_layout
from earl_jax.sharding.topology import make_topology, missing_compiler
from earl_jax.train.step import batch_shapes, make_train_step, state_shapes, state_shardings


def compiler_for(scene: Scene, config: Config, topology: str, vocab_size: int | None) -> Exactly:
    """What gives a prospect of this scene XLA's bytes: minutes a program of a real model.

    Raises:
        ValueError: the topology's compiler is not installed (says which extra is missing), or does
            not know the topology.
    """
    devices = _devices(scene, topology)
    model, vocab_size = find_model(config, vocab_size)

    def exactly(prospect: Prospect) -> Prospect:
        start = time.perf_counter()
        lower = _lower_update if prospect.stage == "train" else _lower_round
        lowered = lower(config, model, vocab_size, devices, prospect)
        if scene.hardware.platform == "tpu" and prospect.stage == "rollout":
            # At full effort minutes more for the same bytes: see benchmarks/compile.py.
            jax.config.update("jax_optimization_level", "O1")
        try:
            total = program_bytes(lowered.compile())
        finally:
            jax.config.update("jax_optimization_level", "UNKNOWN")
        print(
            f"compiled {prospect.stage} on {prospect.mesh}{way_words(scene, prospect)} with room "
            f"for {prospect.places:,} tokens in {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
        return with_total(prospect, total)

    return exactly


def with_total(prospect: Prospect, program: int) -> Prospect:
    """The prospect with a program's bytes, which knows of no trainer beside it."""
    return dataclasses.replace(
        prospect, footprint=prospect.footprint.with_total(program), exact=True
    )


def _devices(scene: Scene, topology: str) -> list[Any]:
    """The devices to compile for; those of this machine where virtual CPU devices are planned for.

    JAX itself runs on the CPU: looking for chips that are not here takes minutes, or fails.
    """
    hardware = scene.hardware
    if hardware.platform == "cpu":
        start_jax("cpu", hardware.num_devices)
        return jax.devices()[: hardware.num_devices]
    chips = make_topology(topology)
    if missing := missing_compiler(chips):
        raise ValueError(f"--exact: {missing}")
    start_jax("cpu", 1)
    return chips.devices()


def _lower_update(
    config: Config, model: ModelConfig, vocab_size: int, devices: list[Any], prospect: Prospect
) -> Any:
    assert isinstance(prospect.rung, TrainRung)
    layout = make_layout(prospect.mesh, devices, row_axes=TRAINING_ROWS)
    step = make_train_step(
        model,
        dataclasses.replace(config.train, **prospect.rung._asdict()),
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
        prospect.places,
        layout,
        with_proximal=config.importance_cap > 0 and config.train.epochs > 1,
    )
    # Kernels ask JAX's default device which chip they are for.
    with jax.default_device(layout.mesh.devices.flat[0]):  # pyright: ignore
        return step.lower(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32))


def _lower_round(
    config: Config, model: ModelConfig, vocab_size: int, devices: list[Any], prospect: Prospect
) -> Any:
    rung, rollout, layout = prospect.rung, config.rollout, make_layout(prospect.mesh, devices)
    assert isinstance(rung, RolloutRung)
    rows = make_rows(
        num_rows=rollout.episodes_per_step,
        num_slots=rung.num_slots,
        num_devices=len(devices),
    )
    engine = PolicyEngine(
        EngineConfig(
            model=dataclasses.replace(
                model, compute_dtype=rollout.computes_as(model.compute_dtype)
            ),
            vocab_size=vocab_size,
            weight_dtype=rollout.weight_dtype,
            kv_dtype=rollout.kv_dtype,
            num_slots=rung.num_slots,
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
            step_rows=rollout.step_rows,
            page_size=rung.page_size,
        ),
        layout,
    )
    shards = layout.num_row_shards
    pool = Pool(shards, rung.pages * len(devices) // shards)
    return engine.lower_play(prospect.places, pool)
