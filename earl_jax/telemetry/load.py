# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The load of a step and of the next one: the selector's input."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load of recent rollouts, in tokens: counts, so that a replay decides alike.

    `context_tokens_max` is the longest episode of the last `WINDOW` steps; `context_tokens_mean`
    and `tokens_in_flight_max` are the newest step's, and `rollout_tokens` is what it sampled.
    `growth_tokens` is the growth of the longest episode from step to step, 0 where it cannot be
    distinguished from noise. For each token that they sampled the newest step's episodes have
    `appended` ones, of prompts and answers. On average `live` of them sampled at once: few where
    the last one samples much more than most. None: it was not counted, or others follow in an
    asynchronous run.
    """

    context_tokens_max: int
    context_tokens_mean: float
    tokens_in_flight_max: int
    rollout_tokens: int
    growth_tokens: float = 0.0
    appended: float | None = None
    live: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for the checkpoint."""
        return dataclasses.asdict(self)


# Contexts shorten and lengthen from step to step; a mesh chosen for the longest of some steps does
# not have to be left at once.
WINDOW = 8
# Of all pairs of steps in the window, so large a share more must rise than fall, over so many steps
# at least, for the longest episode to be growing: of steps without a trend one window in 24 does
# (4 steps) to one in 140 (8 steps).
RISING_SHARE, LEAST_STEPS = 0.7, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """Loads of single steps, newest last, at most WINDOW of them."""

    steps: tuple[Load, ...] = ()

    def add(self, load: Load) -> "LoadHistory":
        """Returns the history with one more step."""
        return LoadHistory(steps=(*self.steps, load)[-WINDOW:])

    def recent(self) -> Load | None:
        """Returns the load of recent steps, None before the first."""
        if not self.steps:
            return None
        return dataclasses.replace(
            self.steps[-1],
            context_tokens_max=max(load.context_tokens_max for load in self.steps),
            tokens_in_flight_max=max(load.tokens_in_flight_max for load in self.steps),
        )

    def averaged(self, load: Load) -> Load:
        """Returns a load with the means of the steps' tokens, of episodes and of rollouts.

        What an asynchronous step samples also depends on how long the update before it took.
        """
        steps = self.steps
        return dataclasses.replace(
            load,
            context_tokens_mean=statistics.fmean(step.context_tokens_mean for step in steps),
            rollout_tokens=round(statistics.fmean(step.rollout_tokens for step in steps)),
        )

    def forecast(self) -> Load | None:
        """Returns the load to expect next: that of recent steps, plus one step of growth.

        A plan chosen for it is in use before contexts outgrow the present one.
        """
        recent = self.recent()
        if recent is None:
            return None
        growth = growth_of([load.context_tokens_max for load in self.steps])
        in_flight = growth_of([load.tokens_in_flight_max for load in self.steps])
        return dataclasses.replace(
            recent,
            context_tokens_max=recent.context_tokens_max + math.ceil(growth),
            tokens_in_flight_max=recent.tokens_in_flight_max + math.ceil(in_flight),
            growth_tokens=growth,
        )

    def as_list(self) -> list[dict[str, Any]]:
        """Returns plain values for the checkpoint."""
        return [load.as_dict() for load in self.steps]

    @staticmethod
    def from_list(steps: Sequence[dict[str, Any]]) -> "LoadHistory":
        """Returns the inverse of `as_list`."""
        return LoadHistory(steps=tuple(Load(**step) for step in steps))


def growth_of(counts: Sequence[int]) -> float:
    """Returns the growth of a count per step; 0 where there is none, or only noise.

    The growth is the median slope of all pairs of steps (Theil and Sen), which outliers hardly
    change; the share of rising pairs distinguishes it from noise (Kendall's tau).
    """
    if len(counts) < LEAST_STEPS:
        return 0.0
    slopes = [
        (later - earlier) / (j - i)
        for (i, earlier), (j, later) in itertools.combinations(enumerate(counts), 2)
    ]
    rising = sum((slope > 0) - (slope < 0) for slope in slopes)
    if rising < RISING_SHARE * len(slopes):
        return 0.0
    return max(0.0, statistics.median(slopes))
