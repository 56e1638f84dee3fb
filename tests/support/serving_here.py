# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A server in this process, whose threads, descriptors and pages can be counted."""

import asyncio
import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import jax
from jetstream.core.proto import jetstream_pb2_grpc

from earl_jax.dispatch.weights import publish
from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.envs.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.jetstream_engine import JetStreamEngine
from earl_jax.serving.server import Endpoints, most_request_bytes, serve, warm_up
from earl_jax.serving.texts import Texts
from earl_jax.sharding.layout import MeshShape, make_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """A server: its addresses, its engine, and a client of its gRPC."""

    http: str
    address: str
    engine: JetStreamEngine
    texts: Texts
    stub: jetstream_pb2_grpc.OrchestratorStub
    channel: grpc.Channel

    def counts(self) -> dict[str, int]:
        """The threads of this process, its descriptors but those of idle workers, pages in use."""
        manager = self.engine._manager
        assert manager is not None
        return {
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")) - len(self.texts._idle),
            "pages": manager.pages.pool.pages - manager.pages.num_free(0),
        }

    def rss_bytes(self) -> int:
        """The memory of this process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(holds: Callable[[], bool], deadline_s: float = 30.0) -> bool:
    """Waits for a condition; returns False if it does not hold before the deadline."""
    end = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def build_engine(folder: Path, num_slots: int, context_tokens: int) -> tuple:
    """A greedy engine for a checkpoint, on one device, and its parameters."""
    checkpoint, tokenizer = open_checkpoint(folder), load_tokenizer(folder)
    layout = make_layout(MeshShape(), jax.devices()[:1])
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    config = EngineConfig(
        model=checkpoint.model,
        vocab_size=checkpoint.vocab_size,
        num_slots=num_slots,
        num_rows=1,
        chunk_size=1,
        rules=SlotRules(burst=1, end_of_turn_ids=tuple(sorted(ends)), choice_branches=0),
        seed=0,
    )
    rounds = Engine(config, layout)
    weights = load_parameters(checkpoint, layout)
    params = publish(weights, rounds.parameter_shapes, rounds.parameter_shardings).params
    serving = ServingConfig(
        max_prefill_length=min(128, context_tokens),
        context_tokens=context_tokens,
        sampling=Sampling(temperature=0.0),
    )
    return JetStreamEngine(rounds, serving, tokenizer), params


@contextlib.contextmanager
def serving_here(
    folder: Path,
    *,
    num_slots: int = 4,
    context_tokens: int = 128,
    text_timeout_s: float = 10.0,
    **bounds: float,
) -> Iterator[Here]:
    """A server of a checkpoint, in a thread. Its failure is raised at the end."""
    engine, params = build_engine(folder, num_slots, context_tokens)
    texts = Texts(
        load_tokenizer(folder),
        {},
        timeout_s=text_timeout_s,
        most_bytes=most_request_bytes(engine),
    )
    warm_up(engine, params)
    given = {"max_waiting": 64, "max_waiting_per_client": 32, **bounds}
    events: queue.Queue = queue.Queue()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        await serve(
            engine,
            params,
            name="here",
            version=0,
            texts=texts,
            endpoints=Endpoints(host="127.0.0.1", port=0, grpc_port=0, **given),
            on_ready=lambda *found: events.put(
                (*found, lambda: loop.call_soon_threadsafe(stop.set))
            ),
            stop=stop,
        )

    def in_thread() -> None:
        try:
            asyncio.run(run())
            events.put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            events.put(error)

    with contextlib.closing(texts):
        thread = threading.Thread(target=in_thread)
        thread.start()
        found = events.get(timeout=120)
        if isinstance(found, BaseException):
            raise found
        http, address, stop = found
        channel = grpc.insecure_channel(address)
        try:
            yield Here(
                http=http,
                address=address,
                engine=engine,
                texts=texts,
                stub=jetstream_pb2_grpc.OrchestratorStub(channel),
                channel=channel,
            )
        finally:
            channel.close()
            stop()
            thread.join(60)
    ended = events.get(timeout=1)
    if ended is not None:
        raise ended
