# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The plans of both stages at rising contexts, as values and as text; the smallest hardware. Pure.

At each context plans are chosen as in a run that stays there; they carry over to the next.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from earl_jax.selector.candidates import Candidate, Candidates, P
from earl_jax.selector.choose import BudgetTooSmall, Decision, choose_plans, full_step, with_split
from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.hardware import hardware_of
from earl_jax.selector.plans import Plan, Plans, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.reasons import percent
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import bytes_text, table_lines
from earl_jax.sharding.topology import CHIPS, make_topology

# The largest number of chips that is tried.
MOST_DEVICES = 8192
# Compiles a plan's program at a context; returns the table with XLA's bytes of it.
Compile = Callable[[ThroughputTable, Plan, int], ThroughputTable]
Values = dict[str, Any]
# Programs in bf16 that were compiled for TPUs and H100s, those within 10 % of computed bytes, and
# the largest error (benchmarks/plan.md).
WITHIN, PROGRAMS, WORST = 172, 173, 0.131
# Computed bytes fit surely where as large a share of them would fit too.
MARGIN = 0.2
_TRUST = (
    f"~ computed bytes: within 10 % of XLA's for {WITHIN} of {PROGRAMS} programs in bf16 and off "
    f"by {WORST:.0%} at most, 12 % in fp32; ? {MARGIN:.0%} more would not fit; * observed speed, "
    "the others are a roofline of data sheets, which tells better which plan is faster than by how "
    "much (benchmarks/plan.md)"
)
_KINDS = {
    "train": ("weights", "optimizer", "gradients", "activations"),
    "rollout": ("weights", "cache", "activations", "trainer"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """One context of a schedule.

    `decision` is None where nothing fits; `why` is the error then. `trains` and `rollouts` have the
    best plan of each mesh: the chosen one, then those that fit by speed, then the others by bytes.
    Rollouts are beside `resident` bytes of the trainer that is chosen, or of the smallest.
    """

    context: int
    decision: Decision | None
    why: str
    reasons: Sequence[str]
    trains: tuple[Candidate[TrainPlan], ...]
    rollouts: tuple[Candidate[RolloutPlan], ...]
    resident: int


def make_schedule(
    problem: Problem,
    table: ThroughputTable,
    contexts: Iterable[int],
    compiled: Compile | None = None,
) -> list[Stop]:
    """Returns the decision at each of rising contexts.

    With `compiled` the chosen plans are compiled, and chosen again by the table that comes back,
    until the bytes of both are XLA's.
    """
    plans, stops = Plans(), []
    for context in contexts:
        while True:
            stop = _stop(Candidates(problem, table), context, plans)
            choices = stop.decision.choices if compiled and stop.decision else []
            if compiled is None or all(choice.is_exact for choice in choices):
                break
            plan = next(choice.plan for choice in choices if not choice.is_exact)
            table = compiled(table, plan, context)
        stops.append(stop)
        plans = stop.decision.plans if stop.decision else plans
    return stops


def _stop(candidates: Candidates, context: int, plans: Plans) -> Stop:
    problem, decision, why, reasons, seen = candidates.problem, None, "", dict[str, str](), set()
    try:
        # Until a run would stay there: one switch may change what others cost.
        while plans not in seen:
            seen.add(plans)
            decision = choose_plans(candidates, full_step(problem, context), plans)
            # The last reason would be that a plan stays.
            for choice in decision.choices:
                if choice.switched or choice.stage not in reasons:
                    reasons[choice.stage] = str(choice)
            plans = decision.plans
    except BudgetTooSmall as error:
        decision, why, plans = None, str(error), Plans()
    offload = plans.rollout.offload if plans.rollout else problem.can_offload
    split = decision.num_rollout if decision else problem.num_rollout
    candidates = with_split(candidates, split)
    trains = candidates.train(context)
    beside = [c.plan for c in trains if c.fits(problem.budget)]
    beside = [plans.train] if plans.train else beside
    resident = min(
        (candidates.resident_bytes(plan, offload, context) for plan in beside), default=0
    )
    free = problem.budget - resident
    rollouts = []
    if beside and problem.plays:
        rollouts = candidates.rollouts(context, None, free, offload=offload)
    return Stop(
        context=context,
        decision=decision,
        why=why,
        reasons=tuple(reasons.values()),
        trains=_by_mesh(trains, plans.train, problem.budget),
        rollouts=_by_mesh(rollouts, plans.rollout, free),
        resident=resident,
    )


def _by_mesh(
    candidates: Sequence[Candidate[P]], chosen: P | None, free: float
) -> tuple[Candidate[P], ...]:
    """Returns the best candidate of each mesh: the chosen one, then the fastest, the smallest."""

    def rank(candidate: Candidate[P]) -> tuple[bool, bool, float]:
        can = candidate.fits(free)
        size = candidate.tokens_per_s if can else -candidate.num_bytes
        return candidate.plan == chosen, can, size

    best: dict[MeshShape, Candidate[P]] = {}
    for candidate in sorted(candidates, key=rank, reverse=True):
        best.setdefault(candidate.plan.mesh, candidate)
    return tuple(best.values())


def schedule_values(problem: Problem, schedule: Sequence[Stop], *, exact: bool) -> Values:
    """Returns the problem's numbers, all meshes of each stage at each context, and the schedule."""
    hardware, sizes, work = problem.hardware, problem.sizes, problem.work
    parameters = sizes.frozen or sizes.trained
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
        "plays": problem.plays,
        "page_size": work.page_size,
        "mode": "exact" if exact else "quick",
        "expected_error": {"bytes": 0.10 if sizes.compute_bytes < 4 else 0.15, "words": _TRUST},
        "contexts": [
            {"context": stop.context}
            | ({"train": _stage(problem, stop, stop.trains)} if stop.trains else {})
            | ({"rollout": _stage(problem, stop, stop.rollouts)} if stop.rollouts else {})
            for stop in schedule
        ],
        "schedule": [_stop_values(stop) for stop in schedule],
    }


def _stop_values(stop: Stop) -> Values:
    """Returns the chosen meshes, seconds and reasons; or why nothing fits."""
    values: Values = {"context": stop.context, "fits": stop.decision is not None}
    if stop.decision is None:
        return values | {"why": stop.why}
    meshes = {f"{choice.stage}_mesh": str(choice.plan.mesh) for choice in stop.decision.choices}
    words = "; ".join(stop.reasons)
    values |= {"step_s": stop.decision.seconds, "decision": words}
    splits = [_split_values(decision) for decision in stop.decision.splits]
    return values | meshes | ({"splits": splits} if splits else {})


def _split_values(decision: Decision) -> Values:
    rollout_s, train_s = (choice.seconds for choice in decision.choices)
    values = {"num_rollout": decision.num_rollout, "rollout_s": rollout_s, "train_s": train_s}
    # Both stages wait for new weights.
    values["publish_s"] = decision.seconds - max(rollout_s, train_s)
    return values | {"move_s": decision.cost_s - decision.seconds, "step_s": decision.seconds}


def _stage(problem: Problem, stop: Stop, candidates: Sequence[Candidate]) -> Values:
    """Returns all meshes in their order, and the chosen one, the first, if any."""
    meshes = [_candidate(problem, stop, candidate) for candidate in candidates]
    return {"meshes": meshes} | ({"mesh": meshes[0]["mesh"]} if stop.decision else {})


def _candidate(problem: Problem, stop: Stop, candidate: Candidate) -> Values:
    """Returns a candidate as values; `plan` is its use of the mesh in words."""
    plan, beside, work = candidate.plan, 0, problem.work
    values: Values = {**plan._asdict(), "mesh": str(plan.mesh)}
    if isinstance(plan, RolloutPlan):
        kinds, beside = problem.round_footprint(plan, stop.context), stop.resident
        data, fit = plan.mesh.data, plan.pages // problem.least_pages(stop.context)
        at_once = values["episodes_at_once"] = data * min(plan.num_slots // data, fit)
        words = f"{plan.num_slots} slots" + f", {at_once} at once" * (at_once < plan.num_slots)
        words += ", moments in host memory" * plan.offload
        words += ", one engine over all processes" * problem.spans(plan.mesh)
        values["token_s"] = plan.num_slots / candidate.tokens_per_s
    else:
        kinds = problem.update_footprint(plan, stop.context)
        words = plan.use
        tokens = work.num_batches * work.num_rows * stop.context
        values["update_s"] = tokens / candidate.tokens_per_s
    if candidate.is_exact:
        # Resident bytes stay; the others are temporaries of the program.
        resident = kinds.weights + kinds.optimizer + kinds.cache + kinds.trainer
        working = max(0, candidate.num_bytes - resident)
        kinds = dataclasses.replace(kinds, gradients=0, activations=working)
    if isinstance(plan, TrainPlan):
        kinds = dataclasses.replace(kinds, optimizer=kinds.optimizer + kinds.trainer)
    kinds = dataclasses.replace(kinds, trainer=beside)
    return values | {
        "plan": words,
        "fits": candidate.fits(problem.budget - beside),
        "safe": is_safe(kinds.total, problem.budget, is_exact=candidate.is_exact),
        "exact": candidate.is_exact,
        "observed": candidate.num_speeds > 0,
        "failed": candidate.failed,
        "bytes_per_device": kinds.total,
        "bytes": {kind: size for kind, size in dataclasses.asdict(kinds).items() if size},
        "tokens_per_s": candidate.tokens_per_s,
    }


def is_safe(num_bytes: float, budget: float, *, is_exact: bool) -> bool:
    """Returns True if a program fits with MARGIN above its computed bytes, more than ever seen."""
    return num_bytes * (1.0 if is_exact else 1.0 + MARGIN) <= budget


def schedule_lines(values: Values) -> Iterator[str]:
    """Yields `schedule_values` for people: the problem, both stages, and the schedule."""
    budget, memory = (values[f"{kind}_bytes_per_device"] for kind in ("budget", "memory"))
    yield (
        f"{values['topology']}: {values['devices']:,} device{'s' * (values['devices'] > 1)}, "
        f"{values['processes']:,} "
        f"process{'es' * (values['processes'] > 1)}; budget {bytes_text(budget)} of the "
        f"{bytes_text(memory)} of a device"
    )
    rows = f"{values['episodes_per_step']} episodes a step in {values['num_slots']} slots"
    if not values["plays"]:
        rows = f"{values['episodes_per_step']} conversations a step, and nothing is played"
    size = f"{values['parameters'] / 1e9:,.3g} billion"
    if values["parameters"] < 1e7:
        size = f"{values['parameters']:,}"
    yield (
        f"model: {size} parameters, vocabulary "
        f"{values['vocab_size']:,}; {rows}\n{values['mode']} mode: {_TRUST}"
    )
    stages = (
        ("train", "training: an update on all episodes of a step; bytes per device", "s/update"),
        ("rollout", "rollout: episodes at the end of the context; bytes per device", "ms/token"),
    )
    for stage, title, speed in stages[: 1 + values["plays"]]:
        yield f"\n{title}"
        found = [c for c in values["contexts"] if "mesh" in c.get(stage, {})]
        header = ["context", "mesh", *_KINDS[stage], "together", "of budget", speed, "tokens/s"]
        if found:
            yield from table_lines([*header, "plan"], [_row(budget, c, stage) for c in found])
        for context in found:
            yield f"  {context['context']:,}: {_others_words(budget, context[stage]['meshes'])}"
    yield "\nschedule:"
    for fits, found in itertools.groupby(values["schedule"], lambda stop: stop["fits"]):
        stops = list(found)
        if not fits:
            yield unfit_words([stop["context"] for stop in stops], stops[0]["why"])
            continue
        for stop in stops:
            form = "  {context:,} tokens: a step takes {step_s:,.2f} s; {decision}"
            yield form.format_map(stop)
            if "splits" in stop:
                yield f"    {_split_words(stop['splits'])}"


def unfit_words(contexts: Sequence[int], why: str) -> str:
    """Returns the line about contexts in a row that do not fit; `why` is of the first."""
    last = f" to {contexts[-1]:,}" if contexts[1:] else ""
    return f"  {contexts[0]:,}{last} tokens do not fit: {why}"


def _split_words(splits: Sequence[Values]) -> str:
    """Returns the split of the devices that is chosen, and the others by their steps."""
    form = "{num_rollout} play: rollout {rollout_s:,.2f} s, training {train_s:,.2f} s, "
    form += "new weights {publish_s:,.2f} s"
    words = f"split: {form.format_map(splits[0])}"
    others = [f"{each['num_rollout']} play, {each['step_s']:,.2f} s a step" for each in splits[1:]]
    return words + (f" (others: {'; '.join(others[:4])})" if others else "; no other fits")


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
    """Returns the next best mesh, which may be faster by itself, and those that do not fit."""
    words = "no other mesh fits" if meshes[1:] else "there is no other mesh"
    second = next((m for m in meshes[1:] if m["fits"]), None)
    if second:
        gain = second["tokens_per_s"] / meshes[0]["tokens_per_s"] - 1
        is_faster = gain >= 0.005
        words = "faster by itself" if is_faster else "next best"
        words += f" {second['mesh']}, {second['plan']} ({percent(gain)} tokens/s, "
        words += f"{second['bytes_per_device'] / budget:.0%} of budget"
        words += f"{'; the step would gain too little' * is_faster})"
    if lost := [mesh for mesh in meshes if not mesh["fits"]]:
        over = bytes_text(max(0, lost[0]["bytes_per_device"] - budget))
        fit = "does not fit" if len(lost) == 1 else "do not fit"
        words += f"; {len(lost)} {fit}, {lost[0]['mesh']} {lost[0]['failed'] or f'by {over}'}"
    return words


def smallest_hardware(problem: Problem, max_tokens: int) -> list[tuple[str, int]]:
    """Returns how many chips of each kind would hold all stages; the problem's kind first.

    Numbers are powers of two up to MOST_DEVICES, with a process a host.
    """
    own, found = problem.hardware, []
    kinds = {name: hardware_of(make_topology(chip.example)) for name, chip in CHIPS.items()}
    for kind in {own.chip: own, **kinds}.values():
        budget = problem.budget_bytes if kind.chip == own.chip else kind.usable_bytes
        each = CHIPS[kind.chip].devices if kind.chip in CHIPS else 1  # of a chip
        for number in (2**power for power in range(MOST_DEVICES.bit_length())):
            hardware = kind.with_devices(each * number)
            num_processes = 1 if kind.platform == "cpu" else hardware.num_hosts
            other = dataclasses.replace(
                problem,
                hardware=hardware,
                budget_bytes=budget,
                rollout_meshes_named=(),
                train_meshes_named=(),
                num_rollout=0,
                splits=(),
                num_processes=num_processes,
                num_players=num_processes,
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
    """Returns True if plans of all stages fit at this context, by computed bytes."""
    try:
        choose_plans(Candidates(problem), full_step(problem, max_tokens), Plans())
    except InputError:
        # Nothing fits; or so many devices cut the model, or the rows, unevenly in every way.
        return False
    return True
