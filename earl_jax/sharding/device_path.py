# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the devices of different processes can send to each other, found out by trying.

TPUs and GPUs can, and CPUs with Gloo. Where they cannot, no program runs over several processes:
what goes from one to another goes by `host_exchange.py`, and each process computes for itself.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from earl_jax.sharding.host_channel import open_channel
from earl_jax.sharding.waiting import PeerLost, wait_for

Made = TypeVar("Made")

_PROCESS = "process"
_WHAT = "whether the processes' devices reach each other"
_logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def missing_device_path() -> str:
    """Why devices of different processes cannot send to each other, in XLA's words; else "".

    Every process asks alike, and hears the same: what is missing in one is missing. The program
    that tries it is compiled by all before it is run by any, so that none waits for one that has no
    such program.

    Raises:
        PeerLost: another process ended, or does not answer.
    """
    if jax.process_count() == 1:
        return ""
    rows, mesh = one_row_each(np.zeros(1, np.int32)), one_device_each()
    program, why = _if_all_can(lambda: to_all(mesh).lower(rows).compile())
    if why:
        return why
    timeout_s = open_channel().timeout_s
    _, why = _if_all_can(lambda: wait_for(program(rows), what=_WHAT, timeout_s=timeout_s))
    return why


def _if_all_can(attempt: Callable[[], Made]) -> tuple[Any, str]:
    """What came of it here, and the words of the first process where it failed; "" for none."""
    made, words = None, ""
    try:
        made = attempt()
    except (jax.errors.JaxRuntimeError, PeerLost) as error:
        sampled = str(error.__cause__ or error).splitlines()
        words = sampled[0] if sampled else type(error).__name__
    told = open_channel().gather(words.encode(), _WHAT)
    return made, next(filter(None, (each.decode() for each in told)), "")


@functools.lru_cache(maxsize=1)
def warn_once(why: str) -> None:
    """The first process says, for all, what the way by the hosts costs and what changes it."""
    if jax.process_index() == 0:
        _logger.warning(
            "%s. What goes from one to another is read to the hosts, and all of it passes through "
            "process 0: far slower than devices send. It is counted, in dispatch_host_bytes and "
            "publish_host_bytes of metrics.jsonl; config.dispatch.forbid_host_bytes = True makes "
            "it an error",
            lack_of(why),
        )


def lack_of(why: str) -> str:
    """What is missing, in a sentence, and what would help."""
    platform = jax.devices()[0].platform
    cure = "; JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo lets them" if platform == "cpu" else ""
    return (
        f"the {platform} devices of one process cannot send to those of others "
        f"({why.rstrip('.')}{cure})"
    )


def one_row_each(row: np.ndarray) -> jax.Array:
    """This process's row of an array that has one of each process, [processes, ...]."""
    mesh = one_device_each()
    own = jax.device_put(row[None], mesh.local_devices[0])
    return jax.make_array_from_single_device_arrays(
        (mesh.size, *row.shape), NamedSharding(mesh, PartitionSpec(_PROCESS)), [own]
    )


@functools.lru_cache(maxsize=1)
def one_device_each() -> Mesh:
    """The first device of each process."""
    first = {device.process_index: device for device in reversed(all_devices())}
    return Mesh(np.array([first[n] for n in sorted(first)], dtype=object), (_PROCESS,))


@functools.lru_cache(maxsize=2)
def to_all(mesh: Mesh) -> Any:
    """The program that gives every row to every process."""
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def all_devices() -> list[Any]:
    """Process by process, and in each of them in the order of `jax.devices()`."""
    return sorted(jax.devices(), key=lambda device: device.process_index)
