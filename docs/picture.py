# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/run.svg from a run: the longest episode and a device's bytes by its plans, by step.

    uv run python -m earl_jax.main --config=configs/trail_tiny_cpu.py --workdir=runs/trail
    uv run python docs/picture.py runs/trail

Dashed lines are changes of plan, with the new plan beside them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from earl_jax.telemetry.metrics import read_metrics

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 760, 190, 62, 12, 46
STYLE = (
    "<style>text{font:12px sans-serif;fill:#555}.axis{stroke:#ccc}.change{stroke:#999;"
    "stroke-dasharray:3 3}.curve{fill:none;stroke:#2563eb;stroke-width:2}.memory{stroke:#16a34a}"
    ".budget{stroke:#dc2626;stroke-width:1.5}.title{font-weight:bold}</style>"
)


def plan_of(row: dict[str, Any]) -> str:
    """Returns a step's plans in words."""
    words = f"rollout {row['rollout_mesh']}, train {row['train_mesh']}"
    return f"{words} ({row['plan']})" if "plan" in row else words


def panel(
    rows: Sequence[dict[str, Any]],
    values: Sequence[float],
    top_px: int,
    title: str,
    kind: str,
    budget: float = 0.0,
) -> Iterator[str]:
    """Yields the shapes of one curve over steps."""
    steps, most = [row["step"] for row in rows], 1.1 * max(*values, budget)

    def x(step: float) -> float:
        return LEFT + (step - steps[0]) / (steps[-1] - steps[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top_px + HEIGHT - 24 - value / most * (HEIGHT - 24 - TOP)

    yield f'<text class="title" x="4" y="{top_px + 14}">{title}</text>'
    for value in (0.0, most / 2.2, most / 1.1):
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" '
        yield f'y2="{y(value):.1f}"/><text x="4" y="{y(value) + 4:.1f}">{value:.3g}</text>'
    for step in steps[:: max(1, len(steps) // 8)]:
        yield f'<text x="{x(step) - 4:.1f}" y="{top_px + HEIGHT - 6}">{step}</text>'
    changes = [n for n in range(1, len(rows)) if plan_of(rows[n]) != plan_of(rows[n - 1])]
    for place, n in enumerate(changes):
        left, words = x(steps[n]), str(escape(rows[n].get("plan") or plan_of(rows[n])))
        yield f'<line class="change" x1="{left:.1f}" x2="{left:.1f}" y1="{top_px + TOP - 10}" '
        yield f'y2="{top_px + HEIGHT - 24}"/>'
        if not budget:
            yield f'<text text-anchor="end" x="{left - 5:.1f}" y="{top_px + TOP + 14 * place}">'
            yield f"{words}</text>"
    if budget:
        yield f'<line class="budget" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(budget):.1f}" '
        yield f'y2="{y(budget):.1f}"/><text x="{LEFT + 6}" y="{y(budget) - 4:.1f}">budget</text>'
    points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, values, strict=True))
    yield f'<polyline class="curve {kind}" points="{points}"/>'


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the SVG of a run's steps."""
    tokens = [float(row["context_tokens_max"]) for row in rows]
    memory = [row["peak_bytes_per_device"] / 2**20 for row in rows]
    budget = rows[0].get("budget_bytes_per_device", 0) / 2**20
    shapes = [
        *panel(rows, tokens, 0, "longest episode, tokens, by step", "tokens"),
        *panel(
            rows, memory, HEIGHT, "memory of a device by its plans, MiB, by step", "memory", budget
        ),
    ]
    size = f'viewBox="0 0 {WIDTH} {2 * HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{STYLE}'
    background = f'<rect width="{WIDTH}" height="{2 * HEIGHT}" fill="#fff"/>'
    return f"{head}{background}{''.join(shapes)}</svg>\n"


if __name__ == "__main__":
    lines = read_metrics(Path(sys.argv[1]) / "metrics.jsonl")
    steps = [row for row in lines if "eval" not in row]
    (Path(__file__).parent / "run.svg").write_text(picture(steps))
