# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Throughput tables of runs and plans: the facts that they hold for, and opening them."""

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.config.config import Config
from earl_jax.launch.cluster import Cluster
from earl_jax.models.config import ModelConfig
from earl_jax.selector.table import METHOD, ThroughputTable, load_table
from earl_jax.settings.errors import InputError

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


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

    def devices(group: Sequence[Any]) -> dict[str, Any]:
        # A stage has devices of one kind.
        kind = {"platform": group[0].platform, "kind": group[0].device_kind}
        return kind | {"number": len(group)}

    stages = {"rollout": cluster.rollout_devices, "train": cluster.train_devices}
    return {
        **_model(model, vocab_size),
        "devices": {stage: devices(group) for stage, group in stages.items()},
        **_settings(config),
        "choice_branches": choice_branches,
        "attention": list(attention),
        "method": METHOD,
        "processes": cluster.count,
        "batches": config.row_batches(len(cluster.players)),
        "parts": config.asynchrony.parts,
        "host": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "backend": " ".join(cluster.devices[0].client.platform_version.split()),
        "flags": {name: _flags(os.environ.get(name, "")) for name in _FLAGS},
    }


def _model(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the facts of a model, whatever it is called."""
    model = dataclasses.replace(model, path="", preset="")
    return {"model": dataclasses.asdict(model), "vocab_size": vocab_size}


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the settings that change programs, by stage."""
    rollout, train = config.rollout, config.train
    sizes = ("num_slots", "episodes_per_step", "chunk_size", "burst", "tokens_a_page")
    programs = ("attention", "num_draft_tokens", "compute_dtype", "weight_dtype", "kv_dtype")
    networks = config.networks
    held = networks._asdict() | {"teacher": networks.teacher and _model(*networks.teacher)}
    updates = ("micro_batches", "remat", "logprob_chunk", "epochs", "mini_batches", "proximal")
    updates += ("optimizer", "momentum_dtype")
    return {
        "rollout": {field: getattr(rollout, field) for field in (*sizes, *programs)}
        | {"model_logprobs": train.ratio == "model"},
        "train": {field: getattr(train, field) for field in updates}
        | {"lora": dataclasses.asdict(train.lora), "importance_cap": config.importance_cap}
        | {"networks": held, "ema": train.ema_decay > 0, "stream": train.sft_weight > 0},
    }


def _flags(text: str) -> list[str]:
    """Returns flags in one order, without those that only name a folder for compiled programs."""
    return sorted(flag for flag in text.split() if not flag.startswith("--xla_dump"))


def open_table(
    setting: str, facts: Mapping[str, Any], cluster: Cluster
) -> tuple[ThroughputTable, str | None]:
    """Returns the table of config.selector.table (`setting`), and a sentence for the user if any.

    It is the first process's, in every process, with what ran out of memory in any of them. By the
    speed model, or by a given table, only failures are kept, elsewhere.

    Raises ValueError where config.selector.table is a path of something else.
    """
    own = {} if setting == "auto" else {"table": setting}
    table, note = load_table({**facts, **own})
    if own:
        table = dataclasses.replace(table, speeds={}, program_bytes={})
    if setting not in ("auto", "model"):
        table, note = given_table(setting).over(table), None
    each = [
        ThroughputTable.from_dict(values, table.path)
        for values in cluster.gather(table.as_dict(), "the tables of measurements")
    ]
    failures = dict.fromkeys(failure for table in each for failure in table.failures)
    return dataclasses.replace(each[0], failures=tuple(failures)), note


def given_table(setting: str) -> ThroughputTable:
    """Returns the table in the file that config.selector.table names; an empty one for no path.

    Raises ValueError where it cannot be read.
    """
    if setting in ("auto", "model"):
        return ThroughputTable()
    try:
        return ThroughputTable.from_dict(json.loads(Path(setting).read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"config.selector.table={setting} cannot be read: {error}") from error
