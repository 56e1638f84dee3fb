# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a round guesses tokens: always, never, or where that was measured to be faster.

Guessing changes no token, so what the clock decides here is speed (and how log-probs are rounded).
"""

import dataclasses
from collections.abc import Hashable
from typing import Literal

# A trial is these rounds, each so many times: guessing second and third, so that what changes
# steadily while it runs, such as the contexts, counts for both alike.
TRIAL = (False, True, True, False)
BLOCK_ROUNDS = 8
# Then the faster goes on for so many rounds before the next trial: how much a text repeats itself
# changes as the policy learns. A trial is 3 % of all rounds.
KEPT_ROUNDS = 1000
# The slowest rounds of either kind are left out: a compilation, or whatever else disturbs one, only
# ever makes it slower, and is not what is compared.
SLOWEST_ROUNDS = 2


@dataclasses.dataclass(kw_only=True)
class _Trial:
    """What was measured of one program: (seconds, tokens) of rounds without guesses, and with."""

    plain: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    guessing: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    rounds: int = 0

    @property
    def wins(self) -> bool:
        """Whether guessing is faster."""
        return _tokens_per_s(self.guessing) > _tokens_per_s(self.plain)


def _tokens_per_s(rounds: list[tuple[float, int]]) -> float:
    usual = sorted(rounds)[:-SLOWEST_ROUNDS]
    return sum(tokens for _, tokens in usual) / max(1e-9, sum(seconds for seconds, _ in usual))


class Drafting:
    """Chooses round by round. Host-side state only; it lives as long as what it knows is true."""

    def __init__(self, mode: Literal["off", "on", "auto"]) -> None:
        """`mode` as in `SpeculationConfig`."""
        self._mode = mode
        self._trials: dict[Hashable, _Trial] = {}
        # Programs that have run: the first run of one is its compilation.
        self._compiled: set[tuple[Hashable, bool]] = set()

    def choose(self, program: Hashable) -> bool:
        """Whether the next round guesses. `program` tells meshes and rooms apart."""
        if self._mode != "auto":
            return self._mode == "on"
        trial = self._trials.setdefault(program, _Trial())
        if trial.rounds >= len(TRIAL) * BLOCK_ROUNDS:
            return trial.wins
        return TRIAL[trial.rounds // BLOCK_ROUNDS]

    def is_trying(self, program: Hashable) -> bool:
        """Whether the round that was chosen for last is one of a trial, and to be timed."""
        return self._mode == "auto" and (self._trials[program].rounds < len(TRIAL) * BLOCK_ROUNDS)

    def note(self, program: Hashable, drafts: bool, *, tokens: int, seconds: float) -> None:
        """What the round that was chosen for took. Rounds that only read say nothing."""
        if self._mode != "auto" or not tokens:
            return
        if (program, drafts) not in self._compiled:
            self._compiled.add((program, drafts))
            return
        trial = self._trials[program]
        if trial.rounds < len(TRIAL) * BLOCK_ROUNDS:
            (trial.guessing if drafts else trial.plain).append((seconds, tokens))
        trial.rounds += 1
        if trial.rounds >= len(TRIAL) * BLOCK_ROUNDS + KEPT_ROUNDS:
            del self._trials[program]
