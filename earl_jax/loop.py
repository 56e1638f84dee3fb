# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The synchronous RL loop: choose, publish, play, dispatch, learn, record.

Read `rl_step` first: it is one step, stage by stage. The parts that it uses are built in run/;
where they run is decided in placement/. The asynchronous loop (loop_async.py) differs in how a step
comes to its episodes.
"""

import contextlib
import dataclasses
import zlib
from typing import Protocol

import numpy as np

from earl_jax.algorithms.advantages import counted, group_shares, next_averages
from earl_jax.config.config import Config
from earl_jax.config.resume import replayed_settings
from earl_jax.envs.examples import Ids
from earl_jax.placement.delivery import rows_of, send_parts
from earl_jax.placement.moves import move_state, open_session, settle
from earl_jax.placement.parts import fill_of
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import play_all
from earl_jax.placement.updates import StepUpdate, Wait, sft
from earl_jax.rollout.end import Stopped
from earl_jax.rollout.load import expected_load, expected_tokens, measure_load
from earl_jax.rollout.open_episodes import OpenEpisode
from earl_jax.rollout.scheduler import next_lengths
from earl_jax.rollout.tasks import with_lengths
from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.run.step_costs import StepCosts
from earl_jax.run.step_end import StepStopped, count_failed_steps
from earl_jax.run.step_record import PlayedStep, StepRecord, count_skipped
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.episodes import failures_of
from earl_jax.telemetry.host_bytes import only_on_devices
from earl_jax.telemetry.metrics import Metrics
from earl_jax.telemetry.timing import StageTimer
from earl_jax.telemetry.trace import Trace
from earl_jax.train.state import TrainState

# The state behind a rollout, its episodes, and the update where they went to the trainer as they
# were finished.
Step = tuple[TrainState, PlayedStep, StepUpdate | None]


class Player(Protocol):
    """Plays the episodes of a step, and those of later steps while it learns."""

    def play(self, position: Position, timer: StageTimer) -> Step:
        """Returns the state, which may have moved, and the episodes of the step."""
        ...

    def plans_chosen(self) -> None:
        """Is called when a plan for the step's updates was chosen."""
        ...

    def open_groups(self) -> tuple[int, ...]:
        """Returns the numbers of the groups whose tasks were begun and not trained on."""
        ...

    def open_episodes(self) -> dict[int, OpenEpisode]:
        """Returns what their episodes have in this process, by number."""
        ...

    @property
    def oldest_step(self) -> int | None:
        """See `Position`."""
        ...

    @property
    def wait(self) -> Wait | None:
        """Is called while an update of this process is under way."""
        ...

    def updates(self) -> contextlib.AbstractContextManager[None]:
        """Returns what encloses the updates: other processes may play until they have ended."""
        ...


def rl_step(
    run: Run,
    placement: Placement,
    position: Position,
    player: Player | None = None,
    trace: Trace | None = None,
) -> tuple[Position, StepRecord]:
    """Takes a batch of episodes, played with the newest weights unless by `player`, and learns.

    Its stages are written to the `trace`.

    Where the devices have too little memory, a rollout is played again from its tasks, and an
    update is made again from the state and the batch, with another plan (`Placement.attempt`).

    Raises:
        EpisodesFailed: every episode failed, and none has worked before; nothing was learnt.
        StepStopped: a signal stopped the rollout; nothing was learnt.
    """
    config, step = run.config, position.step
    timer = StageTimer(trace, step + 1)
    player = player or InTurn(run, placement)
    state, done, update = player.play(position, timer)
    is_streamed = update is not None
    before = dataclasses.replace(position, state=state)
    failures, later_steps = failures_of(done.played.outcomes), config.asynchrony.later_steps
    failed_steps = count_failed_steps(failures, before, later_steps)
    rollout_mesh, max_tokens = str(placement.rollout.mesh), placement.max_tokens
    history = position.history.add(done.load)
    length = run.stages.rollout.max_tokens_for(done.load.context_tokens_max)
    with timer("select"):
        placement.choose_training(history.recent())
        player.plans_chosen()
        state = settle(placement, state, step)
    if update is None:
        with timer("dispatch"):
            update = send_batch(run, placement, position, done, length)
        update.wait = player.wait
    if config.train.sft_weight:
        with timer("sft"):
            (examples,) = _examples(run, step, 1)
            update.mix_in(examples, length)
    train_plan = placement.train
    with player.updates():
        with timer("train"):
            state, updates = update.finish(state)
        # Training in which a program was compiled or loaded says nothing of its speed.
        is_timed = update.plans == {train_plan} and not timer.compile_s["train"]
        with timer("sft"):
            state, more = _warm_up(run, placement, step, state, length)
    with timer("select"):
        state = move_state(placement, state, to_play=True)
    costs = StepCosts(
        updates=updates + more,
        rollout_speed=done.played.stats.tokens_per_s,
        train_speed=_train_speed(run, update, timer) if is_timed else None,
        train_s=timer.seconds["train"] if run.cluster.trains else 0.0,
        dispatch_host_bytes=done.dispatch_host_bytes,
        publish_host_bytes=done.publish_host_bytes,
    ).gather(run.cluster)
    placement.add_speed(done.plan, done.max_tokens, costs.rollout_speed)
    placement.add_speed(train_plan, length, costs.train_speed)
    record = _record_of(
        config,
        step,
        done,
        update,
        costs,
        is_streamed=is_streamed,
        ended_on=(rollout_mesh, max_tokens),
        stage_s={**timer.seconds, "train": costs.train_s},
    )
    outcomes = done.played.outcomes
    after = Position(
        step=step + 1,
        state=state,
        history=history,
        failed_steps=failed_steps,
        open_groups=player.open_groups(),
        open_episodes=player.open_episodes(),
        oldest_step=player.oldest_step,
        averages=next_averages(run.learner.algorithm, outcomes, position.averages),
        lengths=next_lengths(run.stages.rollout.order, position.lengths, outcomes),
    )
    return after, record


def _train_speed(run: Run, update: StepUpdate, timer: StageTimer) -> float | None:
    """Returns tokens/s of training, None in a process that does not train.

    Tokens are those of the rows as they are computed, padding rows included, as the selector counts
    them. Gradients of parts may have been computed before the stage's last block.
    """
    if not run.cluster.trains:
        return None
    computed = sum(part.batch.tokens.size for part in (*update.parts, *update.streams))
    return run.config.train.epochs * computed / timer.busy_s("train")


def _warm_up(
    run: Run, placement: Placement, step: int, state: TrainState, length: int
) -> tuple[TrainState, list[Metrics]]:
    """Makes the supervised updates of a step of the warm start; returns as `sft`.

    What they lead to is the reference from then on, unless that is a teacher.
    """
    num_steps = run.config.train.sft_steps
    if step >= num_steps:
        return state, []
    examples = _examples(run, step, run.config.train.sft_updates)
    state, updates = sft(placement, state, examples, length, is_last=step + 1 == num_steps)
    if not run.config.reference_from:
        state = run.learner.with_policy_as_reference(state, placement.train.mesh)
    return state, updates


def _examples(run: Run, step: int, updates: int) -> list[list[Ids]]:
    """Returns the supervised examples of a step. Raises RunError where processes differ in them.

    An environment may have failed in one process, which then took the example of another task.
    """
    examples = run.tasks.examples(step, updates)
    if run.cluster.count > 1:
        digests = run.cluster.gather(zlib.crc32(repr(examples).encode()), "supervised examples")
        if len(set(digests)) > 1:
            raise RunError(
                f"the supervised examples of step {step + 1} are not the same in all processes: an "
                "environment failed in some, or does not follow from its seed"
            )
    return examples


def _record_of(
    config: Config,
    step: int,
    done: PlayedStep,
    update: StepUpdate,
    costs: StepCosts,
    *,
    is_streamed: bool,
    ended_on: tuple[str, int],
    stage_s: dict[str, float],
) -> StepRecord:
    """Returns the record of the step behind `step` others.

    Of the metrics `costs.updates` the first are those of `update`. The rollout ended on the mesh
    and in the context bucket of `ended_on`.
    """
    updates = costs.updates
    algorithm, outcomes = update.placement.stages.learner.algorithm, done.played.outcomes
    return StepRecord(
        step=step + 1,
        trajectories=done.trajectories,
        outcomes=outcomes,
        trained=counted(algorithm, outcomes),
        oldest_version=step - config.asynchrony.max_staleness,
        masks_overdue=config.asynchrony.rule == "mask",
        sampling_kl=done.played.sampling_kl,
        stats=done.played.stats,
        load=done.load,
        rollout_mesh=ended_on[0],
        rollout_max_tokens=ended_on[1],
        learning_rate=float(update.controls[0]),
        entropy_coefficient=float(update.controls[1]),
        updates=updates[: update.num_updates],
        num_epochs=config.train.epochs,
        sft_updates=updates[update.num_updates :],
        batches=[part.batch for part in update.parts] if count_skipped(updates) else [],
        packing_fill=fill_of(update.parts),
        is_streamed=is_streamed,
        dispatch_bytes=sum(part.moved_bytes for part in update.parts),
        dispatch_host_bytes=costs.dispatch_host_bytes,
        publish_bytes=done.publish_bytes,
        publish_host_bytes=costs.publish_host_bytes,
        stage_s=stage_s,
        group_shares=group_shares(algorithm, [*outcomes, *done.played.refilled]),
        dropped=done.played.dropped,
        refilled=done.played.refilled,
        num_reused=done.played.num_reused,
    )


# The stages of a step, in its order.


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Plays a step's tasks with the newest weights; nothing is played while it learns."""

    run: Run
    placement: Placement
    oldest_step = None
    wait = None
    updates = staticmethod(contextlib.nullcontext)

    def play(self, position: Position, timer: StageTimer) -> Step:
        """Chooses the step's plans, publishes the weights and plays."""
        return *choose_and_play(self.run, self.placement, position, timer), None

    def plans_chosen(self) -> None:
        """Does nothing."""

    def open_groups(self) -> tuple[int, ...]:
        """Returns none: a step ends with all of its tasks."""
        return ()

    def open_episodes(self) -> dict[int, OpenEpisode]:
        """Returns none."""
        return {}


def choose_and_play(
    run: Run, placement: Placement, position: Position, timer: StageTimer
) -> tuple[TrainState, PlayedStep]:
    """Chooses the step's plans, publishes the weights and plays; again with less where need be.

    The engine's weights and KV caches have left the devices behind it. All that depends on time is
    noted, or comes again in a replay.
    """
    state, rollout, events = position.state, run.stages.rollout, placement.events
    load = expected_load(rollout, position.history)
    tasks = with_lengths(run.tasks.training(position.step), position.lengths)

    def publish_and_play() -> PlayedStep:
        plan, max_tokens = placement.rollout, placement.max_tokens
        with timer("publish"), only_on_devices() as reads:
            policy = run.learner.policy(state)
            session, num_bytes = open_session(placement, policy, version=position.step)
        with timer("rollout"):
            own, played = play_all(run.actor, placement, session, tasks, load, events=events)
        is_ours = run.cluster.is_first or not placement.plays_together
        return PlayedStep(
            plan=plan,
            max_tokens=max_tokens,
            trajectories=own.trajectories if own and is_ours else [],
            experience=own and rows_of(own, played),
            played=played,
            load=measure_load(played, plan.num_slots),
            publish_bytes=num_bytes,
            publish_host_bytes=reads.num_bytes,
        )

    done = None
    while done is None:
        with timer("select"):
            events.skip_given_up()
            placement.choose_step(expected_tokens(rollout, load), load)
            events.note("open", version=position.step, settings=replayed_settings(run.config))
            state = settle(placement, state, to_play=True)
        try:
            done = placement.attempt("rollout", publish_and_play)
        except Stopped as stop:
            raise StepStopped(str(stop), dataclasses.replace(position, state=state)) from None
    return state, done


def send_batch(
    run: Run, placement: Placement, position: Position, done: PlayedStep, length: int
) -> StepUpdate:
    """Sends a step's rows to the trainer, whole or dealt out to mini-batches.

    Returns the update that is to be made of them; `done` gives its rows up.
    """
    config, step, outcomes = run.config, position.step, done.played.outcomes
    rng = np.random.default_rng([config.seed, step]) if config.train.mini_batches > 1 else None
    controls = run.learner.controls(step, config.num_steps)
    update = StepUpdate(placement=placement, controls=controls, rng=rng)
    with only_on_devices() as reads:
        update.parts += send_parts(
            placement,
            done.experience,
            outcomes,
            length,
            position.averages,
            rng=rng,
            order=done.played.order,
        )
    done.dispatch_host_bytes, done.experience = reads.num_bytes, None
    return update
