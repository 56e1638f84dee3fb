# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that a run will need soon, compiled in the background while steps run.

A longer room per episode, more pages of KV cache or another mesh take other programs, and XLA takes
seconds (CPU) to minutes (TPU) for one. A thread compiles them from shapes alone and leaves them in
JAX's persistent compilation cache (`main.start_jax`); the run's own call finds them there, traces
again and loads. Nothing is decided here and no array is touched: a run with it does what a run
without it does.
"""

import math
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from earl_jax.estimates import rollout_estimate, train_estimate
from earl_jax.measuring import lower_train
from earl_jax.placement import Placement
from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.pages import Pool, pages_for, roomier_pages
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.reshard import lower_moves
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
    to each mesh that may hold such rows; and, for a room that no config names, the training on rows
    of its length, as it would be chosen now first, and every other candidate.
    """
    slots, places = placement.num_slots, placement.places
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
            yield Wanted(("move", here, mesh), lambda mesh=mesh: _lower_move(world, here, mesh))
    if configured:
        # Its candidates were compiled before the first step.
        return
    likely = placement.foresee_training(room)
    ways = [likely] if likely else []
    for mesh, way in dict.fromkeys([*ways, *((mesh, rung) for mesh in (here, *others))]):
        # Jitted here: two threads would make two of it.
        world.train_step(mesh, "policy_gradient", way)
        yield Wanted(
            ("train", mesh, room, way),
            lambda mesh=mesh, way=way: lower_train(world, mesh, room, way),
        )
    for mesh in world.rollout_candidates_for(room):
        page = placement.page_size
        whole = RolloutRung(slots, world.pool_for(room, slots, page).pages, page_size=page)
        if not rollout_estimate(world, mesh, room, whole).surely_exceeds(_most(world)):
            candidate = world.engine(mesh, slots, page)
            yield Wanted(
                ("measured", mesh, slots, page, room),
                lambda candidate=candidate: candidate.lower_play(room),
            )


def _live_programs(world: World, placement: Placement, room: int, pages: int) -> Iterator[Wanted]:
    """What live episodes need to go on with this room and so many pages a lane, and rounds there.

    The room in use is `placement.places`.
    """
    slots, places, lanes = placement.num_slots, placement.places, len(world.processes.lanes)
    page = placement.page_size
    dense, least = world.pool_for(room, slots, page).pages, pages_for(room, world.page(page))
    here, now = placement.in_rollout, Pool(lanes, placement.pages)
    mesh, pages = placement.foresee(room, max(min(pages, dense), least))
    engine, pool = world.engine(mesh, slots, page), Pool(lanes, pages)
    if mesh != here and not world.config.dispatch.chunk_bytes:
        before = world.engine(here, slots, page)
        yield Wanted(
            ("move", here, mesh, slots, places, now),
            lambda: _lower_seat_move(before, engine, places, now),
        )
    if (room, pool) != (places, now):
        yield Wanted(
            ("grow", mesh, slots, places, now, room, pool),
            lambda: engine.lower_grow(places, now, room, pool),
        )
    yield Wanted(("play", mesh, slots, room, pool), lambda: engine.lower_play(room, pool))


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
    state = _placed(world.train_state_shapes(), world.train_state_shardings(here))
    return _Programs(lower_moves(state, world.train_state_shardings(there)))


def _lower_seat_move(here: PolicyEngine, there: PolicyEngine, places: int, pool: Pool) -> _Programs:
    """The programs in which weights and live KV caches move from engine to engine."""
    shapes = (here.parameter_shapes, here.state_shapes(places, pool))
    seat = _placed(shapes, (here.parameter_shardings, here.state_shardings))
    return _Programs(lower_moves(seat, (there.parameter_shardings, there.state_shardings)))


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        shapes,
        shardings,
    )


def _has_own_devices(world: World) -> bool:
    """Whether steps go on at full speed while the host compiles: not where it is the device."""
    return world.processes.devices[0].platform != "cpu"


def _is_near(history: LoadHistory, places: int) -> bool:
    """Whether contexts that grow as they do will not fit so many places any more soon."""
    recent, forecast = history.recent(), history.forecast()
    if recent is None or forecast is None:
        return False
    return recent.context_tokens_max + STEPS_AHEAD * forecast.growth_tokens > places


class CompileAhead:
    """The thread, and what it was asked for. To be closed: XLA must not outlive the process."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the user what could not be compiled."""
        self._say = say
        self._asked: set[Hashable] = set()
        self._wanted: queue.Queue[Wanted | None] = queue.Queue()
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = False
        self._thread: threading.Thread | None = None

    def look(self, world: World, placement: Placement, history: LoadHistory) -> None:
        """Asks for what may be needed next and was not asked for before; returns at once.

        Of several processes none compiles ahead: XLA lets them tune programs together.
        """
        setting = world.config.selector.compile_ahead
        wanted = setting == "on" or setting == "auto" and _has_own_devices(world)
        if wanted and world.processes.count == 1:
            self.ask(wanted_programs(world, placement, history))

    def ask(self, programs: Iterable[Wanted]) -> None:
        """These, where they were not asked for before; says what failed of those of before."""
        while not self._failures.empty():
            self._say(self._failures.get())
        for wanted in programs:
            if wanted.key not in self._asked:
                self._asked.add(wanted.key)
                self._wanted.put(wanted)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="compile-ahead", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Waits until all that was asked for is there."""
        self._wanted.join()

    def close(self) -> None:
        """Waits for the program that is being compiled; the others are not begun."""
        self._closing = True
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            try:
                if not self._closing:
                    wanted.lower().compile()
            except jax.errors.JaxRuntimeError as error:
                # The run compiles it again if it needs it, and does with less if it must.
                self._failures.put(f"could not compile ahead for {wanted.key}: {error}")
            finally:
                self._wanted.task_done()
