# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A step of a run of supervised updates alone (config.algorithm "sft"), and its record."""

import dataclasses

from earl_jax.config.resume import replayed_settings
from earl_jax.placement.moves import settle
from earl_jax.placement.packing import supervised_parts
from earl_jax.placement.parts import fill_of
from earl_jax.placement.placement import Placement
from earl_jax.placement.updates import StepUpdate
from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.run.step_record import SupervisedRecord, count_skipped
from earl_jax.telemetry.compile_clock import compile_clock
from earl_jax.telemetry.load import Load
from earl_jax.telemetry.timing import StageTimer
from earl_jax.telemetry.trace import Trace


def supervised_step(
    run: Run, placement: Placement, position: Position, trace: Trace | None = None
) -> tuple[Position, SupervisedRecord]:
    """Makes one update on the next conversations; nothing is played.

    Its stages are written to the `trace`. Where the devices have too little memory, the update is
    made again with another plan (`Placement.attempt`).
    """
    config, step, conversations = run.config, position.step, run.tasks.conversations
    assert conversations is not None, "the run was built by build_run alone"
    load = Load(
        context_tokens_max=conversations.max_tokens,
        context_tokens_mean=conversations.mean_tokens,
        tokens_in_flight_max=0,
        rollout_tokens=0,
    )
    timer = StageTimer(trace, step + 1)
    with timer("select"):
        decision = placement.choose_training(load)
        log = placement.log
        log.choices, log.expected_s = decision.choices, decision.seconds
        log.bytes_per_device = max(choice.num_bytes for choice in decision.choices)
        placement.events.note("open", version=step, settings=replayed_settings(config))
        state = settle(placement, position.state)
    with timer("dispatch"):
        (examples,) = run.tasks.examples(step, 1)
        parts = supervised_parts(placement, examples, 1, 1)
        controls = run.learner.controls(step, config.num_steps)
        update = StepUpdate(placement=placement, controls=controls, parts=parts)
    plan, compiled_s = placement.train, compile_clock().own_seconds()
    with timer("train"):
        state, updates = update.finish(state)
    # An update in which a program was compiled or loaded says nothing of its speed.
    is_timed = plan == placement.train and compile_clock().own_seconds() == compiled_s
    (part,) = update.parts
    # All processes choose by the times of the first.
    own = (timer.seconds["train"], is_timed)
    train_s, is_timed = run.cluster.gather(own, "the end of a step")[0]
    if is_timed:
        speed = part.batch.tokens.size / train_s
        placement.add_speed(plan, part.length, speed)
    record = SupervisedRecord(
        step=step + 1,
        lengths=[len(ids) for ids, _ in examples],
        updates=updates,
        batches=[part.batch] if count_skipped(updates) else [],
        learning_rate=float(controls[0]),
        packing_fill=fill_of(update.parts),
        stage_s={**timer.seconds, "train": train_s},
    )
    return dataclasses.replace(position, step=step + 1, state=state), record
