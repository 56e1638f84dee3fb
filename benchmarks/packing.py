# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The fill of packed rows, attention's work on them, and the time of an update and of attention.

uv run python -m benchmarks.packing [--only=kernels|times] [--write]
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.pages import parser_of, show, table
from benchmarks.step_flops import Kernel, pairs
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.dispatch.packing import Packing, RowRule, ShapeHistory, pack_rows, plan_packing
from earl_jax.models.attention.rows import BLOCK_SIZE, Positions, attention
from earl_jax.models.attention.segment_blocks import attend_packed_rows, blocks_looked_at
from earl_jax.models.config import ModelConfig
from earl_jax.placement.packing import PROGRAM_S
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.state import TrainState
from earl_jax.trajectory import TrajectoryBatch

PAGE = Path(__file__).with_suffix(".md")
# The timed model and batch; rows of a padded micro-batch.
MODEL = ModelConfig(
    num_layers=2, width=128, num_heads=4, num_kv_heads=2, head_size=32, ffn_size=512
)
VOCAB, EPISODES, MEAN, LONGEST, ROWS = 512, 16, 32, 256, 8
# Simulated runs and their steps; timed repetitions.
RUNS, STEPS, REPEATS = 4, 50, 3
_CONTROLS = np.zeros(2, np.float32)
# Seconds of a simulated run's update, against PROGRAM_S of a program's compilation.
UPDATES_S = (math.inf, 60.0, 10.0, 3.0, 1.0)
# The blocks of each attention kernel, forward and backward (benchmarks/step_flops.py), and the
# products of a pair that is needed in each.
KERNELS = {
    "ours, on CPUs": (Kernel(2, 128, 128, True, True), Kernel(4, 128, 128, True, True)),
    "ours, on GPUs": (Kernel(2, 128, 64, True, True), Kernel(4, 128, 64, True, True)),
    "tokamax, on GPUs": (Kernel(2, 128, 128, True, True), Kernel(4, 128, 64, True, False)),
}


def lengths_of(seed: int, number: int, mean: float, longest: int) -> np.ndarray:
    """Returns log-normal lengths of spread 1.0, cut at the longest."""
    rng = np.random.default_rng(seed)
    return np.minimum(np.ceil(rng.lognormal(math.log(mean) - 0.5, 1.0, number)), longest).astype(
        int
    )


def fill_rows() -> Iterator[dict[str, Any]]:
    """Yields fill and work for each batch size and number of row shards, over steps of runs."""
    length = 8192
    for number, shards, update_s in itertools.product((128, 512), (1, 8), UPDATES_S):
        rule, cost = RowRule(number, 1, shards, length), PROGRAM_S / update_s
        fills, padded, seconds, work, imbalance, used = [], [], [], [], [], []
        for run in range(RUNS):
            history, shapes = ShapeHistory(), set()
            for step in range(STEPS):
                lengths = lengths_of(1000 * run + step, number, 1024, length).tolist()
                start_s = time.perf_counter()
                shape = history.choose(lengths, rule, cost)
                packing = plan_packing(lengths, rule, shape)
                seconds.append(time.perf_counter() - start_s)
                shapes.add(shape)
                fills.append(packing.fill)
                padded.append(sum(lengths) / rule.largest.positions)
                if step < 5:
                    rows = work_of_rows(packing)
                    work.append(rows.sum() / (np.square(lengths).sum() / 2))
                    each = rows.reshape(shards, -1).sum(1)
                    imbalance.append(each.max() / each.mean())
            used.append(len(shapes))
        yield {
            "episodes": number,
            "row shards": shards,
            "an update, s": f"{update_s:.0f}",
            "fill, an episode a row": f"{100 * statistics.mean(padded):.1f} %",
            "fill, packed": f"{100 * statistics.mean(fills):.1f} %",
            "shapes": f"{min(used)} to {max(used)}",
            "attention by ideal": f"{statistics.mean(work):.2f}",
            "busiest shard by mean": f"{statistics.mean(imbalance):.2f}",
            "plan ms": f"{1000 * statistics.median(seconds):.2f}",
        }


def kernel_rows() -> Iterator[dict[str, Any]]:
    """Yields the pairs that each kernel computes by those that are needed.

    Of the first five steps of each run, on one row shard, with updates of 60 s.
    """
    for number in (128, 512):
        rule, rows, needed = RowRule(number, 1, 1, 8192), list[list[int]](), 0
        for run in range(RUNS):
            history = ShapeHistory()
            for step in range(5):
                lengths = lengths_of(1000 * run + step, number, 1024, rule.length).tolist()
                shape = history.choose(lengths, rule, PROGRAM_S / 60.0)
                rows += documents_of_rows(plan_packing(lengths, rule, shape))
                needed += sum(length * (length + 1) // 2 for length in lengths)
        for name, passes in KERNELS.items():
            work = [sum(pairs(kernel, row) for row in rows) / needed for kernel in passes]
            whole = sum(
                each * kernel.products for each, kernel in zip(work, passes, strict=True)
            ) / sum(kernel.products for kernel in passes)
            found = {"forward": work[0], "backward": work[1], "both": whole}
            shown = {key: f"{value:.2f}" for key, value in found.items()}
            yield {"attention": name, "episodes": number} | shown


def documents_of_rows(packing: Packing) -> list[list[int]]:
    """Returns the lengths of the episodes in each row, and behind them 1 for each empty place.

    A query of padding looks at itself.
    """
    rows = [list[int]() for _ in range(packing.shape.rows)]
    for start, length in zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True):
        if length:
            rows[start // packing.shape.length].append(length)
    return [row + [1] * (packing.shape.length - sum(row)) for row in rows]


def work_of_rows(packing: Packing) -> np.ndarray:
    """Returns the pairs of tokens in the blocks that attention computes, of each row."""
    segments = np.zeros(packing.shape.positions, np.int32)
    for number, (start, size) in enumerate(zip(packing.starts, packing.lengths, strict=True)):
        segments[start : start + size] = 1 + number
    rows = segments.reshape(packing.shape)
    rows = np.pad(rows, ((0, 0), (0, -packing.shape.length % BLOCK_SIZE)))
    return np.asarray(jax.vmap(blocks_looked_at)(rows)) * BLOCK_SIZE**2


def time_rows() -> Iterator[dict[str, Any]]:
    """Yields the time of an update on the same episodes, padded and packed, on one device.

    Padded: to the bucket, or sorted by length and each micro-batch to its longest.
    """
    layout = make_layout(MeshShape(), row_axes=TRAINING_ROWS)
    learner = Learner(
        MODEL,
        TrainConfig(remat="full"),
        ALGORITHMS["reinforce"],
        vocab_size=VOCAB,
        temperature=1.0,
        importance_cap=0.0,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
    )
    lengths = lengths_of(0, EPISODES, MEAN, LONGEST)
    batch = jax.device_put(_batch(lengths, LONGEST), layout.activations("NS"))
    rule = RowRule(EPISODES, EPISODES // ROWS, layout.num_row_shards, LONGEST)
    packing = plan_packing(
        lengths.tolist(), rule, ShapeHistory().choose(lengths.tolist(), rule, 0.0)
    )
    parts = [_cut(batch, rows, lengths[rows[-1]]) for rows in sorted_micro_batches(lengths)]
    packed, num_parts = functools.partial(pack_rows, batch, packing, layout), len(parts)
    for name, positions, update in (
        ("padded to the bucket", batch.tokens.size, _update_of(learner, num_parts, lambda: batch)),
        (
            "sorted, each micro-batch padded to its longest",
            sum(part.tokens.size for part in parts),
            functools.partial(_update_in_parts, learner, parts),
        ),
        (
            "packed",
            packing.shape.positions,
            _update_of(learner, rule.parts(packing.shape), packed),
        ),
    ):
        cpu_s = _median_cpu_s(update, learner)
        yield {
            "rows": name,
            "fill": f"{100 * lengths.sum() / positions:.0f} %",
            "s of cores": f"{cpu_s:.3f}",
            "tokens that count by s of cores": f"{lengths.sum() / cpu_s:,.0f}",
        }


def sorted_micro_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Returns the episodes of each padded micro-batch, the longest last."""
    return np.split(np.argsort(lengths, kind="stable"), len(lengths) // ROWS)


def padded_rows() -> Iterator[dict[str, Any]]:
    """Yields the fill of padded micro-batches, over the batches of the table of fills.

    Padded to the bucket, to the next power of two from 256 on, of which there are six up to the
    bucket, and to the longest of each, which takes a program for almost every micro-batch.
    """
    length = 8192
    for number in (128, 512):
        fills = list[tuple[float, ...]]()
        for run, step in itertools.product(range(RUNS), range(STEPS)):
            lengths = lengths_of(1000 * run + step, number, 1024, length)
            longest = np.array([lengths[rows[-1]] for rows in sorted_micro_batches(lengths)])
            powers = 2 ** np.ceil(np.log2(np.maximum(longest, 256)))
            padded = (number * length, ROWS * powers.sum(), ROWS * longest.sum())
            fills.append(tuple(lengths.sum() / each for each in padded))
        names = ("fill, the bucket", "fill, sorted, six lengths", "fill, sorted, any length")
        means = np.mean(fills, axis=0).tolist()
        shown = {name: f"{100 * mean:.1f} %" for name, mean in zip(names, means, strict=True)}
        yield {"episodes": number, **shown}


def _cut(batch: TrajectoryBatch, rows: np.ndarray, length: int) -> TrajectoryBatch:
    """Returns some rows of a batch, cut at this length."""
    return jax.tree.map(lambda field: field[rows, :length], batch)


def attention_rows() -> Iterator[dict[str, Any]]:
    """Yields the time of attention and its gradient over all keys, and without other segments."""
    layout = make_layout(MeshShape(), row_axes=TRAINING_ROWS)

    def over_all_keys(query: Any, key: Any, value: Any, segments: Any) -> jax.Array:
        order = jax.lax.broadcasted_iota(np.int32, segments.shape, 1)
        positions = Positions(order, segments)
        return attention(query, key, value, positions, positions, scale=0.2)

    def skipping(*arrays: Any) -> jax.Array:
        return attend_packed_rows(layout, *arrays, scale=0.2)

    for rows, length, mean in ((16, 256, 64), (4, 1024, 256), (4, 1024, None), (1, 8192, 1024)):
        segments = np.ones((rows, length), np.int32)
        if mean:
            ends = np.cumsum(lengths_of(0, rows * length, mean, length))
            segments = np.searchsorted(ends, np.arange(rows * length), side="right")
            segments = 1 + segments.reshape(rows, length).astype(np.int32)
        rng = np.random.default_rng(0)
        shapes = (rows, length, 2, 2, 32), (rows, 2, length, 32), (rows, 2, length, 32)
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        arrays.append(segments)
        spans = [_attention_s(attend, arrays) for attend in (over_all_keys, skipping)]
        yield {
            "rows": f"{rows} of {length}",
            "mean episode": mean or length,
            "all keys, s": f"{spans[0]:.3f}",
            "without other segments, s": f"{spans[1]:.3f}",
        }


def _attention_s(attend: Any, arrays: Sequence[Any]) -> float:
    """Returns the least time of the gradient of attention's squares, after one that compiles."""
    run, spans = jax.jit(jax.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))), []
    for _ in range(1 + REPEATS):
        start_s = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        spans.append(time.perf_counter() - start_s)
    return min(spans[1:])


def _update_of(learner: Learner, parts: int, make_batch: Any) -> Any:
    """Returns an update of a state in so many micro-batches, whose rows are made first."""
    plan = _plan(parts)
    return lambda state: learner.update(plan, state, make_batch(), _CONTROLS)


def _update_in_parts(learner: Learner, parts: Sequence[TrajectoryBatch], state: TrainState) -> Any:
    """Returns the state and the metrics of an update, each of whose micro-batches is a program."""
    plan, (first, *others) = _plan(1), parts
    totals = learner.add_part(plan, state, first, _CONTROLS, None)
    for part in others:
        totals = learner.add_part(plan, state, part, _CONTROLS, totals)
    return learner.apply(plan, state, totals, _CONTROLS)


def _plan(parts: int) -> TrainPlan:
    return TrainPlan(MeshShape(), parts, "full")


def _median_cpu_s(update: Any, learner: Learner) -> float:
    """Returns the median time of an update of a state, after one time that compiles.

    In seconds of the cores that the process has used, so that other work beside it hardly counts.
    """
    state, spans = learner.init_state(MeshShape()), []
    for _ in range(1 + REPEATS):
        start_s = time.process_time()
        state, metrics = update(state)
        jax.block_until_ready(metrics)
        spans.append(time.process_time() - start_s)
    return statistics.median(spans[1:])


def _batch(lengths: np.ndarray, length: int) -> TrajectoryBatch:
    rng, shape = np.random.default_rng(0), (len(lengths), length)
    inside = np.arange(length) < lengths[:, None]
    numbers = np.where(inside, rng.integers(1, VOCAB, shape), 0).astype(np.int32)
    ones = inside.astype(np.int32)
    batch = TrajectoryBatch(
        tokens=numbers,  # pyright: ignore[reportArgumentType]
        segment_ids=ones,  # pyright: ignore[reportArgumentType]
        turn_ids=ones,  # pyright: ignore[reportArgumentType]
        logprobs=np.full(shape, -6.0, np.float32),  # pyright: ignore[reportArgumentType]
        versions=np.zeros(shape, np.int32),  # pyright: ignore[reportArgumentType]
        advantages=rng.normal(size=shape).astype(np.float32),  # pyright: ignore[reportArgumentType]
    )
    # A prompt of one token.
    turn_ids = np.array(ones)
    turn_ids[:, 0] = 0
    return dataclasses.replace(batch, turn_ids=turn_ids)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=["kernels", "times"], help="a part of the page")
    flags = parser.parse_args()
    if flags.only != "times":
        show(table(list(kernel_rows())), PAGE, write=flags.write, name="kernels")
    if flags.only != "kernels":
        tables = [table(list(rows)) for rows in (padded_rows(), time_rows())]
        show("\n\n".join(tables), PAGE, write=flags.write, name="times")
    if not flags.only:
        tables = [table(list(rows)) for rows in (fill_rows(), attention_rows())]
        show("\n\n".join(tables), PAGE, write=flags.write)
