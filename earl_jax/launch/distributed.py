# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Processes find each other through jax.distributed, and end with status 1 when one is lost.

The same command on every host is one run. The number of each process comes from the settings, from
JAX's own environment variables, or from the launcher (Slurm, Open MPI, Kubernetes, a TPU pod),
whose variables jax.distributed reads. Those that were given all of it first meet at process 0,
which ends all where their numbers are no run's (rendezvous.py). Where a process cannot go on, all
end with status 1; the launcher starts all of them again, and the run resumes from its newest
checkpoint (gpu_scripts/slurm.sbatch, tpu_scripts/run.sh).
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax

from earl_jax.launch.addresses import (
    Address,
    address_towards,
    addresses_here,
    host_and_port,
    listen,
)
from earl_jax.launch.open_files import allow_connections
from earl_jax.launch.presence import LINGER_S, lost_in_words
from earl_jax.launch.rendezvous import Member, ask, join, numbers_in_words, wait_for_others
from earl_jax.launch.signals import ends_at_ctrl_c
from earl_jax.settings.errors import InputError, check_choices

# The environment variables that give the settings, too.
_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# Each launcher's variables: one set in every process, their count, and the number of this one. Open
# MPI comes first: under Slurm it starts its processes in a step of one task a node.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
)
# Where Open MPI before version 5 says the address of its first host, which JAX reads.
_OPEN_MPI_HOST = "OMPI_MCA_orte_hnp_uri"
# The variables that name the hosts of this process's TPU slice, set by GKE.
_SLICE_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
# The number of processes on this one's host: of Slurm for each node, as "1(x2)" or "8,4".
_ON_A_HOST = ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
_START = (
    "Start the same command for every process, with config.distributed.coordinator and "
    "num_processes alike and a process_id of its own for each (from 0), or by a launcher such as "
    "gpu_scripts/launch.sh, Slurm, Open MPI or a JobSet"
)
# How long a run may take to end once it has noticed that it lost a process.
_ENDS_S = 60.0
_AGAIN = "Start all processes again: the run goes on from its newest checkpoint"
# The host and port of the coordinator that was given to this process.
_coordinator: tuple[str, int] | None = None
# The handler must live as long as the process.
_on_abort: Any = None
_ending = threading.RLock()
_when_ending: list[Callable[[], None]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes of one run, which each execute the same command.

    `mode` "auto" starts several where the settings below, the environment variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the variables of Slurm, Open
    MPI, Kubernetes (an indexed Job or JobSet) or GKE's TPU slices (and MEGASCALE) name several;
    "on" also asks the metadata of TPU VMs, which no variable names; "off" starts one process.
    `coordinator` is the "HOST:PORT" at which process 0 listens; "" takes the variables' value.
    `num_processes` is the number of processes; 0 takes the variables' value. `process_id` is the
    number of this process; -1 takes the variables' value.

    Processes give up if not all have started within `start_timeout_s`. A process that does not
    answer for `heartbeat_s` is lost. `timeout_s` is the longest wait for another process, also for
    one whose episodes take longer. A process that gives up or loses another ends with status 1.

    These settings are not in config.json: a run may be resumed by another number of processes.
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
                raise InputError(
                    f"config.distributed.{field} is {getattr(self, field)}; it must be a number of "
                    "seconds, at least 1"
                )
        if self.num_processes < 0 or self.process_id < -1:
            raise InputError(
                f"config.distributed.num_processes is {self.num_processes} and "
                f"config.distributed.process_id {self.process_id}; they count from 1 and from 0 "
                "(0 and -1: taken from the environment)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """The number of this process, and of all. None: JAX detects it."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None


class RestartNeeded(RuntimeError):
    """Raised in a process that cannot go on with the others: all must be started again."""


def start_processes(config: DistributedConfig) -> None:
    """Joins the other processes of the run, if there are any. Must come before JAX uses a device.

    From here on a process of several ends with status 1 where JAX would abort it, because another
    process is lost.

    Raises:
        ValueError: settings that name no run.
    """
    place = _find_place(config, os.environ)
    if place is None:
        return
    number = "a process" if place.process_id is None else f"process {place.process_id}"
    who = f"{number} on {socket.gethostname()}"
    global _coordinator
    _coordinator = host_and_port(place.coordinator) if place.coordinator else None
    here = addresses_here(*_coordinator) if _coordinator else []
    # The service would take SIGTERM, which run/ handles: it stops all processes at the same step.
    jax.config.update("jax_enable_preemption_service", False)
    not_found = (
        f"{who} did not find the others within {config.start_timeout_s:g} s "
        "(config.distributed.start_timeout_s)"
    )
    _end_at_abort(lambda: end_process(f"{not_found}. {_START}"))
    # JAX waits in C++, where Python's own handler would not be called.
    with ends_at_ctrl_c("stopped by Ctrl-C before the processes of the run found each other"):
        if None not in dataclasses.astuple(place):
            _meet_others(place, here, config, not_found)
        try:
            jax.distributed.initialize(
                place.coordinator,
                place.num_processes,
                place.process_id,
                local_device_ids=_local_devices(os.environ),
                initialization_timeout=int(config.start_timeout_s),
                heartbeat_timeout_seconds=int(config.heartbeat_s),
                # All processes end together; one that ends alone must not wait for the others.
                shutdown_timeout_seconds=10,
                coordinator_bind_address=place.coordinator if here else None,
            )
        except (RuntimeError, ValueError) as error:
            words = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"the processes of this run did not find each other: {words}. {_START}"
            ) from error
    _end_at_abort(lambda: end_as_lost(who))


def _meet_others(
    place: _Place, here: list[Address], config: DistributedConfig, not_found: str
) -> None:
    """Returns when all processes have come to process 0, which says what is wrong for all.

    The others end with its status, without a word.

    Raises:
        InputError: two processes have one number, they were given different counts of them, the
            coordinator's port is taken, or process 0 may not open as many files.
    """
    assert place.coordinator and place.num_processes and place.process_id is not None
    own = Member(place.process_id, place.num_processes, socket.gethostname())
    timeout_s = config.start_timeout_s
    others_end_s = config.heartbeat_s + _ENDS_S
    host, port = host_and_port(place.coordinator)
    if own.process_id > 0:
        status = join(host, port, own, timeout_s=timeout_s, others_end_s=others_end_s)
        if status:
            sys.exit(status)
        if status is None:
            end_process(f"{not_found}. {_START}")
        return
    if words := allow_connections(own.num_processes):
        raise InputError(words)
    try:
        listeners = listen(place.coordinator, here, own.num_processes)
    except OSError as error:
        # Where another process 0 of this run listens there, that one says so.
        with contextlib.suppress(OSError):
            if status := ask(host, port, own, timeout_s):
                sys.exit(status)
        raise InputError(
            f"config.distributed.coordinator is {place.coordinator!r}, and process 0 cannot listen "
            f"on port {port} ({os.strerror(error.errno or 0)}); take another"
        ) from None
    if absent := wait_for_others(listeners, own, timeout_s):
        end_process(f"{not_found}: {numbers_in_words(absent)} did not come. {_START}")


def end_process(words: str, *, status: int = 1) -> NoReturn:
    """Ends this process of several with a status and the words on stderr.

    It goes on answering for a while, so that others that ask know that it was not lost.
    `sys.exit` would not do: JAX's exit handlers wait for all processes.
    """
    # Of several threads the first one ends the process.
    _ending.acquire()
    again = f". {_AGAIN}" if status == 1 else ""
    # In one write: other threads may write too.
    os.write(2, f"error: {words}{again}\n".encode())
    # Nothing behind it: XLA's threads print stack traces when another process is gone.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for call in _when_ending:
        call()
    time.sleep(LINGER_S)
    os._exit(status)


def when_ending(call: Callable[[], None]) -> None:
    """Has `end_process` call this, which tells others that it ends, while it still answers them."""
    _when_ending.append(call)


def end_as_lost(who: str, why: str = "") -> NoReturn:
    """Ends this process, which has lost another one or waited too long for it; says which, and why.

    `who` is this process.
    """
    _ending.acquire()
    here, lost = lost_in_words(why)
    words = lost or why or "another process of the run ended or cannot be reached"
    end_process(f"{who}{here}: {words}" + (f" ({why})" if lost and why else ""))


def _end_at_abort(end: Callable[[], NoReturn]) -> None:
    """Makes an abort of this process its end with status 1 and words.

    JAX reports a lost process by an abort of its client only (jax 0.10.2 and 0.12), and calls no
    function of ours instead (jaxlib's `missed_heartbeat_callback` throws std::bad_cast).
    Python runs its own signal handlers in the main thread only, which an abort does not wait for.
    """
    global _on_abort
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: end())
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def address_among(hosts: Sequence[str]) -> str:
    """Returns the address of this one of the processes' hosts, at which the others reach it.

    It is on the network of the coordinator that was given. Where none was given (a launcher's
    variables name it), or the name is a loopback one here, it is the loopback address for processes
    of one host, and "" for others. Hosts may have one name, so that the network comes first.
    """
    here = address_towards(*_coordinator) if _coordinator else ""
    return here or ("127.0.0.1" if len(set(hosts)) == 1 else "")


def _find_place(config: DistributedConfig, variables: Mapping[str, str]) -> _Place | None:
    """Returns the place of this process by the settings and the environment; None for one."""
    if config.mode == "off":
        return None
    coordinator = config.coordinator or variables.get(_VARIABLES["coordinator"], "")
    number = config.num_processes or _number(variables, "num_processes", 0)
    index = config.process_id if config.process_id >= 0 else _number(variables, "process_id", -1)
    if coordinator:
        # Of Open MPI 5 JAX knows no variable (0.10.2 and 0.12), and this one's number is there.
        count, own = _of_launcher(variables)
        if count > 1:
            number, index = number or count, own if index < 0 else index
    given = {"coordinator": coordinator, "num_processes": number, "process_id": index}
    absent = {"coordinator": "", "num_processes": 0, "process_id": -1}
    missing = [name for name, value in given.items() if value == absent[name]]
    detects = config.mode == "on" or (bool(missing) and _is_launched(variables))
    if not detects:
        if len(missing) == len(given) or number == 1 and not coordinator:
            return None
        if missing:
            raise InputError(
                "this run is to have several processes, and "
                + " and ".join(f"config.distributed.{name}" for name in missing)
                + (" is" if len(missing) == 1 else " are")
                + " not given, nor "
                + " and ".join(_VARIABLES[name] for name in missing)
                + " in the environment; give it, or start the processes by a launcher such as "
                "gpu_scripts/launch.sh, Slurm, Open MPI or a JobSet"
            )
    if number and index >= number:
        raise InputError(
            f"config.distributed.process_id is {index}, and config.distributed.num_processes "
            f"{number}; processes are numbered from 0 to {number - 1}"
        )
    return _Place(
        coordinator=coordinator or None,
        num_processes=number or None,
        process_id=None if index < 0 else index,
    )


def _is_launched(variables: Mapping[str, str]) -> bool:
    """Returns whether a launcher that jax.distributed detects has started several processes.

    Raises:
        ValueError: the process is one of a Kubernetes Job, and JAX cannot ask how many there are;
            or one of Open MPI, and JAX cannot know where process 0 is.
    """
    if _of_launcher(variables)[0] > 1:
        if "OMPI_COMM_WORLD_SIZE" in variables and _OPEN_MPI_HOST not in variables:
            raise InputError(
                "Open MPI does not say, from version 5 on, on which host process 0 is; give "
                "config.distributed.coordinator=HOST:PORT, the first host of mpirun and a free "
                "port of it, or set JAX_COORDINATOR_ADDRESS"
            )
        return True
    hosts = next((variables[name] for name in _SLICE_HOSTS if name in variables), None)
    if hosts is not None:
        slices = _as_int(variables.get("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES")
        return len(hosts.split(",")) * slices > 1
    index = variables.get("JOB_COMPLETION_INDEX")
    if index is None or "KUBERNETES_SERVICE_HOST" not in variables:
        return False
    if importlib.util.find_spec("kubernetes") is None:
        raise InputError(
            f"this is pod {index} of an indexed Kubernetes Job; set "
            + ", ".join(_VARIABLES.values())
            + " in it (gpu_scripts/jobset.yaml), install the extra k8s so that JAX asks the "
            "cluster, or set config.distributed.mode=off for a run of one pod"
        )
    return True


def _of_launcher(variables: Mapping[str, str]) -> tuple[int, int]:
    """Returns how many processes Slurm or Open MPI has started, and the number of this one.

    (0, -1) where neither has.
    """
    for mark, count, index in _LAUNCHERS:
        if mark in variables:
            own = _as_int(variables.get(index, "0"), index)
            return _as_int(variables.get(count, "1"), count), own
    return 0, -1


def _local_devices(variables: Mapping[str, str]) -> list[int] | None:
    """Returns [], which is all devices, for the only process of a host; None: JAX decides.

    JAX gives a process of Slurm or Open MPI one GPU, also where it is alone on its host; one of
    Open MPI 5, which it does not know, would take all beside others.
    """
    if "JAX_LOCAL_DEVICE_IDS" in variables:
        return None
    counts = next((variables[name] for name in _ON_A_HOST if name in variables), "")
    if set(re.sub(r"\(x\d+\)", "", counts).split(",")) == {"1"}:
        return []
    own = "OMPI_COMM_WORLD_LOCAL_RANK"
    return [_as_int(variables[own], own)] if own in variables else None


def _number(variables: Mapping[str, str], field: str, absent: int) -> int:
    name = _VARIABLES[field]
    return _as_int(variables[name], name) if name in variables else absent


def _as_int(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"the environment variable {name} is {text!r}; it must be a number"
        ) from None
