# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves to the plans in use: of the trainer's state, and of a rollout's session with its episodes.

What depends on time is an event of the run, and comes again in a replay (rollout/events.py).
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from earl_jax.dispatch.weights import publish_to_engines
from earl_jax.engine.engine import Engine, Policy, Session, empty_session
from earl_jax.engine.relocation import reachable_pool, relocate
from earl_jax.placement.placement import Placement
from earl_jax.rollout.events import Events
from earl_jax.selector.candidates import Candidate
from earl_jax.selector.choose import BudgetTooSmall, choose_plans
from earl_jax.selector.memory import moving
from earl_jax.selector.plans import Plans, RolloutPlan
from earl_jax.selector.table import key_of
from earl_jax.sharding.carry import carry, is_placed
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import absent_tree
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry.load import Load
from earl_jax.train.offload import is_offloaded, load_moments, offload_moments
from earl_jax.train.state import TrainState

# Seconds of loading a program that was compiled ahead.
LOADING_S = 1.0

# The trainer's state.


def move_state(placement: Placement, state: TrainState, *, to_play: bool = False) -> TrainState:
    """Moves parameters and optimizer state to the training mesh in use; gives `state` up.

    Where memory is too short for that, even piece by piece, the state goes to another mesh. With
    `to_play` the moments then go to host memory, if the rollout's plan offloads them.

    Raises:
        BudgetTooSmall: no mesh is left.
    """
    rollout = placement.plans.rollout
    offload = to_play and rollout is not None and rollout.offload
    where = placement.stages.learner.state_shardings(placement.train.mesh)
    if offload and is_offloaded(state) and is_placed(state.params, where.params):
        return state
    state = _to_mesh(placement, load_moments(state))
    return offload_moments(state) if offload else state


def settle(
    placement: Placement, state: TrainState, version: int | None = None, *, to_play: bool = False
) -> TrainState:
    """Moves the state to the plans that were chosen, as `move_state`, and notes these.

    In a replay they are those of then. `version` is that of the weights, None: of the last event.
    """
    restore_plans(placement)
    state = move_state(placement, state, to_play=to_play)
    note_plans(placement, version)
    return state


def note_plans(placement: Placement, version: int | None = None) -> None:
    """Notes the plans in use; `version` as of `settle`."""
    # The events of a process that only trains know of no weights that were published.
    facts = {} if version is None else {"version": version}
    placement.events.note("plans", **facts, placement=placement.as_dict())


def restore_plans(placement: Placement) -> bool:
    """Takes the plans of the run that is replayed into use, if these come next. False if not."""
    event = placement.events.coming("plans")
    if event is not None:
        placement.restore(event["placement"])
    return event is not None


def _to_mesh(placement: Placement, state: TrainState) -> TrainState:
    stages = placement.stages

    def together(shardings: Any) -> TrainState:
        with stages.cluster.limited("the switch of the trainer"):
            return jax.block_until_ready(reshard(state, shardings, donate=True))

    while True:
        shardings = stages.learner.state_shardings(placement.train.mesh).like(state)
        if is_placed(state, shardings):
            return state
        if not stages.cluster.trains:
            return absent_tree(stages.learner.state_shapes().like(state), shardings)
        start = time.perf_counter()
        if stages.cluster.count > 1:
            moved = placement.attempt("train", functools.partial(together, shardings))
            assert moved is not None, "of several processes one that is short ends"
            state, whole = moved, True
        else:
            attempt = functools.partial(placement.attempt, None)
            state, whole = carry(state, shardings, attempt)
        placement.log.switch_s += time.perf_counter() - start
        if whole:
            return state
        placement.fail("train", in_move=True)
        placement.choose_training()


# Sessions of a rollout.


def open_session(placement: Placement, params: Any, version: int) -> tuple[Session | None, int]:
    """Opens an empty session on the rollout's mesh, with this policy published to it.

    Every process calls it. Returns the session, None in one that does not play, and the bytes of
    weights that changed device, of all processes.
    """
    stages, plan = placement.stages, placement.rollout
    placement.tail = None
    engine = stages.engines.engine(plan.mesh, plan.num_slots)
    policy, moved_bytes = publish_policy(placement, engine, plan.mesh, params, version)
    if not stages.cluster.plays:
        return None, moved_bytes
    _play_on(placement, plan)
    session = empty_session(engine, policy, placement.max_tokens, stages.pool(plan))
    return session, moved_bytes


def publish_policy(
    placement: Placement, engine: Engine, mesh: MeshShape, params: Any, version: int
) -> tuple[Policy, int]:
    """Returns the policy for an engine, and the bytes of weights that changed device.

    The engine is this process's part of the rollout's `mesh`. Every process calls it.
    """
    stages = placement.stages
    with moving(), stages.cluster.limited("new weights"):
        published = publish_to_engines(
            params,
            engine.parameter_shapes,
            engine.parameter_shardings,
            stages.layouts.rollout(mesh),
        )
        jax.block_until_ready(published.params)
    return Policy(params=published.params, version=version), published.moved_bytes


def _play_on(placement: Placement, plan: RolloutPlan) -> None:
    key = key_of(plan, placement.max_tokens)
    placement.played.add(key)
    placement.about_to_use(key)


def grow_session(
    placement: Placement, session: Session, tokens: int, pages: int, load: Load | None
) -> Session:
    """Returns a session whose rows hold `tokens` tokens; the live episodes move along.

    The pool stays where it has `pages` pages a row shard, or the budget holds no larger one.
    """
    pool, plan = session.pool, placement.rollout
    # The pool is this process's part.
    shards = pool.shards * placement.problem.num_parts(plan.mesh)
    here = plan._replace(pages=shards * pool.pages // plan.mesh.data)
    step = dataclasses.replace(
        placement.step_of(tokens, load),
        cache_tokens=placement.tokens_of(shards * pages),
        keeps_slots=True,
    )
    placement.outgrown = step.max_tokens
    grown, placement.tail = None, None
    while grown is None:
        # Nothing is donated: where memory was short the live episodes are still there.
        placement.plans = placement.plans._replace(rollout=here)
        placement.choose(step, only="rollout")
        move = functools.partial(relocate_session, placement, session, placement.rollout)
        grown = placement.attempt("rollout", move, live=True)
    return grown


def grow_noted(
    placement: Placement,
    session: Session,
    tokens: int,
    pages: int,
    load: Load | None,
    events: Events,
) -> Session:
    """Returns what `grow_session` does, and notes it; in a replay it grows as then."""
    event, grown = events.coming("grow"), None
    if event is not None:
        grown = grow_as(placement, session, event["placement"])
    grown = grown or grow_session(placement, session, tokens, pages, load)
    events.note("grow", placement=placement.as_dict(), call=events.num_calls)
    return grown


def shrink_noted(
    placement: Placement,
    session: Session,
    live: int,
    longest: int,
    load: Load | None,
    events: Events,
) -> Session:
    """Returns a session for the last `live` episodes that an engine has of a rollout.

    They go to another mesh if that is earned back (`_tail_of`), or as in the run replayed.
    """
    event, plan = events.coming("tail"), None
    if not events.is_replay:
        plan = _tail_of(placement, session, live, longest, load)
    elif event is not None and event["call"] == events.num_calls:
        plan = RolloutPlan.from_list(event["plan"])
    moved = move_session(placement, session, plan) if plan else None
    if plan is None or moved is None:
        return session
    placement.tail = plan
    events.note("tail", plan=plan.as_list(), call=events.num_calls)
    return moved


def grow_as(placement: Placement, session: Session, then: dict[str, Any]) -> Session | None:
    """Returns the session behind the same move in the run that is replayed.

    `then` is the placement of that run (`Placement.as_dict`). None where memory is too short here.
    """
    placement.restore(then)
    placement.outgrown, placement.tail = placement.max_tokens, None
    move = functools.partial(relocate_session, placement, session, placement.rollout)
    return placement.attempt("rollout", move, live=True)


def move_session(
    placement: Placement, session: Session, plan: RolloutPlan | None = None
) -> Session | None:
    """Moves live episodes to a plan, by default that in use; None where memory is too short."""
    plan, moved = plan or placement.rollout, None
    move = functools.partial(relocate_session, placement, session, plan)
    with contextlib.suppress(BudgetTooSmall):
        moved = placement.attempt(None, move, live=True)
    if moved is None:
        words = f"the move to {plan.mesh}: there was too little memory"
        placement.log.failures.append(words)
    return moved


def _tail_of(
    placement: Placement, session: Session, live: int, longest: int, load: Load | None
) -> RolloutPlan | None:
    """Returns the plan for the last `live` episodes of an engine; None: they stay.

    The longest has `longest` tokens. Processes that share an engine know the same, and go only
    where they have played.
    """
    plan, played = placement.rollout, placement.played
    here = (placement.tail or plan)._replace(pages=session.pool.pages)
    # As if every engine had so many.
    live *= placement.problem.num_parts(here.mesh)

    def move_s(mesh: MeshShape) -> float:
        # Nobody waits for a compiler in the middle of a rollout.
        key = key_of(plan._replace(mesh=mesh), session.max_tokens)
        if key not in played and not placement.is_compiled(key):
            return math.inf
        moved_bytes = here.pages * placement.problem.page_bytes(here.mesh)
        arrival_s = placement.problem.relocate_s(mesh, moved_bytes)
        return arrival_s + (0.0 if key in played else LOADING_S)

    choice = _tail(placement, here, session.max_tokens, live, longest, load, move_s)
    if choice is not None:
        placement.log.choices.append(choice._replace(stage="tail"))
    return choice and choice.plan


def _tail(
    placement: Placement,
    here: RolloutPlan,
    max_tokens: int,
    live: int,
    longest: int,
    load: Load | None,
    move_s: Callable[[MeshShape], float],
) -> Candidate[RolloutPlan] | None:
    """Chooses for the last `live` episodes, of up to `longest` tokens; None: they stay."""
    left = load.context_tokens_max - longest if load else 0
    if left <= 0:
        return None
    step = dataclasses.replace(
        placement.step_of(max_tokens, load),
        max_tokens=max_tokens,
        cache_tokens=live * longest,
        rollout_tokens=live * left,
        keeps_slots=True,
        live=live,
        move_s=move_s,
    )
    choice, plans = None, Plans(here, placement.train)
    # Compiling ahead, beside a trainer's new mesh that leaves less: the next step says.
    with contextlib.suppress(BudgetTooSmall):
        candidates = placement.candidates(load)
        choice = choose_plans(candidates, step, plans, only="rollout").rollout
    return choice if choice and choice.switched else None


def tail_plan(placement: Placement, load: Load | None) -> RolloutPlan | None:
    """Returns the plan for the last episodes of a rollout, if it is another than for all."""
    here, max_tokens = placement.rollout, placement.max_tokens
    live, longest = max(1, here.num_slots // 8), int(load.context_tokens_mean) if load else 0
    choice = _tail(placement, here, max_tokens, live, longest, load, lambda mesh: 0.0)
    return choice and choice.plan


def relocate_session(placement: Placement, session: Session, plan: RolloutPlan) -> Session:
    """Moves live episodes to the mesh and pages of a plan; `session` stays as it is.

    Raises BudgetTooSmall where the plan has too few pages for them.
    """
    stages, pool = placement.stages, reachable_pool(session.pool, placement.stages.pool(plan))
    need = session.pages.least_pages(pool.shards)
    if need > pool.pages:
        raise BudgetTooSmall(
            f"live episodes need {need} pages of a row shard on {plan.mesh}, and the budget "
            f"holds {pool.pages}"
        )
    engine = stages.engines.engine(plan.mesh, plan.num_slots)
    start = time.perf_counter()
    _play_on(placement, plan)
    # Those that share an engine move together, and rows may be on their way to other processes.
    with moving(), stages.cluster.limited("the move of live episodes"):
        max_tokens = max(placement.max_tokens, session.max_tokens)
        moved = relocate(session, engine, max_tokens, pool)
        jax.block_until_ready((moved.policy.params, moved.state))
    if engine is not session.engine:
        placement.log.switch_s += time.perf_counter() - start
    return moved
