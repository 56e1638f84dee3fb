# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The shapes of packed batches: those that the trainer's plan in use can have, and few of them.

And the batches of examples that supervised updates learn from.
"""

import math
from collections.abc import Sequence

import jax

from earl_jax.dispatch.packing import (
    Packing,
    RowRule,
    Shape,
    ShapeHistory,
    add_rows,
    pack_rows,
    plan_packing,
)
from earl_jax.envs.examples import Ids
from earl_jax.placement.parts import Part
from earl_jax.placement.placement import Placement
from earl_jax.placement.stages import Stages
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.reshard import reshard
from earl_jax.train.sft import sft_batch
from earl_jax.trajectory import TrajectoryBatch

# Growth of a step's tokens until its contexts outgrow their bucket, where programs are compiled
# ahead. A guess: for another shape the run compiles its own program.
GROWTH_AHEAD = 1.1

# Seconds of a program's compilation. A guess between small programs on a CPU (3 to 8) and those of
# real models on chips (some tens): with more, there are fewer shapes with more padding.
PROGRAM_S = 10.0


def row_rule(stages: Stages, plan: TrainPlan, length: int) -> RowRule:
    """Returns the shapes of updates by this plan, of episodes of up to `length` tokens."""
    shards = stages.layouts.train(plan.mesh).num_row_shards
    return RowRule(stages.rollout.episodes_per_step, plan.micro_batches, shards, length)


def plan_of_shape(stages: Stages, plan: TrainPlan, shape: Shape, length: int) -> TrainPlan:
    """Returns the plan with the micro-batches that this shape needs, at most those of `plan`."""
    return plan._replace(micro_batches=row_rule(stages, plan, length).parts(shape))


def tightest_plan(stages: Stages, plan: TrainPlan, shape: Shape, length: int) -> TrainPlan:
    """Returns the plan with the smallest micro-batches by which this shape is updated as by `plan`.

    If an update runs out of memory, so do those by all plans between the two.
    """
    rule = row_rule(stages, plan, length)
    parts, number = rule.parts(shape), rule.micro_batches
    while rule.most % (2 * number) == 0:
        if rule._replace(micro_batches=2 * number).parts(shape) != parts:
            break
        number *= 2
    return plan._replace(micro_batches=number)


def plan_batch(
    placement: Placement,
    lengths: Sequence[int],
    length: int,
    num_samples: Sequence[int] | None = None,
    history: ShapeHistory | None = None,
) -> Packing:
    """Plans rows for the plan in use, in a shape that few batches of a run differ in.

    Every process calls it with the `lengths` and `num_samples` of all episodes (`plan_packing`),
    and the context bucket `length`. `history` None: that of the run's updates.
    """
    plan, problem = placement.train, placement.problem
    rule = row_rule(placement.stages, plan, length)
    rows = problem.packed_rows(length, sum(lengths), plan.mesh)
    tokens = rows * length * problem.work.num_batches * problem.work.epochs
    program_updates = PROGRAM_S * problem.update_speed(plan, length, rows) / tokens
    if history is None:
        history = placement.row_shapes.setdefault(str(length), ShapeHistory())
    shape = history.choose(lengths, rule, program_updates)
    return plan_packing(lengths, rule, shape, num_samples)


def shape_ahead(placement: Placement, plan: TrainPlan, length: int) -> Shape | None:
    """Returns the shape that a batch by another plan, or of longer episodes, will probably have.

    None: it is not known yet. Batches of this bucket then have that shape where it is little larger
    than they need.
    """
    rule = row_rule(placement.stages, plan, length)
    history = placement.row_shapes.setdefault(str(length), ShapeHistory())
    if known := [shape for shape in history.shapes if shape in rule.shapes]:
        return known[0]
    if not placement.trained_tokens:
        return None
    needed = math.ceil(GROWTH_AHEAD * placement.trained_tokens)
    shape = next((shape for shape in rule.shapes if shape.positions >= needed), rule.largest)
    history.add(shape, rule)
    return shape


def move_batch(placement: Placement, batch: TrajectoryBatch, length: int) -> TrajectoryBatch:
    """Returns the batch on the layout of the plan in use, with more rows where it needs them."""
    stages, plan = placement.stages, placement.train
    rule, layout = row_rule(stages, plan, length), stages.layouts.train(plan.mesh)
    num_rows, row_length = batch.tokens.shape
    before = rule.most // batch.tokens.sharding.shard_shape((rule.most, row_length))[0]
    possible = (
        rows
        for rows in range(num_rows, 2 * rule.most + 1)
        if rows % before == 0 and rows % rule.shards == 0
    )
    batch = add_rows(batch, next(possible))
    return reshard(batch, jax.tree.map(lambda _: layout.activations("NS"), batch))


def supervised_parts(
    placement: Placement,
    examples: Sequence[Ids],
    length: int,
    number: int,
    history: ShapeHistory | None = None,
) -> list[Part]:
    """Returns the examples, cut to `length` tokens, dealt out to `number` parts in turn.

    Conversations of a file are whole, in rows of a longer context bucket where they need it. There
    are no parts in a process that does not train. `history` as of `plan_batch`.
    """
    stages = placement.stages
    whole = min(max(len(ids) for ids, _ in examples), stages.example_tokens)
    length = max(length, stages.rollout.max_tokens_for(whole))
    layout = stages.layouts.train(placement.train.mesh)
    lengths = [min(len(ids), length) for ids, _ in examples]
    batch = sft_batch(examples, layout, length) if stages.cluster.trains else None
    parts = []
    for index in range(number):
        own = [tokens * (row % number == index) for row, tokens in enumerate(lengths)]
        # In every process: all know the same shapes.
        packing = plan_batch(placement, own, length, history=history)
        if batch is not None:
            packed = pack_rows(batch, packing, layout)
            parts.append(Part(batch=packed, length=length, num_tokens=sum(own)))
    return parts
