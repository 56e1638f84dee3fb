# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Delivery of a step's episodes to the trainer: their rows, with what the host knows of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from earl_jax.algorithms.advantages import assign_credit
from earl_jax.algorithms.algorithm import Algorithm
from earl_jax.dispatch.pack import (
    dispatch,
    join_rows,
    order_bytes,
    order_rows,
    rows_here,
    sample_starts,
)
from earl_jax.dispatch.packing import pack_rows
from earl_jax.placement.packing import plan_batch
from earl_jax.placement.parts import Part
from earl_jax.placement.placement import Placement
from earl_jax.rollout.results import Played, Rollout, RowOrder
from earl_jax.trajectory import Experience, Outcome


def rows_of(rollout: Rollout, played: Played) -> Experience:
    """Returns a copy of this process's rows, as many as of each process, for `send_parts`."""
    order = played.order
    return rollout.padded_experience(order.of_each) if order else rollout.experience


def send_parts(
    placement: Placement,
    experience: Experience | None,
    outcomes: Sequence[Outcome],
    length: int,
    averages: Mapping[str, float],
    *,
    wait: bool = True,
    rng: np.random.Generator | None = None,
    order: RowOrder | None = None,
) -> list[Part]:
    """Sends the rows of all processes to the training layout, with their advantages.

    Args:
        placement: the plans in use.
        experience: this process's rows, in the order of its episodes; None where it plays nothing.
        outcomes: those of all processes' episodes.
        length: their context bucket.
        averages: the algorithm's before this step (`Algorithm.averages`).
        wait: return when the rows have arrived; if not, when they are on their way.
        rng: deals the groups out to config.train.mini_batches parts; None: there is one.
        order: where the rows of the outcomes are; None: processes have them in this order.
    """
    stages, mesh = placement.stages, placement.rollout.mesh
    layouts, learner = stages.layouts, stages.learner
    own = rows_to_learn_from(experience, learner.config.ratio) if experience else None
    source = layouts.rollout(mesh)
    num_rows = order.of_each * len(stages.cluster.players) if order else len(outcomes)
    width = learner.choice_width
    rows = join_rows(own, layouts.engine(mesh), source, num_rows, length, width)
    ordered_bytes = 0
    if order is not None:
        # The batch, and so every bit that is learnt from it, is that of processes with fixed parts.
        ordered_bytes = order_bytes(rows, order.rows, source)
        rows = order_rows(rows, order.rows, source)
    layout = layouts.train(placement.train.mesh)
    facts = row_facts(learner.algorithm, outcomes, length, averages)
    own_facts = {name: rows_here(source, fact) for name, fact in facts.items()}
    delivery = dispatch(rows, layout, length=length, **own_facts)
    lengths = facts["lengths"]
    num_samples = [len(outcome.sample_starts) for outcome in outcomes]
    dealt = [lengths]
    if rng is not None:
        groups = [outcome.group for outcome in outcomes]
        dealt = deal_groups(groups, lengths, learner.config.mini_batches, rng)
    placement.trained_tokens = max(int(each.sum()) for each in dealt)
    parts = []
    for each in dealt:
        packing = plan_batch(placement, each.tolist(), length, num_samples)
        batch = pack_rows(delivery.batch, packing, layout)
        moved_bytes = 0 if parts else delivery.plan.moved_bytes + ordered_bytes
        parts.append(
            Part(batch=batch, length=length, num_tokens=int(each.sum()), moved_bytes=moved_bytes)
        )
    if wait:
        stages.cluster.wait([part.batch for part in parts], "dispatch")
    return parts


def deal_groups(
    groups: Sequence[int], lengths: np.ndarray, number: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Returns the lengths of the episodes of each part, 0 for those of another; i32[N] each.

    Groups with tokens are dealt out at random to `number` parts, whose numbers of groups differ by
    at most one; fewer parts if there are fewer groups, and at least one.

    Example: groups 4 4 5 6 of lengths 9 8 0 7 give, for two parts, 9 8 0 0 and 0 0 0 7 or the other
    way round.
    """
    present = list(dict.fromkeys(np.asarray(groups)[lengths > 0].tolist()))
    if len(present) < 2:
        return [lengths]
    parts = np.array_split(rng.permutation(present), min(number, len(present)))
    return [np.where(np.isin(groups, part), lengths, 0) for part in parts]


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
    facts = {"groups": _group_numbers(outcomes)} if "groups" in algorithm.all_needs else {}
    return facts | {
        "lengths": np.where(credit.counts, [outcome.num_tokens for outcome in outcomes], 0),
        "advantages": credit.advantages,
        "sample_starts": sample_starts([o.sample_starts for o in outcomes], length),
    }


def _group_numbers(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Returns a number from 1 for each group of a task and a role, i32[N]."""
    numbers: dict[tuple[int, str], int] = {}
    each = [numbers.setdefault((o.group, o.role), len(numbers) + 1) for o in outcomes]
    return np.array(each, np.int32)
