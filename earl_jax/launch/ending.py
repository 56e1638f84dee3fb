# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The processes of a run end together, in words, when one of them cannot go on."""

import contextlib
import sys
import traceback
from collections.abc import Iterator

import jax

from earl_jax.launch.cluster import Cluster, processes_only
from earl_jax.launch.distributed import RestartNeeded, end_as_lost, end_process
from earl_jax.launch.messages import ProcessesFailed
from earl_jax.settings.errors import InputError, RunError, disk_in_words
from earl_jax.telemetry.timing import stage_now

# The others may be in a program that does not gather: then they lose this process.
_TELL_S = 10.0


@contextlib.contextmanager
def end_together() -> Iterator[None]:
    """Ends all processes at an exception in one of them, with one message that names its host.

    The process tells the others, which receive it where they gather next. A mistake in what was
    given (an InputError) ends all with status 2, and the first process says what it is. At any
    other exception each says which process failed, and ends with status 1. A process of one lets
    the exception pass.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        processes = processes_only(_TELL_S)
        # On CPUs a program that runs at once raises ValueError for a lost process (jax 0.10.2).
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            end_as_lost(processes.who, _first_line(error))
        failed = error if isinstance(error, ProcessesFailed) else _tell(processes, error)
        words = failed.in_words(processes.count)
        if not failed.is_mistake:
            end_process(words)
        if not processes.is_first:
            sys.exit(2)
        raise InputError(words) from error


def _tell(processes: Cluster, error: Exception) -> ProcessesFailed:
    """Tells the other processes of an error; returns those of all."""
    if isinstance(error, InputError):
        return processes.tell(str(error), is_mistake=True)
    words = str(error) if isinstance(error, RestartNeeded | RunError) else disk_in_words(error)
    if not words:
        traceback.print_exception(error)
        words = _first_line(error)
    return processes.tell(f"in the stage {stage_now()}: {words}", is_mistake=False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
