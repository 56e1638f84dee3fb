# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes from process to process by their hosts, for what no device can carry.

They lie for a while in the key-value store of the coordination service that `jax.distributed` keeps
in process 0. Every process is connected to that from its first moment on, whatever its backend can
do: it takes no port, no address, no firewall rule and no dependency more. For that all bytes pass
through process 0, as messages of gRPC: a way for those that have no other, and slow.
"""

import contextlib
import functools
import time
from typing import Any

import jax

from earl_jax.sharding._coordination import coordination_client
from earl_jax.sharding.waiting import failed, nothing_came

# gRPC refuses messages of more than 4 MiB unless both ends allow them.
PART_BYTES = 2 * 2**20
# Python hears a signal when a call returns.
_SLICE_S = 1.0
_ROOT = "earl_jax"
_END = f"{_ROOT}/end"


class HostChannel:
    """What this process, number `index` of `count`, tells others and is told.

    Others may let it wait for `timeout_s` seconds. All processes take the same turns in the same
    order; what is put in a turn has a name in it.
    """

    def __init__(self, client: Any, index: int, count: int, timeout_s: float = 1800.0) -> None:
        self.index, self.count, self.timeout_s = index, count, timeout_s
        self._client = client
        self._turn = 0
        # Of arrays: read from this process's devices, and carried to others.
        self.sent_bytes = 0
        self._told: str | None = None

    def next_turn(self) -> int:
        """The number of a new turn; every process takes it alike."""
        self._turn += 1
        return self._turn

    def put(self, turn: int, name: str, data: bytes, what: str) -> None:
        """Leaves at most `PART_BYTES` for one other process to take. `what` is for the error.

        Raises:
            PeerLost: process 0 ended, or cannot be reached.
        """
        self._set(f"{_ROOT}/{turn}/{name}", data, what)

    def take(self, turn: int, name: str, what: str) -> bytes:
        """What another process put, as soon as it is there; it is gone from the store then.

        Raises:
            PeerLost: nothing came for `timeout_s` seconds, or process 0 ended.
        """
        key = f"{_ROOT}/{turn}/{name}"
        data = self._get(key, what)
        self._delete(key, what)
        return data

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """What every process gives here, of any size, process by process.

        Raises:
            PeerLost: as `take`.
        """
        turn, before = self.next_turn(), self._told
        self._told = f"{_ROOT}/{turn}/of/{self.index}"
        parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        self._set(f"{self._told}/parts", str(len(parts)).encode(), what)
        for number, part in enumerate(parts):
            self._set(f"{self._told}/{number}", part, what)
        told = [
            data if n == self.index else self._whole(f"{_ROOT}/{turn}/of/{n}", what)
            for n in range(self.count)
        ]
        # Who has told something in this turn has heard all that was told before.
        if before is not None:
            self._delete(before, what)
        return told

    # Outside of all turns.

    def announce(self, words: str) -> None:
        """Tells all processes what ends the run; they may never come to another turn.

        Nothing happens where one has done so before, or process 0 is gone: then they hear that.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set_bytes(_END, words.encode())

    def announced(self, wait_s: float) -> str | None:
        """What a process has announced, None where none does for so long. From any thread.

        Raises:
            PeerLost: process 0 ended, or cannot be reached.
        """
        try:
            return self._client.blocking_key_value_get_bytes(_END, round(1000 * wait_s)).decode()
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise failed("what ends the run", error) from error

    def _whole(self, key: str, what: str) -> bytes:
        number = int(self._get(f"{key}/parts", what))
        return b"".join(self._get(f"{key}/{n}", what) for n in range(number))

    def _set(self, key: str, data: bytes, what: str) -> None:
        try:
            self._client.key_value_set_bytes(key, data)
        except jax.errors.JaxRuntimeError as error:
            raise failed(what, error) from error

    def _delete(self, key: str, what: str) -> None:
        """The key, and all keys below it."""
        try:
            self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            raise failed(what, error) from error

    def _get(self, key: str, what: str) -> bytes:
        deadline_s = time.monotonic() + self.timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                wait_ms = max(1, round(1000 * min(left_s, _SLICE_S)))
                return self._client.blocking_key_value_get_bytes(key, wait_ms)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise failed(what, error) from error
        raise nothing_came(what, self.timeout_s)


@functools.lru_cache(maxsize=1)
def open_channel() -> HostChannel:
    """This process's channel, the same one each time."""
    return HostChannel(coordination_client(), jax.process_index(), jax.process_count())
