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

from earl_jax.algorithms.advantages import assign_credit
from earl_jax.config import DispatchConfig
from earl_jax.dispatch.pack import dispatch, join_rows
from earl_jax.engine.config import Sampling
from earl_jax.engine.session import Session
from earl_jax.placement.placement import Placement
from earl_jax.placement.updates import Metrics, learn, sft
from earl_jax.rollout.collect import Collector, Rollout
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.episode import Task
from earl_jax.rollout.gather import Played, gather_outcomes
from earl_jax.rollout.stats import RolloutStats
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.telemetry.compile_clock import compile_clock
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.telemetry.load import Load, LoadHistory
from earl_jax.telemetry.timing import StageTimer
from earl_jax.train.step import TrainState
from earl_jax.trajectory import Experience, Outcome, Trajectory
from earl_jax.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is: after `step` RL steps, with these weights and this memory of the load."""

    step: int
    state: TrainState
    history: LoadHistory


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step left, for telemetry. Of all processes, but for `trajectories` and times."""

    step: int
    trajectories: list[Trajectory]
    outcomes: list[Outcome]
    sampling_kl: float | None
    stats: RolloutStats
    load: Load
    rollout_mesh: str
    rollout_max_tokens: int
    updates: list[Metrics]
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

    What the devices have too little memory for is done again with another plan (see
    `Placement.attempt`): a rollout from its tasks, an update from the state and the batch.
    """
    step, state = position.step, position.state
    load = foresee(world.config.rollout, position.history)
    timer = StageTimer()

    done = None
    while done is None:
        with timer("select"):
            placement.choose_step(expected_tokens(world, load), load)
            state = placement.move_state(state, to_play=True)
        again = functools.partial(publish_and_play, world, placement, state, step, load, timer)
        plan, max_tokens = placement.rollout, placement.max_tokens
        done = placement.attempt("rollout", again)
    rollout, played, publish_bytes, publish_host_bytes = done
    with timer("select"):
        load = measure_load(played)
        history = position.history.add(load)
        length = world.config.rollout.max_tokens_for(load.context_tokens_max)
        placement.choose_training(history.recent())
        state = placement.move_state(state)
    layout = world.train_layout(placement.train.mesh)
    with timer("dispatch"), only_on_devices(world.config.dispatch) as dispatch_reads:
        own = to_learn_from(world, rollout.experience) if rollout else None
        mesh, num_rows = placement.rollout.mesh, world.config.rollout.episodes_per_step
        layouts = world.rollout_layout(mesh), world.joint_layout(mesh)
        experience = join_rows(own, *layouts, num_rows, length)
        facts = row_facts(world, played.outcomes, length)
        delivery = dispatch(experience, layout, **facts)
        world.processes.wait(delivery.batch, "dispatch")
    trajectories = rollout.trajectories if rollout else []
    rollout_mesh, rollout_max_tokens = str(placement.rollout.mesh), placement.max_tokens
    # The engine's weights and KV caches make room for the trainer.
    del rollout, done, again, own, experience, facts
    train_plan, compiled_s = placement.train, compile_clock().own_seconds()
    with timer("train"):
        state, updates = learn(world, placement, state, delivery.batch, step)
    # A program that was compiled or loaded meanwhile says nothing of its speed.
    is_timed = train_plan == placement.train and compile_clock().own_seconds() == compiled_s
    with timer("demonstrate"):
        state = sft(world, placement, state, step, length)
    with timer("select"):
        state = placement.move_state(state, to_play=True)
    train_tokens = len(updates) * world.config.rollout.episodes_per_step * length
    updates, speeds, *host_bytes = gather_costs(
        world,
        updates,
        (played.stats.tokens_per_s, train_tokens / timer.seconds["train"] if is_timed else None),
        dispatch_reads.num_bytes,
        publish_host_bytes,
    )
    placement.observations.add_speed(plan, max_tokens, speeds[0])
    placement.observations.add_speed(train_plan, length, speeds[1])

    record = StepRecord(
        step=step + 1,
        trajectories=trajectories,
        outcomes=played.outcomes,
        sampling_kl=played.sampling_kl,
        stats=played.stats,
        load=load,
        rollout_mesh=rollout_mesh,
        rollout_max_tokens=rollout_max_tokens,
        updates=updates,
        dispatch_bytes=delivery.plan.moved_bytes,
        dispatch_host_bytes=host_bytes[0],
        publish_bytes=publish_bytes,
        publish_host_bytes=host_bytes[1],
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
) -> tuple[Rollout | None, Played, int, int | None]:
    """The rollout of this step, this process's and that of all (`play_all`).

    And what its new weights moved over the devices, and over the host.
    """
    with timer("publish"), only_on_devices(world.config.dispatch) as reads:
        session, publish_bytes = placement.sessions.open(world.policy(state), version=step)
    with timer("rollout"):
        tasks = learnable(world, world.training_tasks(step))
        rollout, played = play_all(world, placement, session, tasks, load)
    return rollout, played, publish_bytes, reads.num_bytes


def foresee(rollout: RolloutConfig, history: LoadHistory) -> Load | None:
    """The load to expect next, in which contexts grow no further than they may.

    Nor than the rooms that are configured, unless they are longer already: for a larger room
    programs are compiled when an episode needs it, and not because growth may go on.
    """
    load, recent = history.forecast(), history.recent()
    if load is None or recent is None:
        return None
    longest = recent.context_tokens_max
    most = max(longest, rollout.context_buckets[-1] - rollout.round_tokens)
    most = min(load.context_tokens_max, most, rollout.max_episode_tokens or most)
    growth = min(load.growth_tokens, max(0, most - longest))
    return dataclasses.replace(load, context_tokens_max=most, growth_tokens=growth)


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
def only_on_devices(config: DispatchConfig) -> Iterator[HostByteCounter]:
    """Counts the bytes that come to the host inside; forbids them if the config says so."""
    guard = "allow" if config.forbid_host_bytes is False else "disallow_explicit"
    with HostByteCounter() as counter, jax.transfer_guard_device_to_host(guard):
        yield counter
    if config.forbid_host_bytes is not False and counter.num_bytes:
        raise ValueError(
            f"{counter.num_bytes} bytes of experience or weights came through the host, and "
            f"config.dispatch.forbid_host_bytes is {config.forbid_host_bytes!r}; set it to False "
            "to have them counted only"
        )


def play(
    world: World,
    placement: Placement,
    session: Session,
    tasks: Sequence[Task],
    load: Load | None,
    sampling: Sampling | None = None,
) -> Rollout:
    """Plays the tasks from this session, which may move meanwhile."""
    collector = Collector(
        dataclasses.replace(world.own_rollout, num_slots=session.engine.config.num_slots),
        world.new_conversation,
        world.pool,
        world.make_environment,
        lambda session, tokens, pages: placement.sessions.make_room(session, tokens, pages, load),
        num_devices=len(world.processes.own_devices),
        max_context=world.max_context,
        thin_out=lambda session, live, longest: placement.sessions.thin_out(
            session, live, longest, load
        ),
    )
    sampling = sampling or world.config.rollout.sampling
    return collector.collect(session, tasks, sampling=sampling)


def play_all(
    world: World,
    placement: Placement,
    session: Session | None,
    tasks: Sequence[Task],
    load: Load | None,
    sampling: Sampling | None = None,
) -> tuple[Rollout | None, Played]:
    """Plays this process's part of the tasks; the placement is then the same in all processes.

    Returns:
        This process's rollout, None where it has no session, and what became of all tasks.

    Raises:
        RolloutShort: of several processes one had too little memory.
    """
    own, rollout, shortage = world.processes.own(tasks), None, None
    try:
        rollout = play(world, placement, session, own, load, sampling) if session else None
    except (jax.errors.JaxRuntimeError, BudgetTooSmall) as error:
        shortage = placement.shortage(error)
        if shortage is None:
            raise
    played = gather_outcomes(world.processes, rollout, placement.as_dict(), shortage)
    if played.placement != placement.as_dict():
        placement.restore(played.placement)
    return rollout, played


def learnable(world: World, tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks, if what is sampled for them can be learnt from. Raises ValueError else."""
    if world.config.train.ratio == "behaviour":
        for task in tasks:
            if task.sampling not in (None, world.config.rollout.sampling):
                raise ValueError(
                    f"episode {task.episode} is drawn by {task.sampling}, and the trainer scores "
                    "all tokens at config.rollout.temperature; leave Task.sampling to the config, "
                    "or set config.train.ratio = 'model'"
                )
    return tasks


def measure_load(played: Played) -> Load:
    """What the selector wants to know about this rollout."""
    contexts = [outcome.num_tokens for outcome in played.outcomes]
    return Load(
        context_tokens_max=max(contexts),
        context_tokens_mean=float(np.mean(contexts)),
        tokens_in_flight_max=played.stats.tokens_in_flight_max,
        rollout_tokens=played.stats.rollout_tokens,
    )


def to_learn_from(world: World, experience: Experience) -> Experience:
    """The experience with the log-probs, and only those, that the update is measured against."""
    if world.config.train.ratio == "behaviour":
        return dataclasses.replace(experience, model_logprobs=None)
    assert experience.model_logprobs is not None, "the config was not validated"
    return dataclasses.replace(experience, logprobs=experience.model_logprobs, model_logprobs=None)


def row_facts(world: World, outcomes: Sequence[Outcome], length: int) -> dict[str, Any]:
    """The small facts that the host adds to this process's device rows.

    A row whose episode does not count has no tokens for the trainer.
    """
    credit, own = assign_credit(world.learner.algorithm, outcomes), world.processes.own
    lengths = np.where(credit.counts, [outcome.num_tokens for outcome in outcomes], 0)
    return {
        "length": length,
        "lengths": own(lengths),
        "advantages": own(credit.advantages),
        "sample_starts": own(sample_starts(outcomes, length)),
    }


def sample_starts(trajectories: Sequence[Trajectory | Outcome], length: int) -> np.ndarray:
    """i32[N,M]: where each episode's samples begin; `length` behind its last.

    M is a power of two, so that few programs are compiled for it.
    """
    rows = [trajectory.sample_starts for trajectory in trajectories]
    width = 1 << (max(map(len, rows)) - 1).bit_length()
    table = np.full((len(rows), width), length, np.int32)
    for row, starts in zip(table, rows, strict=True):
        row[: len(starts)] = starts
    return table


def gather_costs(
    world: World,
    updates: list[Metrics],
    speeds: tuple[float | None, float | None],
    *host_bytes: int | None,
) -> tuple[Any, ...]:
    """Gathers the updates' metrics, for processes too that do not train, and a step's costs.

    `speeds` are the tokens/s of the rollout and of training, of the first process that has them,
    because all choose by them. Host bytes are the sums over the processes; of those that some
    process cannot count there is none.
    """
    parts = world.processes.gather((updates, speeds, host_bytes), "the end of a step")
    all_updates, all_speeds, all_bytes = zip(*parts, strict=True)
    sums = (None if None in each else sum(each) for each in zip(*all_bytes, strict=True))
    first = [next(filter(None, each), None) for each in zip(*all_speeds, strict=True)]
    return (next(filter(None, all_updates)), first, *sums)
