# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the engine holds on the devices: slots, their pages, and the rows that they write."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import PagedCache, empty_pages
from earl_jax.rollout.choices import Choices, no_choices
from earl_jax.rollout.config import MAX_STOP_IDS, Sampling
from earl_jax.rollout.orders import NO_ID, NO_LIMIT, NO_ROW
from earl_jax.rollout.pages import Pool, dense_pool, pages_for
from earl_jax.rollout.sampling import SamplingRows, sampling_rows
from earl_jax.trajectory import Experience


class Scores(NamedTuple):
    """Log-probs of B pending tokens, which a server's clients `asked` [B] for, or not.

    `logprob` f32[B] under the distribution that the token was drawn from, `model_logprob` f32[B]
    under the model itself.
    """

    asked: Any
    logprob: Any
    model_logprob: Any


def no_scores(slots: int) -> Scores:
    """Nobody asks."""
    zeros = jnp.zeros((slots,), jnp.float32)
    return Scores(asked=jnp.zeros((slots,), bool), logprob=zeros, model_logprob=zeros)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """B slots and the N rows of experience that they write, one data shard's part or the whole.

    `cached` counts the tokens in the cache; with `origin`, the place in the row where the sample
    began that is in the cache, it gives the place of `pending` (i32). `turn` and `turn_tokens`
    count turns and the tokens of this turn, which is cut at `turn_limit` and ends behind each of
    `stop_ids` [B, MAX_STOP_IDS] too. `active` slots are in the middle of a turn. `row` is the
    episode's row in `experience`, NO_ROW where nothing is written down. `choices` say what this
    turn may be, None where every turn may be anything. `scores` are there where JetStream serves:
    rollouts write log-probs down in `experience`.
    """

    cache: PagedCache
    experience: Experience
    origin: jax.Array
    cached: jax.Array
    pending: jax.Array
    active: jax.Array
    turn: jax.Array
    turn_tokens: jax.Array
    turn_limit: jax.Array
    stop_ids: jax.Array
    seed: jax.Array
    row: jax.Array
    sampling: SamplingRows
    version: jax.Array
    choices: Choices | None
    scores: Scores | None = None


def empty_state(
    config: ModelConfig,
    slots: int,
    rows: int,
    places: int,
    *,
    page_size: int,
    pool: Pool | None = None,
    kv_dtype: str = "compute",
    model_logprobs: bool = False,
    choice_branches: int = 0,
) -> DecodeState:
    """Nothing in any slot, nothing written down. `places` is the room per episode, in tokens.

    Without a `pool` every slot has its own pages, in order; with one, who has which is said later.
    """

    def numbers(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    pool = pool or dense_pool(slots, slots, places, page_size)
    return DecodeState(
        cache=PagedCache(
            layers=empty_pages(config, pool.total, page_size, kv_dtype),
            table=_first_table(pool, slots, pages_for(places, page_size)),
        ),
        experience=Experience(
            tokens=numbers(rows, places),
            turn_ids=numbers(rows, places),
            logprobs=jnp.zeros((rows, places), jnp.float32),
            versions=numbers(rows, places),
            model_logprobs=jnp.zeros((rows, places), jnp.float32) if model_logprobs else None,
        ),
        origin=numbers(slots),
        cached=numbers(slots),
        pending=numbers(slots),
        active=jnp.zeros((slots,), bool),
        turn=numbers(slots),
        turn_tokens=numbers(slots),
        turn_limit=jnp.full((slots,), NO_LIMIT, jnp.int32),
        stop_ids=jnp.full((slots, MAX_STOP_IDS), NO_ID, jnp.int32),
        seed=numbers(slots),
        row=jnp.full((slots,), NO_ROW, jnp.int32),
        sampling=jax.tree.map(jnp.asarray, sampling_rows(Sampling(), slots)),
        version=numbers(slots),
        choices=jax.tree.map(jnp.asarray, no_choices(slots, choice_branches))
        if choice_branches
        else None,
    )


def _first_table(pool: Pool, slots: int, pages: int) -> jax.Array:
    """Pages from the beginning of every slot's lane on: its own, where it is a lane of its own."""
    first = jnp.arange(slots, dtype=jnp.int32) // (slots // pool.lanes) * pool.pages
    return first[:, None] + jnp.arange(pages, dtype=jnp.int32)[None, :]


def grow(
    state: DecodeState, places: int, old: Pool | None = None, new: Pool | None = None
) -> DecodeState:
    """The same state with room for `places` tokens per episode, and with more pages.

    Without pools every slot has its own pages, as many as `places` need. Otherwise who has the new
    ones is said later; those of before keep their places in their lanes.
    """
    cache = state.cache
    slots = cache.table.shape[0]
    pages = pages_for(places, cache.page_size)
    old = old or Pool(slots, cache.num_pages // slots)
    new = new or Pool(slots, pages)

    def pad(leaf: jax.Array, axis: int, to: int) -> jax.Array:
        widths = [(0, 0)] * leaf.ndim
        widths[axis] = (0, to - leaf.shape[axis])
        return jnp.pad(leaf, widths)

    def pad_pool(side: jax.Array) -> jax.Array:
        apart = side.reshape(old.lanes, old.pages, *side.shape[1:])
        return pad(apart, 1, new.pages).reshape(new.total, *side.shape[1:])

    moved = cache.table + cache.table // old.pages * (new.pages - old.pages)
    table = jax.lax.dynamic_update_slice(_first_table(new, slots, pages), moved, (0, 0))
    return dataclasses.replace(
        state,
        cache=PagedCache(layers=jax.tree.map(pad_pool, cache.layers), table=table),
        experience=jax.tree.map(lambda field: pad(field, 1, places), state.experience),
    )
