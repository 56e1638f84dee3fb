# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that the processes of a run were all started alike: config, versions, workdir."""

import hashlib
import importlib.metadata
import platform
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_jax.launch.cluster import Cluster
from earl_jax.settings.differences import differences
from earl_jax.settings.errors import InputError, is_mistake

_SHOWN = 8
_PACKAGE = Path(__file__).parents[1]


def versions_here() -> dict[str, str]:
    """Returns the versions of Python, of libraries, and a digest of this package's code."""
    code = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        code.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    libraries = ("earl_jax", "jax", "jaxlib")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
        "code": code.hexdigest()[:8],
    }


def check_same(cluster: Cluster, config: dict[str, Any]) -> None:
    """Raises ValueError, in every process, naming what differs from process to process."""
    if cluster.count == 1:
        return
    versions, hosts = versions_here(), cluster.hosts
    first, *others = cluster.gather({"config": config, "versions": versions}, "the configs")
    different = [
        line
        for number, other in enumerate(others, start=1)
        for part in first
        for line in differences(
            first[part],
            other[part],
            part,
            (f"in process 0 on {hosts[0]}", f"in process {number} on {hosts[number]}"),
        )
    ]
    if different:
        shown = "; ".join(different[:_SHOWN])
        raise InputError(
            f"the processes of this run were started differently: {shown}. Give every process the "
            "same command, but for config.distributed, and every host the same code"
        )


def open_shared_workdir(cluster: Cluster, workdir: Path, open_workdir: Callable[[], None]) -> None:
    """Opens the workdir in the first process, and checks that all processes have the same folder.

    Raises:
        InputError: in every process; as `open_workdir`, the folder may not be written, or a process
            has another folder of this name.
        OSError: in the first process; the disk is full or broken.
    """
    # A name of its own for each call: the caches of network file systems know none of it.
    mistake, marker = "", workdir / f".opening.{secrets.token_hex(4)}"
    if cluster.is_first:
        try:
            open_workdir()
            marker.touch()
        except InputError as error:
            mistake = str(error)
        except OSError as error:
            if not is_mistake(error):
                raise
            words = error.strerror or error
            mistake = f"--workdir={workdir} cannot be used: {words}; name one that you may write"
    mistake, name = cluster.gather([mistake, marker.name], "the workdir")[0]
    if mistake:
        raise InputError(mistake)
    marker = workdir / name
    found = marker.stat().st_mtime_ns if marker.exists() else None
    written = cluster.gather(found, "the workdir")
    if cluster.is_first:
        marker.unlink(missing_ok=True)
    without = [number for number, one in enumerate(written) if one != written[0]]
    if without:
        raise InputError(
            f"--workdir={workdir} is not the same folder in process {without[0]} as in process 0; "
            "all processes write the checkpoints, so name one on a file system that all hosts share"
        )
