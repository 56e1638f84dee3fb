# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The loss on held-out conversations (config.eval.sft_path), by forward passes of the trainer."""

import functools
from typing import Any

import jax

from earl_jax.dispatch.packing import Shape, ShapeHistory
from earl_jax.envs.text.chat_dataset import ChatDataset
from earl_jax.placement.packing import plan_of_shape, supervised_parts, tightest_plan
from earl_jax.placement.parts import Part
from earl_jax.placement.placement import Placement
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.plans import TrainPlan
from earl_jax.train.state import TrainState

LOSS, TOKENS = "sft_loss", "sft_tokens"


def held_out_loss(
    placement: Placement, state: TrainState, conversations: ChatDataset
) -> dict[str, Any]:
    """Returns the mean cross-entropy of the tokens to learn of all conversations, and their number.

    They are packed as for updates. All processes call it; those that do not train are told.

    Raises BudgetTooSmall where the devices have too little memory.
    """
    stages, history = placement.stages, ShapeHistory()
    length = stages.rollout.max_tokens_for(conversations.max_tokens)
    loss, tokens = 0.0, 0
    for examples in conversations.in_order(stages.rollout.episodes_per_step):
        for part in supervised_parts(placement, examples, length, 1, history):
            sums = _sums(placement, state, part)
            loss, tokens = loss + sums[0], tokens + sums[1]
    each = stages.cluster.gather([loss, tokens], "the held-out loss")
    loss, tokens = next(sums for sums in each if sums[1])
    return {LOSS: loss / tokens, TOKENS: tokens}


def _sums(placement: Placement, state: TrainState, part: Part) -> tuple[float, int]:
    """Returns the sum of the losses of a batch and its tokens to learn; row by row if need be."""
    stages, plan, shape = placement.stages, placement.train, Shape(*part.batch.tokens.shape)
    row_by_row = plan._replace(micro_batches=stages.rollout.episodes_per_step)
    plans = {
        plan_of_shape(stages, each, shape, part.length): tightest_plan(
            stages, each, shape, part.length
        )
        for each in (plan, row_by_row)
    }
    for own, tightest in plans.items():
        work = functools.partial(_run, placement, own, state, part)
        sums = placement.attempt("train", work, part.length, plan=tightest)
        if sums is not None:
            return sums
    raise BudgetTooSmall(
        f"the conversations of config.eval.sft_path do not fit on {plan.mesh}: a row of "
        f"{shape.length} tokens on each shard is too much for its devices"
    )


def _run(placement: Placement, plan: TrainPlan, state: TrainState, part: Part) -> tuple[float, int]:
    stages = placement.stages
    sums = stages.learner.loss_sums(plan)(state.params, state.base, part.batch)
    # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting raises.
    stages.cluster.wait(sums, "the held-out loss")
    loss, tokens = jax.device_get(sums)
    return float(loss), int(tokens)
