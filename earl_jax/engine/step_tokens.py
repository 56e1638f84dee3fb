# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a step of `PolicyEngine.generate` hands to JetStream: tokens of each slot, with log-probs.

JetStream 0.2.2 knows one token a slot and step, or a fixed number, of which the first that is not
valid ends the request. So a slot's result is as wide as it has tokens: none where its request waits
for pages, several where guesses were right. And it knows no log-probs: where a request asked for
them its ids are `ScoredToken`s, which JetStream carries as the numbers that they are.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from earl_jax.engine._jetstream import ResultTokens, SlotData
from earl_jax.engine.slots import STEP_COLUMNS


class ScoredToken(int):
    """A token id with its log-probs: as it was drawn, and under the model itself."""

    logprob: float
    model_logprob: float

    def item(self) -> "ScoredToken":
        """Itself: JetStream asks arrays for plain numbers."""
        return self


class Failure(int):
    """Stands for a token: the request of its slot ends here, for a reason in `words`."""

    words: str

    def item(self) -> "Failure":
        """Itself, see `ScoredToken`."""
        return self


class StepTokens(ResultTokens):
    """What a step handed out.

    Nothing in the slots `asleep`, whose requests it does not end, but those that have `failed`, by
    words of the reason.
    """

    asleep: frozenset[int] = frozenset()
    failed: Mapping[int, str] = MappingProxyType({})

    def convert_to_numpy(self) -> "StepTokens":
        """With the numbers on the host."""
        return step_tokens(np.array(self.data), self.asleep, self.failed)

    def num_tokens(self) -> np.ndarray:
        """How many tokens each slot has, if it is not asleep. Waits for the step."""
        first, end = self.valid_idx
        return np.maximum(1, np.asarray(self.data)[:, first:end].sum(axis=1))

    def get_result_at_slot(self, slot: int) -> Any:
        """The slot's tokens, as many as it has; one that is not valid where it has no room."""
        if slot in self.failed:
            return _end(self.failed[slot])
        if slot in self.asleep:
            nothing = np.zeros((1, 0), np.int32)
            # More than no tokens: so JetStream ends a request whose client has gone.
            return SlotData(tokens=nothing, valid=nothing, lengths=np.ones((1,), np.int32))
        row, width = np.asarray(self.data)[slot], self.tokens_idx[1]
        valid = row[width : 2 * width]
        number = max(1, int(valid.sum()))
        tokens = row[:number]
        asked = row[2 * width + 1]
        if asked:
            bits = np.ascontiguousarray(row[2 * width + 2 :]).view(np.float32).reshape(2, width)
            tokens = _scored(tokens, *bits)
        length = row[2 * width : 2 * width + 1]
        return SlotData(tokens=tokens[None], valid=valid[None, :number], lengths=length)


def _end(words: str) -> Any:
    """The failure, and once more as a token that is not valid: so JetStream ends a request."""
    failure = Failure(-1)
    failure.words = words
    tokens = np.array([[failure, failure]], object)
    ones = np.ones((1,), np.int32)
    return SlotData(tokens=tokens, valid=np.array([[1, 0]], np.int32), lengths=ones)


def _scored(tokens: np.ndarray, logprobs: np.ndarray, model_logprobs: np.ndarray) -> np.ndarray:
    scored = np.empty(len(tokens), object)
    for place, token in enumerate(tokens.tolist()):
        scored[place] = ScoredToken(token)
        scored[place].logprob = float(logprobs[place])
        scored[place].model_logprob = float(model_logprobs[place])
    return scored


def step_tokens(
    data: Any, asleep: frozenset[int], failed: Mapping[int, str] = MappingProxyType({})
) -> StepTokens:
    """From what `slots.generate` gives."""
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
