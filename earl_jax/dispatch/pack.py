# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Experience in, training batch out: rows move from layout to layout, never through the host.

What the host adds are small facts that are born there: how long each episode is, and one advantage
per turn. Everything per token was written on the devices and stays on them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.dispatch.plan import DispatchPlan, plan_dispatch
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.reshard import reshard
from earl_jax.trajectory import Experience, TrajectoryBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """A batch on the training layout, and the plan by which its rows came there."""

    batch: TrajectoryBatch
    plan: DispatchPlan


def dispatch(
    experience: Experience,
    layout: Layout,
    *,
    length: int,
    lengths: np.ndarray,
    advantages: np.ndarray | jax.Array,
    sample_starts: np.ndarray | None = None,
) -> Delivery:
    """Moves N rows to `layout` and makes a TrajectoryBatch of them.

    Args:
        experience: device rows; cut or padded to `length` places where they are.
        layout: where the trainer wants them.
        length: tokens per row of the batch, T.
        lengths: i32[N], how many tokens of each row count.
        advantages: f32[N,M], one per episode and turn; on the host, or on `layout` already.
        sample_starts: i32[N,M], places where samples begin in a row, rising, and behind the row's
            end where there are fewer; None where every row is one sample.

    Raises:
        ValueError: the rows do not divide over the layout, or are longer than `length`.
    """
    longest = int(lengths.max(initial=0))
    if longest > length:
        raise ValueError(f"an episode of {longest} tokens does not fit rows of {length}")
    starts = np.zeros((len(lengths), 1)) if sample_starts is None else sample_starts
    rows = _fit(experience, length)
    shardings = jax.tree.map(lambda _: layout.activations("NS"), rows)
    plan = _plan(rows, shardings)
    rows = reshard(rows, shardings)
    facts = (
        jax.device_put(lengths.astype(np.int32), layout.activations("N")),
        jax.device_put(advantages.astype(np.float32), layout.activations("N.")),
        jax.device_put(starts.astype(np.int32), layout.activations("N.")),
    )
    return Delivery(batch=_pack(layout)(rows, *facts), plan=plan)


def _fit(experience: Experience, length: int) -> Experience:
    """Rows of `length` places: a cut or zeros at the end, within each shard."""
    if experience.tokens.shape[1] == length:
        return experience
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(experience))
    return _fitter(length, jax.tree.structure(experience), shardings)(experience)


@functools.lru_cache(maxsize=64)
def _fitter(length: int, tree: Any, shardings: tuple[Any, ...]) -> Any:
    def fit(experience: Experience) -> Experience:
        def one(field: jax.Array) -> jax.Array:
            missing = max(0, length - field.shape[1])
            return jnp.pad(field[:, :length], ((0, 0), (0, missing)))

        return jax.tree.map(one, experience)

    return jax.jit(fit, out_shardings=jax.tree.unflatten(tree, shardings))


def _plan(rows: Experience, shardings: Experience) -> DispatchPlan:
    leaves, tree = jax.tree.flatten(rows)
    described = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
    return _cached_plan(tree, described, tuple(jax.tree.leaves(shardings)))


@functools.lru_cache(maxsize=64)
def _cached_plan(tree, described, shardings) -> DispatchPlan:
    leaves = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, sharding in described
    ]
    return plan_dispatch(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(tree, shardings))


@functools.lru_cache(maxsize=64)
def _pack(layout: Layout):
    """The jitted join of rows and small facts on the training layout."""

    def pack(
        rows: Experience, lengths_N: jax.Array, advantages_NM: jax.Array, starts_NM: jax.Array
    ) -> TrajectoryBatch:
        order_T = jnp.arange(rows.tokens.shape[1])
        inside_NT = order_T[None, :] < lengths_N[:, None]
        # Rows of the engine's buffers may hold less than the whole buffer; cut what is behind.
        turn_ids_NT = jnp.where(inside_NT, rows.turn_ids, 0)
        turn_NT = jnp.maximum(turn_ids_NT - 1, 0)
        advantages_NT = jnp.take_along_axis(advantages_NM, turn_NT, axis=1)
        begun_NMT = starts_NM[:, :, None] <= order_T[None, None, :]
        segment_ids_NT = jnp.sum(begun_NMT, axis=1, dtype=jnp.int32)
        return TrajectoryBatch(
            tokens=jnp.where(inside_NT, rows.tokens, 0),
            segment_ids=jnp.where(inside_NT, segment_ids_NT, 0),
            turn_ids=turn_ids_NT,
            logprobs=rows.logprobs,
            versions=rows.versions,
            advantages=jnp.where(turn_ids_NT > 0, advantages_NT, 0.0),
        )

    return jax.jit(pack, out_shardings=layout.activations("NS"))
