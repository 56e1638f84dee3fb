# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the keys, forward and backward, for ring attention and blocks of rows.

What was seen of some keys and of others adds up to what was seen of all (online softmax, arXiv
1805.02867). The backward pass is written out: differentiated by JAX, a loop over parts would keep
every part that came by. Attention sinks are a score of each query head that has no value: a softmax
that begins with them instead of with nothing. Heads come before tokens, so that no product has to
have its scores transposed. Arithmetic only, on one device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.attention.rows import BLOCK_SIZE, Positions, Spans, cap

# Below any score: that of a key which is not looked at. Least of what is looked at: the exponential
# of their difference is 0.
_FLOOR = -1e30
_LEAST = -5e29


class Rules(NamedTuple):
    """Settings of the scores: `scale`, `softcap` and `window` are those of `attention`."""

    scale: float
    softcap: float
    window: jax.Array


class KernelSettings(NamedTuple):
    """Static settings of a kernel: `scale` and `softcap` as of `Rules`; a `window` if it is static.

    With `interpret` its steps run as ordinary operations, which is slow: for tests on CPUs.
    """

    scale: float
    softcap: float
    window: int | None
    interpret: bool


class Place(NamedTuple):
    """The place of a part of a row: its tokens' positions, and their spans through the row."""

    positions: Positions
    spans: Spans

    @property
    def start(self) -> jax.Array:
        """The position of its first token."""
        return self.positions.order[0, 0]


class Seen(NamedTuple):
    """The state of an online softmax over the keys seen so far, in fp32.

    `weighted` is a sum of values, BKGTH, each times exp(its score - `most`); `total` adds up these
    weights and `most` is the largest score, both BKGT. Any axes before.
    """

    weighted: jax.Array
    total: jax.Array
    most: jax.Array


class Sides(NamedTuple):
    """Keys and values, BKSH, or gradients of them, BKHS. Any axes before."""

    key: jax.Array
    value: jax.Array


class Outcome(NamedTuple):
    """The facts of queries that the backward pass needs.

    `grad` is the gradient of what they attended to, BKGTH; `log_total` the logarithm of the sum of
    their softmax, and `projected` that gradient times what they attended to, both f32 BKGT. Any
    axes before.
    """

    grad: jax.Array
    log_total: jax.Array
    projected: jax.Array


def heads_first(array_BTKGH: jax.Array) -> jax.Array:
    """Returns an array of queries as BKGTH. Any axes before."""
    return jnp.moveaxis(array_BTKGH, -4, -2)


def tokens_first(array_BKGTH: jax.Array) -> jax.Array:
    """Returns the inverse of `heads_first`: BTKGH."""
    return jnp.moveaxis(array_BKGTH, -2, -4)


def no_gradients(sides: Sides) -> Sides:
    """Returns gradients of keys and values, BKSH, before the first is added: zeros, f32 BKHS."""
    return jax.tree.map(lambda side: jnp.zeros_like(side.swapaxes(-1, -2), jnp.float32), sides)


def nothing_seen(query_BKGTH: jax.Array, sinks_KG: jax.Array | None = None) -> Seen:
    """Returns the state before the first keys: that of the sinks alone. Any axes before."""
    sums = jnp.zeros(query_BKGTH.shape[:-1], jnp.float32)
    weighted = jnp.zeros(query_BKGTH.shape, jnp.float32)
    if sinks_KG is None:
        return Seen(weighted, sums, jnp.full_like(sums, _LEAST))
    most = jnp.broadcast_to(sinks_KG.astype(jnp.float32)[..., None], sums.shape)
    return Seen(weighted, jnp.ones_like(sums), most)


def look(
    rules: Rules, query_BKGTH: jax.Array, sides: Sides, own: Positions, others: Positions
) -> Seen:
    """Returns the state of queries at `own` positions over these keys alone, at `others`.

    The scores of one block of queries exist at a time.
    """

    def block(inputs: tuple[jax.Array, Positions]) -> Seen:
        query_BKGTH, positions = inputs
        scores_BKGTS, mask_BKGTS = _scores(rules, query_BKGTH, sides.key, positions, others)
        scores_BKGTS = jnp.where(mask_BKGTS, scores_BKGTS, _FLOOR)
        most_BKGT = jnp.maximum(jnp.max(scores_BKGTS, axis=-1), _LEAST)
        weights_BKGTS = jnp.exp(scores_BKGTS - most_BKGT[..., None])
        weighted_BKGTH = jnp.einsum(
            "BKGTS,BKSH->BKGTH",
            weights_BKGTS.astype(sides.value.dtype),
            sides.value,
            preferred_element_type=jnp.float32,
        )
        return Seen(weighted_BKGTH, jnp.sum(weights_BKGTS, axis=-1), most_BKGT)

    seen = jax.lax.map(block, (_blocks(query_BKGTH, 3), _blocks_of(own)))
    return Seen(*(joined(array, 3) for array in seen))


def merge(one: Seen, other: Seen) -> Seen:
    """Returns the state of the same queries over two disjoint sets of keys."""
    most = jnp.maximum(one.most, other.most)
    fade, other_fade = jnp.exp(one.most - most), jnp.exp(other.most - most)
    weighted = fade[..., None] * one.weighted + other_fade[..., None] * other.weighted
    return Seen(weighted, fade * one.total + other_fade * other.total, most)


def conclude(seen: Seen) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output, f32 BKGTH, and the logarithm of the softmax's sum, BKGT.

    Queries that saw nothing get zeros.
    """
    total = jnp.where(seen.total > 0, seen.total, 1.0)
    return seen.weighted / total[..., None], seen.most + jnp.log(total)


def outcome(out_BKGTH: jax.Array, grad_BKGTH: jax.Array, log_total_BKGT: jax.Array) -> Outcome:
    """Returns the facts of queries whose attention output is `out_BKGTH`."""
    f32 = jnp.float32
    projected_BKGT = jnp.sum(grad_BKGTH.astype(f32) * out_BKGTH.astype(f32), axis=-1)
    return Outcome(grad_BKGTH, log_total_BKGT, projected_BKGT)


def gradient_of_sinks(sinks_KG: jax.Array | None, outcome: Outcome) -> jax.Array | None:
    """Returns the gradient of the sinks by rows, f32 BKG.

    That of any score (`look_back`), of a key whose value is 0.
    """
    if sinks_KG is None:
        return None
    sinks_BKGT = jnp.broadcast_to(sinks_KG.astype(jnp.float32)[..., None], outcome.log_total.shape)
    weights_BKGT = jnp.exp(sinks_BKGT - outcome.log_total)
    return -jnp.sum(weights_BKGT * outcome.projected, axis=-1)


def look_back(
    rules: Rules,
    query_BKGTH: jax.Array,
    outcome: Outcome,
    sides: Sides,
    own: Positions,
    others: Positions,
) -> tuple[jax.Array, Sides]:
    """Returns gradients of these queries (BKGTH) and of these keys and values (BKHS), in fp32.

    With p the softmax's weights, the gradient of a score is p (grad v - grad out): FlashAttention,
    arXiv 2205.14135, appendix B.4.
    """
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def block(total: Sides, inputs: Any) -> tuple[Sides, jax.Array]:
        query_BKGTH, known, positions = inputs
        scores_BKGTS, mask_BKGTS = _scores(rules, query_BKGTH, sides.key, positions, others)
        looked_at_BKGTS = jnp.where(mask_BKGTS, scores_BKGTS, _FLOOR)
        weights_BKGTS = jnp.exp(looked_at_BKGTS - known.log_total[..., None])
        pull_BKGTS = einsum("BKGTH,BKSH->BKGTS", known.grad, sides.value)
        pull_BKGTS = weights_BKGTS * (pull_BKGTS - known.projected[..., None]) * rules.scale
        if rules.softcap:
            pull_BKGTS *= 1.0 - jnp.square(scores_BKGTS / rules.softcap)
        pull_BKGTS = pull_BKGTS.astype(query_BKGTH.dtype)
        of_sides = Sides(
            einsum("BKGTH,BKGTS->BKHS", query_BKGTH, pull_BKGTS),
            einsum("BKGTH,BKGTS->BKHS", known.grad, weights_BKGTS.astype(known.grad.dtype)),
        )
        of_query = einsum("BKGTS,BKSH->BKGTH", pull_BKGTS, sides.key)
        return jax.tree.map(jnp.add, total, of_sides), of_query

    known = Outcome(*(_blocks(array, 3) for array in outcome))
    blocks = (_blocks(query_BKGTH, 3), known, _blocks_of(own))
    of_sides, of_queries = jax.lax.scan(block, no_gradients(sides), blocks)
    return joined(of_queries, 3), of_sides


def _scores(
    rules: Rules, query_BKGTH: jax.Array, key_BKSH: jax.Array, own: Positions, others: Positions
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
        "BKGTH,BKSH->BKGTS", query_BKGTH, key_BKSH, preferred_element_type=jnp.float32
    )
    return cap(scores_BKGTS * rules.scale, rules.softcap), mask_BTS[:, None, None]


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
    """Returns blocks of at most BLOCK_SIZE, which `rows.part_length` makes even."""
    return pieces(array, axis, -(-array.shape[axis] // BLOCK_SIZE))


def _blocks_of(positions: Positions) -> Positions:
    return Positions(_blocks(positions.order, 1), _blocks(positions.segment, 1))
