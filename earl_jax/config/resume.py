# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The settings that may change when a run is resumed."""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from earl_jax.config.config import Config, with_setting
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.settings.differences import differences
from earl_jax.settings.errors import InputError

# Settings, or whole sections, that may change in a workdir; and what a change means. The section
# `distributed` is not in config.json: it may change always.
MAY_CHANGE: dict[str, str] = {
    "num_steps": "The run ends there. It equals one that had this number from the start, but for "
    "what depends on it: a `train.schedule` other than \"constant\" and an entropy bonus, which "
    "fall over the new number from the next step on, the tasks of supervised examples, and the "
    "tokenizer that a model from scratch has made of a short run's tasks.",
    "log": "From the next step on.",
    "checkpoint": "From the next checkpoint on.",
    "eval": "From the next evaluation on.",
    "devices": "The checkpoint is read by any number of devices; results then differ by rounding.",
    "selector": "Budgets and candidates of meshes. Results differ by rounding where another mesh "
    "is chosen.",
    "env.timeout_s": "From the next step on.",
    "env.num_workers": "From the next step on.",
    "asynchrony": "From the next step on; with another rule than in_order, tasks of later steps "
    "that were trained on are played again where `max_staleness` becomes 0.",
    "rollout.attention": "From the next step on. Results differ by rounding.",
    "rollout.patience_s": "From the next step on.",
    "rollout.preemption_host_gib": "From the next step on.",
    "train.remat": "From the next step on. Results differ by rounding.",
}  # fmt: skip


# Settings of MAY_CHANGE that change the events or the weights of a run.
_REPLAYED = (
    "num_steps",
    "asynchrony",
    "devices.num_rollout",
    "rollout.attention",
    "rollout.preemption_host_gib",
    "train.remat",
)


def replayed_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that may change in a run, and that its replay takes from its events."""
    found = {name: operator.attrgetter(name)(config) for name in _REPLAYED}
    return found | {"asynchrony": dataclasses.asdict(config.asynchrony)}


def replayed_parts(
    events: Iterable[dict[str, Any]], config: Config
) -> list[tuple[Config, list[dict[str, Any]]]]:
    """Returns the parts of a run between changes of its settings: the config and events of each.

    `config` is that of its end. Raises InputError for events that do not say their settings.
    """
    parts: list[tuple[Config, list[dict[str, Any]]]] = []
    settings: Any = {}
    for event in events:
        if event["event"] == "open" and event.get("settings") != settings:
            settings = event.get("settings")
            parts.append((_with_settings(config, settings), []))
        if not parts:
            raise InputError(f"the events of the run that is replayed begin with {event!r:.80}")
        parts[-1][1].append(event)
    return parts


def _with_settings(config: Config, settings: Any) -> Config:
    if set(settings or ()) != set(_REPLAYED) or not _is_asynchrony(settings["asynchrony"]):
        raise InputError(
            "the run that is replayed has events of a version that wrote other settings down; "
            "replay it with that version"
        )
    for name, value in settings.items():
        if name == "asynchrony":
            value = AsynchronyConfig(**value)
        config = with_setting(config, name.split("."), value)
    return config


def _is_asynchrony(settings: Any) -> bool:
    names = {field.name for field in dataclasses.fields(AsynchronyConfig)}
    return isinstance(settings, dict) and set(settings) == names


def changes(saved: dict[str, Any], given: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns what differs from the config in a workdir: what may change, and what may not.

    Each as a line: "config.num_steps is 10 there, 20 here".
    """
    lines = differences(saved, given, "config")
    allowed = [line for line in lines if _may_change(line.partition(" is ")[0])]
    return allowed, [line for line in lines if line not in allowed]


def _may_change(path: str) -> bool:
    path = path.removeprefix("config.")
    return any(path == name or path.startswith(f"{name}.") for name in MAY_CHANGE)
