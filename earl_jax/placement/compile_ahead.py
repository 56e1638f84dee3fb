# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles programs that a run will need soon, in the background while steps run.

Longer contexts take other programs, and XLA takes seconds (CPU) to minutes (TPU) for one. A thread
compiles them from shapes alone and leaves them in JAX's persistent compilation cache
(`main.start_jax`); the run's own call finds them there, traces again and loads. Nothing is decided
here and no array is touched: a run with it does what a run without it does.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from earl_jax.placement.placement import Placement
from earl_jax.placement.programs import lower_round, lower_update, play_key, update_key
from earl_jax.selector.plans import RolloutPlan
from earl_jax.telemetry.compile_clock import compile_clock
from earl_jax.telemetry.load import LoadHistory
from earl_jax.world import World

# Buckets that no config names are compiled for when contexts would outgrow the one in use in so
# many steps, as fast as they grow now.
STEPS_AHEAD = 3


class Wanted(NamedTuple):
    """A program: `key` tells it from others, `lower` makes it from shapes alone."""

    key: Hashable
    lower: Callable[[], Any]


def wanted_programs(world: World, placement: Placement, history: LoadHistory) -> Iterator[Wanted]:
    """Yields what the next context bucket needs, as its plans would be chosen now.

    Before it what the last episodes of a rollout would need to go on elsewhere.
    """
    rollout = world.config.rollout
    if (tail := placement.sessions.tail_plan(history.recent())) is not None:
        yield _round(world, tail, placement.max_tokens)
    bucket = rollout.max_tokens_for(placement.max_tokens + 1)
    configured = bucket <= rollout.context_buckets[-1]
    if bucket > world.max_context or not (configured or _is_near(history, placement.max_tokens)):
        return
    plans = placement.foresee(bucket)
    if (train := plans.train) is not None:
        # Jitted here: two threads would make two of it.
        world.learner.program(train)
        yield Wanted(update_key(train, bucket), lambda: lower_update(world, train, bucket))
    if plans.rollout is not None:
        yield _round(world, plans.rollout, bucket)


def _round(world: World, plan: RolloutPlan, max_tokens: int) -> Wanted:
    # Built here: two threads would make two of it.
    world.engine(plan.mesh, plan.num_slots)
    key = play_key(plan.mesh, plan.num_slots, max_tokens)
    return Wanted(key, lambda: lower_round(world, plan, max_tokens))


def _is_near(history: LoadHistory, max_tokens: int) -> bool:
    """Whether contexts that grow as they do will not fit so many tokens any more soon."""
    recent, forecast = history.recent(), history.forecast()
    if recent is None or forecast is None:
        return False
    return recent.context_tokens_max + STEPS_AHEAD * forecast.growth_tokens > max_tokens


def _has_own_devices(world: World) -> bool:
    """Whether steps go on at full speed while the host compiles: not where it is the device."""
    return world.processes.devices[0].platform != "cpu"


class Times(NamedTuple):
    """Seconds that programs took to be compiled: in all, and of these what the run waited for."""

    total_s: float
    waited_s: float


class CompileAhead:
    """The thread, and what it was asked for. To be closed: XLA must not outlive the process."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the user what could not be compiled."""
        self._say = say
        # All below is read and written under this lock.
        self._changed = threading.Condition()
        self._known: set[Hashable] = set()
        self._pending: dict[Hashable, Wanted] = {}
        self._begun: Hashable = None
        self._failures: list[str] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        # What was compiled and is not in use yet, in seconds, and what became of the others.
        self._seconds: dict[Hashable, float] = {}
        self._hidden_s = self._waited_s = 0.0
        self._clock = compile_clock()

    def look(self, world: World, placement: Placement, history: LoadHistory) -> None:
        """Asks for what may be needed next and was not asked for before; returns at once."""
        if self._works_for(world):
            self.ask(wanted_programs(world, placement, history))

    def _works_for(self, world: World) -> bool:
        """Of several processes none compiles ahead: XLA lets them tune programs together."""
        setting = world.config.selector.compile_ahead
        wanted = setting == "on" or setting == "auto" and _has_own_devices(world)
        return wanted and world.processes.count == 1

    def ask(self, programs: Iterable[Wanted]) -> None:
        """These first, where they are not there yet; says what failed of those of before."""
        asked = {wanted.key: wanted for wanted in programs}
        with self._changed:
            failures, self._failures = self._failures, []
            new = {
                key: wanted
                for key, wanted in asked.items()
                if key in self._pending or key not in self._known
            }
            self._known |= new.keys()
            self._pending = new | {k: v for k, v in self._pending.items() if k not in new}
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="compile-ahead", daemon=True
                )
                self._thread.start()
        for failure in failures:
            self._say(failure)

    def is_compiled(self, key: Hashable) -> bool:
        """Whether a program was compiled here and is not in use yet."""
        with self._changed:
            return key in self._seconds

    def hand_over(self, key: Hashable) -> None:
        """The run uses this program now. It waits for one that is being compiled for it.

        What was not begun is left to the run.
        """
        with self._changed:
            self._known.add(key)
            self._pending.pop(key, None)
            waited = 0.0
            if self._begun == key:
                start = time.perf_counter()
                self._changed.wait_for(lambda: self._begun != key)
                waited = time.perf_counter() - start
            seconds = self._seconds.pop(key, 0.0)
            self._waited_s += min(waited, seconds)
            self._hidden_s += max(0.0, seconds - waited)

    def take_times(self) -> Times:
        """Of the programs that were used for the first time since the last call.

        What the run itself compiles it waits for, and what it loads from the cache folder.
        """
        with self._changed:
            waited = self._waited_s + self._clock.take(but=self._thread)
            total = waited + self._hidden_s
            self._hidden_s = self._waited_s = 0.0
        return Times(total, waited)

    def settle(self) -> None:
        """Waits until all that was asked for is there."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and self._begun is None)

    def close(self) -> None:
        """Waits for the program that is being compiled; the others are not begun."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while wanted := self._next():
            failure, before = "", self._clock.seconds(threading.current_thread())
            try:
                wanted.lower().compile()
            except jax.errors.JaxRuntimeError as error:
                # The run compiles it again if it needs it, and does with less if it must.
                failure = f"could not compile ahead for {wanted.key}: {error}"
            finally:
                with self._changed:
                    if failure:
                        self._failures.append(failure)
                    else:
                        after = self._clock.seconds(threading.current_thread())
                        self._seconds[wanted.key] = after - before
                    self._begun = None
                    self._changed.notify_all()

    def _next(self) -> Wanted | None:
        """What is compiled now; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            if self._closing:
                return None
            self._begun = next(iter(self._pending))
            return self._pending.pop(self._begun)
