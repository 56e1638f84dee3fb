# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An agent that learns through the endpoint, and what a request costs the run's process.

    uv run python -m benchmarks.agents [--write]

The shop of benchmarks/tools.py, once with the environment "tools" and once with an agent
(docs/howto/agent.md) that asks the endpoint and calls the tool itself: same tasks, settings and
seeds. And sessions whose replies come at once, asked by a process of its own: processor time of the
process with the endpoint, all of it, for each request.
"""

import asyncio
import concurrent.futures
import functools
import importlib
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from benchmarks.runs import play
from benchmarks.tools import Shop, described, settings_of, write_files
from earl_jax.envs.agents.agent import Agent
from earl_jax.telemetry.metrics import read_metrics

PAGE = Path(__file__).with_suffix(".md")
SEEDS, JOBS = 3, 2
AGENT = {"name": "agent", "args": {"agent": "benchmarks.agents:shop"}}
# Sessions, requests of each, and characters of the first message.
LOADS = ((64, 20, 100), (64, 20, 20_000), (512, 5, 100))

_urls: list[str] = []
_all_over = asyncio.Event()


def shop(base_url: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Asks how many there are of an item, makes the calls of the tool, and pays the answer."""
    stock, numbers = Shop(row=dict(row)), {"tool_calls": 0.0, "failed_tool_calls": 0.0}
    talk: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    while True:
        message = _ask(base_url, talk)
        calls = message.get("tool_calls", [])
        if not calls:
            reward = stock.reward(message["content"]) - 0.5 * numbers["failed_tool_calls"]
            return {"reward": reward, **numbers}
        talk.append(message)
        for call in calls:
            numbers["tool_calls"] += 1
            try:
                text = stock.count(**json.loads(call["function"]["arguments"]))
            except (TypeError, KeyError) as error:
                numbers["failed_tool_calls"] += 1
                text = f"error: {error}"
            talk.append({"role": "tool", "name": "count", "content": text})


_tools = functools.cache(described)


def _ask(base_url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"messages": messages, "tools": _tools()}).encode()
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, head)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def learn(seed: int, env: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rewards of a run's evaluations, and its median seconds of a rollout."""
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), seed)
        settings = settings_of(Path(name), seed)
        steps = play({**settings, "env": env or settings["env"]}, Path(name) / "run")
        rows = [row for row in read_metrics(Path(name) / "run/metrics.jsonl") if row.get("eval")]
    rewards = {f"reward at {row['step']}": row["eval"]["reward_mean"] for row in rows}
    seconds = [row["stage_s"]["rollout"] for row in steps[len(steps) // 2 :]]
    return {**rewards, "s a rollout": statistics.median(seconds)}


async def waits(base_url: str) -> float:
    """Is an agent whose requests another process makes."""
    _urls.append(base_url)
    await _all_over.wait()
    return 1.0


async def cost(sessions: int, requests: int, size: int) -> dict[str, float]:
    """Returns the processor time of a request."""
    _urls.clear()
    _all_over.clear()
    playing = [asyncio.ensure_future(_play()) for _ in range(sessions)]
    while len(_urls) < sessions:
        await asyncio.sleep(0.01)
    begun_s = time.process_time()
    words = (json.dumps(_urls), str(requests), str(size))
    line = (sys.executable, "-m", "benchmarks.agents", "--clients", *words)
    clients = await asyncio.create_subprocess_exec(*line)
    assert await clients.wait() == 0, "the clients failed"
    _all_over.set()
    await asyncio.gather(*playing)
    used_s = time.process_time() - begun_s
    each = {"sessions": sessions, "characters before": size}
    return each | {"ms of processor time a request": 1e3 * used_s / (sessions * requests)}


async def costs() -> list[dict[str, float]]:
    """Returns the costs of all loads."""
    return [await cost(*load) for load in LOADS]


async def _play() -> None:
    environment = Agent(agent="benchmarks.agents:waits")
    await environment.start()
    while not (await environment.step("a reply of some words")).done:
        pass


async def ask_all(urls: list[str], requests: int, size: int) -> None:
    """Asks at all addresses, at each again and again, with conversations that grow."""

    async def ask(url: str) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        talk = [{"role": "system", "content": "x" * size}, {"role": "user", "content": "hello"}]
        for number in range(requests):
            body = json.dumps({"model": "policy", "messages": talk})
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            (length,) = (line.split(":")[1] for line in lines if line.startswith("content-length"))
            message = json.loads(await reader.readexactly(int(length)))["choices"][0]["message"]
            talk += [message, {"role": "user", "content": f"go on {number}"}]
        writer.close()

    await asyncio.gather(*map(ask, urls))


def main() -> None:
    """Runs all and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--clients", nargs=3, metavar=("URLS", "REQUESTS", "SIZE"))
    flags = parser.parse_args()
    if flags.clients:
        urls, requests, size = map(json.loads, flags.clients)
        return asyncio.run(ask_all(urls, requests, size))
    show(table(asyncio.run(costs())), PAGE, write=flags.write, name="cost")
    runs = [(seed, env) for seed in range(SEEDS) for env in ({}, AGENT)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        learnt = list(pool.map(lambda run: learn(*run), runs))
    rows = [
        {"environment": "agent" if env else "tools", "seed": seed, **each}
        for (seed, env), each in zip(runs, learnt, strict=True)
    ]
    show(table(rows), PAGE, write=flags.write, name="learning")
    return None


if __name__ == "__main__":
    # By its name, by which the agents are found too.
    importlib.import_module("benchmarks.agents").main()
