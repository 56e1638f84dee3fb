# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A server under load: tokens/s, time to the first token and per token; and rollouts beside it.

    uv run python -m benchmarks.serving [--slots=16] [--clients=1,4] [--rates=0.5,0.8] [--tiny]
        [--pinned]

`python -m earl_jax.serve` runs in a process of its own with the tiny Qwen2 of benchmarks/rollout on
one CPU device. This process is its clients: over gRPC on loopback, with prompts of ids, all
different, whose replies are drawn at temperature 1 and end after 128 tokens, or by chance
before. Either so many clients send their next request when the last is answered, or requests come
at random times, so many times what the server answered at most before. Behind that, rollouts play
the same prompts on as many slots, through all that an RL rollout goes through, in a third process:
each reply is as long as it was in the load with the most clients. With --pinned the rollouts and
the server have one core, and the clients another.

Prints a Markdown table. The time to the first token is from the sending of the request, waiting for
a slot included; the time per token is that from the first to the last, by the tokens between.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from benchmarks.pages import parser_of
from benchmarks.rollout.engines import OURS, ROOT, Engine, header, row
from benchmarks.rollout.work import make_messages

# Requests a client at most, so that one alone does not take as long as all others.
REQUESTS_A_CLIENT = 16


@dataclasses.dataclass(frozen=True)
class Reply:
    """The seconds at which a request was sent, and at which each token of its reply came."""

    sent_s: float
    token_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a load; (median, 95th percentile) of milliseconds."""

    requests_per_s: float
    tokens_per_s: float
    first_ms: tuple[float, float]
    token_ms: tuple[float, float]


def summarize(replies: Sequence[Reply]) -> Summary:
    """Returns the figures of replies, some of which may have no token, and so no times."""
    answered = [reply for reply in replies if reply.token_s]
    began = min(reply.sent_s for reply in replies)
    seconds = max(reply.token_s[-1] for reply in answered) - began
    first = [reply.token_s[0] - reply.sent_s for reply in answered]
    between = [
        (reply.token_s[-1] - reply.token_s[0]) / (len(reply.token_s) - 1)
        for reply in answered
        if len(reply.token_s) > 1
    ]
    return Summary(
        requests_per_s=len(replies) / seconds,
        tokens_per_s=sum(len(reply.token_s) for reply in answered) / seconds,
        first_ms=_percentiles(first),
        token_ms=_percentiles(between),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    median, high = np.percentile(1000 * np.array(seconds), [50, 95])
    return float(median), float(high)


@contextlib.contextmanager
def serving(folder: Path, flags: argparse.Namespace) -> Iterator[str]:
    """Yields the address of a server, and ends it afterwards."""
    ports = ("--port=0", "--grpc_port=0")
    line = [*on_core(0, flags.pinned), sys.executable]
    line += ["-m", "earl_jax.serve", f"--model={folder}", *ports]
    line += [f"--num_slots={flags.slots}", f"--max_waiting={flags.requests}", "--temperature=1"]
    line += ["--platform=cpu", "--max_prompt_tokens=64", "--max_choice_tokens=0"]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        output = process.stdout.readline()
        ready = re.search(r"\(gRPC: (\S+:\d+)\):", output)
        if not ready:
            sys.exit(f"the server did not start: {output}")
        yield ready[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def on_core(index: int, pinned: bool) -> list[str]:
    """Returns what a command begins with that has one core to itself, where it is `pinned`."""
    return ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[index])] if pinned else []


async def ask(stub: Any, request: Any) -> Reply:
    """One request, to the end of its reply."""
    sent_s, token_s = time.perf_counter(), []
    async for response in stub.Decode(request):
        token_s += [time.perf_counter()] * len(response.stream_content.samples[0].token_ids)
    return Reply(sent_s, tuple(token_s))


async def ask_in_turn(stub: Any, requests: Sequence[Any], clients: int) -> list[Reply]:
    """Each client sends its next request when its last is answered."""
    waiting, replies = collections.deque(enumerate(requests)), {}

    async def client() -> None:
        while waiting:
            number, request = waiting.popleft()
            replies[number] = await ask(stub, request)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [replies[number] for number in range(len(requests))]


async def ask_at_rate(stub: Any, requests: Sequence[Any], per_s: float) -> list[Reply]:
    """Requests come so often on average, each at its own time whatever became of the others."""
    rng, due_s, calls = random.Random("arrivals"), time.perf_counter(), []
    for request in requests:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        calls.append(asyncio.create_task(ask(stub, request)))
        due_s += rng.expovariate(per_s)
    return await asyncio.gather(*calls)


async def load(
    address: str, requests: Sequence[Any], flags: argparse.Namespace
) -> tuple[dict[str, Summary], list[int]]:
    """Returns the figures of each load, and the tokens of the replies of the last in turn."""
    found, lengths, most = {}, [], 0.0
    async with grpc.aio.insecure_channel(address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        await ask_in_turn(stub, requests[: flags.slots], flags.slots)
        for clients in flags.clients:
            replies = await ask_in_turn(stub, requests[: REQUESTS_A_CLIENT * clients], clients)
            lengths = [len(reply.token_s) for reply in replies]
            each = found[f"{clients} client{'s' * (clients > 1)}"] = summarize(replies)
            most = max(most, each.requests_per_s)
        for share in flags.rates:
            replies = await ask_at_rate(stub, requests, share * most)
            found[f"{share * most:.2f} requests/s come"] = summarize(replies)
    return found, lengths


def _line(name: str, found: Summary, rollout: float) -> str:
    times = [f"{ms:,.1f}" for ms in (*found.first_ms, *found.token_ms)]
    tokens = (f"{found.tokens_per_s:,.0f}", f"{found.tokens_per_s / rollout:.2f}")
    return row(name, f"{found.requests_per_s:.2f}", *tokens, *times)


def roll_out(
    ours: Engine,
    output: Sequence[Sequence[Any]],
    lengths: Sequence[int],
    flags: argparse.Namespace,
) -> float:
    """Tokens/s of rollouts of these prompts and lengths: the best run behind one that compiles."""
    messages = [[(message.text, message.ids) for message in messages] for messages in output]
    # A reply of nothing but its end is one of a token here.
    turn_tokens = [max(1, length) for length in lengths]
    job = {"messages": messages[: len(lengths)], "turn_tokens": turn_tokens}
    runs = [ours.ask(job | {"num_slots": flags.slots}) for _ in range(1 + flags.repeats)]
    return max(found["tokens"] / found["seconds"] for found in runs[1:])


def main() -> None:
    """Measures a server load by load, then rollouts, and prints the table."""
    flags = _parse()
    output = [make_messages(f"conversation {i}", 1, 64) for i in range(flags.requests)]
    requests = [
        jetstream_pb2.DecodeRequest(
            max_tokens=flags.tokens, token_content={"token_ids": message.ids}
        )
        for [message] in output
    ]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkpoint"
        command = [sys.executable, "-m", "benchmarks.rollout.ours", str(folder)]
        ours = Engine(OURS, [*on_core(0, flags.pinned), *command])
        # It writes the checkpoint that is served.
        versions, cores = ours.versions(), sorted(os.sched_getaffinity(0))
        with serving(folder, flags) as address:
            if flags.pinned:
                os.sched_setaffinity(0, cores[1:])
            found, lengths = asyncio.run(load(address, requests, flags))
        rollout = roll_out(ours, output, lengths, flags)
        ours.close()
    print(f"{versions}; cores: {len(cores)}; slots: {flags.slots}; tokens: {flags.tokens}.\n")
    columns = ["load", "answered/s", "tokens/s", "of the rollout's", "first token, ms", "95 %"]
    print(header(*columns, "a token, ms", "95 %"))
    print(row("rollout", "", f"{rollout:,.0f}", "1.00", *[""] * 4))
    for name, each in found.items():
        print(_line(name, each, rollout))


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--rates", default="0.5,0.8,1.2", help="of the most that was answered")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that it runs")
    flags = parser.parse_args()
    # Of a load, at most; tokens of a reply; and rollouts, of which the best counts.
    flags.requests, flags.tokens, flags.repeats = 128, 128, 2
    if flags.tiny:
        flags.slots, flags.clients, flags.rates, flags.requests = 2, "1,4", "0.8", 8
        flags.tokens, flags.repeats = 8, 1
    flags.clients = [int(number) for number in flags.clients.split(",")]
    flags.rates = [float(number) for number in flags.rates.split(",")]
    return flags


if __name__ == "__main__":
    main()
