# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The plans of both stages at rising contexts, on hardware that need not be here. Pure.

At each context `Chooser.step` is asked, as in a run that is there for longer than a window of
steps; the plans in use carry over to the next.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from earl_jax.selector.choose import BudgetTooSmall, Candidate, Chooser, Decision, P, Step
from earl_jax.selector.plans import Plan, Plans, RolloutPlan, TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import MeshShape

# Compiles a plan's program at a context; returns the table with what XLA says of it.
Compile = Callable[[ThroughputTable, Plan, int], ThroughputTable]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """One context of a schedule.

    `decision` is None where nothing fits, which `why` says. `trains` and `rollouts` have each mesh
    once, in its best way: what is chosen, then what fits by speed, then the others by bytes.
    Rollouts are beside `resident` bytes of the trainer that is chosen, or of the one that leaves
    most memory; the smallest by itself takes `least_rollout` bytes.
    """

    context: int
    decision: Decision | None
    why: str
    trains: tuple[Candidate[TrainPlan], ...]
    rollouts: tuple[Candidate[RolloutPlan], ...]
    resident: int
    least_rollout: int

    @property
    def chosen(self) -> dict[str, Plan]:
        """The plans that are chosen, by stage; {} where nothing fits."""
        return {c.stage: c.plan for c in self.decision.choices} if self.decision else {}


def make_schedule(
    problem: Problem,
    table: ThroughputTable,
    contexts: Iterable[int],
    compiled: Compile | None = None,
) -> list[Stop]:
    """Returns what is chosen at each of rising contexts.

    With `compiled`, what is chosen is compiled, and chosen again by the table that comes back,
    until the bytes of both stages' plans are XLA's.
    """
    plans, stops = Plans(), []
    for context in contexts:
        while True:
            stop = _stop(Chooser(problem, table), context, plans)
            choices = stop.decision.choices if stop.decision else []
            computed = [choice.plan for choice in choices if not choice.is_exact]
            if compiled is None or not computed:
                break
            table = compiled(table, computed[0], context)
        stops.append(stop)
        plans = plans_of(stop.decision) if stop.decision else plans
    return stops


def full_step(problem: Problem, context: int) -> Step:
    """Returns a step whose episodes all fill `context` with sampled tokens."""
    return Step(
        max_tokens=context,
        length=context,
        cache_tokens=None,
        rollout_tokens=problem.work.num_rows * context,
        lasts=problem.horizon_steps,
    )


def settled(chooser: Chooser, context: int, plans: Plans) -> Decision:
    """Returns the decision that a run stays with: one switch may change what others cost.

    Raises:
        BudgetTooSmall: no plans fit.
    """
    step = full_step(chooser.problem, context)
    seen: set[Plans] = set()
    while True:
        decision = chooser.step(step, plans)
        plans = plans_of(decision)
        if plans in seen:
            return decision
        seen.add(plans)


def plans_of(decision: Decision | None) -> Plans:
    """Returns the plans of a decision for both stages; None for none."""
    if decision is None or decision.rollout is None or decision.train is None:
        return Plans()
    return Plans(decision.rollout.plan, decision.train.plan)


def _stop(chooser: Chooser, context: int, plans: Plans) -> Stop:
    problem, decision, why = chooser.problem, None, ""
    try:
        decision = settled(chooser, context, plans)
    except BudgetTooSmall as error:
        why = str(error)
    plans = plans_of(decision)
    offload = plans.rollout.offload if plans.rollout else problem.can_offload
    trains = chooser.candidates.train(context)
    meshes = [c.plan.mesh for c in trains if not c.failed and c.num_bytes <= problem.budget]
    meshes = [plans.train.mesh] if plans.train else meshes
    resident = min((problem.trainer_bytes(mesh, offload) for mesh in meshes), default=0)
    room = problem.budget - resident if meshes else 0.0
    rollouts = chooser.candidates.rollouts(context, None, room, offload=offload)
    smallest = chooser.candidates.rollouts(context, None, 0.0, offload=offload)
    return Stop(
        context=context,
        decision=decision,
        why=why,
        trains=_by_mesh(trains, plans.train, problem.budget),
        rollouts=_by_mesh(rollouts if meshes else [], plans.rollout, room),
        resident=resident,
        least_rollout=min(candidate.num_bytes for candidate in smallest),
    )


def _by_mesh(
    candidates: Sequence[Candidate[P]], chosen: P | None, room: float
) -> tuple[Candidate[P], ...]:
    """Returns the best candidate of each mesh: the chosen one, then the fastest, the smallest."""

    def rank(candidate: Candidate[P]) -> tuple[bool, bool, float]:
        can = not candidate.failed and candidate.num_bytes <= room
        size = candidate.tokens_per_s if can else -candidate.num_bytes
        return candidate.plan == chosen, can, size

    best: dict[MeshShape, Candidate[P]] = {}
    for candidate in sorted(candidates, key=rank, reverse=True):
        best.setdefault(candidate.plan.mesh, candidate)
    return tuple(best.values())
