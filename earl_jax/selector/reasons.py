# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reasons of a choice, and what would do where nothing fits, in words."""

from collections.abc import Sequence

from earl_jax.selector.plan_candidates import Candidate, Candidates
from earl_jax.selector.plans import RolloutPlan, TrainPlan, rollout_size, train_size
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load


class BudgetTooSmall(ValueError):
    """No plan fits the budget; the message says the smallest budget that would do."""


def reason_of(
    candidates: Candidates,
    chosen: Candidate,
    current: RolloutPlan | TrainPlan | None,
    *,
    tokens: int,
    num_bytes: int,
    gain: float | None,
    load: Load | None,
) -> str:
    """Returns why a plan was chosen at a context bucket of `tokens`.

    A device holds `num_bytes` meanwhile. The step is shorter by the fraction `gain` than with the
    plan in use; None where that one cannot stay.
    """
    plan, budget = chosen.plan, candidates.problem.budget_bytes
    about, of = "" if chosen.is_exact else "about ", "" if budget is None else " of "
    facts = (
        f"context {tokens}, {about}{size_words(num_bytes)}{of}{size_words(budget)}/device, "
        f"{chosen.tokens_per_s:,.0f} tokens/s {'observed' if chosen.is_observed else 'computed'}"
    )
    if load is not None:
        facts += f"; longest episode {load.context_tokens_max} tokens"
    if current is None:
        return f"starts on {plan.words()} ({facts})"
    if plan.mesh == current.mesh:
        return f"stays on {plan.words(current)} ({facts})"  # pyright: ignore[reportArgumentType]
    why = _why_left(candidates, current, tokens)
    if gain is not None:
        why = f"step {gain:.0%} shorter"
    return f"{current.mesh} -> {plan.words()} ({why}; {facts})"


def _why_left(candidates: Candidates, plan: RolloutPlan | TrainPlan, tokens: int) -> str:
    """Returns why a plan in use cannot stay."""
    work = candidates.problem.work
    if isinstance(plan, TrainPlan):
        stage, size = "train", train_size(plan, tokens, work.num_rows)
        found: Sequence[Candidate] = candidates.train(tokens)
    else:
        stage, size = "rollout", rollout_size(plan, tokens, work.page_size)
        found = candidates.rollouts(tokens, None, 0.0, offload=plan.offload)
    if failed := candidates.table.failure_of(stage, plan.mesh, size):
        return f"{plan.mesh} {failed}"
    there = [candidate for candidate in found if candidate.plan.mesh == plan.mesh]
    if not there:
        return f"{plan.mesh} is no candidate for context {tokens}"
    # The plan in use, or the least that its mesh could do with.
    same = [candidate for candidate in there if candidate.plan == plan]
    least = min(same or there, key=lambda candidate: candidate.num_bytes)
    if least.num_bytes > candidates.problem.budget:
        return f"context {tokens} needs {size_words(least.num_bytes)}/device on {plan.mesh}"
    return f"{plan.mesh} leaves the other stage too little memory"


def step_too_small(
    candidates: Candidates, max_tokens: int, length: int, residents: Sequence[tuple[int, bool]]
) -> BudgetTooSmall:
    """Returns the error where no pair fits.

    `residents` are the bytes that the trainers which fit leave during a rollout, with whether their
    moments wait in host memory; () where no trainer fits.
    """
    if not residents:
        return too_small(candidates, "training", candidates.train(length), length)
    found = [
        (resident, candidate)
        for resident, offload in residents
        for candidate in candidates.rollouts(max_tokens, 0, 0.0, offload=offload)
    ]
    least, _ = min(found, key=lambda pair: pair[0] + pair[1].num_bytes)
    beside = [candidate for resident, candidate in found if resident == least]
    return too_small(candidates, "a rollout beside the trainer", beside, max_tokens, least)


def too_small(
    candidates: Candidates,
    what: str,
    found: Sequence[Candidate],
    tokens: int,
    resident: int = 0,
) -> BudgetTooSmall:
    """Returns the error where none of these fits beside `resident` bytes."""
    advice = "more devices, or lower config.rollout.num_slots or the model's size"
    possible = [candidate for candidate in found if not candidate.failed]
    if not possible:
        tried = "; ".join(f"{c.plan.words()} {c.failed}" for c in found[:4])
        return BudgetTooSmall(
            f"no mesh for {what} at a context of {tokens} tokens: {tried}. Use devices with more "
            f"memory, {advice}"
        )
    least = min(possible, key=lambda candidate: candidate.num_bytes)
    budget = candidates.problem.budget_bytes or 0
    need, mesh = least.num_bytes + resident, _mesh(least)
    return BudgetTooSmall(
        f"config.selector.budget_bytes_per_device is {budget}, and no mesh for {what} fits it at a "
        f"context of {tokens} tokens; the smallest budget that would do is "
        f"{'' if least.is_exact else 'about '}{need} (mesh {mesh}), {size_words(need - budget)} "
        f"more. Raise the budget, use {advice}"
    )


def _mesh(candidate: Candidate) -> MeshShape:
    return candidate.plan.mesh


def size_words(num_bytes: float | None) -> str:
    """Returns bytes for people, "1.5 GiB" or "20.1 MiB"; "" for None."""
    if num_bytes is None:
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            number = num_bytes / size
            return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
