# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a step's work was like: the selector's input. Counts, so that a replay decides alike."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load of recent rollouts, in tokens.

    `context_tokens_max` is the longest episode of the last `WINDOW` steps, `context_tokens_mean`
    and `tokens_in_flight_max` are the newest step's, `rollout_tokens` is what it sampled.
    """

    context_tokens_max: int
    context_tokens_mean: float
    tokens_in_flight_max: int
    rollout_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)


# Contexts shorten and lengthen from step to step; a mesh chosen for the longest of some steps does
# not have to be left at once.
WINDOW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """Loads of single steps, newest last, at most WINDOW of them."""

    steps: tuple[Load, ...] = ()

    def add(self, load: Load) -> "LoadHistory":
        """The history with one more step in it."""
        return LoadHistory(steps=(*self.steps, load)[-WINDOW:])

    def recent(self) -> Load | None:
        """The load to expect next, None before the first step."""
        if not self.steps:
            return None
        return dataclasses.replace(
            self.steps[-1],
            context_tokens_max=max(load.context_tokens_max for load in self.steps),
            tokens_in_flight_max=max(load.tokens_in_flight_max for load in self.steps),
        )

    def as_list(self) -> list[dict[str, Any]]:
        """For the checkpoint."""
        return [load.as_dict() for load in self.steps]

    @staticmethod
    def from_list(steps: Sequence[dict[str, Any]]) -> "LoadHistory":
        """The inverse of `as_list`."""
        return LoadHistory(steps=tuple(Load(**step) for step in steps))
