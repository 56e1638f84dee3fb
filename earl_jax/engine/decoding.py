# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One step of decoding on the devices: a forward pass, and what is sampled and written behind it.

`decode_plain` is the step of one token a slot. `decode_drafted` guesses the next few tokens and
lets one forward pass score all of them (speculative decoding, Leviathan et al., arXiv 2211.17192).

It says the same tokens as the plain step, one by one, up to the rounding of the forward pass: where
the guess was a token, the token is still sampled, from the model's distribution at its place, with
the random number that its episode's seed and its place have whoever asks (`token_uniforms`). A
guess that is the token sampled is a forward pass saved; at the first that is not, what follows it
is thrown away, and the token sampled stands. So the distribution is exact by coupling, and no
residual distribution is needed. Nothing is lost by it: the general rule accepts a guess x that is
certain with probability min(1, p(x) / 1), and the token sampled is x with probability p(x).

What ends a turn ends it at its token: nothing is sampled, counted or written behind that. Keys and
values of what was thrown away stay in the cache behind `cached`, where nobody reads them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from earl_jax.engine.choices import draw, walk
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.drafts import look_up
from earl_jax.engine.round_inputs import NO_LIMIT
from earl_jax.engine.sampling import model_logprobs, token_uniforms
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_chunk, forward_drafts
from earl_jax.models.kv_cache import PagedCache
from earl_jax.models.parameters import Params
from earl_jax.sharding.layout import Layout
from earl_jax.trajectory import Experience

Replicate = Callable[[jax.Array], jax.Array]


class SlotRules(NamedTuple):
    """What is fixed when the program is compiled: forward passes per burst; ids.

    Each of `end_of_turn_ids` ends a turn. Chunks are appended for `append_rows` slots of a data
    shard at a time; a decode step computes `step_rows` rows of it (`decode_some`), 0: one for each
    of its slots. With `model_logprobs` these are written down too; that is one more pass over the
    logits. With `choice_branches` turns can be held to replies whose tree has so many branches, or
    to so many tokens. With `draft` each pass may say so many tokens beside its own, those that
    followed the slot's last `ngram` ids before (`drafts.look_up`); with an `ngram` of 0 nothing is
    looked up, though reports have the room.
    """

    burst: int
    end_of_turn_ids: tuple[int, ...]
    append_rows: int = 8
    step_rows: int = 0
    model_logprobs: bool = False
    choice_branches: int = 0
    ngram: int = 0
    draft: int = 0

    @property
    def round_tokens(self) -> int:
        """The most tokens that a slot says in a round."""
        return self.burst * (1 + self.draft)


class Decoder(NamedTuple):
    """The model with its weights and rules, on one row shard.

    `key` is what tokens are drawn with. `replicate` puts logits whole on every device of the shard
    before they are sampled from; `layout` is that of `forward_chunk`.
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
        """`forward_chunk` with this model: logits_BV, and the cache."""
        logits_BV, cache = forward_chunk(
            self.model, self.params, cache, tokens_BT, cached, count, layout=self.layout
        )
        return self.replicate(logits_BV), cache

    def append_all(
        self, cache: PagedCache, tokens_BT: jax.Array, cached: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, PagedCache]:
        """`forward_drafts` with this model: logits_BTV, and the cache."""
        logits_BTV, cache = forward_drafts(
            self.model, self.params, cache, tokens_BT, cached, count, layout=self.layout
        )
        return self.replicate(logits_BTV), cache


class Sampled(NamedTuple):
    """What each of B slots has said in this round, of at most R tokens.

    `tokens` i32[B,R], `logprobs` and `model_logprobs` f32[B,R]: the first `count` of each row.
    `passes` i32[B] are the forward passes that these took, `drafted` i32[B] the guesses in them.
    """

    tokens: jax.Array
    logprobs: jax.Array
    model_logprobs: jax.Array | None
    count: jax.Array
    passes: jax.Array
    drafted: jax.Array


Step = Callable[[DecodeState, Sampled, jax.Array], tuple[DecodeState, Sampled]]


def nothing_sampled(slots: int, tokens: int, *, model_logprobs: bool) -> Sampled:
    """The beginning of a round, with room for so many tokens a slot."""
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
    """The slot's row where it writes, else one past the end: writes there are dropped."""
    return jnp.where(keep & (state.row >= 0), state.row, state.experience.tokens.shape[0])


def sample_next(
    decoder: Decoder,
    state: DecodeState,
    logits_BV: jax.Array,
    speaking: jax.Array,
    sampled: Sampled,
) -> tuple[DecodeState, Sampled]:
    """Samples for the `speaking` slots, writes it down, and sees whether the turn is over."""
    rules, place = decoder.rules, state.origin + state.cached
    uniform = token_uniforms(decoder.key, state.seed, place)
    asked = None if state.scores is None else jnp.any(state.scores.asked)
    token, logprob = draw(uniform, logits_BV, state.choices, state.sampling, asked)
    model_logprob = model_logprobs(logits_BV, token, asked) if rules.model_logprobs else None
    rows = rows_or_drop(state, speaking)
    written = state.experience
    experience = Experience(
        tokens=written.tokens.at[rows, place].set(token, mode="drop"),
        turn_ids=written.turn_ids.at[rows, place].set(state.turn, mode="drop"),
        logprobs=written.logprobs.at[rows, place].set(logprob, mode="drop"),
        versions=written.versions.at[rows, place].set(state.version, mode="drop"),
        model_logprobs=written.model_logprobs.at[rows, place].set(model_logprob, mode="drop")
        if model_logprob is not None and written.model_logprobs is not None
        else None,
    )
    turn_tokens = state.turn_tokens + speaking
    goes_on = turn_tokens < state.turn_limit
    goes_on &= jnp.all(token[:, None] != state.stop_ids, axis=1)
    for end_of_turn_id in rules.end_of_turn_ids:
        goes_on &= token != end_of_turn_id
    state = dataclasses.replace(
        state,
        experience=experience,
        pending=jnp.where(speaking, token, state.pending),
        turn_tokens=turn_tokens,
        active=jnp.where(speaking, goes_on, state.active),
        choices=state.choices and walk(state.choices, token, speaking),
    )
    here = jnp.arange(sampled.tokens.shape[1])[None, :] == sampled.count[:, None]
    here &= speaking[:, None]
    return state, sampled._replace(
        tokens=jnp.where(here, token[:, None], sampled.tokens),
        logprobs=jnp.where(here, logprob[:, None], sampled.logprobs),
        model_logprobs=jnp.where(here, model_logprob[:, None], sampled.model_logprobs)
        if model_logprob is not None and sampled.model_logprobs is not None
        else None,
        count=sampled.count + speaking,
    )


def decode_plain(
    decoder: Decoder, state: DecodeState, sampled: Sampled, speaking: jax.Array
) -> tuple[DecodeState, Sampled]:
    """The next token of the `speaking` slots."""
    count = speaking.astype(jnp.int32)
    logits_BV, cache = decoder.append(state.cache, state.pending[:, None], state.cached, count)
    state = dataclasses.replace(state, cache=cache, cached=state.cached + count)
    sampled = sampled._replace(passes=sampled.passes + speaking)
    return sample_next(decoder, state, logits_BV, speaking, sampled)


def decode_drafted(
    decoder: Decoder, state: DecodeState, sampled: Sampled, speaking: jax.Array
) -> tuple[DecodeState, Sampled]:
    """The next token of the `speaking` slots, and those behind it that were guessed; see above.

    Every pass is 1 + `rules.draft` tokens wide, for slots without a guess too: so a slot's numbers
    do not depend on what its neighbours guess.
    """
    drafts_BK, drafted = _guess(decoder.rules, state, speaking)
    # All logits in one piece, like those of one token: no collective within the loop below.
    logits_BTV, cache = decoder.append_all(
        state.cache,
        jnp.concatenate([state.pending[:, None], drafts_BK], axis=1),
        state.cached,
        jnp.where(speaking, 1 + drafted, 0),
    )
    state = dataclasses.replace(state, cache=cache)
    sampled = sampled._replace(passes=sampled.passes + speaking, drafted=sampled.drafted + drafted)

    def say_next(carry: Any) -> Any:
        index, saying, state, sampled = carry
        # What was said last is in the cache: it was pending, or guessed.
        state = dataclasses.replace(state, cached=state.cached + saying)
        logits_BV = jax.lax.dynamic_index_in_dim(logits_BTV, index, axis=1, keepdims=False)
        state, sampled = sample_next(decoder, state, logits_BV, saying, sampled)
        guess = jax.lax.dynamic_index_in_dim(
            drafts_BK, jnp.minimum(index, decoder.rules.draft - 1), axis=1, keepdims=False
        )
        was_guessed = (index < drafted) & (guess == state.pending)
        return index + 1, saying & state.active & was_guessed, state, sampled

    *_, state, sampled = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), say_next, (jnp.int32(0), speaking, state, sampled)
    )
    return state, sampled


def _guess(
    rules: SlotRules, state: DecodeState, speaking: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """drafts_BK, and how many count: no more than the turn can take beside the token sampled.

    From all that was written of the episode, samples before this one too. A server decodes on for a
    while behind the end of a reply: nothing is guessed there.
    """
    ids_BP = state.experience.tokens[jnp.maximum(state.row, 0)]
    length = state.origin + state.cached + 1
    drafts_BK, found = look_up(ids_BP, length, ngram=rules.ngram, draft=rules.draft)
    found = jnp.clip(found, 0, jnp.maximum(0, state.turn_limit - state.turn_tokens - 1))
    return drafts_BK, jnp.where(speaking & (state.row >= 0), found, 0)


def decode_some(
    step: Step, rows: int, state: DecodeState, sampled: Sampled, speaking: jax.Array
) -> tuple[DecodeState, Sampled]:
    """`step` for so many of the `speaking` slots: those with the fewest passes in this round.

    So a slot whose episode waits is no row of it, unless fewer speak than there are rows; and where
    more speak they take turns. Pages and rows of experience stay where they are: a row reaches them
    by its table, and its number.
    """
    # Those that do not speak come last.
    chosen = jnp.argsort(jnp.where(speaking, sampled.passes, NO_LIMIT), stable=True)[:rows]
    small, pools = dataclasses.replace(state, cache=None, experience=None), state.cache
    some, some_sampled = jax.tree.map(lambda field: field[chosen], (small, sampled))
    table = pools.table[chosen]
    new, new_sampled = step(
        dataclasses.replace(
            some, cache=dataclasses.replace(pools, table=table), experience=state.experience
        ),
        some_sampled,
        speaking[chosen],
    )

    def put(old: jax.Array, taken: jax.Array, changed: jax.Array) -> jax.Array:
        # Most fields are what they were, and nothing is written.
        return old if changed is taken else old.at[chosen].set(changed, unique_indices=True)

    after = dataclasses.replace(new, cache=None, experience=None)
    small, sampled = jax.tree.map(put, (small, sampled), (some, some_sampled), (after, new_sampled))
    cache = dataclasses.replace(new.cache, table=pools.table)
    return dataclasses.replace(small, cache=cache, experience=new.experience), sampled
