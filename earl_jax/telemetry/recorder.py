# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Recorder: writes the metrics, episodes and report of a run, and shows its progress.

It knows lines of metrics, episodes and a report, and nothing of where they come from.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from earl_jax.settings.errors import InputError
from earl_jax.telemetry.episodes import (
    read_trajectories,
    set_file_aside,
    truncate_trajectories_after,
    write_trajectories,
)
from earl_jax.telemetry.metrics import MetricsLog, read_metrics, truncate_after
from earl_jax.telemetry.progress import Progress
from earl_jax.telemetry.report import write_report
from earl_jax.telemetry.trackers import Trackers

REPORT_EPISODES = 12


class Recorder:
    """Writes metrics.jsonl, trajectories/ and report.html of a workdir, and shows progress.

    `writes` is False in all processes but the first: these show and write nothing. `trackers` are
    those of config.log, and get the `config`; who makes the recorder closes them. As a context
    manager it closes its own files.

    Raises ValueError where a tracker cannot be opened.
    """

    def __init__(
        self,
        workdir: Path,
        progress: Progress,
        *,
        writes: bool = True,
        trackers: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._workdir, self._progress, self._writes = workdir, progress, writes
        # Before any program is compiled.
        self.trackers = Trackers(trackers if writes else (), workdir, config or {}, progress.note)
        self._metrics: MetricsLog | None = None
        self._start_s = time.perf_counter()
        # Seconds that the run took before this process; None until they are known.
        self._before_s: float | None = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line of metrics.jsonl, and shows it; `time_s` goes on where a run is resumed."""
        if "eval" not in line:
            seconds = time.perf_counter() - self._start_s + (self._before_s or 0.0)
            line = {"step": line["step"], "time_s": seconds} | dict(line)
        if self._writes:
            if self._metrics is None:
                self._metrics = MetricsLog(self._workdir / "metrics.jsonl")
            self.trackers.log(self._metrics.write(line))
        self._progress.update(line)

    def note(self, text: str) -> None:
        """Shows an event, such as a change of the mesh with its reason."""
        self._progress.note(text)

    def write_episodes(self, step: int, lines: Iterable[str]) -> None:
        """Writes the episodes of a step, as `trajectory_lines` gives them."""
        if self._writes:
            write_trajectories(self._workdir / "trajectories", step, lines)

    def write_report(self, title: str, config: Mapping[str, Any], notes: Sequence[str]) -> None:
        """Writes report.html anew from what is in the workdir."""
        if not self._writes:
            return
        write_report(
            self._workdir / "report.html",
            title=title,
            config=config,
            metrics=self._rows(),
            episodes=self._newest_episodes(),
            notes=notes,
        )

    def _newest_episodes(self) -> list[dict[str, Any]]:
        """Returns some episodes of the newest file that is whole; damaged ones are set aside."""
        for path in sorted((self._workdir / "trajectories").glob("step_*.jsonl"), reverse=True):
            try:
                return read_trajectories(path)[:REPORT_EPISODES]
            except InputError as damage:
                aside = set_file_aside(path, self._workdir / "trajectories.damaged")
                self.note(f"{damage}; the file is {aside} now")
        return []

    def drop_after(self, step: int) -> None:
        """Sets metrics and episodes of later steps aside, which a resumed run takes again.

        -1: all of them, of a run that had no checkpoint yet.
        """
        if not self._writes:
            return
        lines = truncate_after(self._workdir / "metrics.jsonl", step)
        if "damaged" in lines:
            self.note(f"metrics.jsonl had damaged lines, which are in {lines['damaged']} now")
        if self._before_s is None:
            times = [row["time_s"] for row in self._rows() if "time_s" in row]
            self._before_s = times[-1] if times else 0.0
        episodes = truncate_trajectories_after(self._workdir / "trajectories", step)
        if aside := [str(path) for path in (lines.get("dropped"), episodes) if path]:
            what = f"what steps after {step} wrote" if step >= 0 else "what was written before"
            self.note(f"{what} is in {' and '.join(aside)} now")

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """Returns the evaluation of this step in metrics.jsonl; None where there is none."""
        return next((r["eval"] for r in self._rows() if r["step"] == step and "eval" in r), None)

    def _rows(self) -> list[dict[str, Any]]:
        path = self._workdir / "metrics.jsonl"
        return read_metrics(path) if self._writes and path.exists() else []

    def close(self) -> None:
        """Closes the files; a later line opens them again."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
