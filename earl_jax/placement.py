# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What moves when a stage changes its mesh.

The only place where a Decision becomes arrays on other devices: weights and live KV caches of a
rollout, parameters and optimiser state of the trainer.
"""

import functools
import time
from typing import Any

from earl_jax.joint import send_weights
from earl_jax.meshes import Meshes
from earl_jax.program_keys import play_key, relocate_key, trainer_move_key
from earl_jax.rest import from_rest, is_at_rest, to_rest
from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.pages import Pool, roomier_pages
from earl_jax.rollout.seat import Policy, Seat, open_seat, relocate, vacate
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.ladder import TrainRung
from earl_jax.selector.memory import resident_bytes
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import absent_tree
from earl_jax.sharding.reshard import reshard
from earl_jax.survival import carry, is_placed
from earl_jax.telemetry.load import Load
from earl_jax.train.step import TrainState


class Placement(Meshes):
    """The meshes in use, and everything that has to go to them."""

    def move_state(self, state: TrainState, *, to_play: bool = False) -> TrainState:
        """Parameters and optimiser state on the training mesh in use; `state` is given up.

        Where memory is too short to go there, even piece by piece, on another mesh. With `to_play`
        the moments then go to the host's memory, if the rollout needs the room.

        Raises:
            BudgetTooSmall: no mesh is left.
        """
        resting = to_play and self.offload
        where = self._world.train_state_shardings(self.in_training)
        if resting and is_at_rest(state) and is_placed(state.params, where.params):
            return state
        state = self._to_mesh(from_rest(state))
        return to_rest(state) if resting else state

    def _to_mesh(self, state: TrainState) -> TrainState:
        world, whole = self._world, False
        while not whole:
            shardings = world.train_state_shardings(self.in_training)
            if not world.processes.trains:
                return absent_tree(world.train_state_shapes(), shardings)
            if is_placed(state, shardings):
                break
            if self._trainer_on is not None:
                key = trainer_move_key(self._trainer_on, self.in_training)
                self.calibration.about_to_use(key)
            start = time.perf_counter()
            if world.processes.count > 1:
                again = functools.partial(self._to_mesh_together, state, shardings)
                moved = self.survive("train", again)
                assert moved is not None, "of several processes one that is short ends"
                state, whole = moved, True
            else:
                state, whole = carry(state, shardings, self._chunk_bytes)
            self.log.switch_s += time.perf_counter() - start
            if not whole:
                self._fail("train", self._length)
                self.choose_training_again()
        self._trainer_on = self.in_training
        return state

    def _to_mesh_together(self, state: TrainState, shardings: Any) -> TrainState:
        state = reshard(state, shardings, chunk_bytes=self._chunk_bytes, donate=True)
        self._world.processes.wait(state, "the switch of the trainer")
        return state

    @property
    def _chunk_bytes(self) -> int | None:
        return self._world.config.dispatch.chunk_bytes or None

    @property
    def _pool(self) -> Pool:
        return self._world.pool_of(self.in_rollout, self.pages)

    def open_seat(self, params: Any, version: int) -> tuple[Seat | None, int]:
        """An empty seat on the rollout mesh in use, with this policy published to it.

        Every process calls it.

        Returns:
            The seat, None in a process that does not play, and the bytes of weights that changed
            device, of all processes.
        """
        world = self._world
        engine = world.engine(self.in_rollout, self.num_slots, self.page_size)
        published = send_weights(
            world, params, self.in_rollout, self.num_slots, chunk_bytes=self._chunk_bytes
        )
        if not world.processes.plays:
            return None, published.moved_bytes
        policy = Policy(params=published.params, version=version)
        pool = self._pool
        self._played.add((self.in_rollout, self.places, pool))
        self._about_to_play(engine, self.places, pool)
        kept, self._kept = self._kept, None
        seat = open_seat(engine, policy, self.places, pool, kept)
        return seat, published.moved_bytes

    def keep(self, seat: Seat) -> None:
        """What this seat's caches hold is there for the next seat, if that has the same weights.

        Unless there is too little memory for another seat beside them.
        """
        budget, engine = self._chooser.settings.budget_bytes, seat.engine
        taken = resident_bytes(seat.state, engine.state_shardings)
        taken += resident_bytes(seat.policy.params, engine.parameter_shardings)
        need = self._ladder.trainer_bytes(self.in_training) + 2 * taken
        if not self.offload and (budget is None or need <= budget):
            self._kept = vacate(seat)

    def forget(self) -> None:
        """Nothing is kept any more."""
        self._kept = None

    def make_room(self, seat: Seat, tokens: int, pages: int, load: Load | None) -> Seat:
        """A seat with room for `tokens` tokens an episode: the live episodes move along.

        It has `pages` pages a lane, and some more so that it does not grow often (`roomier_pages`),
        if the budget allows them on any mesh; else as many as before.

        Chooses anew for the larger room: if the budget does not hold it on this mesh, weights and
        live KV caches go to another one and the episodes continue there.
        """
        slots = seat.engine.config.num_slots
        places = self._world.config.rollout.places_for(tokens)
        dense = self._world.device_pages(places, slots, seat.engine.config.page_size)
        has = self._device_pages(seat.pool)
        pages = max(has, self._device_pages(seat.pool._replace(pages=pages)))
        roomy = min(roomier_pages(pages), dense)
        wanted = [max(roomy, pages), pages, has] if pages > has else [has]
        least = self._ladder.least_pages(places, seat.engine.config.page_size)
        numbers = dict.fromkeys(max(number, least) for number in wanted)
        now = self.rollout_rung._replace(num_slots=slots)
        rungs = [now._replace(pages=number) for number in numbers]
        self._outgrown = places
        grown = None
        while grown is None:
            with self.calibration.apart():
                self._choose_rollout(places, rungs, load, self._mesh_of(seat))
            # Nothing is donated: where memory is short the live episodes are still there.
            grown = self._unless_short("rollout", functools.partial(self._grow_seat, seat))
        return grown

    def foresee(self, room: int, pages: int) -> tuple[MeshShape, int]:
        """The mesh where live episodes would go on with this room, and the pages of a lane there.

        As `make_room` would choose for a room that is configured, by what is known now.
        """
        world, here = self._world, self.in_rollout
        known = room <= world.config.rollout.context_buckets[-1]
        known &= self.num_slots == world.own_rollout.num_slots and not self.page_size
        if world.budget_bytes is None or not known:
            return here, pages
        least = min(pages, max(self.pages, self._ladder.least_pages(room, self.page_size)))
        rungs = [self.rollout_rung._replace(pages=n) for n in dict.fromkeys((pages, least))]
        try:
            mesh, rung = self._chooser.guess_rollout(room, rungs, here, self.in_training)
        except BudgetTooSmall:
            return here, pages
        return mesh, rung.pages

    def foresee_training(self, length: int) -> tuple[MeshShape, TrainRung] | None:
        """Where and how rows of this length would be trained on, as far as that is known."""
        is_new = length > self._most_length
        return self._chooser.guess_training(length, self.train_mesh, is_new=is_new)

    def _mesh_of(self, seat: Seat) -> MeshShape:
        """The rollout mesh that a seat is on. Of several processes none goes its own way."""
        several = self._world.processes.count > 1
        return self.in_rollout if several else seat.engine.layout.shape

    def _device_pages(self, pool: Pool) -> int:
        return -(-pool.total // len(self._world.processes.own_devices))

    def _grow_seat(self, seat: Seat) -> Seat:
        moved = self.move_seat(seat, self.in_rollout, self.places, self._pool)
        self._about_to_play(moved.engine, moved.places, moved.pool)
        return moved

    def _pool_there(self, seat: Seat, mesh: MeshShape) -> Pool:
        """As many pages in all as the seat has, on another mesh."""
        return self._world.pool_of(mesh, self._device_pages(seat.pool))

    def thin_out(self, seat: Seat, live: int, longest: int, load: Load | None) -> Seat:
        """A seat for the last `live` episodes of a rollout; the longest has so many tokens.

        They go to another mesh if rounds of so few are so much faster there that the move is earned
        back until the longest is as long as episodes are expected to become. The next rollout
        begins where this one began.
        """
        world = self._world
        if load is None or world.config.selector.order == "listed" or world.processes.count > 1:
            return seat
        decision = self._chooser.choose_tail(
            seat,
            live,
            longest,
            load,
            self.in_training,
            self.offload,
            lambda mesh: (mesh, seat.places, self._pool_there(seat, mesh)) in self._played,
        )
        if decision is None or not decision.switched:
            return seat
        self._note(decision)
        pool = self._pool_there(seat, decision.mesh)
        moved = self._unless_short(
            "tail", lambda: self.move_seat(seat, decision.mesh, seat.places, pool)
        )
        return moved or seat

    def _about_to_play(self, engine: PolicyEngine, places: int, pool: Pool) -> None:
        key = play_key(engine.layout.shape, engine.config.num_slots, places, pool)
        self.calibration.about_to_use(key)

    def move_seat(self, seat: Seat, mesh: MeshShape, places: int, pool: Pool) -> Seat:
        """The same weights and live episodes on this mesh, with this room. `seat` stays as it is.

        The pool has more pages where the live episodes need them.
        """
        config, here = seat.engine.config, seat.engine.layout.shape
        engine = self._world.engine(mesh, config.num_slots, config.page_size)
        least = seat.pages.least_pages(pool.shards)
        pool = pool._replace(pages=max(pool.pages, least))
        self._played.add((mesh, places, pool))
        key = relocate_key(here, mesh, config.num_slots, seat.places, seat.pool, places, pool)
        self.calibration.about_to_use(key)
        start = time.perf_counter()
        moved = relocate(seat, engine, places, pool, chunk_bytes=self._chunk_bytes)
        if engine is not seat.engine:
            self.log.switch_s += time.perf_counter() - start
        return moved
