# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What is written down behind each step: metrics, episodes, evaluations, checkpoints, the report.

Every process of a run has a Recorder, because some of it takes all of them; the first one writes.
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from earl_jax.config import Config
from earl_jax.envs.tasks import KeepsState
from earl_jax.loop import Position, StepRecord, expected_tokens
from earl_jax.models.checkpoints.export import export_policy, keep_exports
from earl_jax.models.checkpoints.hf_read import check_weights
from earl_jax.models.lora import fingerprint
from earl_jax.placement.compile_ahead import CompileAhead
from earl_jax.placement.placement import Placement, SwitchLog
from earl_jax.rollout.evaluation import evaluate
from earl_jax.telemetry.episodes import (
    failures_in_words,
    read_trajectories,
    trajectory_lines,
    write_trajectory_lines,
)
from earl_jax.telemetry.load import LoadHistory
from earl_jax.telemetry.metrics import MetricsLog, read_metrics
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.report import write_report
from earl_jax.train.checkpoint import Checkpoints, copy_to_save
from earl_jax.trajectory import mean_metrics
from earl_jax.world import World

REPORT_EPISODES = 12
_OF_FIRST_UPDATE = ("entropy", "logprob_mismatch_mean", "logprob_mismatch_max")


class Choice(NamedTuple):
    """One stage's part of a decision, for people."""

    stage: str
    reason: str
    switched: bool


@dataclasses.dataclass
class Recorder:
    """Writes down what a step left. Every process has one; the first writes for all."""

    world: World
    placement: Placement
    checkpoints: Checkpoints
    progress: Progress
    metrics_log: MetricsLog | None
    workdir: Path
    stop: list[int]
    ahead: CompileAhead
    stopped: bool = False
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    # What the step before did otherwise than the config says.
    _way: str = ""

    def begin(self) -> Position:
        """A new run: its meshes, its first weights, and what these can do."""
        config = self.world.config
        if self.world.checkpoint:
            # Now, and not after programs were compiled: that takes minutes.
            check_weights(self.world.checkpoint)
        self.placement.choose_step(expected_tokens(self.world, None), None)
        self.take_over()
        state = self.world.first_train_state(self.placement.train.mesh)
        state = self.placement.move_state(state, to_play=True)
        position = Position(step=0, state=state, history=LoadHistory())
        self.ahead.look(self.world, self.placement, position.history)
        self._evaluate(position, config.eval.games)
        return position

    def go_on(self, position: Position) -> Position:
        """A run that was stopped: what was not written behind its last step is written now."""
        if self._is_due(position.step):
            self._export(position)
        return position

    def take_over(self) -> None:
        """From here on programs that are used are told to who compiles ahead.

        What was compiled before counts for no step.
        """
        self.placement.about_to_use = self.ahead.hand_over
        self.placement.is_compiled = self.ahead.is_compiled
        self.ahead.take_times()

    def after_step(self, position: Position, record: StepRecord) -> bool:
        """Metrics, episodes, evaluation, checkpoint, report; in this order. True to stop."""
        config, step = self.world.config, position.step
        last = step == config.num_steps
        log, choices = self._gather_choices()
        line = self._metrics(record, log, choices)
        line |= self._compile_times()
        for note in line.pop("switch_notes"):
            self.progress.note(f"step {step}: {note}")
        if line["switched"] and "compile_s" in line:
            self.progress.note(
                f"step {step}: its new programs took {line['compile_s']:.2f} s to compile, "
                f"of which the run waited {line['compile_waited_s']:.2f} s"
            )
        if failures := failures_in_words(record.trajectories):
            self.progress.note(f"step {step}: {failures}")
        self._write(line)
        if not last:
            self.ahead.look(self.world, self.placement, position.history)
        if step == 1 or last or step % config.log.trajectories_every_steps == 0:
            self._write_trajectories(step, record)
        if last or step % config.eval.every_steps == 0:
            self._evaluate(position, config.eval.final_games if last else config.eval.games)
        self.stopped = self.world.processes.any(bool(self.stop), "a signal to stop")
        if self.stopped or self._is_due(step):
            self._save(position)
        if self._is_due(step):
            self._export(position)
        if last or self.stopped or step % config.log.report_every_steps == 0:
            self._report()
        return self.stopped

    def _gather_choices(self) -> tuple[SwitchLog, list[Choice]]:
        """Gathers what changed, in all processes: what one decided by itself in a rollout too."""
        log = self.placement.take_log()
        choices = [(choice.stage, choice.reason, choice.switched) for choice in log.choices]
        own = (choices, log.switch_s, log.bytes_per_device)
        all_choices, switch_s, num_bytes = zip(
            *self.world.processes.gather(own, "what changed"), strict=True
        )
        first, *others = [[Choice(*choice) for choice in each] for each in all_choices]
        switched = dict.fromkeys(choice for each in others for choice in each if choice.switched)
        first += [choice for choice in switched if choice not in first]
        log = dataclasses.replace(log, switch_s=max(switch_s), bytes_per_device=max(num_bytes))
        return log, first

    def _compile_times(self) -> dict[str, float]:
        """What programs used for the first time took, for metrics.jsonl; nothing where none was.

        `compile_s` is what it took to compile them, `compile_waited_s` the part of it that the run
        waited for; the rest was compiled while it did something else.
        """
        each = self.world.processes.gather(self.ahead.take_times(), "what was compiled")
        total_s, waited_s = max(each, key=lambda times: times[1])
        return {"compile_s": total_s, "compile_waited_s": waited_s} if total_s else {}

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics_log is not None:
            self.metrics_log.write(line)
        self.progress.update(line)

    def _write_trajectories(self, step: int, record: StepRecord) -> None:
        """Only now, and not at every step, all tokens come to the first process."""
        own = trajectory_lines(record.trajectories)
        each = self.world.processes.gather(own, "the episodes to write down")
        if self.world.processes.is_first:
            lines = itertools.chain.from_iterable(each)
            write_trajectory_lines(self.workdir / "trajectories", step, lines)

    def _evaluate(self, position: Position, games: int) -> None:
        evaluation = evaluate(self.world, self.placement, position, games=games)
        self._write({"step": position.step, "eval": evaluation})

    def _is_due(self, step: int) -> bool:
        """Whether this step is kept: the last is, and one every so many."""
        config = self.world.config
        return step == config.num_steps or step % config.checkpoint.every_steps == 0

    def _save(self, position: Position) -> None:
        # A run that is resumed has it not either, and the copy of the weights needs room.
        self.placement.sessions.forget()
        processes, base = self.world.processes, position.state.base
        tasks = self.world.played.tasks
        prints: list[int | None] = []
        if base is not None:
            own = int(fingerprint(base)) if processes.trains else None
            prints = [each for each in processes.gather(own, "the base") if each is not None]
        state, is_copy = copy_to_save(position.state, self.world.saved_shardings)
        self.checkpoints.save(
            position.step,
            state,
            {
                "placement": self.placement.as_dict(),
                "history": position.history.as_list(),
                "throughput": self.placement.observations.table.as_dict(),
                **({"base_fingerprint": prints[0]} if prints else {}),
                **({"tasks": tasks.state()} if isinstance(tasks, KeepsState) else {}),
            },
        )
        if not is_copy:
            # The next step donates these arrays.
            self.checkpoints.wait()

    def _export(self, position: Position) -> None:
        config = self.world.config
        checkpoint, at_end = config.checkpoint, position.step == config.num_steps
        wanted = checkpoint.export
        if wanted == "auto":
            wanted = at_end and config.model.path != ""
        if not wanted:
            return
        for folder in export_policy(self.world, position.state, position.step, self.workdir):
            self.progress.note(f"exported {folder}")
        if self.world.processes.is_first:
            keep_exports(self.workdir, newest=checkpoint.keep)

    def _new_way(self) -> list[str]:
        """What a run does otherwise than its config says, if that is another than a step before."""
        words = self.placement.words
        if words == self._way:
            return []
        self._way = words
        return [words or "all as the config says again"]

    def _report(self) -> None:
        if not self.world.processes.is_first:
            return
        trajectories = sorted((self.workdir / "trajectories").glob("step_*.jsonl"))
        newest = read_trajectories(trajectories[-1])[:REPORT_EPISODES] if trajectories else []
        write_report(
            self.workdir / "report.html",
            title=f"earl_jax: {self.world.config.env.title}",
            config=self.world.config.as_dict(),
            metrics=read_metrics(self.workdir / "metrics.jsonl"),
            episodes=newest,
            notes=_report_notes(self.world.config),
        )

    def _metrics(self, record: StepRecord, log: SwitchLog, choices: list[Choice]) -> dict[str, Any]:
        """The line of metrics.jsonl for this step, in the words of the contract."""
        outcomes, load, stage_s = record.outcomes, record.load, record.stage_s
        rewards = np.array([o.reward for o in outcomes])
        first, last = record.updates[0], record.updates[-1]
        switches = [choice for choice in choices if choice.switched]
        train_tokens = sum(o.num_tokens for o in outcomes) * len(record.updates)
        lags = [
            record.step - 1 - outcome.oldest_version
            for outcome in outcomes
            if outcome.oldest_version is not None
        ]
        newest = {choice.stage: choice for choice in choices}
        return {
            "step": record.step,
            "time_s": time.perf_counter() - self.start_s,
            "reward_mean": rewards.mean(),
            "reward_std": rewards.std(),
            "episodes": len(rewards),
            "env": mean_metrics(outcomes) or None,
            "turns_mean": np.mean([o.num_turns for o in outcomes]),
            "context_tokens_mean": load.context_tokens_mean,
            "context_tokens_max": max(o.num_tokens for o in outcomes),
            "tokens_in_flight_max": load.tokens_in_flight_max,
            "rollout_tokens": load.rollout_tokens,
            "rollout_tokens_per_s": load.rollout_tokens / stage_s["rollout"],
            "prefill_tokens": record.stats.prefill_tokens,
            "shared_tokens": record.stats.shared_tokens,
            "copied_tokens": record.stats.copied_tokens or None,
            "recomputed_tokens": record.stats.recomputed_tokens or None,
            "preempted_episodes": record.stats.preempted_episodes or None,
            "borrowed_slots": record.stats.borrowed_slots or None,
            "preempted_host_bytes": record.stats.preempted_host_bytes or None,
            "preemption": record.stats.preemption or None,
            "discarded_tokens": record.stats.discarded_tokens or None,
            "drafted_tokens": record.stats.drafted_tokens or None,
            "draft_acceptance": record.stats.draft_acceptance,
            "tokens_per_pass": record.stats.tokens_per_pass,
            "decode_rows": record.stats.decode_rows,
            "idle_rows": record.stats.idle_rows,
            "env_wait_s": record.stats.env_wait_s,
            "train_tokens": train_tokens,
            "train_tokens_per_s": train_tokens / stage_s["train"],
            "stage_s": stage_s,
            "rollout_mesh": record.rollout_mesh,
            "train_mesh": str(self.placement.train.mesh),
            "rollout_max_tokens": record.rollout_max_tokens,
            "switched": [choice.stage for choice in switches],
            "switch_s": log.switch_s,
            "decision": "; ".join(map(str, newest.values())),
            "expected_step_s": log.expected_s,
            "out_of_memory": log.failures or None,
            "plan": self.placement.words or None,
            "switch_notes": [
                *map(str, switches),
                *self._new_way(),
            ],
            "dispatch_bytes": record.dispatch_bytes,
            "dispatch_host_bytes": record.dispatch_host_bytes,
            "publish_bytes": record.publish_bytes,
            "publish_host_bytes": record.publish_host_bytes,
            "sampling_kl": record.sampling_kl,
            "version_lag_max": max(lags, default=0),
            **last,
            # Measured before the step has changed the policy.
            **{name: first[name] for name in _OF_FIRST_UPDATE},
            "peak_bytes_per_device": log.bytes_per_device,
            "budget_bytes_per_device": self.world.budget_bytes,
        }


def _report_notes(config: Config) -> list[str]:
    train = config.train
    if not train.sft_steps:
        return []
    return [
        f"In its first {train.sft_steps} steps the policy was also trained on "
        f"example episodes of {config.env.title} ({train.sft_updates} supervised updates a step)."
    ]
