# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles programs that a run will need soon, in the background while steps run.

A thread compiles them from shapes alone and leaves them in JAX's persistent compilation cache
(`launch.start.start_jax`), or beside the engine's jitted function, where the run's call finds them.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from earl_jax.launch.cluster import Cluster
from earl_jax.placement.moves import tail_plan
from earl_jax.placement.packing import plan_of_shape, shape_ahead
from earl_jax.placement.placement import MayTry, Placement
from earl_jax.placement.stages import lower_round, lower_update
from earl_jax.selector.candidates import Candidate
from earl_jax.selector.choose import BudgetTooSmall, Step, choose_plans
from earl_jax.selector.plans import Plan, RolloutPlan
from earl_jax.selector.table import key_of
from earl_jax.telemetry.compile_clock import compile_clock
from earl_jax.telemetry.load import WINDOW, Load, LoadHistory

# Makes a program from shapes alone.
Lower = Callable[[], Any]


def wanted_programs(placement: Placement, history: LoadHistory) -> dict[str, Lower]:
    """Returns programs that may be needed soon, most urgent first, by `key_of` their plans."""
    load, plans, programs = history.recent(), list[tuple[Plan, int]](), dict[str, Lower]()
    if (tail := tail_plan(placement, load)) is not None:
        plans.append((tail, placement.max_tokens))
    plans += _next_bucket(placement, load)
    plans += promising_plans(placement, load)
    cluster = placement.stages.cluster
    for plan, tokens in plans:
        is_own = plan.stage == "rollout" and cluster.plays and not cluster.spans(plan.mesh)
        if cluster.count == 1 or is_own:
            if (lower := _lowering(placement, plan, tokens)) is not None:
                programs[key_of(plan, tokens)] = lower
    return programs


def promising_plans(placement: Placement, load: Load | None) -> list[tuple[Plan, int]]:
    """Returns plans, and context buckets, that would be chosen if their programs were there."""
    step, speeds = placement.step_of(placement.max_tokens, load), placement.table.speeds
    feeds_table = placement.stages.feeds_table
    if placement.may_try is None or not feeds_table or step.lasts < WINDOW:
        return []
    found = _chosen(placement, step, load, lambda key: True)
    plans = [(choice.plan, choice.tokens) for choice in found if choice.switched]
    return [each for each in plans if key_of(*each) not in speeds]


def _next_bucket(placement: Placement, load: Load | None) -> list[tuple[Plan, int]]:
    """Returns the plans that longer contexts would have, the trainer's first."""
    rollout = placement.stages.rollout
    bucket = rollout.max_tokens_for(placement.max_tokens + 1)
    if bucket > min(rollout.context_buckets[-1], rollout.max_episode_tokens):
        return []
    step = dataclasses.replace(
        placement.step_of(bucket, None), max_tokens=bucket, length=bucket, is_new=True
    )
    return [(choice.plan, bucket) for choice in reversed(_chosen(placement, step, load))]


def _chosen(
    placement: Placement, step: Step, load: Load | None, may_try: MayTry | None = None
) -> list[Candidate]:
    try:
        candidates = placement.candidates(load, may_try=may_try)
        return choose_plans(candidates, step, placement.plans).choices
    except BudgetTooSmall:
        return []


def _lowering(placement: Placement, plan: Plan, tokens: int) -> Lower | None:
    """Returns what lowers a plan's program; None for an update whose shape is not known yet.

    Engines and jitted functions are made here: two threads would make two of each.
    """
    stages = placement.stages
    if isinstance(plan, RolloutPlan):
        stages.engines.engine(plan.mesh, plan.num_slots)
        return lambda: lower_round(stages, plan, tokens)
    if (shape := shape_ahead(placement, plan, tokens)) is None:
        return None
    train = plan_of_shape(stages, plan, shape, tokens)
    stages.learner.program(train)
    return lambda: lower_update(stages, train, tokens, shape)


def compiles_ahead(table: str, cluster: Cluster) -> bool:
    """Returns True if a run with this config.selector.table compiles ahead.

    On CPUs the compiler would take its cores from the steps. Without observed speeds equal seeds
    are equal runs, and when a thread is done is not the same in all of them.
    """
    return table == "auto" and cluster.devices[0].platform != "cpu"


class CompileAhead:
    """A thread that compiles. To be closed: XLA must not outlive the process."""

    def __init__(self, say: Callable[[str], None], *, is_on: bool = True) -> None:
        """Starts no thread yet; `look` requests programs if `is_on`, `say` reports failures."""
        self._say, self.is_on = say, is_on
        self._pool = ThreadPoolExecutor(1, "compile-ahead")
        self._thread: threading.Thread | None = None
        # Each requested program, False where it failed; no future once the run uses it.
        self._futures: dict[str, Future[bool] | None] = {}
        self._failures: list[str] = []
        self._waited_s = 0.0
        self._clock = compile_clock()

    def connect(self, placement: Placement) -> None:
        """Has the placement ask for programs here; waiting counts from now on."""
        placement.about_to_use, placement.is_compiled = self.hand_over, self.is_compiled
        # Of several processes all must choose alike, whenever the compilers are done.
        if self.is_on and placement.stages.cluster.count == 1:
            placement.may_try = self.is_compiled
        self.take_waited_s()
        self.take_compiles()

    def look(self, placement: Placement, history: LoadHistory) -> None:
        """Requests the programs that may be needed next; returns at once."""
        if self.is_on:
            self.request(wanted_programs(placement, history))

    def request(self, programs: Mapping[str, Lower]) -> None:
        """Compiles these programs, each once; reports earlier ones that failed."""
        for key, lower in programs.items():
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._compile, key, lower)
        while self._failures:
            self._say(self._failures.pop(0))

    def is_compiled(self, key: str) -> bool:
        """Returns True if a program was compiled here, or the run has taken it over."""
        future = self._futures.get(key)
        return key in self._futures if future is None else future.done() and future.result()

    def hand_over(self, key: str) -> None:
        """Gives a program to the run: it waits if that is being compiled, or compiles it itself."""
        future, self._futures[key] = self._futures.get(key), None
        if future is None or future.cancel():
            return
        start_s = time.perf_counter()
        wait([future])
        self._waited_s += time.perf_counter() - start_s

    def take_waited_s(self) -> float:
        """Returns the seconds of waiting for programs since the last call, compiled here or not."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited + self._clock.take(but=self._thread)

    def take_compiles(self) -> int:
        """Returns the number of programs that the run itself compiled or loaded since then."""
        return self._clock.take_number(but=self._thread)

    def settle(self) -> None:
        """Waits until all requested programs are compiled."""
        wait([future for future in self._futures.values() if future is not None])

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the program that is being compiled; the others are not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _compile(self, key: str, lower: Lower) -> bool:
        self._thread = threading.current_thread()
        try:
            lower().compile()
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            # A lack of memory, or a kernel that cannot be lowered. The run compiles it again if it
            # needs it, and chooses less if it must.
            self._failures.append(f"could not compile ahead for {key}: {error}")
            return False
        return True
