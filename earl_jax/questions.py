# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked of a candidate: which program it is, of what size, and how it is called."""

from earl_jax.measuring import (
    lower_train,
    measure_rollout,
    measure_train,
    on_the_clock,
    pool_bytes,
)
from earl_jax.program_keys import measured_key, train_key
from earl_jax.remembered import Question, Remembered
from earl_jax.selector.ladder import RolloutRung, TrainRung, rollout_size, train_size
from earl_jax.sharding.layout import MeshShape


class Questions(Remembered):
    """The questions of both stages in one world, and what is remembered of the answers."""

    def _rollout_question(self, mesh: MeshShape, places: int, rung: RolloutRung) -> Question:
        """With pages for all slots, in the most bytes that this rung has fewer."""
        world = self._world
        dense = rung._replace(pages=world.device_pages(places, rung.num_slots, rung.page_size))
        most = self.most_bytes - self._more_bytes(mesh, places, rung)
        return Question(
            stage="rollout",
            mesh=mesh,
            places=places,
            size=self._rollout_size(places, dense),
            most=most,
            program=measured_key(mesh, rung.num_slots, rung.page_size, places),
            measure=lambda: on_the_clock(lambda: measure_rollout(world, mesh, places, rung, most)),
            lower=lambda: world.engine(mesh, rung.num_slots, rung.page_size).lower_play(places),
            words=self._rollout_words(rung, ","),
        )

    def _train_question(self, mesh: MeshShape, places: int, rung: TrainRung) -> Question:
        world = self._world
        first = rung == world.first_train_rung
        return Question(
            stage="train",
            mesh=mesh,
            places=places,
            size=train_size(places, world.config.rollout.episodes_per_step, rung),
            most=self.most_bytes,
            program=train_key(mesh, places, rung),
            measure=lambda: on_the_clock(
                lambda: measure_train(world, mesh, places, rung, self.most_bytes)
            ),
            lower=lambda: lower_train(world, mesh, places, rung),
            words="" if first else f"micro_batches={rung.micro_batches},remat={rung.remat}",
        )

    def _rollout_words(self, rung: RolloutRung, comma: str) -> str:
        world, parts = self._world, []
        if rung.num_slots != world.own_rollout.num_slots:
            parts.append(f"slots={rung.num_slots}")
        if (size := world.page(rung.page_size)) != world.page():
            parts.append(f"page={size}")
        return comma.join(parts)

    def _rollout_size(self, places: int, rung: RolloutRung) -> tuple[int, ...]:
        return rollout_size(places, rung, self._world.page(rung.page_size))

    def _more_bytes(self, mesh: MeshShape, places: int, rung: RolloutRung) -> int:
        """By how much the rung's pages are more than pages for all slots; most often below 0."""
        world = self._world
        dense = world.device_pages(places, rung.num_slots, rung.page_size)
        one = pool_bytes(world, mesh, places, rung._replace(pages=1, offload=False))
        return (rung.pages - dense) * one

    def _tokens(self, rung: RolloutRung) -> int:
        """Tokens that a lane's pages hold."""
        return rung.pages * self._world.page(rung.page_size)
