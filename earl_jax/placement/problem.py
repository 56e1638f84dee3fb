# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The selector's problem from a config: the model's sizes, the stages' work, the devices."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.algorithms.requirements import Networks, scored_passes
from earl_jax.config.combinations import check_model
from earl_jax.config.config import Config
from earl_jax.engine.config import append_tokens_for
from earl_jax.envs.text.tokenizer import build_tokenizer
from earl_jax.models.attention.kernels import context_obstacle, reads_pages_in_place
from earl_jax.models.checkpoints.hf_read import open_checkpoint
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.config import ModelConfig
from earl_jax.models.engine_parameters import engine_shapes, engine_specs
from earl_jax.models.parameters import check_tensor_axis, is_spec
from earl_jax.models.presets import preset_vocab_size
from earl_jax.rollout.origin import MAX_VOCAB_SIZE, VOCAB_MULTIPLE
from earl_jax.selector.hardware import Hardware, hardware_of, parse_topology
from earl_jax.selector.problem import Problem, divisors
from earl_jax.selector.sizes import ModelSizes, Parameter, Workload
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import CHIPS, Topology, chip_of
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import moment_axes
from earl_jax.train.state import (
    critic_specs,
    optimized_specs,
    reference_specs,
    state_shapes,
    trained_specs,
)

# Splits among which one is chosen, about evenly apart.
MOST_SPLITS = 16


def find_model(config: Config, vocab_size: int | None) -> tuple[ModelConfig, int]:
    """Returns the model of a run of this config, and the entries of its vocabulary.

    `vocab_size` None: a preset's published vocabulary, else the tokenizer's that a run would make.

    Raises:
        ValueError: a checkpoint that cannot be read, or a vocabulary beside one.
    """
    if not config.model.path:
        if vocab_size is None and config.model.preset:
            vocab_size = preset_vocab_size(config.model.preset)
        if vocab_size is None:
            entries = len(build_tokenizer(config.corpus(), MAX_VOCAB_SIZE))
            vocab_size = -(-entries // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return config.model, vocab_size
    if vocab_size is not None:
        raise InputError(
            f"--vocab_size={vocab_size} beside config.model.path ({config.model.path!r}), which "
            "says what the vocabulary is; remove one of the two"
        )
    checkpoint = open_checkpoint(find_folder(config.model.path))
    dtype = config.model.compute_dtype
    return dataclasses.replace(checkpoint.model, compute_dtype=dtype), checkpoint.vocab_size


def model_sizes(
    model: ModelConfig,
    vocab_size: int,
    *,
    engine_dtype: str,
    weight_dtype: str = "compute",
    train: TrainConfig = TrainConfig(),  # noqa: B008 - frozen
    networks: Networks = Networks(),  # noqa: B008 - immutable
) -> ModelSizes:
    """Returns a model's sizes; the engine computes in `engine_dtype`, with `weight_dtype` matrices.

    Raises ValueError for adapters that this model cannot have.
    """
    state = state_shapes(model, train, vocab_size, networks)
    trained, frozen = trained_specs(model, train, vocab_size)
    engine = engine_specs(model, vocab_size, weight_dtype)
    optimized = optimized_specs(model, train, vocab_size, networks)
    sft, state = state.sft_optimizer, state.without_sft()
    moments = tuple(map(moment_axes, state.moments, optimized[: len(state.moments)]))
    none_beside = {"num_dense_layers": 0, "shared_ffn_size": 0, "experts_per_token": 1}
    return ModelSizes(
        model=model if model.num_experts else dataclasses.replace(model, **none_beside),
        vocab_size=vocab_size,
        compute_bytes=jnp.dtype(model.compute_dtype).itemsize,
        engine_bytes=jnp.dtype(engine_dtype).itemsize,
        engine=_parameters(engine_shapes(engine, engine_dtype), engine),
        trained=_parameters(state.params, trained),
        moments=_parameters(state.moments, moments),
        sft_moments=_parameters(sft, moment_axes(sft, trained)),
        frozen=_parameters(state.base, frozen),
        reference=_parameters(state.reference, reference_specs(model, vocab_size, networks)),
        critic=_parameters(
            state.critic, critic_specs(model, vocab_size) if networks.critic else None
        ),
        average=_parameters(state.ema, trained if train.ema_decay else None),
        teacher=networks.teacher and model_sizes(*networks.teacher, engine_dtype=engine_dtype),
    )


def _parameters(shapes: Any, specs: Any) -> tuple[Parameter, ...]:
    """Returns the arrays of a tree without scalars, equal ones as one with their number.

    `specs` is a tree of their specs or axes. An array is named by the last key of its path, which
    is the same in all layers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    found = collections.Counter[Parameter]()
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        # An optimizer's arrays need no name.
        name, axes = ("", spec) if isinstance(spec, str) else (keys[-1], spec.axes)
        if leaf.shape:
            found[Parameter(name, leaf.shape, axes, leaf.dtype.itemsize)] += 1
    return tuple(parameter._replace(count=count) for parameter, count in found.items())


def workload(config: Config, model: ModelConfig, hardware: Hardware) -> Workload:
    """Returns the work of a step of this config and model on such devices."""
    rollout, train = config.rollout, config.train
    dtype = rollout.computes_as(config.model.compute_dtype)
    played = dataclasses.replace(model, compute_dtype=dtype)
    return Workload(
        num_slots=rollout.num_slots,
        num_rows=rollout.episodes_per_step,
        micro_batches=train.micro_batches,
        remat=train.remat,
        logprob_chunk=train.logprob_chunk,
        epochs=train.epochs,
        chunk_size=rollout.chunk_size,
        sampled_tokens=rollout.round_tokens,
        append_tokens=append_tokens_for(hardware.platform, model),
        # A chunk for each turn, until a load says more.
        appended=rollout.chunk_size / rollout.max_turn_tokens,
        page_size=rollout.tokens_a_page,
        parts=config.asynchrony.parts,
        has_stream=train.sft_weight > 0,
        scored=scored_passes(
            config.make_algorithm(),
            updates=train.epochs * train.mini_batches,
            corrects=config.importance_cap > 0,
            recomputes=train.proximal == "recompute",
        ),
        in_place_contexts=tuple(
            context
            for context in divisors(hardware.num_devices)
            if reads_pages_in_place(
                rollout.attention, hardware.platform, context, played, rollout.tokens_a_page
            )
        ),
        kv_itemsize=1 if rollout.kv_dtype == "int8" else jnp.dtype(dtype).itemsize,
    )


def make_problem(
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    hardware: Hardware,
    *,
    budget_bytes: int | None,
    num_processes: int = 1,
    num_players: int = 0,
    has_host_memory: bool = True,
    choice_width: int = 0,
) -> Problem:
    """Returns the selector's problem for a run of this config on such devices.

    `num_players` of the processes play, 0: all. `has_host_memory`: JAX can place arrays in host
    memory beside the devices'. `choice_width` as of `Workload`.

    Raises ValueError for settings and adapters that this model cannot have, where the split of the
    devices is to be chosen and there is none, and for config.train.remat "offload" without such
    memory.
    """
    check_model(config, model)
    rollout, selector, given = config.rollout, config.selector, config.devices.num_rollout
    apart, is_cpu = config.devices.are_apart, hardware.platform == "cpu"
    stays = config.asynchrony.is_on and not apart
    offloads = selector.offload == "on" or (selector.offload == "auto" and not is_cpu)
    networks = config.networks
    if config.train.remat == "offload" and not has_host_memory:
        raise InputError(
            'config.train.remat is "offload", and these devices have no pinned host memory beside '
            'their own; set it to "full"'
        )

    def weights_obstacle(mesh: MeshShape) -> str | None:
        axes = (mesh.tensor, mesh.fsdp, mesh.expert, mesh.context)
        if reason := check_tensor_axis(model, vocab_size, *axes):
            return reason
        if networks.teacher is None:
            return None
        # A dense teacher is whole on each device of the axis of experts.
        expert = mesh.expert if networks.teacher[0].num_experts else 1
        reason = check_tensor_axis(*networks.teacher, mesh.tensor, mesh.fsdp, expert, mesh.context)
        return reason and f"config.reference_from: {reason}"

    def attention_obstacle(mesh: MeshShape) -> str | None:
        reason = context_obstacle(config.train.attention, mesh)
        return reason and f"config.train.attention is {config.train.attention!r}, and {reason}"

    problem = Problem(
        hardware=hardware,
        sizes=model_sizes(
            model,
            vocab_size,
            engine_dtype=rollout.computes_as(model.compute_dtype),
            weight_dtype=rollout.weight_dtype,
            train=config.train,
            networks=networks,
        ),
        work=workload(config, model, hardware),
        budget_bytes=budget_bytes,
        weights_obstacle=weights_obstacle,
        attention_obstacle=attention_obstacle,
        rollout_meshes_named=selector.rollout_meshes,
        train_meshes_named=selector.train_meshes,
        num_rollout=0 if given == "auto" else given,
        num_processes=num_processes,
        num_players=num_players or num_processes,
        span_obstacle=_span_obstacle(config),
        can_offload=offloads and has_host_memory and not apart and not stays,
        can_offload_inputs=has_host_memory and (config.train.remat == "offload" or not is_cpu),
        rollout_stays=stays,
        plays=config.plays,
        preempted_bytes=int(rollout.preemption_host_gib * 2**30) if config.plays else 0,
    )
    work = dataclasses.replace(
        problem.work,
        batches=config.row_batches(problem.num_players),
        choice_width=choice_width,
    )
    problem = dataclasses.replace(problem, work=work)
    return with_splits(problem) if given == "auto" else problem


def with_splits(problem: Problem) -> Problem:
    """Returns the problem with all splits for which both stages have a mesh.

    Each of several processes gives as many of its devices, so that it plays and trains in any split
    and its live episodes stay with it. Raises ValueError if there is no split, or none of a mesh
    that the config names.
    """
    number, unit = problem.hardware.num_devices, problem.num_processes
    apart = unit * max(1, number // unit // MOST_SPLITS)
    every, splits, obstacles = dataclasses.replace(problem, splits=()), dict[int, bool](), []
    for split in range(apart, number, apart):
        try:
            first = [every.at(split).meshes(stage)[0] for stage in ("rollout", "train")]
            splits[split] = all(mesh.context == 1 for mesh in first)
        except ValueError as error:
            obstacles.append(f"{split} to play: {error}")
    # Short contexts are cut only where no split can do without, or as the user wants it.
    uncut = [split for split, is_uncut in splits.items() if is_uncut]
    is_named = problem.rollout_meshes_named or problem.train_meshes_named
    found = uncut if uncut and not is_named else [*splits]
    if not found:
        why = "; ".join(obstacles[:2]) or "each process needs at least two"
        raise InputError(
            f"config.devices.num_rollout is 'auto', and no split of {number} devices gives both "
            f"stages a mesh ({why}): make config.rollout.num_slots and episodes_per_step multiples "
            "of more numbers, such as 12, leave out config.selector.rollout_meshes and "
            "train_meshes, or give the number of devices that play"
        )
    for stage, named, counts in (
        ("rollout", problem.rollout_meshes_named, found),
        ("train", problem.train_meshes_named, [number - split for split in found]),
    ):
        for text in named:
            if MeshShape.parse(text).num_devices not in counts:
                raise InputError(
                    f"config.selector.{stage}_meshes has '{text}', and the splits of {number} "
                    f"devices with a mesh of both stages leave {stage} {counts}; remove it, or name"
                    " a mesh of the other stage for the devices that are left"
                )
    middle = min(found, key=lambda split: abs(2 * split - number))
    work = dataclasses.replace(problem.work, row_devices=math.lcm(*found))
    return dataclasses.replace(problem, num_rollout=middle, splits=tuple(found), work=work)


def _span_obstacle(config: Config) -> str:
    """Returns why no rollout mesh may span processes in a run of this config; "" where one may."""
    if config.asynchrony.is_on:
        return "a mesh that spans processes needs config.asynchrony off: they play in lockstep"
    if config.rollout.order == "queue":
        return 'with config.rollout.order = "queue" each process plays by itself: take "fifo"'
    return ""


def overrides_for_chips(given: Sequence[str], contexts: str) -> list[str]:
    """Returns overrides for what a config for CPU devices says of them, to plan it for chips.

    `given` overrides ("section.key=value") stay; `contexts` are to be planned for, "1024,8192".
    """
    changes = (
        "selector.budget_bytes_per_device=0",
        "selector.rollout_meshes=()",
        "selector.train_meshes=()",
        "selector.table=auto",
        "model.compute_dtype=bfloat16",
        "rollout.chunk_size=128",
        "rollout.burst=16",
        f"rollout.context_buckets=({contexts},)",
    )
    known = {override.partition("=")[0] for override in given}
    return [change for change in changes if change.partition("=")[0] not in known]


def check_groups(config: Config, num_players: int) -> None:
    """Raises ValueError where processes that play ahead by themselves get unequal groups."""
    number = num_players * config.asynchrony.parts
    if config.asynchrony.is_on and config.num_groups % number:
        raise InputError(
            f"in an asynchronous run {num_players} processes play, and the {config.num_groups} "
            "groups of a step (config.rollout.episodes_per_step / group_size) are no multiple of "
            f"{number}, their number times config.asynchrony.parts"
        )


def planned_problem(
    config: Config, model: ModelConfig, vocab_size: int, hardware: Hardware, budget_bytes: int
) -> Problem:
    """Returns the problem of a run of this config on such hardware, with a process a host.

    Raises ValueError as `make_problem`, for processes that have unequal numbers of devices or of
    groups, and where a stage has no mesh.
    """
    num_processes = config.distributed.num_processes or hardware.num_hosts
    if hardware.num_devices % num_processes:
        raise InputError(
            f"config.distributed.num_processes is {num_processes} (0: one a host), which does not "
            f"divide the {hardware.num_devices} devices of {hardware.name}; name a topology of "
            "whole hosts, or set it to a divisor"
        )
    given, each = config.devices.num_rollout, hardware.num_devices // num_processes
    if given != "auto" and given >= hardware.num_devices:
        raise InputError(
            f"config.devices.num_rollout is {given}, and {hardware.name} has "
            f"{hardware.num_devices} devices in all; leave at least one to train, or set 0 to "
            "play and train on all"
        )
    # In an asynchronous run no process does both on devices apart, as one that is alone does.
    ahead = config.asynchrony.is_on and num_processes > 1
    if given != "auto" and given % each and (given > each or ahead):
        raise InputError(
            f"config.devices.num_rollout is {given!r}, and a run of {num_processes} processes of "
            f"{each} devices has whole processes for rollouts: set it to a multiple of {each}"
        )
    problem = make_problem(
        config,
        model,
        vocab_size,
        hardware,
        budget_bytes=budget_bytes,
        num_processes=num_processes,
        num_players=max(1, given // each) if given != "auto" and given else num_processes,
    )
    check_groups(config, problem.num_players)
    try:
        problem.check_meshes()
    except ValueError as error:
        number, rollout = hardware.num_devices, config.rollout
        sizes = {"num_slots": rollout.num_slots} if config.plays else {}
        sizes["episodes_per_step"] = rollout.episodes_per_step
        named = config.selector.rollout_meshes or config.selector.train_meshes
        if named or all(size % number == 0 for size in sizes.values()):
            raise
        # Whole groups, in equal mini-batches and micro-batches.
        groups = rollout.group_size * config.train.mini_batches
        steps = {"episodes_per_step": math.lcm(number, groups, config.train.micro_batches)}
        pairs = ((name, size, steps.get(name, number)) for name, size in sizes.items())
        even = (f"--config.rollout.{f}={-(-size // each) * each}" for f, size, each in pairs)
        raise InputError(f"{error}. These divide evenly: {' '.join(even)}") from error
    return problem


def hardware_of_devices(devices: Sequence[Any], num_hosts: int, host_bytes: int) -> Hardware:
    """Returns the data sheet of a run's devices; of unknown chips an H100's.

    With another chip's data sheet only the ratios of its speeds count; observed speeds correct it.
    A host has no more memory than `host_bytes`.
    """
    first, number = devices[0], len(devices)
    a_host = -(-number // num_hosts)
    if first.platform == "cpu":
        hardware = parse_topology(f"cpu:{number}")
        sheet_bytes = hardware.host_memory_bytes
    else:
        chip = chip_of(first.device_kind) or CHIPS["h100"]
        hardware = hardware_of(Topology(chip=chip, grid=(1,) * chip.axes)).with_devices(number)
        sheet_bytes = a_host * hardware.host_memory_bytes // hardware.devices_a_host
    return dataclasses.replace(
        hardware, devices_a_host=a_host, host_memory_bytes=min(sheet_bytes, host_bytes)
    )
