# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), chunk by chunk.

A head has a state S, a matrix of key size x value size. Token t lets it decay by exp(g_t), takes
the error of what it says about the key k_t, and corrects it by the rate b_t (eq. 10):

    S_t = exp(g_t) S_{t-1} + k_t (b_t (v_t - k_t exp(g_t) S_{t-1})),    o_t = q_t S_t.

A chunk of tokens is computed at once, by products of matrices (section 3.3): with u_t for the row
that token t adds, (1 + A) u = b (v - exp(sum of g) k S), where A is strictly lower triangular, of
the inner products of keys. So only the state goes from chunk to chunk. All of it is in fp32.

`mix_rows` is the trainer's: whole rows, in which states begin with each segment. `mix_cached` is
the engine's: the next tokens of slots behind the states that these have. Before both is a short
causal convolution over queries, keys and values, of which a slot keeps the last inputs too.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

# Tokens of a chunk in training, as in `transformers`.
CHUNK = 64
# Of the lengths of queries and keys, as in `transformers`.
_EPS = 1e-6
# TPUs and GPUs would else round the operands of fp32 products.
_EXACT = jax.lax.Precision.HIGHEST


class Mixed(NamedTuple):
    """A layer's inputs to the delta rule, before the convolution.

    `query` and `key` are BTKH, `value` is BTKGO, `decay` (the logarithm, at most 0) and `rate` are
    f32 BTKG. `taps` are those of the convolution of the first three: KHI, KHI, KGOI.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    rate: jax.Array
    taps: tuple[jax.Array, jax.Array, jax.Array]


@struct.dataclass(frozen=True, kw_only=True)
class LinearState:
    """Slots' states of a layer, f32 BKGHO, and the last I - 1 inputs of the convolution.

    These are BIKH, BIKH and BIKGO, in the compute type.
    """

    matrix: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array

    @property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The last inputs of the convolution."""
        return self.query, self.key, self.value


def empty_linear_state(
    slots: int, heads: int, groups: int, key_size: int, value_size: int, conv_size: int, dtype: Any
) -> LinearState:
    """Returns the states of slots that have read nothing."""
    before = conv_size - 1
    return LinearState(
        matrix=jnp.zeros((slots, heads, groups, key_size, value_size), jnp.float32),
        query=jnp.zeros((slots, before, heads, key_size), dtype),
        key=jnp.zeros((slots, before, heads, key_size), dtype),
        value=jnp.zeros((slots, before, heads, groups, value_size), dtype),
    )


def place_linear_state(place: Callable[[str], Any]) -> LinearState:
    """Returns `place` of each array by its letters."""
    return LinearState(
        matrix=place("BKGHO"), query=place("BIKH"), key=place("BIKH"), value=place("BIKGO")
    )


def mix_rows(mixed: Mixed, ids_BT: jax.Array) -> jax.Array:
    """Returns the results o of whole rows, BTKGO in the type of values.

    Tokens with the same number of `ids_BT` are a segment, and stand together.
    """
    query, key, value = (
        _convolve(_window_of_segments(x, ids_BT, taps.shape[-1]), taps)
        for x, taps in zip((mixed.query, mixed.key, mixed.value), mixed.taps, strict=True)
    )
    rows, length = ids_BT.shape
    size = min(CHUNK, length)
    number = -(-length // size)

    def chunked(x: jax.Array) -> jax.Array:
        """Returns [chunks, rows, tokens of a chunk, ...], with zeros behind."""
        padding = [(0, 0), (0, number * size - length), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, padding).reshape(rows, number, size, *x.shape[2:])
        return x.swapaxes(0, 1)

    # Padding is a segment of its own, or goes on with that of padding.
    ids = chunked(ids_BT)
    # A token reads the state at the chunk's begin if that is of its segment, and is kept in the
    # state at its end likewise.
    before = jnp.concatenate([jnp.full_like(ids[:1, :, -1], -1), ids[:-1, :, -1]])
    masks = _Masks(
        same=ids[..., :, None] == ids[..., None, :],
        first=ids == before[..., None],
        last=ids == ids[..., -1:],
    )
    query, key, value, decay, rate = map(chunked, (query, key, value, mixed.decay, mixed.rate))
    chunks = _prepare(query, key, value, decay, rate, masks)
    _, _, _, heads, groups, out_size = chunks.value.shape
    state = jnp.zeros((rows, heads, groups, key.shape[-1], out_size), jnp.float32)
    _, out = jax.lax.scan(_step, state, chunks)
    out = out.swapaxes(0, 1).reshape(rows, number * size, *out.shape[3:])
    return out[:, :length].astype(mixed.value.dtype)


def mix_cached(
    mixed: Mixed,
    state: LinearState,
    starts_B: jax.Array,
    counts_B: jax.Array,
    slots_B: jax.Array | None = None,
) -> tuple[jax.Array, LinearState]:
    """Appends the first `counts_B` tokens of each row to the state of its slot.

    They go to the positions from `starts_B` on; at 0 a state begins, whatever the slot had before.
    A row without tokens leaves its slot as it is. Row b is slot b; or with `slots_B` slot
    `slots_B[b]`, where several rows of one slot follow each other in the order of its tokens.

    Returns:
        The results BTKGO in the type of values, which mean nothing behind a row's tokens; and the
        states.
    """
    length = mixed.query.shape[1]
    inputs = (mixed.query, mixed.key, mixed.value)
    windows, last = _windows_of_slots(inputs, state.inputs, starts_B, counts_B, slots_B)
    query, key, value = (_convolve(x, taps) for x, taps in zip(windows, mixed.taps, strict=True))
    real_BT = jnp.arange(length)[None, :] < counts_B[:, None]
    decay, rate = (jnp.where(real_BT[..., None, None], x, 0.0) for x in (mixed.decay, mixed.rate))
    ones = jnp.ones((len(starts_B), length), bool)
    masks = _Masks(same=ones[..., None] & ones[..., None, :], first=ones, last=ones)
    chunks = _prepare(query, key, value, decay, rate, masks)
    if slots_B is None:
        before = _from_begin(state.matrix, starts_B)
        matrix, out = _step(before, chunks)
        matrix = _chosen(counts_B, matrix, state.matrix)
    else:
        tiles = jax.tree.map(lambda x: x[:, None], (chunks, starts_B, counts_B, slots_B))

        def step(states: jax.Array, tile: Any) -> tuple[jax.Array, jax.Array]:
            chunk, start, count, slot = tile
            old = states[slot]
            new, out = _step(_from_begin(old, start), chunk)
            return states.at[slot].set(_chosen(count, new, old)), out

        matrix, out = jax.lax.scan(step, state.matrix, tiles)
        out = out[:, 0]
    new = LinearState(matrix=matrix, query=last[0], key=last[1], value=last[2])
    return out.astype(mixed.value.dtype), new


def _from_begin(x: jax.Array, starts_B: jax.Array) -> jax.Array:
    return _chosen(starts_B, x, jnp.zeros_like(x))


def _chosen(number_B: jax.Array, some: jax.Array, none: jax.Array) -> jax.Array:
    """Returns `some` of rows with a number above 0, `none` of the others."""
    return jnp.where((number_B > 0).reshape(-1, *[1] * (some.ndim - 1)), some, none)


# The convolution. A window has I - 1 inputs in front of a row's own.


def _convolve(window: jax.Array | list[jax.Array], taps: jax.Array) -> jax.Array:
    """Returns silu of the causal convolution, in the type of its inputs.

    `window` is B(T+I-1)..., or the T inputs that each tap reads.
    """
    size = taps.shape[-1]
    if not isinstance(window, list):
        length = window.shape[1] - size + 1
        window = [window[:, tap : tap + length] for tap in range(size)]
    total = sum(
        x.astype(jnp.float32) * taps[..., tap].astype(jnp.float32)[None, None]
        for tap, x in enumerate(window)
    )
    return jax.nn.silu(jnp.asarray(total)).astype(window[0].dtype)


def _window_of_segments(x: jax.Array, ids_BT: jax.Array, size: int) -> list[jax.Array]:
    """Returns what each tap reads: tokens of the segment so many before, or zeros."""
    found = []
    for back in range(size - 1, -1, -1):
        padding = [(0, 0), (back, 0), *[(0, 0)] * (x.ndim - 2)]
        length = x.shape[1]
        ids = jnp.pad(ids_BT, padding[:2], constant_values=-1)[:, :length]
        same = (ids == ids_BT).reshape(*ids.shape, *[1] * (x.ndim - 2))
        found.append(jnp.where(same, jnp.pad(x, padding)[:, :length], 0))
    return found


def _windows_of_slots(
    inputs: tuple[jax.Array, ...],
    kept: tuple[jax.Array, ...],
    starts_B: jax.Array,
    counts_B: jax.Array,
    slots_B: jax.Array | None,
) -> tuple[Any, Any]:
    """Returns the windows of all rows, and the last inputs of all slots behind them."""

    def windows(kept: Any, inputs: Any, starts: jax.Array) -> Any:
        return jax.tree.map(
            lambda old, x: jnp.concatenate([_from_begin(old, starts), x], axis=1), kept, inputs
        )

    def ends(window: jax.Array, old: jax.Array, counts: jax.Array) -> jax.Array:
        before = old.shape[1]
        place = counts[:, None] + jnp.arange(before)[None, :]
        new = jnp.take_along_axis(window, place.reshape(*place.shape, *[1] * (old.ndim - 2)), 1)
        return _chosen(counts, new, old)

    if slots_B is None:
        found = windows(kept, inputs, starts_B)
        return found, jax.tree.map(lambda w, old: ends(w, old, counts_B), found, kept)

    def step(kept: Any, tile: Any) -> tuple[Any, Any]:
        x, start, count, slot = tile
        old = jax.tree.map(lambda each: each[slot], kept)
        found = windows(old, x, start)
        new = jax.tree.map(lambda w, old: ends(w, old, count), found, old)
        return jax.tree.map(lambda each, some: each.at[slot].set(some), kept, new), found

    tiles = jax.tree.map(lambda x: x[:, None], (inputs, starts_B, counts_B, slots_B))
    last, found = jax.lax.scan(step, kept, tiles)
    return jax.tree.map(lambda x: x[:, 0], found), last


# The delta rule in chunks. Leading axes are free; T and S are tokens of one chunk.


class _Masks(NamedTuple):
    """The tokens of one segment: TS, and T of that of the state before, and of that behind."""

    same: jax.Array
    first: jax.Array
    last: jax.Array


class _Chunk(NamedTuple):
    """A chunk without the state before it: what is added, read and kept of that.

    `value` TKGO and `key` TKGH: the rows u, which are value - key S. `query` TKGH reads S, `inside`
    KGTS the rows; `kept` KGTH of the rows go into the next state, with `decay` KG of S.
    """

    value: jax.Array
    key: jax.Array
    query: jax.Array
    inside: jax.Array
    kept: jax.Array
    decay: jax.Array


def _prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    masks: _Masks,
) -> _Chunk:
    """Computes what needs no state, of all chunks at once."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    query, key = _normalised(query) * query.shape[-1] ** -0.5, _normalised(key)
    total = jnp.cumsum(decay, axis=-3)
    # By [K, G, T, S]: what is left at token t of what token s added.
    between = jnp.moveaxis(total, -3, -1)
    left = between[..., :, None] - between[..., None, :]
    left = jnp.exp(jnp.where(jnp.tril(masks.same)[..., None, None, :, :], left, -jnp.inf))
    pairs = jnp.einsum("...TKH,...SKH->...KTS", key, key, precision=_EXACT)[..., None, :, :]
    rates = jnp.moveaxis(rate, -3, -1)[..., None]
    inverse = _inverse(jnp.tril(rates * pairs * left, -1))
    since = jnp.exp(total)[..., None] * masks.first[..., None, None, None]
    key_G = key[..., None, :]
    scores = jnp.einsum("...TKH,...SKH->...KTS", query, key, precision=_EXACT)[..., None, :, :]

    def solve(x: jax.Array) -> jax.Array:
        return jnp.einsum("...KGTS,...SKGH->...TKGH", inverse, x, precision=_EXACT)

    until = jnp.exp(total[..., -1:, :, :] - total)[..., None] * masks.last[..., None, None, None]
    whole = (masks.first & masks.last)[..., -1, None, None]
    return _Chunk(
        value=solve(rate[..., None] * value),
        key=solve(rate[..., None] * since * key_G),
        query=since * query[..., None, :],
        inside=scores * left,
        kept=until * key_G,
        decay=jnp.exp(total[..., -1, :, :]) * whole,
    )


def _step(state: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """Returns the state behind a chunk, and the results of its tokens."""
    read = "...TKGH,...KGHO->...TKGO"
    rows = chunk.value - jnp.einsum(read, chunk.key, state, precision=_EXACT)
    out = jnp.einsum(read, chunk.query, state, precision=_EXACT)
    out += jnp.einsum("...KGTS,...SKGO->...TKGO", chunk.inside, rows, precision=_EXACT)
    added = jnp.einsum("...TKGH,...TKGO->...KGHO", chunk.kept, rows, precision=_EXACT)
    return chunk.decay[..., None, None] * state + added, out


def _normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _inverse(lower: jax.Array) -> jax.Array:
    """Returns (1 + A)^-1 of strictly lower triangular matrices A, by blocks that double in size.

    The inverse of [[P, 0], [A, R]] is [[P', 0], [-R' A P', R']]. As stable as substitution; powers
    of A, which vanish too, would not be.
    """
    size = lower.shape[-1]
    whole = 2 ** math.ceil(math.log2(size))
    padding = [(0, 0)] * (lower.ndim - 2) + [(0, whole - size)] * 2
    lower, lead = jnp.pad(lower, padding), lower.shape[:-2]
    blocks = jnp.ones((*lead, whole, 1, 1), lower.dtype)
    step = 1
    while step < whole:
        number = whole // (2 * step)
        # The lower left quarter of each diagonal block of twice the size.
        cut = lower.reshape(*lead, number, 2 * step, number, 2 * step)
        cut = jnp.moveaxis(jnp.diagonal(cut, axis1=-4, axis2=-2), -1, -3)[..., step:, :step]
        first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        corner = -jnp.einsum("...ij,...jk,...kl->...il", second, cut, first, precision=_EXACT)
        blocks = jnp.concatenate(
            [
                jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                jnp.concatenate([corner, second], axis=-1),
            ],
            axis=-2,
        )
        step *= 2
    return blocks[..., 0, :size, :size]
