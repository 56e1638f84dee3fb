# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One run over several processes: who is who, the same training as one process, ends in words."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.dispatch.network import namespaces
from benchmarks.runs import free_port
from earl_jax.config.file import make_config
from earl_jax.launch import rendezvous
from earl_jax.launch.addresses import addresses_here, listen
from earl_jax.launch.cluster import Cluster, find_cluster, host_by_host, processes_only
from earl_jax.launch.distributed import (
    DistributedConfig,
    RestartNeeded,
    _find_place,
    start_processes,
)
from earl_jax.launch.ending import end_together
from earl_jax.launch.layouts import axes_across_hosts
from earl_jax.launch.signals import INTERRUPTED
from earl_jax.launch.start import exit_status
from earl_jax.placement import rollouts
from earl_jax.placement.problem import find_model, planned_problem
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.gather import total_stats
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.stats import RolloutStats
from earl_jax.run.build import build_run
from earl_jax.run.saver import exporter_of
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.timing import StageTimer
from earl_jax.training import train
from tests.support import ROOT, python_path
from tests.support.clusters import Device, cluster_of
from tests.support.commands import ALL, APART, SMALL, Command
from tests.support.forks import Fork, start_python
from tests.support.processes import Processes as RealProcesses
from tests.support.runs import TIMES, assert_equal, config_of, final_parameters, steps_of

# Who is who.

PLACE = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
SLURM_STEP = {"SLURM_STEP_NODELIST": "n[0-2]", "SLURM_NTASKS": "3", "SLURM_PROCID": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("settings", "variables", "expected"),
    [
        ({}, {}, None),
        ({"mode": "off"}, {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, None),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 1}, {}, ("a:1", 2, 1)),
        ({"coordinator": "a:1"}, {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}, ("a:1", 4, 3)),
        # A setting comes before its variable.
        (
            {"process_id": 0},
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            ("a:1", 2, 0),
        ),
        ({}, {"SLURM_STEP_NODELIST": "n[0-1]", "SLURM_NTASKS": "2"}, (None, None, None)),
        # A job of several tasks, of whose steps this is none; and a step of one task.
        ({}, {"SLURM_NTASKS": "2"}, None),
        ({}, {"SLURM_STEP_NODELIST": "n0", "SLURM_NTASKS": "1"}, None),
        ({}, MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, (None, None, None)),
        # Of Open MPI 5, which does not say where process 0 is; also in a step of Slurm's.
        ({"coordinator": "a:1"}, MPI, ("a:1", 2, 1)),
        ({"coordinator": "a:1"}, MPI | SLURM_STEP, ("a:1", 2, 1)),
        ({"coordinator": "a:1", "process_id": 0}, MPI, ("a:1", 2, 0)),
        ({"coordinator": "a:1"}, SLURM_STEP, ("a:1", 3, 2)),
        ({}, {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, (None, None, None)),
        ({}, {"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, (None, None, None)),
        ({}, {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, (None, None, None)),
        # A slice of one host, also where it is the pod of an indexed Job.
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({}, {"TPU_WORKER_HOSTNAMES": "a"} | POD, None),
        # A pod whose manifest says all, and one of a Job without.
        ({}, PLACE | POD, ("a:1", 2, 1)),
        ({"mode": "off"}, POD, None),
        ({"mode": "on"}, {}, (None, None, None)),
        ({"num_processes": 1}, {}, None),
    ],
)
def test_process_index_and_coordinator_are_found(settings, variables, expected):
    place = _find_place(DistributedConfig(**settings), variables)
    assert (place and dataclasses.astuple(place)) == expected


@pytest.mark.parametrize(
    ("settings", "variables", "words"),
    [
        ({"num_processes": 2}, {}, "config.distributed.coordinator and config.distributed.process"),
        ({"coordinator": "a:1", "num_processes": 2}, {}, "JAX_PROCESS_ID in the environment"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, {}, "numbered from 0 to 1"),
        ({}, {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'"),
        ({}, MPI, "Open MPI does not say.*give config.distributed.coordinator=HOST:PORT"),
        ({}, {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "two"}, "SLICES is 'two'"),
    ],
)
def test_a_place_that_is_none(settings, variables, words):
    with pytest.raises(ValueError, match=words):
        _find_place(DistributedConfig(**settings), variables)


@pytest.mark.parametrize("installed", [True, False])
def test_pod_of_an_indexed_job_needs_the_kubernetes_package_to_count_the_others(
    installed, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *of: installed or None if name == "kubernetes" else find(name, *of),
    )
    if installed:
        assert _find_place(DistributedConfig(), POD) is not None
        return
    with pytest.raises(ValueError, match="pod 1 of an indexed Kubernetes Job; set JAX_COORDINATOR"):
        _find_place(DistributedConfig(), POD)


JOINED = """
import jax
jax.config.update("jax_platforms", "cpu")
from earl_jax.launch.distributed import DistributedConfig, start_processes
start_processes(DistributedConfig())
print(jax.process_index(), jax.process_count(), jax.config._read("jax_cuda_visible_devices"))
"""
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "{n}",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "{n}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{n}",
}
# JAX takes this machine for a TPU VM, and asks no metadata server how many slices there are.
TPU = {
    "JAX_FORCE_TPU_INIT": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "",
    "MEGASCALE_NUM_SLICES": "",
    "MEGASCALE_SLICE_ID": "",
}


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        # Slurm: a process a node takes all GPUs, several on a node one each, or those it is given.
        (SLURM | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "all"),
        (SLURM | {"SLURM_LOCALID": "{n}", "SLURM_STEP_TASKS_PER_NODE": "2"}, "{n}"),
        (
            SLURM
            | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            | {"JAX_LOCAL_DEVICE_IDS": "2,3"},
            "2,3",
        ),
        # Open MPI 4, and 5, which needs the coordinator's address.
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:34911"}, "{n}"),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:{port}"}, "{n}"),
        # One TPU slice of two hosts, and two of one each, as GKE names them.
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": "{n}"}, "all"),
        (
            TPU
            | {
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "0",
                "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
                "MEGASCALE_NUM_SLICES": "2",
                "MEGASCALE_SLICE_ID": "{n}",
            },
            "all",
        ),
    ],
    ids=["slurm-a-node", "slurm-a-gpu", "slurm-some-gpus", "mpi", "mpi5", "slice", "slices"],
)
@pytest.mark.slow_except("slurm-a-node", "slices")
def test_processes_of_a_launcher_find_each_other(variables, gpus):
    port, both = str(free_port()), []
    for n in range(2):
        own = {name: value.format(n=n, port=port) for name, value in variables.items()}
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_PORT": port} | own
        if "JAX_FORCE_TPU_INIT" in own:
            # JAX looks for it when it is imported.
            line, pipe = [sys.executable, "-c", JOINED], subprocess.PIPE
            both.append(subprocess.Popen(line, env=env, stdout=pipe, stderr=pipe, text=True))
        else:
            both.append(start_python("-c", JOINED, env=env))
    ends = [process.communicate(timeout=90) for process in both]
    for n, (output, errors) in enumerate(ends):
        assert both[n].returncode == 0, errors
        assert output.split() == [str(n), "2", gpus.format(n=n)]


def test_episodes_are_cut_over_the_processes_that_play():
    each = [cluster_of(index) for index in range(3)]
    assert [cluster.own(range(12)) for cluster in each] == [range(0, 4), range(4, 8), range(8, 12)]
    assert [len(cluster.own(range(16))) for cluster in each] == [5, 5, 6]
    assert each[1].parts("abcdef") == ["ab", "cd", "ef"]
    apart = [cluster_of(index, num_rollout=4) for index in range(3)]
    assert [cluster.own(range(12)) for cluster in apart] == [range(6), range(6, 12), range(0)]
    assert [(p.plays, p.trains) for p in apart] == [(True, False), (True, False), (False, True)]
    assert apart[2].own_devices == apart[0].own_devices, "of the first that plays, for its sizes"
    assert apart[1].own_mesh(MeshShape(data=2, tensor=2)) == MeshShape(data=1, tensor=2)
    # Three processes share a mesh whose data axis they do not divide.
    spans = MeshShape(data=2, tensor=3)
    assert each[1].spans(spans) and not each[1].spans(MeshShape(data=3, tensor=2))
    assert each[1].own_mesh(spans) == spans and each[1].devices_of(spans) == each[0].devices
    assert (each[1].num_row_devices(1), each[1].num_row_devices(3)) == (6, 2)
    share = RolloutConfig(num_slots=8, episodes_per_step=16).part(len(apart[0].players))
    assert (share.num_slots, share.episodes_per_step) == (4, 8)


def test_devices_that_are_split_by_the_selector_are_the_first_and_the_last_of_each_process():
    """Three processes have 0 1, 2 3 and 4 5."""
    cluster = cluster_of(1).split_by((3,))
    assert [device.id for device in cluster.playing(3)] == [0, 2, 4]
    assert [device.id for device in cluster.training(3)] == [1, 3, 5]
    assert cluster.devices == cluster_of(0).devices and cluster.disjoint
    assert cluster.players == cluster.trainers == (0, 1, 2)
    six = tuple(Device(id=n, process_index=0) for n in range(6))
    alone = dataclasses.replace(
        cluster_of(0, count=1), rollout_devices=six, train_devices=six, splits=(2, 4)
    )
    assert [device.id for device in alone.playing(4)] == [0, 1, 2, 3]
    assert [device.id for device in alone.training(4)] == [2, 3, 4, 5]
    words = "1 process with 6 devices: 2 or 4 play, as is fastest, the others train"
    assert str(alone) == words
    # Rows are cut so that every mesh of 2 or of 4 devices can hold them.
    assert alone.num_row_devices(1) == 4
    # Of 2 and 4 that are those of two processes: 1 or 2 of an engine.
    assert cluster.split_by((2, 4)).num_row_devices(2) == 2
    assert cluster_of(0, num_rollout=2).num_row_devices(1) == 2


def test_a_stage_has_devices_of_one_kind():
    fast, slow = (
        tuple(types.SimpleNamespace(process_index=0, device_kind=kind) for _ in range(2))
        for kind in ("NVIDIA H100", "NVIDIA A100")
    )

    def check(playing, training):
        Cluster(
            index=0, count=1, rollout_devices=playing, train_devices=training, timeout_s=1.0
        ).check_kinds()

    check(fast, fast)
    check(fast, slow)
    with pytest.raises(ValueError, match="that play are of different kinds: 2 x NVIDIA H100, 2 x"):
        check((*fast, *slow), (*fast, *slow))
    with pytest.raises(ValueError, match=r"that train are .*CUDA_VISIBLE_DEVICES.*num_rollout"):
        check(fast, (*fast, *slow))


def test_the_groups_of_one_process():
    devices = jax.devices()
    alone = find_cluster(0, 1.0)
    assert list(alone.rollout_devices) == list(alone.train_devices) == devices
    assert not alone.disjoint and alone.plays and alone.trains
    assert alone.gather({"a": (1, None)}, "") == [{"a": [1, None]}], "as JSON gives it back"
    halves = find_cluster(4, 1.0)
    assert (list(halves.rollout_devices), list(halves.train_devices)) == (devices[:4], devices[4:])
    assert halves.disjoint and halves.own_devices == halves.rollout_devices
    with pytest.raises(ValueError, match="leave at least one to train"):
        find_cluster(8, 1.0)


def test_the_counts_of_two_rollouts_are_one_and_their_longest_times_too():
    one = RolloutStats(rounds=3, rollout_tokens=10, tokens_in_flight_max=7, env_wait_s=0.5)
    other = RolloutStats(rounds=5, rollout_tokens=1, tokens_in_flight_max=2, preemption="why")
    expected = RolloutStats(
        rounds=5, rollout_tokens=11, tokens_in_flight_max=9, env_wait_s=0.5, preemption="why"
    )
    assert total_stats([one, other]) == expected


# How they find each other, and end.


def start(**settings) -> Fork:
    """A process that joins others, by `start_processes` with these settings."""
    program = (
        "from earl_jax.launch.distributed import DistributedConfig, start_processes\n"
        f"start_processes(DistributedConfig(**{settings!r}))"
    )
    return start_python("-c", program, env=os.environ)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("process_id", [0, 1])
def test_process_that_does_not_find_the_others_says_so(process_id):
    address = f"127.0.0.1:{free_port()}"
    process = start(
        coordinator=address, num_processes=2, process_id=process_id, start_timeout_s=3.0
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    words = errors.splitlines()[-1]
    assert words.startswith(f"error: process {process_id} on ")
    assert "did not find the others within 3 s" in words
    assert ("process 1 did not come" in words) == (process_id == 0)
    assert "config.distributed.coordinator and num_processes alike" in words


def test_an_address_that_is_none(monkeypatch):
    # What is no process 0 does not greet.
    monkeypatch.setattr(rendezvous, "_GREETING_S", 0.2)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for address, words in (
            ("8476", "write it as HOST:PORT"),
            ("fd00::1:8476", r"or '\[fd00::1\]:8476' with an IPv6 address"),
            (f"127.0.0.1:{port}", f"cannot listen on port {port}"),
        ):
            config = DistributedConfig(coordinator=address, num_processes=2, process_id=0)
            with pytest.raises(InputError, match=words):
                start_processes(config)


def own_address() -> str:
    """An address of this machine that is no loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


def is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 2.0).close()
    except ConnectionRefusedError:
        return False
    return True


def wait_until_open(process: Fork, address: str, port: int) -> None:
    deadline_s = time.monotonic() + 100
    while not is_open(address, port):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.1)


def test_coordinator_listens_at_the_address_that_it_was_given_alone():
    own, port = own_address(), free_port()
    process = start(
        coordinator=f"{own}:{port}", num_processes=2, process_id=0, start_timeout_s=60.0
    )
    try:
        wait_until_open(process, own, port)
        assert not is_open("127.0.0.1", port)
    finally:
        process.kill()
        _, errors = process.communicate()
    assert errors == ""


def test_ctrl_c_while_the_others_are_waited_for_is_one_line():
    """The wait is in C++, where Python's own handler is not called."""
    port = free_port()
    process = start(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=0)
    try:
        wait_until_open(process, "127.0.0.1", port)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == INTERRUPTED
    words = "stopped by Ctrl-C before the processes of the run found each other"
    assert errors.split("\n") == ["", words, ""]


def test_text_that_cannot_be_written_ends_no_command():
    """Half of an emoji, as a policy's JSON may have it, on any terminal."""
    code = "from earl_jax.launch.start import exit_status\n"
    code += "exit_status(lambda: print('\\ud83d \\u00e9'))"
    for encoding, shown in (("utf-8", "\\ud83d \u00e9\n"), ("ascii", "\\ud83d \\xe9\n")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
        assert (ran.returncode, ran.stdout.decode(encoding)) == (0, shown), ran.stderr


def test_ctrl_c_that_no_run_handles_is_one_line(capsys):
    def command() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    assert exit_status(command) == INTERRUPTED
    assert capsys.readouterr().err == "\nstopped by Ctrl-C\n"


@pytest.mark.parametrize(
    ("host", "address", "expected"),
    [
        ("localhost", "127.0.0.1", True),
        ("node0", "own", True),
        # As /etc/hosts of Debian has the host's own name; another host's; and none.
        ("node0", "127.0.1.1", False),
        ("node0", "203.0.113.1", False),
        ("node0", None, False),
    ],
)
def test_name_that_other_hosts_do_not_reach_is_listened_to_everywhere(
    host, address, expected, monkeypatch, capsys
):
    port, address = free_port(), own_address() if address == "own" else address

    def getaddrinfo(name: str, port: int, **_) -> list:
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    here = addresses_here(host, port)
    assert here == ([(socket.AF_INET, (address, port))] if expected else [])
    (listener,) = listen(f"{host}:{port}", here, 1)
    with listener:
        assert listener.getsockname()[0] == (address if expected else "0.0.0.0")
    assert ("listens on all interfaces" in capsys.readouterr().err) == (not expected)


def lose_one(how: str, lost: int, timeout_s: float, heartbeat_s: float) -> None:
    """Two processes gather until one kills itself, stops, hangs, or fails."""
    address, index = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    start_processes(
        DistributedConfig(
            coordinator=address, num_processes=2, process_id=index, heartbeat_s=heartbeat_s
        )
    )

    def gather() -> None:
        with end_together():
            cluster = find_cluster(0, timeout_s)
            assert cluster.gather({"index": index}, "the start") == [{"index": 0}, {"index": 1}]
            assert cluster.any(index == 1, "a flag") and not cluster.any(False, "a flag")
            with StageTimer()("rollout"):
                if index == lost:
                    fail()
                cluster.barrier("the end")

    def fail() -> None:
        if how == "raises":
            raise RestartNeeded("there was too little memory")
        if how == "mistake":
            raise InputError("config.seed is odd")
        if how == "bug":
            raise OSError("the disk is full")
        if how == "hangs":
            time.sleep(1000)
        if how == "network":
            print("cut", flush=True)
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, how))

    sys.exit(exit_status(gather))


def losing_lines(arguments: str, host: str) -> list[tuple[str, ...]]:
    """Returns the lines of Python that two processes of `lose_one` run."""
    program = f"import test_distributed; test_distributed.lose_one({arguments})"
    address = f"{host}:{free_port()}"
    return [("-c", program, address, str(index)) for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "lost", "timeout_s", "words"),
    [
        ("SIGSTOP", 0, 60.0, "process {lost} on {host} does not answer"),
        ("SIGSTOP", 1, 60.0, "process {lost} on {host} does not answer"),
        ("raises", 0, 60.0, "{who}: in the stage rollout: there was too little memory"),
        ("bug", 1, 60.0, "{who}: in the stage rollout: OSError: the disk is full"),
        ("mistake", 0, 60.0, "{who}: config.seed is odd"),
        (
            *("hangs", 1, 5.0),
            "process {lost} on {host} is still in the stage rollout (the end: nothing ",
        ),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_a_lost_process_ends_the_other_with_a_message_that_names_it(how, lost, timeout_s, words):
    """Runs of which one process is killed are in test_faults.py."""
    host = socket.gethostname()
    both = [
        start_python(*line, env=os.environ, cwd=ROOT / "tests")
        for line in losing_lines(f"{how!r}, {lost}, {timeout_s}, 10.0", "127.0.0.1")
    ]
    try:
        _, errors = both[1 - lost].communicate(timeout=90)
        if how in ("SIGSTOP", "hangs"):
            both[lost].kill()
        _, other_errors = both[lost].communicate(timeout=30)
    finally:
        for process in both:
            process.kill()
            process.wait()
    words = words.format(lost=lost, host=host, who=f"process {lost} of 2 on {host}")
    messages = [
        [line for line in each.splitlines() if line.startswith("error: ")]
        for each in (errors, other_errors)
    ]
    status = 2 if how == "mistake" else 1
    assert both[1 - lost].returncode == status, errors
    if how == "mistake":
        # In the first process alone, whichever has made it.
        assert both[lost].returncode == 2
        assert sorted(map(len, messages)) == [0, 1] and len(messages[0 if lost else 1]) == 1
        assert words in (*messages[0], *messages[1])[0]
        assert "Traceback" not in errors + other_errors
        return
    assert (
        len(messages[0]) == 1
        and words in messages[0][0]
        and "Start all processes again" in messages[0][0]
    )
    assert "Traceback" not in errors
    if how in ("raises", "bug"):
        assert both[lost].returncode == 1 and len(messages[1]) == 1 and words in messages[1][0]
        assert ("Traceback" in other_errors) == (how == "bug")
    else:
        assert f"on {host}, in the stage rollout" in messages[0][0]


# Of the words of both processes.
LENGTHS = [[0, 0], [167, 3], [1, 40_000], [400_000, 400_000]]


def gather_words(lengths: list[list[int]]) -> list[list[int]]:
    """Gathers words of these lengths, those of a process in its column. Returns their lengths."""
    cluster, found = processes_only(60.0), []
    for each in lengths:
        words = cluster.gather("é" * each[cluster.index], "words")
        assert {*"".join(words)} <= {"é"}
        found.append([len(word) for word in words])
    return found


def in_a_pair(folder: str) -> tuple[list[list[int]], list[int], list[str]]:
    """Runs in two processes what three tests look at."""
    return (
        gather_words(LENGTHS),
        in_and_out(folder),
        planned(build_run(make_config(PLANNED)).problem),
    )


PLANNED = {
    "selector": {"budget_bytes_per_device": 10**9},
    "asynchrony": {"max_staleness": 1},
    "model": {"num_heads": 4, "num_kv_heads": 4},
}


def planned(problem: Problem) -> list[str]:
    """Returns the rollout meshes of a problem, and what is chosen at rising contexts."""
    schedule = make_schedule(problem, ThroughputTable(), [64, 1024, 4096])
    meshes = [str(mesh) for mesh in problem.meshes("rollout")]
    return meshes + [reason for stop in schedule for reason in stop.reasons]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Returns the findings of each of the two processes, and the folder of their export."""
    folder = tmp_path_factory.mktemp("pair")
    results = RealProcesses(2, 2, "test_distributed:in_a_pair", str(folder)).results(250)
    return list(zip(*results, strict=True)), folder


@pytest.mark.slow
def test_messages_of_every_length_are_gathered(pair):
    """The longest are 2.4 MB each, more than a connection holds."""
    assert pair[0][0] == (LENGTHS, LENGTHS)


@pytest.mark.slow
def test_a_run_of_two_processes_chooses_as_the_plan_of_two_hosts(pair):
    """The plan of one host with as many devices has other meshes."""
    (_, _, (here, there)), _ = pair
    config = make_config(PLANNED)
    model, vocab_size = find_model(config, None)
    two, one = (
        planned(planned_problem(config, model, vocab_size, parse_topology(name), 10**9))
        for name in ("cpu:2x2", "cpu:4")
    )
    assert here == there == two != one


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_processes_whose_network_is_cut_end_both_and_name_each_other():
    """Two hosts, of which one loses its link: both live, and no connection is closed."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces(2, mbit_per_s=1000.0, window_kib=0))
        except RuntimeError as error:
            pytest.skip(f"no network namespaces here: {error}")
        lines = losing_lines("'network', 1, 80.0, 10.0", hosts[0].address)
        both = [
            subprocess.Popen(
                [*host.prefix, sys.executable, *line],
                cwd=ROOT / "tests",
                env=os.environ | {"PYTHONPATH": python_path(ROOT, ROOT / "tests")},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, line in zip(hosts, lines, strict=True)
        ]
        try:
            assert any(line == "cut\n" for line in both[1].stdout), both[1].communicate()
            switch = f"earl{os.getpid()}sw"
            subprocess.run(["ip", "-n", switch, "link", "set", "port1", "down"], check=True)
            cut_s = time.monotonic()
            ends = [process.communicate(timeout=90) for process in both]
        finally:
            for process in both:
                process.kill()
                process.wait()
    assert time.monotonic() - cut_s < 75, "before the time for a wait is over"
    for index, (_, errors) in enumerate(ends):
        assert both[index].returncode == 1, errors
        (message,) = (line for line in errors.splitlines() if line.startswith("error: "))
        assert f"process {index} on earl" in message and "in the stage rollout" in message
        assert f"process {1 - index} on earl" in message
        assert "does not answer" in message or "cannot be reached" in message, message
        # The others are XLA's (docs/howto/launch.md).
        assert len(errors.splitlines()) <= 31, errors


# Real processes of the command.


def episodes_of(workdir: Path, step: int) -> list[dict]:
    return read_trajectories(workdir / "trajectories" / f"step_{step:06d}.jsonl")


def assert_same_run(one: Path, other: Path) -> None:
    """The same tokens, and weights that differ by rounding."""
    for step in (1, 2):
        for left, right in zip(episodes_of(one, step), episodes_of(other, step), strict=True):
            assert {k: v for k, v in left.items() if k != "logprobs"} == {
                k: v for k, v in right.items() if k != "logprobs"
            }
    for left, right in zip(final_parameters(one), final_parameters(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)
    for workdir in (one, other):
        lines = steps_of(workdir)
        assert [line["step"] for line in lines] == [1, 2]
        assert all(line["episodes"] == 32 for line in lines)
        assert all(line["logprob_mismatch_max"] < 1e-4 for line in lines)


def assert_past_the_hosts(*workdirs: Path) -> None:
    for line in (line for workdir in workdirs for line in steps_of(workdir)):
        assert (line["dispatch_host_bytes"], line["publish_host_bytes"]) == (0, 0)


def train_here(workdir: Path, settings: dict) -> Path:
    """Trains as `Command` in one process, which is this one with its eight devices."""
    train(config_of(SMALL | settings), workdir)
    return workdir


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """A run of one process."""
    return train_here(tmp_path_factory.mktemp("alone") / "one", ALL)


def test_two_processes_train_as_one_does(one, tmp_path):
    run = Command(tmp_path / "two", 2, **ALL)
    ends = run.ends()
    assert [status for status, _, _ in ends] == [0, 0], ends
    order = f"in this order: {socket.gethostname()} (8 devices of processes 0, 1)"
    assert [order in output for _, output, _ in ends] == [True, False]
    assert_same_run(one, run.workdir)
    assert_past_the_hosts(one, run.workdir)


def play_unequally(folder: str) -> list[list[int]]:
    """In each process: two runs; in each of them one process sleeps before each round.

    Returns how many episodes this process played in each rollout of each run.
    """
    step, make_share, played = RolloutService.step, rollouts.share_of, []
    config = config_of(SMALL | ALL | {"rollout.order": "queue"})
    for slow in range(2):
        shares = []

        def sleepy(self, slow=slow):
            if jax.process_index() == slow:
                time.sleep(0.1)
            return step(self)

        def noted(*given, shares=shares):
            shares.append(make_share(*given))
            return shares[-1]

        RolloutService.step, rollouts.share_of = sleepy, noted
        train(config, Path(folder) / f"slow_{slow}")
        played.append([len(share.numbers) for share in shares])
    return played


# What the engines did, and which rows changed device.
BY_WHO_PLAYS = {
    "prefill_tokens",
    "shared_tokens",
    "copied_tokens",
    "other_shard_episodes",
    "decode_rows",
    "idle_rows",
    "tokens_in_flight_max",
    "dispatch_bytes",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_bit_depends_on_which_process_plays_what(tmp_path):
    """Sixteen of 32 episodes are in a queue; the process that does not sleep takes most."""
    processes = RealProcesses(2, 4, "test_distributed:play_unequally", str(tmp_path))
    played = list(zip(*processes.results(500), strict=True))
    workdirs = [tmp_path / f"slow_{slow}" for slow in range(2)]
    for slow, each in enumerate(played):
        # Two steps; evaluations of sixteen games have a slot for each.
        steps = [pair for pair in zip(*each, strict=True) if sum(pair) == 32]
        # On a busy machine the other may be as slow in one of them.
        assert len(steps) == 2 and min(pair[slow] for pair in steps) < 14, played
    assert_equal(*map(final_parameters, workdirs))
    for step in (1, 2):
        assert episodes_of(workdirs[0], step) == episodes_of(workdirs[1], step)
    for left, right in zip(*map(steps_of, workdirs), strict=True):
        differ = {name for name in left.keys() | right if left.get(name) != right.get(name)}
        assert differ <= TIMES | BY_WHO_PLAYS


@pytest.mark.slow
def test_streams_an_average_and_a_teacher_are_those_of_one_process(one, tmp_path):
    """One process plays, and evaluates the average that the other has, which trains."""
    settings = APART | {
        "reference_from": str(one),
        "algorithm_args.kl_coefficient": 0.1,
        "train.sft_weight": 0.5,
        "train.ema_decay": 0.5,
        "checkpoint.export": True,
    }
    alone = train_here(tmp_path / "alone", settings)
    two = Command(tmp_path / "two", 2, **settings).done()
    assert_same_run(alone, two)
    assert_past_the_hosts(alone, two)
    lines = steps_of(two)
    assert all(line["publish_bytes"] > 0 and line["dispatch_bytes"] > 0 for line in lines)
    files = [each / "export" / "step_000002" / "model.safetensors" for each in (alone, two)]
    left, right = map(load_file, files)
    assert left.keys() == right.keys()
    for name, weight in left.items():
        np.testing.assert_allclose(weight, right[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "words"),
    [
        (["--config.seed=1"], "config.seed is 0 in process 0 on {host}, 1 in process 1 on {host}"),
        (["--config.devices.num_cpu_devices=2"], "play on [4, 2] devices"),
    ],
)
def test_processes_that_were_started_differently_say_how(tmp_path, own, words):
    command = Command(tmp_path / "w", 2, [], own, **ALL)
    ends = command.ends()
    assert [status for status, _, _ in ends] == [2, 2], ends
    assert words.format(host=socket.gethostname()) in ends[0][2]
    assert "error: " not in ends[1][2] and "Traceback" not in ends[0][2] + ends[1][2]


SOURCE = ROOT / "tests/reference/qwen2_tied"


def in_and_out(folder: str) -> list[int]:
    """Reads a checkpoint over all processes' devices, and exports it: the embedding's rows here."""
    model = {"path": str(SOURCE), "compute_dtype": "float32"}
    sections = {"model": model, "train": {"lora": {"rank": 2}}}
    run = build_run(make_config(sections))
    state = run.learner.first_state(MeshShape(data=1, fsdp=4))
    rows = [shard.data.shape[1] for shard in state.base["embed"].addressable_shards]
    exporter_of(run).export(state, Path(folder) / "export", 1)
    run.cluster.barrier("the end")
    return rows


@pytest.mark.slow
def test_a_checkpoint_goes_in_and_out_over_two_processes(pair):
    """Each reads its devices' slices, and the first writes every bit: new adapters change none."""
    (_, rows, _), folder = pair
    assert rows == ([8, 8], [8, 8])
    out = folder / "export/step_000001"
    there, back = (load_file(folder / "model.safetensors") for folder in (SOURCE, out))
    assert there.keys() == back.keys()
    for name, values in there.items():
        np.testing.assert_array_equal(back[name], values)
    adapter = load_file(folder / "export/step_000001_adapter/adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 7
    for name, values in adapter.items():
        assert np.any(values) == ("lora_A" in name)


# The order of the devices.


def devices_of(num_hosts: int, a_host: int, a_process: int) -> tuple[list[Device], list[str]]:
    """Devices as JAX lists them, and the hosts of their processes, which go round the hosts."""
    num_processes = num_hosts * a_host // a_process
    devices = [Device(id=n, process_index=n // a_process) for n in range(num_hosts * a_host)]
    return devices, [f"n{process % num_hosts}" for process in range(num_processes)]


@pytest.mark.parametrize(("num_hosts", "a_process"), [(2, 1), (2, 8), (4, 2), (16, 8)])
def test_tensor_and_context_stay_inside_a_host(num_hosts, a_process):
    """Wherever they have no more devices than a host, however the processes are numbered."""
    devices, hosts = devices_of(num_hosts, 8, a_process)
    ordered = host_by_host(devices, hosts)
    assert sorted(d.id for d in ordered) == list(range(num_hosts * 8))
    for inner in (MeshShape(tensor=t, context=c) for t in (1, 2, 4, 8) for c in (1, 2, 4)):
        if inner.num_devices > num_hosts * 8:
            continue
        outside = num_hosts * 8 // inner.num_devices
        for fsdp in (f for f in (1, 2, 8) if outside % f == 0):
            shape = inner._replace(data=outside // fsdp, fsdp=fsdp)
            grid = np.array(ordered, dtype=object).reshape(shape)
            across, inside = axes_across_hosts(grid, hosts)
            assert sorted((*across, *inside)) == sorted(
                axis for axis, n in shape._asdict().items() if n > 1
            )
            if inner.num_devices <= 8:
                assert set(across) <= {"data", "fsdp"}, shape


def test_slices_come_before_hosts():
    devices = [
        types.SimpleNamespace(id=n, process_index=n // 2, slice_index=n // 2 % 2) for n in range(8)
    ]
    assert [d.id for d in host_by_host(devices, ["a", "b", "c", "d"])] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_the_order_of_the_hosts_in_words():
    devices, hosts = devices_of(2, 4, 2)
    cluster = Cluster(
        index=0,
        count=4,
        rollout_devices=tuple(host_by_host(devices, hosts)),
        train_devices=tuple(host_by_host(devices, hosts)),
        timeout_s=1.0,
        hosts=tuple(hosts),
    )
    assert cluster.num_hosts == 2 and cluster.players == (0, 2, 1, 3)
    assert cluster.order_in_words() == (
        "meshes go over the hosts in this order: n0 (4 devices of processes 0, 2), "
        "n1 (4 devices of processes 1, 3)"
    )
    assert dataclasses.replace(cluster, index=2).own(range(8)) == range(2, 4)
    assert cluster.of_players(["a", "b", "c", "d"]) == ["a", "c", "b", "d"]


# A rollout mesh that spans processes.


def spanning(mesh: str, train: str, num_devices: int, num: int) -> dict:
    """A run on so many devices, of `num` processes."""
    return {
        "model.num_layers": 1,
        "devices.num_cpu_devices": num_devices // num,
        "selector.rollout_meshes": f"('{mesh}',)",
        "selector.train_meshes": f"('{train}',)",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_that_play_together_train_as_one_does(tmp_path):
    """Two of four processes have each row shard, and all read all slots."""
    mesh, train = "data=2,tensor=4", "data=2,fsdp=4"
    given = spanning(mesh, train, 8, 4) | {"model.num_kv_heads": 4}
    runs = [
        train_here(tmp_path / "one", given),
        Command(tmp_path / "four", 4, **given).done(420),
    ]
    assert_same_run(*runs)
    assert_past_the_hosts(*runs)
    for left, right in zip(*map(steps_of, runs), strict=True):
        assert left["rollout_mesh"] == right["rollout_mesh"] == mesh
        for name in ("rollout_tokens", "prefill_tokens", "shared_tokens", "decode_rows"):
            assert left[name] == right[name], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_that_play_together_and_are_stopped_end_as_if_left_alone(tmp_path):
    """One is killed: the same bits as of one process that has both devices, and no task twice.

    The first process has the environments, and writes checkpoints, metrics and episodes. Three of
    four layers are of linear attention, whose states are cut over both processes.
    """
    given, steps = spanning("data=1,tensor=2", "data=2", 2, 2), range(1, 7)
    given |= {
        "num_steps": len(steps),
        "model.preset": "qwen3.5-0.8b",
        "model.num_layers": 4,
        "model.width": 32,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_size": 64,
        "model.compute_dtype": "float32",
        "selector.budget_bytes_per_device": 0,
        "rollout.episodes_per_step": 16,
        "distributed.heartbeat_s": 15,
        "checkpoint.every_steps": 2,
        "log.trajectories_every_steps": 1,
    }
    alone = given | {"devices.num_cpu_devices": 2}
    whole = Command(tmp_path / "whole", 1, **alone).done()

    command = Command(tmp_path / "run", 2, **given)
    command.after_step(3)
    command.all[1].kill()
    (status, _, errors), (killed, _, _) = command.ends()
    assert (status, killed) == (1, -signal.SIGKILL)
    assert f"process 1 on {socket.gethostname()} has ended" in errors, errors
    assert "Start all processes again" in errors and "Traceback" not in errors
    run = Command(tmp_path / "run", 2, **given).done()
    assert_equal(final_parameters(whole), final_parameters(run))
    played = [[episodes_of(each, step) for step in steps] for each in (whole, run)]
    assert played[0] == played[1]
    numbers = [line["episode"] for lines in played[1] for line in lines]
    assert sorted(numbers) == list(range(16 * len(steps)))
    assert [line["step"] for line in steps_of(run)] == list(steps)


# The number of processes.


CHANGES = {
    "num_steps": 6,
    "selector.budget_bytes_per_device": 2_460_000,
    "rollout.context_buckets": "(24,40)",
    "selector.rollout_meshes": "('data=8','data=4,tensor=2')",
    "train.sft_steps": 6,
    "train.sft_updates": 3,
    # Processes that compile on two cores may be silent for long.
    "distributed.heartbeat_s": 300,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_change_meshes_at_the_same_step_as_one(tmp_path):
    """1 x 8 and 2 x 4 devices: the same losses, the same meshes at every step."""
    one = steps_of(train_here(tmp_path / "one", CHANGES))
    several = steps_of(Command(tmp_path / "two", 2, **CHANGES).done(280))
    for left, right in zip(one, several, strict=True):
        for name in ("rollout_mesh", "train_mesh", "switched", "rollout_max_tokens"):
            assert left[name] == right[name], (left["step"], name)
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4, abs=1e-6)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-3)
    assert any(line["switched"] for line in one[1:])
