# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans a run for hardware that is not here: python -m earl_jax.plan --topology=v5e:16x16 ..."""

import argparse
import json
import sys
from collections.abc import Sequence

from earl_jax.config.flags import config_parser, parse_with_overrides
from earl_jax.launch.start import exit_status

_HELP = """\
Prints the meshes that a run would choose for both of its stages as contexts grow, on hardware that
need not be here: bytes per device, expected times, the next best mesh, and what does not fit.

examples:
  python -m earl_jax.plan --topology=h100:1x8 --config.model.preset=qwen2.5-7b
      a published model on eight GPUs: their whole memory, every mesh, bfloat16
  python -m earl_jax.plan --config=configs/X.py --topology=v5e:16x16 --contexts=1024,8192,32768
      a config of yours, as it stands, for these contexts and no others
  python -m earl_jax.plan --topology=h20:16x8 --train_topology=h100:8x8 --prices=1,2.85 ...
      rollouts on one kind of device, training on another, in one datacenter or two (--link_gb)
  python -m earl_jax.plan --config=configs/trail_tiny_cpu.py --topology=cpu:8
      the first run of the README on this laptop, with episodes that fill each context

--config.section.key=value changes one setting, as in training; rollout.num_slots and
rollout.episodes_per_step are the ones to think about first. Episodes are taken to fill the context,
with a chunk read for each turn of rollout.max_turn_tokens, and a run to stay at each. Bytes and
times are computed in seconds from the model's shapes and the chips' data sheets (quick mode). With
--exact XLA compiles what is chosen for the real topology, minutes a program, which needs no chip
but the extra tpu-topology or gpu-topology. Exit status 2 for a mistake in what was given.
"""
DEFAULT_CONTEXTS = "1024,2048,4096,8192,16384,32768,65536,131072"


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the overrides of the config ("section.key=value").

    Raises InputError for a flag that does not exist.
    """
    parser = config_parser("plan", _HELP, None)
    add = parser.add_argument
    names = "v5e:16x16, v5p:4x4x8, tpu7x:2x4x4, v4, v6e; h100:16x8 (hosts x GPUs), gb200:18x4"
    names += ", a100, h200, h800, h20, b200, b300, gb300; cpu:8, cpu:2x4 (hosts x devices)"
    add("--topology", required=True, help=names)
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
    train = "training has this topology of its own, and --topology only plays"
    add("--train_topology", default="", metavar="TOPOLOGY", help=train)
    link = "GB/s between the two (default: all network cards of the smaller)"
    add("--link_gb", type=float, help=link)
    prices = "of a device-hour of both: prints what tokens cost, and with how many hosts the least"
    add("--prices", default="", metavar="ROLLOUT,TRAIN", help=prices)
    add("--exact", action="store_true", help="let XLA compile what is chosen, for its bytes")
    add("--json", action="store_true", help="print one JSON object, with all meshes")
    return parse_with_overrides(parser, arguments)


def plan_command(arguments: Sequence[str]) -> None:
    """Runs the whole command. Raises ValueError for bad input."""
    flags, overrides = parse_flags(arguments)

    from earl_jax.placement.planner import plan_run

    values, lines = plan_run(flags, overrides, DEFAULT_CONTEXTS)
    print(json.dumps(values) if flags.json else "\n".join(lines))


def main() -> None:
    """Runs the command of the console."""
    sys.exit(exit_status(lambda: plan_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
