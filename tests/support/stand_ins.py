# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of the launchers that scripts call: python stand_ins.py NAME ARGUMENT...

Each adds its arguments to the file $RECORD. Those that start processes do so on this machine: srun
and gcloud as many as $WORKERS, with the variables that Slurm, or the metadata of TPU VMs, gives.
With $STATUSES ("1,0") the starts end with these instead, one after the other.
"""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKERS = int(os.environ.get("WORKERS", "2"))
HOME = Path(os.environ["HOME"])


def record(**facts) -> None:
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(facts) + "\n")


def scripted() -> int | None:
    """The status that this start is to end with, if any."""
    if not os.environ.get("STATUSES"):
        return None
    statuses, count = os.environ["STATUSES"].split(","), HOME / "starts"
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    return int(statuses[number])


def start_all(lines: list[list[str]], variables: list[dict[str, str]], wait_s: float) -> int:
    """Starts processes, kills those left `wait_s` behind the first's end; the largest status."""
    signals: list[int] = []
    # Before the first starts: who started may be seen, and ended, at once.
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    all_of_them = [
        subprocess.Popen(line, env=os.environ | own, start_new_session=True)
        for line, own in zip(lines, variables, strict=True)
    ]
    record(pids=[process.pid for process in all_of_them])
    first_s = math.inf
    while any(process.poll() is None for process in all_of_them):
        time.sleep(0.05)
        if any(process.poll() is not None for process in all_of_them):
            first_s = min(first_s, time.monotonic())
        # As srun does ("forcing job termination").
        if signals or time.monotonic() > first_s + wait_s:
            for process in all_of_them:
                process.kill()
    # A signal N is 128 + N.
    statuses = [process.returncode for process in all_of_them]
    return max(status if status >= 0 else 128 - status for status in statuses)


def srun(arguments: list[str]) -> int:
    if (status := scripted()) is not None:
        return status
    at = next(n for n, a in enumerate(arguments) if not a.startswith("--"))
    flags, command = dict(a.split("=", 1) for a in arguments[:at]), arguments[at:]
    variables = [
        {
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{WORKERS})",
            "SLURM_NTASKS": str(WORKERS),
            "SLURM_PROCID": str(n),
            "SLURM_LOCALID": "0",
        }
        for n in range(WORKERS)
    ]
    at_once = flags.get("--kill-on-bad-exit") == "1"
    wait_s = 0.0 if at_once else float(flags.get("--wait", "inf"))
    return start_all([command] * WORKERS, variables, wait_s)


def scancel(arguments: list[str]) -> int:
    """Signals the tasks of the last step."""
    (name,) = (a.removeprefix("--signal=") for a in arguments if a.startswith("--signal="))
    lines = map(json.loads, Path(os.environ["RECORD"]).read_text().splitlines())
    for pid in [line["pids"] for line in lines if "pids" in line][-1]:
        os.kill(pid, signal.Signals[f"SIG{name}"])
    return 0


def sbatch(arguments: list[str]) -> int:
    """Runs a copy of the script elsewhere, as Slurm does, and waits for it."""
    at = next(n for n, a in enumerate(arguments) if not a.startswith("--"))
    copy = HOME / "slurm_script"
    shutil.copy(arguments[at], copy)
    job = {"SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_JOB_ID": "7"}
    os.chdir(HOME)
    os.execve("/bin/bash", ["bash", str(copy), *arguments[at + 1 :]], os.environ | job)


def ssh(arguments: list[str]) -> int:
    if (status := scripted()) is not None:
        return status
    assert arguments[:2] == ["-o", "BatchMode=yes"]
    os.chdir(HOME)
    os.execv("/bin/bash", ["bash", "-c", " ".join(arguments[3:])])


def copy(source: str, targets: list[Path]) -> int:
    """Copies to all workers; with the file "away" the second time fails."""
    away = HOME / "away"
    if away.exists() and away.read_text() == "now":
        away.unlink()
        return 255
    if away.exists():
        away.write_text("now")
    for target in targets:
        shutil.copy(source, target)
    return 0


def gcloud(arguments: list[str]) -> int:
    """Queued resources, whose state is a file, and workers, whose home is a folder."""
    state, verbs = HOME / "state", {"create": "ACTIVE", "delete": ""}
    flags = dict(a.removeprefix("--").split("=", 1) for a in arguments if "=" in a)
    words = [a for a in arguments if not a.startswith("--")]
    if words[:3] == ["compute", "instance-groups", "managed"]:
        # Their order is not that of their names.
        print("\n".join(f"{words[4]}-{n}" for n in reversed(range(WORKERS))))
        return 0
    verb = words[1] if words[1] in ("ssh", "scp") else words[3]
    if verb in verbs:
        state.write_text(verbs[verb])
    if verb == "describe":
        print(state.read_text() if state.exists() else "")
    homes = [HOME / f"worker{n}" for n in range(WORKERS)]
    for home in homes:
        home.mkdir(exist_ok=True)
    if verb == "scp":
        return copy(words[-2], [home / words[-1].partition(":")[2] for home in homes])
    if verb != "ssh":
        return 0
    if "earl_jax.main" in flags["command"] and (status := scripted()) is not None:
        return status
    metadata = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{os.environ['JAX_COORDINATOR_PORT']}",
        "JAX_NUM_PROCESSES": str(WORKERS),
    }
    if flags.get("worker", "all") != "all":
        homes = [homes[int(flags["worker"])]]
    return start_all(
        [["bash", "-c", f"cd && {flags['command']}"]] * len(homes),
        [metadata | {"HOME": str(h), "JAX_PROCESS_ID": str(n)} for n, h in enumerate(homes)],
        math.inf,
    )


def uv(arguments: list[str]) -> int:
    """`uv sync` of a worker: the Python that runs this."""
    python = Path(".venv/bin/python")
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return 0


def main() -> int:
    name, *arguments = sys.argv[1:]
    given = sys.stdin.read() if name == "kubectl" else ""
    record(name=name, arguments=arguments, input=given)
    acts = {"srun": srun, "sbatch": sbatch, "scancel": scancel}
    acts |= {"ssh": ssh, "gcloud": gcloud, "uv": uv}
    return acts[name](arguments) if name in acts else 0


if __name__ == "__main__":
    sys.exit(main())
