# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about a throughput table: the model, programs, devices and versions that it is of.

A run takes its table only where nothing is different that may change a speed. A plan, whose chips
need not be here, takes a table of the same chip and model, and says what else was different.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_jax.config import Config
from earl_jax.models.config import ModelConfig
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import (
    METHOD,
    ThroughputTable,
    difference_words,
    differences,
    load_table,
)
from earl_jax.sharding.topology import chip_of

if TYPE_CHECKING:
    from earl_jax.world import World

_PACKAGES = ("jax", "jaxlib", "earl_jax")
# What else changes programs and their speeds, where it is installed.
_PLATFORM_PACKAGES = {
    "tpu": ("libtpu",),
    "gpu": (
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cudnn-cu12",
        "jax-cuda13-plugin",
        "jax-cuda13-pjrt",
        "nvidia-cudnn-cu13",
        "tokamax",
    ),
}
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_DRIVER = Path("/proc/driver/nvidia/version")


def open_table(world: "World") -> tuple[ThroughputTable, str | None]:
    """Returns the table that config.selector.table asks for, and a sentence for the user if any.

    The first process's, in every process; and what ran out of memory in any of them.

    Raises ValueError where config.selector.table is a path of something else.
    """
    setting, facts = world.config.selector.table, facts_of(world)
    note = None
    if setting == "auto":
        table, note = load_table(facts)
    elif setting == "model":
        # What ran out of memory is remembered here too; nothing else decides.
        table, note = load_table(facts | {"table": "model"})
        table = dataclasses.replace(table, entries={})
    else:
        table = dataclasses.replace(read_table(Path(setting), "config.selector.table"), path=None)
    told = [
        ThroughputTable.from_dict(each, table.path)
        for each in world.processes.gather(table.as_dict(), "the tables of measurements")
    ]
    failures = dict.fromkeys(failure for each in told for failure in each.failures)
    return dataclasses.replace(told[0], failures=tuple(failures)), note


def facts_of(world: "World") -> dict[str, Any]:
    """All that may change what is measured in this world."""
    processes = world.processes
    device = processes.devices[0]
    stages = (("rollout", processes.rollout_devices), ("train", processes.train_devices))
    facts = {
        "model": _model_facts(world.model),
        "vocab_size": world.vocab_size,
        # A stage has devices of one kind.
        "devices": {
            stage: {
                "platform": devices[0].platform,
                "kind": devices[0].device_kind,
                "number": len(devices),
            }
            for stage, devices in stages
        },
        **_settings(world.config),
        "choice_branches": world.choice_branches,
        "attention": [choice.kernel for choice in world.attention_choices],
        "method": METHOD,
        "processes": processes.count,
        "host": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": _versions(_PACKAGES + _PLATFORM_PACKAGES.get(device.platform, ())),
        "backend": " ".join(device.client.platform_version.split()),
        "flags": {name: _flags(os.environ.get(name, "")) for name in _FLAGS},
    }
    if device.platform == "gpu" and _DRIVER.exists():
        facts["driver"] = _DRIVER.read_text().partition("\n")[0]
    return facts


def _model_facts(model: ModelConfig) -> dict[str, Any]:
    """What a model is, whatever it is called."""
    return dataclasses.asdict(dataclasses.replace(model, path="", preset=""))


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    """Settings that change programs, of each stage."""
    rollout, train = config.rollout, config.train
    fields = (
        "num_slots",
        "episodes_per_step",
        "chunk_size",
        "burst",
        "step_rows",
        "num_draft_tokens",
        "tokens_a_page",
        "compute_dtype",
        "weight_dtype",
        "kv_dtype",
    )
    return {
        "rollout": {field: getattr(rollout, field) for field in fields}
        | {"model_logprobs": train.ratio == "model"},
        "train": {
            field: getattr(train, field)
            for field in ("micro_batches", "remat", "logprob_chunk", "epochs")
        }
        | {"lora": dataclasses.asdict(train.lora), "importance_cap": config.importance_cap},
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _flags(text: str) -> list[str]:
    """In one order, without those that only say where to write what was compiled."""
    return sorted(flag for flag in text.split() if not flag.startswith("--xla_dump"))


def table_for_plan(
    path: Path, problem: Problem, model: ModelConfig, vocab_size: int, config: Config
) -> tuple[ThroughputTable, list[str]]:
    """Returns a run's table for a plan on such chips, and what else is different about it.

    Raises:
        ValueError: it cannot be read, or is not of this chip and this model.
    """
    table = read_table(path, "--table")
    _check_chips(path, table.facts, problem)
    here = _plain({"model": _model_facts(model), "vocab_size": vocab_size})
    if found := differences({name: table.facts.get(name) for name in here}, here):
        raise ValueError(
            f"--table={path} is of another model: {difference_words(found)}. Plan with the config "
            "of the run that wrote it (--config, --config.model.KEY=VALUE, --vocab_size), or give "
            "no table: speeds are then computed"
        )
    work, versions = _plain(_settings(config)), _versions(_PACKAGES)
    # Packages that only the chips need are not installed here.
    known = {name: table.facts.get("versions", {}).get(name) for name in versions}
    notes = []
    if found := differences({name: table.facts.get(name, {}) for name in work}, work):
        notes.append(f"its speeds are of other work than is planned for: {difference_words(found)}")
    if found := differences(known, versions):
        notes.append(f"its speeds are of other versions: {difference_words(found)}")
    return table, notes


def read_table(path: Path, flag: str) -> ThroughputTable:
    """Reads a table that a run has written. Raises ValueError for anything else."""
    try:
        return ThroughputTable.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}={path} cannot be read: {error}") from error


def _check_chips(path: Path, facts: Mapping[str, Any], problem: Problem) -> None:
    """Raises ValueError for a table of other chips than are planned for."""
    wanted = problem.hardware.chip
    try:
        stages = {
            stage: (each["platform"], each["kind"]) for stage, each in facts["devices"].items()
        }
    except (AttributeError, KeyError, TypeError):
        stages = {}
    if not stages:
        raise ValueError(
            f"--table={path} does not say which devices it is of; give one that a run of this "
            "version has written"
        )
    for stage, (backend, kind) in stages.items():
        known = chip_of(kind)
        if (known.name if known else backend) != wanted:
            raise ValueError(
                f"--table={path} is of {kind} devices ({backend}) in its {stage}, and the plan is "
                f"for {problem.hardware.name}: one chip's speeds say nothing of another's. Give a "
                f"table that a run on {wanted} has written, or none: speeds are then computed"
            )


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts as they come back from a file."""
    return json.loads(json.dumps(facts, default=str))
