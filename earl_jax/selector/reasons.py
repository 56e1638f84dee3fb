# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reasons of a choice in words, and the error where nothing fits."""

from collections.abc import Sequence

from earl_jax.selector.candidates import Candidate, Candidates
from earl_jax.selector.plans import Plan
from earl_jax.selector.table import key_of
from earl_jax.settings.errors import InputError
from earl_jax.sharding.plan_text import bytes_text


class BudgetTooSmall(InputError):
    """Raised where no plan fits the budget; the message names the smallest that would."""


def reason_of(
    candidates: Candidates,
    chosen: Candidate,
    current: Plan | None,
    num_bytes: int,
    stays: Candidate | None,
    gain: float,
) -> str:
    """Returns why a plan was chosen; a device holds `num_bytes` meanwhile.

    `stays` is the stage's candidate where as much as can stays of the plans in use, and `gain` the
    share by which the stage does more a second than so.
    """
    plan, tokens, budget = chosen.plan, chosen.tokens, candidates.problem.budget_bytes
    size = f"{'' if chosen.is_exact else 'about '}{bytes_text(num_bytes)}/device"
    size += "" if budget is None else f", budget {bytes_text(budget)}"
    if current is None or plan.mesh == current.mesh:
        verb = "starts" if current is None else "stays"
        speed = f"{chosen.tokens_per_s:,.0f} tokens/s"
        speed += " observed" if chosen.num_speeds and not chosen.is_trial else " computed"
        return f"{verb} on {plan.words(current)} (context {tokens}, {size}; {speed})"
    if stays is None or stays.plan.mesh != current.mesh:
        why = _why_left(candidates, current, tokens, least=True)
        return f"{current.mesh} -> {plan.words()} ({why})"
    why = f"context {tokens}, {size}"
    if key_of(stays.plan, tokens) != key_of(current, tokens):
        why = _why_left(candidates, current, tokens, least=False)
    tried = "was slow, tried: at best " if chosen.num_speeds else "never ran, tried: at best "
    tried = tried if chosen.is_trial else ""
    instead = stays.plan.words(current)
    against = "" if instead == str(current.mesh) else f" against {instead}"
    return f"{current.mesh} -> {plan.words()} ({why}; {tried}{percent(gain)} tokens/s{against})"


def _why_left(candidates: Candidates, plan: Plan, tokens: int, *, least: bool) -> str:
    """Returns why a plan in use cannot stay as it is; with `least` in no way on its mesh."""
    problem, found = candidates.problem, candidates.in_use(plan, tokens, least=least)
    if failed := candidates.table.failure_of(problem.failure(plan, tokens)):
        return f"{plan.mesh} {failed}"
    if found is None:
        return f"{plan.mesh} is no candidate for context {tokens}"
    if found.num_bytes + found.margin > problem.budget:
        # Computed bytes may be too few: a plan that is left for that may need so many.
        is_sure, need = found.num_bytes > problem.budget, found.num_bytes
        verb, need = ("needs", need) if is_sure else ("may need", need + found.margin)
        budget = bytes_text(int(problem.budget))
        return f"context {tokens} {verb} {bytes_text(need)}/device, budget {budget}"
    return f"{plan.mesh} does not fit beside the other stage at context {tokens}"


def step_too_small(
    candidates: Candidates, max_tokens: int, length: int, residents: Sequence[tuple[int, bool]]
) -> BudgetTooSmall:
    """Returns the error where no rollout fits beside one of `residents`; () if no trainer fits."""
    if not residents:
        return too_small(candidates, "training", candidates.train(length), length)
    resident, offload = min(residents)
    found = candidates.rollouts(max_tokens, 0, 0.0, offload=offload)
    return too_small(candidates, "a rollout beside the trainer", found, max_tokens, resident)


def too_small(
    candidates: Candidates, what: str, found: Sequence[Candidate], tokens: int, resident: int = 0
) -> BudgetTooSmall:
    """Returns the error where none of these fits beside `resident` bytes."""
    slots = "config.rollout.num_slots or " if candidates.problem.plays else ""
    advice = f"more devices, or lower {slots}the model's size"
    possible = [candidate for candidate in found if not candidate.failed]
    if not possible:
        tried = "; ".join(f"{c.plan.words()} {c.failed}" for c in found[:4])
        return BudgetTooSmall(
            f"no mesh for {what} at a context of {tokens} tokens: {tried}. Use devices with more "
            f"memory, {advice}"
        )
    least = min(possible, key=lambda candidate: candidate.num_bytes)
    budget, need = candidates.problem.budget_bytes or 0, least.num_bytes + resident
    return BudgetTooSmall(
        f"config.selector.budget_bytes_per_device is {budget} ({bytes_text(budget)}), and no mesh "
        f"for {what} fits it at a context of {tokens} tokens; the smallest budget that would do is "
        f"{'' if least.is_exact else 'about '}{need} ({bytes_text(need)}, mesh {least.plan.mesh}). "
        f"Raise the budget, use {advice}"
    )


def percent(fraction: float) -> str:
    """Returns a change for people, "+12 %"."""
    return f"{100 * fraction:+.0f} %"
