# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans a run for hardware that is not here: python -m earl_jax.plan --topology=v5e:16x16 ..."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from earl_jax.main import DEFAULT_CONFIG, exit_status

_HELP = """\
Says which meshes a run's stages fit on hardware that need not be here: bytes per device by kind,
predicted times, the pairs of meshes that a run would choose as contexts grow, in which way they
would be used (micro-batches, remat, slots, pages), and where that would change.

examples:
  python -m earl_jax.plan --topology=cpu:8
      the default config, as it would run on this laptop
  python -m earl_jax.plan --config=configs/X.py --topology=h100:16x8 --contexts=1024,8192,32768
  python -m earl_jax.plan --config=configs/X.py --topology=v5e:16x16 --hbm_gib=14 --json
  python -m earl_jax.plan --topology=v5p:4x4x8 --vocab_size=152064 \\
      --config.model.preset=qwen2.5-72b --config.model.compute_dtype=bfloat16 \\
      --config.rollout.num_slots=256 --config.rollout.episodes_per_step=256
      what is in no file: --config.section.key=value changes one setting, as when training

Episodes are taken to fill their room with tokens that the policy samples, at each context for
longer than a run takes to settle there. Bytes and times are computed from the model's shapes and
the chips' data sheets (quick mode). With --exact XLA compiles what is chosen for the real topology,
minutes a program, which needs no chip but the extra tpu-topology or gpu-topology. Exit status 2 for
a mistake in what was given.
"""
DEFAULT_CONTEXTS = "1024,2048,4096,8192,16384,32768,65536,131072"


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the overrides of the config ("section.key=value").

    Exits with status 2 for a flag that does not exist.
    """
    parser = argparse.ArgumentParser(
        prog="python -m earl_jax.plan",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a file in configs/")
    parser.add_argument(
        "--topology",
        required=True,
        help="v5e:16x16, v5p:4x4x8, v6e:4x4, h100:16x8 (hosts x GPUs of one), h200, b200, cpu:8",
    )
    parser.add_argument(
        "--contexts",
        default="",
        help="tokens of the longest episodes, rising, separated by commas (default: the config's "
        f"context_buckets, and of {DEFAULT_CONTEXTS} those beyond; on cpu the buckets alone)",
    )
    parser.add_argument(
        "--hbm_gib",
        type=float,
        help="GiB of a device that a stage may take (default: the config's budget, else what "
        "programs get of the chip's memory)",
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        help="entries of the vocabulary, for a model without a checkpoint (default: that of the "
        "tokenizer that the run would make)",
    )
    parser.add_argument(
        "--table",
        type=Path,
        help="a throughput table of a run of this model on such chips (JSON, from the folder "
        "throughput in the cache folder that a run measures into): computed speeds are multiplied "
        "by one factor a stage, and what it has of the same work on a mesh at a room stands as it "
        "was measured",
    )
    parser.add_argument(
        "--exact", action="store_true", help="let XLA compile what is chosen, for its bytes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    return parser.parse_args([a for a in arguments if not a.startswith("--config.")]), overrides


def plan_command(arguments: Sequence[str]) -> None:
    """The whole command, from its flags to its last line. Raises ValueError for bad input."""
    flags, overrides = parse_flags(arguments)

    from earl_jax.config_file import load_config_file, make_config
    from earl_jax.measurements import calibrated_by
    from earl_jax.scene import make_scene
    from earl_jax.selector.enough import smallest_hardware
    from earl_jax.selector.hardware import parse_topology
    from earl_jax.selector.schedule import make_schedule
    from earl_jax.selector.schedule_text import (
        hardware_lines,
        hardware_values,
        schedule_lines,
        schedule_values,
        size_words,
    )

    hardware = parse_topology(flags.topology)
    config = make_config(load_config_file(flags.config), overrides)
    contexts = _contexts(flags.contexts, config.rollout.context_buckets, hardware.platform)
    if flags.vocab_size is not None and flags.vocab_size < 1:
        raise ValueError(f"--vocab_size={flags.vocab_size}; give a number of at least 1")
    budget = _budget(flags.hbm_gib, config.selector.budget_bytes_per_device, hardware.usable_bytes)
    scene = make_scene(config, hardware, flags.vocab_size, budget)
    notes: list[str] = []
    if flags.table:
        scene, notes = calibrated_by(flags.table, scene, config)
    rooms = {context: config.rollout.places_for(context) for context in contexts}
    exactly = None
    if flags.exact:
        from earl_jax.compiled import compiler_for

        exactly = compiler_for(scene, config, flags.topology, flags.vocab_size)
    between = _rooms(config.rollout.places_for, contexts)
    # A compiler is asked for what is asked for, and no more.
    schedule = make_schedule(scene, sorted(set(rooms.values())) if exactly else between, exactly)
    broken = next((stop for stop in schedule if not stop.fits), None)
    enough = smallest_hardware(scene, broken.places) if broken else ()
    if flags.json:
        values = hardware_values(scene, exact=flags.exact)
        values |= schedule_values(scene, schedule, rooms)
        values |= {"table_notes": notes} if flags.table else {}
        if broken:
            values["enough"] = {"places": broken.places, "devices": dict(enough)}
        print(json.dumps(values))
        return
    for line in hardware_lines(scene, exact=flags.exact):
        print(line)
    for note in notes:
        print(f"--table={flags.table}: {note}")
    for line in schedule_lines(scene, schedule, rooms):
        print(line)
    if broken:
        print(size_words(broken, enough))


def _contexts(text: str, buckets: Sequence[int], platform: str) -> list[int]:
    """The contexts of the flag, or its default.

    Raises ValueError for what is no rising list of numbers.
    """
    if not text:
        beyond = [c for c in map(int, DEFAULT_CONTEXTS.split(",")) if c > buckets[-1]]
        return [*buckets] if platform == "cpu" else [buckets[-1], *beyond]
    try:
        contexts = [int(part) for part in text.split(",")]
    except ValueError:
        contexts = []
    if not contexts or contexts != sorted(set(contexts)) or contexts[0] < 1:
        raise ValueError(
            f"--contexts={text}: give rising numbers of tokens, separated by commas, as in "
            "--contexts=1024,8192,32768"
        )
    return contexts


def _rooms(places_for: Callable[[int], int], contexts: Sequence[int]) -> list[int]:
    """Every room per episode that a run has on its way through the contexts."""
    rooms = [places_for(contexts[0])]
    while rooms[-1] < contexts[-1]:
        rooms.append(places_for(rooms[-1] + 1))
    return rooms


def _budget(hbm_gib: float | None, setting: int, usable_bytes: int) -> int:
    """Bytes of a device that a stage may take: the flag, else the config's, else the chip's."""
    if hbm_gib is None:
        return setting or usable_bytes
    if not 0 < hbm_gib < math.inf:
        raise ValueError(f"--hbm_gib={hbm_gib}; give GiB of a device's memory, above 0")
    return int(hbm_gib * 2**30)


def main() -> None:
    """The entry point."""
    sys.exit(exit_status(lambda: plan_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
