# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Which mesh each stage is on, and what moves when that changes.

The only place where a Decision becomes arrays on other devices: weights and live KV caches of a
rollout, parameters and optimiser state of the trainer.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from earl_jax.calibrate import Calibration
from earl_jax.joint import send_weights
from earl_jax.rollout.pages import Pool, pages_for
from earl_jax.rollout.seat import Policy, Seat
from earl_jax.selector.choose import BudgetTooSmall, Decision, Option, Settings, choose
from earl_jax.selector.memory import resident_bytes
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import absent_tree
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry.load import Load
from earl_jax.train.step import TrainState
from earl_jax.world import World


@dataclasses.dataclass(kw_only=True)
class SwitchLog:
    """What changed since the last step was logged."""

    decisions: list[Decision] = dataclasses.field(default_factory=list)
    switch_s: float = 0.0
    bytes_per_device: int = 0


class Placement:
    """The meshes in use. Host-side state only; all of it is in `as_dict`, for the checkpoint."""

    def __init__(self, world: World, calibration: Calibration) -> None:
        self._world, self.calibration = world, calibration
        selector = world.config.selector
        self._settings = Settings(
            budget_bytes=world.budget_bytes,
            hysteresis=selector.hysteresis,
            horizon_steps=selector.horizon_steps,
        )
        self.rollout_mesh: MeshShape | None = None
        self.train_mesh: MeshShape | None = None
        self.places = self.pages = 0
        self.log = SwitchLog()

    def as_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on choosing alike."""
        return {
            "rollout_mesh": str(self.rollout_mesh),
            "train_mesh": str(self.train_mesh),
            "places": self.places,
            "pages": self.pages,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """The inverse of `as_dict`."""
        self.rollout_mesh = MeshShape.parse(saved["rollout_mesh"])
        self.train_mesh = MeshShape.parse(saved["train_mesh"])
        self.places, self.pages = saved["places"], saved["pages"]

    @property
    def in_rollout(self) -> MeshShape:
        """The rollout mesh in use; one must have been chosen."""
        assert self.rollout_mesh is not None
        return self.rollout_mesh

    @property
    def in_training(self) -> MeshShape:
        """The training mesh in use; one must have been chosen."""
        assert self.train_mesh is not None
        return self.train_mesh

    def take_log(self) -> SwitchLog:
        """What was decided since the last call."""
        log, self.log = self.log, SwitchLog()
        return log

    def check_budget(self) -> None:
        """Sees that every configured room per episode has a mesh for both stages.

        Raises:
            BudgetTooSmall: one has none; names the smallest budget that would do for all.
        """
        world = self._world
        least_state = min(self._trainer_bytes(mesh) for mesh in world.train_candidates)
        needs = []
        for places in world.config.rollout.context_buckets:
            for stage, options in (
                ("training", self.calibration.train_options(places)),
                (
                    "rollout",
                    self.calibration.rollout_options(
                        places, least_state, self._least_pages(places)
                    ),
                ),
            ):
                need = min(option.bytes_per_device for option in options)
                needs.append((need, f"{stage} with {places} tokens of room per episode"))
        need, what = max(needs)
        budget = self._settings.budget_bytes
        if budget is not None and need > budget:
            raise BudgetTooSmall(
                f"config.selector.budget_bytes_per_device is {budget}, and no candidate mesh for "
                f"{what} fits it; the smallest budget that would do is {need}. Raise the budget, "
                "use more devices, or lower config.rollout.num_slots or the model's size"
            )

    # Training.

    def choose_training(self, load: Load | None) -> Decision:
        """The training mesh for rows as long as the longest of recent steps.

        By recent steps and not by the batch at hand: where the longest episode comes and goes, the
        mesh must not.
        """
        rollout = self._world.config.rollout
        length = rollout.places_for(load.context_tokens_max if load else 1)
        options = self.calibration.train_options(length)
        decision = choose(
            "train",
            options,
            current=self.train_mesh,
            places=length,
            load=load,
            step_tokens=rollout.episodes_per_step * length,
            switch_s=max(self.calibration.switch_s("train", o.mesh, length) for o in options),
            settings=self._settings,
        )
        self._note(decision)
        self.train_mesh = decision.mesh
        return decision

    def move_state(self, state: TrainState) -> TrainState:
        """Parameters and optimiser state on the training mesh in use; `state` is given up."""
        shardings = self._world.train_state_shardings(self.in_training)
        if not self._world.processes.trains:
            return absent_tree(self._world.train_state_shapes(), shardings)
        if jax.tree.leaves(state)[0].sharding == jax.tree.leaves(shardings)[0]:
            return state
        start = time.perf_counter()
        state = reshard(state, shardings, chunk_bytes=self._chunk_bytes, donate=True)
        self._world.processes.wait(state, "the switch of the trainer")
        self.log.switch_s += time.perf_counter() - start
        return state

    # Rollout.

    def choose_rollout(self, tokens: int, load: Load | None) -> Decision:
        """The rollout mesh for episodes of up to `tokens` tokens, and the pages of its KV cache.

        As many as the rollout before had in the end, if the budget allows.
        """
        world = self._world
        places = world.config.rollout.places_for(tokens)
        first = world.pool_for(world.config.rollout.context_buckets[0])
        wanted = min(max(self.pages, first.pages), world.pool_for(places).pages)
        return self._choose_rollout(places, [wanted, self._least_pages(places)], load)

    def _choose_rollout(self, places: int, pages: Sequence[int], load: Load | None) -> Decision:
        """With the first number of pages a lane, of those for one episode at least, that fits."""
        rollout = self._world.config.rollout
        resident = self._trainer_bytes(self.in_training)
        numbers = list(dict.fromkeys(max(n, self._least_pages(places)) for n in pages))
        while True:
            options = self.calibration.rollout_options(places, resident, numbers[0])
            try:
                decision = choose(
                    "rollout",
                    options,
                    current=self.rollout_mesh,
                    places=places,
                    load=load,
                    step_tokens=load.rollout_tokens
                    if load
                    else rollout.episodes_per_step * rollout.max_turn_tokens,
                    switch_s=max(
                        self.calibration.switch_s("rollout", o.mesh, places) for o in options
                    ),
                    settings=self._settings,
                )
            except BudgetTooSmall:
                # With fewer pages some episodes wait for others.
                if len(numbers) == 1:
                    raise
                del numbers[0]
                continue
            self._note(decision)
            self.rollout_mesh, self.places, self.pages = decision.mesh, places, numbers[0]
            return decision

    def _smallest_rollouts(self, places: int, resident: int) -> list[Option]:
        return self.calibration.rollout_options(places, resident, self._least_pages(places))

    def _least_pages(self, places: int) -> int:
        """A lane has pages for one whole episode."""
        return pages_for(places, self._world.config.rollout.tokens_a_page)

    @property
    def _chunk_bytes(self) -> int | None:
        return self._world.config.dispatch.chunk_bytes or None

    @property
    def _pool(self) -> Pool:
        return Pool(lanes=len(self._world.processes.lanes), pages=self.pages)

    def open_seat(self, params: Any, version: int) -> tuple[Seat | None, int]:
        """An empty seat on the rollout mesh in use, with this policy published to it.

        Every process calls it.

        Returns:
            The seat, None in a process that does not play, and the bytes of weights that changed
            device, of all processes.
        """
        world = self._world
        engine = world.engine(self.in_rollout)
        published = send_weights(world, params, self.in_rollout, self._chunk_bytes)
        if not world.processes.plays:
            return None, published.moved_bytes
        policy = Policy(params=published.params, version=version)
        pool = self._pool
        state = engine.empty_state(self.places, pool)
        seat = Seat(engine=engine, policy=policy, state=state, places=self.places, pool=pool)
        return seat, published.moved_bytes

    def make_room(self, seat: Seat, tokens: int, pages: int, load: Load | None) -> Seat:
        """A seat with room for `tokens` tokens an episode: the live episodes move along.

        It has `pages` pages a lane, and half as many again so that it does not grow often, if the
        budget allows them on any mesh; else as many as before.

        Chooses anew for the larger room: if the budget does not hold it on this mesh, weights and
        live KV caches go to another one and the episodes continue there.
        """
        places = self._world.config.rollout.places_for(tokens)
        roomy = min(3 * pages // 2, self._world.pool_for(places).pages)
        has = seat.pool.pages
        wanted = [max(roomy, pages), pages, has] if pages > has else [has]
        with self.calibration.apart():
            self._choose_rollout(places, wanted, load)
        engine = self._world.engine(self.in_rollout)
        policy, state = seat.policy, seat.state
        if engine is not seat.engine:
            start = time.perf_counter()
            params, state = jax.block_until_ready(
                reshard(
                    (policy.params, state),
                    (engine.parameter_shardings, engine.state_shardings),
                    chunk_bytes=self._chunk_bytes,
                )
            )
            policy = dataclasses.replace(policy, params=params)
            self.log.switch_s += time.perf_counter() - start
        pool = self._pool
        state = engine.grow(state, self.places, seat.pool, pool)
        return Seat(engine=engine, policy=policy, state=state, places=self.places, pool=pool)

    def _trainer_bytes(self, mesh: MeshShape) -> int:
        """What a trainer on this mesh leaves on each device while episodes are played."""
        world = self._world
        if world.processes.disjoint:
            return 0
        return resident_bytes(world.train_state_shapes(), world.train_state_shardings(mesh))

    def _note(self, decision: Decision) -> None:
        self.log.decisions.append(decision)
        self.log.bytes_per_device = max(self.log.bytes_per_device, decision.bytes_per_device)
