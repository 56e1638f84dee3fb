# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a run for hardware that is not here: the work of `python -m earl_jax.plan`."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from earl_jax.config.file import load_config_file, make_config
from earl_jax.placement.facts import table_for_plan
from earl_jax.placement.problem import find_model, overrides_for_chips, planned_problem
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.schedule import make_schedule, schedule_lines, schedule_values
from earl_jax.selector.smallest import smallest_hardware, smallest_words
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError


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
    budget = config.selector.budget_bytes_per_device or hardware.usable_bytes
    if flags.hbm_gib is not None:
        if not 0 < flags.hbm_gib < math.inf:
            raise InputError(f"--hbm_gib={flags.hbm_gib}; give GiB of a device's memory, above 0")
        budget = int(flags.hbm_gib * 2**30)
    model, vocab_size = find_model(config, flags.vocab_size)
    problem = planned_problem(config, model, vocab_size, hardware, budget)
    table, compiled = ThroughputTable(), None
    if flags.table:
        table, found = table_for_plan(flags.table, problem, model, vocab_size, config)
        notes += [f"--table={flags.table}: {note}" for note in found]
    if flags.exact:
        from earl_jax.placement.exact import compiler_for

        compiled = compiler_for(problem, config, model, vocab_size, flags.topology)
    schedule = make_schedule(problem, table, wanted or contexts, compiled)
    values = schedule_values(problem, schedule, exact=flags.exact) | {"notes": notes}
    lines = [*notes, *schedule_lines(values)]
    broken = next((stop.context for stop in schedule if stop.decision is None), None)
    if broken and not problem.num_rollout:
        found = smallest_hardware(problem, broken)
        values["smallest"] = {"context": broken, "devices": dict(found)}
        lines.append(f"  {smallest_words(found, broken)}")
    return values, lines


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
