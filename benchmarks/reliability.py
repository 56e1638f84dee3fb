# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at random moments, and one of thousands of steps: reliability.md.

    uv run python -m benchmarks.reliability [--only=soak] [--write]

Kills: SIGKILL is sent to a run at random moments of its life, starting included, and the same
command is given again. In the end the run is compared with one that was left alone: every array of
the last checkpoint bit for bit, metrics but for times and compiles, and recorded episodes. A run
that is done before it was killed so often is compared too, and the other kills are those of a new
one. There is a run of a dense model, one of adapters, one of a mixture of experts, one whose
contexts outgrow the meshes of both stages, and one of two processes, of which one or both are
killed. Of asynchronous runs of one and two processes, in which time decides who samples what, each
task must have been trained on once, in its step, and no token beyond the bound; also where steps
come in parts. With the rule "drop" none may have been trained on twice.

Soak: many small steps with checkpoints, evaluations and reports between them. Memory, threads and
open files of the process are read from /proc, and may grow little between the first quarter of the
steps and their end.

Saves: the state of models of several sizes, on eight virtual devices: the seconds for which saving
it stalls a run, and those until it is on the disk.

The status is 1 where a run came out different, or something grew.
"""

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import runs
from benchmarks.pages import parser_of, show, table
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics

PAGE = Path(__file__).with_suffix(".md")
# Kills of each kind of run, and steps of the soak.
KILLS, STEPS = 20, 2000
# Layers and widths of the models whose checkpoints are timed, and checkpoints of each.
SAVED, SAVES = ((2, 256), (4, 512), (6, 768)), 3
SMALL: Mapping[str, Any] = {
    "config": "tictactoe_tiny_cpu",
    "num_steps": 12,
    "model.width": 32,
    "model.ffn_size": 64,
    "rollout.num_slots": 16,
    "rollout.episodes_per_step": 32,
    "selector.rollout_meshes": "('data=8',)",
    "selector.train_meshes": "('data=2,fsdp=4',)",
    "train.sft_steps": 4,
    "train.sft_updates": 1,
    "checkpoint.every_steps": 2,
    "eval.every_steps": 5,
    "eval.games": 16,
    "eval.final_games": 16,
    "log.trajectories_every_steps": 3,
}
BASE = {"model.path": "tests/reference/qwen2_tied", "train.lora.rank": 4}
BASE |= {f"model.{name}": None for name in ("width", "ffn_size")}
EXPERTS = {"model.num_experts": 4, "model.experts_per_token": 2, "model.expert_ffn_size": 32}
EXPERTS |= {"model.ffn_size": None}
# The default run, as it is but for how often it writes; its contexts outgrow the meshes of both
# stages within these steps (tests/test_default_run.py).
OWN = ("model.", "rollout.", "selector.", "train.")
GROWING = {name: None for name in SMALL if name.startswith(OWN)}
GROWING |= {"config": "trail_tiny_cpu", "num_steps": 28, "log.trajectories_every_steps": 1}
# Updates between sampling a token of the asynchronous run and training on it.
STALENESS = 2
ASYNCHRONOUS: Mapping[str, Any] = {
    "asynchrony.max_staleness": STALENESS,
    "devices.num_rollout": 4,
    "selector.rollout_meshes": "('data=4',)",
    "selector.train_meshes": "('fsdp=4',)",
    # A round goes without slow answers, so that it takes part in what time decides.
    "rollout.patience_s": 0.001,
    "log.trajectories_every_steps": 1,
}
TWO = {"distributed.heartbeat_s": 20}
DROP = {"asynchrony.rule": "drop"}
IN_PARTS = {"asynchrony.parts": 2, "algorithm": "grpo", "rollout.group_size": 2}
# What differs from SMALL, and the number of processes.
KINDS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "dense": ({}, 1),
    "adapters": (BASE, 1),
    "experts": (EXPERTS, 1),
    "both meshes change": (GROWING, 1),
    "two processes": (TWO, 2),
    "asynchronous": (ASYNCHRONOUS, 1),
    "asynchronous, two processes": ({**ASYNCHRONOUS, **TWO}, 2),
    "asynchronous in parts, two processes": ({**ASYNCHRONOUS, **TWO, **IN_PARTS}, 2),
    "asynchronous, drop": ({**ASYNCHRONOUS, **DROP}, 1),
    "asynchronous, drop, two processes": ({**ASYNCHRONOUS, **TWO, **DROP}, 2),
}
SOAK: Mapping[str, Any] = {
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    "model.ffn_size": 16,
    "rollout.num_slots": 8,
    "rollout.episodes_per_step": 8,
    "rollout.context_buckets": "(24,)",
    "train.sft_steps": 0,
    "train.epochs": 1,
    "checkpoint.every_steps": 50,
    "eval.every_steps": 250,
    "log.trajectories_every_steps": 10,
}
# The most that the end of the soak may have of what its first quarter had: a factor, and a number
# more (threads that save a checkpoint come and go).
GROWTH: Mapping[str, tuple[float, float]] = {
    "resident, MiB": (1.1, 0),
    "threads": (1.0, 8),
    "open files": (1.0, 8),
}
# Of a line of metrics: what may differ between two runs of the same thing. A process that goes on
# compiles programs that the one before had.
TIMES = ("_s", "_per_s", "compiles")


def flags_of(settings: Mapping[str, Any], num: int = 1) -> list[str]:
    """Returns the flags of each of `num` processes with eight devices in all."""
    given = {**settings, "devices.num_cpu_devices": 8 // num}
    flags = [f"--config=configs/{given.pop('config')}.py"]
    return flags + [
        f"--config.{name}={value}" for name, value in given.items() if value is not None
    ]


def start(workdir: Path, settings: Mapping[str, Any], num: int = 1) -> list[subprocess.Popen[str]]:
    """Starts a run of `num` processes."""
    flags = [f"--workdir={workdir}", *flags_of(settings, num)]
    return runs.start(flags, num, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Waits for a run. Raises RuntimeError with its errors where it fails."""
    for process in processes:
        errors = process.communicate()[1]
        if process.returncode:
            raise RuntimeError(f"status {process.returncode}: {errors[-2000:]}")


def kill_often(
    folder: Path, settings: Mapping[str, Any], num: int, kills: int, run_s: float
) -> list[Path]:
    """Kills runs so often at random moments, and lets them finish. Returns their workdirs.

    Raises RuntimeError where a run ends by itself with another status than 0.
    """
    rng, workdirs, killed = np.random.default_rng(0), [folder / "killed_1"], 0
    while killed < kills:
        processes = start(workdirs[-1], settings, num)
        time.sleep(float(rng.uniform(0.0, run_s)))
        running = [process for process in processes if process.poll() is None]
        if len(running) < num:
            # It was done before its moment: the next kill is one of a new run.
            finish(processes)
            workdirs.append(folder / f"killed_{len(workdirs) + 1}")
            continue
        chosen = running[int(rng.integers(num))]
        chosen.kill()
        # The others of the run end by themselves, or are killed too.
        for process in processes:
            if rng.random() < 0.5:
                process.kill()
            process.communicate()
        # It may have ended in between.
        killed += chosen.returncode == -signal.SIGKILL
    finish(start(workdirs[-1], settings, num))
    return workdirs


def results(workdir: Path) -> dict[str, Any]:
    """Returns what two runs of the same thing have in common: arrays, metrics and episodes."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        step = manager.latest_step()
        folder = workdir / "checkpoints" / str(step) / "state"
        saved = dict(ocp.StandardCheckpointer().metadata(folder).item_metadata)  # pyright: ignore
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), saved
        )
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        state = manager.restore(step, args=wanted)["state"]
    lines = read_metrics(workdir / "metrics.jsonl")
    episodes = (workdir / "trajectories").iterdir()
    return {
        "step": step,
        "arrays": [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)],
        "metrics": [{k: v for k, v in line.items() if not k.endswith(TIMES)} for line in lines],
        "episodes": {path.name: path.read_text() for path in sorted(episodes)},
    }


def is_each_task_trained_on_once(workdir: Path, settings: Mapping[str, Any]) -> bool:
    """Returns True if each step of an asynchronous run has its own tasks, within the bound.

    With the rule "drop" a step may have any, and none may be in two.
    """
    size, steps = settings["rollout.episodes_per_step"], settings["num_steps"]
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if "eval" not in line]
    files = sorted((workdir / "trajectories").iterdir())
    played = [sorted(each["episode"] for each in read_trajectories(path)) for path in files]
    is_bounded = all(line["version_lag_max"] <= STALENESS for line in lines)
    is_whole = [line["step"] for line in lines] == list(range(1, steps + 1))
    own = [list(range(step * size, (step + 1) * size)) for step in range(steps)]
    if settings.get("asynchrony.rule") == "drop":
        tasks = [task for each in played for task in each]
        own = played if len(set(tasks)) == len(tasks) == size * steps else []
    return is_bounded and is_whole and played == own


def measure_kills(kind: str) -> dict[str, Any]:
    """Returns a row of the table."""
    changed, num = KINDS[kind]
    settings = {**SMALL, **changed}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        finish(start(folder / "whole", settings, num))
        since_s = time.perf_counter()
        finish(start(folder / "warm", settings, num))
        run_s = time.perf_counter() - since_s
        killed = kill_often(folder, settings, num, KILLS, run_s)
        row = {"run": kind, "SIGKILLs": KILLS, "a run takes, s": f"{run_s:.0f}"}
        if kind.startswith("asynchronous"):
            right = all(is_each_task_trained_on_once(each, settings) for each in killed)
            return row | dict.fromkeys(RESULTS, "-") | {"episodes": ONCE if right else DIFFERENT}
        expected, found = results(folder / "whole"), [results(workdir) for workdir in killed]
    for each in found:
        for line, other in zip(expected["metrics"], each["metrics"], strict=False):
            if keys := [key for key in line | other if line.get(key) != other.get(key)]:
                print(f"step {line['step']}: {keys} differ", file=sys.stderr, flush=True)
    return row | {
        part: "equal" if all(expected[part] == each[part] for each in found) else DIFFERENT
        for part in RESULTS
    }


RESULTS = ("arrays", "metrics", "episodes")
ONCE, DIFFERENT = "each task once", "DIFFERENT"


def read_process(pid: int) -> dict[str, float]:
    """Returns memory in MiB, threads and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "resident, MiB": int(facts["VmRSS"].split()[0]) / 1024,
        "threads": int(facts["Threads"]),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def soak() -> Iterator[dict[str, Any]]:
    """Yields a row for each eighth of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        workdir = Path(folder) / "run"
        (process,) = start(workdir, {**SMALL, **SOAK, "num_steps": STEPS})
        since_s, metrics = time.perf_counter(), workdir / "metrics.jsonl"
        for eighth in range(1, 9):
            step = min(STEPS * eighth // 8, STEPS - 1)
            wanted = f'{{"step": {step}, "time_s"'
            while not (metrics.exists() and wanted in metrics.read_text()):
                if process.poll() is not None:
                    raise RuntimeError(process.communicate()[1][-2000:])
                time.sleep(0.2)
            facts = read_process(process.pid)
            yield {"step": step, **facts, "seconds": round(time.perf_counter() - since_s)}
        finish([process])


def grown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what has more at the last of eight rows than GROWTH allows, in words."""
    quarter, end = rows[1], rows[-1]
    return [
        f"{name} grew from {quarter[name]:.0f} at step {quarter['step']} to {end[name]:.0f}"
        for name, (factor, more) in GROWTH.items()
        if end[name] > quarter[name] * factor + more
    ]


def save_rows() -> Iterator[dict[str, Any]]:
    """Yields a row for each model of SAVED: medians of SAVES checkpoints, behind one that compiles.

    Without a step beside them.
    """
    import jax

    from earl_jax.algorithms.algorithms import ALGORITHMS
    from earl_jax.launch.start import start_jax
    from earl_jax.models.config import ModelConfig
    from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
    from earl_jax.train.checkpoint import Checkpoints
    from earl_jax.train.config import TrainConfig
    from earl_jax.train.learner import Learner

    start_jax("cpu", 8)
    for num_layers, width in SAVED:
        learner = Learner(
            ModelConfig(num_layers=num_layers, width=width, ffn_size=4 * width),
            TrainConfig(),
            ALGORITHMS["reinforce"],
            vocab_size=1024,
            temperature=1.0,
            importance_cap=0.0,
            layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
        )
        state, stalls_s, written_s = learner.init_state(MeshShape(fsdp=8)), [], []
        leaves = jax.block_until_ready(jax.tree.leaves(state))
        with tempfile.TemporaryDirectory() as name, Checkpoints(Path(name), keep=1) as checkpoints:
            for step in range(1 + SAVES):
                start_s = time.perf_counter()
                checkpoints.save(step, state, {})
                stalls_s.append(time.perf_counter() - start_s)
                checkpoints.wait()
                written_s.append(time.perf_counter() - start_s)
        yield {
            "model": f"{num_layers} layers of width {width}",
            "state, MB": sum(leaf.nbytes for leaf in leaves) / 1e6,
            "stall, s": statistics.median(stalls_s[1:]),
            "on disk after, s": statistics.median(written_s[1:]),
        }


def main() -> None:
    """Runs what was asked for, and prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="parts whose name contains this")
    flags = parser.parse_args()
    killed, soaked, saved = [], [], []
    for kind in (kind for kind in KINDS if flags.only in kind):
        killed.append(measure_kills(kind))
        print(json.dumps(killed[-1]), flush=True)
    for row in soak() if flags.only in "soak" else ():
        soaked.append(row)
        print(json.dumps(row), flush=True)
    for row in save_rows() if flags.only in "saves" else ():
        saved.append(row)
        print(json.dumps(row), flush=True)
    wrong = [f"{row['run']}: a killed run differs" for row in killed if DIFFERENT in row.values()]
    wrong += grown(soaked) if soaked else []
    shown = [{**row, "resident, MiB": f"{row['resident, MiB']:.0f}"} for row in soaked]
    text = "\n\n".join(table(rows) for rows in (killed, shown, saved) if rows)
    show(text, PAGE, write=flags.write)
    sys.exit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
