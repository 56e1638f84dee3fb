# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Line charts and stacked areas as inline SVG: plain string functions, colours from the page's CSS.

A chart is 400 x 220 user units, about its size on the page, so that its text stays readable on a
phone. The elements carry the classes s0..s7 (colour of a series); `data-*` attributes feed the
page's tooltip script.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 220, 52, 10, 24, 22
_MAX_POINTS = 200  # per curve: a pixel or two each
_MAX_BINS = 100  # per stacked area


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: `ys[i]` at step `xs[i]`, steps ascending; a y that is not finite breaks it."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Maps data to user units; `log` takes the decimal logarithm of y first."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int
    log: bool = False

    def px(self, x: float) -> float:
        low, high = self.x
        inner = self.width - _LEFT - _RIGHT
        return round(_LEFT + (x - low) / (high - low) * inner, 1)

    def py(self, y: float) -> float:
        low, high = self.y
        if self.log:
            y = max(math.log10(y), low) if y > 0 else low
        inner = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - (y - low) / (high - low) * inner, 1)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    y_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    log: bool = False,
    width: int = 400,
) -> Markup:
    """Returns curves over steps; `label` names the quantity of the y axis with its unit.

    On a log axis values of zero and below lie on the floor. An empty string when nothing is finite.
    """
    values = [y for s in series for y in s.ys if math.isfinite(y) and not (log and y <= 0)]
    if not values:
        return Markup("")
    if log:
        values = [math.log10(y) for y in values]
        y_range = (math.floor(min(values)), math.floor(max(values)) + 1)
    elif y_range is None:
        y_range = _pad(min(values), max(values), from_zero)
    steps = [x for s in series for x in s.xs]
    frame = _Frame(_spread(min(steps), max(steps)), y_range, width, log)
    thinned = [dataclasses.replace(s, xs=xs, ys=ys) for s in series for xs, ys in [_thin(s)]]
    return _svg(frame, label, [_curve(frame, s) for s in thinned], thinned)


def stacked_chart(series: Sequence[Series], *, label: str, width: int = 400) -> Markup:
    """Returns stacked areas; all series share the same xs. Steps are averaged in bins."""
    steps = series[0].xs if series else ()
    if not steps:
        return Markup("")
    size = math.ceil(len(steps) / _MAX_BINS)
    starts = range(0, len(steps), size)
    edges = [steps[i] - 0.5 for i in starts] + [steps[-1] + 0.5]
    heights = [[_mean(s.ys[i : i + size]) for i in starts] for s in series]
    top = max(map(sum, zip(*heights, strict=True)))
    frame = _Frame((edges[0], edges[-1]), (0.0, 1.05 * top or 1.0), width)
    shapes, floor = [], [0.0] * len(starts)
    for one, height in zip(series, heights, strict=True):
        ceiling = [a + b for a, b in zip(floor, height, strict=True)]
        upper = _staircase(frame, edges, ceiling)
        lower = _staircase(frame, edges, floor)[::-1]
        path = "M" + "L".join(f"{x:g},{y:g}" for x, y in upper + lower) + "Z"
        shapes.append(f'<path class="area s{one.color % 8}" d="{path}"/>')
        floor = ceiling
    middles = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
    binned = [
        dataclasses.replace(one, xs=middles, ys=height)
        for one, height in zip(series, heights, strict=True)
    ]
    return _svg(frame, label, shapes, binned)


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns at most `most` + 1 round numbers in [low, high], spaced 1, 2 or 5 times 10^n."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Returns a short label: 0.25, 1500, 12k, 1.5M, 1e-5."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if letter == 'k' else scale):.6g}{letter}"
    return f"{value:.4g}".replace("e-0", "e-")


def _svg(frame: _Frame, label: str, shapes: list[str], series: Sequence[Series]) -> Markup:
    data = {
        "x": frame.x,
        "px": (_LEFT, frame.width - _RIGHT),
        "series": [
            {"name": s.name, "color": s.color % 8, "xs": list(s.xs), "ys": _short(s.ys)}
            for s in series
        ],
    }
    names = ", ".join(s.name for s in series)
    return Markup(
        f'<svg viewBox="0 0 {frame.width} {_HEIGHT}" role="img" '
        f'data-chart="{escape(json.dumps(data))}" '
        f'aria-label="{escape(f"{label} over steps: {names}")}">'
        f"{_axes(frame, label)}{''.join(shapes)}"
        f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>'
    )


def _axes(frame: _Frame, label: str) -> str:
    bottom, right = _HEIGHT - _BOTTOM, frame.width - _RIGHT
    parts = [f'<text class="unit" x="2" y="12">{escape(label)}</text>']
    for value, text in _y_ticks(frame):
        y = frame.py(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{text}</text>'
        )
    for value in linear_ticks(*frame.x, most=frame.width // 70):
        if value == int(value):
            x = frame.px(value)
            anchor = "end" if x > right - 12 else "middle"
            parts.append(
                f'<line class="tick" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>'
                f'<text x="{x}" y="{bottom + 17}" text-anchor="{anchor}">{tick_text(value)}</text>'
            )
    parts.append(f'<line class="tick" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="2" y="{bottom + 17}">step</text>')
    return "".join(parts)


def _y_ticks(frame: _Frame) -> list[tuple[float, str]]:
    if not frame.log:
        return [(value, tick_text(value)) for value in linear_ticks(*frame.y)]
    low, high = int(frame.y[0]), int(frame.y[1])
    every = max(1, math.ceil((high - low) / 6))
    return [(10.0**power, tick_text(10.0**power)) for power in range(low, high + 1, every)]


def _curve(frame: _Frame, series: Series) -> str:
    path, pen_down = [], False
    for x, y in zip(series.xs, series.ys, strict=True):
        if not math.isfinite(y):
            pen_down = False
            continue
        # "h0" makes a point without neighbours a dot, by the round line caps.
        path.append(f"{'L' if pen_down else 'M'}{frame.px(x):g},{frame.py(y):g}")
        path.append("" if pen_down else "h0")
        pen_down = True
    dashed = " dashed" if series.dashed else ""
    dots = ""
    if len(series.xs) <= 30 and not series.dashed:
        dots = "".join(
            f'<circle cx="{frame.px(x):g}" cy="{frame.py(y):g}" r="2.6"/>'
            for x, y in zip(series.xs, series.ys, strict=True)
            if math.isfinite(y)
        )
    color = f"s{series.color % 8}"
    return f'<g class="{color}"><path class="curve{dashed}" d="{"".join(path)}"/>{dots}</g>'


def _staircase(
    frame: _Frame, edges: Sequence[float], heights: Sequence[float]
) -> list[tuple[float, float]]:
    """Returns both corners of each bin, so that a single step is an area too."""
    corners = []
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        corners += [(frame.px(left), frame.py(height)), (frame.px(right), frame.py(height))]
    return corners


def _thin(series: Series) -> tuple[list[float], list[float]]:
    """Returns at most _MAX_POINTS points: the lowest and highest of each bin, to keep spikes."""
    xs, ys = list(series.xs), list(series.ys)
    if len(xs) <= _MAX_POINTS:
        return xs, ys
    size = math.ceil(2 * len(xs) / _MAX_POINTS)
    kept = set()
    for start in range(0, len(xs), size):
        finite = [i for i in range(start, min(start + size, len(xs))) if math.isfinite(ys[i])]
        # A bin of nothing but NaN keeps one, which breaks the line.
        finite = finite or [start]
        kept |= {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def _short(values: Sequence[float]) -> list[float | str]:
    """Rounds to four digits for a tooltip; numbers that JSON cannot hold become words."""
    return [float(f"{v:.4g}") if math.isfinite(v) else str(v) for v in values]


def _pad(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    if from_zero and low >= 0:
        return 0.0, 1.05 * high or 1.0
    margin = 0.05 * (high - low) or 0.1 * abs(low) or 1.0
    return low - margin, high + margin


def _spread(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else 0.0
