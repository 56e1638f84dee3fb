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
from earl_jax.engine.config import EngineConfig, Sampling
from earl_jax.engine.engine import Policy
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.driver import Driver
from earl_jax.serving.endpoints import Endpoints, most_request_bytes
from earl_jax.serving.served_engine import ServedEngine, build_engine, rollout_config
from earl_jax.serving.server import serve
from earl_jax.serving.texts import Texts
from earl_jax.serving.tokenizer import ServedTokenizer
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.continuations import pages_in_use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """A server: its addresses, its driver, and a client of its gRPC."""

    http: str
    address: str
    driver: Driver
    texts: Texts
    stub: jetstream_pb2_grpc.OrchestratorStub
    channel: grpc.Channel

    def counts(self) -> dict[str, int]:
        """The threads of this process, its descriptors but those of idle workers, pages in use."""
        return {
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")) - len(self.texts._idle),
            "pages": pages_in_use(self.driver),
        }

    def rss_bytes(self) -> int:
        """The memory of this process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(holds: Callable[[], bool], deadline_s: float = 300.0) -> bool:
    """Waits for a condition; returns False if it does not hold before the deadline."""
    end = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def make_driver(folder: Path, num_slots: int, context_tokens: int) -> Driver:
    """Greedy replies of a checkpoint, on one device."""
    checkpoint, tokenizer = open_checkpoint(folder), ServedTokenizer(load_tokenizer(folder))
    layout = make_layout(MeshShape(), jax.devices()[:1])
    rollout = rollout_config(num_slots, EngineConfig.page_size)
    model, vocab_size = checkpoint.model, checkpoint.vocab_size
    engine = build_engine(
        rollout, model, vocab_size, layout, ends=tokenizer.ends, choice_branches=0, seed=0
    )
    weights = load_parameters(checkpoint, layout)
    params = publish(weights, engine.parameter_shapes, engine.parameter_shardings).params
    serving = ServingConfig(
        max_prompt_tokens=min(128, context_tokens),
        context_tokens=context_tokens,
        sampling=Sampling(temperature=0.0),
    )
    served = ServedEngine(engine=engine, rollout=rollout, serving=serving, tokenizer=tokenizer)
    return Driver(served, Policy(params=params, version=0))


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
    driver = make_driver(folder, num_slots, context_tokens)
    texts = Texts(
        load_tokenizer(folder),
        {},
        timeout_s=text_timeout_s,
        most_bytes=most_request_bytes(driver.served),
    )
    driver.warm_up()
    given = {"max_waiting": 64, "max_waiting_per_client": 32, **bounds}
    events: queue.Queue = queue.Queue()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        await serve(
            driver,
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
                driver=driver,
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
