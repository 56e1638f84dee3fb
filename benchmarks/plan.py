# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How good the planner's quick mode is: its bytes against XLA's, and EARL's table of 30 cells.

    uv run python -m benchmarks.plan

Bytes: every row of benchmarks/compile.md, context.md and ways.md (what the chips' own compilers say
of real models) beside what earl_jax/selector/footprint.py computes. Speed: EARL (arXiv 2510.05943)
measured by how many per cent tensor parallelism over 8 GPUs is faster than over 4 in tokens per
second and GPU, for a context length and a number of responses; earl_jax/selector/roofline.py
predicts the sign from the model's sizes and the H100's data sheet. Prints Markdown. Takes a second,
and no chip.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.compile import BURST, CHUNK, PAGE, VOCAB_SIZES
from earl_jax.models.presets import PRESETS
from earl_jax.scene import model_sizes
from earl_jax.selector.footprint import (
    ModelSizes,
    Workload,
    rollout_footprint,
    row_bytes,
    train_footprint,
)
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.roofline import decode_s, waves
from earl_jax.sharding.layout import MeshShape

GIB = 2**30
MEASURED = [Path(__file__).parent / name for name in ("compile.md", "context.md", "ways.md")]


class Point(NamedTuple):
    """A row of one of MEASURED: the case, and XLA's GiB per device."""

    model: str
    topology: str
    program: str
    mesh: MeshShape
    rows: int
    length: int
    arguments: float
    temporaries: float
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
            arguments=float(cells[6]),
            temporaries=float(cells[8]),
            together=float(cells[9]),
        )


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


# EARL's table 1: gain of TP8 over TP4 in per cent, None where TP4 ran out of memory.
RESPONSES = (8, 16, 32, 64, 128)
GAINS: dict[int, tuple[float | None, ...]] = {
    32768: (-1.5, 4.6, 5.0, 6.5, None),
    16384: (-18.8, -5.0, 3.4, 5.5, 3.1),
    8192: (-24.7, -20.8, -4.4, 6.4, 5.2),
    4096: (-18.0, -25.2, -21.9, -5.9, 5.1),
    2048: (-20.0, -28.6, -26.3, -16.6, -5.5),
    1024: (-21.1, -32.2, -30.7, -29.1, -6.9),
}
# What vLLM takes of a GPU unless it is told otherwise.
ENGINE_FRACTION = 0.9


def predicted_gain(context: int, responses: int) -> float | None:
    """Gain of TP8 over TP4 in per cent, None where TP4 has no room for all responses at all."""
    four, eight = (tokens_per_s_and_gpu(context, responses, tensor) for tensor in (4, 8))
    assert eight is not None, (context, responses)
    return None if four is None else 100 * (eight / four - 1)


def tokens_per_s_and_gpu(context: int, responses: int, tensor: int) -> float | None:
    """Of decoding so many responses of Qwen2.5-72B at this context, on so many GPUs of a host.

    Responses whose caches do not fit wait until those before them are through. None where those
    that wait do not fit the GPUs' share of their host's memory either.
    """
    host = parse_topology("h100:1x8")
    hardware = host.with_devices(tensor)
    sizes, mesh = sizes_of("qwen2.5-72b"), MeshShape(tensor=tensor)
    work = Workload(
        num_slots=responses,
        num_rows=0,
        micro_batches=1,
        remat=False,
        logprob_chunk=512,
        chunk_size=1,
        append_rows=1,
        burst=1,
        page_size=16,
        kv_itemsize=2,
    )
    bare = rollout_footprint(sizes, work, mesh, context, 0, 0, "gpu").total
    each = row_bytes(sizes, work, mesh, context)
    fit = int(host.memory_bytes * ENGINE_FRACTION - bare) // each
    if (responses - fit) * each > host.host_memory_bytes / host.devices_a_host:
        return None
    steps = [decode_s(hardware, sizes, work, mesh, wave, context) for wave in waves(responses, fit)]
    return responses / sum(step.total for step in steps) / tensor


def cells_right() -> int:
    """How many of the 30 cells are predicted: the sign of the gain, or that memory runs out."""
    return sum(
        _right(gain, predicted_gain(context, responses))
        for context, gains in GAINS.items()
        for responses, gain in zip(RESPONSES, gains, strict=True)
    )


def _right(measured: float | None, predicted: float | None) -> bool:
    if measured is None or predicted is None:
        return measured is predicted
    return (measured > 0) == (predicted > 0)


def main() -> None:
    """Prints both tables."""
    print("| model | topology | program | mesh | XLA, GiB | planner, GiB | off by |")
    print("|---" * 7 + "|")
    off = []
    for point in measured_points():
        found = predicted_gib(point)
        off.append(found / point.together - 1)
        cells = [point.model, point.topology, point.program, str(point.mesh)]
        cells += [f"{point.together:.2f}", f"{found:.2f}", f"{off[-1]:+.1%}"]
        print(f"| {' | '.join(cells)} |")
    close = sum(abs(error) <= 0.1 for error in off)
    print(f"\n{close} of {len(off)} within 10 %; the worst is off by {max(off, key=abs):+.1%}.\n")
    print(f"| context | {' | '.join(map(str, RESPONSES))} |")
    print("|---" * (1 + len(RESPONSES)) + "|")
    for context, gains in GAINS.items():
        cells = []
        for responses, gain in zip(RESPONSES, gains, strict=True):
            found = predicted_gain(context, responses)
            words = [f"{g:+.1f}" if g is not None else "no room" for g in (gain, found)]
            cells.append(f"{words[0]} ({words[1]}){'' if _right(gain, found) else ' wrong'}")
        print(f"| {context // 1024}K | {' | '.join(cells)} |")
    print(f"\n{cells_right()} of 30 cells.")


if __name__ == "__main__":
    main()
