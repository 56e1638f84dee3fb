# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One step of decoding on the devices: a forward pass, and the sampling behind it.

`decode_plain` is the step of one token a slot. `decode_drafted` drafts the next few tokens and lets
one forward pass score all of them (speculative decoding, Leviathan et al., arXiv 2211.17192).

Both generate the same tokens, up to the rounding of the forward pass: a drafted token is still
sampled, from the model's distribution at its position, with the random number that the episode's
seed and the position give in any program (`token_uniforms`). A draft that equals the sampled token
saves a forward pass; at the first that does not, the drafts behind it are discarded, and the
sampled token stands. So the distribution is exact by coupling, and no residual distribution is
needed. No acceptance is lost: the general rule accepts a certain draft x with probability
min(1, p(x) / 1), and the sampled token is x with probability p(x).

A turn ends at the token that ends it: nothing is sampled, counted or recorded behind it. Keys and
values of discarded tokens stay in the cache behind `cached`, where nothing is read.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.engine.choices import allowed_ids, walk
from earl_jax.engine.config import SlotRules
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.drafts import look_up
from earl_jax.engine.sampling import draw, model_logprobs, token_uniforms
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import fill_cache, forward_chunk, forward_drafts
from earl_jax.models.kv_cache import PagedCache
from earl_jax.models.parameters import Params
from earl_jax.sharding.layout import Layout
from earl_jax.trajectory import Experience

Replicate = Callable[[jax.Array], jax.Array]


class Decoder(NamedTuple):
    """The model with its weights and rules, on one row shard.

    Tokens are drawn with `key`. `replicate` puts whole logits on every device of the shard before
    they are sampled from; `layout` is that of `forward_chunk`.
    """

    model: ModelConfig
    rules: SlotRules
    params: Params
    key: jax.Array
    replicate: Replicate = lambda logits_BV: logits_BV
    layout: Layout | None = None

    def append(
        self, cache: PagedCache, tokens_BT: jax.Array, cached: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, PagedCache]:
        """Runs `forward_chunk` with this model. Returns logits_BV, and the cache."""
        logits_BV, cache = self._run(forward_chunk, cache, tokens_BT, cached, count)
        return self.replicate(logits_BV), cache

    def fill(
        self, cache: PagedCache, tokens_BT: jax.Array, cached: jax.Array, count: jax.Array
    ) -> PagedCache:
        """Runs `fill_cache` with this model. Returns the cache."""
        return self._run(fill_cache, cache, tokens_BT, cached, count)

    def append_all(
        self, cache: PagedCache, tokens_BT: jax.Array, cached: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, PagedCache]:
        """Runs `forward_drafts` with this model. Returns logits_BTV, and the cache."""
        logits_BTV, cache = self._run(forward_drafts, cache, tokens_BT, cached, count)
        return self.replicate(logits_BTV), cache

    def _run(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        layout, attention = self.layout, self.rules.attention
        return forward(self.model, self.params, *inputs, layout=layout, attention=attention)


class Sampled(NamedTuple):
    """The tokens that each of B slots has generated in this round, at most R.

    `tokens` i32[B,R], `logprobs` and `model_logprobs` f32[B,R]: the first `count` of each row.
    `passes` i32[B] counts the forward passes of each slot, `drafted` i32[B] the drafts in them.
    """

    tokens: jax.Array
    logprobs: jax.Array
    model_logprobs: jax.Array | None
    count: jax.Array
    passes: jax.Array
    drafted: jax.Array


def nothing_sampled(slots: int, tokens: int, *, model_logprobs: bool) -> Sampled:
    """Returns the beginning of a round of at most so many tokens a slot."""
    zeros = jnp.zeros((slots,), jnp.int32)
    logprobs = jnp.zeros((slots, tokens), jnp.float32)
    return Sampled(
        tokens=jnp.zeros((slots, tokens), jnp.int32),
        logprobs=logprobs,
        model_logprobs=logprobs if model_logprobs else None,
        count=zeros,
        passes=zeros,
        drafted=zeros,
    )


def rows_or_drop(state: DecodeState, keep: jax.Array) -> jax.Array:
    """Returns the slot's row where it writes, else one past the end: writes there are dropped."""
    return jnp.where(keep & (state.row >= 0), state.row, state.experience.tokens.shape[0])


def sample_next(
    decoder: Decoder,
    state: DecodeState,
    logits_BV: jax.Array,
    decoding: jax.Array,
    sampled: Sampled,
) -> tuple[DecodeState, Sampled]:
    """Samples and records a token of the `decoding` slots; ends turns whose last token it is."""
    rules, position = decoder.rules, state.origin + state.cached
    uniform = token_uniforms(decoder.key, state.seed, position)
    token, logprob = draw(
        uniform, logits_BV, state.choices, state.sampling, truncates=rules.truncates
    )
    among = state.choices if rules.choice_width else None
    model_logprob = model_logprobs(logits_BV, token, among) if rules.model_logprobs else None
    rows = rows_or_drop(state, decoding)
    written = state.experience
    experience = Experience(
        tokens=written.tokens.at[rows, position].set(token, mode="drop"),
        turn_ids=written.turn_ids.at[rows, position].set(state.turn, mode="drop"),
        logprobs=written.logprobs.at[rows, position].set(logprob, mode="drop"),
        versions=written.versions.at[rows, position].set(state.version, mode="drop"),
        model_logprobs=written.model_logprobs.at[rows, position].set(model_logprob, mode="drop")
        if model_logprob is not None and written.model_logprobs is not None
        else None,
        allowed=written.allowed
        if among is None
        else tuple(
            field.at[rows, position].set(ids, mode="drop")
            for field, ids in zip(
                written.allowed, allowed_ids(among, rules.choice_width), strict=True
            )
        ),
    )
    turn_tokens = state.turn_tokens + decoding
    goes_on = turn_tokens < state.turn_limit
    goes_on &= jnp.all(token[:, None] != state.stop_ids, axis=1)
    for end_of_turn_id in rules.end_of_turn_ids:
        goes_on &= token != end_of_turn_id
    state = dataclasses.replace(
        state,
        experience=experience,
        pending=jnp.where(decoding, token, state.pending),
        turn_tokens=turn_tokens,
        active=jnp.where(decoding, goes_on, state.active),
        choices=state.choices and walk(state.choices, token, decoding),
    )
    here = jnp.arange(sampled.tokens.shape[1])[None, :] == sampled.count[:, None]
    here &= decoding[:, None]
    return state, sampled._replace(
        tokens=jnp.where(here, token[:, None], sampled.tokens),
        logprobs=jnp.where(here, logprob[:, None], sampled.logprobs),
        model_logprobs=jnp.where(here, model_logprob[:, None], sampled.model_logprobs)
        if model_logprob is not None and sampled.model_logprobs is not None
        else None,
        count=sampled.count + decoding,
    )


def decode_plain(
    decoder: Decoder, state: DecodeState, sampled: Sampled, decoding: jax.Array
) -> tuple[DecodeState, Sampled]:
    """Generates the next token of the `decoding` slots."""
    count = decoding.astype(jnp.int32)
    logits_BV, cache = decoder.append(state.cache, state.pending[:, None], state.cached, count)
    state = dataclasses.replace(state, cache=cache, cached=state.cached + count)
    sampled = sampled._replace(passes=sampled.passes + decoding)
    return sample_next(decoder, state, logits_BV, decoding, sampled)


def decode_drafted(
    decoder: Decoder, state: DecodeState, sampled: Sampled, decoding: jax.Array
) -> tuple[DecodeState, Sampled]:
    """Generates the next token of the `decoding` slots, and those behind it that were drafted.

    Every pass is 1 + `rules.draft` tokens wide, for slots without a draft too: so a slot's numbers
    do not depend on its neighbours' drafts.
    """
    drafts_BK, drafted = _draft(decoder.rules, state, decoding)
    # All logits in one piece, like those of one token: no collective within the loop below.
    logits_BTV, cache = decoder.append_all(
        state.cache,
        jnp.concatenate([state.pending[:, None], drafts_BK], axis=1),
        state.cached,
        jnp.where(decoding, 1 + drafted, 0),
    )
    state = dataclasses.replace(state, cache=cache)
    sampled = sampled._replace(passes=sampled.passes + decoding, drafted=sampled.drafted + drafted)

    def sample_one(carry: Any) -> Any:
        index, going_on, state, sampled = carry
        # The token sampled last is in the cache: it was pending, or drafted.
        state = dataclasses.replace(state, cached=state.cached + going_on)
        logits_BV = jax.lax.dynamic_index_in_dim(logits_BTV, index, axis=1, keepdims=False)
        state, sampled = sample_next(decoder, state, logits_BV, going_on, sampled)
        drafted_id = jax.lax.dynamic_index_in_dim(
            drafts_BK, jnp.minimum(index, decoder.rules.draft - 1), axis=1, keepdims=False
        )
        is_accepted = (index < drafted) & (drafted_id == state.pending)
        return index + 1, going_on & state.active & is_accepted, state, sampled

    *_, state, sampled = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), sample_one, (jnp.int32(0), decoding, state, sampled)
    )
    return state, sampled


def _draft(
    rules: SlotRules, state: DecodeState, decoding: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns drafts_BK, and how many count: no more than the turn can take beside its own token.

    Drafts are looked up in the whole episode, samples before this one too.
    """
    ids_BP = state.experience.tokens[jnp.maximum(state.row, 0)]
    length = state.origin + state.cached + 1
    drafts_BK, found = look_up(ids_BP, length, ngram=rules.ngram, draft=rules.draft)
    found = jnp.clip(found, 0, jnp.maximum(0, state.turn_limit - state.turn_tokens - 1))
    return drafts_BK, jnp.where(decoding & (state.row >= 0), found, 0)
