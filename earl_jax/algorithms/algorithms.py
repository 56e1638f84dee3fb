# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The algorithms that config.algorithm names.

One made of existing parts is one entry of ALGORITHMS. One of a user's own is an `Algorithm` in any
module that Python finds: config.algorithm = "module:name".
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from earl_jax.algorithms.advantages import group_relative, reinforce
from earl_jax.algorithms.algorithm import Algorithm, Episode, TokenFacts, TokenLosses
from earl_jax.algorithms.losses import clipped_surrogate, cross_entropy
from earl_jax.settings.choices import check_bounds
from earl_jax.settings.named import find_named


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """Settings of GRPO.

    `normalize_advantages` divides by the standard deviation of the group (False: Dr. GRPO).
    `clip_low` and `clip_high`: a ratio counts down to 1 - clip_low and up to 1 + clip_high.
    """

    normalize_advantages: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_bounds(self, path, {"clip_low": (0.0, 1.0), "clip_high": (0.0, None)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceSettings:
    """Settings of REINFORCE.

    `turn_discount` discounts a reward once for each turn before it. `normalize_advantages` divides
    by the standard deviation of the batch. `clip_low` and `clip_high`: a ratio counts down to
    1 - clip_low and up to 1 + clip_high.
    """

    turn_discount: float = 0.7
    normalize_advantages: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        bounds = {"turn_discount": (0.0, 1.0), "clip_low": (0.0, 1.0), "clip_high": (0.0, None)}
        check_bounds(self, path, bounds)


def grpo_advantages(episodes: Sequence[Episode], settings: GrpoSettings) -> list[np.ndarray]:
    """Returns `group_relative` advantages of the groups that share a task."""
    return group_relative(
        [episode.turn_rewards for episode in episodes],
        [episode.group for episode in episodes],
        normalize=settings.normalize_advantages,
    )


def reinforce_advantages(
    episodes: Sequence[Episode], settings: ReinforceSettings
) -> list[np.ndarray]:
    """Returns `reinforce` advantages, with a baseline for each role."""
    return reinforce(
        [episode.turn_rewards for episode in episodes],
        [episode.role for episode in episodes],
        discount=settings.turn_discount,
        normalize=settings.normalize_advantages,
    )


def no_advantages(episodes: Sequence[Episode], settings: object) -> list[np.ndarray]:
    """Returns zeros: the loss reads no advantages."""
    return [np.zeros(len(episode.turn_rewards)) for episode in episodes]


def clipped_loss(facts: TokenFacts, settings: GrpoSettings | ReinforceSettings) -> TokenLosses:
    """Returns `clipped_surrogate` losses; decoupled ones where the trainer corrects.

    See `TokenFacts.old`.
    """
    return clipped_surrogate(facts, clip_low=settings.clip_low, clip_high=settings.clip_high)


def supervised_loss(facts: TokenFacts, settings: object) -> TokenLosses:
    """Returns `cross_entropy` losses."""
    return cross_entropy(facts)


ALGORITHMS: dict[str, Algorithm] = {
    "reinforce": Algorithm(
        settings=ReinforceSettings(), advantages=reinforce_advantages, loss=clipped_loss
    ),
    "grpo": Algorithm(
        settings=GrpoSettings(), advantages=grpo_advantages, loss=clipped_loss, min_group_size=2
    ),
    "sft": Algorithm(advantages=no_advantages, loss=supervised_loss),
}


def find_algorithm(name: str) -> Algorithm:
    """Returns the algorithm of this name, or the user's own at `module:name`.

    Raises:
        ValueError: there is none.
    """
    return find_named(name, ALGORITHMS, Algorithm, "config.algorithm")
