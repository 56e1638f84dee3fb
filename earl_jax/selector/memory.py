# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device of programs and arrays, the budget, and errors of a lack of memory."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")
_IN_MOVE = "in a move of arrays from device to device"
# XLA's words for a kernel that takes too much of a core's memory: of a GPU (jax-ml/jax#20008), and
# of a TPU (pytorch/xla#9524), whose devices' memory is called hbm.
_ON_CORE = re.compile(r"Shared memory size limit|memory space (vmem|smem|sflag|cmem)")


def program_bytes(compiled: Any) -> int:
    """Returns bytes per device of a compiled program, by XLA's own memory analysis."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def device_budget(setting: int) -> int | None:
    """Returns the bytes of a device that a stage may use: the setting, else the smallest limit.

    None: the devices report no limit, as CPUs.
    """
    if setting:
        return setting
    each = [device.memory_stats() or {} for device in jax.local_devices()]
    return min((int(one["bytes_limit"]) for one in each if "bytes_limit" in one), default=None)


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if a device, or its compiler, had too little memory, by XLA's status code.

    That of a core is none: no plan leaves a kernel more of it.
    """
    words = str(error)
    is_short = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in words
    return is_short and not _ON_CORE.search(words)


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Notes on an error that memory was too short for source and target of a move at once."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.add_note(_IN_MOVE)
        raise


def is_in_move(error: Exception) -> bool:
    """Returns True for an error of the move of arrays, not of a plan's program."""
    return _IN_MOVE in getattr(error, "__notes__", ())


def unless_out_of_memory(attempt: Callable[[], Result]) -> Result | None:
    """Returns the arrays of an attempt when they are there; None where memory was too short."""
    try:
        return jax.block_until_ready(attempt())
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return None
