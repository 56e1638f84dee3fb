# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A step of JetStream's `generate`: its program on the devices, and its result for JetStream.

JetStream 0.2.2 knows one token a slot and step, or a fixed number, of which the first that is not
valid ends the request. So a slot's result is as wide as it has tokens: none where its request waits
for pages, several where drafts were accepted. And it knows no log-probs: where a request wants them
its ids are `ScoredToken`s, which JetStream carries as the numbers that they are.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.decoding import Decoder, decode_drafted, decode_plain, nothing_sampled
from earl_jax.engine.slots import shift_rows_and_pages
from earl_jax.serving._jetstream import ResultTokens, SlotData

# Columns of a step's result for each token, beside two for each slot.
STEP_COLUMNS = 4


def decode_step(
    decoder: Decoder, state: DecodeState, moving: jax.Array, shard: jax.Array | int
) -> tuple[DecodeState, jax.Array]:
    """Returns the `moving` slots' pending tokens, and samples the tokens after them.

    Accepted drafts are returned too, but for the last token, which is pending now. `moving` [B] is
    above 0 where a slot takes part. A state for serving has `scores`.

    Returns:
        The new state, and i32[B, STEP_COLUMNS * K + 2], at most K tokens a slot: the tokens; 1
        where one is valid, which those in front are; the number of tokens that the slot has
        returned, up to the first of these; 1 where log-probs are wanted; the bits of the log-probs,
        and of those under the model. Tokens beyond the slot's row are not valid.
    """
    scores = state.scores
    assert scores is not None, "a state for serving has them"
    first_row, first_page = shard * state.experience.tokens.shape[0], shard * state.cache.num_pages
    state = shift_rows_and_pages(state, -first_row, -first_page)
    number, max_tokens = 1 + decoder.rules.draft, state.experience.tokens.shape[1]
    decoder = decoder._replace(rules=decoder.rules._replace(model_logprobs=True))
    nothing = nothing_sampled(len(state.cached), number, model_logprobs=True)
    decode = decode_drafted if decoder.rules.draft else decode_plain
    new, sampled = decode(decoder, state, nothing, moving > 0)
    offsets_1K = jnp.arange(number)[None, :]
    valid_BK = offsets_1K < sampled.count[:, None]
    valid_BK &= state.cached[:, None] + offsets_1K <= max_tokens
    last_B1 = jnp.maximum(sampled.count - 1, 0)[:, None]

    def hand_out(pending_B: jax.Array, sampled_BK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens (or log-probs) to return now, and the pending one."""
        newest_B = jnp.take_along_axis(sampled_BK, last_B1, axis=1)[:, 0]
        handed_BK = jnp.concatenate([pending_B[:, None], sampled_BK[:, :-1]], axis=1)
        return handed_BK, jnp.where(sampled.count > 0, newest_B, pending_B)

    assert sampled.model_logprobs is not None
    tokens_BK, _ = hand_out(state.pending, sampled.tokens)
    drawn_BK, drawn = hand_out(scores.logprob, sampled.logprobs)
    model_BK, model = hand_out(scores.model_logprob, sampled.model_logprobs)
    bits = [jax.lax.bitcast_convert_type(values, jnp.int32) for values in (drawn_BK, model_BK)]
    facts = jnp.stack([state.turn_tokens, scores.wanted.astype(jnp.int32)], axis=1)
    scores = scores._replace(logprob=drawn, model_logprob=model)
    new = shift_rows_and_pages(dataclasses.replace(new, scores=scores), first_row, first_page)
    return new, jnp.concatenate([tokens_BK, valid_BK.astype(jnp.int32), facts, *bits], axis=1)


class ScoredToken(int):
    """A token id with its log-probs: of the distribution it was drawn from, and of the model."""

    logprob: float
    model_logprob: float

    def item(self) -> "ScoredToken":
        """Returns itself, where JetStream wants plain numbers of an array."""
        return self


class Failure(int):
    """A token that ends the request of its slot, for the reason in `words`."""

    words: str

    def item(self) -> "Failure":
        """Returns itself, see `ScoredToken`."""
        return self


class EndToken(int):
    """An end of turn, `token`, which JetStream would not hand on: this number is none of its ends.

    With log-probs `token` is a `ScoredToken`.
    """

    token: int

    def item(self) -> "EndToken":
        """Returns itself, see `ScoredToken`."""
        return self


class StepTokens(ResultTokens):
    """The tokens of a step.

    Slots `asleep` have none, and their requests go on; those that have `failed`, with the reason in
    words, end. The first of `ends` in a slot is an `EndToken`, and ends its request; without `ends`
    JetStream itself finds the end, and drops it.
    """

    ends: frozenset[int] = frozenset()
    asleep: frozenset[int] = frozenset()
    failed: Mapping[int, str] = MappingProxyType({})

    def convert_to_numpy(self) -> "StepTokens":
        """Returns the same tokens with their numbers on the host."""
        tokens = step_tokens(np.array(self.data), self.asleep, self.failed)
        return tokens.with_ends(self.ends)

    def with_ends(self, ends: frozenset[int]) -> "StepTokens":
        """Returns itself, with these ends of turn handed on."""
        object.__setattr__(self, "ends", ends)
        return self

    def num_tokens(self) -> np.ndarray:
        """Returns how many tokens each slot has, if it is not asleep. Waits for the step."""
        first, end = self.valid_idx
        return np.maximum(1, np.asarray(self.data)[:, first:end].sum(axis=1))

    def get_result_at_slot(self, slot: int) -> Any:
        """Returns the slot's tokens; one that is not valid where its context is full."""
        if slot in self.failed:
            return _failure(self.failed[slot])
        if slot in self.asleep:
            nothing = np.zeros((1, 0), np.int32)
            # More than no tokens: so JetStream ends a request whose client has gone.
            return SlotData(tokens=nothing, valid=nothing, lengths=np.ones((1,), np.int32))
        row, width = np.asarray(self.data)[slot], self.tokens_idx[1]
        valid = row[width : 2 * width]
        number = max(1, int(valid.sum()))
        tokens = row[:number]
        if row[2 * width + 1]:
            bits = np.ascontiguousarray(row[2 * width + 2 :]).view(np.float32).reshape(2, width)
            tokens = _scored(tokens, *bits)
        length, valid = row[2 * width : 2 * width + 1], valid[:number]
        if self.ends and not self.ends.isdisjoint(tokens.tolist()):
            tokens, valid = _ended(tokens, valid, self.ends)
        return SlotData(tokens=tokens[None], valid=valid[None], lengths=length)


def _ended(
    tokens: np.ndarray, valid: np.ndarray, ends: frozenset[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens up to the first end, which is an EndToken, and one that is not valid."""
    kept = list(itertools.takewhile(lambda token: token not in ends, tokens.tolist()))
    end = EndToken(-1)
    end.token = tokens[len(kept)].item()
    found = np.empty(len(kept) + 2, object)
    found[:] = [*(np.int64(k) if type(k) is int else k for k in kept), end, end]
    return found, np.append(valid[: len(kept) + 1], 0)


def _failure(words: str) -> Any:
    """Returns the failure, valid and then not valid, by which JetStream ends a request."""
    failure = Failure(-1)
    failure.words = words
    tokens = np.array([[failure, failure]], object)
    ones = np.ones((1,), np.int32)
    return SlotData(tokens=tokens, valid=np.array([[1, 0]], np.int32), lengths=ones)


def _scored(tokens: np.ndarray, logprobs: np.ndarray, model_logprobs: np.ndarray) -> np.ndarray:
    scored = np.empty(len(tokens), object)
    for index, token in enumerate(tokens.tolist()):
        scored[index] = ScoredToken(token)
        scored[index].logprob = float(logprobs[index])
        scored[index].model_logprob = float(model_logprobs[index])
    return scored


def step_tokens(
    data: Any, asleep: frozenset[int], failed: Mapping[int, str] = MappingProxyType({})
) -> StepTokens:
    """Wraps the result of `decode_step`."""
    width = (data.shape[1] - 2) // STEP_COLUMNS
    tokens = StepTokens(
        data=data,
        tokens_idx=(0, width),
        valid_idx=(width, 2 * width),
        length_idx=(2 * width, 2 * width + 1),
        samples_per_slot=1,
    )
    object.__setattr__(tokens, "asleep", asleep)
    object.__setattr__(tokens, "failed", dict(failed))
    return tokens
