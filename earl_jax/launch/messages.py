# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Messages in JSON between all processes of a run, gathered by a program on a device of each."""

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PROCESS = "process"
# Bytes of a message that come with its size; most messages have no more, and take one program.
HEAD_BYTES = 1020
# Encloses what waits for the other processes, and ends it where they do not come in time.
Limited = Callable[[], contextlib.AbstractContextManager[None]]


class ToldError(RuntimeError):
    """Raised in every process at a gather: some processes cannot go on.

    `errors` are theirs, by the number of the process, each of "who", "words" and "is_mistake".
    """

    def __init__(self, errors: dict[int, dict[str, Any]]) -> None:
        super().__init__("; ".join(error["words"] for error in errors.values()))
        self.errors = errors

    @property
    def is_mistake(self) -> bool:
        """True if all of them are mistakes in what was given."""
        return all(error["is_mistake"] for error in self.errors.values())

    def in_words(self, count: int) -> str:
        """Returns the errors and who has them; one that all `count` processes have, once."""
        words = {error["words"] for error in self.errors.values()}
        if len(words) == 1 and len(self.errors) == count:
            return words.pop()
        return "; ".join(f"{error['who']}: {error['words']}" for error in self.errors.values())


def exchange(message: dict[str, Any], limited: Limited) -> list[dict[str, Any]]:
    """Returns the messages of all processes, process by process; all of them call it."""
    data = np.frombuffer(json.dumps(message).encode(), np.uint8)
    size = np.array([len(data)], np.int32).view(np.uint8)
    rows = _gather_rows(_padded(np.concatenate([size, data[:HEAD_BYTES]]), 4 + HEAD_BYTES), limited)
    sizes, heads = rows[:, :4].copy().view(np.int32)[:, 0], rows[:, 4:]
    if (rest := int(sizes.max()) - HEAD_BYTES) > 0:
        # Padded to a power of two, so that few programs are compiled.
        tails = _gather_rows(_padded(data[HEAD_BYTES:], 1 << (rest - 1).bit_length()), limited)
        heads = np.concatenate([heads, tails], axis=1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(heads, sizes, strict=True)]


def _padded(row: np.ndarray, width: int) -> np.ndarray:
    return np.pad(row, (0, width - len(row)))


def _gather_rows(row: np.ndarray, limited: Limited) -> np.ndarray:
    """Returns the rows of all processes, [processes, ...]."""
    mesh = _one_device_each()
    own = jax.device_put(row[None], mesh.local_devices[0])
    rows = jax.make_array_from_single_device_arrays(
        (mesh.size, *row.shape), NamedSharding(mesh, PartitionSpec(_PROCESS)), [own]
    )
    with limited():
        every = jax.block_until_ready(_to_all(mesh)(rows))
    return np.asarray(every.addressable_data(0))


@functools.lru_cache(maxsize=1)
def _one_device_each() -> Mesh:
    """Returns a mesh of the first device of each process."""
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    first = {device.process_index: device for device in reversed(devices)}
    return Mesh(np.array([first[n] for n in sorted(first)], dtype=object), (_PROCESS,))


@functools.lru_cache(maxsize=2)
def _to_all(mesh: Mesh) -> Any:
    """Returns the program that gathers every row in every process."""
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
