# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One run in its workdir: opened or resumed, kept, reported, stopped.

The loop knows the order of the stages; this knows what is written down behind each step, so that a
run that is killed at any moment goes on as if it had not been.
"""

import contextlib
import dataclasses
import functools
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from earl_jax.agreement import check_same, open_shared_workdir
from earl_jax.calibrate import Calibration, open_table
from earl_jax.checkpoint import Checkpoints, DamagedCheckpoint
from earl_jax.config import Config
from earl_jax.evaluation import evaluate
from earl_jax.export import export_policy, keep_exports
from earl_jax.joint import from_checkpoint, on_first, to_checkpoint
from earl_jax.loop import Position, StepRecord, expected_tokens, train
from earl_jax.models.hf_read import check_weights
from earl_jax.models.lora import fingerprint
from earl_jax.placement import Placement, SwitchLog
from earl_jax.processes import find_processes
from earl_jax.selector.throughput import ThroughputTable
from earl_jax.telemetry.episodes import (
    read_trajectories,
    truncate_trajectories_after,
    write_trajectories,
)
from earl_jax.telemetry.load import LoadHistory
from earl_jax.telemetry.metrics import MetricsLog, read_metrics, truncate_after
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.report import write_report
from earl_jax.train.step import TrainState
from earl_jax.world import World

REPORT_EPISODES = 12
# What a checkpoint holds beside the TrainState.
_POSITION_KEYS = {"placement", "history", "throughput"}
_ADAPTERS_KEYS = {"base_fingerprint"}


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains from where the workdir stands to the end, or to a SIGTERM.

    Returns:
        The last evaluation, empty if there is none yet.

    Raises:
        ValueError: a mistake of the user's, in words.
    """
    everybody = find_processes(0, config.distributed.timeout_s)
    check_same(everybody, config)
    open_shared_workdir(everybody, workdir, config)
    world = World(config, workdir / "tokenizer")
    tensorboard = workdir / "tensorboard" if config.log.tensorboard else None
    # The first process speaks for all.
    stream = None if everybody.is_first else io.StringIO()
    with Progress(config.num_steps, stream) as progress, _stop_on_sigterm() as stop:
        for note in world.notes:
            progress.note(note)
        checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint)
        resumed = _resume(world, checkpoints, progress, workdir)
        position, placement = resumed or (None, _new_placement(world, progress))
        with contextlib.ExitStack() as stack:
            metrics_log = None
            if everybody.is_first:
                metrics_log = stack.enter_context(
                    MetricsLog(workdir / "metrics.jsonl", tensorboard)
                )
            keeper = _Keeper(world, placement, checkpoints, progress, metrics_log, workdir, stop)
            position = keeper.go_on(position) if position else keeper.begin()
            position = train(world, placement, position, keeper.after_step)
        checkpoints.close()
        everybody.gather(None, "the end of the run")
        if keeper.stopped:
            progress.note(
                f"stopped by SIGTERM after step {position.step}; saved. The same command goes on "
                "from here"
            )
    if not everybody.is_first:
        return {}
    evaluations = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval" in row]
    return evaluations[-1]["eval"] if evaluations else {}


def _new_placement(world: World, progress: Progress) -> Placement:
    table, damage = open_table(world)
    if damage:
        progress.note(damage)
    return Placement(world, Calibration(world, table, progress.note))


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
    checkpoints = Checkpoints(folder, config.checkpoint)
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
    """What was saved at this step; the measurements it was chosen by come with it.

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
        # What this run chose by comes before what others have measured since.
        table = ThroughputTable.from_dict(None, saved["throughput"]).over(kept)
        placement = Placement(world, Calibration(world, table, say))
        placement.restore(saved["placement"])
    except ValueError as error:
        raise DamagedCheckpoint(f"its position is not one: {error}") from error
    state = from_checkpoint(
        world, placement.in_training, functools.partial(checkpoints.state, step)
    )
    state = _with_base(world, saved, state, placement)
    history = LoadHistory.from_list(saved["history"])
    return Position(step=step, state=state, history=history), placement


def _with_base(
    world: World, saved: dict[str, Any], state: TrainState, placement: Placement
) -> TrainState:
    """The state with the base that its adapters were trained on.

    Raises:
        ValueError: what is there now is another one.
    """
    base = world.frozen_base(placement.in_training)
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


@dataclasses.dataclass
class _Keeper:
    """Writes down what a step left. Every process has one; the first writes for all."""

    world: World
    placement: Placement
    checkpoints: Checkpoints
    progress: Progress
    metrics_log: MetricsLog | None
    workdir: Path
    stop: list[int]
    stopped: bool = False
    start_s: float = dataclasses.field(default_factory=time.perf_counter)

    def begin(self) -> Position:
        """A new run: its meshes, its first weights, and what these can do."""
        config = self.world.config
        if self.world.checkpoint:
            # Now, and not after the measurements: they take minutes.
            check_weights(self.world.checkpoint)
        self.placement.calibration.measure_all()
        self.placement.check_budget()
        self.placement.choose_step(expected_tokens(self.world, None), None)
        state = self.world.first_train_state(self.placement.in_training)
        position = Position(step=0, state=state, history=LoadHistory())
        self._evaluate(position, config.eval.games)
        return position

    def go_on(self, position: Position) -> Position:
        """A run that was stopped: what was not written behind its last step is written now."""
        if self._is_due(position.step):
            self._export(position)
        return position

    def after_step(self, position: Position, record: StepRecord) -> bool:
        """Metrics, episodes, evaluation, checkpoint, report; in this order. True to stop."""
        config, step = self.world.config, position.step
        last = step == config.num_steps
        log = self._hear()
        line = self._metrics(record, log)
        for decision in line.pop("switch_notes"):
            self.progress.note(f"step {step}: {decision}")
        self._write(line)
        if step == 1 or last or step % config.log.trajectories_every_steps == 0:
            self._write_trajectories(step, record)
        if last or step % config.eval.every_steps == 0:
            self._evaluate(position, config.eval.final_games if last else config.eval.games)
        self.stopped = any(self.world.processes.gather(bool(self.stop), "a signal to stop"))
        if self.stopped or self._is_due(step):
            self._save(position)
        if self._is_due(step):
            self._export(position)
        if last or self.stopped or step % config.log.report_every_steps == 0:
            self._report()
        return self.stopped

    def _hear(self) -> SwitchLog:
        """What changed, in all processes: what one decided for itself in a rollout too."""
        told = self.world.processes.gather(self.placement.take_log(), "what changed")
        first, *others = told
        seen = list(first.decisions)
        for decision in (decision for log in others for decision in log.decisions):
            if decision.switched and decision not in seen:
                seen.append(decision)
        return SwitchLog(
            decisions=seen,
            switch_s=max(log.switch_s for log in told),
            bytes_per_device=max(log.bytes_per_device for log in told),
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics_log is not None:
            self.metrics_log.write(line)
        self.progress.update(line)

    def _write_trajectories(self, step: int, record: StepRecord) -> None:
        """Only now, and not at every step, all tokens come to the first process."""
        told = self.world.processes.gather(record.trajectories, "the episodes to write down")
        if self.world.processes.is_first:
            episodes = [trajectory for each in told for trajectory in each]
            write_trajectories(self.workdir / "trajectories", step, episodes)

    def _evaluate(self, position: Position, games: int) -> None:
        evaluation = evaluate(self.world, self.placement, position, games=games)
        self._write({"step": position.step, "eval": evaluation})

    def _is_due(self, step: int) -> bool:
        """Whether this step is kept: the last is, and one every so many."""
        config = self.world.config
        return step == config.num_steps or step % config.checkpoint.every_steps == 0

    def _save(self, position: Position) -> None:
        processes, base = self.world.processes, position.state.base
        prints: list[int | None] = []
        if base is not None:
            own = int(fingerprint(base)) if processes.trains else None
            prints = [each for each in processes.gather(own, "the base") if each is not None]
        self.checkpoints.save(
            position.step,
            to_checkpoint(self.world, position.state),
            {
                "placement": self.placement.as_dict(),
                "history": position.history.as_list(),
                "throughput": self.placement.calibration.table.as_dict(),
                **({"base_fingerprint": prints[0]} if prints else {}),
            },
        )

    def _export(self, position: Position) -> None:
        config = self.world.config
        checkpoint, at_end = config.checkpoint, position.step == config.num_steps
        wanted = checkpoint.export
        if wanted == "auto":
            wanted = at_end and config.model.path != ""
        if not wanted:
            return
        state = on_first(self.world, position.state)
        if not self.world.processes.is_first:
            return
        for folder in export_policy(self.world, state, position.step, self.workdir):
            self.progress.note(f"exported {folder}")
        keep_exports(self.workdir, newest=checkpoint.keep)

    def _report(self) -> None:
        if not self.world.processes.is_first:
            return
        trajectories = sorted((self.workdir / "trajectories").glob("step_*.jsonl"))
        newest = read_trajectories(trajectories[-1])[:REPORT_EPISODES] if trajectories else []
        write_report(
            self.workdir / "report.html",
            title=f"earl_jax: {self.world.config.env.game}",
            config=self.world.config.as_dict(),
            metrics=read_metrics(self.workdir / "metrics.jsonl"),
            episodes=newest,
            notes=_report_notes(self.world.config),
        )

    def _metrics(self, record: StepRecord, log: SwitchLog) -> dict[str, Any]:
        """The line of metrics.jsonl for this step, in the words of the contract."""
        outcomes, load, stage_s = record.outcomes, record.load, record.stage_s
        rewards = np.array([o.reward for o in outcomes])
        first, last = record.updates[0], record.updates[-1]
        corrected = self.world.config.importance_cap > 0
        switches = [decision for decision in log.decisions if decision.switched]
        train_tokens = sum(o.num_tokens for o in outcomes) * len(record.updates)
        lags = [
            record.step - 1 - outcome.oldest_version
            for outcome in outcomes
            if outcome.oldest_version is not None
        ]
        newest = {decision.stage: decision for decision in log.decisions}
        return {
            "step": record.step,
            "time_s": time.perf_counter() - self.start_s,
            "reward_mean": rewards.mean(),
            "reward_std": rewards.std(),
            "episodes": len(rewards),
            "turns_mean": np.mean([o.num_turns for o in outcomes]),
            "context_tokens_mean": load.context_tokens_mean,
            "context_tokens_max": max(o.num_tokens for o in outcomes),
            "tokens_in_flight_max": load.tokens_in_flight_max,
            "rollout_tokens": load.rollout_tokens,
            "rollout_tokens_per_s": load.rollout_tokens / stage_s["rollout"],
            "prefill_tokens": record.stats.prefill_tokens,
            "shared_tokens": record.stats.shared_tokens,
            "recomputed_tokens": record.stats.recomputed_tokens or None,
            "parked_episodes": record.stats.parked_episodes or None,
            "parked_host_bytes": record.stats.parked_host_bytes or None,
            "parking": record.stats.parking or None,
            "given_up_tokens": record.stats.given_up_tokens or None,
            "drafted_tokens": record.stats.drafted_tokens or None,
            "draft_acceptance": record.stats.draft_acceptance,
            "drafting_rounds": record.stats.drafting_rounds or None,
            "env_wait_s": record.stats.env_wait_s,
            "train_tokens": train_tokens,
            "train_tokens_per_s": train_tokens / stage_s["train"],
            "stage_s": stage_s,
            "rollout_mesh": record.rollout_mesh,
            "train_mesh": str(self.placement.in_training),
            "rollout_places": record.rollout_places,
            "switched": [decision.stage for decision in switches],
            "switch_s": log.switch_s,
            "decision": "; ".join(
                [*(f"{stage} {d.reason}" for stage, d in newest.items()), log.comparison]
            ),
            "out_of_memory": log.failures or None,
            "rung": self.placement.rung or None,
            "switch_notes": [f"{decision.stage} {decision.reason}" for decision in switches],
            "dispatch_bytes": record.dispatch_bytes,
            "dispatch_host_bytes": record.dispatch_host_bytes,
            "publish_bytes": record.publish_bytes,
            "publish_host_bytes": record.publish_host_bytes,
            "logprob_mismatch_max": first.mismatch_max,
            "logprob_mismatch_mean": first.mismatch_mean,
            "sampling_kl": record.sampling_kl,
            "importance_mean": first.importance_mean if corrected else None,
            "truncated_fraction": first.truncated_fraction if corrected else None,
            "version_lag_max": max(lags, default=0),
            "loss": last.loss,
            "kl": last.kl,
            "entropy": first.entropy,
            "clip_fraction": last.clip_fraction,
            "grad_norm": last.grad_norm,
            "balance_loss": last.balance_loss,
            "expert_load_max": last.expert_load_max,
            "expert_load_entropy": last.expert_load_entropy,
            "peak_bytes_per_device": log.bytes_per_device,
            "budget_bytes_per_device": self.world.budget_bytes,
        }


def _report_notes(config: Config) -> list[str]:
    train = config.train
    if not train.demonstration_steps:
        return []
    return [
        f"In its first {train.demonstration_steps} steps the policy was also trained on games of "
        f"random legal moves ({train.demonstration_updates} supervised updates a step)."
    ]
