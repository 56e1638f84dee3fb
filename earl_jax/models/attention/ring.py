# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows that are cut over the `context` axis: keys and values go round in a ring.

Each shard keeps its queries, looks at the keys and values that it has, and hands them on, until all
have been everywhere (Ring Attention, arXiv 2310.01889). Rows are folded (folding.py), so that of
all pairs of a part of queries and a part of keys each shard has as many to look at, and none whose
keys come later: three when it has its own keys, and two whenever it has others', less those that
are farther apart than a window, or share no segment. (Striped attention, arXiv 2311.09431, is even
too, but half of every pair is masked.) The mask goes by where tokens stand and by their segments,
which every shard knows of whole rows, and never by where they lie. A part looks at another by a
kernel on GPUs (rows_triton.py) and TPUs (splash.py), and by arithmetic in jax elsewhere.

Why a ring, for a row of 131,072 tokens of Llama-3.1-8B in bf16, where keys and values of a layer
are 512 MiB:

- Gathered on every device (as Llama 3 does, arXiv 2407.21783) they, and their gradients in fp32
  before these are scattered, take 1.5 GiB however many shards there are. In the ring, on 8 shards,
  those that are there, those that come and the gradients that travel with them take 256 MiB. Bytes
  over links are alike: every device receives all keys and values, and in the backward pass
  gradients too.
- All-to-all (DeepSpeed Ulysses, arXiv 2309.14509) sends less, but cuts heads while it attends: not
  into more shards than there are key/value heads, of which `tensor` takes its part first.
- The 64 MiB of a hop take 0.2 ms over NVLink, and 0.8 ms along a v5e's torus; the two pairs that
  are looked at meanwhile are 2.2 TFLOP, which are some ms, and more than ten.

Backward, the ring goes round once more, from the sums of the softmax that the forward pass kept:
memory is that of a shard's tokens in both directions.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from earl_jax.models.attention.partial_attention import (
    KernelSettings,
    Outcome,
    Place,
    Rules,
    Sides,
    conclude,
    gradient_of_sinks,
    heads_first,
    joined,
    look,
    look_back,
    merge,
    no_gradients,
    nothing_seen,
    outcome,
    pieces,
    tokens_first,
)
from earl_jax.models.attention.rows import Positions, Spans, Window, part_length, spans_of
from earl_jax.models.remat import mark_attention
from earl_jax.sharding.layout import Layout

_AXIS = "context"

RingKernel = Literal["blockwise", "triton", "splash"]


class _Known(NamedTuple):
    """The static settings of a program."""

    layout: Layout
    scale: float
    softcap: float
    kernel: RingKernel
    window: int | None

    @property
    def size(self) -> int:
        """Shards of the ring."""
        return self.layout.shape.context


def ring_attention(
    layout: Layout,
    query_BTKGH: jax.Array,
    key_BKTH: jax.Array,
    value_BKTH: jax.Array,
    segment_ids_BS: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: Window = None,
    sinks_KG: jax.Array | None = None,
    kernel: RingKernel = "blockwise",
) -> jax.Array:
    """Computes `attention` of folded rows over themselves, on a layout with a `context` axis.

    Queries, keys and values are folded; `segment_ids_BS` are of whole rows, as they were before. A
    query of segment 0 gets something finite that is never read. `sinks_KG` are those of
    `attention`. Parts of rows look at each other by the `kernel`; splash's window is static.

    Returns:
        out_BTKGH, folded, in the type of the query.
    """
    length, size = query_BTKGH.shape[1], layout.shape.context
    assert length == 2 * size * part_length(length, size), length
    missing = length - segment_ids_BS.shape[1]
    segment_ids_BS = jnp.pad(segment_ids_BS, ((0, 0), (0, missing)))
    static = window if isinstance(window, int) else None
    window = jnp.asarray(length if window is None else window, jnp.int32)
    known = _Known(layout, scale, softcap, kernel, static)
    return _attend(known, query_BTKGH, key_BKTH, value_BKTH, segment_ids_BS, window, sinks_KG)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(known: _Known, query, key, value, segments, window, sinks) -> jax.Array:
    return _forward(known, query, key, value, segments, window, sinks)[0]


def _forward(known: _Known, query, key, value, segments, window, sinks) -> tuple[jax.Array, Any]:
    """Returns the attention output and the residuals of the backward pass."""
    inputs, (queries, sums) = _specs(known.layout)
    run = _on_shards(_forward_shard, known, inputs, (queries, sums))
    out, log_total = mark_attention(*run(query, key, value, segments, window, sinks))
    return out, (query, key, value, segments, window, sinks, out, log_total)


def _backward(known: _Known, kept: Any, grad_out: jax.Array) -> tuple[Any, ...]:
    inputs, (queries, sums) = _specs(known.layout)
    # Each shard has a part of the gradient of its heads' sinks, by its rows and tokens.
    parts = P((*known.layout.row_axes, _AXIS), *inputs[-1])
    run = _on_shards(
        _backward_shard, known, (*inputs, queries, sums, queries), (*inputs[:3], parts)
    )
    *gradients, of_sinks = run(*kept, grad_out)
    if of_sinks is not None:
        of_sinks = jnp.sum(of_sinks, axis=0).astype(kept[5].dtype)
    # Segments and the window are whole numbers, which have no gradient.
    return *gradients, None, None, of_sinks


_attend.defvjp(_forward, _backward)


def _specs(layout: Layout) -> tuple[tuple[P, ...], tuple[P, P]]:
    """Returns the specs of `_attend`'s arrays; of BTKGH and BKGT arrays."""
    queries, sides = layout.activation_spec("BTKGH"), layout.activation_spec("BKTH")
    inputs = (queries, sides, sides, layout.activation_spec("BS"), P())
    return (*inputs, layout.activation_spec("KG")), (queries, layout.activation_spec("BKGT"))


def _on_shards(shard: Callable[..., Any], known: _Known, inputs: Any, outputs: Any) -> Any:
    # Nothing is differentiated here, and so nothing to be recomputed. But a scan over layers takes
    # out of itself what is the same for all of them, when it is: masks, of all pairs of blocks (25
    # GiB for 131,072 tokens on 8 shards), unless what they are part of cannot be taken apart.
    return jax.shard_map(
        jax.checkpoint(functools.partial(shard, known)),
        mesh=known.layout.mesh,
        in_specs=inputs,
        out_specs=outputs,
        check_vma=False,
    )


def _forward_shard(
    known: _Known, query_BTKGH, key_BKTH, value_BKTH, segments_BS, window, sinks_KG
) -> tuple[jax.Array, jax.Array]:
    """One shard: its queries' out_BTKGH, and the logarithms of their softmax's sums, BKGT."""
    queries, own = pieces(heads_first(query_BTKGH), 3, 2), _parts_of(key_BKTH, value_BKTH)
    look_at = _by(known, window, "look")

    def see(seen: Any, sides: Sides, pair: _Pair) -> Any:
        query, keys = _pick(queries, pair.mine), _pick(sides, pair.theirs)
        found = look_at(pair, query, keys)
        return _put(seen, pair.mine, merge(_pick(seen, pair.mine), found))

    seen = _go_round(known, segments_BS, window, own, nothing_seen(queries, sinks_KG), see)
    out, log_total = conclude(seen)
    return tokens_first(joined(out, 3)).astype(query_BTKGH.dtype), joined(log_total, 3)


def _backward_shard(
    known: _Known,
    query_BTKGH,
    key_BKTH,
    value_BKTH,
    segments_BS,
    window,
    sinks_KG,
    out_BTKGH,
    log_total_BKGT,
    grad_BTKGH,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """One shard: gradients of its queries, and of its keys and values, which others added up.

    And of sinks, by its rows.
    """
    queries, own = pieces(heads_first(query_BTKGH), 3, 2), _parts_of(key_BKTH, value_BKTH)
    look_at = _by(known, window, "look_back")
    whole = outcome(heads_first(out_BTKGH), heads_first(grad_BTKGH), log_total_BKGT)
    outcomes = Outcome(*(pieces(array, 3, 2) for array in whole))

    def see(grads: Any, sides: Sides, pair: _Pair) -> Any:
        mine = _pick(queries, pair.mine), _pick(outcomes, pair.mine)
        found = look_at(pair, *mine, _pick(sides, pair.theirs))
        return tuple(
            _put(grad, half, jax.tree.map(jnp.add, _pick(grad, half), more))
            for grad, half, more in zip(grads, (pair.mine, pair.theirs), found, strict=True)
        )

    def hand_on(grads: Any) -> Any:
        """Sends gradients along with their keys and values; they return after the last hop."""
        return grads[0], _hand_on(known, grads[1])

    zeros = jnp.zeros(queries.shape, jnp.float32), no_gradients(own)
    of_query, of_sides = _go_round(known, segments_BS, window, own, zeros, see, hand_on)
    return (
        tokens_first(joined(of_query, 3)).astype(query_BTKGH.dtype),
        joined(of_sides.key, 3).swapaxes(2, 3).astype(key_BKTH.dtype),
        joined(of_sides.value, 3).swapaxes(2, 3).astype(value_BKTH.dtype),
        gradient_of_sinks(sinks_KG, whole),
    )


def _by(known: _Known, window: jax.Array, name: Literal["look", "look_back"]) -> Any:
    """Returns the function of this name of a `_Pair` and its arrays: a kernel's, or in jax."""
    if known.kernel == "blockwise":
        of_parts = {"look": look, "look_back": look_back}[name]
        rules = Rules(known.scale, known.softcap, window)
        return lambda pair, *arrays: of_parts(
            rules, *arrays, pair.own.positions, pair.others.positions
        )
    # Importing Pallas takes half a second, which only those who use it should wait for.
    module = {"triton": "rows_triton", "splash": "splash"}[known.kernel]
    of_parts = getattr(importlib.import_module(f"earl_jax.models.attention.{module}"), name)
    interpret = known.layout.platform == "cpu"
    settings = KernelSettings(known.scale, known.softcap, known.window, interpret)
    return lambda pair, *arrays: of_parts(settings, *arrays, pair.own, pair.others)


class _Pair(NamedTuple):
    """A part of a shard's queries and a part of somebody's keys: which (0 or 1), and where."""

    mine: jax.Array
    theirs: jax.Array
    own: Place
    others: Place


def _go_round(
    known: _Known,
    segments_BS: jax.Array,
    window: jax.Array,
    own: Sides,
    result: Any,
    see: Callable[[Any, Sides, _Pair], Any],
    hand_on: Callable[[Any], Any] = lambda result: result,
) -> Any:
    """Calls `see(result, sides, pair)` for every pair of parts whose tokens meet, as keys arrive.

    All shards go through the same number of hops: a collective in a loop that some leave earlier
    never ends. Keys travel while those before them are looked at; `hand_on` follows each look.
    """
    shard, place = jax.lax.axis_index(_AXIS), _places_of(known, segments_BS, window)

    def look_at(
        result: Any, sides: Sides, owner: jax.Array, pairs: tuple[jax.Array, jax.Array]
    ) -> Any:
        def one(result: Any, halves: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            mine, theirs = halves
            pair = _Pair(mine, theirs, place(shard, mine), place(owner, theirs))
            meets = _meet(pair, window)
            result = jax.lax.cond(meets, lambda r: see(r, sides, pair), lambda r: r, result)
            return result, None

        return hand_on(jax.lax.scan(one, result, pairs)[0])

    def hop(result: Any, sides: Sides, number: jax.Array | int) -> Any:
        owner = (shard - number) % known.size
        # Of an earlier shard, the first part comes before both of ours, and the last behind both;
        # of a later one, both parts are between ours.
        half, first, last = jnp.where(owner < shard, 0, 1), jnp.int32(0), jnp.int32(1)
        pairs = jnp.stack([half, last]), jnp.stack([half, first])
        return look_at(result, sides, owner, pairs)

    def middle(carry: tuple[Sides, Any], number: jax.Array) -> tuple[tuple[Sides, Any], None]:
        here, result = carry
        coming = _hand_on(known, here)
        return (coming, hop(result, here, number)), None

    here = _hand_on(known, own)
    result = look_at(result, own, shard, (jnp.array([0, 1, 1]), jnp.array([0, 0, 1])))
    if known.size > 2:
        carry = (here, result)
        (here, result), _ = jax.lax.scan(middle, carry, jnp.arange(1, known.size - 1))
    return hop(result, here, known.size - 1)


def _hand_on(known: _Known, sides: Sides) -> Sides:
    """Sends keys and values to the next shard; returns those of the one before."""
    ring = [(shard, (shard + 1) % known.size) for shard in range(known.size)]
    return jax.tree.map(lambda side: jax.lax.ppermute(side, _AXIS, ring), sides)


def _parts_of(key_BKTH: jax.Array, value_BKTH: jax.Array) -> Sides:
    """Returns a shard's two parts along a new first axis."""
    return Sides(pieces(key_BKTH, 2, 2), pieces(value_BKTH, 2, 2))


def _places_of(
    known: _Known, segments_BS: jax.Array, window: jax.Array
) -> Callable[[jax.Array, jax.Array], Place]:
    """Returns a function to the place of a shard's first part (0) or last part (1)."""
    num_parts, spans = 2 * known.size, spans_of(segments_BS, window)
    length = segments_BS.shape[1] // num_parts

    def place(shard: jax.Array, half: jax.Array) -> Place:
        start = jnp.where(half == 0, shard, num_parts - 1 - shard) * length
        segment_BT, first_BT, last_BT = (
            jax.lax.dynamic_slice_in_dim(each, start, length, axis=1)
            for each in (segments_BS, *spans)
        )
        order_BT = start + jax.lax.broadcasted_iota(jnp.int32, segment_BT.shape, 1)
        return Place(Positions(order_BT, segment_BT), Spans(first_BT, last_BT))

    return place


def _meet(pair: _Pair, window: jax.Array) -> jax.Array:
    """Returns True if a query may see a key: some are near enough and share a segment."""
    own, others = pair.own.positions, pair.others.positions
    near = own.order[0, 0] - others.order[0, -1] < window
    (own_least, own_most), (least, most) = _range_of(own), _range_of(others)
    return near & jnp.any((own_least <= most) & (least <= own_most))


def _range_of(positions: Positions) -> tuple[jax.Array, jax.Array]:
    """Returns the least and the greatest segment of each row, i32[B]; 0 is padding."""
    segment_BT = positions.segment
    least_B = jnp.min(segment_BT, axis=1, where=segment_BT > 0, initial=jnp.iinfo(jnp.int32).max)
    return least_B, jnp.max(segment_BT, axis=1)


def _pick(tree: Any, half: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, half, keepdims=False), tree)


def _put(tree: Any, half: jax.Array, values: Any) -> Any:
    return jax.tree.map(
        lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, half, 0), tree, values
    )
