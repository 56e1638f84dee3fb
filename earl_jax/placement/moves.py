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
from typing import TYPE_CHECKING, Any

import jax

from earl_jax.dispatch.weights import publish_to_engines
from earl_jax.engine.engine import Engine, Policy, Session, empty_session
from earl_jax.engine.relocation import reachable_pool, relocate
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

if TYPE_CHECKING:
    from earl_jax.placement.placement import Placement
    from earl_jax.placement.stages import Stages

# Seconds of loading a program that was compiled ahead.
LOADING_S = 1.0

# The trainer's state.


def move_state(placement: "Placement", state: TrainState, *, to_play: bool = False) -> TrainState:
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
    placement: "Placement", state: TrainState, version: int | None = None, *, to_play: bool = False
) -> TrainState:
    """Moves the state to the plans that were chosen, as `move_state`, and notes these.

    In a replay they are those of then. `version` is that of the weights, None: of the last event.
    """
    restore_plans(placement)
    state = move_state(placement, state, to_play=to_play)
    note_plans(placement, version)
    return state


def note_plans(placement: "Placement", version: int | None = None) -> None:
    """Notes the plans in use; `version` as of `settle`."""
    # The events of a process that only trains know of no weights that were published.
    facts = {} if version is None else {"version": version}
    placement.events.note("plans", **facts, placement=placement.as_dict())


def restore_plans(placement: "Placement") -> bool:
    """Takes the plans of the run that is replayed into use, if these come next. False if not."""
    event = placement.events.coming("plans")
    if event is not None:
        placement.restore(event["placement"])
    return event is not None


def _to_mesh(placement: "Placement", state: TrainState) -> TrainState:
    stages = placement.stages

    def together(shardings: Any) -> TrainState:
        with stages.cluster.limited("the switch of the trainer"):
            moved = reshard(state, shardings, chunk_bytes=stages.chunk_bytes, donate=True)
            return jax.block_until_ready(moved)

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
            state, whole = carry(state, shardings, stages.chunk_bytes, attempt)
        placement.log.switch_s += time.perf_counter() - start
        if whole:
            return state
        placement.fail("train", in_move=True)
        placement.choose_training()


# Sessions of a rollout.


class Sessions:
    """Opens and moves sessions for one placement. Host-side state only.

    `played` are the rounds that the run has played, by their keys, also before a checkpoint.
    """

    def __init__(self, stages: "Stages", placement: "Placement") -> None:
        self._stages, self._placement = stages, placement
        self.played: set[str] = set()

    def open(self, params: Any, version: int) -> tuple[Session | None, int]:
        """Opens an empty session on the rollout's mesh, with this policy published to it.

        Every process calls it.

        Returns:
            The session, None in a process that does not play, and the bytes of weights that changed
            device, of all processes.
        """
        stages, plan = self._stages, self._placement.rollout
        self._placement.tail = None
        engine = stages.engines.engine(plan.mesh, plan.num_slots)
        policy, moved_bytes = self.publish(engine, plan.mesh, params, version)
        if not stages.cluster.plays:
            return None, moved_bytes
        self._play_on(plan)
        session = empty_session(engine, policy, self._placement.max_tokens, stages.pool(plan))
        return session, moved_bytes

    def publish(
        self, engine: Engine, mesh: MeshShape, params: Any, version: int
    ) -> tuple[Policy, int]:
        """Returns the policy for an engine, and the bytes of weights that changed device.

        The engine is this process's part of the rollout's `mesh`. Every process calls it.
        """
        stages = self._stages
        with moving(), stages.cluster.limited("new weights"):
            published = publish_to_engines(
                params,
                engine.parameter_shapes,
                engine.parameter_shardings,
                stages.layouts.rollout(mesh),
                chunk_bytes=stages.chunk_bytes,
            )
            jax.block_until_ready(published.params)
        return Policy(params=published.params, version=version), published.moved_bytes

    def _play_on(self, plan: RolloutPlan) -> None:
        key = key_of(plan, self._placement.max_tokens)
        self.played.add(key)
        self._placement.about_to_use(key)

    def grow(self, session: Session, tokens: int, pages: int, load: Load | None) -> Session:
        """Returns a session whose rows hold `tokens` tokens; the live episodes move along.

        The pool stays where it has `pages` pages a row shard, or the budget holds no larger one.
        """
        pool, plan = session.pool, self._placement.rollout
        # The pool is this process's part.
        shards = pool.shards * self._placement.problem.num_parts(plan.mesh)
        here = plan._replace(pages=shards * pool.pages // plan.mesh.data)
        step = dataclasses.replace(
            self._placement.step_of(tokens, load),
            cache_tokens=self._placement.tokens_of(shards * pages),
            keeps_slots=True,
        )
        self._placement.outgrown = step.max_tokens
        grown, self._placement.tail = None, None
        while grown is None:
            # Nothing is donated: where memory was short the live episodes are still there.
            self._placement.plans = self._placement.plans._replace(rollout=here)
            self._placement.choose(step, only="rollout")
            move = functools.partial(self._relocate, session, self._placement.rollout)
            grown = self._placement.attempt("rollout", move, live=True)
        return grown

    def grow_noted(
        self, session: Session, tokens: int, pages: int, load: Load | None, events: Events
    ) -> Session:
        """Returns what `grow` does, and notes it; in a replay it grows as then."""
        event, grown = events.coming("grow"), None
        if event is not None:
            grown = self.grow_as(session, event["placement"])
        grown = grown or self.grow(session, tokens, pages, load)
        events.note("grow", placement=self._placement.as_dict(), call=events.num_calls)
        return grown

    def shrink_noted(
        self, session: Session, live: int, longest: int, load: Load | None, events: Events
    ) -> Session:
        """Returns a session for the last `live` episodes that an engine has of a rollout.

        They go to another mesh if that is earned back (`_tail_of`), or as in the run replayed.
        """
        event, plan = events.coming("tail"), None
        if not events.is_replay:
            plan = self._tail_of(session, live, longest, load)
        elif event is not None and event["call"] == events.num_calls:
            plan = RolloutPlan.from_list(event["plan"])
        moved = self.move(session, plan) if plan else None
        if plan is None or moved is None:
            return session
        self._placement.tail = plan
        events.note("tail", plan=plan.as_list(), call=events.num_calls)
        return moved

    def grow_as(self, session: Session, placement: dict[str, Any]) -> Session | None:
        """Returns the session behind the same move in the run that is replayed.

        `placement` is that of then (`Placement.as_dict`). None where memory is too short here.
        """
        self._placement.restore(placement)
        self._placement.outgrown, self._placement.tail = self._placement.max_tokens, None
        move = functools.partial(self._relocate, session, self._placement.rollout)
        return self._placement.attempt("rollout", move, live=True)

    def move_back(self, session: Session) -> Session:
        """Moves a session that `shrink` moved to the plan in use; raises where memory is short."""
        return self._relocate(session, self._placement.rollout)

    def move(self, session: Session, plan: RolloutPlan | None = None) -> Session | None:
        """Moves live episodes to a plan, by default that in use; None where memory is too short."""
        plan, moved = plan or self._placement.rollout, None
        move = functools.partial(self._relocate, session, plan)
        with contextlib.suppress(BudgetTooSmall):
            moved = self._placement.attempt(None, move, live=True)
        if moved is None:
            words = f"the move to {plan.mesh}: there was too little memory"
            self._placement.log.failures.append(words)
        return moved

    def _tail_of(
        self, session: Session, live: int, longest: int, load: Load | None
    ) -> RolloutPlan | None:
        """Returns the plan for the last `live` episodes of an engine; None: they stay.

        The longest has `longest` tokens. Processes that share an engine know the same, and go only
        where they have played.
        """
        placement, plan, played = self._placement, self._placement.rollout, self.played
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

        choice = self._tail(here, session.max_tokens, live, longest, load, move_s)
        if choice is not None:
            placement.log.choices.append(choice._replace(stage="tail"))
        return choice and choice.plan

    def _tail(
        self,
        here: RolloutPlan,
        max_tokens: int,
        live: int,
        longest: int,
        load: Load | None,
        move_s: Callable[[MeshShape], float],
    ) -> Candidate[RolloutPlan] | None:
        """Chooses for the last `live` episodes of all engines, of up to `longest` tokens.

        None: they stay.
        """
        left = load.context_tokens_max - longest if load else 0
        if left <= 0:
            return None
        step = dataclasses.replace(
            self._placement.step_of(max_tokens, load),
            max_tokens=max_tokens,
            cache_tokens=live * longest,
            rollout_tokens=live * left,
            keeps_slots=True,
            live=live,
            move_s=move_s,
        )
        choice, plans = None, Plans(here, self._placement.train)
        # Compiling ahead, beside a trainer's new mesh that leaves less: the next step says.
        with contextlib.suppress(BudgetTooSmall):
            candidates = self._placement.candidates(load)
            choice = choose_plans(candidates, step, plans, only="rollout").rollout
        return choice if choice and choice.switched else None

    def tail_plan(self, load: Load | None) -> RolloutPlan | None:
        """Returns the plan for the last episodes of a rollout, if it is another than for all."""
        here, max_tokens = self._placement.rollout, self._placement.max_tokens
        live, longest = max(1, here.num_slots // 8), int(load.context_tokens_mean) if load else 0
        choice = self._tail(here, max_tokens, live, longest, load, lambda mesh: 0.0)
        return choice and choice.plan

    def _relocate(self, session: Session, plan: RolloutPlan) -> Session:
        """Moves live episodes to the mesh and pages of a plan; `session` stays as it is.

        Raises BudgetTooSmall where the plan has too few pages for them.
        """
        stages, pool = self._stages, reachable_pool(session.pool, self._stages.pool(plan))
        need = session.pages.least_pages(pool.shards)
        if need > pool.pages:
            raise BudgetTooSmall(
                f"live episodes need {need} pages of a row shard on {plan.mesh}, and the budget "
                f"holds {pool.pages}"
            )
        engine = stages.engines.engine(plan.mesh, plan.num_slots)
        start = time.perf_counter()
        self._play_on(plan)
        # Those that share an engine move together, and rows may be on their way to other processes.
        with moving(), stages.cluster.limited("the move of live episodes"):
            max_tokens = max(self._placement.max_tokens, session.max_tokens)
            chunk_bytes = stages.chunk_bytes
            moved = relocate(session, engine, max_tokens, pool, chunk_bytes=chunk_bytes)
            jax.block_until_ready((moved.policy.params, moved.state))
        if engine is not session.engine:
            self._placement.log.switch_s += time.perf_counter() - start
        return moved
