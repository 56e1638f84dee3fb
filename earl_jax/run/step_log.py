# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log of a run's steps: metrics, notes for the user, episodes, skipped updates, the report."""

import dataclasses
import heapq
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from earl_jax.config.config import Config
from earl_jax.placement.compile_ahead import CompileAhead
from earl_jax.placement.placement import Placement
from earl_jax.run.build import Run
from earl_jax.run.step_record import StepRecord, SupervisedRecord
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.episodes import trajectory_lines
from earl_jax.telemetry.recorder import Recorder
from earl_jax.train.inspection import write_batch

Record = StepRecord | SupervisedRecord
# Steps in a row without an update, behind which a run ends.
MOST_SKIPPED_STEPS = 3


@dataclasses.dataclass(kw_only=True, eq=False)
class StepLog:
    """Writes down each step of a run. Every process has one; its recorder writes in the first."""

    run: Run
    placement: Placement
    recorder: Recorder
    workdir: Path
    ahead: CompileAhead
    # Steps in a row without an update, all of which were skipped.
    skipped_steps: int = 0
    # Seconds that saving has stalled the run since the last line.
    checkpoint_s: float = 0.0
    # How the step before differed from the config, because memory was short.
    _differs: str = ""
    # The kind of failure in the last note: a kind is noted when it becomes the most frequent.
    _noted_failure: str = ""

    def write(self, record: Record) -> None:
        """Writes the step's line of metrics, and notes of what changed in it."""
        line = self._line(record)
        for note in self._notes(record, line.pop("switch_notes"), line):
            self.recorder.note(f"step {record.step}: {note}")
        self.recorder.write(line)

    def write_episodes(self, record: StepRecord) -> None:
        """Writes the step's episodes of all processes, those of a process in its order."""
        numbers = [each.episode for each in record.trajectories]
        own = list(zip(numbers, trajectory_lines(record.trajectories), strict=True))
        cluster = self.run.cluster
        each = cluster.gather(own, "the episodes to write down", in_first=True)
        if cluster.is_first:
            merged = heapq.merge(*each, key=operator.itemgetter(0))
            self.recorder.write_episodes(record.step, (line for _, line in merged))

    def write_report(self) -> None:
        """Writes the report of the run as far as it has come."""
        config = self.run.config
        title = config.env.title if config.plays else Path(config.train.sft_path).name
        title = f"earl_jax: {title}"
        self.recorder.write_report(title, config.as_dict(), _report_notes(config))

    def check_updates(self, record: Record) -> None:
        """Says which updates were skipped; raises RunError after too many steps without one."""
        done = len(record.updates)
        if isinstance(record, StepRecord):
            done += len(record.sft_updates)
        if not (skipped := record.skipped_updates):
            self.skipped_steps = 0
            return
        why = "their loss, gradient or step was not finite"
        self.recorder.note(f"step {record.step}: {skipped} of {done} updates were skipped: {why}")
        self.skipped_steps = self.skipped_steps + 1 if skipped == done else 0
        if self.skipped_steps < MOST_SKIPPED_STEPS:
            return
        # The first process may only play, and has no batch then.
        cluster = self.run.cluster
        first = cluster.train_devices[0].process_index
        index = cluster.index if cluster.trains else first
        name = f"skipped_step_{record.step:06d}.{index}"
        for number, batch in enumerate(record.batches if self.run.cluster.trains else ()):
            part = f".part_{number}" if number else ""
            write_batch(self.workdir / f"{name}{part}.npz", batch)
        name += ".npz"
        raise RunError(
            f"no update could be made in {MOST_SKIPPED_STEPS} steps in a row, because {why}. The "
            f"batch of step {record.step} is in {self.workdir / name}; the newest checkpoint is "
            "from before. Lower config.train.learning_rate, look at the rewards, or compute in "
            "another precision, in another --workdir"
        )

    def _line(self, record: Record) -> dict[str, Any]:
        """Returns the line of metrics.jsonl for this step, in the words of the contract."""
        own = [self.placement.take_log().metrics(), self.ahead.take_waited_s()]
        own += [self.ahead.take_compiles(), self.checkpoint_s]
        self.checkpoint_s = 0.0
        found = of_all_processes(self.run.cluster.gather(own, "what changed"))
        if not self.ahead.is_on or self.run.cluster.count > 1:
            self.placement.add_wait(found["compile_s"] or 0.0)
        return {
            **record.metrics(),
            "train_mesh": str(self.placement.train.mesh),
            "plan": self.placement.words or None,
            **found,
            "budget_bytes_per_device": self.run.problem.budget_bytes,
        }

    def _notes(self, record: Record, switches: list[str], line: dict[str, Any]) -> Iterator[str]:
        """Yields what a user should see of a step: changes with their reasons, failures."""
        yield from switches
        if self.placement.words != self._differs:
            self._differs = self.placement.words
            yield self._differs or "all as in the config again"
        if line["switched"] and line["compile_s"]:
            yield f"the run waited {line['compile_s']:.2f} s for its new programs"
        if not isinstance(record, StepRecord):
            return
        failures = record.failures
        if failures.kind not in ("", self._noted_failure):
            self._noted_failure = failures.kind
            yield failures.in_words()


def of_all_processes(parts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns what processes have for a line of metrics together.

    Each has what changed (`SwitchLog.metrics`), the seconds that it waited for programs, their
    number, and the seconds that saving has stalled it. Costs are those of the process that had
    most; each change and failure, of whichever process, is there once.
    """
    switches, *costs = zip(*parts, strict=True)
    compile_s, compiles, checkpoint_s = map(max, costs)
    # One process may have decided by itself within a rollout.
    notes = [note for part in switches for note in part["switch_notes"]]
    switched = [stage for part in switches for stage in part["switched"]]
    failures = [words for part in switches for words in part["out_of_memory"] or ()]
    return {
        **switches[0],
        "switched": list(dict.fromkeys(switched)),
        "switch_notes": list(dict.fromkeys(notes)),
        "out_of_memory": list(dict.fromkeys(failures)) or None,
        "switch_s": max(part["switch_s"] for part in switches),
        "peak_bytes_per_device": max(part["peak_bytes_per_device"] for part in switches),
        "compile_s": compile_s or None,
        "compiles": compiles or None,
        "checkpoint_s": checkpoint_s or None,
    }


def _report_notes(config: Config) -> list[str]:
    train, notes = config.train, []
    examples = f"example episodes of {config.env.title}"
    if train.sft_path:
        examples = f"the conversations of {train.sft_path}"
    if not config.plays:
        notes.append(f"The policy was trained on {examples} alone.")
    if train.sft_steps:
        notes.append(
            f"In its first {train.sft_steps} steps the policy was also trained on {examples} "
            f"({train.sft_updates} supervised updates a step)."
        )
    if train.sft_weight:
        notes.append(
            f"In each update {train.sft_weight:g} times the cross-entropy of {examples} was added "
            "to the loss."
        )
    if train.ema_decay:
        notes.append("Evaluations and exports are of the moving average of the weights.")
    return notes
