# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of a full disk or of damaged files, in orbax: one error, not hundreds of lines."""

import functools
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from earl_jax.settings.errors import disk_in_words

# What asyncio says to a write that ends when the loop of its save is closed.
_LATE = "Event loop is closed"


@functools.cache
def say_disk_errors_once() -> None:
    """Leaves out what orbax, asyncio and tensorstore write of a checkpoint that failed.

    `Checkpoints.look` and `wait` raise its error, and all that read one.
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
    """Hands an error on, unless it is of work that orbax gave up when another part had failed.

    A write that ends then finds its loop closed; a read that is waiting says that it failed too.
    """
    is_late = isinstance(found.exc_value, RuntimeError) and _LATE in str(found.exc_value)
    code = getattr(found.object, "cr_code", None)
    if not is_late and not (code and "orbax" in Path(code.co_filename).parts):
        before(found)
