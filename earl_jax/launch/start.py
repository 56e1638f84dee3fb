# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Start of JAX for a command: its devices, its compilation cache, the processes of its run."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from earl_jax.settings.errors import InputError, RunFailed

if TYPE_CHECKING:
    from earl_jax.launch.distributed import DistributedConfig

THREADS_PER_CPU_DEVICE = 32


def start_jax(
    platform: str, num_cpu_devices: int, distributed: "DistributedConfig | None" = None
) -> None:
    """Chooses JAX's devices, and keeps compiled programs in the user's cache folder.

    Joins the other processes of the run, where `distributed` or the environment names some; None:
    this is a program of one process. Must come before anything uses a device.
    """
    # XLA's CPU client runs the independent collectives of a program at once, each blocking a thread
    # per device; with as many threads as devices they starve each other on a busy machine, and XLA
    # ends the process after 40 s (seen on jax 0.10.2 and 0.12). Threads that wait cost nothing.
    # One device has no collectives, and computes faster with a thread a core.
    if num_cpu_devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_CPU_DEVICE * num_cpu_devices))
    import jax

    from earl_jax.launch.distributed import start_processes
    from earl_jax.settings.folders import cache_folder

    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if distributed is not None:
        start_processes(distributed)
    try:
        jax.devices()
    except RuntimeError as error:
        raise InputError(
            f"config.devices.platform is {platform!r}, but JAX cannot start it here: {error}"
        ) from error


def exit_status(command: Callable[[], None]) -> int:
    """Runs a command; a mistake in what was given is one message and status 2.

    A run that failed for a reason in words is one message and status 1. Every other error passes:
    Python prints its traceback and ends with status 1.
    """
    try:
        command()
    except InputError as error:
        if os.environ.get("EARL_JAX_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
