# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Shared storage: each process writes a file in the workdir, and reads those of all."""

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from earl_jax.launch.cluster import Cluster
from earl_jax.settings.errors import InputError

_BYTES = 16 * 2**20
# A network file system may show a new file so much later.
_PATIENCE_S = 15.0


def check_storage(cluster: Cluster, workdir: Path) -> list[str]:
    """Returns lines for the user; every process calls it. Nothing is left behind.

    Raises:
        ValueError: the workdir cannot be written, or is not the same folder on all hosts.
        OSError: the storage fails.
    """
    # Before another process makes them.
    made = _folders_to_make(workdir)
    token = cluster.gather(secrets.token_hex(4), "a name")[0]
    folder = workdir / f".check-{token}"
    try:
        start_s = time.perf_counter()
        mistake = _write(folder, cluster, token)
        rate = _BYTES / (time.perf_counter() - start_s)
        each = cluster.gather([mistake, rate], "what each process writes to the workdir")
        _raise_first(cluster, workdir, [words for words, _ in each])
        unseen = cluster.gather(_unseen(folder, cluster, token), "what each process reads there")
        _raise_first(cluster, workdir, unseen)
    finally:
        # Each does: the folder may not be the same.
        shutil.rmtree(folder, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
    slowest = min(rate for _, rate in each)
    return [f"{workdir}: all processes write ({slowest / 1e6:.3g} MB/s or more) and read it"]


def _folders_to_make(workdir: Path) -> list[Path]:
    """Returns the folders that are not there yet, the innermost first."""
    return [path for path in (workdir, *workdir.parents) if not path.exists()]


def _write(folder: Path, cluster: Cluster, token: str) -> str:
    """Writes this process's file; returns why it cannot be, "" if it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / str(cluster.index)).open("wb") as file:
            file.write(token.encode() + bytes(_BYTES - len(token)))
            file.flush()
            os.fsync(file.fileno())
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        return f"it cannot be written ({error.strerror}); name a folder that you may write"
    except OSError as error:
        if error.strerror == "Read-only file system":
            return f"it cannot be written ({error.strerror}); name a folder that you may write"
        raise
    return ""


def _unseen(folder: Path, cluster: Cluster, token: str) -> str:
    """Returns whose file this process cannot read, "" if it reads all."""
    deadline_s, number = time.monotonic() + _PATIENCE_S, 0
    while number < cluster.count:
        path = folder / str(number)
        if path.exists() and path.stat().st_size == _BYTES:
            with path.open("rb") as file:
                if file.read(len(token)) == token.encode():
                    number += 1
                    continue
        if time.monotonic() > deadline_s:
            return (
                f"it is not the folder that process {number} on {cluster.hosts[number]} writes to; "
                "name one on a file system that all hosts share"
            )
        time.sleep(0.2)
    return ""


def _raise_first(cluster: Cluster, workdir: Path, words: list[str]) -> None:
    for number, mistake in enumerate(words):
        if mistake:
            raise InputError(
                f"--workdir={workdir} in process {number} on {cluster.hosts[number]}: {mistake}"
            )
