# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The scripts of gpu_scripts/ and tpu_scripts/, with stand-ins of what they call on PATH."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from benchmarks.runs import free_port
from earl_jax.launch.distributed import DistributedConfig
from earl_jax.launch.distributed import _find_place as find_place
from tests.support import ROOT, python_path
from tests.support.runs import steps_of
from tests.support.settings import small, write_config
from tests.support.talks import sft_run, sums

SCRIPTS = sorted(
    [*ROOT.glob("gpu_scripts/*.s*"), *ROOT.glob("tpu_scripts/*.sh")], key=lambda path: str(path)
)
STAND_INS = (
    "srun",
    "sbatch",
    "scancel",
    "scontrol",
    "ssh",
    "gcloud",
    "kubectl",
    "xpk",
    "uv",
    "pip",
)
CONFIG = "--config=configs/tictactoe_tiny_cpu.py"
CONTEXTS = "--config.rollout.context_buckets=(48,)"
SBATCH = ["sbatch", "--nodes=2", "--gpus-per-node=8", "gpu_scripts/slurm.sbatch"]
WHERE = ["--name=earl", "--zone=us-east5-b"]
TPU = [*WHERE, "--type=v6e-16"]
MIG = [*WHERE, "--type=tpu7x-standard-4t", "--topology=2x2x2", "--mig"]
MIG += ["--version=family", "--image_project=images"]
POD = ["--name=earl", "--image=registry/earl:1", "--claim=shared"]
GPU_POD = [*POD, "--nodes=2"]
TPU_POD = [*POD, "--accelerator=tpu-v6e-slice", "--topology=4x4"]
XPK = [*TPU, "--cluster=c", "--image=registry/earl:1"]


class Machine:
    """A machine with the stand-ins, on which scripts run from the repository's folder."""

    def __init__(self, folder: Path):
        self.home = folder
        (folder / "bin").mkdir()
        for name in STAND_INS:
            self.program(name, f'{ROOT / "tests/support/stand_ins.py"} {name} "$@"')
        # In the place of the training command: says who it is.
        self.program("probe", f'-c {shlex.quote(PROBE)} "$@"')
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_"))},
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "RECORD": str(folder / "record"),
            "JAX_COORDINATOR_PORT": str(free_port()),
            "PYTHON": sys.executable,
            "PYTHONPATH": python_path(ROOT),
            "PYTHONUNBUFFERED": "1",
            "WAIT_S": "0",
        }

    def program(self, name: str, arguments: str) -> Path:
        path = self.home / "bin" / name
        path.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}\n")
        path.chmod(0o755)
        return path

    def start(self, *line: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            line,
            cwd=ROOT,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *line: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(*line, **variables)
        try:
            output, errors = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(line, process.returncode, output, errors)

    def records(self) -> list[dict]:
        path = self.home / "record"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def calls(self, name: str) -> list[list[str]]:
        return [each["arguments"] for each in self.records() if each.get("name") == name]


# The variables that tell a process who it is, one JSON object a line.
PROBE = """
import json, os, sys
names = "COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID", "LOCAL_DEVICE_IDS"
names = (*(f"JAX_{name}" for name in names), "XLA_FLAGS", "SLURM_PROCID")
seen = {"place": {name: os.environ.get(name) for name in names}}
seen |= {"arguments": sys.argv[1:], "cwd": os.getcwd()}
sys.stdout.write(json.dumps(seen) + chr(10))
sys.exit(int(os.environ.get("PROBE_STATUS", 0)))
"""


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def objects(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"place"')]


# All scripts.


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_script_says_its_usage_and_passes_shellcheck(path, machine):
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and lines[1].startswith("# usage: ")
    assert path.parent.name == "gpu_scripts" or len(lines) <= 50
    sourced = path.name in ("flags.sh", "workers.sh", "settings.sh")
    assert sourced or "set -euo pipefail" in lines
    if not sourced:
        done = machine.run("bash", str(path))
        assert done.returncode == 2 and done.stderr.strip() in lines[1].removeprefix("# ")
        assert machine.records() == []
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (uv sync --group lint)")
    checked = machine.run(shellcheck, "-x", "-P", "SCRIPTDIR", str(path.relative_to(ROOT)))
    assert checked.returncode == 0, checked.stdout


DRY = {
    "slurm": ["bash", "gpu_scripts/slurm.sbatch", "--dry-run"],
    "ssh": ["gpu_scripts/launch.sh", "--dry-run", "--hosts=a,b"],
    "kubernetes": ["gpu_scripts/kubernetes.sh", "--dry-run", *GPU_POD],
    "tpu": ["tpu_scripts/run.sh", "--dry-run", *TPU],
    "mig": ["tpu_scripts/run.sh", "--dry-run", *MIG],
    "gke": ["tpu_scripts/gke.sh", "--dry-run", *TPU_POD],
    "xpk": ["tpu_scripts/xpk.sh", "--dry-run", *XPK],
}


@pytest.mark.slow_except("slurm")
@pytest.mark.parametrize("line", DRY.values(), ids=DRY)
def test_dry_run_prints_the_commands_and_the_config_and_runs_nothing(line, machine):
    done = machine.run(*line, CONFIG, "--workdir=/shared/w", CONTEXTS)
    assert done.returncode == 0, done.stderr
    commands, brace, config = done.stdout.partition("\n{\n")
    assert "earl_jax.main" in commands or "args: [" in commands
    assert "48" in commands and "/shared/w" in commands
    config = json.loads(brace + config)
    assert config["workdir"] == "/shared/w" and config["rollout"]["context_buckets"] == [48]
    assert config["num_steps"] == 1000
    assert machine.records() == []


def test_dry_run_of_a_config_that_is_none_is_a_mistake(machine):
    done = machine.run(*DRY["slurm"], CONFIG, "--workdir=/shared/w", "--config.rollout.num_slot=1")
    assert done.returncode == 2 and "did you mean 'num_slots'?" in done.stderr


# Starting again.

LAUNCHERS = {
    "slurm": SBATCH,
    "ssh": ["gpu_scripts/launch.sh", "--hosts=127.0.0.1"],
    "tpu": ["tpu_scripts/run.sh", *TPU],
    "instances": ["tpu_scripts/run.sh", *MIG],
}


@pytest.mark.slow_except("ssh-*", "slurm-1,1,0-0")
@pytest.mark.parametrize(
    ("launcher", "statuses", "expected"),
    [
        # Done; a mistake; lost twice; lost, and then a mistake; stopped.
        ("ssh", "0", 0),
        ("ssh", "2", 2),
        ("ssh", "1,1,0", 0),
        ("ssh", "1,255,2", 2),
        ("ssh", "75,0", 0),
        ("slurm", "1,1,0", 0),
        ("slurm", "1,255,2", 2),
        ("slurm", "75,0", 0),
        # These two have one loop, over different commands for their workers.
        ("tpu", "1,255,2", 2),
        ("tpu", "75,0", 0),
        ("instances", "1,1,0", 0),
    ],
)
def test_lost_run_starts_again_and_a_mistake_does_not(launcher, statuses, expected, machine):
    line = [*LAUNCHERS[launcher], CONFIG, "--workdir=/w"]
    done = machine.run(*line, STATUSES=statuses, WORKERS="1" if launcher == "instances" else "2")
    assert done.returncode == expected, done.stderr
    starts = statuses.count(",") + 1
    assert (machine.home / "starts").read_text() == str(starts)
    assert done.stderr.count("starting the run again") == starts - 1


@pytest.mark.slow
def test_worker_that_is_away_when_the_run_starts_again_is_waited_for(machine):
    (machine.home / "away").write_text("at the second start")
    done = machine.run("tpu_scripts/run.sh", *TPU, CONFIG, "--workdir=/w", STATUSES="255,0")
    assert done.returncode == 0, done.stderr
    assert (machine.home / "starts").read_text() == "2"
    assert done.stderr.count("starting the run again") == 2


def test_preempted_tpus_are_requested_and_set_up_again(machine):
    (machine.home / "state").write_text("SUSPENDED")
    line = ["tpu_scripts/run.sh", *TPU, "--spot", "--num_slices=2", "--prepare=echo ready"]
    done = machine.run(*line, CONFIG, "--workdir=/w", STATUSES="0")
    assert done.returncode == 0, done.stderr
    verbs = [call[3] for call in machine.calls("gcloud")]
    assert verbs == ["describe", "delete", "create", "describe", "scp", "ssh", "ssh"]
    create = machine.calls("gcloud")[2]
    assert {"--spot", "--node-count=2", "--node-prefix=earl", "--zone=us-east5-b"} <= set(create)
    assert "--runtime-version=v2-alpha-tpuv6e" in create
    setup = next(a for a in machine.calls("gcloud")[5] if a.startswith("--command="))
    assert setup.startswith("--command=echo ready && mkdir -p earl_jax && tar xzf")


def test_slurm_job_whose_time_is_over_saves_and_goes_back_to_the_queue(machine):
    waits = (
        "import signal, sys, time; stop = lambda *_: (print('saved'), sys.exit(75)); "
        "signal.signal(15, stop); print('plays'); time.sleep(60)"
    )
    python = machine.program("waits", f'-c "{waits}"')
    job = machine.start(*SBATCH, CONFIG, "--workdir=/w", PYTHON=str(python))
    assert job.stdout.read(len("plays") * 2 + 2).split() in (["plays"] * 2, ["playsplays"])
    os.kill(job.pid, signal.SIGUSR1)
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert output.count("saved") == 2, "srun would have killed them at a SIGTERM of its own"
    assert machine.calls("scontrol") == [["requeue", "7"]]
    assert len(machine.calls("srun")) == 1


def test_mistake_that_each_task_of_slurm_finds_by_itself_ends_the_job(machine):
    """The slower task has time to say so too: killed by srun, its status would be 137."""
    code = (
        "import os, sys, time; time.sleep(int(os.environ['SLURM_PROCID'])); "
        "print('error: x', file=sys.stderr); sys.exit(2)"
    )
    python = machine.program("mistaken", f"-c {shlex.quote(code)}")
    done = machine.run(*SBATCH, CONFIG, "--workdir=/w", PYTHON=str(python))
    assert done.returncode == 2 and done.stderr.count("error: x") == 2
    assert len(machine.calls("srun")) == 1


def test_launch_sh_stops_all_processes_when_it_is_told_to(machine):
    waits = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75))"
    python = machine.program("waits", f'-c "{waits}; print(1); time.sleep(60)"')
    line = ["gpu_scripts/launch.sh", "--per_host=2", CONFIG, "--workdir=/w"]
    job = machine.start(*line, PYTHON=str(python))
    # Both write to one pipe, a line end apart.
    assert "".join(job.stdout.readline() for _ in range(2)).split() in (["1", "1"], ["11"])
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 75, job.stderr.read()
    job.communicate()


def test_launch_sh_ends_all_processes_when_one_was_given_a_mistake(machine):
    """Such as a port that is busy: the others would wait for it until their time is over."""
    code = (
        "import os, sys, time; os.environ['JAX_PROCESS_ID'] == '0' and sys.exit(2); time.sleep(60)"
    )
    python = machine.program("mistaken", f'-c "{code}"')
    line = ["gpu_scripts/launch.sh", "--per_host=3", CONFIG, "--workdir=/w"]
    start_s = time.monotonic()
    done = machine.run(*line, PYTHON=str(python))
    assert done.returncode == 2 and "starting the run again" not in done.stderr
    assert time.monotonic() - start_s < 50


# What the processes get.


def test_slurm_starts_a_task_a_node_in_the_submitted_folder(machine):
    probe, image = str(machine.home / "bin/probe"), {"IMAGE": "img", "MOUNTS": "/data:/data"}
    done = machine.run(*SBATCH, CONFIG, "--workdir=/w", PYTHON=probe)
    assert done.returncode == 0, done.stderr
    seen = objects(done.stdout)
    assert {each["place"]["SLURM_PROCID"] for each in seen} == {"0", "1"}
    for each in seen:
        assert each["cwd"] == str(ROOT)
        assert each["arguments"] == ["-m", "earl_jax.main", CONFIG, "--workdir=/w"]
        assert "--xla_gpu_enable_latency_hiding_scheduler=true" in each["place"]["XLA_FLAGS"]
    assert machine.run(*SBATCH, CONFIG, "--workdir=/w", STATUSES="0", **image).returncode == 0
    container = [a for a in machine.calls("srun")[-1] if a.startswith("--container")]
    assert f"--container-mounts={ROOT}:{ROOT},/data:/data" in container
    assert "--container-image=img" in container


@pytest.mark.parametrize(
    ("flags", "coordinator", "gpus"),
    [
        (["--per_host=2", "--port=9000"], "localhost:9000", ["0", "1"]),
        (["--hosts=me@h1,h2"], "h1:8476", [None, None]),
        (["--hosts=h1,h2", "--per_host=2"], "h1:8476", ["0", "1", "0", "1"]),
        (["--hosts=me@fd00::1,[fd00::2]"], "[fd00::1]:8476", [None, None]),
    ],
    ids=["here", "hosts", "several a host", "IPv6"],
)
def test_launch_sh_tells_each_process_who_it_is(flags, coordinator, gpus, machine):
    odd = "--config.env.args={'a b': \"$c\"}"
    line = ["gpu_scripts/launch.sh", *flags, CONFIG, "--workdir=/w", odd]
    done = machine.run(*line, PYTHON=str(machine.home / "bin/probe"), JAX_GIVEN="a b")
    assert done.returncode == 0, done.stderr
    seen = sorted(objects(done.stdout), key=lambda each: each["place"]["JAX_PROCESS_ID"])
    for n, (each, own) in enumerate(zip(seen, gpus, strict=True)):
        place = each["place"]
        assert place["JAX_COORDINATOR_ADDRESS"] == coordinator
        assert (place["JAX_PROCESS_ID"], place["JAX_NUM_PROCESSES"]) == (str(n), str(len(gpus)))
        assert place["JAX_LOCAL_DEVICE_IDS"] == own
        assert each["arguments"] == ["-m", "earl_jax.main", CONFIG, "--workdir=/w", odd]
    hosts = {call[2] for call in machine.calls("ssh")}
    named = next((flag for flag in flags if flag.startswith("--hosts=")), "")
    assert hosts == set(re.sub(r"--hosts=|[][]", "", named).split(",")) - {""}


def test_logs_are_the_last_lines_of_all_workers_and_those_of_worker_0_as_they_come(machine):
    logs = [machine.home / f"worker{n}" / "earl_jax/run.log" for n in range(2)]
    for n, log in enumerate(logs):
        log.parent.mkdir(parents=True)
        log.write_text(f"worker {n}\n")
    job = machine.start("tpu_scripts/logs.sh", *WHERE)
    try:
        lines = [job.stdout.readline() for _ in range(5)]
        assert {"worker 0\n", "worker 1\n"} <= {*lines[:4]} and lines[4] == "worker 0\n"
        with logs[0].open("a") as file:
            file.write("more\n")
        assert job.stdout.readline() == "more\n"
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.communicate()


def test_instance_group_that_lost_instances_is_deleted_and_created_as_a_whole(machine):
    """No instance in the stand-in's list is RUNNING."""
    done = machine.run("tpu_scripts/create.sh", *MIG, "--spot")
    assert done.returncode == 0, done.stderr
    calls = machine.calls("gcloud")
    verbs = [[word for word in call if not word.startswith("-")] for call in calls]
    group = ["compute", "instance-groups", "managed"]
    policy = ["compute", "resource-policies"]
    template = ["compute", "instance-templates"]
    assert verbs == [
        [*group, "describe", "earl"],
        [*group, "list-instances", "earl"],
        [*group, "delete", "earl"],
        [*template, "delete", "earl"],
        [*policy, "delete", "earl"],
        [*policy, "create", "workload-policy", "earl"],
        [*template, "create", "earl"],
        [*group, "create", "earl"],
        [*group, "wait-until", "earl"],
    ]
    assert "--accelerator-topology=2x2x2" in calls[5] and "--region=us-east5" in calls[5]
    assert {"--machine-type=tpu7x-standard-4t", "--provisioning-model=SPOT"} <= {*calls[6]}
    assert {"--size=2", "--template=earl", "--workload-policy=earl"} <= {*calls[7]}


def test_instance_group_starts_every_instance(machine):
    done = machine.run("tpu_scripts/setup.sh", *MIG)
    assert done.returncode == 0, done.stderr
    verbs = [call[1:3] for call in machine.calls("gcloud")]
    assert verbs.count(["instance-groups", "managed"]) == 2
    for verb in ("scp", "ssh"):
        at = [call for call in machine.calls("gcloud") if call[1] == verb]
        assert {call[2 + (verb == "scp")].partition(":")[0] for call in at} == {"earl-0", "earl-1"}


def test_xpk_restarts_a_run_that_lost_a_process(machine):
    done = machine.run("tpu_scripts/xpk.sh", *XPK, CONFIG, "--workdir=/shared/w", CONTEXTS)
    assert done.returncode == 0, done.stderr
    (call,) = machine.calls("xpk")
    assert call[:2] == ["workload", "create"] and "--restart-on-exit-codes=1,75" in call
    assert "--max-restarts=100" in call
    command = next(a for a in call if a.startswith("--command="))
    assert shlex.split(command.removeprefix("--command=")) == [
        *("python", "-m", "earl_jax.main", CONFIG, "--workdir=/shared/w", CONTEXTS)
    ]
    machine.run("tpu_scripts/xpk.sh", *XPK, CONFIG, "--workdir=/shared/w", "--check")
    assert "--max-restarts=0" in machine.calls("xpk")[1]


@pytest.mark.slow_except("hopper")
@pytest.mark.parametrize("gpu", ["hopper", "blackwell"])
def test_settings_of_xla_exist(gpu, machine):
    """XLA ends a process at a flag that it does not know, on any platform."""
    start = f"source gpu_scripts/settings.sh && exec {shlex.quote(sys.executable)} -c "
    start += "'import jax; print(len(jax.devices()))'"
    mine = "--xla_gpu_all_reduce_combine_threshold_bytes=7"
    done = machine.run("bash", "-c", start, GPU=gpu, JAX_PLATFORMS="cpu", XLA_FLAGS=mine)
    assert done.returncode == 0, done.stderr
    flags = machine.run(
        "bash", "-c", "source gpu_scripts/settings.sh; echo $XLA_FLAGS", GPU=gpu, XLA_FLAGS=mine
    )
    assert flags.stdout.split()[-1] == mine and len(flags.stdout.split()) == 8
    wrong = machine.run("bash", "-c", "source gpu_scripts/settings.sh", GPU="volta")
    assert wrong.returncode == 2 and "GPU=hopper or GPU=blackwell" in wrong.stderr


# Manifests.

MANIFESTS = {
    "gpu": ["gpu_scripts/kubernetes.sh", *GPU_POD],
    "tpu": ["tpu_scripts/gke.sh", *TPU_POD, "--slices=2"],
}
# Of the JobSet API, v1alpha2 (jobset.sigs.k8s.io, API reference); its models take any text here.
ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy")


def manifest_of(kind: str, machine: Machine, *more: str) -> dict:
    done = machine.run(*MANIFESTS[kind], CONFIG, "--workdir=/shared/w", CONTEXTS, *more)
    assert done.returncode == 0, done.stderr
    (call,) = [each for each in machine.records() if each.get("name") == "kubectl"]
    assert call["arguments"] == ["apply", "-f", "-"]
    return yaml.safe_load(call["input"])


@pytest.mark.parametrize("kind", MANIFESTS)
def test_jobs_of_a_manifest_keep_the_schema_of_kubernetes(kind, machine):
    kubernetes = pytest.importorskip("kubernetes_validate")
    for job in manifest_of(kind, machine)["spec"]["replicatedJobs"]:
        alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        kubernetes.validate(alone | job["template"], "1.33", strict=True)


def holds(given, read) -> bool:
    """True if all that was given was read; defaults may have been added."""
    if isinstance(given, dict):
        return all(key in read and holds(value, read[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(map(holds, given, read))
    return given == read


@pytest.mark.slow  # The models of all of Kubernetes' API are imported: 4 s of CPU.
@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifest_keeps_the_schema_of_jobsets(kind, machine):
    """The models are generated from the definitions of the JobSet API (kubeflow-trainer-api)."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    jobset = manifest_of(kind, machine)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    read = models.JobsetV1alpha2JobSet.from_dict
    # It raises for a value of another type, and leaves out what is no field.
    assert holds(jobset, read(jobset).to_dict())
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        assert rule["action"] in ACTIONS and {*rule["onJobFailureReasons"]} <= {*REASONS}
    jobset["spec"]["networks"] = jobset["spec"].pop("network")
    assert not holds(jobset, read(jobset).to_dict())
    jobset["spec"]["replicatedJobs"][0]["replicas"] = "two"
    with pytest.raises(ValueError, match="replicas"):
        read(jobset)


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifest_has_what_was_given(kind, machine):
    quoted = '--config.model.path="a\\b $(HOME)"'
    jobset = manifest_of(kind, machine, quoted)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    given = [CONFIG, "--workdir=/shared/w", CONTEXTS, quoted.replace("$", "$$")]
    assert container["args"][-4:] == given
    assert container["image"] == "registry/earl:1"
    assert (job["replicas"], spec["parallelism"], spec["completions"]) == {
        "gpu": (1, 2, 2),
        "tpu": (2, 4, 4),
    }[kind]
    assert (
        container["resources"]["limits"]
        == {"gpu": {"nvidia.com/gpu": 8}, "tpu": {"google.com/tpu": 4}}[kind]
    )


def test_pods_of_a_manifest_know_who_they_are(machine):
    jobset = manifest_of("gpu", machine)
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    index = variables["JAX_PROCESS_ID"].pop("valueFrom")["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    seen = {name: each.get("value", "1") for name, each in variables.items()}
    place = find_place(DistributedConfig(), seen | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    # The name of pod 0 of the set's only job, which has a headless service of the set's name.
    assert jobset["metadata"]["name"] == "earl" and job["name"] == "run"
    assert dataclasses.astuple(place) == ("earl-run-0-0.earl:8476", 2, 1)


def test_manifest_has_the_training_commands_own_flags_and_refuses_others(machine):
    line = ["gpu_scripts/kubernetes.sh", "--dry-run", *GPU_POD, CONFIG, "--workdir=/shared/w"]
    done = machine.run(*line, "--init_from=/shared/other")
    assert done.returncode == 0, done.stderr
    assert '"--init_from=/shared/other"]' in done.stdout
    assert '"init_from": "/shared/other"' in done.stdout
    done = machine.run(*line, "--gpu_count=4")
    assert done.returncode == 2 and "unknown: --gpu_count" in done.stderr
    # Its pods start again by themselves, and each time the run would begin again.
    assert machine.run(*line, "--restart").returncode == 2


@pytest.mark.slow_except("ssh", "slurm")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_check_is_made_once(launcher, machine):
    line = [*LAUNCHERS[launcher], CONFIG, "--workdir=/w", "--check"]
    done = machine.run(*line, STATUSES="1,0", WORKERS="1" if launcher == "instances" else "2")
    assert done.returncode == 1 and (machine.home / "starts").read_text() == "1"


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifest_of_a_check_starts_nothing_again(kind, machine):
    jobset = manifest_of(kind, machine, "--check")
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "--check"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 0


def test_tpus_are_not_requested_for_a_config_that_they_would_not_get(machine):
    done = machine.run("tpu_scripts/run.sh", *TPU, "--config=configs/mine.py", "--workdir=/w")
    assert done.returncode == 2 and machine.records() == []
    assert done.stderr.startswith("--config=configs/mine.py is not in the current commit")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--topology=16", "--topology=16 --chips=4: give a slice's chips, such as 4x4"),
        ("--chips=3", "--chips=3: give"),
        ("--workdir=runs/w", "--workdir must be below /shared"),
    ],
)
def test_mistakes_of_a_slice_are_named(flag, words, machine):
    line = ["tpu_scripts/gke.sh", *TPU_POD, CONFIG, "--workdir=/shared/w"]
    line = [each for each in line if each.split("=")[0] != flag.split("=")[0]]
    done = machine.run(*line, flag)
    assert done.returncode == 2 and words in done.stderr and machine.records() == []


def test_missing_value_of_a_manifest_is_a_mistake(machine):
    done = machine.run("gpu_scripts/kubernetes.sh", *POD, CONFIG, "--workdir=/shared/w")
    assert done.returncode == 2 and "--nodes is missing" in done.stderr
    assert machine.records() == []


def sky_run(machine: Machine, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the task's command on node 0 of one; `variables` are SkyPilot's, and ARGUMENTS."""
    task = yaml.safe_load((ROOT / "gpu_scripts/skypilot.yaml").read_text())
    run = task["run"].replace(".venv/bin/python", str(machine.home / "bin/probe"))
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    return machine.run("bash", "-c", run, **task["envs"] | node | variables)


def test_sky_task_tells_each_node_who_it_is(machine):
    variables = {
        "ARGUMENTS": f"{CONFIG} --workdir=/shared/w",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    done = sky_run(machine, **variables)
    assert done.returncode == 0, done.stderr
    (seen,) = objects(done.stdout)
    place = seen["place"]
    assert (place["JAX_COORDINATOR_ADDRESS"], place["JAX_PROCESS_ID"]) == ("10.0.0.1:8476", "1")
    assert seen["arguments"] == ["-m", "earl_jax.main", CONFIG, "--workdir=/shared/w"]


def test_sky_task_writes_an_ipv6_coordinator_in_brackets(machine):
    done = sky_run(machine, ARGUMENTS=CONFIG, SKYPILOT_NODE_IPS="fd00::1\nfd00::2")
    assert done.returncode == 0, done.stderr
    (seen,) = objects(done.stdout)
    assert seen["place"]["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:8476"


@pytest.mark.parametrize("check", ["", " --check"])
def test_sky_task_repeats_no_check(machine, check):
    """A managed job starts again where its command fails: a run does, and a check must not."""
    variables = {"ARGUMENTS": f"{CONFIG}{check}", "PROBE_STATUS": "1"}
    managed = sky_run(machine, SKYPILOT_TASK_ID="sky-managed-2026-01-01_a_1-0", **variables)
    assert managed.returncode == (0 if check else 1)
    assert ("the check failed with status 1" in managed.stderr) == bool(check)
    once = sky_run(machine, SKYPILOT_TASK_ID="sky-2026-01-01_a_1", **variables)
    assert once.returncode == 1


def test_image_copies_what_there_is():
    lines = (ROOT / "gpu_scripts/Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert len(copied) >= 7 and all((ROOT / name).exists() for name in copied)


# Real runs of two processes.


def step_numbers(workdir: Path) -> list[int]:
    return [row["step"] for row in steps_of(workdir)]


@pytest.mark.slow
def test_two_processes_train(machine):
    """On TPU VMs; those of Slurm train below."""
    workdir, config = machine.home / "run", supervised_config(machine.home, 1)
    flags = [f"--config={config}", f"--workdir={workdir}"]
    done = machine.run("tpu_scripts/run.sh", *TPU, *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    assert step_numbers(workdir) == [1]
    # One process reports.
    assert done.stdout.count("done in ") == 1


def supervised_config(folder: Path, num_steps: int) -> Path:
    """The config of a run of two processes that plays nothing."""
    (folder / "talks.jsonl").write_text("\n".join(sums(8)))
    given = sft_run(folder / "talks.jsonl", num_steps=num_steps) | {
        "devices": {"platform": "cpu", "num_cpu_devices": 4},
        "checkpoint": {"every_steps": 1},
        "distributed": {"heartbeat_s": 15.0},
    }
    return write_config(folder, small(given))


@pytest.mark.slow
def test_run_resumes_after_a_process_is_killed(machine):
    workdir, config = machine.home / "run", supervised_config(machine.home, 10)
    job = machine.start(*SBATCH, f"--config={config}", f"--workdir={workdir}")
    deadline_s = time.monotonic() + 270
    while 2 not in step_numbers(workdir):
        assert job.poll() is None and time.monotonic() < deadline_s, job.communicate()
        time.sleep(0.05)
    pids = next(each["pids"] for each in machine.records() if "pids" in each)
    os.kill(pids[1], signal.SIGKILL)
    output, errors = job.communicate(timeout=270)
    assert job.returncode == 0, errors[-4000:]
    assert "starting the run again (1 of 10)" in errors
    assert step_numbers(workdir) == list(range(1, 11))
    assert f"process 1 on {socket.gethostname()} has ended" in errors
    assert len(machine.calls("srun")) == 2 and "resum" in output
    # One process reports.
    assert output.count("done in ") == 1
