# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner's bytes against XLA's, and its order of meshes against EARL's table of 30 cells.

    uv run python -m benchmarks.plan

Prints the tables of plan.md: for each program of its first table XLA's bytes, as the page has them
(benchmarks/compile.py makes them), and what earl_jax/selector/ (footprint.py, footprint.py)
computes from shapes. Takes seconds, and no chip.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks import earl_cells
from earl_jax.engine.config import append_tokens_for
from earl_jax.models.layer_groups import group_layers, pages_for
from earl_jax.models.presets import PRESETS
from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import page_bytes, rollout_footprint, train_footprint
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.sizes import ModelSizes, Workload
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import MeshShape

GIB = 2**30
# Entries of the published embeddings, by family.
VOCAB_SIZES = {"qwen2.5": 152_064, "qwen3": 151_936, "llama3.1": 128_256, "mistral": 32_768}
VOCAB_SIZES |= {"llama3.2": 128_256, "gemma3": 262_144, "gpt": 201_088}
# Of every round of the engine, unless the program says otherwise.
CHUNK, BURST, PAGE = 128, 16, 128
# How far computed bytes may be off.
CLOSE = 0.10
PAGES = Path(__file__).parent
COLUMNS = ("model", "topology", "program", "mesh", "rows", "XLA, GiB", "planner, GiB", "off by")


class Point(NamedTuple):
    """A compiled program, and XLA's GiB per device.

    `program` is "update" or "round" with what differs from the usual, such as "update, 2
    micro-batches, no remat" or "round, int8 weights, chunks of 512". `rows` of `length` tokens are
    those of a row shard.
    """

    model: str
    topology: str
    program: str
    mesh: MeshShape
    rows: int
    length: int
    together: float

    @property
    def is_update(self) -> bool:
        """Says whether it trains."""
        return self.program.startswith("update")

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update: one for each row, unless the program says otherwise."""
        found = re.search(r"(\d+) micro-batch", self.program)
        return int(found[1]) if found else self.rows

    @property
    def remat(self) -> Remat:
        """The policy of an update: "full", unless the program says otherwise."""
        words = {"no remat": "none", "remat but for projections": "dots"}
        words |= {"inputs in host memory": "offload"}
        return next((name for text, name in words.items() if text in self.program), "full")

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that a round reads at a time."""
        found = re.search(r"chunks of ([\d,]+)", self.program)
        return int(found[1].replace(",", "")) if found else CHUNK

    @property
    def weight_dtype(self) -> Literal["compute", "int8"]:
        """Type of the engine's weights."""
        return "int8" if "int8" in self.program else "compute"

    def __str__(self) -> str:
        cells = (*self[:3], str(self.mesh), f"{self.rows} x {self.length:,}")
        return " | ".join(cells)


def compiled_points() -> Iterator[Point]:
    """Yields the programs of the first table of plan.md."""
    for line in (PAGES / "plan.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS) and cells[0] in PRESETS:
            rows, length = (int(number.replace(",", "")) for number in cells[4].split(" x "))
            mesh = MeshShape.parse(cells[3])
            yield Point(cells[0], cells[1], cells[2], mesh, rows, length, float(cells[5]))


@functools.cache
def sizes_of(model: str, weight_dtype: str = "compute") -> ModelSizes:
    """Returns a preset's sizes, with the published vocabulary, computing in bf16."""
    config = dataclasses.replace(PRESETS[model], compute_dtype="bfloat16")
    vocab_size = VOCAB_SIZES[model.split("-")[0]]
    return model_sizes(config, vocab_size, engine_dtype="bfloat16", weight_dtype=weight_dtype)


def predicted_gib(point: Point) -> float:
    """Returns what the planner says that the point's program takes of a device."""
    hardware = parse_topology(point.topology)
    platform = hardware.platform
    shards = point.mesh.data * point.mesh.fsdp
    if point.is_update:
        shards *= point.mesh.expert
    work = Workload(
        num_slots=point.rows * shards,
        num_rows=point.rows * shards,
        micro_batches=point.micro_batches,
        remat=point.remat,
        logprob_chunk=512,
        chunk_size=point.chunk,
        append_tokens=append_tokens_for(platform, PRESETS[point.model]),
        appended=0.0,
        page_size=PAGE,
        kv_itemsize=2,
    )
    sizes, mesh = sizes_of(point.model, point.weight_dtype), point.mesh
    if point.is_update:
        return train_footprint(sizes, work, mesh, point.length, platform).total / GIB
    pages = point.rows * pages_for(point.length, PAGE) * len(group_layers(sizes.windows).windows)
    bare = rollout_footprint(sizes, work, mesh, point.length, platform, hardware.chip).total
    return (bare + pages * page_bytes(sizes, work, mesh)) / GIB


def main() -> None:
    """Prints all tables."""
    points = [*compiled_points()]
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for point in points:
        figures = f"{point.together:.2f} | {predicted_gib(point):.2f} | {error(point):+.1%}"
        print(f"| {point} | {figures} |")
    print(f"\nAll: {agreement(points)}; the largest lack is {min(map(error, points)):+.1%}.\n")
    for line in earl_cells.lines():
        print(line)


def error(point: Point) -> float:
    """Returns by what fraction more is computed than XLA says."""
    return predicted_gib(point) / point.together - 1


def agreement(points: Sequence[Point]) -> str:
    """Returns how many are close, and the worst, in words."""
    off = [error(point) for point in points]
    close = sum(abs(one) <= CLOSE for one in off)
    worst = max(off, key=abs)
    return f"{close} of {len(off)} within {100 * CLOSE:.0f} %; the worst is off by {worst:+.1%}"


if __name__ == "__main__":
    main()
