# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The host's work between two rounds of a rollout, without a model.

    uv run python -m benchmarks.host [--write]

A service plays episodes without end on an engine whose rounds compute nothing: turns end at their
limits, and tokens are numbers that count up. It has as many arrays as Qwen2.5-7B, so that a call
takes the host as long. All else is that of a run: the environments in their pool, chat template
and tokenizer, scheduling, pages, prefixes. Seconds are processor time of the thread that speaks to
the devices, whatever else the machine does, and beside them that of the environments' threads.
"""

import collections
import dataclasses
import functools
import itertools
import random
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.chip import TOPOLOGY, Point, sizes_of, workload
from benchmarks.pages import parser_of, show, table
from benchmarks.rollout.ours import CutTurns, Speaker
from benchmarks.rollout.work import VOCAB_SIZE, make_messages, renderer
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.engine import Engine, Policy, empty_session
from earl_jax.engine.pages import Pool, dense_pool
from earl_jax.engine.round_inputs import pack_outputs, unpack_inputs
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.launch.start import start_jax
from earl_jax.models.presets import PRESETS
from earl_jax.rollout.answers import Answers
from earl_jax.rollout.config import Limits, RolloutConfig
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Task
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.roofline import decode_s
from earl_jax.sharding.layout import MeshShape, make_layout

PAGE = Path(__file__).with_suffix(".md")
MODEL = "qwen2.5-7b"
SLOTS = (64, 256, 512)
OBSERVED, BURST, CHUNK, PAGE_SIZE, ROUNDS = 64, 16, 64, 128, 40
# What the planned rounds have behind their slots.
CONTEXT = 1024


class Work(NamedTuple):
    """Episodes of `turns` turns, each of `sampled` tokens in the mean: half as many up to 1.5."""

    turns: int
    sampled: int

    @property
    def most_tokens(self) -> int:
        """The tokens of the longest episode."""
        return self.turns * (OBSERVED + self.sampled * 3 // 2)


WORKS = (Work(4, 32), Work(2, 512))


class CountingEngine(Engine):
    """An engine whose rounds compute nothing, and which has no pages."""

    def decoding_program(self, function: Any, rules: SlotRules) -> Any:
        """Returns a program that gives each slot in a turn tokens up to the turn's limit."""

        def program(params: Any, state: DecodeState, packed: jax.Array, key_data: jax.Array):
            inputs = unpack_inputs(packed)
            begins = inputs.begin_turn & (inputs.count > 0)
            active = state.active & ~inputs.restart & ~inputs.rewind & ~inputs.end_turn | begins
            limit = jnp.where(begins, inputs.turn_limit, state.turn_limit)
            before = jnp.where(begins, 0, state.turn_tokens)
            count = jnp.where(active, jnp.minimum(BURST, limit - before), 0)
            tokens = (before[:, None] + jnp.arange(BURST)[None, :]) % (
                VOCAB_SIZE // 2
            ) + VOCAB_SIZE // 4
            active &= before + count < limit
            outputs = pack_outputs(tokens, -1.0 / tokens, count, active)
            played = dataclasses.replace(
                state, active=active, turn_limit=limit, turn_tokens=before + count
            )
            return played, outputs

        return program

    def empty_state(self, max_tokens: int, pool: Pool | None = None) -> DecodeState:
        """Returns empty slots, with a page in place of the pool."""
        return super().empty_state(max_tokens, Pool(1, 1))


class Clock:
    """Processor time by part, without that of the parts within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._within = 0.0

    def time(self, part: str, owner: Any, name: str) -> None:
        """Counts the calls of a method to this part."""
        method = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            start_s, before_s, self._within = time.thread_time(), self._within, 0.0
            try:
                return method(*args, **options)
            finally:
                took_s = time.thread_time() - start_s
                self.seconds[part] += took_s - self._within
                self._within = before_s + took_s

        setattr(owner, name, timed)


class TimedCalls:
    """Calls of environments, whose threads' processor time is added up."""

    def __init__(self, calls: Answers) -> None:
        self._calls, self.seconds = calls, 0.0
        self.take = calls.take

    def submit(self, calls: Mapping[int, Callable[[], Any]]) -> None:
        """Lets workers make these calls."""
        timed = {ticket: functools.partial(self._make, call) for ticket, call in calls.items()}
        self._calls.submit(timed)

    def _make(self, call: Callable[[], Any]) -> Any:
        start_s = time.thread_time()
        answer = call()
        # Two threads may add at once; a sum that is lost now and then does not matter.
        self.seconds += time.thread_time() - start_s
        return answer


def open_service(slots: int, work: Work) -> tuple[RolloutService, EnvironmentPool, TimedCalls]:
    """Returns a service that plays tasks without end, the threads of environments, and calls."""
    config = RolloutConfig(
        num_slots=slots,
        episodes_per_step=2 * slots,
        chunk_size=CHUNK,
        burst=BURST,
        context_buckets=(work.most_tokens,),
        page_size=PAGE_SIZE,
    )
    tiny = dataclasses.replace(
        PRESETS[MODEL], width=8, num_heads=1, num_kv_heads=1, head_size=8, ffn_size=8
    )
    engine = CountingEngine(
        EngineConfig(
            model=tiny,
            vocab_size=VOCAB_SIZE,
            num_slots=slots,
            num_rows=2 * slots,
            chunk_size=CHUNK,
            rules=SlotRules(burst=BURST, end_of_turn_ids=(), truncates=False),
            seed=0,
            page_size=PAGE_SIZE,
        ),
        make_layout(MeshShape()),
    )
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), engine.parameter_shapes)
    rng = random.Random(0)
    every = [
        [message.text for message in make_messages(f"{number}", work.turns, OBSERVED)]
        for number in range(64)
    ]

    def task(number: int) -> Task:
        tokens = rng.randint(work.sampled // 2, work.sampled * 3 // 2)
        return Task(episode=number, group=number, limits=Limits(max_turn_tokens=tokens))

    tasks, pool, made = map(task, itertools.count()), EnvironmentPool(2, timeout_s=60.0), []

    def calls(look: Callable[[], None]) -> Answers:
        made.append(TimedCalls(pool.calls(look)))
        return made[0]

    rule = engine.config.page_rule
    service = RolloutService(
        empty_session(
            engine,
            Policy(params=engine.load_params(params), version=0),
            work.most_tokens,
            dense_pool(1, slots, work.most_tokens, rule),
        ),
        config,
        lambda: CutTurns(renderer()),
        types.SimpleNamespace(calls=calls),
        lambda task: Speaker(every[task.episode % len(every)], 0.0),
        lambda session, tokens, pages: session,
        num_devices=1,
        sampling=Sampling(),
        more=lambda num_free: list(itertools.islice(tasks, num_free)),
    )
    return service, pool, made[0]


def measure(slots: int, work: Work) -> dict[str, float]:
    """Returns processor time by part, in milliseconds a round; and the tokens of a round."""
    service, pool, calls = open_service(slots, work)
    clock, engine = Clock(), service.session.engine
    for part, owner, names in (
        ("tasks into slots", service, ("_refill",)),
        ("answers", service, ("_take_answers",)),
        ("pages", service._blocks, ("fit", "give")),
        ("inputs", service._rounds, ("_make_inputs",)),
        ("call of the engine", engine, ("play",)),
        ("outputs", service._rounds, ("_record",)),
        ("turns", service, ("_send_turns",)),
        ("all else", service, ("step",)),
    ):
        for name in names:
            clock.time(part, owner, name)

    def play(rounds: int) -> None:
        for _ in range(rounds):
            for finished in service.step():
                service.release(finished.row)

    # Until turns of all slots end at different times.
    play(4 * work.sampled // BURST + 4)
    clock.seconds.clear()
    calls.seconds, before = 0.0, service.stats.rollout_tokens
    play(ROUNDS)
    tokens = service.stats.rollout_tokens - before
    service.close()
    pool.close()
    parts = {part: 1e3 * seconds / ROUNDS for part, seconds in clock.seconds.items()}
    return {**parts, "environments": 1e3 * calls.seconds / ROUNDS, "tokens": tokens / ROUNDS}


def planned_ms(slots: int) -> float:
    """Returns the milliseconds of a round on an H100 by the planner's model."""
    point = Point("decode round", MODEL, slots, CONTEXT)
    work = workload(point, "none")
    hardware, sizes = parse_topology(TOPOLOGY), sizes_of(MODEL, "compute")
    step_s = decode_s(hardware, sizes, work, MeshShape(), slots, CONTEXT).total
    return 1e3 * BURST * step_s


def lines(work: Work) -> Iterator[dict[str, Any]]:
    """Yields a line for each number of slots."""
    for slots in SLOTS:
        found = measure(slots, work)
        tokens, beside = found.pop("tokens"), found.pop("environments")
        total, planned = sum(found.values()), planned_ms(slots)
        yield {
            "slots": slots,
            **found,
            "together": total,
            "us a token": 1e3 * total / tokens,
            "planned round": planned,
            "share": f"{100 * total / (total + planned):.1f}%",
            "environments": beside,
        }


def main() -> None:
    """Measures all, and prints the tables."""
    args = parser_of(__doc__).parse_args()
    start_jax("cpu", 1)
    for work in WORKS:
        show(table(list(lines(work))), PAGE, write=args.write, name=f"turns of {work.sampled}")


if __name__ == "__main__":
    main()
