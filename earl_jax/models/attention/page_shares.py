# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache cut over the `context` axis, and the forward pass of a chunk with it.

Each of C devices has 1/C of the tokens of every page, for all rows of these devices: of a page of 8
tokens on two devices the first has 0 to 3 and the second 4 to 7. So

- the tokens of a chunk (a part of a prompt, or of an answer) are cut too: each device computes the
  projections and the feed-forward networks of its part. Queries, and the new keys and values, are
  gathered in each layer; every device writes the keys of its share of pages, and looks with
  all queries at the keys that it has (an online softmax, paged_attention.py); then the sums
  are added up and scattered, so that each device has what its own tokens attended to;
- where there are no tokens to cut, because each row decodes its next one, all compute alike,
  but each looks at, and reads, 1/C of the cache only (flash-decoding's split, over devices);
- all devices have as much to do, whatever the lengths of rows: to a page each has the same number
  of keys of every query's past. Nothing needs to be folded as training rows are (folding.py).

Queries travel, and keys stay, because the cache is what is large. Of Llama-3.1-8B in bf16, a chunk
of 2,048 tokens behind 131,072 in a layer: queries are 16 MiB and sums in fp32 32 MiB, the keys and
values of all tokens 512 MiB, be they gathered or sent round a ring (as training's are, ring.py,
where queries are as many as keys; arXiv 2411.01783 sends queries too where most keys are cached).
All-to-all would cut heads while it attends, which `tensor` does already and does not end: key/value
heads are few, and the cache would have to be cut over them. The cache of a row of 131,072 tokens is
16 GiB in all layers; eight rows fit no device of 80 GB, and with `context=8` they take 16 GiB of
each. And unlike a ring there is no permute: these wait for every device of the mesh, and row shards
decode unequally long. All-gathers, all-reduces and reduce-scatters here are of the devices of one
row shard, which run the same loops.

What is not cut: weights (`tensor` and `expert` cut them; gathering them for each decoded
token would cost more than it saves), and the projections and networks of tokens decoded singly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

_AXIS = "context"


@struct.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The pages of one layer of every group: key_ZKHS and value_ZKSH.

    They are in the model's compute type, or in int8. Of latent attention there are no values: a
    token has one row for all heads, a latent and a rotated key behind it, and values are the first
    numbers of keys.

    In int8 each token's key and value of a head have a scale, f32 key_scale_ZKS and
    value_scale_ZKS: numbers are round(x / scale), the largest 127 (symmetric, no zero point).
    """

    key: jax.Array
    value: jax.Array | None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None

    @property
    def own_size(self) -> int:
        """Positions of a page that a device has."""
        return self.key.shape[3]


class PageShare(NamedTuple):
    """The share of a device in every page: the `index`-th of `parts`."""

    index: jax.Array | int = 0
    parts: int = 1

    def positions(self, number: jax.Array, own_size: int) -> jax.Array:
        """Returns the positions that this device has of pages [...] of a row: [...,S]."""
        first = number * (self.parts * own_size) + self.index * own_size
        return first[..., None] + jnp.arange(own_size).reshape(*(1,) * first.ndim, -1)

    def divides(self, length: int) -> bool:
        """Returns True if a chunk of so many tokens a row is split: a single token is not."""
        return self.parts > 1 and length % self.parts == 0


WHOLE = PageShare()


def own_share(parts: int) -> PageShare:
    """Returns this device's share of pages split in so many parts; inside a `shard_map`."""
    return PageShare(jax.lax.axis_index(_AXIS), parts) if parts > 1 else WHOLE


class TokenShare(NamedTuple):
    """The share of a device in each row of a chunk: `length` tokens from `first` on.

    Where `is_cut` is False they are all of them, and nothing below does anything.
    """

    first: jax.Array | int
    length: int
    is_cut: bool

    def take(self, rows_BT: jax.Array) -> jax.Array:
        """Returns this device's part of rows that every device has whole."""
        if not self.is_cut:
            return rows_BT
        return jax.lax.dynamic_slice_in_dim(rows_BT, self.first, self.length, axis=1)

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Returns all devices' parts, on every device; any axes after the first two."""
        return jax.lax.all_gather(x_BT, _AXIS, axis=1, tiled=True) if self.is_cut else x_BT

    def pick(self, x_BTD: jax.Array, position_B: jax.Array) -> jax.Array:
        """Returns each row's token at this position of the whole chunk, on every device."""
        own_B = position_B - self.first
        is_here_B = (own_B >= 0) & (own_B < self.length)
        inside_B = jnp.clip(own_B, 0, self.length - 1)
        x_BD = jnp.take_along_axis(x_BTD, inside_B[:, None, None], axis=1)[:, 0]
        if not self.is_cut:
            return x_BD
        # One of them is not zero, so that the sum is exact; in fp32, which every backend adds.
        here_BD = jnp.where(is_here_B[:, None], x_BD, 0).astype(jnp.float32)
        return jax.lax.psum(here_BD, _AXIS).astype(x_BTD.dtype)


def share_tokens(share: PageShare, length: int) -> TokenShare:
    """Returns this device's share of a chunk of so many tokens a row."""
    if not share.divides(length):
        return TokenShare(0, length, False)
    own = length // share.parts
    return TokenShare(share.index * own, own, True)


def add_up(
    share: PageShare,
    top_BKM: jax.Array,
    weight_BKM: jax.Array,
    value_BKMH: jax.Array,
    *,
    scatter: bool,
    sinks_KG: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums weights and weighted values over devices, each relative to its own largest score.

    With `scatter` each device gets its part of M, else all of it. Among the weights are those of
    `sinks_KG` (`attention`); M has positions, and innermost the queries that share keys.
    """
    if share.parts == 1:
        return _with_sinks(share, sinks_KG, top_BKM, weight_BKM), value_BKMH
    most_BKM = jax.lax.pmax(top_BKM, _AXIS)
    kept_BKM = jnp.exp(top_BKM - most_BKM)

    def total(of_device: jax.Array) -> jax.Array:
        if scatter:
            return jax.lax.psum_scatter(of_device, _AXIS, scatter_dimension=2, tiled=True)
        return jax.lax.psum(of_device, _AXIS)

    weight_BKM = _with_sinks(share, sinks_KG, most_BKM, weight_BKM * kept_BKM)
    return total(weight_BKM), total(value_BKMH * kept_BKM[..., None])


def _with_sinks(
    share: PageShare, sinks_KG: jax.Array | None, most_BKM: jax.Array, weight_BKM: jax.Array
) -> jax.Array:
    """Returns weights, relative to the largest score of a key, with those of sinks among them."""
    if sinks_KG is None:
        return weight_BKM
    positions = most_BKM.shape[-1] // sinks_KG.shape[-1]
    sinks_BKM = jnp.tile(sinks_KG.astype(jnp.float32), (1, positions))[None]
    # On one device of all. An infinite weight leaves 0 of the values, as a far higher score does.
    return weight_BKM + jnp.where(share.index == 0, jnp.exp(sinks_BKM - most_BKM), 0.0)
