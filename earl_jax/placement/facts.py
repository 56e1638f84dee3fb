# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Opens throughput tables: a run's own, and one that is given to a run or a plan.

The facts of a table are all that may change a speed. A run reads its own table only where all of
them are equal; a plan, whose chips need not be here, takes one of the same chip and model.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.config import Config
from earl_jax.launch.cluster import Cluster
from earl_jax.models.config import ModelConfig
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import METHOD, ThroughputTable, load_table
from earl_jax.settings.differences import differences
from earl_jax.settings.errors import InputError
from earl_jax.sharding.topology import chip_of

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def open_table(
    setting: str, facts: Mapping[str, Any], cluster: Cluster
) -> tuple[ThroughputTable, str | None]:
    """Returns the table of config.selector.table (`setting`), and a sentence for the user if any.

    It is the first process's, in every process, with what ran out of memory in any of them.

    Raises ValueError where config.selector.table is a path of something else.
    """
    facts, note = dict(facts), None
    if setting == "auto":
        table, note = load_table(facts)
    elif setting == "model":
        # Failures are remembered here too; nothing else decides.
        table, note = load_table(facts | {"table": "model"})
        table = dataclasses.replace(table, entries={})
    else:
        # What runs out of memory is remembered elsewhere: the named table is not changed.
        kept, _ = load_table(facts | {"table": setting})
        table = read_table(Path(setting), "config.selector.table")
        table = table.over(dataclasses.replace(kept, entries={}))
    each = [
        ThroughputTable.from_dict(values, table.path)
        for values in cluster.gather(table.as_dict(), "the tables of measurements")
    ]
    failures = dict.fromkeys(failure for table in each for failure in table.failures)
    return dataclasses.replace(each[0], failures=tuple(failures)), note


def facts_of(
    config: Config,
    cluster: Cluster,
    model: ModelConfig,
    vocab_size: int,
    *,
    choice_branches: int,
    attention: Sequence[str],
) -> dict[str, Any]:
    """Returns all that may change a speed of this run; `attention` names the trainer's kernels."""
    device = cluster.devices[0]
    stages = (("rollout", cluster.rollout_devices), ("train", cluster.train_devices))
    return {
        **model_facts(model, vocab_size),
        # A stage has devices of one kind.
        "devices": {
            stage: {
                "platform": devices[0].platform,
                "kind": devices[0].device_kind,
                "number": len(devices),
            }
            for stage, devices in stages
        },
        **_settings(config),
        "choice_branches": choice_branches,
        "attention": list(attention),
        "method": METHOD,
        "processes": cluster.count,
        "host": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "backend": " ".join(device.client.platform_version.split()),
        "flags": {name: _flags(os.environ.get(name, "")) for name in _FLAGS},
    }


def model_facts(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the facts of a model, whatever it is called."""
    model = dataclasses.replace(model, path="", preset="")
    return {"model": dataclasses.asdict(model), "vocab_size": vocab_size}


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the settings that change programs, by stage."""
    rollout, train = config.rollout, config.train
    sizes = ("num_slots", "episodes_per_step", "chunk_size", "burst", "tokens_a_page")
    programs = ("attention", "num_draft_tokens", "compute_dtype", "weight_dtype", "kv_dtype")
    updates = ("micro_batches", "remat", "logprob_chunk", "epochs", "mini_batches", "proximal")
    return {
        "rollout": {field: getattr(rollout, field) for field in (*sizes, *programs)}
        | {"model_logprobs": train.ratio == "model"},
        "train": {field: getattr(train, field) for field in updates}
        | {"lora": dataclasses.asdict(train.lora), "importance_cap": config.importance_cap}
        | {"networks": config.networks._asdict()},
    }


def _flags(text: str) -> list[str]:
    """Returns flags in one order, without those that only name a folder for compiled programs."""
    return sorted(flag for flag in text.split() if not flag.startswith("--xla_dump"))


def table_for_plan(
    path: Path, problem: Problem, model: ModelConfig, vocab_size: int, config: Config
) -> tuple[ThroughputTable, list[str]]:
    """Returns a run's table for a plan on such chips, and notes about other settings.

    Raises:
        ValueError: it cannot be read, or is not of this chip and this model.
    """
    table = read_table(path, "--table")
    wanted = problem.hardware.chip
    try:
        stages = table.facts["devices"].values()
        kinds = {(each["platform"], each["kind"]) for each in stages}
    except (AttributeError, KeyError, TypeError):
        kinds = {("", "unknown")}
    for backend, kind in kinds:
        known = chip_of(kind)
        if (known.name if known else backend) != wanted:
            raise InputError(
                f"--table={path} is of {kind} devices, and the plan is for {problem.hardware.name}."
                f" Give a table that a run on {wanted} has written, or none: speeds are then "
                "computed"
            )
    if found := _differences(table, model_facts(model, vocab_size)):
        raise InputError(
            f"--table={path} is of another model: {found}. Plan with the config of the run that "
            "wrote it (--config, --config.model.KEY=VALUE, --vocab_size), or give no table: speeds "
            "are then computed"
        )
    found = _differences(table, _settings(config))
    return table, [f"its speeds are of other settings than are planned for: {found}"] * bool(found)


def read_table(path: Path, flag: str) -> ThroughputTable:
    """Reads a table that a run has written. Raises ValueError for anything else."""
    try:
        return ThroughputTable.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"{flag}={path} cannot be read: {error}") from error


def _differences(table: ThroughputTable, facts: dict[str, Any]) -> str:
    """Returns the first differences of these facts in words, "" for none."""
    here = json.loads(json.dumps(facts, default=str))
    found = differences({name: table.facts.get(name) for name in here}, here, "config")
    return "; ".join(line.removeprefix("config.") for line in found[:4])
