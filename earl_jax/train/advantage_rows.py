# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages where the rewards are: rows on any layout, over any number of processes.

Each process brings what its own episodes were rewarded (`reward_rows`, small facts of the host).
One gather of these few numbers per episode lets every device compute the statistics of its groups
and of the batch for itself. Whatever the layout, a sum adds the same numbers in the same order, as
a tree over the batch's rows: the results are those of one device bit for bit.

`advantages.py` has the estimators in words and fp64; these are the same in fp32.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import place
from earl_jax.train.advantages import MIN_DEVIATION, discounted_returns, turn_table
from earl_jax.train.config import TrainConfig
from earl_jax.trajectory import FAILURES, Outcome, Trajectory

# Rows whose sums are formed at a time: 64 x 1,024 rows x 8 turns of fp32 are 2 MiB.
_ROWS_AT_A_TIME = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRows:
    """What N episodes were rewarded, at most M turns each.

    `returns` f32[N,M], zeros behind an episode's last turn: with "reinforce" the discounted return
    of each turn, with "grpo" the outcome in all. `peers` i32[N]: episodes with the same number are
    compared, which are those of a role or of a group. `num_turns` i32[N], 0 where nothing is to be
    learnt from an episode.

    Example ("reinforce", discount 0.5): rewards 0, 0, 1 of x are returns 0.25, 0.5, 1, 0 and 3
    turns; an episode that its environment failed has returns 0, 0, 0, 0 and 0 turns.
    """

    returns: Any
    peers: Any
    num_turns: Any


def reward_rows(
    config: TrainConfig, trajectories: Sequence[Trajectory | Outcome], num_turns: int
) -> RewardRows:
    """The facts of these episodes, on the host: at most `num_turns` turns each, M."""
    learnable = [t.stop_reason not in FAILURES for t in trajectories]
    rows, peers = [], []
    for trajectory, counts in zip(trajectories, learnable, strict=True):
        rewards = trajectory.turn_rewards if counts else ()
        if config.advantage == "grpo":
            rows.append(np.full(len(rewards), sum(rewards), np.float64))
            peers.append(trajectory.group)
        else:
            rows.append(discounted_returns(rewards, config.turn_discount))
            # Names of roles, as numbers on which all processes agree.
            peers.append(zlib.crc32(trajectory.role.encode()) & 0x7FFFFFFF)
    return RewardRows(
        returns=turn_table(rows, num_turns),
        peers=np.array(peers, np.int32),
        num_turns=np.array([len(row) for row in rows], np.int32),
    )


def place_rows(rows: RewardRows, layout: Layout) -> RewardRows:
    """On the devices, N over the rows' axes. Every process has all rows, and puts its devices'."""
    return jax.tree.map(
        lambda field: place(field, layout.activations("N" + "." * (field.ndim - 1))), rows
    )


def advantages_of(config: TrainConfig, rows: RewardRows, layout: Layout) -> jax.Array:
    """f32[N,M] on the layout of `rows`: one advantage per episode and turn, 0 behind the last.

    One all-gather of 4 (M + 2) bytes per episode; no byte comes to the host.
    """
    return _program(config.advantage, config.normalize_advantages, layout)(rows)


@functools.lru_cache(maxsize=64)
def _program(estimator: str, normalize: bool, layout: Layout) -> Callable[[RewardRows], jax.Array]:
    axes = layout.row_axes
    row = PartitionSpec(axes)

    def run(own: RewardRows) -> jax.Array:
        bits = lax.bitcast_convert_type(own.returns, jnp.int32)
        facts = jnp.concatenate([bits, own.peers[:, None], own.num_turns[:, None]], axis=1)
        facts = lax.all_gather(facts, axes, axis=0, tiled=True)
        every = RewardRows(
            returns=lax.bitcast_convert_type(facts[:, :-2], jnp.float32),
            peers=facts[:, -2],
            num_turns=facts[:, -1],
        )
        table = estimate(estimator, normalize, every)
        first = lax.axis_index(axes) * own.peers.shape[0]
        return lax.dynamic_slice_in_dim(table, first, own.peers.shape[0])

    return jax.jit(
        jax.shard_map(run, mesh=layout.mesh, in_specs=row, out_specs=row, check_vma=False)
    )


def estimate(estimator: str, normalize: bool, rows: RewardRows) -> jax.Array:
    """f32[N,M] of all rows of a batch, on one device."""
    within_NM = jnp.arange(rows.returns.shape[1])[None, :] < rows.num_turns[:, None]
    if estimator == "grpo":
        played_N1 = within_NM[:, :1]
        outcome_N1 = rows.returns[:, :1]
        mean_N1, _ = _peer_means(outcome_N1, played_N1, rows.peers)
        advantage_N1 = outcome_N1 - mean_N1
        if normalize:
            square_N1 = lax.optimization_barrier(advantage_N1 * advantage_N1)
            variance_N1, _ = _peer_means(square_N1, played_N1, rows.peers)
            advantage_N1 = _divided(advantage_N1, jnp.sqrt(variance_N1))
        return jnp.where(within_NM, advantage_N1, 0.0)
    assert estimator == "reinforce", estimator
    mean_NM, _ = _peer_means(rows.returns, within_NM, rows.peers)
    advantage_NM = jnp.where(within_NM, rows.returns - mean_NM, 0.0)
    if not normalize:
        return advantage_NM
    count = jnp.maximum(jnp.sum(within_NM), 1).astype(jnp.float32)
    offset_NM = jnp.where(within_NM, advantage_NM - _sum(advantage_NM.reshape(-1)) / count, 0.0)
    square_NM = lax.optimization_barrier(offset_NM * offset_NM)
    return _divided(advantage_NM, jnp.sqrt(_sum(square_NM.reshape(-1)) / count))


def _divided(advantage: jax.Array, deviation: jax.Array) -> jax.Array:
    """By the deviation, unless it is none."""
    return advantage / jnp.where(deviation > MIN_DEVIATION, deviation, 1.0)


def _peer_means(
    values_NM: jax.Array, counts_NM: jax.Array, peers_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For each row and turn the mean over the rows with the same peers that count there."""

    def of_row(peer: jax.Array) -> tuple[jax.Array, jax.Array]:
        same_NM = (peers_N == peer)[:, None] & counts_NM
        number_M = jnp.sum(same_NM, axis=0).astype(jnp.float32)
        total_M = _sum(jnp.where(same_NM, values_NM, 0.0))
        return total_M / jnp.maximum(number_M, 1.0), number_M

    return lax.map(of_row, peers_N, batch_size=_ROWS_AT_A_TIME)


def _sum(values: jax.Array) -> jax.Array:
    """Over the first axis, as a tree of additions that no compiler may reorder."""
    length = 1 << max(0, values.shape[0] - 1).bit_length()
    values = jnp.pad(values, [(0, length - values.shape[0])] + [(0, 0)] * (values.ndim - 1))
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        values = values[:half] + values[half:]
    return values[0]
