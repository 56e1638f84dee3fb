# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans a run for hardware that is not here: python -m earl_jax.plan --topology=v5e:16x16 ..."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from earl_jax.config.flags import config_parser, parse_with_overrides
from earl_jax.launch.start import exit_status
from earl_jax.settings.errors import InputError

_HELP = """\
Prints the meshes that a run would choose for both of its stages as contexts grow, on hardware that
need not be here: bytes per device, expected times, the next best mesh, and what does not fit.

examples:
  python -m earl_jax.plan --topology=h100:1x8 --config.model.preset=qwen2.5-7b
      a published model on eight GPUs: their whole memory, every mesh, bfloat16
  python -m earl_jax.plan --config=configs/X.py --topology=v5e:16x16 --contexts=1024,8192,32768
      a config of yours, as it stands, for these contexts and no others
  python -m earl_jax.plan --config=configs/trail_tiny_cpu.py --topology=cpu:8
      the first run of the README, as it would run on this laptop

--config.section.key=value changes one setting, as in training; rollout.num_slots and
rollout.episodes_per_step are the ones to think about first. Episodes are taken to fill the context,
and a run to stay at each. Bytes and times are computed in seconds from the model's shapes and the
chips' data sheets (quick mode). With --exact XLA compiles what is chosen for the real topology,
minutes a program, which needs no chip but the extra tpu-topology or gpu-topology. Exit status 2 for
a mistake in what was given.
"""
DEFAULT_CONTEXTS = "1024,2048,4096,8192,16384,32768,65536,131072"


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the overrides of the config ("section.key=value").

    Exits with status 2 for a flag that does not exist.
    """
    parser = config_parser("plan", _HELP, None)
    add = parser.add_argument
    names = "v5e:16x16, v5p:4x4x8, v6e:4x4, h100:16x8 (hosts x GPUs), h200, b200, cpu:8, cpu:2x4"
    add("--topology", required=True, help=f"{names} (hosts x devices)")
    add(
        "--contexts",
        default="",
        help="tokens of the longest episodes, rising, separated by commas (default: the config's "
        f"context_buckets and, for chips, of {DEFAULT_CONTEXTS} those beyond)",
    )
    budget = "GiB of a device to be used (default: the config's budget, else what programs get)"
    add("--hbm_gib", type=float, help=budget)
    vocab = "size of the vocabulary (default: the preset's, else of the tokenizer of a run)"
    add("--vocab_size", type=int, help=vocab)
    table = "a throughput table of a run of this model on such chips: its speeds and bytes are used"
    add("--table", type=Path, help=table)
    add("--exact", action="store_true", help="let XLA compile what is chosen, for its bytes")
    add("--json", action="store_true", help="print one JSON object, with all meshes")
    return parse_with_overrides(parser, arguments)


def plan_command(arguments: Sequence[str]) -> None:
    """Runs the whole command. Raises ValueError for bad input."""
    flags, overrides = parse_flags(arguments)

    from earl_jax.config.file import load_config_file, make_config
    from earl_jax.placement.facts import table_for_plan
    from earl_jax.placement.problem import find_model, overrides_for_chips, planned_problem
    from earl_jax.selector.hardware import parse_topology
    from earl_jax.selector.schedule import make_schedule, schedule_lines, schedule_values
    from earl_jax.selector.smallest import smallest_hardware, smallest_words
    from earl_jax.selector.table import ThroughputTable

    hardware = parse_topology(flags.topology)
    given = load_config_file(flags.config) if flags.config else {}
    config, notes, wanted = make_config(given, overrides), [], _contexts(flags.contexts)
    if config.devices.platform == "cpu" != hardware.platform:
        changes = overrides_for_chips(overrides, flags.contexts or DEFAULT_CONTEXTS)
        config = make_config(given, [*changes, *overrides])
        name = flags.config.name if flags.config else "this config"
        notes.append(f"{name} is for CPU devices; planned with {', '.join(changes)}")
    contexts = [*config.rollout.context_buckets]
    if hardware.platform != "cpu":
        contexts += [c for c in _contexts(DEFAULT_CONTEXTS) if c > contexts[-1]]
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
    print(json.dumps(values) if flags.json else "\n".join(lines))


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


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: plan_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
