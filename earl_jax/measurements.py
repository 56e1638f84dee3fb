# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a table of measurements is of, and who may take it: a run its own, a plan one of such chips.

A run measures again where anything is different that may change a speed. A plan, whose chips need
not be here, takes a table of the same chip and model, and says what else was different.
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
from earl_jax.scene import find_model
from earl_jax.selector.contenders import calibrated
from earl_jax.selector.prospects import Scene
from earl_jax.selector.throughput import (
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
    """The kept measurements for this world's model, programs, devices and versions.

    Those of the first process, in every process; and what ran out of memory in any of them. With a
    sentence for the user where they were kept and cannot be taken (see `load_table`).
    """
    table, note = load_table(facts_of(world))
    told = [
        ThroughputTable.from_dict(table.path, each)
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
        "order": world.config.selector.order,
        "measure_rounds": world.config.selector.measure_rounds,
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
        "tokens_a_page",
        "model_logprobs",
        "compute_dtype",
        "weight_dtype",
        "kv_dtype",
    )
    return {
        "rollout": {field: getattr(rollout, field) for field in fields}
        | {
            "draft": rollout.max_drafts,
            "ngram": rollout.speculation.ngram if rollout.max_drafts else 0,
        },
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


def calibrated_by(path: Path, scene: Scene, config: Config) -> tuple[Scene, list[str]]:
    """The scene with speeds as a table of measurements has them, and what to know of that.

    Computed speeds are multiplied by one factor a stage. Of the same work what was measured of a
    mesh at a room stands as it is, and what ran out of memory there is impossible.

    Raises:
        ValueError: it cannot be read, or is not of this chip and this model.
    """
    table = _read(path)
    _check_chips(path, table.facts, scene)
    _check_model(path, table.facts, scene, config)
    scene = calibrated(scene, table.measurements)
    work, versions = _plain(_settings(config)), _versions(_PACKAGES)
    # What is installed for the chips alone need not be here.
    known = {name: table.facts.get("versions", {}).get(name) for name in versions}
    notes = []
    if found := differences({name: table.facts.get(name, {}) for name in work}, work):
        notes.append(f"its speeds are of other work than is planned for: {difference_words(found)}")
    elif table.facts.get("processes", 1) == 1:
        # Of several each measures its own part of a rollout.
        scene = dataclasses.replace(scene, known=table.measurements, failures=table.failures)
    if found := differences(known, versions):
        notes.append(f"its speeds are of other versions: {difference_words(found)}")
    return scene, [*notes, *_misses(table, scene)]


def _read(path: Path) -> ThroughputTable:
    try:
        table = ThroughputTable.from_dict(None, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"--table={path} cannot be read: {error}") from error
    try:
        stages = [(each["platform"], each["kind"]) for each in table.facts["devices"].values()]
        said = bool(stages and table.facts["model"].keys() and table.facts["vocab_size"])
    except (AttributeError, KeyError, TypeError):
        said = False
    if not said:
        raise ValueError(
            f"--table={path} does not say which model and devices it is of; give one that a run of "
            "this version has written"
        )
    return table


def _check_chips(path: Path, facts: Mapping[str, Any], scene: Scene) -> None:
    """Raises ValueError for a table of other chips than are planned for."""
    wanted = scene.hardware.chip
    for stage, devices in facts["devices"].items():
        known = chip_of(devices["kind"])
        if (known.name if known else devices["platform"]) != wanted:
            raise ValueError(
                f"--table={path} is of {devices['number']} {devices['kind']} devices "
                f"({devices['platform']}) in its {stage}, and the plan is for "
                f"{scene.hardware.name}: one chip's speeds say nothing of another's. Give a table "
                f"that a run on {wanted} has written, or none: speeds are then computed"
            )


def _check_model(path: Path, facts: Mapping[str, Any], scene: Scene, config: Config) -> None:
    """Raises ValueError for a table of another model than is planned for."""
    vocab_size = scene.sizes.vocab_size
    model, _ = find_model(config, None if config.model.path else vocab_size)
    here = _plain({"model": _model_facts(model), "vocab_size": vocab_size})
    found = differences({name: facts[name] for name in here}, here)
    if found:
        raise ValueError(
            f"--table={path} is of another model: {difference_words(found)}. Plan with the config "
            "of the run that wrote it (--config, --config.model.KEY=VALUE, --vocab_size), or give "
            "no table: speeds are then computed"
        )


def _misses(table: ThroughputTable, scene: Scene) -> list[str]:
    """Which stages keep computed speeds, for want of an entry."""
    missed = [stage for stage in ("rollout", "train") if stage not in scene.factors]
    if not missed:
        return []
    has = ", ".join(sorted({entry.split(" ")[1] for entry in table.measurements})) or "none"
    words = "" if len(missed) > 1 else f"{missed[0]} "
    return [
        f"no entry of this table matches a {words}mesh of this plan (it has {has}); speeds of "
        f"{' and '.join(missed)} are computed"
    ]


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a file."""
    return json.loads(json.dumps(facts, default=str))
