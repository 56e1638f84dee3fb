# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of decoding with guessed tokens, for texts that repeat themselves or do not.

    taskset -c 0 uv run python -m benchmarks.speculation [--rows=1,16,64] [--drafts=0,2,4,8]

The tiny Qwen2 of benchmarks/rollout, or any preset (--model=qwen2.5-1.5b, computing in bf16) on the
first device. Its weights are made so that what it says is known, at the cost of any weights: layers
add nothing, and the head gives the next id of a cycle of 48 the probability p, all others the rest
in equal parts. With p = 1 the text repeats itself for ever; with 0.8 a fifth of the tokens leave
the cycle and enter it elsewhere; with 0 it never repeats itself, hardly anything is guessed, and
what is seen is the cost of wider passes. The first round, which reads a prompt of 64 ids of the
cycle, is not timed.

Prints a Markdown table: tokens/s of all rows, times that without guesses, and in brackets tokens
per forward pass of a row. The runs of a line take turns, and the best of each counts.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rollout.work import MODEL, VOCAB_SIZE
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.engine.round_inputs import RoundInputs
from earl_jax.engine.sampling import sampling_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.presets import PRESETS
from earl_jax.sharding.layout import MeshShape, make_layout

CYCLE, PROMPT, PAGE_SIZE = 48, 64, 128
CHANCES = (1.0, 0.8, 0.0)
OFF = "off"


@dataclasses.dataclass(frozen=True)
class Speed:
    """What one run came to."""

    tokens_per_s: float
    tokens_per_pass: float


def make_engine(
    model: ModelConfig, vocab_size: int, rows: int, burst: int, ngram: int, draft: int
) -> Engine:
    """An engine on the first device, with no token that ends a turn."""
    rules = SlotRules(burst=burst, end_of_turn_ids=(), ngram=ngram, draft=draft)
    config = EngineConfig(
        model=model,
        vocab_size=vocab_size,
        num_slots=rows,
        num_rows=rows,
        chunk_size=PROMPT,
        rules=rules,
        seed=0,
        page_size=PAGE_SIZE,
    )
    return Engine(config, make_layout(MeshShape(), jax.devices()[:1]))


def make_weights(engine: Engine, chance: float) -> Any:
    """Weights that go on in the cycle with this probability, after whatever id."""
    shapes = engine.parameter_shapes
    vocab_size, width = shapes["embed"].shape

    def fill(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        silent = any(getattr(key, "key", "") in ("out", "down") for key in path)
        return jnp.full(shape.shape, 0.0 if silent else 0.01, shape.dtype)

    # Certain: so likely that nothing else ever comes. The final norm makes a one-hot row sqrt(D).
    odds = chance / max(1 - chance, 1e-30) * (vocab_size - 1)
    logit = np.log(odds) / width**0.5 if chance else 0.0
    ids = np.arange(width)
    head = np.zeros((width, vocab_size), np.float32)
    head[ids, (ids + 1) % CYCLE] = logit
    embed = np.eye(width, dtype=np.float32)[np.arange(vocab_size) % width]
    weights = jax.tree_util.tree_map_with_path(fill, shapes)
    dtype = shapes["embed"].dtype
    ones = jnp.ones(shapes["final_norm"].shape, dtype)
    weights |= {"embed": jnp.asarray(embed, dtype), "head": jnp.asarray(head, dtype)}
    return engine.load_params({**weights, "final_norm": ones})


def play_once(engine: Engine, weights: Any, tokens: int) -> Speed:
    """Decodes one turn of so many tokens in every row."""
    rows, rules = engine.config.num_slots, engine.config.rules
    max_tokens = PROMPT + tokens + rules.round_tokens
    state = engine.empty_state(-(-max_tokens // PAGE_SIZE) * PAGE_SIZE)
    starts = np.arange(rows)[:, None]
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    inputs = functools.partial(
        RoundInputs,
        chunk=(starts + np.arange(PROMPT)) % CYCLE,
        seed=np.arange(rows),
        row=np.arange(rows),
        sampling=sampling_rows(Sampling(), rows),
        version=0,
        turn_limit=tokens,
    )
    read = inputs(count=PROMPT * ones, restart=ones, begin_turn=ones)
    go_on = inputs(count=zeros, restart=zeros, begin_turn=zeros)
    state, report = engine.play(weights, state, read)
    sampled = passes = 0
    start_s = time.perf_counter()
    while report.active.any():
        state, report = engine.play(weights, state, go_on)
        sampled += int(report.count.sum())
        passes += int((report.count if report.passes is None else report.passes).sum())
    seconds = time.perf_counter() - start_s
    return Speed(tokens_per_s=sampled / seconds, tokens_per_pass=sampled / passes)


def measure(plays: dict[str, Callable[[], Speed]], repeats: int) -> dict[str, Speed]:
    """The best run of each, after one that compiles."""
    best: dict[str, Speed] = {}
    for play in plays.values():
        play()
    for _ in range(repeats):
        for name, play in plays.items():
            best[name] = max(best.get(name, Speed(0, 0)), play(), key=lambda s: s.tokens_per_s)
    return best


def main() -> None:
    """Measures line by line and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a preset; the tiny Qwen2 unless given")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--drafts", default="0,2,4,8", help="0: none; the first is compared with")
    parser.add_argument("--ngram", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--burst", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    rows, drafts = ([int(n) for n in text.split(",")] for text in (flags.rows, flags.drafts))
    first_round = flags.burst * (1 + max(drafts))
    if flags.tokens < 2 * first_round:
        parser.error(
            f"--tokens={flags.tokens}: the first round, which is not timed, may say {first_round} "
            "of them; give twice as many or more, or lower --burst or --drafts"
        )
    model, vocab_size = MODEL, VOCAB_SIZE
    if flags.model:
        model, vocab_size = PRESETS[flags.model], 152_064
        model = dataclasses.replace(model, compute_dtype="bfloat16", tie_embeddings=False)
    device = jax.devices()[0]
    print(f"{device.device_kind or device.platform}, jax {jax.__version__}\n")
    names = [f"draft {d}" if d else OFF for d in drafts]
    print(f"| p | rows | {' | '.join(names)} |")
    print("|" + "---|" * (2 + len(names)))
    for number in rows:
        engines = {
            d: make_engine(model, vocab_size, number, flags.burst, flags.ngram, d) for d in drafts
        }
        for chance in CHANCES:
            weights = make_weights(engines[drafts[0]], chance)
            plays: dict[str, Callable[[], Speed]] = {
                name: functools.partial(play_once, engines[d], weights, flags.tokens)
                for name, d in zip(names, drafts, strict=True)
            }
            cells = _cells(measure(plays, flags.repeats))
            print(f"| {chance:g} | {number} | {' | '.join(cells)} |", flush=True)


def _cells(best: dict[str, Speed]) -> list[str]:
    """Returns the cells of a line, each compared with the first."""
    cells, first = [], next(iter(best))
    for name, speed in best.items():
        cell = f"{speed.tokens_per_s:,.0f}"
        if name != OFF:
            ratio = speed.tokens_per_s / best[first].tokens_per_s
            cell += f", {ratio:.2f}x ({speed.tokens_per_pass:.1f})"
        cells.append(cell)
    return cells


if __name__ == "__main__":
    main()
