# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The state of an engine on the devices: slots, their pages, and the rows that they write."""

import jax
import jax.numpy as jnp
from flax import struct

from earl_jax.engine.choices import Choices, no_choices
from earl_jax.engine.config import MAX_STOP_IDS, NO_ID, NO_LIMIT, Sampling
from earl_jax.engine.pages import NO_SOURCE, Pool
from earl_jax.engine.rows import NO_ROW
from earl_jax.engine.sampling import SamplingRows, sampling_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.kv_cache import LayerCache, PagedCache, empty_pages, empty_states
from earl_jax.models.layer_groups import group_layers, pages_for
from earl_jax.trajectory import Experience


@struct.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """B slots and the N rows of experience that they write, one data shard's part or the whole.

    `cached` counts the tokens in the cache; with `origin`, the position in the row where the sample
    began that is in the cache, it gives the position of `pending` (i32). `turn` and `turn_tokens`
    count turns and the tokens of this turn, which is cut at `turn_limit` and ends behind each of
    `stop_ids` [B, MAX_STOP_IDS] too. `active` slots are in the middle of a turn. `row` is the
    episode's row in `experience`, NO_ROW where nothing is recorded. `choices` restrict the turn,
    None where the engine was not built for them.
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


def empty_state(
    config: ModelConfig,
    slots: int,
    rows: int,
    max_tokens: int,
    *,
    page_size: int,
    pool: Pool | None = None,
    kv_dtype: str = "compute",
    model_logprobs: bool = False,
    choice_branches: int = 0,
    choice_width: int = 0,
) -> DecodeState:
    """Returns empty slots and rows, of `max_tokens` tokens an episode.

    Without a `pool` every slot has its own pages, in order; with one, they are assigned later.
    """

    def numbers(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    groups = len(group_layers(config.paged_windows).windows)
    pages = pages_for(max_tokens, page_size)
    pool = pool or Pool(slots, groups * pages)
    return DecodeState(
        cache=PagedCache(
            pools=empty_pages(config, pool.total, page_size, kv_dtype),
            table=_first_table(pool, slots, groups, pages),
            states=empty_states(config, slots),
        ),
        experience=Experience(
            tokens=numbers(rows, max_tokens),
            turn_ids=numbers(rows, max_tokens),
            logprobs=jnp.zeros((rows, max_tokens), jnp.float32),
            versions=numbers(rows, max_tokens),
            model_logprobs=jnp.zeros((rows, max_tokens), jnp.float32) if model_logprobs else None,
            allowed=tuple(numbers(rows, max_tokens) for _ in range(choice_width)),
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


def _first_table(pool: Pool, slots: int, groups: int, pages: int) -> jax.Array:
    """Returns the first pages of every slot's row shard: its own, if each slot is a shard."""
    first = jnp.arange(slots, dtype=jnp.int32) // (slots // pool.shards) * pool.pages
    own = jnp.arange(groups * pages, dtype=jnp.int32).reshape(1, groups, pages)
    return first[:, None, None] + own


def repack(pools: list[LayerCache], source_Z: jax.Array) -> list[LayerCache]:
    """Returns pools whose page z has the contents of page `source_Z[z]`; zeros for NO_SOURCE."""

    def gather(pool: jax.Array) -> jax.Array:
        # A negative number would count from the end.
        index_Z = jnp.where(source_Z == NO_SOURCE, pool.shape[0], source_Z)
        return pool.at[index_Z].get(mode="fill", fill_value=0)

    return jax.tree.map(gather, pools)


def widen(experience: Experience, max_tokens: int) -> Experience:
    """Returns the same rows with `max_tokens` tokens an episode."""
    return jax.tree.map(
        lambda field: jnp.pad(field, ((0, 0), (0, max_tokens - field.shape[1]))), experience
    )
