# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that a run will need soon, compiled in the background while steps run.

A longer room per episode, more pages of KV cache or another mesh take other programs, and XLA takes
seconds (CPU) to minutes (TPU) for one. A thread compiles them from shapes alone and leaves them in
JAX's persistent compilation cache (`main.start_jax`); the run's own call finds them there, traces
again and loads. Nothing is decided here and no array is touched: a run with it does what a run
without it does.

The first step needs the programs of one room alone; those of the rooms that follow, in use and to
be measured, are compiled behind it, and measured between two steps when contexts come near
(`room_to_measure`). Where no thread compiles (on a CPU, which is the device itself, unless
config.selector.compile_ahead says "on") a room's programs are compiled when it is measured or
needed. Several processes compile and measure all rooms before the first step
(`Calibration.measures_later`).
"""

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from earl_jax.estimates import rollout_estimate, train_estimate
from earl_jax.measuring import lower_train
from earl_jax.placement import Placement
from earl_jax.program_keys import (
    measured_key,
    play_key,
    relocate_key,
    train_key,
    trainer_move_key,
)
from earl_jax.rollout.pages import pages_for, roomier_pages
from earl_jax.rollout.seat import lower_relocation
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import placed_shapes
from earl_jax.sharding.reshard import lower_moves
from earl_jax.telemetry.compile_clock import CompileClock
from earl_jax.telemetry.load import LoadHistory
from earl_jax.world import World

# Rooms that no config names are compiled for when contexts would outgrow the room in use in so
# many steps, as fast as they grow now.
STEPS_AHEAD = 3


class Wanted(NamedTuple):
    """A program: `key` tells it from others, `lower` makes it from shapes alone."""

    key: Hashable
    lower: Callable[[], Any]


def wanted_programs(world: World, placement: Placement, history: LoadHistory) -> Iterator[Wanted]:
    """What the meshes in use need next, the soonest first; then what others need to be chosen.

    More pages in the room in use; the next room with the pages there are, and with more, and if the
    budget holds it on another mesh alone, the way of live episodes there; the move of the trainer
    to each mesh that may hold such rows; and, unless all configured rooms were measured before the
    first step and this is one, the training on rows of its length, as it would be chosen now first,
    and every other candidate that was not timed.
    """
    places = placement.places
    more = roomier_pages(placement.pages + 1)
    yield from _live_programs(world, placement, places, more)
    rollout = world.config.rollout
    room = rollout.places_for(places + 1)
    configured = room <= rollout.context_buckets[-1]
    if room > world.max_context or not (configured or _is_near(history, places)):
        return
    for pages in (placement.pages, more):
        yield from _live_programs(world, placement, room, pages)
    here, rung = placement.in_training, placement.train_rung
    others = [mesh for mesh in _trainers(world, room, rung) if mesh != here]
    if not world.config.dispatch.chunk_bytes:
        # Of chunks there are programs of other sizes.
        for mesh in others:
            key = trainer_move_key(here, mesh)
            yield Wanted(key, lambda mesh=mesh: _lower_move(world, here, mesh))
    if not configured or placement.calibration.measures_later:
        yield from candidates_for(world, placement, room)


def candidates_for(world: World, placement: Placement, room: int) -> Iterator[Wanted]:
    """What is timed for this room: training as it would be chosen now first."""
    calibration, slots = placement.calibration, placement.num_slots
    here, rung = placement.in_training, placement.train_rung
    likely = placement.foresee_training(room)
    ways = [likely] if likely else []
    others = [mesh for mesh in _trainers(world, room, rung) if mesh != here]
    ways += [(mesh, rung) for mesh in (here, *others)]
    for mesh, way in dict.fromkeys(ways):
        if (mesh, way) != likely and calibration.is_timed(mesh, room, way):
            continue
        # Jitted here: two threads would make two of it.
        world.train_step(mesh, "policy_gradient", way)
        yield Wanted(
            train_key(mesh, room, way),
            lambda mesh=mesh, way=way: lower_train(world, mesh, room, way),
        )
    for mesh in world.rollout_candidates_for(room):
        page = placement.page_size
        whole = RolloutRung(slots, world.device_pages(room, slots, page), page_size=page)
        hopeless = rollout_estimate(world, mesh, room, whole).surely_exceeds(_most(world))
        if not hopeless and not calibration.is_timed(mesh, room, whole):
            candidate = world.engine(mesh, slots, page)
            yield Wanted(
                measured_key(mesh, slots, page, room),
                lambda candidate=candidate: candidate.lower_play(room),
            )


def _live_programs(world: World, placement: Placement, room: int, pages: int) -> Iterator[Wanted]:
    """What live episodes need to go on with this room and so many pages a lane, and rounds there.

    The room in use is `placement.places`.
    """
    slots, places = placement.num_slots, placement.places
    page = placement.page_size
    dense, least = world.device_pages(room, slots, page), pages_for(room, world.page(page))
    here, now = placement.in_rollout, world.pool_of(placement.in_rollout, placement.pages)
    mesh, pages = placement.foresee(room, max(min(pages, dense), least))
    engine, pool = world.engine(mesh, slots, page), world.pool_of(mesh, pages)
    moves = mesh != here
    if (moves or (room, pool) != (places, now)) and not (
        moves and world.config.dispatch.chunk_bytes
    ):
        before = world.engine(here, slots, page)
        yield Wanted(
            relocate_key(here, mesh, slots, places, now, room, pool),
            lambda: _Programs(lower_relocation(before, engine, places, now, room, pool)),
        )
    yield Wanted(play_key(mesh, slots, room, pool), lambda: engine.lower_play(room, pool))


def _trainers(world: World, length: int, rung: TrainRung) -> Iterator[MeshShape]:
    """The training candidates that may hold rows of this length on this rung."""
    for mesh in world.train_candidates_for(length):
        if world.train_obstacle(mesh, rung.micro_batches) is None:
            if not train_estimate(world, mesh, length, rung).surely_exceeds(_most(world)):
                yield mesh


def _most(world: World) -> float:
    return world.budget_bytes or math.inf


class _Programs(NamedTuple):
    lowered: list[Any]

    def compile(self) -> None:
        """All of them."""
        for program in self.lowered:
            program.compile()


def _lower_move(world: World, here: MeshShape, there: MeshShape) -> _Programs:
    """The programs in which the trainer moves."""
    state = placed_shapes(world.train_state_shapes(), world.train_state_shardings(here))
    return _Programs(lower_moves(state, world.train_state_shardings(there)))


def _has_own_devices(world: World) -> bool:
    """Whether steps go on at full speed while the host compiles: not where it is the device."""
    return world.processes.devices[0].platform != "cpu"


def _next_room(world: World, placement: Placement) -> int:
    return world.config.rollout.places_for(placement.places + 1)


def _is_near(history: LoadHistory, places: int) -> bool:
    """Whether contexts that grow as they do will not fit so many places any more soon."""
    recent, forecast = history.recent(), history.forecast()
    if recent is None or forecast is None:
        return False
    return recent.context_tokens_max + STEPS_AHEAD * forecast.growth_tokens > places


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
        self._clock = CompileClock()

    def look(self, world: World, placement: Placement, history: LoadHistory) -> None:
        """Asks for what may be needed next and was not asked for before; returns at once.

        When all of it is there, for what the configured rooms behind the next are measured by.
        """
        if not self._works_for(world):
            return
        self.ask(wanted_programs(world, placement, history))
        if placement.calibration.measures_later:
            for room in world.config.rollout.context_buckets:
                if room > _next_room(world, placement) and self.is_idle:
                    self.ask(candidates_for(world, placement, room))

    def room_to_measure(
        self, world: World, placement: Placement, history: LoadHistory
    ) -> int | None:
        """The next room, if it is configured and contexts will not fit the one in use soon.

        None while programs are being compiled: nothing is measured beside that unless it must be.
        """
        room, configured = _next_room(world, placement), world.config.rollout.context_buckets
        near = room in configured and _is_near(history, placement.places)
        return room if near and self.is_idle else None

    def _works_for(self, world: World) -> bool:
        """Of several processes none compiles ahead: XLA lets them tune programs together."""
        setting = world.config.selector.compile_ahead
        wanted = setting == "on" or setting == "auto" and _has_own_devices(world)
        return wanted and world.processes.count == 1

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is there."""
        with self._changed:
            return not self._pending and self._begun is None

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
        self._clock.stop()

    def __enter__(self) -> "CompileAhead":
        self._clock.start()
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
