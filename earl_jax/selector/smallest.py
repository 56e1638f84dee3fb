# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest hardware that would do for a model at a context length. Pure."""

import dataclasses

from earl_jax.selector.hardware import hardware_of
from earl_jax.selector.plans import RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import CHIPS, make_topology

# The largest number of chips that is tried.
MOST_DEVICES = 8192


def smallest_hardware(problem: Problem, max_tokens: int) -> list[tuple[str, int]]:
    """Returns how many chips of each kind would hold both stages; the problem's kind first.

    Numbers are powers of two up to MOST_DEVICES, in full hosts of the kind where there are several,
    with a process each. Meshes that the config names do not count.
    """
    own, found = problem.hardware, []
    kinds = {name: hardware_of(make_topology(chip.example)) for name, chip in CHIPS.items()}
    for kind in {own.chip: own, **kinds}.values():
        budget = problem.budget_bytes if kind.chip == own.chip else kind.usable_bytes
        for number in (2**power for power in range(MOST_DEVICES.bit_length())):
            hardware = kind.with_devices(number)
            other = dataclasses.replace(
                problem,
                hardware=hardware,
                budget_bytes=budget,
                rollout_meshes_named=(),
                train_meshes_named=(),
                num_rollout=0,
                num_processes=1 if kind.platform == "cpu" else hardware.num_hosts,
            )
            if fits(other, max_tokens):
                found.append((kind.chip, number))
                break
    return found


def smallest_words(found: list[tuple[str, int]], max_tokens: int) -> str:
    """Returns the smallest hardware as a sentence; "" where no number of known chips would do."""
    words = ", ".join(f"{number} {chip}" for chip, number in found)
    return words and (
        f"By computed bytes, at a context of {max_tokens} tokens, the smallest hardware that would "
        f"do (powers of two): {words}"
    )


def fits(problem: Problem, max_tokens: int) -> bool:
    """Returns True if some mesh holds each stage with the least that it can do with.

    As `Chooser.step` without speeds, whose computation for thousands of devices takes seconds.
    """

    def holds(mesh: MeshShape) -> bool:
        # A row at a time takes least, but for the sum of gradients that one micro-batch has not.
        rows = problem.work.num_rows // (mesh.data * mesh.fsdp * mesh.expert)
        plans = [TrainPlan(mesh, n, True) for n in {rows, problem.work.micro_batches} if n]
        return any(problem.update_footprint(p, max_tokens).total <= problem.budget for p in plans)

    try:
        trainers = filter(holds, problem.meshes("train", max_tokens))
        residents = [problem.trainer_bytes(mesh, problem.can_offload) for mesh in trainers]
        free, pages = problem.budget - min(residents), problem.least_pages(max_tokens)
        fewest = [(m, problem.slot_numbers(m)[-1]) for m in problem.meshes("rollout", max_tokens)]
    except ValueError:
        # No trainer fits; or so many devices cut the model, or the rows, unevenly in every way.
        return False
    plans = [RolloutPlan(mesh, slots, pages) for mesh, slots in fewest]
    return any(problem.round_footprint(plan, max_tokens).total <= free for plan in plans)
