# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The RL loop, in order.

Read `train` first: one step is select, publish, rollout, select, dispatch, train, log. Every line
is one stage; what a stage needs is made in world.py, where it runs is decided in placement.py.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from earl_jax.dispatch.pack import dispatch
from earl_jax.placement import Placement
from earl_jax.rollout.collect import Collector, Rollout, RolloutStats
from earl_jax.rollout.config import Sampling
from earl_jax.rollout.control import RolloutControl
from earl_jax.rollout.episode import Task
from earl_jax.rollout.seat import Seat
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.telemetry.load import QUANTILES, Load, LoadHistory
from earl_jax.telemetry.timing import StageTimer
from earl_jax.train.advantage_rows import advantages_of, place_rows, reward_rows
from earl_jax.train.optimizer import entropy_coefficient, learning_rate
from earl_jax.train.step import Objective, TrainState, UpdateMetrics, read_metrics
from earl_jax.trajectory import Experience, Trajectory, TrajectoryBatch
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is: after `step` RL steps, with these weights and this memory of the load."""

    step: int
    state: TrainState
    history: LoadHistory


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step left, for telemetry."""

    step: int
    trajectories: list[Trajectory]
    stats: RolloutStats
    load: Load
    rollout_mesh: str
    rollout_places: int
    updates: list[UpdateMetrics]
    dispatch_bytes: int
    dispatch_host_bytes: int | None
    publish_bytes: int
    publish_host_bytes: int | None
    stage_s: dict[str, float]


def train(
    world: World, placement: Placement, position: Position, after_step: Callable[..., bool]
) -> Position:
    """Runs RL steps until the config's number is reached or `after_step` asks to stop.

    `after_step(position, record)` is called behind every step; it returns True to stop.
    """
    while position.step < world.config.num_steps:
        position, record = rl_step(world, placement, position)
        if after_step(position, record):
            break
    return position


def rl_step(world: World, placement: Placement, position: Position) -> tuple[Position, StepRecord]:
    """One RL step: play a batch of episodes with the newest weights, and learn from it.

    What the devices have too little memory for is done again on the next rung of the ladder (see
    `Placement.survive`): a rollout from its tasks, an update from the state and the batch.
    """
    step, state, load = position.step, position.state, position.history.forecast()
    timer = StageTimer()

    played = None
    while played is None:
        with timer("select"):
            placement.choose_step(expected_tokens(world, load), load)
            state = placement.move_state(state)
        again = functools.partial(publish_and_play, world, placement, state, step, load, timer)
        played = placement.survive("rollout", again)
    rollout, publish_bytes, publish_host_bytes = played
    with timer("select"):
        load = measure_load(rollout)
        history = position.history.add(load)
        length = world.config.rollout.places_for(load.context_tokens_max)
        placement.choose_training(history.recent())
        state = placement.move_state(state)
    layout = world.train_layout(placement.in_training)
    with timer("dispatch"), only_on_devices(world) as dispatch_reads:
        experience = to_learn_from(world, rollout.experience)
        delivery = dispatch(experience, layout, **row_facts(world, rollout, length, layout))
        jax.block_until_ready(delivery.batch)
    trajectories, stats = rollout.trajectories, rollout.stats
    rollout_mesh, rollout_places = str(placement.in_rollout), placement.places
    # The engine's weights and KV caches make room for the trainer.
    del rollout, experience, played, again
    with timer("train"):
        state, updates = learn(world, placement, state, delivery.batch, step)
    with timer("demonstrate"):
        state = imitate(world, placement, state, step, length)
    load = dataclasses.replace(load, other_s=placement.unexplained_s(load, timer.seconds))

    record = StepRecord(
        step=step + 1,
        trajectories=trajectories,
        stats=stats,
        load=load,
        rollout_mesh=rollout_mesh,
        rollout_places=rollout_places,
        updates=updates,
        dispatch_bytes=delivery.plan.moved_bytes,
        dispatch_host_bytes=dispatch_reads.num_bytes,
        publish_bytes=publish_bytes,
        publish_host_bytes=publish_host_bytes,
        stage_s=timer.seconds,
    )
    history = position.history.add(load)
    return Position(step=step + 1, state=state, history=history), record


# The parts of a step, in its order.


def publish_and_play(
    world: World,
    placement: Placement,
    state: TrainState,
    step: int,
    load: Load | None,
    timer: StageTimer,
) -> tuple[Rollout, int, int | None]:
    """The rollout of this step; what its new weights moved over the devices, and over the host."""
    with timer("publish"), only_on_devices(world) as reads:
        seat, publish_bytes = placement.open_seat(world.policy(state), version=step)
        jax.block_until_ready(seat.policy.params)
    with timer("rollout"):
        rollout = play(world, placement, seat, learnable(world, world.training_tasks(step)), load)
    return rollout, publish_bytes, reads.num_bytes


def expected_tokens(world: World, load: Load | None) -> int:
    """Room that the next rollout's episodes will want: as long as recent ones, and a round more.

    But no more than they may come to.
    """
    rollout = world.config.rollout
    if load is None:
        return rollout.context_buckets[0]
    expected = load.context_tokens_max + rollout.round_tokens
    return min(expected, rollout.max_episode_tokens or expected)


@contextlib.contextmanager
def only_on_devices(world: World) -> Iterator[HostByteCounter]:
    """Counts the bytes that come to the host inside; forbids them if the config says so."""
    forbid = world.config.dispatch.forbid_host_bytes
    guard = "disallow_explicit" if forbid else "allow"
    with HostByteCounter() as counter, jax.transfer_guard_device_to_host(guard):
        yield counter
    if forbid and counter.num_bytes:
        raise ValueError(
            f"{counter.num_bytes} bytes of experience or weights came through the host, and "
            "config.dispatch.forbid_host_bytes is True; set it to False to have them counted only"
        )


def play(
    world: World,
    placement: Placement,
    seat: Seat,
    tasks: Sequence[Task],
    load: Load | None,
    sampling: Sampling | None = None,
    control: RolloutControl | None = None,
) -> Rollout:
    """Plays the tasks from this seat, which may move while they run; obeys `control` meanwhile."""
    collector = Collector(
        dataclasses.replace(world.config.rollout, num_slots=seat.engine.config.num_slots),
        world.new_conversation,
        world.pool,
        world.make_environment,
        lambda seat, tokens, pages: placement.make_room(seat, tokens, pages, load),
        num_lanes=len(world.devices),
        max_context=world.max_context,
        drafting=world.drafting,
        thin_out=lambda seat, live, longest: placement.thin_out(seat, live, longest, load),
    )
    sampling = sampling or world.config.rollout.sampling
    return collector.collect(seat, tasks, sampling=sampling, control=control)


def learnable(world: World, tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks, if what is sampled for them can be learnt from. Raises ValueError else."""
    if world.config.train.ratio == "behaviour":
        for task in tasks:
            if task.sampling not in (None, world.config.rollout.sampling):
                raise ValueError(
                    f"episode {task.episode} is drawn by {task.sampling}, and the trainer scores "
                    "all tokens at config.rollout.temperature; leave Task.sampling to the config, "
                    "or set config.train.ratio = 'model' and config.rollout.model_logprobs = True"
                )
    return tasks


def measure_load(rollout: Rollout) -> Load:
    """What the selector wants to know about this rollout."""
    contexts = [trajectory.num_tokens for trajectory in rollout.trajectories]
    return Load(
        context_tokens_max=max(contexts),
        context_tokens_mean=float(np.mean(contexts)),
        context_tokens_quantiles=tuple(map(float, np.quantile(contexts, QUANTILES))),
        tokens_in_flight_max=rollout.stats.tokens_in_flight_max,
        rollout_tokens=rollout.stats.rollout_tokens,
    )


def to_learn_from(world: World, experience: Experience) -> Experience:
    """The experience with the log-probs, and only those, that the update is measured against."""
    if world.config.train.ratio == "behaviour":
        return dataclasses.replace(experience, model_logprobs=None)
    assert experience.model_logprobs is not None, "the config was not validated"
    return dataclasses.replace(experience, logprobs=experience.model_logprobs, model_logprobs=None)


def row_facts(world: World, rollout: Rollout, length: int, layout: Layout) -> dict[str, Any]:
    """The small facts that the host adds to the device rows, in the order of the rows.

    Advantages have room for a power of two of turns, so that few programs are compiled for them.
    """
    trajectories, config = rollout.trajectories, world.config.train
    num_turns = max(8, 1 << max(t.num_turns for t in trajectories).bit_length())
    rewards = place_rows(reward_rows(config, trajectories, num_turns), layout)
    return {
        "length": length,
        "lengths": np.array([trajectory.num_tokens for trajectory in trajectories]),
        "advantages": advantages_of(config, rewards, layout),
        "sample_starts": sample_starts(trajectories, length),
    }


def sample_starts(trajectories: Sequence[Trajectory], length: int) -> np.ndarray:
    """i32[N,M]: where each episode's samples begin; `length` behind its last.

    M is a power of two, so that few programs are compiled for it.
    """
    rows = [trajectory.sample_starts for trajectory in trajectories]
    width = 1 << (max(map(len, rows)) - 1).bit_length()
    table = np.full((len(rows), width), length, np.int32)
    for row, starts in zip(table, rows, strict=True):
        row[: len(starts)] = starts
    return table


def learn(
    world: World, placement: Placement, state: TrainState, batch: TrajectoryBatch, step: int
) -> tuple[TrainState, list[UpdateMetrics]]:
    """The updates of one step; the first one's mismatch is taken before anything has changed."""
    config = world.config
    if world.needs_proximal:
        batch = world.scorer(placement.in_training, placement.train_rung)(state, batch)
    controls = np.array(
        [
            learning_rate(config.train, step, config.num_steps),
            entropy_coefficient(config.train, step, config.num_steps),
        ],
        np.float32,
    )
    updates = []
    for _ in range(config.train.epochs):
        state, batch, metrics = update(world, placement, state, batch, controls, "policy_gradient")
        updates.append(metrics)
    return state, updates


def imitate(
    world: World, placement: Placement, state: TrainState, step: int, length: int
) -> TrainState:
    """The supervised updates of the first steps, on games of random legal moves."""
    controls = np.array([world.config.train.demonstration_learning_rate, 0.0], np.float32)
    for games in world.demonstrations(step):
        batch = games.on(world.train_layout(placement.in_training), length)
        state, _, _ = update(world, placement, state, batch, controls, "supervised")
    return state


def update(
    world: World,
    placement: Placement,
    state: TrainState,
    batch: TrajectoryBatch,
    controls: np.ndarray,
    objective: Objective,
) -> tuple[TrainState, TrajectoryBatch, UpdateMetrics]:
    """One update, and the batch where the trainer is then. `state` is given up.

    Where memory is too short, on another mesh, with more remat, or in smaller parts. A program that
    fails has its donated arguments with it: until it has run once there is a spare of the state in
    host memory. A program that ran once takes no more the next time.

    Raises:
        BudgetTooSmall: no rung is left.
        StateLost: a program failed that had run before.
    """
    while True:
        mesh, rung = placement.in_training, placement.train_rung
        program = world.train_step(mesh, objective, rung)
        spare = placement.spares.keep((mesh, objective, rung, batch.tokens.shape), state)
        again = functools.partial(_run_update, program, state, batch, controls)
        done = placement.survive("train", again, batch.tokens.shape[1])
        if done is not None:
            placement.spares.drop()
            return done[0], batch, done[1]
        state = placement.spares.give_back(state, spare)
        placement.choose_training_again()
        state = placement.move_state(state)
        layout = world.train_layout(placement.in_training)
        rows = jax.tree.map(lambda _, layout=layout: layout.activations("NS"), batch)
        batch = reshard(batch, rows)


def _run_update(
    program: Any, state: TrainState, batch: TrajectoryBatch, controls: np.ndarray
) -> tuple[TrainState, UpdateMetrics]:
    after, metrics = program(state, batch, controls)
    # Reading what an earlier failure left ends the process (jaxlib 0.10.2); waiting for it raises.
    jax.block_until_ready(metrics)
    return after, read_metrics(metrics)
