# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""That the processes of a run were all started for the same: config, versions, workdir."""

import importlib.metadata
from pathlib import Path

import jax

from earl_jax.checkpoint import differences, open_workdir
from earl_jax.config import Config
from earl_jax.processes import Processes

_SHOWN = 8


def check_same(processes: Processes, config: Config) -> None:
    """Raises ValueError, in every process, naming what differs from process to process."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "earl_jax")}
    own = {"config": config.as_dict(), "versions": versions}
    try:
        first, *others = processes.gather(own, "the configs")
    except jax.errors.JaxRuntimeError as error:
        platform = jax.devices()[0].platform
        raise ValueError(
            f"the {platform} devices of this process cannot send to those of others "
            f"({str(error).splitlines()[0]}), and training needs that: there is no way around it "
            "by the hosts. Run on one host, or on devices with collectives between processes"
        ) from error
    different = [
        line
        for number, other in enumerate(others, start=1)
        for part in first
        for line in differences(
            first[part], other[part], part, ("in process 0", f"in process {number}")
        )
    ]
    if different:
        shown = "; ".join(different[:_SHOWN])
        raise ValueError(
            f"the processes of this run were started differently: {shown}. Give every process the "
            "same command, but for config.distributed"
        )


def open_shared_workdir(processes: Processes, workdir: Path, config: Config) -> None:
    """Makes the workdir this run's, as `open_workdir`, and sees that all processes have the same.

    Raises:
        ValueError: as `open_workdir`; or a process has another folder of this name.
    """
    path = workdir / "config.json"
    if processes.is_first:
        open_workdir(workdir, config.as_dict())
    written = processes.after_first(lambda: _written_ns(path), "the workdir")
    told = processes.gather(written, "the workdir")
    without = [number for number, each in enumerate(told) if each != told[0]]
    if without:
        raise ValueError(
            f"--workdir={workdir} is not the same folder in process {without[0]} as in process 0; "
            "all processes write the checkpoints, so name one on a file system that all hosts share"
        )


def _written_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
