# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""EARL's table of 30 cells against the planner's roofline, and what the agreement rests on.

EARL (arXiv 2510.05943) measured by how many per cent tensor parallelism over 8 GPUs is faster than
over 4 in tokens per second and GPU, for a context length and a number of responses.
earl_jax/selector/roofline.py predicts the sign from the model's sizes and the H100's data sheet.
The paper does not say how full the engines were, where responses waited, nor what ran out of
memory: what is assumed of these is a `Reading`. `python -m benchmarks.plan` prints the tables.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from earl_jax.selector.footprint import (
    ModelSizes,
    Workload,
    rollout_footprint,
    row_bytes,
)
from earl_jax.selector.hardware import Hardware, parse_topology
from earl_jax.selector.host_memory import host_obstacle, waiting_bytes
from earl_jax.selector.roofline import decode_s, waves
from earl_jax.sharding.layout import MeshShape

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
MODEL = "qwen2.5-72b"
DGX_H100 = parse_topology("h100:1x8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What is assumed where the paper is silent.

    An engine takes `fraction` of each GPU's memory (vLLM's default). Responses whose caches do not
    fit wait until all before them are through; with `in_turn` each that ends makes room for the
    next, so that as many run at any time as fit. With `keeps_waiting` the caches of those that wait
    are in the memory of `host`, whose GPUs are all in use: two engines of four, unless `alone`.
    """

    host: Hardware = DGX_H100
    fraction: float = 0.9
    in_turn: bool = False
    keeps_waiting: bool = True
    alone: bool = False


class Cell(NamedTuple):
    """One of EARL's: the gain of TP8 over TP4 in per cent, measured; None where TP4 had no room."""

    context: int
    responses: int
    gain: float | None


CELLS = tuple(
    Cell(context, responses, gain)
    for context, gains in GAINS.items()
    for responses, gain in zip(RESPONSES, gains, strict=True)
)


def predicted_gain(
    sizes: ModelSizes,
    cell: Cell,
    reading: Reading = Reading(),  # noqa: B008 - frozen
) -> float | None:
    """Gain of TP8 over TP4 in per cent, None where one of them cannot have so many responses."""
    four, eight = (tokens_per_s_and_gpu(sizes, cell, tensor, reading) for tensor in (4, 8))
    return None if four is None or eight is None else 100 * (eight / four - 1)


def tokens_per_s_and_gpu(
    sizes: ModelSizes, cell: Cell, tensor: int, reading: Reading
) -> float | None:
    """Of decoding a cell's responses at its context, on so many GPUs of a host.

    None where host memory does not hold the caches of those that wait.
    """
    context, responses = cell.context, cell.responses
    hardware, mesh = reading.host.with_devices(tensor), MeshShape(tensor=tensor)
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
    fit = int(hardware.memory_bytes * reading.fraction - bare) // each
    waiting = waiting_bytes(responses, fit, each) if reading.keeps_waiting else 0
    if host_obstacle(hardware if reading.alone else reading.host, waiting):
        return None
    together = [min(responses, fit)] if reading.in_turn else waves(responses, fit)
    steps = [decode_s(hardware, sizes, work, mesh, rows, context) for rows in together]
    return sum(together) / sum(step.total for step in steps) / tensor


def is_right(cell: Cell, predicted: float | None) -> bool:
    """Whether the sign of the gain is predicted, or that memory runs out."""
    if cell.gain is None or predicted is None:
        return cell.gain is predicted
    return (cell.gain > 0) == (predicted > 0)


def wrong_cells(sizes: ModelSizes, reading: Reading) -> list[Cell]:
    """Those of the 30 that are not predicted under these assumptions."""
    return [cell for cell in CELLS if not is_right(cell, predicted_gain(sizes, cell, reading))]


def with_host_tb(terabytes: float) -> Reading:
    """The usual reading, with another memory of the host."""
    return Reading(host=dataclasses.replace(DGX_H100, host_memory_bytes=int(terabytes * 10**12)))


# What the agreement rests on: each but the first changes one assumption, or two.
READINGS = {
    "as in the table above: a host of 2 TB": Reading(),
    "a host of 1 TB": with_host_tb(1),
    "a host of 1.2 TB": with_host_tb(1.2),
    "a host of 2.4 TB": with_host_tb(2.4),
    "a host of 2.5 TB, or more": with_host_tb(2.5),
    "caches of responses that wait are kept nowhere": Reading(keeps_waiting=False),
    "an engine of four GPUs is alone on its host": Reading(alone=True),
    "0.68 of a GPU's memory": Reading(fraction=0.68),
    "0.7 of a GPU's memory": Reading(fraction=0.7),
    "0.92 of a GPU's memory": Reading(fraction=0.92),
    "0.93 of a GPU's memory": Reading(fraction=0.93),
    "each response that ends makes room for the next": Reading(in_turn=True),
    "the same, with 0.8 of a GPU's memory": Reading(in_turn=True, fraction=0.8),
}


def lines(sizes: ModelSizes) -> Iterator[str]:
    """Both tables, in Markdown."""
    yield f"| context | {' | '.join(map(str, RESPONSES))} |"
    yield "|---" * (1 + len(RESPONSES)) + "|"
    for context in GAINS:
        words = [_words(cell, predicted_gain(sizes, cell)) for cell in CELLS if cell[0] == context]
        yield f"| {context // 1024}K | {' | '.join(words)} |"
    yield ""
    yield "| what is assumed | cells right | wrong (context, responses) |"
    yield "|---|---|---|"
    for name, reading in READINGS.items():
        wrong = wrong_cells(sizes, reading)
        named = ", ".join(f"{cell.context // 1024}K x {cell.responses}" for cell in wrong)
        yield f"| {name} | {len(CELLS) - len(wrong)} of {len(CELLS)} | {named or 'none'} |"


def _words(cell: Cell, predicted: float | None) -> str:
    measured, found = (f"{g:+.1f}" if g is not None else "no room" for g in (cell.gain, predicted))
    return f"{measured} ({found}){'' if is_right(cell, predicted) else ' wrong'}"
