# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest hardware that would do for a model at a context length. Pure."""

import dataclasses

from earl_jax.selector.hardware import hardware_of
from earl_jax.selector.plans import RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.sharding.topology import CHIPS, Topology

# No larger number of chips is tried.
MOST_DEVICES = 8192


def smallest_hardware(problem: Problem, max_tokens: int) -> list[tuple[str, int]]:
    """Returns how many chips of each kind would hold both stages; the problem's kind first.

    Powers of two up to MOST_DEVICES, in hosts of up to as many devices as the kind has. Any mesh
    that cuts the model evenly counts, in whatever way it is used.
    """
    chips = [name for name in CHIPS if name != problem.hardware.chip]
    kinds = [hardware_of(Topology(chip=CHIPS[c], grid=(1,) * CHIPS[c].axes)) for c in chips]
    own = problem.hardware
    found = []
    for kind in [own, *kinds]:
        budget = problem.budget_bytes if kind is own else kind.usable_bytes
        number = 1
        while number <= MOST_DEVICES:
            other = dataclasses.replace(
                problem,
                hardware=kind.with_devices(number),
                budget_bytes=budget,
                rollout_meshes_named=(),
                train_meshes_named=(),
                num_rollout=0,
                num_processes=1,
            )
            if holds(other, max_tokens):
                found.append((kind.chip, number))
                break
            number *= 2
    return found


def enough_words(problem: Problem, max_tokens: int) -> str:
    """Returns `smallest_hardware` as a sentence; "" where no number of known chips would do."""
    if problem.num_rollout:
        return ""
    words = ", ".join(f"{number} {chip}" for chip, number in smallest_hardware(problem, max_tokens))
    return words and (
        f"By computed bytes, at a context of {max_tokens} tokens, the smallest hardware that would "
        f"do (powers of two): {words}"
    )


def holds(problem: Problem, max_tokens: int) -> bool:
    """Whether some mesh holds each stage with the least that it can do with."""
    try:
        trainers = problem.train_meshes_for(max_tokens)
        players = problem.rollout_meshes_for(max_tokens)
    except ValueError:
        # So many devices cut the model, or the rows, unevenly in every way.
        return False
    budget, residents = problem.budget, []
    for mesh in trainers:
        rows = problem.work.num_rows // (mesh.data * mesh.fsdp * mesh.expert)
        # A row at a time takes least, but for the sum of gradients that one micro-batch has not.
        plans = [TrainPlan(mesh, n, True) for n in {rows, problem.work.micro_batches} if n]
        if min(problem.update_footprint(plan, max_tokens).total for plan in plans) <= budget:
            residents.append(problem.trainer_bytes(mesh, problem.can_offload))
    if not residents:
        return False
    pages = problem.least_pages(max_tokens)
    return any(
        problem.round_footprint(
            RolloutPlan(mesh, problem.slot_numbers(mesh)[-1], pages), max_tokens
        ).total
        <= budget - min(residents)
        for mesh in players
    )
