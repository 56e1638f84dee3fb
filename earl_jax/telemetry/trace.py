# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A run's stages over time, as Chrome trace events, which https://ui.perfetto.dev shows."""

import json
import time
from pathlib import Path
from typing import Any

from earl_jax.telemetry.atomic import remove_cut_line, write_atomically

# The tracks of a process. "gradients" has those that are computed while the host does other work.
TRACKS = ("play", "train", "gradients")
_TRACK_OF = {"publish": "play", "rollout": "play", "overlap": "play", "gradients": "gradients"}


class Trace:
    """Appends spans to WORKDIR/trace.json, or trace.N.json of process N. Host-side state only.

    The file is a JSON array of an event a line. Its closing bracket is missing, as the format
    allows: a SIGKILL can cut the last line only, and a run that goes on appends its own. A span has
    a process and a track, its begin in microseconds since the epoch, its duration, and its step.

    Example: a rollout of half a second in step 3 is
    `{"name": "rollout", "ph": "X", "pid": 0, "tid": 1, "ts": 7000000, "dur": 500000, "args":
    {"step": 3}}`.
    """

    def __init__(self, workdir: Path, process: int = 0) -> None:
        """Opens the trace of a process in a workdir."""
        self._path, self._process = trace_file(workdir, process), process
        # Clocks of several hosts agree on the time of day only.
        self._zero_s = time.time() - time.perf_counter()
        if self._path.exists():
            remove_cut_line(self._path)
            return
        names = [self._line("M", "process_name", 0, args={"name": f"process {process}"})]
        for tid, track in enumerate(TRACKS, start=1):
            names.append(self._line("M", "thread_name", tid, args={"name": track}))
        write_atomically(self._path, "[\n" + "".join(names))

    def write(self, stage: str, step: int, start_s: float, end_s: float) -> None:
        """Writes the span of a stage between two times of `time.perf_counter`."""
        start_us, end_us = (round(1e6 * (self._zero_s + time_s)) for time_s in (start_s, end_s))
        tid = 1 + TRACKS.index(_TRACK_OF.get(stage, "train"))
        times = {"ts": start_us, "dur": end_us - start_us}
        with self._path.open("a") as file:
            file.write(self._line("X", stage, tid, **times, args={"step": step}))

    def _line(self, phase: str, name: str, tid: int, **fields: Any) -> str:
        event = {"name": name, "ph": phase, "pid": self._process, "tid": tid, **fields}
        return json.dumps(event) + ",\n"


def trace_file(workdir: Path, process: int = 0) -> Path:
    """Returns the file of a process's trace."""
    return workdir / (f"trace.{process}.json" if process else "trace.json")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a trace, names of tracks included, without a last one that was cut."""
    whole, _, _ = path.read_text().rpartition(",\n")
    return json.loads(whole + "]")
