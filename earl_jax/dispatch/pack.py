# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Experience in, training batch out: rows move from layout to layout, never through the host.

What the host adds are small facts that are born there: how long each episode is, and one advantage
per turn. Everything per token was written on the devices and stays on them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from earl_jax.dispatch.plan import DispatchPlan, plan_dispatch
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import absent_array, absent_tree, same_shards
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.row_gather import gather_rows
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
    advantages: np.ndarray,
    sample_starts: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> Delivery:
    """Moves N rows to `layout` and makes a TrajectoryBatch of them.

    Where devices of several processes take part, every process calls this, those too that only make
    rows or only train; each brings the facts of the rows that it holds (arrays of 0 rows where it
    holds none), and they travel with the rows. A process that does not train gets a batch of which
    it has no part.

    Args:
        experience: device rows; cut or padded to `length` tokens on their devices.
        layout: where the trainer wants them.
        length: tokens per row of the batch, T.
        lengths: i32[N], how many tokens of each row count.
        advantages: f32[N,M], one per episode and turn.
        sample_starts: i32[N,M], ascending positions of the first token of each sample in a row,
            past the row's end where there are fewer; None where every row is one sample.
        groups: i32[N], a number for each group of episodes; None for a batch without them.

    Raises:
        ValueError: the rows do not divide over the layout, or are longer than `length`.
    """
    longest = int(lengths.max(initial=0))
    if longest > length:
        raise ValueError(f"an episode of {longest} tokens does not fit rows of {length}")
    starts = np.zeros((len(lengths), 1)) if sample_starts is None else sample_starts
    rows = fit(experience, length)
    shardings = jax.tree.map(lambda _: layout.activations("NS"), rows)
    plan = _plan(rows, shardings)
    facts = [lengths.astype(np.int32), advantages.astype(np.float32), starts.astype(np.int32)]
    goals = [layout.activations(axes) for axes in ("N", "N.", "N.")]
    if groups is not None:
        facts.append(groups.astype(np.int32))
        goals.append(layout.activations("N"))
    if layout.activations("N").is_fully_addressable and rows.tokens.is_fully_addressable:
        rows, facts = reshard(rows, shardings), jax.device_put(facts, goals)
    else:
        beside = [_beside(fact, rows.tokens) for fact in facts]
        rows, facts = reshard((rows, beside), (shardings, goals))
    if not layout.activations("N").addressable_devices:
        return Delivery(batch=_absent_batch(rows, layout, groups is not None), plan=plan)
    return Delivery(batch=_pack(layout)(rows, *facts), plan=plan)


def rows_here(layout: Layout, items: Any) -> Any:
    """Returns those of a sequence of an item a row whose rows this process's devices have."""
    indices = layout.activations("N").addressable_devices_indices_map((len(items),))
    if not indices:
        return items[:0]
    parts = [index[0].indices(len(items)) for index in indices.values() if index]
    return items[min(first for first, _, _ in parts) : max(end for _, end, _ in parts)]


def _beside(fact: np.ndarray, tokens: jax.Array) -> jax.Array:
    """Places facts of this process's rows in an array over all rows, on the rows' devices."""
    source = tokens.sharding
    assert isinstance(source, NamedSharding)
    axes = tuple(source.spec)[:1]
    sharding = NamedSharding(source.mesh, PartitionSpec(*axes))
    shape = (tokens.shape[0], *fact.shape[1:])
    if not sharding.addressable_devices:
        return absent_array(shape, fact.dtype, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(fact), shape)


def _absent_batch(rows: Experience, layout: Layout, has_groups: bool) -> TrajectoryBatch:
    sharding, shape = layout.activations("NS"), rows.tokens.shape
    number, real = (absent_array(shape, dtype, sharding) for dtype in (np.int32, np.float32))
    return TrajectoryBatch(
        tokens=number,
        segment_ids=number,
        turn_ids=number,
        logprobs=real,
        versions=number,
        advantages=real,
        groups=number if has_groups else None,
        allowed=(number,) * len(rows.allowed),
    )


def fit(experience: Experience, length: int) -> Experience:
    """Returns rows of `length` tokens, cut or padded with zeros within each shard."""
    if experience.tokens.shape[1] == length:
        return experience
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(experience))
    if not experience.tokens.addressable_shards:
        return jax.tree.map(
            lambda field: absent_array((field.shape[0], length), field.dtype, field.sharding),
            experience,
        )
    return _fitter(length, jax.tree.structure(experience), shardings)(experience)


@functools.lru_cache(maxsize=64)
def _fitter(length: int, tree: Any, shardings: tuple[Any, ...]) -> Any:
    def fit(experience: Experience) -> Experience:
        def one(field: jax.Array) -> jax.Array:
            missing = max(0, length - field.shape[1])
            return jnp.pad(field[:, :length], ((0, 0), (0, missing)))

        return jax.tree.map(one, experience)

    return jax.jit(fit, out_shardings=jax.tree.unflatten(tree, shardings))


def join_rows(
    rows: Experience | None,
    own: Layout,
    global_layout: Layout,
    num_rows: int,
    length: int,
    choice_width: int = 0,
) -> Experience:
    """Returns the rows of all processes as one array each, cut or padded to `length` tokens.

    Where a rollout ended on another mesh than that of `own`, its rows move there, within the
    process; their shards then become those of the global arrays, without a copy.

    Args:
        rows: this process's; None where it plays nothing.
        own: this process's part of the rollout's layout.
        global_layout: the rollout's layout over the devices of all processes.
        num_rows: rows of all processes.
        length: tokens of a row.
        choice_width: arrays of `Experience.allowed`.
    """
    number: Any = jax.ShapeDtypeStruct((num_rows, length), np.int32)
    real: Any = jax.ShapeDtypeStruct((num_rows, length), np.float32)
    shapes = Experience(
        tokens=number,
        turn_ids=number,
        logprobs=real,
        versions=number,
        allowed=(number,) * choice_width,
    )
    shardings = jax.tree.map(lambda _: global_layout.activations("NS"), shapes)
    if rows is None:
        return absent_tree(shapes, shardings)
    rows = reshard(fit(rows, length), jax.tree.map(lambda _: own.activations("NS"), shapes))
    return same_shards(rows, shardings, shapes)


def order_rows(rows: Experience, order: Sequence[int], layout: Layout) -> Experience:
    """Returns the rows of these numbers in this order, cut over the same row shards.

    They move between processes where need be; each device holds a field of all N rows meanwhile, 4
    bytes a token, one field after the other. Every process that has a part of `layout` calls it
    alike; another one gets rows of which it has no part. Donates nothing.

    Args:
        rows: on `layout`, as `join_rows` returns them.
        order: numbers of N rows, which divide over the row shards.
        layout: the rollout's, over the devices of all processes.
    """
    sharding = layout.activations("NS")
    if not sharding.addressable_devices:
        return jax.tree.map(
            lambda field: absent_array((len(order), field.shape[1]), field.dtype, sharding), rows
        )
    return _orderer(layout)(rows, np.asarray(order, np.int32))


def order_bytes(rows: Experience, order: Sequence[int], layout: Layout) -> int:
    """Returns the bytes of rows that `order_rows` moves to other devices."""
    shards = layout.num_row_shards
    before = np.asarray(order) // (rows.tokens.shape[0] // shards)
    after = np.arange(len(order)) // (len(order) // shards)
    a_row = sum(field.shape[1] * field.dtype.itemsize for field in jax.tree.leaves(rows))
    return int(np.count_nonzero(before != after)) * a_row * (layout.shape.num_devices // shards)


@functools.lru_cache(maxsize=64)
def _orderer(layout: Layout) -> Any:
    rows = PartitionSpec(layout.row_axes)
    ordered = jax.shard_map(
        lambda experience, order_N: gather_rows(experience, order_N, layout.row_axes),
        mesh=layout.mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
        axis_names=layout.by_hand(layout.row_axes),
        check_vma=False,
    )
    return jax.jit(ordered, out_shardings=layout.activations("NS"))


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
    """Returns the jitted join of rows and small facts on the training layout."""

    def pack(
        rows: Experience,
        lengths_N: jax.Array,
        advantages_NM: jax.Array,
        starts_NM: jax.Array,
        groups_N: jax.Array | None = None,
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
            groups=None if groups_N is None else jnp.where(inside_NT, groups_N[:, None], 0),
            allowed=tuple(jnp.where(inside_NT, ids_NT, 0) for ids_NT in rows.allowed),
        )

    return jax.jit(pack, out_shardings=layout.activations("NS"))


def sample_starts(starts: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Returns i32[N,M]: where each episode's samples begin; `length` behind its last.

    M is a power of two, so that few programs are compiled for it.
    """
    width = 1 << (max(map(len, starts)) - 1).bit_length()
    table = np.full((len(starts), width), length, np.int32)
    for row, given in zip(table, starts, strict=True):
        row[: len(given)] = given
    return table
