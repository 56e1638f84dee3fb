# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Start of JAX for a command: its devices, its compilation cache, the processes of its run."""

import contextlib
import gc
import importlib.util
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from earl_jax.launch.signals import INTERRUPTED
from earl_jax.settings.errors import InputError, RunError, disk_in_words

if TYPE_CHECKING:
    from earl_jax.launch.distributed import DistributedConfig

THREADS_PER_CPU_DEVICE = 32
# Exit status of a run that a signal stopped, and that is saved: EX_TEMPFAIL of sysexits.h, "try
# again later". Not 0, by which a scheduler takes the run for done; not 128 + n, which shells, Slurm
# and Kubernetes give to a process that a signal killed, saved or not.
STOPPED = 75
# That of a replay, which does not go on from what it saved: as of a process that SIGTERM ended.
STOPPED_REPLAY = 128 + signal.SIGTERM
# Exit status of a command whose reader left, as of one that SIGPIPE ended: 128 + 13.
READER_LEFT = 141
# Objects by which a process grows until Python looks for circles among the new ones; and how many
# such looks come before one among older ones. By Python's default, 700, it looks through all of JAX
# in nearly each step: 4.2 s of the 49 that a small run takes, and 0.5 s with this. The loop makes
# hardly any circles (tests/test_same_run.py).
COLLECTOR = (10_000, 10, 10)
# The packages of which one must be installed for a platform.
_PLUGINS = {"gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}


def start_jax(
    platform: str,
    num_cpu_devices: int,
    distributed: "DistributedConfig | None" = None,
    setting: str = "config.devices.platform",
) -> None:
    """Chooses JAX's devices, and keeps compiled programs in the user's cache folder.

    Joins the other processes of the run, where `distributed` or the environment names some; None:
    this is a program of one process. Must come before anything uses a device. `setting` is what
    gave the platform, for errors.
    """
    # XLA's CPU client runs the independent collectives of a program at once, each blocking a thread
    # per device; with as many threads as devices they starve each other on a busy machine, and XLA
    # ends the process after 40 s (seen on jax 0.10.2 and 0.12). Threads that wait cost nothing.
    # One device has no collectives, and computes faster with a thread a core.
    if num_cpu_devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_CPU_DEVICE * num_cpu_devices))
    # All GPUs of a process share a pool of pinned memory, by default of at most 64 GB; offload may
    # need what the host has. The pool grows as it is needed.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_memory_bytes() >> 30))
    gc.set_threshold(*COLLECTOR)
    import jax

    from earl_jax.launch.distributed import start_processes
    from earl_jax.settings.folders import cache_folder
    from earl_jax.sharding.topology import GPU_MEMORY_FRACTION

    # By the second name as well; JAX refuses both.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if distributed is not None:
        start_processes(distributed)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX asserts that a platform asked for by name has a plugin (jax 0.10.2 and 0.12).
        if isinstance(error, AssertionError) and platform not in _PLUGINS:
            raise
        raise InputError(_missing(setting, platform, error)) from error


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of this host's memory that this process may have, by its cgroups too.

    Those are the limits of containers and of Slurm's jobs. `root` is where /proc and /sys are.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    mounted = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            # Version 2 has one line, without controllers; version 1 one for each of them.
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                name = "memory.limit_in_bytes" if controllers else "memory.max"
                folder = mounted / controllers / path.lstrip("/")
                # A container may see its own group alone, as the outermost one.
                while folder.is_relative_to(mounted):
                    # No limit is no file, or "max".
                    with contextlib.suppress(OSError, ValueError):
                        found.append(int((folder / name).read_text()))
                    folder = folder.parent
    return min(found)


def compute_exactly(*compute_dtypes: str) -> None:
    """Has products of fp32 numbers computed in fp32, if one of the types is "float32".

    JAX must have started.
    """
    import jax

    if precision := products_precision(jax.default_backend(), *compute_dtypes):
        jax.config.update("jax_default_matmul_precision", precision)


def products_precision(platform: str, *compute_dtypes: str) -> str | None:
    """Returns JAX's precision for products on a platform; None: JAX's own, or the user's.

    By default GPUs round fp32 numbers that they multiply to TF32 (10 bits of mantissa), and TPUs to
    bf16 (7 bits). CPUs do not, and products of bf16 are the same at every precision.
    """
    return "highest" if "float32" in compute_dtypes and platform != "cpu" else None


def _missing(setting: str, platform: str, error: Exception) -> str:
    """Returns the message about devices that JAX cannot start, in one line."""
    text = f"{setting} is {platform!r}, but "
    if platform in _PLUGINS and not any(map(importlib.util.find_spec, _PLUGINS[platform])):
        extra, other = {"gpu": ("cuda13", " (or cuda12)"), "tpu": ("tpu", "")}[platform]
        return (
            f"{text}JAX's plugin for it is not installed: install the extra {extra}{other}, by "
            f"uv run --extra {extra} or pip install 'jax[{extra}]', or set it to 'cpu'"
        )
    reason = " ".join(str(error).split()) or "its plugin failed, as it says above"
    return f"{text}JAX cannot start it here: {reason}"


def exit_status(command: Callable[[], int | None]) -> int:
    """Runs a command. A mistake in what was given is one message and status 2.

    The status is else what the command returns; None is 0. A run that cannot go on, and a disk that
    is full or broken, is one message and status 1. A Ctrl-C that the command does not handle, such
    as one before a run has begun, is one line and status 130. Where the reader of its output, such
    as `head`, has left, it ends without a word, with status 141. Every other error passes: Python
    prints its traceback and ends with status 1.
    """
    # What a policy or an environment says may be no text that can be written.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return READER_LEFT
        words = str(error) if isinstance(error, InputError | RunError) else disk_in_words(error)
        if not words or os.environ.get("EARL_JAX_TRACEBACK"):
            raise
        print(f"error: {words}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        if os.environ.get("EARL_JAX_TRACEBACK"):
            raise
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def _reader_left() -> bool:
    """Returns True if nobody reads the standard output; what is left of it is not written then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    # Python flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
