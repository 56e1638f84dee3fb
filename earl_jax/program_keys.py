# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Names of a run's programs: who compiles one ahead and who uses it call it the same."""

from collections.abc import Hashable

from earl_jax.rollout.pages import Pool
from earl_jax.selector.ladder import TrainRung
from earl_jax.sharding.layout import MeshShape


def play_key(mesh: MeshShape, num_slots: int, places: int, pool: Pool) -> Hashable:
    """A round."""
    return "play", mesh, num_slots, places, pool


def relocate_key(
    here: MeshShape,
    there: MeshShape,
    num_slots: int,
    places: int,
    pool: Pool,
    more_places: int,
    more: Pool,
) -> Hashable:
    """Live episodes go to another mesh, or are given more room, or more pages."""
    return "relocate", here, there, num_slots, places, pool, more_places, more


def trainer_move_key(here: MeshShape, there: MeshShape) -> Hashable:
    """The trainer moves."""
    return "move", here, there


def train_key(mesh: MeshShape, length: int, rung: TrainRung) -> Hashable:
    """An update."""
    return "train", mesh, length, rung


def measured_key(mesh: MeshShape, num_slots: int, page_size: int, places: int) -> Hashable:
    """A round with pages for all slots, by which a candidate is measured."""
    return "measured", mesh, num_slots, page_size, places
