# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The way of a single controller: all rows to rank 0, cut by data rank, a copy to each member.

As fast as sockets are: connections stand before the clock runs, nothing is pickled,
rank 0 receives from all at once straight into the place of each part, and sends to all at once from
there; a worker sends from the memory of its device's array and receives into one buffer.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

_CONNECT_S = 60.0


class Controller:
    """Rank 0's connections to all others, or another rank's to rank 0."""

    def __init__(self, rank: int, num: int, address: str, port: int) -> None:
        self.rank, self.num = rank, num
        self.peers: dict[int, socket.socket] = {}
        if rank == 0:
            with socket.create_server((address, port), backlog=num) as server:
                for _ in range(num - 1):
                    peer, _ = server.accept()
                    (other,) = struct.unpack("!i", _receive(peer, bytearray(4)))
                    self.peers[other] = peer
        else:
            peer = _connect(address, port)
            peer.sendall(struct.pack("!i", rank))
            self.peers[0] = peer
        for peer in self.peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.through_bytes = 0

    def gather_and_scatter(self, own: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
        """This rank's part of all rows.

        Args:
            own: the rows that this rank holds, rank by rank in the order of all rows.
            parts: which rows each rank wants.
        """
        rows = len(own)
        if self.rank:
            self.peers[0].sendall(_bytes(own))
            wanted = parts[self.rank]
            part = np.empty((wanted.stop - wanted.start, *own.shape[1:]), own.dtype)
            _receive(self.peers[0], _bytes(part))
            return part
        whole = np.empty((rows * self.num, *own.shape[1:]), own.dtype)
        whole[:rows] = own
        self._with_all(
            lambda other, peer: _receive(peer, _bytes(whole[other * rows : (other + 1) * rows]))
        )
        self._with_all(lambda other, peer: peer.sendall(_bytes(whole[parts[other]])))
        self.through_bytes = (
            whole.nbytes
            - own.nbytes
            + sum(whole[part].nbytes for other, part in enumerate(parts) if other)
        )
        return whole[parts[0]]

    def _with_all(self, do: Callable[[int, socket.socket], object]) -> None:
        threads = [threading.Thread(target=do, args=item) for item in self.peers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _connect(address: str, port: int) -> socket.socket:
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=None)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")


def _receive(peer: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    view, at = memoryview(into), 0
    while at < len(view):
        got = peer.recv_into(view[at:])
        if not got:
            raise ConnectionError("the other end closed the connection")
        at += got
    return into
