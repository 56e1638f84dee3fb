# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What planning among all ways to use a mesh gains: updates of real models, by the roofline.

    uv run python -m benchmarks.plan_ways

For each model, topology and context: the update on the first rung of the ladder that fits, in the
fastest way that fits, and in the plan that comes to this context through the shorter ones. The
config has neither remat nor micro-batches. Prints the table of benchmarks/plan.md as Markdown.
Takes some seconds, and no chip.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.compile import VOCAB_SIZES
from earl_jax.config import Config
from earl_jax.config_file import load_config_file, make_config
from earl_jax.main import DEFAULT_CONFIG
from earl_jax.scene import make_scene
from earl_jax.selector.contenders import train_contenders
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.prospects import Prospect, Scene
from earl_jax.selector.schedule import Stop, make_schedule

FIRST_ROOM = 1024


class Case(NamedTuple):
    """A model on a topology: episodes of a step, and contexts, each FIRST_ROOM doubled."""

    preset: str
    rows: int
    topology: str
    contexts: tuple[int, ...]


CASES = [
    Case("qwen2.5-1.5b", 64, "h100:1x8", (1024, 8192)),
    Case("qwen2.5-1.5b", 64, "v5e:4x4", (1024, 8192)),
    Case("llama3.1-8b", 256, "h100:1x8", (1024, 16384, 65536)),
    Case("qwen2.5-72b", 256, "v5p:4x4x4", (1024, 8192, 32768)),
]


def scene_of(case: Case) -> Scene:
    """All meshes, on all that programs get of a chip."""
    config: Config = make_config(
        load_config_file(DEFAULT_CONFIG),
        [
            f"model.preset={case.preset}",
            "model.compute_dtype=bfloat16",
            f"rollout.num_slots={case.rows}",
            f"rollout.episodes_per_step={case.rows}",
            f"rollout.context_buckets=({FIRST_ROOM},)",
            "selector.rollout_meshes=()",
            "selector.train_meshes=()",
        ],
    )
    hardware = parse_topology(case.topology)
    vocab_size = VOCAB_SIZES[case.preset.split("-")[0]]
    return make_scene(config, hardware, vocab_size, hardware.usable_bytes)


def first_that_fits(scene: Scene, places: int) -> Prospect:
    """Down the ladder: the fastest mesh on the first rung that any fits on."""
    rungs = ([*_fitting(scene, [way], places)] for way in scene.ways_to_train)
    return max(next(filter(None, rungs)), key=lambda prospect: prospect.tokens_per_s)


def fastest(scene: Scene, places: int) -> Prospect:
    """Of all ways to use all meshes."""
    return max(_fitting(scene, scene.ways_to_train, places), key=lambda p: p.tokens_per_s)


def _fitting(scene: Scene, ways: Sequence, places: int) -> Iterator[Prospect]:
    for prospect in train_contenders(scene, list(ways), places).kept:
        if prospect.fits(scene.budget_bytes):
            yield prospect


def planned(scene: Scene, last: int) -> list[Stop]:
    """The plan through all rooms up to the last."""
    rooms = [FIRST_ROOM]
    while rooms[-1] < last:
        rooms.append(2 * rooms[-1])
    return make_schedule(scene, rooms)


def lines() -> Iterator[str]:
    """The table."""
    update = ("first rung of the ladder that fits", "tokens/s", "fastest way that fits", "tokens/s")
    header = ["model, rows", "topology", "context", *update, "gain"]
    header += ["in the plan", "tokens/s", "of its step"]
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for case in CASES:
        scene = scene_of(case)
        schedule = {stop.places: stop for stop in planned(scene, case.contexts[-1])}
        for context in case.contexts:
            cells = [f"{case.preset}, {case.rows}", case.topology, f"{context:,}"]
            cells += _row(scene, schedule[context])
            yield f"| {' | '.join(cells)} |"


def _row(scene: Scene, stop: Stop) -> list[str]:
    first, best = first_that_fits(scene, stop.places), fastest(scene, stop.places)
    chosen = stop.train.chosen
    if chosen is None or stop.step_s is None:
        raise ValueError(f"nothing fits {stop.places} tokens; give the case a larger topology")
    tokens = scene.work.num_rows * stop.places * scene.work.epochs
    share = tokens / chosen.tokens_per_s / stop.step_s
    return [
        *_cells(first),
        *_cells(best),
        f"{100 * (best.tokens_per_s / first.tokens_per_s - 1):+.0f} %",
        *_cells(chosen),
        f"{100 * share:.0f} %",
    ]


def _cells(prospect: Prospect) -> list[str]:
    return [_words(prospect), f"{prospect.tokens_per_s:,.0f}"]


def _words(prospect: Prospect) -> str:
    micro_batches, remat = prospect.rung
    many = f", {micro_batches} micro-batches" if micro_batches > 1 else ""
    return f"{prospect.mesh}{many}{', remat' if remat else ''}"


def main() -> None:
    """Prints the table."""
    for line in lines():
        print(line)


if __name__ == "__main__":
    main()
