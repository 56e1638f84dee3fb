# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How good the planner's quick mode is: its bytes against XLA's, and EARL's table of 30 cells.

    uv run python -m benchmarks.plan

Bytes: every row of benchmarks/compile.md, context.md and ways.md (what the chips' own compilers say
of real models) beside what earl_jax/selector/footprint.py computes, and those of other pages that
were compiled after it was written. Speed: benchmarks/earl_cells.py. Prints Markdown. Takes a
second, and no chip.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import earl_cells
from benchmarks.compile import BURST, CHUNK, PAGE, VOCAB_SIZES
from earl_jax.models.presets import PRESETS
from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import (
    ModelSizes,
    Workload,
    rollout_footprint,
    train_footprint,
)
from earl_jax.selector.hardware import parse_topology
from earl_jax.sharding.layout import MeshShape

GIB = 2**30
# How far computed bytes may be off.
CLOSE = 0.10
# Of the rounds of decode.md so many are printed.
FURTHEST = 4
PAGES = Path(__file__).parent
MEASURED = [PAGES / name for name in ("compile.md", "context.md", "ways.md")]
# Of benchmarks/decode.py: the room behind a context, and the chips of its pages.
DECODED = 64
DECODING = {"H100": ("h100:1x1", "tensor=1"), "v5e, one of four": ("v5e:2x2", "tensor=4")}


class Point(NamedTuple):
    """A row of one of MEASURED: the case, and XLA's GiB per device."""

    model: str
    topology: str
    program: str
    mesh: MeshShape
    rows: int
    length: int
    together: float


def measured_points() -> Iterator[Point]:
    """All rows of the files in MEASURED."""
    for line in "\n".join(path.read_text() for path in MEASURED).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 12 or cells[0] not in PRESETS:
            continue
        rows, length = (int(number.replace(",", "")) for number in cells[4].split(" x "))
        yield Point(
            model=cells[0],
            topology=cells[1],
            program=cells[2],
            mesh=MeshShape.parse(cells[3]),
            rows=rows,
            length=length,
            together=float(cells[9]),
        )


def later_points() -> Iterator[Point]:
    """Updates of the second table of plan.md."""
    for cells in _rows("plan.md"):
        if len(cells) != 8 or cells[0] not in PRESETS or not cells[2].startswith("update"):
            continue
        rows, length = (int(number.replace(",", "")) for number in cells[4].split(" x "))
        mesh = MeshShape.parse(cells[3])
        yield Point(cells[0], cells[1], cells[2], mesh, rows, length, float(cells[5]))


def decode_points() -> Iterator[Point]:
    """Rounds of decode.md that fit their chip."""
    for cells in _rows("decode.md"):
        if len(cells) < 12 or cells[0] not in DECODING or not cells[6]:
            continue
        topology, mesh = DECODING[cells[0]]
        yield Point(
            model=cells[1],
            topology=topology,
            program="round, chunks of 512",
            mesh=MeshShape.parse(mesh),
            rows=int(cells[2]),
            length=int(cells[3].replace(",", "")) + DECODED,
            together=float(cells[6]),
        )


def _rows(page: str) -> Iterator[list[str]]:
    """The cells of all lines of a page's tables."""
    for line in (PAGES / page).read_text().splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@functools.cache
def sizes_of(model: str, weight_dtype: str = "compute") -> ModelSizes:
    """A preset's sizes, with the published vocabulary, computing in bf16."""
    config = dataclasses.replace(PRESETS[model], compute_dtype="bfloat16")
    vocab_size = VOCAB_SIZES[model.split("-")[0]]
    return model_sizes(config, vocab_size, engine_dtype="bfloat16", weight_dtype=weight_dtype)


def predicted_gib(point: Point) -> float:
    """What the planner says that the point's program takes of a device."""
    platform = parse_topology(point.topology).platform
    shards = point.mesh.data * point.mesh.fsdp
    is_update = point.program.startswith("update")
    if is_update:
        shards *= point.mesh.expert
    chunk = re.search(r"chunks of ([\d,]+)", point.program)
    parts = re.search(r"(\d+) micro-batch", point.program)
    work = Workload(
        num_slots=point.rows * shards,
        num_rows=point.rows * shards,
        micro_batches=int(parts[1]) if parts else point.rows,
        remat="no remat" not in point.program,
        logprob_chunk=512,
        chunk_size=int(chunk[1].replace(",", "")) if chunk else CHUNK,
        append_rows=8,
        burst=BURST,
        page_size=PAGE,
        kv_itemsize=2,
    )
    sizes = sizes_of(point.model, "int8" if "int8" in point.program else "compute")
    if is_update:
        found = train_footprint(sizes, work, point.mesh, point.length, platform)
    else:
        found = rollout_footprint(sizes, work, point.mesh, point.length, point.rows, 0, platform)
    return found.total / GIB


def main() -> None:
    """Prints all tables."""
    measured, later, rounds = (
        [*points] for points in (measured_points(), later_points(), decode_points())
    )
    header = ["model", "topology", "program", "mesh", "XLA, GiB", "planner, GiB", "off by"]
    print(f"| {' | '.join(header)} |")
    print("|---" * len(header) + "|")
    for point in measured:
        cells = [point.model, point.topology, point.program, str(point.mesh), *_compared(point)]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{agreement(measured)}.\n")
    header.insert(4, "rows")
    furthest = sorted(rounds, key=lambda point: -abs(error(point)))[:FURTHEST]
    for points in (later, furthest):
        print(f"| {' | '.join(header)} |")
        print("|---" * len(header) + "|")
        for point in points:
            rows = f"{point.rows} x {point.length:,}"
            cells = [point.model, point.topology, point.program, str(point.mesh), rows]
            print(f"| {' | '.join(cells + _compared(point))} |")
        print()
    together = [*measured, *later, *rounds]
    print(f"Compiled afterwards: {agreement(later)}.\n")
    print(f"Rounds of decode.md: {agreement(rounds)}.\n")
    print(f"All: {agreement(together)}; the largest lack is {min(map(error, together)):+.1%}.\n")
    for line in earl_cells.lines():
        print(line)


def error(point: Point) -> float:
    """By what fraction more is computed than XLA says."""
    return predicted_gib(point) / point.together - 1


def agreement(points: Sequence[Point]) -> str:
    """How many are close, and the worst."""
    off = [error(point) for point in points]
    close = sum(abs(one) <= CLOSE for one in off)
    worst = max(off, key=abs)
    return f"{close} of {len(off)} within {100 * CLOSE:.0f} %; the worst is off by {worst:+.1%}"


def _compared(point: Point) -> list[str]:
    return [f"{point.together:.2f}", f"{predicted_gib(point):.2f}", f"{error(point):+.1%}"]


if __name__ == "__main__":
    main()
