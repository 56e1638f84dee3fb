# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The mesh of each stage step by step, and the reasons of its changes."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from earl_jax.telemetry.charts import linear_ticks

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps `first` to `last`, both included, that ran on one mesh."""

    mesh: str
    first: int
    last: int


def mesh_segments(rows: Sequence[Row], key: str) -> list[Segment]:
    """Returns the runs of equal `row[key]` over the steps; rows without the key are skipped.

    Example: meshes a, a, b at steps 1, 2, 3 are (a, 1, 2), (b, 3, 3).
    """
    named = [(row["step"], row[key]) for row in rows if row.get(key)]
    segments = []
    for mesh, run in itertools.groupby(named, key=lambda pair: pair[1]):
        run_steps = [step for step, _ in run]
        segments.append(Segment(mesh, run_steps[0], run_steps[-1]))
    return segments


def mesh_timeline(steps: Sequence[Row]) -> dict[str, Any] | None:
    """Returns both stages' segments in percent of the width; a mesh has one colour on both rows."""
    rows = {stage: mesh_segments(steps, f"{stage}_mesh") for stage in ("rollout", "train")}
    segments = [segment for row in rows.values() for segment in row]
    if not segments:
        return None
    first, last = min(s.first for s in segments), max(s.last for s in segments)
    percent = 100 / (last + 1 - first)
    colors = {mesh: i % 8 for i, mesh in enumerate(dict.fromkeys(s.mesh for s in segments))}
    ticks = linear_ticks(first, last, most=6) if last > first else [first]
    return {
        "rows": {
            stage: [
                {
                    "mesh": s.mesh,
                    "steps": f"steps {s.first} to {s.last}",
                    "color": colors[s.mesh],
                    "left": round((s.first - first) * percent, 3),
                    "width": round((s.last + 1 - s.first) * percent, 3),
                }
                for s in row
            ]
            for stage, row in rows.items()
        },
        "markers": [
            {"step": row["step"], "left": round((row["step"] - first) * percent, 3)}
            for row in steps
            if row.get("switched")
        ],
        "ticks": [
            {"text": f"{t:g}", "left": round((t + 0.5 - first) * percent, 3)}
            for t in ticks
            if t == int(t)
        ],
        "legend": colors,
    }


def mesh_switches(steps: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a row per switch: step, stage, from, to, reason, seconds."""
    switches, meshes = [], {}
    for row in steps:
        for stage in row.get("switched") or ():
            reason = row.get("decision", "")
            seconds = row.get("switch_s")
            if isinstance(reason, Mapping):
                reason = reason.get(stage, "")
            if isinstance(seconds, Mapping):
                seconds = seconds.get(stage)
            switches.append(
                {
                    "step": row["step"],
                    "stage": stage,
                    "old": meshes.get(stage, "?"),
                    "new": row.get(f"{stage}_mesh", "?"),
                    "reason": reason,
                    "seconds": "" if seconds is None else f"{float(seconds):.2f} s",
                }
            )
        for stage in ("rollout", "train"):
            meshes[stage] = row.get(f"{stage}_mesh") or meshes.get(stage, "?")
    return switches
