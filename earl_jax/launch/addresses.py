# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Addresses of this host, and of the coordinator: "HOST:PORT", at which process 0 listens."""

import contextlib
import ipaddress
import socket
import sys
from typing import Any

from earl_jax.settings.errors import InputError

# What a socket takes: the family, and the host and port.
Address = tuple[socket.AddressFamily, tuple[Any, ...]]
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def host_and_port(coordinator: str) -> tuple[str, int]:
    """Returns the parts of "HOST:PORT". Raises InputError for what it is not."""
    host, _, port = coordinator.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or is_bare or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"config.distributed.coordinator is {coordinator!r}; write it as HOST:PORT, such as "
            "'node0:8476', or '[fd00::1]:8476' with an IPv6 address"
        )
    return host.strip("[]"), int(port)


def addresses_here(host: str, port: int) -> list[Address]:
    """Returns those addresses of a name at which other hosts reach this one; [] for none.

    None where no other host would reach it there: the name is no address of this host (behind a
    NAT, or a DNS that does not know it yet), or /etc/hosts makes it a loopback one.
    """
    return [
        each
        for each in _addresses(host, port)
        if _is_here(each)
        and (host in _LOOPBACK or not ipaddress.ip_address(each[1][0]).is_loopback)
    ]


def listen(coordinator: str, here: list[Address], backlog: int) -> list[socket.socket]:
    """Returns sockets that listen at these addresses of the coordinator; [] is all interfaces.

    Raises:
        OSError: the port is taken.
    """
    _, port = host_and_port(coordinator)
    if not here:
        print(
            f"warning: config.distributed.coordinator is {coordinator!r}, which is no address of "
            f"{socket.gethostname()} that other hosts reach: process 0 listens on all interfaces. "
            "Give one, to listen there alone",
            file=sys.stderr,
        )
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(address[:2], family=family, backlog=backlog))
            for family, address in here or [(socket.AF_INET, ("", port))]
        ]
        stack.pop_all()
    return listeners


def address_towards(host: str, port: int) -> str:
    """Returns the address of this host on the network of another one; "" for a loopback one."""
    for family, address in _addresses(host, port):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: the kernel chooses the interface.
            probe.connect(address)
            own = probe.getsockname()[0]
            if not ipaddress.ip_address(own).is_loopback:
                return own
    return ""


def _addresses(host: str, port: int) -> list[Address]:
    """Returns the addresses of a name as sockets take them; none if it is not known here."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    # A name on two lines of /etc/hosts has its address twice.
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _is_here(where: Address) -> bool:
    """Returns True for an address of this host: one that a socket can be bound to."""
    family, address = where
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
