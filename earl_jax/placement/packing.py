# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of packed batches: as many as the trainer's plan in use can have, and few numbers."""

import math
from collections.abc import Sequence

import jax

from earl_jax.dispatch.packing import Packing, RowRule, add_rows, plan_packing
from earl_jax.placement.placement import Placement
from earl_jax.placement.stages import Stages
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.reshard import reshard
from earl_jax.trajectory import TrajectoryBatch

# Growth of a step's tokens until its contexts outgrow their bucket, where programs are compiled
# ahead. A guess: with another number of rows the run compiles its own program.
GROWTH_AHEAD = 1.1


def row_rule(stages: Stages, plan: TrainPlan) -> RowRule:
    """Returns the numbers of rows that an update by this plan can have."""
    shards = stages.layouts.train(plan.mesh).num_row_shards
    return RowRule(stages.rollout.episodes_per_step, plan.micro_batches, shards)


def plan_of_rows(stages: Stages, plan: TrainPlan, num_rows: int) -> TrainPlan:
    """Returns the plan with the micro-batches that so many rows need, at most those of `plan`."""
    return plan._replace(micro_batches=row_rule(stages, plan).parts(num_rows))


def plan_batch(
    placement: Placement,
    lengths: Sequence[int],
    length: int,
    num_samples: Sequence[int] | None = None,
) -> Packing:
    """Plans the fewest rows for the plan in use, in a number that few batches of a run differ in.

    Every process calls it with the `lengths` and `num_samples` of all episodes (`plan_packing`).
    """
    rule = row_rule(placement.stages, placement.train)
    known = placement.row_counts.setdefault(str(length), [])
    packing = plan_packing(lengths, length, rule, known, num_samples)
    _remember(known, packing.num_rows, rule)
    return packing


def rows_ahead(placement: Placement, plan: TrainPlan, length: int) -> int | None:
    """Returns the rows that a batch in longer rows will probably have; None: it is not known yet.

    Batches of this length then have that number of rows where it is little more than they need.
    """
    stages = placement.stages
    if not stages.learner.config.pack:
        return stages.rollout.episodes_per_step
    rule, known = row_rule(stages, plan), placement.row_counts.setdefault(str(length), [])
    if not known and placement.trained_tokens:
        needed = math.ceil(GROWTH_AHEAD * placement.trained_tokens / length)
        _remember(known, rule.choose(needed, known), rule)
    return known[0] if known else None


def _remember(known: list[int], num_rows: int, rule: RowRule) -> None:
    if num_rows not in known and num_rows != rule.most:
        known.append(num_rows)


def move_batch(placement: Placement, batch: TrajectoryBatch) -> TrajectoryBatch:
    """Returns the batch on the layout of the plan in use, with more rows where it needs them."""
    stages, plan = placement.stages, placement.train
    rule, layout = row_rule(stages, plan), stages.layouts.train(plan.mesh)
    num_rows, length = batch.tokens.shape
    shard_rows = batch.tokens.sharding.shard_shape((rule.most, length))[0]
    before = rule.most // shard_rows
    possible = (
        rows
        for rows in range(num_rows, rule.most + 1)
        if rows % before == 0 and rule.round_up(rows) == rows
    )
    batch = add_rows(batch, next(possible))
    return reshard(batch, jax.tree.map(lambda _: layout.activations("NS"), batch))
