# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of `python -m earl_jax.main` in processes of their own, and their results."""

import collections
import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earl_jax.config.config import Config
from earl_jax.config.file import load_config_file, make_config
from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.rollout.event_files import EVENTS
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from earl_jax.trajectory import FAILURES
from tests.support import ROOT, environment_without
from tests.support.forks import start_python
from tests.support.settings import write_config

# Small enough for a second a step, with two meshes per stage and a budget that contexts outgrow.
# By this table training on data=8 is fastest as long as it fits in one micro-batch without remat.
TABLE = ROOT / "tests/support/data_8_is_fastest.json"
TICTACTOE = "--config=configs/tictactoe_tiny_cpu.py"
TINY = {
    "num_steps": 10,
    "model.width": 32,
    "model.ffn_size": 64,
    "rollout.num_slots": 16,
    "rollout.episodes_per_step": 32,
    "selector.table": str(TABLE),
    "train.sft_steps": 6,
    "train.sft_updates": 2,
    "checkpoint.every_steps": 2,
    "eval.every_steps": 4,
    "eval.games": 32,
    "eval.final_games": 32,
    "log.trajectories_every_steps": 3,
}


# The parts of a line of metrics that are times.
TIMES = {
    "time_s",
    "stage_s",
    "switch_s",
    "compile_s",
    "compiles",
    "checkpoint_s",
    "env_wait_s",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
}


def command(module: str, *arguments: str, **overrides) -> list[str]:
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    if module == "main" and not any(each.startswith("--config=") for each in arguments):
        flags.insert(0, f"--config={ROOT / 'configs/tictactoe_tiny_cpu.py'}")
    return [sys.executable, "-m", f"earl_jax.{module}", *arguments, *flags]


def environment(*, as_a_user: bool = False) -> dict[str, str]:
    """Returns variables of a process that compiles quickly, like tests, or well, like a user's."""
    removed = ("JAX_", "XLA_", "PJRT_") if as_a_user else ("JAX_",)
    return environment_without(*removed) | {"PYTHONUNBUFFERED": "1"}


def run(*line: str, as_a_user: bool = False) -> subprocess.CompletedProcess:
    return subprocess.run(
        line,
        cwd=ROOT,
        env=environment(as_a_user=as_a_user),
        capture_output=True,
        text=True,
        timeout=280,
    )


def tiny(workdir: Path, **overrides) -> list[str]:
    return command("main", TICTACTOE, f"--workdir={workdir}", **(TINY | overrides))


def config_of(settings: Mapping[str, Any]) -> Config:
    """The config of `tiny` with these settings alone, for a run in this process."""
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return make_config(load_config_file(ROOT / "configs/tictactoe_tiny_cpu.py"), overrides)


def timeless(line: dict) -> dict:
    """A line of metrics without what may differ between two runs of the same thing."""
    return {key: value for key, value in line.items() if key not in TIMES}


def final_state(workdir: Path, step: int | None = None) -> dict:
    """The arrays of a checkpoint, the newest unless a step is named, whoever has written it."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        step = manager.latest_step() if step is None else step
        folder = workdir / "checkpoints" / str(step) / "state"
        saved = ocp.StandardCheckpointer().metadata(folder).item_metadata
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), dict(saved)
        )
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return manager.restore(step, args=wanted)["state"]


def final_parameters(workdir: Path, step: int | None = None) -> list[np.ndarray]:
    """Every array of `final_state`."""
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(final_state(workdir, step))]


def bits(tree) -> list[bytes]:
    """The bytes of each array of a tree."""
    import jax

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_equal(ones, others) -> None:
    """Both have the same arrays, to the bit."""
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)
    assert bits(ones) == bits(others)


def cut_off(whole: Path, again: Path, step: int) -> Path:
    """A copy of a run whose newest checkpoint is that of this step."""
    shutil.copytree(whole, again)
    for path in (again / "checkpoints").glob("[0-9]*"):
        if int(path.name) > step:
            shutil.rmtree(path)
    return again


def check_resume(config: Config, whole: Path, step: int) -> Path:
    """Resumes a copy of a run from the checkpoint of this step: it ends as the run did.

    With the same arrays in its last checkpoint, to the bit, and the same metrics but for times.
    Returns the copy.
    """
    again = cut_off(whole, whole.parent / f"from_{step}", step)
    train(config, again)
    assert_equal(*(final_parameters(folder, config.num_steps) for folder in (whole, again)))
    ones, others = (read_metrics(folder / "metrics.jsonl") for folder in (whole, again))
    assert [*map(timeless, ones)] == [*map(timeless, others)]
    return again


def check_replay(first: Path, step: int) -> Config:
    """Replays a run as --replay does: the same events, and the parameters of its last step.

    Returns the config of the replay.
    """
    again = first.parent / "again"
    config, workdir = replayed_config(
        first, *parse_flags([f"--replay={first}", f"--workdir={again}"])
    )
    assert not train(config, workdir, replay=first).stopped
    assert (again / EVENTS).read_text() == (first / EVENTS).read_text()
    assert_equal(final_parameters(first, step), final_parameters(again, step))
    return config


def steps_of(workdir: Path) -> list[dict]:
    """The metrics of the steps so far, without those of evaluations."""
    path = workdir / "metrics.jsonl"
    return [row for row in read_metrics(path) if "eval" not in row] if path.exists() else []


def taken_by_step(events: list[dict]) -> list[list[list[int]]]:
    """The groups that each step took, as they came."""
    steps: list[list[list[int]]] = [[]]
    for event in events:
        if event["event"] == "take":
            steps[-1].append(event["groups"])
        elif event["event"] == "trained":
            steps.append([])
    return steps[:-1]


def most_open(events: list[dict]) -> int:
    """The most groups that were begun, and neither given up nor trained on, at a time."""
    begun: set[int] = set()
    taken: set[int] = set()
    most = 0
    for event in events:
        groups = set(event.get("groups", ()))
        if event["event"] == "open":
            # A new service plays all groups that are open again.
            begun, taken = set(), set()
        elif event["event"] == "submit":
            assert not begun & groups
            begun |= groups
        elif event["event"] == "take":
            assert groups <= begun
            taken |= groups
        elif event["event"] == "drop":
            begun -= groups
        elif event["event"] == "trained":
            begun, taken = begun - taken, set()
        most = max(most, len(begun))
    return most


def episodes_of(workdir) -> collections.Counter:
    """Returns the number of times that each episode was trained on, by its trajectory's lines."""
    files = sorted((workdir / "trajectories").glob("*"))
    return collections.Counter(t["episode"] for file in files for t in read_trajectories(file))


def stop_in_rollout(workdir: Path, steps: int) -> Callable[[], str]:
    """Names a signal in the rollout behind so many steps; the first look is between the steps."""
    looks = itertools.count()
    return lambda: "SIGTERM" * (len(steps_of(workdir)) == steps and next(looks) > 0)


def lags_of(workdir: Path, step: int) -> collections.Counter:
    """The number of sampled tokens that a step took, by the versions since; not of failures."""
    found = collections.Counter()
    for trajectory in read_trajectories(workdir / "trajectories" / f"step_{step:06d}.jsonl"):
        if trajectory["stop_reason"] not in FAILURES:
            found.update(step - 1 - v for v in trajectory["versions"] if v is not None)
    return found


def check_lags(workdir: Path, bound: int) -> None:
    """No token of a trajectory is beyond the bound, and the metrics of each step have its lags."""
    for step, line in enumerate(steps_of(workdir), 1):
        lags = lags_of(workdir, step)
        assert 0 <= min(lags) and line["version_lag_max"] == max(lags) <= bound
        assert line["staleness_tokens"] == [lags[lag] for lag in range(max(lags) + 1)]


def rounds_beside_updates(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rounds that were played between what each step took and the end of its updates."""
    rounds = [event["round"] for event in events if event["event"] in ("take", "trained")]
    return [after - before for before, after in zip(rounds[::2], rounds[1::2], strict=True)]


def check_bound(lines, bound: int) -> None:
    for line in lines:
        assert line["version_lag_max"] <= bound
        assert len(line["staleness_tokens"]) == line["version_lag_max"] + 1
        assert sum(line["staleness_tokens"]) > 0


def kill(folder: Path, workdir: Path, given: dict, is_time: Callable[[], bool]) -> None:
    """Kills a run of these settings with SIGKILL when it is time.

    `given` are settings as in a file of --config, with some steps behind that time: the programs
    may be compiled already. `folder` is for that file.
    """
    file = write_config(folder, given)
    line = "-m", "earl_jax.main", f"--config={file}", f"--workdir={workdir}"
    process = start_python(*line, env=environment())
    deadline = time.monotonic() + 400
    while not is_time():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was done before"
