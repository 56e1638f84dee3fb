# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the bytes that a stage reads from the devices to the host.

JAX has one door for that: the property `_value` of the class of its arrays. It is wrapped once,
when the first counter opens. On jax 0.10.2 and 0.12.0 (CPU) it catches `jax.device_get`,
`np.asarray`, `float`, `tolist`, printing, iteration over a sharded array, and the reads inside a
`jax.device_put` between meshes. A value that the array has kept on the host since an earlier read
is not counted again.

Reads that are not counted:

- numpy's buffer protocol on CPU: `np.asarray(shard.data)` and `memoryview(shard.data)` share the
  memory of a single-device array whose dtype numpy has itself. `jax.device_get(shard.data)` reads
  the same bytes and is counted;
- dlpack, on every backend;
- host callbacks from compiled code (`pure_callback`, `io_callback`, `debug.callback`,
  `debug.print`);
- copies to a host memory kind, and `copy_to_host_async` whose value is never taken;
- copies that a driver stages through host memory on its own.

So a count of zero means that no counted read happened. On the data path the others, but for the
last, are forbidden by a check of the source text (tests/test_host_byte_lint.py), which names the
few functions that need them. On CPU an array on one device is read in place and never kept, so
each read counts.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.settings.errors import RunError

_logger = logging.getLogger(__name__)

_DOOR = "_value"
_KEPT = "_npy_value"

_lock = threading.RLock()
_works: bool | None = None
# Replaced as a whole under the lock, and read without it at every device-to-host read.
_open_counters: tuple["HostByteCounter", ...] = ()


class HostByteCounter:
    """Counts device-to-host reads inside its `with` block.

    Counts those of the thread that entered it. Counters nest. One that is entered again goes on
    counting.

    Example: `with HostByteCounter() as counter: jax.device_get(loss)` for a float32 scalar leaves
    `counter.num_bytes` 4.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int | None:
        """Bytes read so far; None, never a made-up zero, where `available()` is False."""
        return self._num_bytes if available() else None

    def __enter__(self) -> Self:
        if available():
            self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _open(self) -> None:
        global _open_counters
        with _lock:
            self._thread = threading.get_ident()
            _open_counters = (*_open_counters, self)

    def _close(self) -> None:
        global _open_counters
        with _lock:
            _open_counters = tuple(other for other in _open_counters if other is not self)

    def _record(self, num_bytes: int) -> None:
        if self._thread == threading.get_ident():
            with _lock:
                self._num_bytes += num_bytes


def available() -> bool:
    """Returns True if this JAX lets reads be counted; tried with known arrays on first use.

    Where it is False a warning is logged once and the metric must be left out.
    """
    global _works
    if _works is None:
        with _lock:
            if _works is None:
                _works = _install_and_try()
                if not _works:
                    _logger.warning(
                        "host bytes cannot be counted on jax %s: its arrays are not read through "
                        "%s; the metric is left out",
                        jax.__version__,
                        _DOOR,
                    )
    return _works


def _install_and_try() -> bool:
    array_class: Any = type(jnp.zeros(()))
    door = getattr(array_class, _DOOR, None)
    if not (isinstance(door, property) and door.fget and hasattr(array_class, _KEPT)):
        return False
    setattr(array_class, _DOOR, property(_counting(door.fget), doc=door.__doc__))
    if _count_is_right():
        return True
    setattr(array_class, _DOOR, door)
    return False


def _counting(read: Any) -> Any:
    def counting_read(array: Any) -> np.ndarray:
        counters = _open_counters
        if not counters or getattr(array, _KEPT) is not None:
            return read(array)
        value = read(array)
        for counter in counters:
            counter._record(array.nbytes)
        return value

    return counting_read


def _count_is_right() -> bool:
    """Reads 256 + 1 float32 and 3 bfloat16: 1034 bytes."""
    counter = HostByteCounter()
    counter._open()
    try:
        with jax.transfer_guard("allow"):
            jax.device_get(jnp.zeros((256,), jnp.float32))
            float(jnp.zeros((), jnp.float32))
            np.asarray(jnp.zeros((3,), jnp.bfloat16))
    finally:
        counter._close()
    return counter._num_bytes == 1034


@contextlib.contextmanager
def only_on_devices() -> Iterator[HostByteCounter]:
    """Counts the bytes that come to the host inside, and allows none.

    It is no setting: experience and weights have a way over the devices on every platform.

    Raises:
        RunError: some came.
    """
    with HostByteCounter() as counter, jax.transfer_guard_device_to_host("disallow_explicit"):
        yield counter
    if counter.num_bytes:
        raise RunError(
            f"{counter.num_bytes} bytes of experience or weights came through the host: a stage "
            "reads arrays where it must only move them"
        )
