# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's prompts: reading one, and putting it into a slot. Pure functions."""

import dataclasses

import jax
import jax.numpy as jnp

from earl_jax.engine.choices import Choices, draw, walk
from earl_jax.engine.decode_state import DecodeState, Scores
from earl_jax.engine.round_inputs import NO_ROW
from earl_jax.engine.sampling import SamplingRows, model_logprobs, token_uniforms
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_chunk
from earl_jax.models.kv_cache import PagedCache
from earl_jax.models.parameters import Params
from earl_jax.sharding.layout import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prompt that was read: the cache of one row, its length, and the token sampled behind it.

    That token, and those behind it, are drawn with `seed` by `sampling`, of one row; `scores` are
    its log-probs, if they are wanted. The reply has `turn_limit` tokens at most. `choices`, of one
    row too, restrict the reply; None where the engine was not built for them. `tokens` i32[1,S] are
    the prompt's ids; None where nothing is drafted from them.
    """

    cache: PagedCache
    cached: jax.Array
    pending: jax.Array
    seed: jax.Array
    sampling: SamplingRows
    scores: Scores
    turn_limit: jax.Array
    choices: Choices | None = None
    tokens: jax.Array | None = None


def with_pages(prefix: Prefix, pages: int) -> Prefix:
    """Returns the prefix with at least so many pages."""
    more = pages - prefix.cache.num_pages
    if more <= 0:
        return prefix
    size = prefix.cache.page_size
    layers = jax.tree.map(
        lambda pool: jnp.pad(pool, [(0, more), *[(0, 0)] * (pool.ndim - 1)]), prefix.cache.layers
    )
    return dataclasses.replace(
        prefix,
        cache=PagedCache(layers=layers, table=jnp.arange(pages, dtype=jnp.int32)[None]),
        tokens=None
        if prefix.tokens is None
        else jnp.pad(prefix.tokens, [(0, 0), (0, more * size)]),
    )


def read(
    config: ModelConfig,
    layout: Layout,
    params: Params,
    prefix: Prefix,
    tokens_T: jax.Array,
    true_length: jax.Array,
    key_data: jax.Array,
    *,
    attention: str = "auto",
) -> Prefix:
    """Returns the prefix with the first `true_length` ids and the token sampled behind them."""
    count = jnp.asarray(true_length, jnp.int32)[None]
    cache = dataclasses.replace(prefix.cache, parts=layout.shape.context)
    logits_BV, cache = forward_chunk(
        config,
        params,
        cache,
        tokens_T[None],
        prefix.cached,
        count,
        layout=layout,
        attention=attention,
    )
    cached, tokens = prefix.cached + count, prefix.tokens
    if tokens is not None:
        positions_T = prefix.cached + jnp.arange(tokens_T.shape[0])
        tokens = tokens.at[0, positions_T].set(tokens_T, mode="drop")
    uniform = token_uniforms(jax.random.wrap_key_data(key_data), prefix.seed, cached)
    choices, wanted = prefix.choices, jnp.any(prefix.scores.wanted)
    token, logprob = draw(uniform, logits_BV, choices, prefix.sampling, wanted)
    return dataclasses.replace(
        prefix,
        cache=dataclasses.replace(cache, parts=1),
        cached=cached,
        pending=token,
        scores=prefix.scores._replace(
            logprob=logprob, model_logprob=model_logprobs(logits_BV, token, wanted)
        ),
        choices=choices and walk(choices, token, jnp.ones((1,), bool)),
        tokens=tokens,
    )


def put(prefix: Prefix, state: DecodeState, slot: jax.Array) -> DecodeState:
    """Returns the state with a prompt in a slot, both without their caches.

    It selects over slots instead of writing at `slot`: no shard has to know where the slot is. The
    prompt's ids go to the slot's row, where there is one.
    """
    chosen_B = jnp.arange(state.cached.shape[0]) == slot

    def put_field(old: jax.Array, new: jax.Array) -> jax.Array:
        chosen = chosen_B.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(chosen, new.astype(old.dtype), old)

    row, experience = jnp.full((1,), NO_ROW), state.experience
    if prefix.tokens is not None:
        row = jnp.reshape(slot, (1,))
        ids_1P = _row_of(prefix, experience.tokens.shape[1])
        experience = dataclasses.replace(experience, tokens=put_field(experience.tokens, ids_1P))
    return dataclasses.replace(
        state,
        experience=experience,
        origin=put_field(state.origin, jnp.zeros((1,), jnp.int32)),
        cached=put_field(state.cached, prefix.cached),
        pending=put_field(state.pending, prefix.pending),
        active=put_field(state.active, jnp.ones((1,), bool)),
        turn=put_field(state.turn, jnp.ones((1,), jnp.int32)),
        turn_tokens=put_field(state.turn_tokens, jnp.ones((1,), jnp.int32)),
        turn_limit=put_field(state.turn_limit, prefix.turn_limit),
        seed=put_field(state.seed, prefix.seed),
        row=put_field(state.row, row),
        sampling=jax.tree.map(put_field, state.sampling, prefix.sampling),
        choices=jax.tree.map(put_field, state.choices, prefix.choices),
        scores=jax.tree.map(put_field, state.scores, prefix.scores),
    )


def _row_of(prefix: Prefix, max_tokens: int) -> jax.Array:
    """Returns the prompt's ids and the pending token, in a row of `max_tokens`."""
    assert prefix.tokens is not None
    width = prefix.tokens.shape[1]
    ids_1P = jnp.pad(prefix.tokens[:, :max_tokens], [(0, 0), (0, max(0, max_tokens - width))])
    here_P = jnp.arange(max_tokens)
    return jnp.where(here_P == prefix.cached, prefix.pending, ids_1P)
