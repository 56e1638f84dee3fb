# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The requirements of an algorithm: passes before an update, and networks beside the policy."""

from typing import NamedTuple

from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.models.config import ModelConfig


class Networks(NamedTuple):
    """The networks that a trainer holds beside the policy, each of the size of the model.

    `reference`: a frozen copy of the policy that the run began with, or a teacher, of which
    `teacher` are the model and the entries of its vocabulary, where they may be others than the
    policy's. `critic`: a value network.
    """

    reference: bool = False
    critic: bool = False
    teacher: tuple[ModelConfig, int] | None = None


def networks_of(algorithm: Algorithm, *, has_base: bool) -> Networks:
    """Returns the networks that the algorithm needs; a base of adapters is a reference already."""
    return Networks(
        reference="reference" in algorithm.all_needs and not has_base,
        critic=algorithm.critic is not None,
    )


def needs_first_policy(algorithm: Algorithm, *, updates: int, corrects: bool) -> bool:
    """Returns True if log-probs of the policy that a step begins with are needed before updates.

    Advantages may be made of them (`Algorithm.scores_first_policy`). Where another policy sampled,
    so are penalties in the reward: those of advantages that are made before the first update, and
    those of several updates, which must not differ.
    """
    if algorithm.scores_first_policy:
        return True
    is_made_before = algorithm.makes_token_advantages or algorithm.critic is not None
    penalizes = getattr(algorithm.settings, "penalizes_rewards", False)
    return corrects and penalizes and (is_made_before or updates > 1)


def scored_passes(
    algorithm: Algorithm, *, updates: int, corrects: bool, recomputes: bool = True
) -> tuple[str, ...]:
    """Returns the fields that a batch gets before its first update, each by a forward pass.

    `updates` are those of a step; `corrects` is True if the trainer corrects for who
    sampled (config.train.correction), and `recomputes` if proximal log-probs are computed by
    a pass. If not, each update interpolates them (config.train.proximal).

    | field | needed for | computed |
    |---|---|---|
    | "proximal" | a need "proximal", a correction | by the update, if it is the step's only one |
    | "proximal" | what `needs_first_policy` says | before the first update |
    | "reference" | a need "reference", a KL penalty | before the first update |
    | "values", "returns" | a critic | before the first update |
    | "advantages" | `makes_token_advantages` | before the first update, without a network |
    """
    needs = algorithm.all_needs
    proximal = corrects or "proximal" in needs
    first = needs_first_policy(algorithm, updates=updates, corrects=corrects)
    scored = ("proximal",) if first or (proximal and updates > 1 and recomputes) else ()
    scored += ("reference",) if "reference" in needs else ()
    scored += ("advantages",) if algorithm.makes_token_advantages else ()
    return scored + (("values", "returns") if algorithm.critic else ())
