# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The requirements of an algorithm: the passes that it needs, and what a training must have."""

from typing import NamedTuple

from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.settings.errors import InputError


class Training(NamedTuple):
    """The facts of a training that an algorithm's needs are held against.

    Updates of each batch, whether it corrects for who sampled (config.train.correction), whether it
    trains adapters of a frozen base, and whether it has a critic.
    """

    epochs: int
    corrects: bool
    has_adapters: bool
    has_critic: bool = False


def scored_passes(algorithm: Algorithm, training: Training) -> tuple[str, ...]:
    """Returns the log-probs that a batch is scored for before its updates.

    | pass | needed for | computed |
    |---|---|---|
    | "proximal" | a need "proximal", a correction | with one update a batch: by the update itself |
    | "reference" | a need "reference", a KL penalty | before the first update |
    """
    needs = algorithm.all_needs
    proximal = training.corrects or "proximal" in needs
    scored = ("proximal",) if proximal and training.epochs > 1 else ()
    return scored + (("reference",) if "reference" in needs else ())


def check_requirements(algorithm: Algorithm, training: Training) -> None:
    """Raises InputError where the training lacks what the algorithm needs."""
    lacking = {
        "critic": (
            not training.has_critic,
            "config.algorithm needs a critic, and no config describes one yet",
        ),
        "reference": (
            not training.has_adapters,
            "config.algorithm and its settings (config.algorithm_args.kl_coefficient above 0) need "
            "the log-probs of a reference policy, which is the frozen base of the adapters, and "
            "config.train.lora.rank is 0; set config.train.lora.rank above 0, or leave the penalty "
            "out",
        ),
    }
    for need, (is_lacking, reason) in lacking.items():
        if is_lacking and need in algorithm.all_needs:
            raise InputError(reason)
