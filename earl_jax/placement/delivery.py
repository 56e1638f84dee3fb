# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Delivery of a step's episodes to the trainer: their rows, with what the host knows of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from earl_jax.algorithms.advantages import assign_credit
from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.dispatch.pack import dispatch, join_rows, sample_starts
from earl_jax.dispatch.packing import pack_rows
from earl_jax.placement.packing import plan_batch
from earl_jax.placement.placement import Placement
from earl_jax.trajectory import Experience, Outcome, TrajectoryBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Episodes of a step on the training layout, packed; all of them, or those that came together.

    `length` is their context bucket, `num_tokens` what they have in all, `moved_bytes` those that
    changed device. If it `is_scored`, it has what a first pass gives it (`Learner.score`).
    """

    batch: TrajectoryBatch
    length: int
    num_tokens: int
    moved_bytes: int = 0
    is_scored: bool = False


def fill_of(parts: Sequence[Part]) -> float:
    """Returns the fraction of the parts' places that hold a token."""
    return sum(part.num_tokens for part in parts) / sum(part.batch.tokens.size for part in parts)


def send_rows(
    placement: Placement,
    experience: Experience | None,
    outcomes: Sequence[Outcome],
    length: int,
    averages: Mapping[str, float],
    *,
    wait: bool = True,
) -> Part:
    """Sends the rows of all processes to the training layout, as a batch with its advantages.

    Args:
        placement: the plans in use.
        experience: this process's rows, in the order of its episodes; None where it plays nothing.
        outcomes: those of all processes' episodes.
        length: their context bucket.
        averages: the algorithm's before this step (`Algorithm.averages`).
        wait: return when the rows have arrived; if not, when they are on their way.
    """
    stages, mesh = placement.stages, placement.rollout.mesh
    layouts, learner = stages.layouts, stages.learner
    own = rows_to_learn_from(experience, learner.config.ratio) if experience else None
    rows = join_rows(
        own,
        layouts.engine(mesh),
        layouts.rollout(mesh),
        len(outcomes),
        length,
    )
    layout = layouts.train(placement.train.mesh)
    facts = row_facts(learner.algorithm, outcomes, length, averages)
    own_facts = {name: stages.cluster.own(fact) for name, fact in facts.items()}
    delivery = dispatch(rows, layout, length=length, **own_facts)
    lengths = facts["lengths"]
    placement.trained_tokens = int(lengths.sum())
    num_samples = [len(outcome.sample_starts) for outcome in outcomes]
    packing = plan_batch(placement, lengths.tolist(), length, num_samples)
    batch = pack_rows(delivery.batch, packing, layout)
    if wait:
        stages.cluster.wait(batch, "dispatch")
    return Part(
        batch=batch,
        length=length,
        num_tokens=placement.trained_tokens,
        moved_bytes=delivery.plan.moved_bytes,
    )


def rows_to_learn_from(experience: Experience, ratio: str) -> Experience:
    """Returns the rows with only those log-probs that the update is measured against."""
    if ratio == "behaviour":
        return dataclasses.replace(experience, model_logprobs=None)
    assert experience.model_logprobs is not None, "the config was not validated"
    return dataclasses.replace(experience, logprobs=experience.model_logprobs, model_logprobs=None)


def row_facts(
    algorithm: Algorithm, outcomes: Sequence[Outcome], length: int, averages: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Returns the small facts that the host adds to the device rows of all processes.

    A row whose episode does not count has no tokens for the trainer.
    """
    credit = assign_credit(algorithm, outcomes, averages)
    return {
        "lengths": np.where(credit.counts, [outcome.num_tokens for outcome in outcomes], 0),
        "advantages": credit.advantages,
        "sample_starts": sample_starts([o.sample_starts for o in outcomes], length),
    }
