# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and milliseconds of CPU of messages between the processes of a run, by process 0.

    uv run python -m benchmarks.messages [--write]

This process is process 0, with the product's connections and its lists; one other process stands
for all others, with a connection for each. Messages are made as the loops make them, of random
episodes. With --write the table goes into messages.md.
"""

import dataclasses
import functools
import itertools
import json
import multiprocessing
import random
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from earl_jax.launch.messages import Line, accept, as_sent, error_alone, exchange_lines, join
from earl_jax.launch.open_files import allow_connections
from earl_jax.rollout.end import End
from earl_jax.rollout.gather import facts_of
from earl_jax.rollout.results import Rollout
from earl_jax.rollout.stats import RolloutStats
from earl_jax.telemetry.episodes import trajectory_lines
from earl_jax.trajectory import Trajectory, Turn

PAGE = Path(__file__).with_suffix(".md")
HERE, TOKEN = "127.0.0.1", "token"
COUNTS = (2, 8, 128, 1000)
# An episode has as many turns of both sides, of so many tokens each.
EPISODES, TURNS, TOKENS = 8, 4, 64
SIGNAL, STEP = "a signal to stop", "the end of a step"
ROLLOUT, WRITTEN = "the end of a rollout", "the episodes to write down"
METRICS = ("loss", "policy_loss", "kl", "entropy", "grad_norm", "clip_fraction", "tokens")
# Different messages; of more processes they are repeated, farther apart than zlib looks back.
DIFFERENT = 16
# More bytes than that are not sent, and messages are exchanged until so many were.
MOST_BYTES, ENOUGH_BYTES = 6 * 10**9, 5 * 10**7


def make_trajectory(number: int, rng: random.Random) -> Trajectory:
    """Returns an episode of random tokens in groups of eight."""
    turns = []
    for author in ("environment", "policy") * TURNS:
        ids = tuple(rng.randrange(150_000) for _ in range(TOKENS))
        text = " ".join(rng.choice(("the", "move", "is", "left", "7", "not")) for _ in ids)
        sampled = {}
        if author == "policy":
            sampled["logprobs"] = tuple(-rng.expovariate(2.0) for _ in ids)
            sampled["versions"] = (rng.randrange(3),) * TOKENS
        turns.append(Turn(author=author, text=text, token_ids=ids, **sampled))
    return Trajectory(
        episode=number,
        group=number // 8,
        role="",
        turns=tuple(turns),
        turn_rewards=tuple(rng.random() for _ in range(TURNS)),
        stop_reason=rng.choice(("done", "max_turns")),
        row=number % EPISODES,
        metrics={"solved": float(rng.random() < 0.5)},
        kind=number // 8,
    )


def make_value(what: str, index: int) -> Any:
    """Returns what this process gathers."""
    rng = random.Random(index)
    if what == SIGNAL:
        return ""
    if what == STEP:
        # All that train have the same metrics, and each its own speeds (`gather_costs`).
        updates = [{name: random.Random(name).random() for name in METRICS}]
        return [updates, [rng.random() * 1e4, rng.random() * 1e4, rng.random()], [0, 0]]
    first = index * EPISODES
    trajectories = [make_trajectory(first + n, rng) for n in range(EPISODES)]
    if what == WRITTEN:
        lines = trajectory_lines(trajectories)
        return [[each.episode, line] for each, line in zip(trajectories, lines, strict=True)]
    counts = dict.fromkeys(("rounds", "rollout_tokens", "prefill_tokens", "decode_rows"), 0)
    stats = RolloutStats(**{name: rng.randrange(10_000) for name in counts}, full_s=rng.random())
    session: Any = None
    rollout = Rollout(trajectories=trajectories, session=session, rows=[], stats=stats)
    placement = {"rollout": ["data=8", 64, 512, False], "train": ["data=8", 1, "none"]}
    placement |= {"max_tokens": 4096, "calm_steps": 3, "row_shapes": {}}
    return [facts_of(rollout, placement, None), dataclasses.asdict(End())]


@functools.cache
def make_messages(what: str) -> list[bytes]:
    """Returns the messages of different processes."""
    return [json.dumps({"value": make_value(what, n)}).encode() for n in range(DIFFERENT)]


def messages_of(what: str, count: int) -> list[bytes]:
    """Returns the message of each of `count` processes."""
    return list(itertools.islice(itertools.cycle(make_messages(what)), count))


def be_the_others(port: int, jobs: Sequence[tuple[str, int, int]]) -> None:
    """Says what, of so many processes but 0, and hears the lists, so many times, job by job.

    The last process alone unpacks the list that it hears, as each would by itself.
    """
    for count, of_count in itertools.groupby(jobs, key=lambda job: job[1]):
        lines = [join(HERE, port, TOKEN, index) for index in range(1, count)]
        for what, _, times in of_count:
            _, *own = messages_of(what, count)
            for _ in range(times):
                for line, message in zip(lines, own, strict=True):
                    line.send(message)
                for line in lines[:-1]:
                    if not (received := line.receive()).startswith(b"["):
                        line.lines.read(int(received))
                lines[-1].receive_list()
        for line in lines:
            line.close()


def time_exchange(
    lines: Sequence[Line], what: str, messages: Sequence[bytes], times: int, *, is_plain: bool
) -> float:
    """Returns the milliseconds of this process's CPU in an exchange, of so many the median."""
    ms = []
    for _ in range(times):
        start_s = time.process_time()
        if is_plain:
            every = b"[" + b",".join([messages[0], *(line.receive() for line in lines)]) + b"]"
            sent = as_sent(every, 1)
            for line in lines:
                line.connection.sendall(sent)
        else:
            answer = error_alone if what == WRITTEN else None
            exchange_lines(lines, messages[0], is_first=True, answer=answer)
        ms.append(1000 * (time.process_time() - start_s))
    return statistics.median(ms)


def sent_bytes(what: str, count: int, *, is_plain: bool) -> int:
    """Returns the bytes that process 0 sends to all others."""
    messages = messages_of(what, count)
    if what == WRITTEN and not is_plain:
        messages = [error_alone(message) for message in messages]
    every = b"[" + b",".join(messages) + b"]"
    return (count - 1) * len(as_sent(every, 1 if is_plain else count - 1))


def measure(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row for each message among so many processes."""
    rows, jobs = [], []
    for count, what in itertools.product(counts, (SIGNAL, STEP, ROLLOUT, WRITTEN)):
        plain, packed = (sent_bytes(what, count, is_plain=is_plain) for is_plain in (True, False))
        one = len(messages_of(what, count)[0])
        row = {"message": what, "processes": count, "KB of one": one / 1e3}
        row |= {"MB sent, plain": plain / 1e6, "MB sent": packed / 1e6}
        row |= {"CPU ms, plain": None, "CPU ms": None}
        rows.append(row)
        for name, size in (("CPU ms, plain", plain), ("CPU ms", packed)):
            times = max(1, min(500, ENOUGH_BYTES // (size + count * one)))
            if size <= MOST_BYTES:
                jobs.append((row, name, times))
    with socket.create_server((HERE, 0), backlog=max(counts)) as listener:
        port = listener.getsockname()[1]
        given = [(row["message"], row["processes"], times) for row, _, times in jobs]
        arguments = (port, given)
        others = multiprocessing.get_context("fork").Process(target=be_the_others, args=arguments)
        others.start()
        for count, of_count in itertools.groupby(jobs, key=lambda job: job[0]["processes"]):
            lines = accept(listener, TOKEN, count)
            for row, name, times in of_count:
                what, is_plain = row["message"], name != "CPU ms"
                messages = messages_of(what, count)
                row[name] = time_exchange(lines, what, messages, times, is_plain=is_plain)
            for line in lines:
                line.close()
        others.join()
    return rows


def command(arguments: Sequence[str]) -> None:
    """Runs the command."""
    flags = parser_of(__doc__).parse_args(arguments)
    if words := allow_connections(max(COUNTS)):
        sys.exit(words)
    show(table(measure(COUNTS)), PAGE, write=flags.write)


if __name__ == "__main__":
    command(sys.argv[1:])
