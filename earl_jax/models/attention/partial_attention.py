# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the keys, forward and backward, for ring attention.

What was seen of some keys and of others adds up to what was seen of all (online softmax, arXiv
1805.02867). The backward pass is written out: differentiated by JAX, a loop over parts would keep
every part that came by. Attention sinks are a score of each query head that has no value: a softmax
that begins with them instead of with nothing. Arithmetic only, on one device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import BLOCK_SIZE, Positions, cap

# Below any score: what nobody looks at.
_FLOOR = -1e30


class Rules(NamedTuple):
    """Settings of the scores: `scale`, `softcap` and `window` are those of `attention`."""

    scale: float
    softcap: float
    window: jax.Array


class Seen(NamedTuple):
    """The state of an online softmax over the keys seen so far, in fp32.

    `weighted` is a sum of values, BTKGH, each times exp(its score - `most`); `total` adds up these
    weights and `most` is the largest score, both BKGT. Any axes before.
    """

    weighted: jax.Array
    total: jax.Array
    most: jax.Array


class Sides(NamedTuple):
    """Keys and values, or gradients of them: BKSH. Any axes before."""

    key: jax.Array
    value: jax.Array


class Outcome(NamedTuple):
    """The facts of queries that the backward pass needs.

    `grad` is the gradient of what they attended to, BTKGH; `log_total` the logarithm of the sum of
    their softmax, and `projected` that gradient times what they attended to, both f32 BKGT. Any
    axes before.
    """

    grad: jax.Array
    log_total: jax.Array
    projected: jax.Array


def nothing_seen(query_BTKGH: jax.Array, sinks_KG: jax.Array | None = None) -> Seen:
    """Returns the state before the first keys: that of the sinks alone. Any axes before."""
    sums = jnp.moveaxis(jnp.zeros(query_BTKGH.shape[:-1], jnp.float32), -3, -1)
    weighted = jnp.zeros(query_BTKGH.shape, jnp.float32)
    if sinks_KG is None:
        return Seen(weighted, sums, jnp.full_like(sums, _FLOOR))
    most = jnp.broadcast_to(sinks_KG.astype(jnp.float32)[..., None], sums.shape)
    return Seen(weighted, jnp.ones_like(sums), most)


def look(
    rules: Rules, query_BTKGH: jax.Array, sides: Sides, own: Positions, others: Positions
) -> Seen:
    """Returns the state of queries at `own` positions over these keys alone, at `others`.

    The scores of one block of queries exist at a time.
    """

    def block(inputs: tuple[jax.Array, Positions]) -> Seen:
        query_BTKGH, positions = inputs
        scores_BKGTS, mask_BKGTS = _scores(rules, query_BTKGH, sides.key, positions, others)
        most_BKGT = jnp.max(jnp.where(mask_BKGTS, scores_BKGTS, _FLOOR), axis=-1)
        weights_BKGTS = jnp.exp(scores_BKGTS - most_BKGT[..., None])
        weights_BKGTS = jnp.where(mask_BKGTS, weights_BKGTS, 0.0)
        weighted_BTKGH = jnp.einsum(
            "BKGTS,BKSH->BTKGH",
            weights_BKGTS.astype(sides.value.dtype),
            sides.value,
            preferred_element_type=jnp.float32,
        )
        return Seen(weighted_BTKGH, jnp.sum(weights_BKGTS, axis=-1), most_BKGT)

    seen = jax.lax.map(block, (_blocks(query_BTKGH, 1), _blocks_of(own)))
    return Seen(joined(seen.weighted, 1), joined(seen.total, 3), joined(seen.most, 3))


def merge(one: Seen, other: Seen) -> Seen:
    """Returns the state of the same queries over two disjoint sets of keys."""
    most = jnp.maximum(one.most, other.most)
    fade, other_fade = jnp.exp(one.most - most), jnp.exp(other.most - most)
    weighted = _by_query(fade) * one.weighted + _by_query(other_fade) * other.weighted
    return Seen(weighted, fade * one.total + other_fade * other.total, most)


def conclude(seen: Seen) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output, f32 BTKGH, and the logarithm of the softmax's sum, BKGT.

    Queries that saw nothing get zeros.
    """
    total = jnp.where(seen.total > 0, seen.total, 1.0)
    return seen.weighted / _by_query(total), seen.most + jnp.log(total)


def outcome(out_BTKGH: jax.Array, grad_BTKGH: jax.Array, log_total_BKGT: jax.Array) -> Outcome:
    """Returns the facts of queries whose attention output is `out_BTKGH`."""
    f32 = jnp.float32
    projected_BTKG = jnp.sum(grad_BTKGH.astype(f32) * out_BTKGH.astype(f32), axis=-1)
    return Outcome(grad_BTKGH, log_total_BKGT, projected_BTKG.transpose(0, 2, 3, 1))


def gradient_of_sinks(
    sinks_KG: jax.Array | None, out_BTKGH: jax.Array, grad_BTKGH: jax.Array, log_total: jax.Array
) -> jax.Array | None:
    """Returns the gradient of the sinks by rows, f32 BKG; `log_total` is f32 BKGT.

    That of any score (`look_back`), of a key whose value is 0.
    """
    if sinks_KG is None:
        return None
    weights_BKGT = jnp.exp(sinks_KG.astype(jnp.float32)[None, ..., None] - log_total)
    known = outcome(out_BTKGH, grad_BTKGH, log_total)
    return -jnp.sum(weights_BKGT * known.projected, axis=-1)


def look_back(
    rules: Rules,
    query_BTKGH: jax.Array,
    outcome: Outcome,
    sides: Sides,
    own: Positions,
    others: Positions,
) -> tuple[jax.Array, Sides]:
    """Returns gradients of these queries (BTKGH) and of these keys and values, in fp32.

    With p the softmax's weights, the gradient of a score is p (grad v - grad out): FlashAttention,
    arXiv 2205.14135, appendix B.4.
    """
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def block(total: Sides, inputs: Any) -> tuple[Sides, jax.Array]:
        query_BTKGH, grad_BTKGH, log_total_BKGT, projected_BKGT, positions = inputs
        scores_BKGTS, mask_BKGTS = _scores(rules, query_BTKGH, sides.key, positions, others)
        weights_BKGTS = jnp.exp(scores_BKGTS - log_total_BKGT[..., None])
        weights_BKGTS = jnp.where(mask_BKGTS, weights_BKGTS, 0.0)
        pull_BKGTS = einsum("BTKGH,BKSH->BKGTS", grad_BTKGH, sides.value)
        pull_BKGTS = weights_BKGTS * (pull_BKGTS - projected_BKGT[..., None]) * rules.scale
        if rules.softcap:
            pull_BKGTS *= 1.0 - jnp.square(scores_BKGTS / rules.softcap)
        pull_BKGTS = pull_BKGTS.astype(query_BTKGH.dtype)
        of_sides = Sides(
            einsum("BKGTS,BTKGH->BKSH", pull_BKGTS, query_BTKGH),
            einsum("BKGTS,BTKGH->BKSH", weights_BKGTS.astype(grad_BTKGH.dtype), grad_BTKGH),
        )
        of_query = einsum("BKGTS,BKSH->BTKGH", pull_BKGTS, sides.key)
        return jax.tree.map(jnp.add, total, of_sides), of_query

    blocks = (
        _blocks(query_BTKGH, 1),
        _blocks(outcome.grad, 1),
        _blocks(outcome.log_total, 3),
        _blocks(outcome.projected, 3),
        _blocks_of(own),
    )
    zeros = jax.tree.map(lambda side: jnp.zeros(side.shape, jnp.float32), sides)
    of_sides, of_queries = jax.lax.scan(block, zeros, blocks)
    return joined(of_queries, 1), of_sides


def _scores(
    rules: Rules, query_BTKGH: jax.Array, key_BKSH: jax.Array, own: Positions, others: Positions
) -> tuple[jax.Array, jax.Array]:
    """Returns scores f32 BKGTS, and the mask of those that count, with 1 for K and G."""
    behind_BTS = own.order[:, :, None] - others.order[:, None, :]
    mask_BTS = (
        (own.segment[:, :, None] == others.segment[:, None, :])
        & (own.segment[:, :, None] > 0)
        & (behind_BTS >= 0)
        & (behind_BTS < rules.window)
    )
    scores_BKGTS = jnp.einsum(
        "BTKGH,BKSH->BKGTS", query_BTKGH, key_BKSH, preferred_element_type=jnp.float32
    )
    return cap(scores_BKGTS * rules.scale, rules.softcap), mask_BTS[:, None, None]


def _by_query(sums_BKGT: jax.Array) -> jax.Array:
    """Returns a factor per query, BKGT, in axes that broadcast over BTKGH."""
    return jnp.moveaxis(sums_BKGT, -1, -3)[..., None]


# Along an axis of tokens.


def pieces(array: jax.Array, axis: int, number: int) -> jax.Array:
    """Returns an array cut in so many even pieces, along a new first axis."""
    shape = array.shape
    array = array.reshape(*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])
    return jnp.moveaxis(array, axis, 0)


def joined(array: jax.Array, axis: int) -> jax.Array:
    """Returns the inverse of `pieces`; `axis` is that of the result."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def _blocks(array: jax.Array, axis: int) -> jax.Array:
    """Returns blocks of at most BLOCK_SIZE, which `folding.part_length` makes even."""
    return pieces(array, axis, -(-array.shape[axis] // BLOCK_SIZE))


def _blocks_of(positions: Positions) -> Positions:
    return Positions(_blocks(positions.order, 1), _blocks(positions.segment, 1))
