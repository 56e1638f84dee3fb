# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""That the processes of a run were all started for the same: config, versions, workdir."""

import importlib.metadata
from pathlib import Path

from earl_jax.config import Config
from earl_jax.launch.cluster import Processes, find_processes
from earl_jax.sharding.device_path import lack_of, missing_device_path, warn_once
from earl_jax.train.checkpoint import differences, open_workdir

_SHOWN = 8


def check_same(processes: Processes, config: Config) -> None:
    """Raises ValueError, in every process, naming what differs from process to process.

    Or what this run cannot do where devices of different processes cannot send to each other.
    """
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "earl_jax")}
    own = {"config": config.as_dict(), "versions": versions}
    first, *others = processes.gather(own, "the configs")
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
    _check_path(config)


def _check_path(config: Config) -> None:
    """Says so once where arrays go by the hosts, and raises where they must not, or cannot."""
    why = missing_device_path()
    if not why:
        return
    if config.dispatch.forbid_host_bytes is True:
        raise ValueError(
            f"{lack_of(why)}, and config.dispatch.forbid_host_bytes is True; set it to 'auto' to "
            "go by the hosts, or run on devices with collectives between processes"
        )
    groups = find_processes(config.devices.num_rollout, config.distributed.timeout_s)
    if len(groups.trainers) > 1:
        raise ValueError(
            f"{lack_of(why)}, and training over {len(groups.trainers)} processes needs that: by "
            "the hosts weights and episodes go between processes that play and one that trains. "
            "Set config.devices.num_rollout to the devices of all processes but the last "
            f"({_all_but_last(groups)}), or run on devices with collectives between processes"
        )
    warn_once(why)


def _all_but_last(groups: Processes) -> int:
    return sum(device.process_index < groups.count - 1 for device in groups.devices)


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
