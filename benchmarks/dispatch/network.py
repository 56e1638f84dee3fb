# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: a network namespace each, and a switch with links of a set rate.

Needs root and iproute2. Everything is in namespaces of its own and goes with them; the machine's
own network is not touched.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_SUBNET = "10.77.0"
# A switch's buffer for each port. Sixteen senders to one receiver overrun a small one, and what is
# measured then is how TCP recovers.
_QUEUE_BYTES = 8 * 2**20
_BURST_BYTES = 64 * 2**10


class Host:
    """A place for a worker: this machine as it is, or a namespace behind a limited link."""

    def __init__(self, address: str, prefix: Sequence[str] = ()):
        self.address, self.prefix = address, tuple(prefix)


@contextlib.contextmanager
def namespaces(num: int, mbit_per_s: float, window_kib: int) -> Iterator[list[Host]]:
    """`num` hosts behind links of this rate, in each direction, on a switch without a limit.

    A connection has `window_kib` KiB under way at most; 0 leaves that to the kernel. Left to
    itself TCP fills the queues, a second of the link's time. Acknowledgements and words of a few
    bytes then wait behind data that goes the same way, and a link that is busy in both directions
    carries three quarters of its rate (dispatch.md).

    Raises:
        RuntimeError: namespaces or limits cannot be made here; says what failed.
    """
    name = f"earl{os.getpid()}"
    switch = f"{name}sw"
    made: list[str] = []
    try:
        _run(f"ip netns add {switch}")
        made.append(switch)
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for n in range(num):
            host, port = f"{name}h{n}", f"port{n}"
            _run(f"ip netns add {host}")
            made.append(host)
            _run(f"ip -n {switch} link add {port} type veth peer name eth0 netns {host}")
            _run(f"ip -n {switch} link set {port} master bridge up")
            _run(f"ip -n {host} addr add {_SUBNET}.{n + 1}/24 dev eth0")
            _run(f"ip -n {host} link set eth0 up")
            _run(f"ip -n {host} link set lo up")
            for memory in ("tcp_rmem", "tcp_wmem") if window_kib else ():
                limits = f"net.ipv4.{memory}=4096 16384 {window_kib * 2**10}"
                _run(f"ip netns exec {host} sysctl -qw", limits)
            limit = f"tbf rate {mbit_per_s}mbit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
            _run(f"tc -n {host} qdisc add dev eth0 root {limit}")
            _run(f"tc -n {switch} qdisc add dev {port} root {limit}")
            # `ip netns exec` shows this in place of /etc/hosts: a host's own name is its address.
            folder = Path("/etc/netns") / host
            folder.mkdir(parents=True, exist_ok=True)
            own = f"127.0.0.1 localhost\n{_SUBNET}.{n + 1} {host}\n"
            (folder / "hosts").write_text(own)
        yield [
            Host(
                f"{_SUBNET}.{n + 1}",
                (
                    *f"ip netns exec {name}h{n} unshare --uts".split(),
                    *("sh", "-c", 'hostname "$0" && exec "$@"', f"{name}h{n}"),
                ),
            )
            for n in range(num)
        ]
    finally:
        for namespace in reversed(made):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def interface_bytes() -> tuple[int, ...]:
    """Returns the bytes that this host's link has received and sent, headers included."""
    counters = Path("/sys/class/net/eth0/statistics")
    return tuple(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def _run(command: str, *words: str) -> None:
    try:
        done = subprocess.run([*command.split(), *words], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
