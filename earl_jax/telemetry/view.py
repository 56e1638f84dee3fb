# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A local page over one or several runs: curves of all in one chart, and the last evaluations.

Every request reads the workdirs anew, so that reloading the page shows how far the runs are. The
server listens on 127.0.0.1 and serves that page and the runs' report.html, nothing else.
"""

import dataclasses
import errno
import functools
import http.server
import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from earl_jax.settings.errors import InputError
from earl_jax.telemetry.charts import Series, line_chart
from earl_jax.telemetry.metrics import read_metrics, scalars
from earl_jax.telemetry.progress import shown
from earl_jax.telemetry.report import card, template

HOST = "127.0.0.1"
_COLORS = 8  # of the page's CSS; later runs have the same colors, dashed
# The metrics that are shown first, in this order; of evaluations all.
_FIRST = (
    "reward_mean", "eval/", "context_tokens_mean", "context_tokens_max", "rollout_tokens_per_s",
    "train_tokens_per_s", "loss", "kl", "entropy", "grad_norm", "logprob_mismatch_mean",
    "peak_bytes_per_device",
)  # fmt: skip
_NO_CURVES = ("step", "eval/episodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a workdir: its metrics' lines, oldest first; `note` says what is wrong."""

    workdir: Path
    num_steps: int | None
    rows: Sequence[dict[str, Any]]
    has_report: bool
    note: str = ""


def read_run(workdir: Path) -> Run:
    """Returns what a workdir holds. A damaged or missing file is a note, as a run may be starting.

    A run writes its files while they are read.
    """
    rows, num_steps, notes = [], None, []
    try:
        rows = read_metrics(workdir / "metrics.jsonl")
    except FileNotFoundError:
        notes.append("no step has finished yet")
    except (OSError, InputError) as error:
        notes.append(str(error))
    try:
        num_steps = json.loads((workdir / "config.json").read_text()).get("num_steps")
    except (OSError, ValueError, AttributeError):
        notes.append("config.json cannot be read")
    return Run(
        workdir=workdir,
        num_steps=num_steps,
        rows=rows,
        has_report=(workdir / "report.html").is_file(),
        note="; ".join(notes),
    )


def view_page(runs: Sequence[Run]) -> str:
    """Returns the page over these runs."""
    charts = {name: _chart(name, curves) for name, curves in _curves(runs).items()}
    first = [name for start in _FIRST for name in charts if _matches(name, start)]
    return template("view.html.jinja").render(
        title="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        runs=[_row(number, run) for number, run in enumerate(runs)],
        first=[charts[name] for name in first if charts[name]["svg"]],
        others=[
            chart for name, chart in sorted(charts.items()) if name not in first and chart["svg"]
        ],
    )


def view_server(workdirs: Sequence[Path], port: int) -> http.server.ThreadingHTTPServer:
    """Returns a server of the page, which listens but does not serve yet; port 0 is any free one.

    Raises:
        InputError: a folder that holds no run, or a port that cannot be had.
    """
    for workdir in workdirs:
        if not any((workdir / name).is_file() for name in ("metrics.jsonl", "config.json")):
            raise InputError(
                f"{workdir} holds no run: there is no metrics.jsonl and no config.json in it; give "
                "the --workdir of a run"
            )
    if not 0 <= port < 2**16:
        raise InputError(f"--port={port}; give a port from 0 (any that is free) to 65535")
    try:
        return http.server.ThreadingHTTPServer(
            (HOST, port), functools.partial(_Handler, workdirs=tuple(workdirs))
        )
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise InputError(f"--port={port} cannot be used ({error.strerror}); give another") from None


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET / with the page, and GET /run/N/report.html with the report of run N."""

    def __init__(self, *arguments: Any, workdirs: Sequence[Path]):
        self._workdirs = workdirs
        super().__init__(*arguments)

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        """Answers a request."""
        report = re.fullmatch(r"/run/(\d{1,4})/report\.html", self.path)
        if self.path == "/":
            self._send(view_page([read_run(workdir) for workdir in self._workdirs]).encode())
            return
        if report and int(report[1]) < len(self._workdirs):
            path = self._workdirs[int(report[1])] / "report.html"
            if path.is_file():
                self._send(path.read_bytes())
                return
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no line for a request."""

    def _send(self, page: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(page)


def _curves(runs: Sequence[Run]) -> dict[str, list[Series]]:
    """Returns the curves of every metric, one for each run that has it."""
    found: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for number, run in enumerate(runs):
        for row in run.rows:
            for name, value in scalars(row):
                if name not in _NO_CURVES:
                    points = found.setdefault(name, {}).setdefault(number, [])
                    points.append((row["step"], value))
    return {
        name: [
            Series(
                name=str(runs[number].workdir),
                xs=[x for x, _ in points],
                ys=[y for _, y in points],
                color=number % _COLORS,
                dashed=number >= _COLORS,
            )
            for number, points in by_run.items()
        ]
        for name, by_run in found.items()
    }


def _chart(name: str, curves: Sequence[Series]) -> dict[str, Any]:
    title = name.replace("/", ": ").replace("_", " ")
    return card(title, curves, line_chart(curves, label=name))


def _matches(name: str, start: str) -> bool:
    return name.startswith(start) if start.endswith("/") else name == start


def _row(number: int, run: Run) -> dict[str, Any]:
    """Returns the run's row of the table."""
    steps = [row for row in run.rows if "eval" not in row]
    evaluations = [row for row in run.rows if "eval" in row]
    reward = steps[-1].get("reward_mean") if steps else None
    evaluation = ""
    if evaluations:
        last = evaluations[-1]
        evaluation = f"{last['eval'].get('name', '')}, step {last['step']}: {shown(last['eval'])}"
    return {
        "name": str(run.workdir),
        "color": number % _COLORS,
        "step": max((row["step"] for row in run.rows), default=0),
        "num_steps": run.num_steps,
        "reward": "" if reward is None else f"{reward:+.3f}",
        "evaluation": evaluation,
        "report": f"run/{number}/report.html" if run.has_report else "",
        "note": run.note,
    }
