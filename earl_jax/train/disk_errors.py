# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of a full disk, in orbax's threads: one error of the run, not hundreds of lines."""

import functools
import logging
import sys
import warnings
from typing import Any

from earl_jax.settings.errors import disk_in_words

# What asyncio says to a write that ends when the loop of its save is closed.
_LATE = "Event loop is closed"


@functools.cache
def say_disk_errors_once() -> None:
    """Leaves out what orbax, asyncio and tensorstore write of a checkpoint that failed.

    `Checkpoints.look` and `wait` raise its error.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_the_disk)
    # Writes of a save that orbax gave up before it began them.
    warnings.filterwarnings("ignore", "coroutine 'async_serialize", RuntimeWarning)
    sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook)


def _is_not_the_disk(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not disk_in_words(error)


def _unraisable(before: Any, found: Any) -> None:
    """Hands an error on, unless a write ended when orbax had given up the others of its save."""
    if not (isinstance(found.exc_value, RuntimeError) and _LATE in str(found.exc_value)):
        before(found)
