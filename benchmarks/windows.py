# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Long episodes of models whose layers have windows: bytes of published ones, and a rollout.

    uv run python -m benchmarks.windows [--write]

The rollout is one of prompts on one device, in a pool of pages for three whole episodes. Beside it
one in the same pool whose pages are kept, as they are where all layers have full attention.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.appending import make_task, make_weights, open_service
from benchmarks.pages import parser_of, show, table
from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine, Policy, empty_session
from earl_jax.engine.pages import Pool
from earl_jax.launch.start import start_jax
from earl_jax.models.config import ModelConfig
from earl_jax.models.layer_groups import PageRule, group_layers, make_page_rule
from earl_jax.models.presets import PRESETS
from earl_jax.rollout.actor import collect
from earl_jax.rollout.config import CacheRules
from earl_jax.rollout.results import Rollout
from earl_jax.sharding.layout import MeshShape, make_layout

PAGE = Path(__file__).with_suffix(".md")
PUBLISHED = ("gemma2-27b", "gpt-oss-120b", "olmo3-32b", "gemma3-27b", "qwen2.5-7b")
CONTEXTS = (8_192, 32_768, 131_072)
# Three windows before each layer of full attention, as OLMo 3.
MODEL = ModelConfig(
    num_layers=8, width=128, num_heads=4, num_kv_heads=2, head_size=32, ffn_size=384,
    windows=(128, 128, 128, 0),
)  # fmt: skip
VOCAB, CHUNK, PAGE_SIZE, BURST, REPEATS = 512, 128, 16, 16, 3
PROMPT, SAMPLED, SLOTS, EPISODES, WHOLE = 1_024, 256, 16, 32, 3
MAX_TOKENS = PROMPT + SAMPLED


def bytes_rows() -> list[dict[str, Any]]:
    """Returns the GiB of an episode's pages in bf16, in all layers and as they are needed."""
    rows = []
    for name in PUBLISHED:
        model = PRESETS[name]
        rule = make_page_rule(model.layer_windows, 128, 512, BURST)
        size = group_layers(model.layer_windows).size
        of_layer = 2 * 2 * model.num_kv_heads * model.head_size * 128
        for context in CONTEXTS:
            every = context // 128 * model.num_layers * of_layer / 2**30
            needed = rule.most_pages(context) * size * of_layer / 2**30
            rows.append(
                {
                    "model": name,
                    "tokens": f"{context:,}",
                    "GiB in all layers": every,
                    "GiB as needed": needed,
                    "episodes in the same memory": every / needed,
                }
            )
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepsAll(EngineConfig):
    """Settings of an engine whose episodes keep the pages of all tokens."""

    @functools.cached_property
    def page_rule(self) -> PageRule:
        """No token is so far behind that its pages are needed no more."""
        return super().page_rule._replace(round_tokens=2**30)


def make_engine(kind: type[EngineConfig]) -> Engine:
    """Returns an engine on one device, in which no token ends a turn."""
    config = kind(
        model=MODEL,
        vocab_size=VOCAB,
        num_slots=SLOTS,
        num_rows=EPISODES,
        chunk_size=CHUNK,
        rules=SlotRules(burst=BURST, end_of_turn_ids=()),
        seed=0,
        page_size=PAGE_SIZE,
    )
    return Engine(config, make_layout(MeshShape()))


def play(engine: Engine, params: Any, pool: Pool) -> tuple[Rollout, float]:
    """Plays the prompts. Returns the rollout and its seconds."""
    session = empty_session(engine, Policy(params=params, version=0), MAX_TOKENS, pool)
    service = open_service(session, CacheRules(share_prefixes=False))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB, PROMPT).tolist() for _ in range(EPISODES)]
    tasks = [make_task(i, ids, SAMPLED, group=i) for i, ids in enumerate(prompts)]
    start_s = time.perf_counter()
    rollout = collect(service, tasks)
    jax.block_until_ready(rollout.session.state)
    return rollout, time.perf_counter() - start_s


def rollout_rows() -> list[dict[str, Any]]:
    """Returns the rollouts in a pool of three whole episodes, and in one of all slots'."""
    keeps, gives_up = make_engine(KeepsAll), make_engine(EngineConfig)
    params = make_weights(keeps)
    whole = keeps.config.page_rule.most_pages(MAX_TOKENS)
    few, all_slots = Pool(1, WHOLE * whole), Pool(1, SLOTS * whole)
    cases = {
        "pages for three whole episodes, all are kept": (keeps, few),
        "the same, those behind windows are given up": (gives_up, few),
        "pages for all slots": (keeps, all_slots),
    }
    found: dict[str, list[tuple[Rollout, float]]] = {name: [] for name in cases}
    for repeat in range(REPEATS + 1):
        for name, (engine, pool) in cases.items():
            played = play(engine, params, pool)
            if repeat:
                found[name].append(played)
    return [_row(name, found[name], cases[name][1].pages // whole) for name in cases]


def _row(name: str, played: Sequence[tuple[Rollout, float]], whole: int) -> dict[str, Any]:
    stats = played[0][0].stats
    seconds = statistics.median(each[1] for each in played)
    return {
        "rollout": name,
        "whole episodes of pages": whole,
        "sampled tokens/s": stats.rollout_tokens / seconds,
        "rounds": stats.rounds,
        "preemptions": stats.preempted_episodes,
        "tokens read again": f"{stats.recomputed_tokens:,}",
    }


def main() -> None:
    """Prints the tables."""
    flags = parser_of(__doc__).parse_args()
    start_jax("cpu", 1)
    show(table(bytes_rows()), PAGE, write=flags.write, name="bytes")
    show(table(rollout_rows()), PAGE, write=flags.write)


if __name__ == "__main__":
    main()
