# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Python that a policy wrote, in a process that may do nothing but compute."""

import asyncio
import contextlib
import ctypes
import functools
import json
import os
import platform
import secrets
import signal
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from earl_jax.envs.processes import _sandbox_child
from earl_jax.settings.errors import InputError

# A process may take so many times as long as it may use a processor.
_PATIENCE = 4
_CHUNK_BYTES = 2**16
# Python's own libraries may be there.
_LIBRARIES = "LD_LIBRARY_PATH"
# The libraries of the system, time zones, and devices that do nothing.
_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom"),
)
_GATES = dict[asyncio.AbstractEventLoop, asyncio.Semaphore]()
# Those in real time have no names.
_SIGNALS = {int(each): each.name for each in signal.Signals}


class Limits(NamedTuple):
    """Limits of a program: seconds of the processor, bytes of memory, and bytes that it prints.

    It may take four times the seconds in all, so that a busy machine makes no difference.
    """

    seconds: int = 2
    memory_bytes: int = 2**29
    output_bytes: int = 2**18


class Ran(NamedTuple):
    """The end of a program: its output, traceback included, and True if it came to its own end.

    `ended` says why it was ended before that, "" if it was not.
    """

    output: str
    completed: bool
    ended: str = ""


async def run_python(
    code: str,
    *,
    stdin: str = "",
    tests: str = "",
    show_last: bool = False,
    stderr: bool = True,
    limits: Limits = Limits(),  # noqa: B008 - a tuple
) -> Ran:
    """Runs a program, then `tests` among its names, and returns what came of it.

    It is Python as installed here, with its packages, and may read `stdin`. It is completed if it
    raised nothing and did not exit; without tests it may exit with status 0. With `show_last` the
    value of a last expression is printed, as an interpreter does. What it writes to the standard
    error, its traceback too, is among its output with `stderr`.

    The process may read the files of Python, its packages and the system's libraries, and no
    others; it writes none. It has no network, starts no process, sends no signal, and inherits
    neither variables nor open files; it may ask for the size, dates and name of any file. Hashes of
    texts and `random` begin alike each time. Of one event loop as many run at a time as there are
    processors; others wait.

    Raises InputError as `check_sandbox`, and ConnectionError where the process could not start.
    """
    check_sandbox()
    marker = secrets.token_hex(16)
    request = {
        "parent": os.getpid(),
        "marker": marker,
        "parts": [code, tests] if tests else [code],
        "stdin": stdin,
        "show_last": show_last,
        "stderr": stderr,
        "paths": readable_paths(),
        "seconds": limits.seconds,
        "memory_bytes": limits.memory_bytes,
    }
    output, ended = bytearray(), ""
    async with _gate():
        process = await _start()
        try:
            async with asyncio.timeout(_PATIENCE * limits.seconds):
                most = limits.output_bytes + 2 * len(marker) + 1
                if await _exchange(process, json.dumps(request).encode(), output, most):
                    ended = _ending(await process.wait(), limits.seconds)
                else:
                    ended = f"printed more than {limits.output_bytes} bytes"
        except TimeoutError:
            ended = f"took longer than {_PATIENCE * limits.seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return _result(output.decode("utf-8", "replace"), marker, ended)


@functools.cache
def check_sandbox() -> None:
    """Raises InputError where this system cannot confine a process.

    It can on Linux of version 5.13 or newer with Landlock, on x86-64 and AArch64.
    """
    name = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Linux" and platform.machine() in _sandbox_child.MACHINES:
        version = ctypes.CDLL(None, use_errno=True).syscall(
            _sandbox_child.CREATE_RULESET, None, 0, 1
        )
        if version > 0:
            return
        name += f", where Landlock says: {os.strerror(ctypes.get_errno())}"
    raise InputError(
        f"a policy's code cannot be confined here ({name}); it needs Linux 5.13 or newer with "
        "Landlock, on x86-64 or AArch64"
    )


def _gate() -> asyncio.Semaphore:
    """Returns the semaphore of the running loop, and forgets those of loops that are closed."""
    for loop in [loop for loop in list(_GATES) if loop.is_closed()]:
        _GATES.pop(loop, None)
    size = len(os.sched_getaffinity(0))
    return _GATES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(size))


async def _start() -> asyncio.subprocess.Process:
    # Not -I: it would ignore PYTHONHASHSEED.
    command = (sys.executable, "-P", "-s", "-X", "utf8", _sandbox_child.__file__)
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=own_variables(),
        )
    except OSError as error:
        raise ConnectionError(f"no process for a policy's code: {error}") from error


async def _exchange(
    process: asyncio.subprocess.Process, request: bytes, output: bytearray, most: int
) -> bool:
    """Sends the request and adds to the output what comes. Returns False beyond `most` bytes."""
    assert process.stdin is not None and process.stdout is not None
    # It may have ended before it read all.
    with contextlib.suppress(ConnectionError):
        process.stdin.write(request)
        await process.stdin.drain()
    process.stdin.close()
    while chunk := await process.stdout.read(_CHUNK_BYTES):
        output += chunk
        if len(output) > most:
            del output[most:]
            return False
    return True


def _ending(status: int, seconds: int) -> str:
    if status == -signal.SIGXCPU:
        return f"used the processor for more than {seconds} s"
    if status < 0:
        return f"was ended by {_SIGNALS.get(-status, f'signal {-status}')}"
    return f"ended with status {status}" if status else ""


def _result(text: str, marker: str, ended: str) -> Ran:
    first, _, rest = text.partition(f"{marker}\n")
    if first or not text.startswith(f"{marker}\n"):
        raise ConnectionError(f"no sandbox for a policy's code: {ended}: {text[-500:]}")
    # Behind it is what Python writes when it ends.
    output, end, more = rest.partition(marker)
    return Ran(output + more, bool(end) and not ended, ended)


def own_variables() -> dict[str, str]:
    """Returns the environment of a confined process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
    libraries = {name: os.environ[name] for name in (_LIBRARIES,) if name in os.environ}
    return variables | threads | libraries


@functools.cache
def readable_paths() -> list[str]:
    """Returns the files and folders that a confined process may read."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = [path for path in os.environ.get(_LIBRARIES, "").split(":") if os.path.isabs(path)]
    return sorted({*own, str(Path(sys.base_prefix) / "lib"), *libraries, *_SYSTEM})
