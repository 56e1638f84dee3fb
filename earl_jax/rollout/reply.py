# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reply of an episode while it is sampled, round by round."""

from typing import NamedTuple

from earl_jax.engine.round_inputs import RoundOutputs
from earl_jax.trajectory import Turn


class NewTokens(NamedTuple):
    """Tokens that an episode sampled in a round, and their log-probs.

    `logprobs` are under the distributions that they were drawn from, `model_logprobs` under the
    model itself; the latter are () where the episode records none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]


class Sampled(NamedTuple):
    """The outputs of a round, and the version of its weights.

    `count` has by slot how many of the tokens are part of a reply, those behind a stop string left
    out; `active` is that of the outputs.
    """

    outputs: RoundOutputs
    version: int
    count: list[int]
    active: list[bool]

    @staticmethod
    def of(outputs: RoundOutputs, version: int) -> "Sampled":
        """Returns what a round sampled, before tokens are left out."""
        return Sampled(outputs, version, outputs.count.tolist(), outputs.active.tolist())

    def new_tokens(self, slot: int, *, scored: bool) -> NewTokens:
        """Returns what the slot sampled; with log-probs under the model if they are `scored`."""
        outputs, count = self.outputs, self.count[slot]
        columns = [outputs.tokens, outputs.logprobs]
        columns += [outputs.model_logprobs] if scored and outputs.model_logprobs is not None else []
        ids, logprobs, *more = (tuple(column[slot, :count].tolist()) for column in columns)
        return NewTokens(ids, logprobs, more[0] if more else ())


# What a turn has before anything is sampled.
_NOTHING = Turn(author="policy", text="", token_ids=())


class Reply:
    """The tokens of the turn that a policy is in, with a log-prob and a version each.

    Nearly every round adds to the replies of nearly all slots. So a reply notes the round itself;
    numbers become Python's when somebody asks for them, mostly once, at the end of the turn.
    """

    __slots__ = ("_before", "_number", "_rounds", "_scored", "_slot")

    def __init__(self, *, scored: bool) -> None:
        """Begins without a token; with `scored` rounds give log-probs under the model, too."""
        self._number, self._slot, self._scored = 0, 0, scored
        self._before, self._rounds = _NOTHING, list[Sampled]()

    def __len__(self) -> int:
        return self._number

    def add(self, sampled: Sampled, slot: int) -> None:
        """Adds the tokens that a round sampled in the episode's slot."""
        self._slot = slot
        self._rounds.append(sampled)
        self._number += sampled.count[slot]

    def take_over(self, turn: Turn) -> None:
        """Takes over the tokens of a turn, in place of its own."""
        self._before, self._rounds, self._number = turn, [], len(turn.token_ids)

    @property
    def first_version(self) -> int | None:
        """The version that sampled the first token; None: there is none."""
        versions = (*self._before.versions[:1], *(each.version for each in self._rounds[:1]))
        return next(iter(versions), None)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.as_turn().token_ids

    def as_turn(self) -> Turn:
        """Returns the turn as far as it was sampled, without a text."""
        before, slot = self._before, self._slot
        ids, versions = list(before.token_ids), list(before.versions)
        logprobs, model_logprobs = list(before.logprobs), list(before.model_logprobs)
        for outputs, version, count, _ in self._rounds:
            number = count[slot]
            ids += outputs.tokens[slot, :number].tolist()
            logprobs += outputs.logprobs[slot, :number].tolist()
            versions += [version] * number
            if self._scored and outputs.model_logprobs is not None:
                model_logprobs += outputs.model_logprobs[slot, :number].tolist()
        return Turn(
            author="policy",
            text="",
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            model_logprobs=tuple(model_logprobs),
        )
