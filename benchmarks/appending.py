# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's cost of appended tokens, shared prompts, long prompts, and unequal contexts.

uv run python -m benchmarks.appending [--write]

One device. Times are the least of several rounds of the engine, or the median of those in which
long prompts are read, of a model whose products take longer than what is around them. Rounds and
steps of rollouts are counted with a small one.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pages import parser_of, show, table
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine, Policy, Session, empty_session
from earl_jax.engine.pages import dense_pool
from earl_jax.engine.round_inputs import RoundInputs, idle_inputs
from earl_jax.envs.text.conversation import Completion
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import is_spec, parameter_specs, unstacked_specs
from earl_jax.rollout.actor import collect
from earl_jax.rollout.config import CacheRules, Limits, RolloutConfig
from earl_jax.rollout.rounds import OnTokens
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from earl_jax.sharding.layout import MeshShape, make_layout

MODEL = ModelConfig(
    num_layers=4, width=256, num_heads=8, num_kv_heads=4, head_size=32, ffn_size=1024
)
SMALL_MODEL = ModelConfig(
    num_layers=1, width=32, num_heads=2, num_kv_heads=1, head_size=16, ffn_size=64
)
VOCAB, CHUNK, PAGE, REPEATS = 1024, 512, 64, 7
PAGE_FILE = Path(__file__).with_suffix(".md")


def make_engine(
    num_slots: int, *, burst: int = 1, num_rows: int = 0, model: ModelConfig = MODEL
) -> Engine:
    """Returns an engine on one device, in which no token ends a turn."""
    config = EngineConfig(
        model=model,
        vocab_size=VOCAB,
        num_slots=num_slots,
        num_rows=num_rows or num_slots,
        chunk_size=CHUNK,
        rules=SlotRules(burst=burst, end_of_turn_ids=()),
        seed=0,
        page_size=PAGE,
    )
    return Engine(config, make_layout(MeshShape()))


def make_weights(engine: Engine) -> Any:
    """Returns random weights of an engine's model."""
    rng, model = np.random.default_rng(0), engine.config.model
    specs = unstacked_specs(parameter_specs(model, engine.config.vocab_size), model.num_layers)

    def draw(spec: Any) -> Any:
        noise = rng.normal(size=spec.shape) * spec.deviation if spec.deviation else np.ones(1)
        return jnp.asarray(np.broadcast_to(noise, spec.shape), jnp.float32)

    return engine.load_params(jax.tree.map(draw, specs, is_leaf=is_spec))


class Rounds:
    """Plays rounds of an engine by hand; `state` is that of the last one."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.engine = make_engine(num_slots)
        self._params = make_weights(self.engine)
        self.num_slots = num_slots
        self.state = self.engine.empty_state(max_tokens)
        self._ids = np.random.default_rng(1).integers(0, VOCAB, (num_slots, CHUNK))

    def inputs(self, counts: Sequence[int], *, restart: bool, begin: bool) -> RoundInputs:
        """Returns inputs that append so many tokens to each slot."""
        inputs = idle_inputs(self.num_slots, CHUNK, 0, Sampling(), 0)
        has = np.array(counts) > 0
        inputs.chunk[:] = self._ids
        inputs.count[:] = counts
        inputs.restart[:], inputs.begin_turn[:] = has & restart, has & begin
        inputs.row[:] = np.arange(self.num_slots)
        inputs.seed[:] = np.arange(self.num_slots)
        return inputs

    def play(self, counts: Sequence[int], *, restart: bool = False, begin: bool = False) -> float:
        """Plays a round. Returns its seconds."""
        inputs = self.inputs(counts, restart=restart, begin=begin)
        start_s = time.perf_counter()
        self.state, _ = self.engine.play(self._params, self.state, inputs)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start_s

    def fill(self, lengths: Sequence[int]) -> None:
        """Begins slots with so many tokens, and a turn behind them; 0: the slot stays idle."""
        left, restart = np.array(lengths), True
        while left.any():
            part = np.minimum(left, CHUNK)
            left = left - part
            # A turn begins behind the last chunk, of all slots in the same round.
            done = not left.any()
            self.play(part, restart=restart, begin=done)
            restart = False


def least(measure: Callable[[], float]) -> float:
    """Returns the least of some measurements, behind one that may compile."""
    measure()
    return min(measure() for _ in range(REPEATS))


def one_hot(num_slots: int, slots: Sequence[int], count: int) -> list[int]:
    """Returns counts of `count` for these slots and 0 for others."""
    return [count if slot in slots else 0 for slot in range(num_slots)]


def append_rows() -> list[dict[str, Any]]:
    """Returns the cost of chunks of several lengths, relative to a decode step of 20 rows."""
    decoding = Rounds(20, 1024)
    decoding.fill([16] * 20)
    step_s = least(lambda: decoding.play([0] * 20))
    rounds = Rounds(32, 4096)
    rows = [{"append": "nothing: 20 slots decode a token each", "ms": step_s * 1e3, "ratio": 1.0}]
    for name, slots, count in (
        ("20 tokens to one slot", [3], 20),
        ("20 tokens to each of 32 slots", range(32), 20),
        ("200 tokens to one slot", [3], 200),
        ("512 tokens to one slot", [3], 512),
        ("512 tokens to 8 slots", range(8), 512),
        ("512 tokens to one slot and 20 to 31", [3], 0),
    ):
        counts = one_hot(32, slots, count) if count else [512 if s == 3 else 20 for s in range(32)]
        seconds = least(lambda counts=counts: rounds.play(counts, restart=True))
        rows.append({"append": name, "ms": seconds * 1e3, "ratio": seconds / step_s})
    return rows


def ragged_rows() -> list[dict[str, Any]]:
    """Returns the decode step's time for each token in the cache, of unequal and equal contexts."""
    rows = []
    for name, lengths in (
        ("32 x 512", [512] * 32),
        ("1 x 8,192 and 31 x 512", [8192] + [512] * 31),
        ("8 x 512, 24 idle", [512] * 8 + [0] * 24),
    ):
        rounds = Rounds(32, 8192 + 2 * CHUNK)
        rounds.fill([length and CHUNK for length in lengths])
        rounds = _lengthen(rounds, lengths)
        seconds = least(lambda rounds=rounds: rounds.play([0] * 32))
        rows.append({"contexts": name, "tokens": sum(lengths), "ms": seconds * 1e3})
    equal = rows[0]["ms"] / rows[0]["tokens"]
    return [{**row, "time a token": row["ms"] / row["tokens"] / equal} for row in rows]


def _lengthen(rounds: Rounds, lengths: Sequence[int]) -> Rounds:
    """Sets lengths of contexts; what stands in pages does not matter for the time."""
    cached = np.array([max(0, length - 1) for length in lengths], np.int32)
    placed = jax.device_put(cached, rounds.engine.row_sharding)
    rounds.state = dataclasses.replace(rounds.state, cached=placed)
    return rounds


def open_service(
    session: Session, rules: CacheRules, on_tokens: OnTokens | None = None
) -> RolloutService:
    """Returns a service of prompts alone, on one device."""
    engine = session.engine.config
    config = RolloutConfig(
        num_slots=engine.num_slots,
        episodes_per_step=engine.num_rows,
        chunk_size=engine.chunk_size,
        burst=engine.rules.burst,
        context_buckets=(session.max_tokens,),
        page_size=engine.page_size,
    )
    return RolloutService(
        session,
        config,
        lambda: Completion(lambda ids: "", ()),
        None,
        None,
        lambda session, tokens, pages: session,
        num_devices=1,
        sampling=Sampling(),
        cache_rules=rules,
        on_tokens=on_tokens,
    )


def full_session(engine: Engine, params: Any, max_tokens: int) -> Session:
    """Returns a session with pages for every slot to be full."""
    config = engine.config
    pool = dense_pool(1, config.num_slots, max_tokens, config.page_rule)
    return empty_session(engine, Policy(params=params, version=0), max_tokens, pool)


def make_task(episode: int, ids: Sequence[int], sampled: int, *, group: int) -> Task:
    """Returns a prompt, behind which so many tokens are sampled."""
    limits = Limits(max_turn_tokens=sampled)
    return Task(episode=episode, group=group, prompt=Prompt(token_ids=tuple(ids)), limits=limits)


def sharing_rows() -> list[dict[str, Any]]:
    """Returns the times of four groups of eight prompts of 512 tokens, shared or not."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB, 512).tolist() for _ in range(4)]
    engine = make_engine(32)
    params = make_weights(engine)

    def play(share: bool) -> tuple[float, int]:
        session = full_session(engine, params, 1024)
        service = open_service(session, CacheRules(share_prefixes=share))
        tasks = [make_task(i, prompts[i // 8], 1, group=i // 8) for i in range(32)]
        start_s = time.perf_counter()
        rollout = collect(service, tasks)
        jax.block_until_ready(rollout.session.state)
        return time.perf_counter() - start_s, rollout.stats.prefill_tokens

    found = {}
    for share in (False, True, False, True, False, True):
        seconds, tokens = play(share)
        if share not in found or seconds < found[share][0]:
            found[share] = seconds, tokens
    (alone_s, alone), (shared_s, shared) = found[False], found[True]
    saved, saved_s = 1 - shared / alone, 1 - shared_s / alone_s
    return [
        {
            "tokens read alone": alone,
            "shared": shared,
            "ms alone": alone_s * 1e3,
            "ms shared": shared_s * 1e3,
            "time saved / tokens saved": saved_s / saved,
        }
    ]


def budget_rows() -> list[dict[str, Any]]:
    """Returns times of rounds of 20 slots that sample, while eight prompts of 2,048 are read."""
    rng = np.random.default_rng(3)
    engine = make_engine(32, burst=8)
    params = make_weights(engine)
    speakers = [make_task(i, rng.integers(0, VOCAB, 16).tolist(), 512, group=i) for i in range(20)]
    prompts = [rng.integers(0, VOCAB, 2048).tolist() for _ in range(8)]
    readers = [make_task(20 + i, ids, 1, group=20 + i) for i, ids in enumerate(prompts)]

    def play(on_tokens: OnTokens | None) -> tuple[list[float], list[float]]:
        """Returns the seconds of rounds before the prompts come, and until they are read."""
        rules = CacheRules(share_prefixes=False)
        service = open_service(full_session(engine, params, 2560), rules, on_tokens)
        service.submit(speakers)

        def step() -> tuple[float, int]:
            start_s = time.perf_counter()
            finished = service.step()
            return time.perf_counter() - start_s, len(finished)

        step()
        alone = [step()[0] for _ in range(REPEATS)]
        service.submit(readers)
        beside, left = [], len(readers)
        while left:
            seconds, number = step()
            beside.append(seconds)
            left -= number
        return alone, beside

    rows = []
    for name, on_tokens in (
        ("8 prompts of 2,048 tokens, nobody reads along", None),
        ("the same, and somebody reads along", lambda ticket, tokens: None),
    ):
        # Once for the programs.
        play(on_tokens)
        alone, beside = play(on_tokens)
        if not rows:
            alone_s = min(alone)
            first = {"beside": "nothing", "ms a round": alone_s * 1e3, "ratio": 1.0}
            rows.append({**first, "rounds": None, "s until all are read": None})
        median_s = statistics.median(beside)
        rows.append(
            {
                "beside": name,
                "ms a round": median_s * 1e3,
                "ratio": median_s / alone_s,
                "rounds": len(beside),
                "s until all are read": sum(beside),
            }
        )
    return rows


def rollout_rows() -> list[dict[str, Any]]:
    """Returns rounds and decode steps of rollouts whose prompts are read with and without a budget.

    64 episodes, of replies of 32 to 224 tokens, take the 16 slots as they become free.
    """
    rows = []
    for length in (256, 2048):
        rng, slots = np.random.default_rng(5), 16
        tasks = [
            make_task(i, rng.integers(0, VOCAB, length).tolist(), rng.integers(32, 225), group=i)
            for i in range(64)
        ]
        for name, on_tokens in (("no", None), ("yes", lambda ticket, tokens: None)):
            engine = make_engine(slots, burst=8, num_rows=len(tasks), model=SMALL_MODEL)
            session = full_session(engine, make_weights(engine), length + 256)
            rules = CacheRules(share_prefixes=False)
            stats = collect(open_service(session, rules, on_tokens), tasks).stats
            rows.append(
                {
                    "tokens of a prompt": length,
                    "budget": name,
                    "rounds": stats.rounds,
                    "decode steps": stats.decode_rows // slots,
                    "of them idle": f"{stats.idle_rows / stats.decode_rows:.0%}",
                }
            )
    return rows


if __name__ == "__main__":
    flags = parser_of(__doc__).parse_args()
    show(table(rollout_rows()), PAGE_FILE, write=flags.write, name="rollouts")
    show(table(budget_rows()), PAGE_FILE, write=flags.write, name="budget")
    tables = [table(rows) for rows in (append_rows(), sharing_rows(), ragged_rows())]
    show("\n\n".join(tables), PAGE_FILE, write=flags.write)
