# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A whole training run in its workdir: begun or resumed, recorded behind each step, stopped."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from earl_jax.config.config import Config
from earl_jax.config.resume import replayed_parts
from earl_jax.launch.agreement import check_same, open_shared_workdir
from earl_jax.launch.cluster import Cluster, find_cluster
from earl_jax.launch.layouts import across_in_words
from earl_jax.launch.lock import locked, set_aside
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.models.checkpoints.hf_read import check_weights
from earl_jax.placement.compile_ahead import CompileAhead, compiles_ahead
from earl_jax.placement.moves import move_state
from earl_jax.placement.placement import Placement
from earl_jax.rollout.event_files import events_file, read_events
from earl_jax.rollout.events import Events
from earl_jax.rollout.load import expected_tokens
from earl_jax.run.build import Run
from earl_jax.run.evaluation import Evaluator
from earl_jax.run.position import Position
from earl_jax.run.resumed_episodes import find_open_groups, with_open_episodes
from earl_jax.run.saved_position import (
    new_placement,
    resume,
)
from earl_jax.run.saver import Saver, choices_of
from earl_jax.run.source import build_from, first_state, keep_sources
from earl_jax.run.step_end import EpisodesFailed, StepStopped, pause_s
from earl_jax.run.step_log import Record, StepLog
from earl_jax.run.step_record import StepRecord
from earl_jax.run.supervised_step import supervised_step
from earl_jax.run.workdir import keep_config, named_where_removed, open_workdir
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.schedule import smallest_hardware, smallest_words
from earl_jax.selector.table import ThroughputTable
from earl_jax.telemetry.load import LoadHistory
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.recorder import Recorder
from earl_jax.telemetry.staleness import staleness_words
from earl_jax.telemetry.trace import Trace
from earl_jax.train.backup import StateLost
from earl_jax.train.checkpoint import Checkpoints

# The name of what stops a replay that has repeated its run.
END_OF_EVENTS = "the end of the events that it replays"
# report.html is made anew at every so many-th step, and at the end.
REPORT_EVERY_STEPS = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run: its evaluation there, and why it stopped before its last step, in words.

    `evaluation` is empty where there is none, and in a process that is not the first.
    `is_replayed` is True where a replay has come to the end of its events, and stopped there.
    """

    evaluation: dict[str, Any]
    stopped: str
    is_replayed: bool = False


def train(
    config: Config,
    workdir: Path,
    stop: Callable[[], str] = lambda: "",
    *,
    restart: bool = False,
    replay: Path | None = None,
) -> RunEnd:
    """Trains from where the workdir stands to the end, or until `stop()` names a signal.

    With `restart` the run begins again from step 0, and what was there is kept beside the workdir.
    With `replay` the run decides by the events in that workdir, of a run of the same config, and
    comes to the same parameters; the workdir is a new one. Where that run went on with other
    settings, so does its replay.
    A rollout is given up then, and played again when the run goes on; a step behind its rollout is
    finished. Of several processes `stop` of one is enough: all stop after the same step.

    Where a lack of memory takes the trainer's state, the run goes on from the newest checkpoint (or
    from the start, where there is none yet) with less.

    Raises:
        ValueError: a mistake of the user's, in words; a model that is too large for its devices on
            every mesh, with the hardware that would do.
    """
    cluster = find_cluster(0, config.distributed.timeout_s)
    check_same(cluster, config.as_dict())
    parts: list[tuple[Config, list[dict[str, Any]]]] = [(config, [])]
    if replay:
        parts = replayed_parts(read_events(replay, cluster.index), config)
    notes: list[str] = []
    with contextlib.ExitStack() as held:

        def open_and_lock() -> None:
            if restart and (aside := set_aside(workdir)):
                notes.append(f"begins again; what was there is in {aside}")
            changed = open_workdir(workdir, config.as_dict())
            notes.extend(f"changed: {line}" for line in changed)
            held.enter_context(locked(workdir))

        open_shared_workdir(cluster, workdir, open_and_lock)
        held.enter_context(named_where_removed(workdir))
        end = RunEnd(evaluation={}, stopped="")
        for part, events in parts:
            end = _train_in(workdir, cluster, part, stop, notes, events, replay)
            if end.stopped and not end.is_replayed:
                break
            notes = ["the run that is replayed went on with other settings here"]
    return end


def _train_in(
    workdir: Path,
    cluster: Cluster,
    config: Config,
    stop: Callable[[], str],
    notes: list[str],
    events: Sequence[dict[str, Any]],
    replay: Path | None,
) -> RunEnd:
    """Trains in a workdir that is this run's alone; `notes` are to be shown."""
    folder, kept = workdir / "checkpoints", config.checkpoint
    checkpoints = Checkpoints(
        folder,
        keep=kept.keep,
        keep_best=kept.keep_best,
        keep_every_steps=kept.keep_every_steps,
        gather=cluster.gather,
    )
    is_new = not checkpoints.steps()
    run = build_from(config, workdir, cluster, stop, is_new=is_new, replay=replay)
    # Only the first process writes to the screen.
    stream = None if cluster.is_first else io.StringIO()
    with contextlib.closing(run.actor.pool), Progress(config.num_steps, stream) as progress:
        if cluster.count > 1 or run.cluster.disjoint:
            progress.note(str(run.cluster))
        if cluster.count > 1:
            progress.note(run.cluster.order_in_words())
        for note in (*notes, *run.notes):
            progress.note(note)
        recorder = Recorder(
            workdir,
            progress,
            writes=cluster.is_first,
            trackers=config.log.trackers,
            config=config.as_dict(),
        )
        position, known, begun = None, None, run.tasks.state()
        with checkpoints, recorder.trackers:
            while position is None:
                position, stopped, known = _train_until_lost(
                    run, recorder, checkpoints, workdir, stop, known, events, begun
                )
        cluster.barrier("the end of the run")
        for words in _staleness_words(config, workdir) if cluster.is_first else ():
            progress.note(words)
    words = _stopped_words(stopped, position.step, workdir) if stopped else ""
    return RunEnd(
        evaluation=recorder.evaluation(position.step) or {},
        stopped=words,
        is_replayed=stopped == END_OF_EVENTS,
    )


def _staleness_words(config: Config, workdir: Path) -> list[str]:
    """Returns what the rule of an asynchronous run has cost so far."""
    path = workdir / "metrics.jsonl"
    if not config.asynchrony.is_on or not path.exists():
        return []
    steps = [line for line in read_metrics(path) if "eval" not in line]
    return staleness_words(config.as_dict(), steps)


def _stopped_words(signal_name: str, step: int, workdir: Path) -> str:
    """Returns what a run that stopped here has saved."""
    if not step:
        return f"stopped by {signal_name} before the first step; there was nothing to save"
    saved = workdir / "checkpoints" / str(step)
    return f"stopped by {signal_name} after step {step}; saved in {saved}"


def _train_until_lost(
    run: Run,
    recorder: Recorder,
    checkpoints: Checkpoints,
    workdir: Path,
    stop: Callable[[], str],
    known: ThroughputTable | None,
    events: Sequence[dict[str, Any]],
    begun: dict[str, Any],
) -> tuple[Position | None, str, ThroughputTable | None]:
    """Trains from the newest checkpoint to the end, to a signal, or until the state is lost.

    The signal's name is the second of the results, "" for none, or where nothing was left to do.
    The position is None where a lack of memory took the trainer's state. The plan that failed is
    impossible from then on (in the table, which is the last of what is returned, also where the
    disk could not keep it), so that this happens once for each plan at most. `begun` is the state
    of the tasks' source at the run's beginning.
    """
    resumed = resume(run, checkpoints, workdir, recorder.note)
    recorder.drop_after(resumed[0].step if resumed else -1)
    position, placement = resumed or (None, new_placement(run, recorder.note))
    if known is not None:
        placement.table = placement.table.over(known)
        if position is None:
            recorder.note("there is no checkpoint yet: the run begins again")
            run.tasks.restore(begun)
    begun_groups, player = find_open_groups(run, checkpoints, workdir, position), None
    path = events_file(workdir, run.cluster.index) if run.cluster.plays else None
    placement.events = Events(path, events)
    if run.config.asynchrony.is_on:
        player = AsyncPlayer(run, placement, begun_groups)
        if position is not None:
            position = with_open_episodes(run, position, workdir, recorder.note)
    is_on = compiles_ahead(run.config.selector.table, run.cluster) and run.config.plays
    ahead = CompileAhead(recorder.note, is_on=is_on)
    log = StepLog(
        run=run,
        placement=placement,
        recorder=recorder,
        workdir=workdir,
        ahead=ahead,
        skipped_steps=position.skipped_steps if position else 0,
    )
    with recorder, ahead:
        training = Training(
            run=run,
            placement=placement,
            recorder=recorder,
            saver=Saver(
                run=run,
                placement=placement,
                recorder=recorder,
                checkpoints=checkpoints,
                workdir=workdir,
            ),
            evaluator=Evaluator(run=run, placement=placement, recorder=recorder, player=player),
            workdir=workdir,
            ahead=ahead,
            log=log,
            stop=stop,
            trace=Trace(workdir, run.cluster.index) if run.config.log.trace else None,
            player=player,
        )
        try:
            position = training.begin(position)
            training.look_for_a_signal()
            while position.step < run.config.num_steps and not training.stopped:
                position = training.take_step(position)
        except BudgetTooSmall as error:
            if run.cluster.disjoint:
                raise
            tokens = placement.needed_tokens
            words = smallest_words(smallest_hardware(placement.problem, tokens), tokens)
            raise BudgetTooSmall(f"{error}. {words}" if words else str(error)) from error
        except StateLost as lost:
            recorder.note(str(lost))
            return None, "", placement.table
    is_done = position.step == run.config.num_steps and not training.evaluator.was_stopped
    return position, "" if is_done else training.stopped, None


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """Begins a run, and records each step of it. Every process has one; the first writes."""

    run: Run
    placement: Placement
    recorder: Recorder
    saver: Saver
    evaluator: Evaluator
    workdir: Path
    ahead: CompileAhead
    log: StepLog
    stop: Callable[[], str]
    stopped: str = ""
    # Plays ahead of the steps in an asynchronous run.
    player: AsyncPlayer | None = None
    trace: Trace | None = None
    # The state that the tasks' source goes on from, where it is not the one that it has now.
    _source_state: dict[str, Any] | None = None

    def begin(self, position: Position | None) -> Position:
        """Returns where the run begins, or goes on, if it has a position.

        A new run chooses its plans, makes its first weights, and is evaluated. Of a run that was
        stopped, what was not written behind its last step is written now.
        """
        run, placement = self.run, self.placement
        if position is not None:
            self._keep_config()
            self._take_over()
            if self.saver.is_due(position.step):
                self.saver.export(position)
            has = self.recorder.evaluation(position.step) is not None
            if not run.cluster.gather(has, "the newest evaluation")[0]:
                self.evaluator.evaluate_if_due(position)
            self.log.write_report()
            return position
        if run.origin.checkpoint:
            # Before any program is compiled, which takes minutes.
            check_weights(run.origin.checkpoint)
        placement.choose_step(expected_tokens(run.stages.rollout, None), None)
        self._keep_config()
        self._take_over()
        state = first_state(run, placement.train.mesh, self.recorder.note)
        state = move_state(placement, state, to_play=True)
        position = Position(step=0, state=state, history=LoadHistory())
        self.ahead.look(placement, position.history)
        self.look_for_a_signal()
        if not self.stopped:
            self.evaluator.evaluate(position, run.config.eval.games)
        return position

    def _keep_config(self) -> None:
        """Writes config.json: all that was given is right, as far as can be known now."""

        def keep() -> None:
            keep_config(self.run.config, self.run.origin.tokenizer, self.workdir)
            keep_sources(self.run, self.workdir)

        open_shared_workdir(self.run.cluster, self.workdir, keep)

    def look_for_a_signal(self) -> None:
        """Sets `stopped` to the name of the signal that some process received, "" for none.

        A replay ends where its events do.
        """
        name = self.stop()
        if not name and self.placement.events.is_over:
            name = END_OF_EVENTS
        names = self.run.cluster.gather(name, "a signal to stop")
        self.stopped = next(filter(None, names), "")

    def _take_over(self) -> None:
        """Has the placement ask the thread that compiles ahead; says where stages span hosts."""
        self.ahead.connect(self.placement)
        cluster, layouts = self.run.cluster, self.run.stages.layouts
        if cluster.num_hosts > 1:
            train = across_in_words(layouts.train(self.placement.train.mesh), cluster.hosts)
            words = f"train {train}"
            if (plan := self.placement.plans.rollout) is not None:
                rollout = across_in_words(layouts.rollout(plan.mesh), cluster.hosts)
                words = f"rollout {rollout}; {words}"
            self.recorder.note(words)

    def take_step(self, position: Position) -> Position:
        """Takes a step and records it. Returns the position behind it.

        Where a signal stops its rollout, what was before it is saved, and is what is returned.
        Raises EpisodesFailed, when what was before it is saved.
        """
        run, choices, player = self.run, self._choices(), self.player
        self.placement.steps_left = self.run.config.num_steps - position.step
        try:
            if run.config.plays:
                position, record = rl_step(run, self.placement, position, player, self.trace)
            else:
                position, record = supervised_step(run, self.placement, position, self.trace)
            if player is not None:
                self._source_state = player.step_ended(position.step)
            elif run.cluster.plays:
                self.placement.events.note("trained", step=position.step)
        except (EpisodesFailed, StepStopped) as end:
            self._save_before(end.position, choices)
            if isinstance(end, EpisodesFailed):
                raise
            self.stopped = str(end)
            return end.position
        self.record(position, record)
        return position

    def record(self, position: Position, record: Record) -> None:
        """Records metrics, episodes, evaluation, checkpoint and report, in this order."""
        config, step = self.run.config, position.step
        last = step == config.num_steps
        self.log.write(record)
        self.saver.checkpoints.look()
        self.log.check_updates(record)
        if not last:
            self.ahead.look(self.placement, position.history)
        is_written = step == 1 or last or step % config.log.trajectories_every_steps == 0
        if is_written and isinstance(record, StepRecord):
            # Gathering all tokens is expensive: only at the steps that are written down.
            self.log.write_episodes(record)
        self.evaluator.evaluate_if_due(position)
        self._wait_out(position, is_last=last)
        self.look_for_a_signal()
        if self.stopped or self.saver.is_due(step):
            self._save(position, self._choices())
        if self.saver.is_due(step):
            self.saver.export(position)
        if last or self.stopped or step % REPORT_EVERY_STEPS == 0:
            self.log.write_report()

    def _wait_out(self, position: Position, *, is_last: bool) -> None:
        """Waits behind a step in which every episode failed, or until a signal comes.

        Not in a replay, whose episodes fail as they did however long it waits.
        """
        if not position.failed_steps:
            return
        number = position.failed_steps
        steps = "1 step, which" if number == 1 else f"{number} steps in a row, which"
        words = f"step {position.step}: every episode failed in {steps} taught nothing"
        at_once = is_last or self.placement.events.is_replay
        seconds = 0 if at_once else pause_s(number, self.run.config.asynchrony.batches)
        self.recorder.note(words if is_last else f"{words}; the next begins in {seconds} s")
        for _ in range(seconds):
            self.look_for_a_signal()
            if self.stopped:
                return
            time.sleep(1)

    def _choices(self) -> dict[str, Any]:
        """Returns the choices in use, for a checkpoint."""
        choices = choices_of(self.run, self.placement) | {"skipped_steps": self.log.skipped_steps}
        return choices if self._source_state is None else {**choices, "tasks": self._source_state}

    def _save(self, position: Position, choices: dict[str, Any]) -> None:
        self.log.checkpoint_s += self.saver.save(position, choices)

    def _save_before(self, position: Position, choices: dict[str, Any]) -> None:
        """Saves what was before a step that was not taken, unless it was saved."""
        checkpoints = self.saver.checkpoints
        if not position.step:
            return
        checkpoints.wait()
        if position.step not in checkpoints.steps():
            self._save(position, choices)
        checkpoints.wait()
        self.log.write_report()
