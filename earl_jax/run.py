# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One run in its workdir: opened or resumed, kept, reported, stopped.

The loop knows the order of the stages, recorder.py what is written down behind each step, and this
how a run that was killed at any moment goes on as if it had not been.
"""

import contextlib
import dataclasses
import functools
import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from earl_jax.config import Config
from earl_jax.envs.tasks import KeepsState
from earl_jax.launch.agreement import check_same, open_shared_workdir
from earl_jax.launch.cluster import find_cluster
from earl_jax.loop import Position, train
from earl_jax.models.checkpoints.export import keep_exports
from earl_jax.models.lora import fingerprint
from earl_jax.placement.compile_ahead import CompileAhead
from earl_jax.placement.facts import open_table
from earl_jax.placement.placement import Placement
from earl_jax.recorder import Recorder
from earl_jax.rollout.evaluation import evaluate
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.smallest import smallest_hardware, smallest_words
from earl_jax.selector.table import ThroughputTable
from earl_jax.telemetry.episodes import truncate_trajectories_after
from earl_jax.telemetry.load import LoadHistory
from earl_jax.telemetry.metrics import MetricsLog, read_metrics, truncate_after
from earl_jax.telemetry.progress import Progress
from earl_jax.train.backup import StateLost
from earl_jax.train.checkpoint import Checkpoints, DamagedCheckpoint, from_checkpoint, open_workdir
from earl_jax.train.step import TrainState
from earl_jax.world import World

# What a checkpoint holds beside the TrainState.
_POSITION_KEYS = {"placement", "history", "throughput"}
_ADAPTERS_KEYS = {"base_fingerprint"}


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains from where the workdir stands to the end, or to a SIGTERM.

    Where a lack of memory takes the trainer's state, it goes on from the newest checkpoint (or from
    the start, where there is none yet) with less.

    Returns:
        The last evaluation, empty if there is none yet.

    Raises:
        ValueError: a mistake of the user's, in words; a model that is too large for its devices on
            every mesh, with the hardware that would do.
    """
    cluster = find_cluster(0, config.distributed.timeout_s)
    check_same(cluster, config.as_dict())
    open_shared_workdir(
        cluster, workdir, functools.partial(open_workdir, workdir, config.as_dict())
    )
    world = World(config, workdir / "tokenizer")
    # The first process speaks for all.
    stream = None if cluster.is_first else io.StringIO()
    with Progress(config.num_steps, stream) as progress, _stop_on_sigterm() as stop:
        if cluster.count > 1 or world.processes.disjoint:
            progress.note(str(world.processes))
        for note in world.notes:
            progress.note(note)
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
        start = _start(world, checkpoints, progress, workdir)
        while (ended := _train(world, start, checkpoints, progress, workdir, stop)) is None:
            known = start.placement.observations.table
            start = _start(world, checkpoints, progress, workdir)
            # Also where the disk could not keep what failed.
            observations = start.placement.observations
            observations.table = observations.table.over(known)
            if start.position is None:
                progress.note("there is no checkpoint yet: the run begins again")
        position, is_stopped = ended
        checkpoints.close()
        cluster.barrier("the end of the run")
        if is_stopped:
            progress.note(
                f"stopped by SIGTERM after step {position.step}; saved. The same command goes on "
                "from here"
            )
    if not cluster.is_first:
        return {}
    evaluations = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval" in row]
    return evaluations[-1]["eval"] if evaluations else {}


class _Start(NamedTuple):
    """Where a run begins or goes on; the position is None where it begins."""

    position: Position | None
    placement: Placement


def _start(world: World, checkpoints: Checkpoints, progress: Progress, workdir: Path) -> _Start:
    """From the newest checkpoint, if there is one."""
    checkpoints.wait()
    resumed = _resume(world, checkpoints, progress, workdir)
    return _Start(*(resumed or (None, _new_placement(world, progress))))


def _train(
    world: World,
    start: _Start,
    checkpoints: Checkpoints,
    progress: Progress,
    workdir: Path,
    stop: list[int],
) -> tuple[Position, bool] | None:
    """Trains to the end, or to a SIGTERM: where the run is then, and whether one came.

    None where a lack of memory took the trainer's state: what failed is impossible from now on, so
    that this happens once for each plan at most.
    """
    position, placement = start
    tensorboard = workdir / "tensorboard" if world.config.log.tensorboard else None
    with contextlib.ExitStack() as stack:
        metrics_log = None
        if world.processes.is_first:
            metrics_log = stack.enter_context(MetricsLog(workdir / "metrics.jsonl", tensorboard))
        ahead = stack.enter_context(CompileAhead(progress.note))
        recorder = Recorder(
            world, placement, checkpoints, progress, metrics_log, workdir, stop, ahead
        )
        try:
            if position is None:
                position = recorder.begin()
            else:
                recorder.take_over()
                position = recorder.go_on(position)
            position = train(world, placement, position, recorder.after_step)
        except BudgetTooSmall as error:
            if world.processes.disjoint:
                raise
            tokens = placement.needed_tokens
            words = smallest_words(smallest_hardware(world.problem, tokens), tokens)
            raise BudgetTooSmall(f"{error}. {words}" if words else str(error)) from error
        except StateLost as lost:
            progress.note(str(lost))
            # What it kept on the devices makes room for what comes from the checkpoint.
            placement.sessions.forget()
            return None
    return position, recorder.stopped


def _new_placement(world: World, progress: Progress) -> Placement:
    table, note = open_table(world)
    if note:
        progress.note(note)
    return Placement(world, table, progress.note)


def evaluate_workdir(config: Config, workdir: Path, games: int) -> tuple[int, dict[str, Any]]:
    """The step of the newest checkpoint that can be read, and what its policy's games came to.

    Raises:
        ValueError: there is no such checkpoint.
    """
    world, position, placement = read_newest(config, workdir)
    evaluation = evaluate(world, placement, position, games=games)
    return position.step, evaluation


def read_newest(config: Config, workdir: Path) -> tuple[World, Position, Placement]:
    """The world of a run, and where its newest checkpoint that can be read stands.

    Nothing in the workdir is changed.

    Raises:
        ValueError: there is no such checkpoint.
    """
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{workdir} holds no checkpoint yet: there is no {folder}")
    world = World(config, workdir / "tokenizer")
    checkpoints = Checkpoints(folder, keep=config.checkpoint.keep)
    for step in checkpoints.steps():
        try:
            position, placement = _restore(world, checkpoints, step)
        except DamagedCheckpoint as damage:
            print(f"the checkpoint of step {step} is damaged ({damage})", file=sys.stderr)
            continue
        checkpoints.close()
        return world, position, placement
    raise ValueError(f"{folder} holds no checkpoint that can be read")


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[list[int]]:
    """A list that is empty until a SIGTERM has come."""
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous)


def _resume(
    world: World, checkpoints: Checkpoints, progress: Progress, workdir: Path
) -> tuple[Position, Placement] | None:
    """Where the newest checkpoint that can be read stands; None if there is none.

    Metrics and trajectories of later steps are dropped: the run takes these steps again.
    """
    for step in checkpoints.steps():
        restored, damage = None, None
        try:
            restored = _restore(world, checkpoints, step, progress.note)
        except DamagedCheckpoint as found:
            damage = str(found)
        damages = list(filter(None, world.processes.gather(damage, "the checkpoint")))
        if damages or restored is None:
            progress.note(
                f"the checkpoint of step {step} is damaged ({damages[0]}); it is set aside, and "
                "the one before is used"
            )
            world.processes.after_first(
                lambda step=step: checkpoints.discard(step), "the damaged checkpoint"
            )
            continue
        tasks = world.played.tasks
        if isinstance(tasks, KeepsState):
            tasks.restore(checkpoints.position(step).get("tasks", {}))
        if world.processes.is_first:
            _drop_after(workdir, step)
        progress.note(f"resuming {workdir} after step {step} of {world.config.num_steps}")
        return restored
    # Nothing can be resumed; what an earlier start may have written is of no run.
    if world.processes.is_first:
        _drop_after(workdir, -1)
    return None


def _restore(
    world: World,
    checkpoints: Checkpoints,
    step: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Position, Placement]:
    """What was saved at this step; the speeds that it was chosen by come with it.

    Raises:
        DamagedCheckpoint: it cannot be what was saved.
        ValueError: the base that its adapters were trained on is not there.
    """
    saved = checkpoints.position(step)
    kept, _ = open_table(world)
    needed = _POSITION_KEYS | (_ADAPTERS_KEYS if world.config.train.lora.rank else set())
    absent = needed - saved.keys() if isinstance(saved, dict) else needed
    if absent:
        raise DamagedCheckpoint(f"its position is without {', '.join(sorted(absent))}")
    try:
        table = _observed_before(ThroughputTable.from_dict(saved["throughput"]), kept, say)
        placement = Placement(world, table, say)
        placement.restore(saved["placement"])
    except ValueError as error:
        raise DamagedCheckpoint(f"its position is not one: {error}") from error
    state = from_checkpoint(
        functools.partial(checkpoints.state, step, world.train_state_shapes()),
        world.train_state_shardings(placement.train.mesh),
        world.saved_shardings,
    )
    state = _with_base(world, saved, state, placement)
    history = LoadHistory.from_list(saved["history"])
    return Position(step=step, state=state, history=history), placement


def _observed_before(
    saved: ThroughputTable, kept: ThroughputTable, say: Callable[[str], None]
) -> ThroughputTable:
    """Returns what this run chose by before what others have seen since, unless it is stale."""
    if saved.facts and saved.facts != kept.facts:
        say("the checkpoint's speeds are of other devices, settings or versions: they are not used")
        return kept
    return saved.over(kept)


def _with_base(
    world: World, saved: dict[str, Any], state: TrainState, placement: Placement
) -> TrainState:
    """The state with the base that its adapters were trained on.

    Raises:
        ValueError: what is there now is another one.
    """
    base = world.frozen_base(placement.train.mesh)
    if not world.processes.trains:
        return dataclasses.replace(state, base=base)
    if base is not None and int(fingerprint(base)) != saved["base_fingerprint"]:
        path = world.config.model.path
        raise ValueError(
            f"the weights in config.model.path ({path}) are not those that this run's adapters "
            "were trained on; put these back, or name another --workdir"
            if path
            else "this version of JAX draws other weights from config.seed than those that this "
            "run's adapters were trained on; use that version, or name another --workdir"
        )
    return dataclasses.replace(state, base=base)


def _drop_after(workdir: Path, step: int) -> None:
    truncate_after(workdir / "metrics.jsonl", step)
    truncate_trajectories_after(workdir / "trajectories", step)
    keep_exports(workdir, until=step)
