# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A schedule as plain values for JSON, and these as tables and sentences."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from earl_jax.selector.choose import Candidate
from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.plans import RolloutPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import Stop
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import bytes_text, table_lines

Values = dict[str, Any]
# Programs in bf16 that were compiled for TPUs and H100s, and those within 10 % of computed bytes.
WITHIN, PROGRAMS = 121, 121
# Computed bytes that are so far below the budget are sure to fit.
MARGIN = 0.15
_TRUST = (
    f"~ computed bytes: within 10 % of XLA's for {WITHIN} of {PROGRAMS} programs in bf16, 12 % in "
    "fp32; ? less than 15 % below the budget; * observed speed, the others are a roofline of data "
    "sheets, which tells better which plan is faster than by how much (benchmarks/plan.md)"
)
_KINDS = {
    "train": ("weights", "optimizer", "gradients", "activations"),
    "rollout": ("weights", "cache", "activations", "trainer"),
}


def schedule_values(problem: Problem, schedule: Sequence[Stop], *, exact: bool) -> Values:
    """Returns what is planned for, each stage at each context with all meshes, and the schedule."""
    hardware, sizes, work = problem.hardware, problem.sizes, problem.work
    parameters = sizes.frozen or sizes.trained
    error = 0.10 if sizes.compute_bytes < 4 else 0.15
    return {
        "topology": hardware.name,
        "devices": hardware.num_devices,
        "hosts": hardware.num_hosts,
        "processes": problem.num_processes,
        "memory_bytes_per_device": hardware.memory_bytes,
        "budget_bytes_per_device": problem.budget_bytes,
        "parameters": device_bytes(parameters, MeshShape()) // parameters[0].itemsize,
        "vocab_size": sizes.vocab_size,
        "num_slots": work.num_slots,
        "episodes_per_step": work.num_rows,
        "page_size": work.page_size,
        "mode": "exact" if exact else "quick",
        "expected_error": {"bytes": error, "words": _TRUST},
        "contexts": [
            {"context": stop.context}
            | ({"train": _stage(problem, stop, stop.trains)} if stop.trains else {})
            | ({"rollout": _stage(problem, stop, stop.rollouts)} if stop.rollouts else {})
            for stop in schedule
        ],
        "schedule": [
            {"context": stop.context, "fits": stop.decision is not None}
            | {f"{stage}_mesh": str(plan.mesh) for stage, plan in stop.chosen.items()}
            | ({"step_s": stop.decision.seconds} if stop.decision else {"why": stop.why})
            for stop in schedule
        ],
    }


def _stage(problem: Problem, stop: Stop, candidates: Sequence[Candidate]) -> Values:
    """Returns the mesh that is chosen, and all in their order; or by how much none fits."""
    meshes = [_candidate(problem, stop, candidate) for candidate in candidates]
    if stop.decision is not None:
        return {"mesh": meshes[0]["mesh"], "meshes": meshes}
    least = min(mesh["bytes_per_device"] for mesh in meshes)
    return {"meshes": meshes, "shortfall_bytes": max(0, int(least - problem.budget))}


def _candidate(problem: Problem, stop: Stop, candidate: Candidate) -> Values:
    """Returns a mesh as it would be used; `plan` says how in words."""
    plan, left = candidate.plan, 0
    values: Values = {**plan._asdict(), "mesh": str(plan.mesh)}
    if isinstance(plan, RolloutPlan):
        kinds = problem.round_footprint(plan, stop.context)
        rows = min(
            plan.num_slots // plan.mesh.data, plan.pages // problem.least_pages(stop.context)
        )
        at_once = values["episodes_at_once"] = plan.mesh.data * rows
        words = f"{plan.num_slots} slots" + f", {at_once} at once" * (at_once < plan.num_slots)
        words += ", moments in host memory" * plan.offload
        values["token_s"] = plan.num_slots / candidate.tokens_per_s
        beside = stop.resident
    else:
        kinds = problem.update_footprint(plan, stop.context)
        words = f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"
        words += ", remat" * plan.remat
        values["update_s"] = problem.work.num_rows * stop.context / candidate.tokens_per_s
        left = problem.trainer_bytes(plan.mesh, problem.can_offload) + stop.least_rollout
        beside = 0
    kinds = dataclasses.replace(kinds.with_total(candidate.num_bytes), trainer=beside)
    fits = not candidate.failed and kinds.total <= problem.budget
    return values | {
        "plan": words,
        "fits": fits,
        "leaves_room": fits and left <= problem.budget,
        "safe": is_safe(kinds.total, problem.budget, is_exact=candidate.is_exact),
        "exact": candidate.is_exact,
        "observed": candidate.is_observed,
        "failed": candidate.failed,
        "bytes_per_device": kinds.total,
        "bytes": kinds.as_dict(),
        "tokens_per_s": candidate.tokens_per_s,
    }


def is_safe(num_bytes: float, budget: float, *, is_exact: bool) -> bool:
    """Whether a program fits even if it takes more than was computed by what was ever seen."""
    return num_bytes * (1.0 if is_exact else 1.0 + MARGIN) <= budget


def schedule_lines(values: Values) -> Iterator[str]:
    """Returns `schedule_values` for people: what is planned for, both stages, and the schedule."""
    budget, memory = (values[f"{kind}_bytes_per_device"] for kind in ("budget", "memory"))
    yield (
        f"{values['topology']}: {values['devices']:,} devices, {values['processes']:,} "
        f"process{'es' * (values['processes'] > 1)}; budget {bytes_text(budget)} of the "
        f"{bytes_text(memory)} of a device"
    )
    yield (
        f"model: {values['parameters'] / 1e9:,.3g} billion parameters, vocabulary "
        f"{values['vocab_size']:,}; {values['episodes_per_step']} episodes a step in "
        f"{values['num_slots']} slots"
    )
    yield f"{values['mode']} mode: {_TRUST}"
    for stage, title, speed in (
        ("train", "training: an update on all episodes of a step; bytes per device", "s/update"),
        ("rollout", "rollout: episodes at the end of the context; bytes per device", "ms/token"),
    ):
        yield f"\n{title}"
        found = [c for c in values["contexts"] if "mesh" in c.get(stage, {})]
        header = ["context", "mesh", *_KINDS[stage], "together", "of budget", speed, "tokens/s"]
        if found:
            rows = [_row(budget, context, stage) for context in found]
            yield from table_lines([*header, "plan"], rows)
        for context in found:
            yield f"  {context['context']:,}: {_others_words(budget, context[stage]['meshes'])}"
    yield "\nschedule:"
    yield from _changes(values)


def _row(budget: int, context: Values, stage: str) -> list[str]:
    chosen = context[stage]["meshes"][0]
    total = chosen["bytes_per_device"]
    seconds = chosen["update_s"] if stage == "train" else 1000 * chosen["token_s"]
    return [
        f"{context['context']:,}",
        chosen["mesh"],
        *(bytes_text(chosen["bytes"].get(kind, 0)) for kind in _KINDS[stage]),
        bytes_text(total) + " ~" * (not chosen["exact"]),
        f"{total / budget:.0%}{'' if chosen['safe'] else ' ?'}",
        f"{seconds:,.2f}",
        f"{chosen['tokens_per_s']:,.0f}{' *' * chosen['observed']}",
        chosen["plan"],
    ]


def _others_words(budget: int, meshes: Sequence[Values]) -> str:
    """The next best mesh, and what does not fit."""
    words, second = "no other mesh fits", next((m for m in meshes[1:] if m["leaves_room"]), None)
    if second:
        gain = second["tokens_per_s"] / meshes[0]["tokens_per_s"] - 1
        words = f"next best {second['mesh']}, {second['plan']} ({gain:+.0%} tokens/s, "
        words += f"{second['bytes_per_device'] / budget:.0%} of budget)"
    if lost := [mesh for mesh in meshes if not mesh["fits"]]:
        over = bytes_text(max(0, lost[0]["bytes_per_device"] - budget))
        words += f"; {len(lost)} do not fit, {lost[0]['mesh']} {lost[0]['failed'] or f'by {over}'}"
    return words


def _changes(values: Values) -> Iterator[str]:
    """A line for each context: the plans that are other than before, and what a step takes."""
    before: Values = {}
    for stop, context in zip(values["schedule"], values["contexts"], strict=True):
        if not stop["fits"]:
            yield f"  {stop['context']:,} tokens do not fit: {stop['why']}"
            continue
        changes = []
        for stage in _KINDS:
            mesh, was = context[stage]["meshes"][0], before.get(stage, {})
            if (mesh["mesh"], mesh["plan"]) != (was.get("mesh"), was.get("plan")):
                moves = was and was["mesh"] != mesh["mesh"]
                arrow = f"{was['mesh']} -> " if moves else ""
                changes.append(f"{stage} {arrow}{mesh['mesh']} ({mesh['plan']})")
            before[stage] = mesh
        where = f"beyond {before['tokens']:,} tokens" if "tokens" in before else "from the start"
        before["tokens"] = stop["context"]
        took = f"a step of {stop['context']:,} tokens takes {stop['step_s']:,.2f} s"
        yield f"  {where}: {'; '.join([*changes, took])}"
