# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Draws benchmarks/timeline.svg: what each device does in synchronous and asynchronous steps.

    uv run python -m benchmarks.timeline [--from=DIR]

Runs the work of benchmarks/asynchrony.py on two CPU devices, of which one plays and one trains:
synchronously, streaming in 4 parts, and asynchronously with a staleness of 4, all with the same
tasks. The picture has the same steps of each run, from its trace (config.log.trace): the first ones
behind the warm-up in which no run compiled or loaded a program. With --from, runs that are in DIR
are read, and only the others are made there. The picture is on docs/concepts/async.md.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from benchmarks.asynchrony import LINES, SETTINGS, THREADS, is_calm, settings_of
from benchmarks.pages import parser_of
from benchmarks.runs import play, steps_of
from earl_jax.telemetry.trace import TRACKS, read_trace, trace_file

PICTURE = Path(__file__).with_suffix(".svg")
PANELS = {
    "synchronous": "synchronous, devices apart",
    "streaming in 4 parts": "streaming in 4 parts, apart",
    "asynchronous, staleness 4": "asynchronous, apart, staleness 4",
}
STEPS, SHOWN = 20, 4
# The first steps, in most of which programs are compiled.
WARM_UP = 8
# Colours of stages and words for them; those of other stages are of "other".
COLORS = {
    "rollout": ("#60a5fa", "rounds that a step waits for"),
    "overlap": ("#bfdbfe", "rounds beside an update"),
    "gradients": ("#bbf7d0", "gradients of a part"),
    "train": ("#4ade80", "update"),
    "publish": ("#f97316", "new weights"),
    "other": ("#a1a1aa", "plans, moves of experience"),
}
WIDTH, LEFT, RIGHT, ROW, GAP, PANEL, BELOW = 760, 52, 12, 24, 4, 92, 66
# Narrower spans have no number, in pixels.
NUMBERED = 14
STYLE = (
    "<style>text{font:12px sans-serif;fill:#444}.title{font-weight:bold}.number{fill:#111;"
    "text-anchor:middle}.axis{stroke:#ccc}.tick{text-anchor:middle}</style>"
)


@dataclasses.dataclass(frozen=True)
class Span:
    """A stage of a step, in seconds since the begin of the picture."""

    stage: str
    step: int
    row: str
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Panel:
    """The spans of a run, and what stands above them."""

    title: str
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """The end of the last span."""
        return max(span.end_s for span in self.spans)


def spans_of(events: Sequence[Mapping[str, Any]], first: int, last: int) -> list[Span]:
    """Returns the spans of these steps, both included, from the begin of the first of them.

    Gradients are in the row of the trainer, before the updates that end later.
    """
    chosen = [e for e in events if e["ph"] == "X" and first <= e["args"]["step"] <= last]
    zero = min(event["ts"] for event in chosen)
    chosen.sort(key=lambda event: TRACKS[event["tid"] - 1] != "gradients")
    return [
        Span(
            event["name"],
            event["args"]["step"],
            "play" if TRACKS[event["tid"] - 1] == "play" else "train",
            (event["ts"] - zero) / 1e6,
            (event["ts"] - zero + event["dur"]) / 1e6,
        )
        for event in chosen
    ]


def steps_shown(runs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int, int]:
    """Returns the first steps behind the warm-up in which no run compiled or loaded a program."""
    calm = set.intersection(*({row["step"] for row in rows if is_calm(row)} for rows in runs))
    for first in range(WARM_UP, STEPS + 2 - SHOWN):
        if calm.issuperset(range(first, first + SHOWN)):
            return first, first + SHOWN - 1
    raise SystemExit(f"no {SHOWN} steps of all runs are without a new program; run it again")


def panel_of(name: str, workdir: Path, first: int, last: int) -> Panel:
    """Returns the panel of a run's steps."""
    spans = spans_of(read_trace(trace_file(workdir)), first, last)
    rows = [row for row in steps_of(workdir) if first <= row["step"] <= last]
    busy = 1 - sum(row["idle_rows"] for row in rows) / sum(row["decode_rows"] for row in rows)
    seconds = Panel(name, spans).seconds
    words = f"steps {first} to {last} in {seconds:.1f} s, {busy:.0%} of the slots at work"
    return Panel(f"{name}: {words}", spans)


def picture(panels: Sequence[Panel]) -> str:
    """Returns the SVG of the panels, on one scale of time."""
    seconds = max(panel.seconds for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    height = PANEL * len(panels) + BELOW
    shapes = [shape for n, panel in enumerate(panels) for shape in _panel(panel, n * PANEL, scale)]
    shapes += [*_axis(seconds, PANEL * len(panels), scale), *_legend(PANEL * len(panels) + 40)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return f"{head}{STYLE}{background}{''.join(shapes)}</svg>\n"


def _panel(panel: Panel, top: int, scale: float) -> Iterator[str]:
    yield f'<text class="title" x="4" y="{top + 18}">{escape(panel.title)}</text>'
    for number, row in enumerate(("play", "train")):
        y = top + 28 + number * (ROW + GAP)
        own = [span for span in panel.spans if span.row == row]
        yield f'<text x="4" y="{y + 16}">{row}</text>'
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y + ROW}" '
        yield f'y2="{y + ROW}"/>'
        for span in own:
            left, width = LEFT + span.begin_s * scale, (span.end_s - span.begin_s) * scale
            color, _ = COLORS.get(span.stage, COLORS["other"])
            words = f"step {span.step}: {span.stage}, {span.end_s - span.begin_s:.3f} s"
            yield f'<rect x="{left:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{ROW}" '
            yield f'fill="{color}"><title>{escape(words)}</title></rect>'
        for span in _widest(own):
            if (span.end_s - span.begin_s) * scale >= NUMBERED:
                middle = LEFT + (span.begin_s + span.end_s) / 2 * scale
                yield f'<text class="number" x="{middle:.1f}" y="{y + 16}">{span.step}</text>'


def _widest(spans: Sequence[Span]) -> list[Span]:
    """Returns the longest span of each step."""
    found: dict[int, Span] = {}
    for span in sorted(spans, key=lambda span: span.end_s - span.begin_s):
        found[span.step] = span
    return list(found.values())


def _axis(seconds: float, top: int, scale: float) -> Iterator[str]:
    every = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if seconds / each <= 10)
    for number in range(int(seconds / every) + 1):
        x = LEFT + number * every * scale
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 4}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{top + 17}">{number * every:g} s</text>'


def _legend(top: int) -> Iterator[str]:
    columns = 3
    for number, (color, words) in enumerate(COLORS.values()):
        x, y = LEFT + number % columns * 230, top + number // columns * 16
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 15}" y="{y}">{escape(words)}</text>'


def main() -> None:
    """Makes the runs and the picture."""
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--from", dest="source", type=Path)
    flags = parser.parse_args()
    folder = flags.source or Path(tempfile.mkdtemp(prefix="earl_jax_timeline_"))
    workdirs = {name: folder / name.replace(" ", "_").replace(",", "") for name in PANELS}
    for name, workdir in workdirs.items():
        if len(steps_of(workdir)) < STEPS:
            log = {**SETTINGS["log"], "trace": True}
            settings = {**settings_of(LINES[PANELS[name]]), "num_steps": STEPS, "log": log}
            play(settings, workdir, environment={"PJRT_NPROC": str(THREADS)})
    first, last = steps_shown([steps_of(workdir) for workdir in workdirs.values()])
    panels = [panel_of(name, workdir, first, last) for name, workdir in workdirs.items()]
    PICTURE.write_text(picture(panels))
    print("\n".join(panel.title for panel in panels))


if __name__ == "__main__":
    main()
