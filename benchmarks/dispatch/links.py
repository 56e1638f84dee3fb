# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the links themselves carry: bare sockets on the hosts of the benchmark between processes.

No program that has so much to send in both directions is faster than these.
"""

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.dispatch.network import Host
from benchmarks.dispatch.processes import EARL_MIB, ROOT, Settings, open_hosts

WAYS = ("half of them to the next", "all to the next", "to others at once", "to others in turn")
# How far the others are to whom a host sends a piece each, as far as there are so many.
_STRIDES = (1, 3, 5, 7)
_START_S = 4.0


class Job(NamedTuple):
    """What host `rank` does: its pieces of so many bytes, the first at `start_s`."""

    rank: int
    addresses: list[str]
    ports: list[int]
    way: str
    num_bytes: int
    start_s: float


def receivers(way: str, rank: int, num: int) -> list[int]:
    """The host that each piece of host `rank` goes to."""
    strides = [stride for stride in _STRIDES if stride < num]
    if way == WAYS[0]:
        return [rank + 1] * len(strides) if rank % 2 == 0 else []
    if way == WAYS[1]:
        return [(rank + 1) % num] * len(strides)
    return [(rank + stride) % num for stride in strides]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A dict for each number of workers, which is even, and each way."""
    num_bytes = int(max(EARL_MIB.values()) * 2**20 / settings.scale)
    for num in settings.workers:
        with contextlib.ExitStack() as stack:
            hosts, limited = open_hosts(stack, num, settings)
            for way in WAYS:
                spans = [_time(hosts, way, num_bytes) for _ in range(settings.repeats)]
                sent = num_bytes * len(receivers(way, 0, num))
                needs_s = sent / (settings.mbit_per_s * 1e6 / 8) if limited else None
                yield {
                    "workers": num,
                    "way": way,
                    "network": f"{settings.mbit_per_s:g} Mbit/s" if limited else "loopback",
                    "window KiB": settings.window_kib if limited else None,
                    "MiB a worker": sent / 2**20,
                    "median ms": 1e3 * statistics.median(spans),
                    "over the link": statistics.median(spans) / needs_s if needs_s else None,
                    "slowest over it": max(spans) / needs_s if needs_s else None,
                    "spans_s": spans,
                }


def _time(hosts: Sequence[Host], way: str, num_bytes: int) -> float:
    addresses, start_s = [host.address for host in hosts], time.time() + _START_S
    ports = _free_ports(len(hosts))
    workers = [
        subprocess.Popen(
            [*host.prefix, sys.executable, "-m", "benchmarks.dispatch.links"]
            + [json.dumps(Job(rank, addresses, ports, way, num_bytes, start_s))],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for rank, host in enumerate(hosts)
    ]
    output = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a worker of the links ended with an error (above)")
    times = [json.loads(each) for each in output]
    return max(end for _, end in times) - min(begin for begin, _ in times)


def _free_ports(num: int) -> list[int]:
    """Different ones, for hosts that may share an address."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in free]


def take_part(job: Job) -> tuple[float, float]:
    """When this host's pieces began to go, and when all had gone and come."""
    num = len(job.addresses)
    wanted = [receivers(job.way, rank, num) for rank in range(num)]
    own = wanted[job.rank]
    senders = [rank for rank in range(num) if job.rank in wanted[rank]]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", job.ports[job.rank])))
        outs = {rank: stack.enter_context(_connect(job, rank)) for rank in dict.fromkeys(own)}
        ins: dict[int, socket.socket] = {}
        for _ in senders:
            peer = stack.enter_context(server.accept()[0])
            ins[peer.recv(1)[0]] = peer
        if (left_s := job.start_s - time.time()) < 0:
            raise TimeoutError(f"the hosts were connected {-left_s:.1f} s too late")
        time.sleep(left_s)
        begin_s = time.time()
        if job.way == WAYS[-1]:
            for turn, receiver in enumerate(own):
                sender = next(rank for rank in senders if wanted[rank][turn] == job.rank)
                ins[sender].sendall(b"r")
                _together(
                    lambda receiver=receiver: _send(outs[receiver], job.num_bytes, waits=True),
                    lambda sender=sender: _receive(ins[sender], job.num_bytes),
                )
        else:
            _together(
                *(
                    lambda rank=rank: _send(outs[rank], own.count(rank) * job.num_bytes)
                    for rank in outs
                ),
                *(
                    lambda rank=rank: _receive(
                        ins[rank], wanted[rank].count(job.rank) * job.num_bytes
                    )
                    for rank in ins
                ),
            )
        return begin_s, time.time()


def _connect(job: Job, rank: int) -> socket.socket:
    while True:
        try:
            out = socket.create_connection((job.addresses[rank], job.ports[rank]))
            break
        except ConnectionRefusedError:
            if time.time() > job.start_s:
                raise
            time.sleep(0.02)
    out.sendall(bytes([job.rank]))
    return out


def _together(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(out: socket.socket, num_bytes: int, *, waits: bool = False) -> None:
    if waits:
        _receive(out, 1)
    out.sendall(bytes(num_bytes))


def _receive(peer: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        got = len(peer.recv(min(num_bytes, 2**20)))
        if not got:
            raise ConnectionError("the other host ended before all had come")
        num_bytes -= got


if __name__ == "__main__":
    print(json.dumps(take_part(Job(*json.loads(sys.argv[1])))))
