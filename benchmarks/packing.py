# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The fill of packed rows over the steps of a run, and the time of an update with and without.

uv run python -m benchmarks.packing [--steps=50] [--repeats=3]
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.pages import replace_table, table
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.dispatch.packing import Packing, RowRule, pack_rows, plan_packing
from earl_jax.models.config import ModelConfig
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.trajectory import TrajectoryBatch

PAGE = Path(__file__).with_suffix(".md")
# The timed model and batch.
MODEL = ModelConfig(
    num_layers=2, width=128, num_heads=4, num_kv_heads=2, head_size=32, ffn_size=512
)
VOCAB, EPISODES, MEAN, PARTS = 512, 16, 32, 2


def lengths_of(seed: int, number: int, mean: float, longest: int) -> np.ndarray:
    """Returns log-normal lengths of spread 1.0, cut at the longest."""
    rng = np.random.default_rng(seed)
    return np.minimum(np.ceil(rng.lognormal(math.log(mean) - 0.5, 1.0, number)), longest).astype(
        int
    )


def fill_rows(steps: int) -> Iterator[dict[str, Any]]:
    """Yields the fill of each batch size and number of row shards, over the steps of a run."""
    length = 8192
    for number in (128, 512):
        for shards in (1, 8):
            known, fills, padded, seconds = [], [], [], []
            rule = RowRule(number, 1, shards)
            for step in range(steps):
                lengths = lengths_of(step, number, 1024, length)
                start_s = time.perf_counter()
                packing = plan_packing(lengths.tolist(), length, rule, known)
                seconds.append(time.perf_counter() - start_s)
                if packing.num_rows not in (*known, rule.most):
                    known.append(packing.num_rows)
                fills.append(packing.fill)
                padded.append(lengths.sum() / (number * length))
            yield {
                "episodes": number,
                "row shards": shards,
                "fill, an episode a row": f"{100 * statistics.mean(padded):.1f} %",
                "fill, packed": f"{100 * statistics.mean(fills):.1f} %",
                "numbers of rows": len(known),
                "plan ms": f"{1000 * statistics.median(seconds):.2f}",
            }


def time_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the time of an update on the same episodes, padded and packed, on one device."""
    layout = make_layout(MeshShape(), row_axes=TRAINING_ROWS)
    learner = Learner(
        MODEL,
        TrainConfig(remat=True),
        ALGORITHMS["reinforce"],
        vocab_size=VOCAB,
        temperature=1.0,
        importance_cap=0.0,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
    )
    length = 256
    lengths = lengths_of(0, EPISODES, MEAN, length)
    batch = jax.device_put(_batch(lengths, length), layout.activations("NS"))
    rule = RowRule(EPISODES, PARTS, layout.num_row_shards)
    packing = plan_packing(lengths.tolist(), length, rule)
    parts = rule.parts(packing.num_rows)
    padded_s = _median_s(lambda: batch, learner, PARTS, repeats)
    packed_s = _median_s(
        functools.partial(_packed, batch, packing, layout), learner, parts, repeats
    )
    for name, rows, seconds in (
        ("an episode a row", EPISODES, padded_s),
        ("packed", packing.num_rows, packed_s),
    ):
        yield {
            "rows": name,
            "number": rows,
            "s": f"{seconds:.2f}",
            "tokens that count/s": f"{lengths.sum() / seconds:,.0f}",
        }


def _packed(batch: TrajectoryBatch, packing: Packing, layout: Any) -> TrajectoryBatch:
    return pack_rows(batch, packing, layout)


def _median_s(make_batch: Any, learner: Learner, parts: int, repeats: int) -> float:
    """Returns the median time to make the rows and update, after one time that compiles."""
    plan = TrainPlan(MeshShape(), parts, True)
    state, spans = learner.init_state(plan.mesh), []
    for _ in range(1 + repeats):
        start_s = time.perf_counter()
        state, metrics = learner.update(plan, state, make_batch(), np.zeros(2, np.float32))
        jax.block_until_ready(metrics)
        spans.append(time.perf_counter() - start_s)
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


def main() -> None:
    """Measures, prints the tables and puts them on the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps of a simulated run")
    parser.add_argument("--repeats", type=int, default=3, help="timed updates")
    arguments = parser.parse_args()
    text = "\n\n".join(
        (table(list(fill_rows(arguments.steps))), table(list(time_rows(arguments.repeats))))
    )
    print(text)
    replace_table(PAGE, text)


if __name__ == "__main__":
    main()
