# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of JetStream's calls: plain, where all ask for log-probs, with guesses.

    taskset -c 0 uv run python -m benchmarks.serving_steps [--rows=1,16,64] [--drafts=4]
        [--context=4096]

Prompts of 64 ids are read and put into all slots, then steps are made until each has its tokens;
the results are read as JetStream's Driver reads them, a step behind, but without its threads and
without gRPC. The first step, which puts the prompts where they belong, is not timed. Model and
weights are those of benchmarks/speculation.py: what is said goes on in a cycle with the probability
p. `--context` is that of a slot, in tokens; guesses are looked for in all of it.

Prints a Markdown table: tokens/s of all rows, and times those of the plain steps. The runs of a
line take turns, and the best of each counts.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.rollout.work import MODEL, VOCAB_SIZE
from benchmarks.speculation import CHANCES, CYCLE, PAGE_SIZE, PROMPT, make_weights
from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.jetstream_engine import JetStreamEngine
from earl_jax.sharding.layout import MeshShape, make_layout


def make_engine(rows: int, tokens: int, context_tokens: int, draft: int) -> JetStreamEngine:
    """An engine on the first device, with no token that ends a reply."""
    config = EngineConfig(
        model=MODEL,
        vocab_size=VOCAB_SIZE,
        num_slots=rows,
        num_rows=1,
        chunk_size=1,
        rules=SlotRules(burst=1, end_of_turn_ids=(), draft=draft),
        seed=0,
        page_size=PAGE_SIZE,
    )
    serving = ServingConfig(
        max_prefill_length=PROMPT,
        context_tokens=context_tokens,
        cache_tokens=rows * (PROMPT + tokens + 4 * PAGE_SIZE),
    )
    return JetStreamEngine(Engine(config, make_layout(MeshShape(), jax.devices()[:1])), serving)


def serve_once(engine: JetStreamEngine, weights: Any, tokens: int, *, logprobs: bool) -> float:
    """Tokens/s of one reply of so many tokens in every slot."""
    state, rows = engine.init_decode_state(), engine.engine.config.num_slots
    for slot in range(rows):
        ids = ((slot + np.arange(PROMPT)) % CYCLE).astype(np.int32)
        prefix = engine.prefill(
            params=weights,
            padded_tokens=ids,
            true_length=PROMPT,
            logprobs=logprobs,
            max_tokens=tokens,
        )
        state = engine.insert(prefix, state, slot)
    state, before = engine.generate(weights, state)
    counts, first = np.zeros(rows, int), True
    start_s = time.perf_counter()
    # But for what the first step says.
    while counts.min() < tokens - 1 - engine.engine.config.rules.draft:
        state, result = engine.generate(weights, state)
        read = before.convert_to_numpy()
        new = [read.get_result_at_slot(slot).tokens.size for slot in range(rows)]
        if first:
            start_s, first, new = time.perf_counter(), False, [0] * rows
        counts += new
        before = result
    return float(counts.sum()) / (time.perf_counter() - start_s)


def main() -> None:
    """Measures line by line and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--drafts", default="4")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    drafts = [int(number) for number in flags.drafts.split(",")]
    device = jax.devices()[0]
    print(f"{device.device_kind or device.platform}, jax {jax.__version__}\n")
    print(f"| p | rows | plain | log-probs | {' | '.join(f'draft {d}' for d in drafts)} |")
    print("|" + "---|" * (4 + len(drafts)))
    for rows in map(int, flags.rows.split(",")):
        engines = {d: make_engine(rows, flags.tokens, flags.context, d) for d in (0, *drafts)}
        for chance in CHANCES:
            weights = make_weights(engines[0].engine, chance)
            serve: list[Callable[[], float]] = [
                functools.partial(serve_once, engine, weights, flags.tokens, logprobs=asked)
                for engine, asked in [(engines[0], False), (engines[0], True)]
                + [(engines[d], False) for d in drafts]
            ]
            for one in serve:
                one()
            runs = [[one() for one in serve] for _ in range(flags.repeats)]
            best = [max(column) for column in zip(*runs, strict=True)]
            cells = [f"{best[0]:,.0f}", *(f"{x:,.0f}, {x / best[0]:.2f}x" for x in best[1:])]
            print(f"| {chance:g} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
