# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run find each other: jax.distributed, started before any device is used.

The same command on every host is one run. Who is who comes from the settings, from JAX's own
environment variables, or from what started the processes (Slurm, Open MPI, a TPU pod).
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Literal

import jax

from earl_jax.launch.rendezvous import meet
from earl_jax.settings.choices import check_choices

# By which each setting can be given, too.
_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# What a launcher sets in each process of several, and where it says of how many.
_LAUNCHERS = (
    ("SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes of one run, which each execute the same command.

    `mode` "auto" starts several where the settings below, the environment variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the variables of Slurm or Open
    MPI name several; "on" also asks JAX's own detection (TPU pods), "off" never does. `coordinator`
    is "HOST:PORT" of process 0, where it listens; `num_processes` how many there are, `process_id`
    which of them this is. What is left out ("", 0, -1) comes from the variables.

    Processes that do not all come within `start_timeout_s` give up. A process that does not
    answer for `heartbeat_s` is lost. `timeout_s` is the longest that one may let the others wait
    for what it is to send: also because its episodes take longer than theirs.

    Who runs a run is no part of it: these are not in its config.json, and it may be resumed by
    another number of processes.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    start_timeout_s: float = 300.0
    heartbeat_s: float = 60.0
    timeout_s: float = 1800.0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.distributed")
        for field in ("start_timeout_s", "heartbeat_s", "timeout_s"):
            if not 1 <= getattr(self, field) < math.inf:
                raise ValueError(
                    f"config.distributed.{field} is {getattr(self, field)}; it must be a number of "
                    "seconds, at least 1"
                )
        if self.num_processes < 0 or self.process_id < -1:
            raise ValueError(
                f"config.distributed.num_processes is {self.num_processes} and "
                f"config.distributed.process_id {self.process_id}; they count from 1 and from 0 "
                "(0 and -1: as the environment says)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Which process this is. None: as JAX's own detection says."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None


def start_processes(config: DistributedConfig) -> None:
    """Joins the other processes of the run, where there are some. Before any device is used.

    Raises:
        ValueError: settings that name no run, or processes that do not come.
    """
    place = _find_place(config, os.environ)
    if place is None:
        return
    address, count, index = place.coordinator, place.num_processes, place.process_id
    if address is not None and count is not None and index is not None:
        meet(address, index, count, config.start_timeout_s)
    # It would take SIGTERM, which is ours: run.py stops all processes at the same step.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            initialization_timeout=int(config.start_timeout_s),
            heartbeat_timeout_seconds=int(config.heartbeat_s),
            # All processes end together; one that ends alone must not wait for the others.
            shutdown_timeout_seconds=10,
        )
    except (RuntimeError, ValueError) as error:
        words = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the processes of this run did not find each other: {words}. Start the same command "
            "on every host, with config.distributed.coordinator and num_processes alike and a "
            "process_id of its own for each (from 0), or by Slurm or Open MPI"
        ) from error


def _find_place(config: DistributedConfig, variables: Mapping[str, str]) -> _Place | None:
    """What the settings and the environment say; None for one process."""
    if config.mode == "off":
        return None
    coordinator = config.coordinator or variables.get(_VARIABLES["coordinator"], "")
    number = config.num_processes or _number(variables, "num_processes", 0)
    index = config.process_id if config.process_id >= 0 else _number(variables, "process_id", -1)
    launched = any(
        mark in variables and _as_int(variables.get(count, "1"), count) > 1
        for mark, count in _LAUNCHERS
    )
    given = {"coordinator": coordinator, "num_processes": number, "process_id": index}
    absent = {"coordinator": "", "num_processes": 0, "process_id": -1}
    missing = [name for name, value in given.items() if value == absent[name]]
    detects = launched or config.mode == "on"
    if not detects:
        if len(missing) == len(given) or number == 1 and not coordinator:
            return None
        if missing:
            raise ValueError(
                "this run is to have several processes, and "
                + " and ".join(f"config.distributed.{name}" for name in missing)
                + " is not given, nor "
                + " and ".join(_VARIABLES[name] for name in missing)
                + " in the environment; give it, or start the processes by Slurm or Open MPI"
            )
    if number and index >= number:
        raise ValueError(
            f"config.distributed.process_id is {index}, and config.distributed.num_processes "
            f"{number}; processes are numbered from 0 to {number - 1}"
        )
    return _Place(
        coordinator=coordinator or None,
        num_processes=number or None,
        process_id=None if index < 0 else index,
    )


def _number(variables: Mapping[str, str], field: str, absent: int) -> int:
    name = _VARIABLES[field]
    return _as_int(variables[name], name) if name in variables else absent


def _as_int(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} is {text!r}; it must be a number"
        ) from None
