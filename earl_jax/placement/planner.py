# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a run for hardware that is not here: the work of `python -m earl_jax.plan`."""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from earl_jax.config.config import Config
from earl_jax.config.file import load_config_file, make_config
from earl_jax.engine.engine import Engine
from earl_jax.engine.pages import Pool
from earl_jax.launch.start import start_jax
from earl_jax.models.checkpoints.hf_read import open_checkpoint
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.config import ModelConfig
from earl_jax.placement.facts import given_table
from earl_jax.placement.group_planner import plan_groups
from earl_jax.placement.problem import find_model, overrides_for_chips, planned_problem
from earl_jax.placement.stages import make_learner
from earl_jax.rollout.config import make_engine_config
from earl_jax.selector.hardware import Hardware, parse_topology
from earl_jax.selector.memory import program_bytes, unless_out_of_memory
from earl_jax.selector.plans import Plan, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import (
    Compile,
    make_schedule,
    schedule_lines,
    schedule_values,
    smallest_hardware,
    smallest_words,
)
from earl_jax.selector.table import ThroughputTable, key_of
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import TRAINING_ROWS, make_layout
from earl_jax.sharding.plan_text import bytes_text
from earl_jax.sharding.topology import make_topology, missing_compiler


def plan_run(
    flags: argparse.Namespace, overrides: Sequence[str], chip_contexts: str
) -> tuple[dict[str, Any], list[str]]:
    """Returns the plans for these flags of `python -m earl_jax.plan`, as values and as lines.

    Without --contexts they are those of the config, and for chips those of `chip_contexts` beyond.

    Raises:
        ValueError: a mistake in the flags or in the config.
    """
    hardware = parse_topology(flags.topology)
    given = load_config_file(flags.config) if flags.config else {}
    config, notes, wanted = make_config(given, overrides), [], _contexts(flags.contexts)
    if config.devices.platform == "cpu" != hardware.platform:
        changes = overrides_for_chips(overrides, flags.contexts or chip_contexts)
        config = make_config(given, [*changes, *overrides])
        name = flags.config.name if flags.config else "this config"
        notes.append(f"{name} is for CPU devices; planned with {', '.join(changes)}")
    contexts = [*config.rollout.context_buckets]
    if hardware.platform != "cpu":
        contexts += [c for c in _contexts(chip_contexts) if c > contexts[-1]]
    if flags.vocab_size is not None and flags.vocab_size < 1:
        raise InputError(f"--vocab_size={flags.vocab_size}; give a number of at least 1")
    budget = _budget(flags.hbm_gib, config, hardware, notes)
    contexts = _within_model(config, wanted, contexts)
    model, vocab_size = find_model(config, flags.vocab_size)
    link, prices = flags.link_gb, flags.prices
    if flags.train_topology:
        if flags.exact or flags.hbm_gib:
            raise InputError("--exact or --hbm_gib beside --train_topology; remove one of them")
        both = (flags.topology, flags.train_topology)
        return plan_groups(config, model, vocab_size, both, contexts, link_gb=link, prices=prices)
    if prices or link is not None:
        raise InputError("--prices and --link_gb are of two groups: give --train_topology too")
    problem = planned_problem(config, model, vocab_size, hardware, budget)
    table, compiled = given_table(config.selector.table), None
    if flags.exact:
        compiled = compiler_for(problem, config, model, vocab_size, flags.topology)
    schedule = make_schedule(problem, table, contexts, compiled)
    values = schedule_values(problem, schedule, exact=flags.exact) | {"notes": notes}
    lines = [*notes, *schedule_lines(values)]
    broken = next((stop.context for stop in schedule if stop.decision is None), None)
    if broken and not problem.num_rollout:
        found = smallest_hardware(problem, broken)
        values["smallest"] = {"context": broken, "devices": dict(found)}
        lines.append(f"  {smallest_words(found, broken)}")
    return values, lines


def _budget(hbm_gib: float | None, config: Config, hardware: Hardware, notes: list[str]) -> int:
    """Returns the bytes of a device to plan for; notes where these are more than it has."""
    if hbm_gib is None:
        return config.selector.budget_bytes_per_device or hardware.usable_bytes
    if not 0 < hbm_gib < math.inf:
        raise InputError(f"--hbm_gib={hbm_gib}; give GiB of a device's memory, above 0")
    budget, have = int(hbm_gib * 2**30), hardware.memory_bytes
    if budget > have:
        notes.append(f"--hbm_gib={hbm_gib:g} is more than the {bytes_text(have)} of a device")
    return budget


def _within_model(config: Config, wanted: list[int], usual: list[int]) -> list[int]:
    """Returns the contexts to plan: those wanted, or the usual ones that the model reads.

    Raises ValueError where one that is wanted is beyond what a checkpoint's model is made for.
    """
    path = config.model.path
    most = open_checkpoint(find_folder(path)).max_context if path else None
    if most is None:
        return wanted or usual
    if wanted and wanted[-1] > most:
        raise InputError(
            f"--contexts has {wanted[-1]}, and the model of config.model.path ({path!r}) is made "
            f"for {most} (max_position_embeddings)"
        )
    return wanted or [context for context in usual if context <= most] or [most]


def _contexts(text: str) -> list[int]:
    """Returns the numbers of --contexts. Raises ValueError for what is no rising list of them."""
    parts = text.split(",") if text else []
    contexts = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(contexts) < len(parts) or contexts != sorted(set(contexts)) or 0 in contexts:
        raise InputError(
            f"--contexts={text}: give rising numbers of tokens, separated by commas, as in "
            "--contexts=1024,8192,32768"
        )
    return contexts


def compiler_for(
    problem: Problem, config: Config, model: ModelConfig, vocab_size: int, topology: str
) -> Compile:
    """Returns the compiler of a plan's programs: minutes a program of a real model.

    Raises:
        ValueError: the topology's compiler is not installed (says which extra is missing), or does
            not know the topology.
    """
    devices = _devices(problem.hardware, topology)

    def part(chips: list[Any]) -> list[Any]:
        """Returns the chips, or as many that are a slice where these are a part of one."""
        if problem.hardware.platform != "tpu" or len(chips) == len(devices):
            return chips
        return make_topology(topology).part(len(chips)).devices()

    def lowered_update(plan: TrainPlan, length: int) -> Any:
        trainers = part(devices[-plan.mesh.num_devices :])
        learner = make_learner(
            config,
            model,
            vocab_size,
            lambda mesh: make_layout(mesh, trainers, row_axes=TRAINING_ROWS),
        )
        # Kernels ask JAX's default device which chip they are for.
        with jax.default_device(trainers[0]):
            return learner.lower(plan, config.rollout.episodes_per_step, length)

    def lowered_round(plan: RolloutPlan, max_tokens: int) -> Any:
        """Lowers a round of one engine, which plays its part of the episodes on its devices."""
        number = problem.of(plan).num_parts(plan.mesh)
        mesh = plan.mesh._replace(data=plan.mesh.data // number)
        players = part(devices[: mesh.num_devices])
        slots = plan.num_slots // number
        # Without what restricted replies are chosen among: that depends on the run's tokenizer.
        engine_config = make_engine_config(
            dataclasses.replace(config.rollout.part(number), num_slots=slots),
            model,
            vocab_size,
            num_devices=len(players),
            seed=config.seed,
            model_logprobs=config.train.ratio == "model",
            batches=problem.work.batches,
        )
        engine = Engine(engine_config, make_layout(mesh, players))
        return engine.lower_play(max_tokens, Pool(mesh.data, plan.pages))

    def compile_plan(table: ThroughputTable, plan: Plan, tokens: int) -> ThroughputTable:
        """Returns the table with the bytes of a plan's program, or with its failure."""
        start_s = time.perf_counter()
        if isinstance(plan, RolloutPlan):
            lowered, computed = lowered_round(plan, tokens), problem.round_footprint(plan, tokens)
            if problem.hardware.platform == "tpu":
                # At full effort minutes more for the same bytes: see benchmarks/compile.py.
                jax.config.update("jax_optimization_level", "O1")
        else:
            lowered, computed = lowered_update(plan, tokens), problem.update_footprint(plan, tokens)
        own_gib = (computed.total - computed.trainer) / 2**30
        try:
            num_bytes = unless_out_of_memory(lambda: program_bytes(lowered.compile()))
        finally:
            jax.config.update("jax_optimization_level", "UNKNOWN")
        words = "does not fit" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
        print(
            f"compiled {plan.stage} on {plan.mesh}, context {tokens}: {words} per device (computed:"
            f" {own_gib:.2f}), in {time.perf_counter() - start_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        if num_bytes is None:
            return table.with_failure(problem.failure(plan, tokens))
        return table.with_bytes(key_of(plan, tokens), problem.without_pages(plan, num_bytes))

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
