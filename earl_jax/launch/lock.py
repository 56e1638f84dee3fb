# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The lock of a workdir, which one run holds at a time, and the folder of a run begun again."""

import contextlib
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from earl_jax.settings.errors import InputError, is_mistake


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Holds the lock of a workdir that exists; it ends with the process, however that ends.

    A file system without locks leaves the workdir unlocked.

    Raises:
        InputError: another run holds it, with its host and process.
    """
    with (workdir / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"--workdir={workdir} is in use by another run ({file.read().strip()}); wait for "
                "its end, or name another --workdir"
            ) from None
        except OSError:
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def set_aside(workdir: Path) -> Path | None:
    """Renames a workdir to WORKDIR.old_N, so that a run can begin again; None where there is none.

    Raises:
        InputError: it is in use, or may not be renamed.
    """
    if not workdir.exists() or not any(workdir.iterdir()):
        return None
    names = (f"{workdir.name}.old_{number}" for number in itertools.count(1))
    target = next(workdir.with_name(name) for name in names if not workdir.with_name(name).exists())
    try:
        with locked(workdir):
            workdir.rename(target)
    except OSError as error:
        if not is_mistake(error):
            raise
        raise InputError(
            f"--workdir={workdir} cannot be renamed ({error.strerror or error}); name another "
            "--workdir without --restart"
        ) from error
    return target
