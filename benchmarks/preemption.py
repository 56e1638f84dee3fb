# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A preempted context that comes back: copied to host memory and from there, or read again.

    uv run python -m benchmarks.preemption [--contexts=256,512,1024,2048,4096] [--kv_dtype=int8]

The tiny Qwen2 of rollout.md (fp32, random weights) on one device of whatever platform there is,
pages of 128, one slot of four: milliseconds until the pages are in host memory, until they are back
in the pools, and until the same context is read by chunks of 64 and of 256; the fastest of as many
runs as fit into `--seconds`. Beside them what rollout/preemption.py expects, by which
config.rollout.preemption = "auto" chooses: where the two differ widely on a platform, its rates
there are to be corrected. Prints a Markdown table.
"""

import argparse
import dataclasses
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rollout.work import MODEL, VOCAB_SIZE
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.engine.host_pages import HostPages
from earl_jax.engine.pages import dense_pool, pages_for
from earl_jax.engine.round_inputs import NO_ROW, RoundInputs
from earl_jax.engine.sampling import sampling_rows
from earl_jax.engine.session import Policy, Session, empty_session
from earl_jax.models.parameters import is_spec, parameter_specs, unstacked_specs
from earl_jax.rollout.preemption import copying_s, rates_of, reading_s, work_of
from earl_jax.sharding.layout import MeshShape, make_layout

SLOTS, PAGE_SIZE, CHUNKS = 4, 128, (64, 256)


def make_engine(chunk_size: int, kv_dtype: Any) -> Engine:
    """Whose turns end by nothing but their limit."""
    config = EngineConfig(
        model=MODEL,
        vocab_size=VOCAB_SIZE,
        num_slots=SLOTS,
        num_rows=SLOTS,
        chunk_size=chunk_size,
        rules=SlotRules(burst=1, end_of_turn_ids=(), append_rows=1),
        seed=0,
        page_size=PAGE_SIZE,
        kv_dtype=kv_dtype,
    )
    return Engine(config, make_layout(MeshShape()))


def random_weights(engine: Engine) -> Any:
    """Noise of the right size."""
    rng = np.random.default_rng(0)
    specs = unstacked_specs(parameter_specs(MODEL, VOCAB_SIZE), MODEL.num_layers)
    values = jax.tree.map(
        lambda spec: jnp.asarray(
            rng.normal(size=spec.shape) * spec.deviation if spec.deviation else np.ones(spec.shape),
            jnp.float32,
        ),
        specs,
        is_leaf=is_spec,
    )
    return engine.load_params(values)


def full_session(engine: Engine, params: Any, max_tokens: int) -> Session:
    """Returns a session in which every slot has its pages."""
    pool = dense_pool(1, SLOTS, max_tokens, PAGE_SIZE)
    session = empty_session(engine, Policy(params=params, version=0), max_tokens, pool)
    for slot in range(SLOTS):
        session.pages.hold(slot, max_tokens)
    table = session.pages.as_array(pages_for(max_tokens, PAGE_SIZE))
    return dataclasses.replace(session, state=engine.give_pages(session.state, table))


def best_ms(run: Callable[[], list[float]], seconds: float) -> list[float]:
    """The least of each of the times that a run takes; the first run, which compiles, is none."""
    run()
    best, end = run(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = [min(pair) for pair in zip(best, run(), strict=True)]
    return [1e3 * least for least in best]


def copying(session: Session, context: int) -> Callable[[], list[float]]:
    """Out to the host, and back to other pages."""
    number = pages_for(context, PAGE_SIZE)
    there, here = list(range(number)), list(range(number, 2 * number))

    def run() -> list[float]:
        nonlocal session
        host = HostPages(2**40)
        jax.block_until_ready(session.state)
        start = time.perf_counter()
        session = host.copy_out(session, {0: there})
        host.settle()
        jax.block_until_ready([part.pieces for part in host._slots[0]])
        out = time.perf_counter()
        session = host.copy_back(session, {0: here}, {0: True})
        jax.block_until_ready(session.state)
        return [out - start, time.perf_counter() - out]

    return run


def reading(session: Session, context: int) -> Callable[[], list[float]]:
    """By rounds in which one slot appends a chunk and nobody says anything."""
    engine, size = session.engine, session.engine.config.chunk_size
    first = np.arange(SLOTS) == 0

    def run() -> list[float]:
        nonlocal session
        state = jax.block_until_ready(session.state)
        start = time.perf_counter()
        for place in range(0, context, size):
            count = min(size, context - place)
            inputs = RoundInputs(
                chunk=np.ones((SLOTS, size), np.int32),
                count=count * first,
                restart=first * (place == 0),
                begin_turn=np.zeros(SLOTS, np.int32),
                seed=np.zeros(SLOTS, np.int32),
                row=np.full(SLOTS, NO_ROW),
                sampling=sampling_rows(Sampling(), SLOTS),
                version=0,
            )
            state, _ = engine.play(session.policy.params, state, inputs)
        jax.block_until_ready(state)
        taken = time.perf_counter() - start
        session = dataclasses.replace(session, state=state)
        return [taken]

    return run


def row_of(context: int, engines: list[Engine], params: Any, seconds: float) -> list[str]:
    """One row of the table."""

    def session(engine: Engine) -> Session:
        return full_session(engine, params, context)

    out, back = best_ms(copying(session(engines[0]), context), seconds)
    read = [best_ms(reading(session(engine), context), seconds)[0] for engine in engines]
    block_tokens = engines[0].page_copies.pages_a_call * PAGE_SIZE
    block_bytes = HostPages(0).block_bytes(session(engines[0]))
    works = [work_of(engine, block_bytes, block_tokens) for engine in engines]
    rates = rates_of(engines[0])
    expected = [1e3 * reading_s(context, work, rates) for work in works]
    blocks = -(-context // block_tokens)
    return [
        f"{context:,}",
        f"{blocks * block_bytes / 2**20:.1f}",
        f"{out:.2f} + {back:.2f}",
        f"{1e3 * copying_s(context, works[0], rates):.2f}",
        *(
            cell
            for pair in zip(read, expected, strict=True)
            for cell in (f"{pair[0]:.1f}", f"{pair[1]:.1f}")
        ),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", default="256,512,1024,2048,4096")
    parser.add_argument("--kv_dtype", choices=("compute", "int8"), default="compute")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number (%(default)s)")
    flags = parser.parse_args()
    device = jax.devices()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"{device.device_kind}, Python {platform.python_version()}, jax {jax.__version__}")
    print(f"\nms; KV cache {flags.kv_dtype}, pages of {PAGE_SIZE}\n")
    engines = [make_engine(chunk, flags.kv_dtype) for chunk in CHUNKS]
    params = random_weights(engines[0])
    columns = ["context", "MiB", "out + back", "expected"]
    columns += [name for chunk in CHUNKS for name in (f"read by {chunk}", "expected")]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for context in map(int, flags.contexts.split(",")):
        print("| " + " | ".join(row_of(context, engines, params, flags.seconds)) + " |", flush=True)


if __name__ == "__main__":
    main()
