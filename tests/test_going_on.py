# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A run goes on with other settings where it may, and a new one begins with another's weights."""

import ctypes
import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.envs.text.tokenizer import build_tokenizer, save_tokenizer
from earl_jax.evaluate import evaluate_command
from earl_jax.launch.start import exit_status
from earl_jax.rollout.config import MAX_TURNS
from earl_jax.rollout.task import Task
from earl_jax.run.build import build_run
from earl_jax.run.saved_position import read_newest
from earl_jax.run.source import open_source
from earl_jax.run.step_end import EpisodesFailed, pause_s
from earl_jax.settings.errors import InputError, RunError
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.training import train
from tests.support import ROOT
from tests.support.forks import run_python
from tests.support.placements import TINY as TINY_MODEL
from tests.support.runs import (
    assert_equal,
    check_resume,
    command,
    final_parameters,
    final_state,
    steps_of,
)
from tests.support.settings import make_config, write_config

# As many tasks that the tokenizer is trained on all of them whatever the number of steps.
TINY = {
    "num_steps": 2,
    "model": TINY_MODEL,
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 152,
        "patience_s": 10.0,
        "context_buckets": (48,),
    },
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "train": {"schedule": "constant", "final_learning_rate": 0.0, "entropy_coefficient": 0.0},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
    "checkpoint": {"every_steps": 2},
}


def config_of(*overrides, **changes):
    return make_config({**TINY, **changes}, overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The workdir of a run of two steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(config_of(), folder)
    return folder


def saved(workdir: Path) -> dict:
    return json.loads((workdir / "config.json").read_text())


def parameters(workdir, step):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(final_state(workdir, step)["params"])]


# Going on.


def test_more_steps_are_those_of_a_run_that_had_them_from_the_start(finished, tmp_path, capsys):
    part, whole = shutil.copytree(finished, tmp_path / "part"), tmp_path / "whole"
    train(config_of("num_steps=3"), part)
    assert "changed: config.num_steps is 2 there, 3 here" in capsys.readouterr().out
    assert saved(part)["num_steps"] == 3
    train(config_of("num_steps=3"), whole)
    assert_equal(final_parameters(part, 3), final_parameters(whole, 3))


FOUR_DEVICES = {
    "devices.num_cpu_devices": 4,
    "selector.rollout_meshes": "('data=4',)",
    "selector.train_meshes": "('data=2,fsdp=2',)",
}


@pytest.mark.slow
def test_another_number_of_devices_goes_on(finished, tmp_path):
    """By a resume, and by a run that begins with the weights: on four of eight, then on eight."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    flags = f"--config={write_config(tmp_path, config_of().as_dict())}", f"--workdir={folder}"
    done = run_python(*command("main", *flags, **FOUR_DEVICES, num_steps=3)[1:])
    assert done.returncode == 0, done.stderr
    assert "changed: config.devices.num_cpu_devices is 8 there, 4 here" in done.stdout
    assert "the checkpoint's meshes are not possible here any more" in done.stdout
    last = steps_of(folder)[-1]
    assert (last["step"], last["train_mesh"]) == (3, "data=2,fsdp=2")
    train(config_of(*STILL, f"init_from={folder}@3"), tmp_path / "next")
    assert_equal(begun(tmp_path / "next"), parameters(folder, 3))


@pytest.mark.slow
def test_a_run_that_was_given_a_mistake_leaves_a_workdir_for_the_right_one(tmp_path):
    folder = tmp_path / "run"

    def wrong(words, *overrides):
        with pytest.raises(InputError, match=words):
            train(config_of("num_steps=1", *overrides), folder)
        assert not (folder / "config.json").exists() and not (folder / "tokenizer").exists()

    wrong("config.model.path", f"model.path={tmp_path / 'nowhere'}")
    wrong("config.env.args", "env.args.board=4")
    wrong("smallest budget", "selector.budget_bytes_per_device=1000", "env.name=connect_four")
    config = config_of("num_steps=1")
    train(config, folder)
    assert saved(folder) == json.loads(json.dumps(config.as_dict()))
    # The tokenizer is that of this environment's text, and not of the one before.
    assert "connect" not in (folder / "tokenizer" / "tokenizer.json").read_text()


@pytest.mark.slow
def test_a_moving_average_goes_on_where_it_was(tmp_path):
    """Each role's, from a checkpoint behind step 1; the run ends with the same bits."""
    changes = ("checkpoint.every_steps=1", "algorithm=reinforce")
    changes += ("algorithm_args.baseline=ema", "algorithm_args.baseline_decay=0.5")
    # Games that end otherwise than by a first move that is not allowed.
    changes += ("env.args.mask_illegal=True", "train.ratio=model")
    config = config_of(*changes)
    train(config, tmp_path / "whole")
    again = check_resume(config, tmp_path / "whole", 1)
    ones, others = (
        [position_of(folder, step)["averages"] for step in (1, 2)]
        for folder in (again, tmp_path / "whole")
    )
    assert ones == others and set(ones[0]) == {"x", "o"}
    assert ones[0] != ones[1]


def position_of(workdir: Path, step: int) -> dict:
    checkpoints = Checkpoints(workdir / "checkpoints", keep=None)
    try:
        return checkpoints.position(step)
    finally:
        checkpoints.close()


class Book:
    """Takes so many replies, each one of two letters."""

    def __init__(self, chapters: int):
        self.left = chapters

    def all_choices(self):
        return ("a", "b")

    def start(self):
        return Start(text="go", choices=("a", "b"))

    def step(self, reply):
        self.left -= 1
        done = not self.left
        more = {"stop_reason": "end"} if done else {"text": "on", "choices": ("a", "b")}
        return StepResult(reward=float(reply == "a"), done=done, **more)


class SameBooks:
    """Every step has the same tasks; each data shard's last one is the longest."""

    def __init__(self, num_tasks: int):
        self._tasks = [{"chapters": 6 if i % 4 == 3 else 2} for i in range(num_tasks)]

    def batch(self, step):
        return self._tasks

    def evaluation(self, number):
        return self._tasks[:1] * number


@pytest.mark.slow
def test_lengths_of_tasks_last_from_step_to_step_and_go_on_where_they_were(tmp_path):
    """The first step begins with each data shard's first tasks, the second with the longest."""
    rollout = TINY["rollout"] | {"episodes_per_step": 32, "order": "longest", "patience_s": 60.0}
    changes = {
        "env": {"name": f"{__name__}:Book"},
        "tasks": {"name": f"{__name__}:SameBooks"},
        "rollout": rollout | {"group_size": 1, "context_buckets": (128,)},
        "checkpoint": {"every_steps": 1},
        "train": TINY["train"] | {"ratio": "model"},
    }
    config = config_of(**changes)
    train(config, tmp_path / "whole")
    again = check_resume(config, tmp_path / "whole", 1)
    one, two = steps_of(tmp_path / "whole")
    assert one["rollout_tokens"] == two["rollout_tokens"]
    assert two["decode_rows"] < one["decode_rows"]
    lengths = position_of(tmp_path / "whole", 1)["lengths"]
    kinds = [Task(episode=0, group=0, args={"chapters": number}).kind for number in (2, 6)]
    assert {kind for kind, _ in lengths} == {*kinds} and dict(lengths)[kinds[1]] > 20
    # The rounds that were played, to which the last episodes of a rollout may move.
    played = position_of(tmp_path / "whole", 2)["played"]
    _, _, placement = read_newest(config, again)
    assert played and placement.played == {*played}


# The weights of another run.


def begun(folder):
    """The parameters that a run begins with: a learning rate of 0 leaves them as they are."""
    return parameters(folder, 1)


STILL = ("num_steps=1", "train.learning_rate=0.0")


def test_a_run_begins_with_the_parameters_of_another(finished, tmp_path, capsys):
    # Another seed and algorithm; the tokenizer comes with the weights.
    train(config_of(*STILL, f"init_from={finished}", "seed=5"), tmp_path / "newest")
    assert f"begins with the weights of {finished} after step 2" in capsys.readouterr().out
    assert_equal(begun(tmp_path / "newest"), parameters(finished, 2))
    state = final_state(tmp_path / "newest", 1)
    assert int(state["updates"]) == 1, "and nothing else of it"
    assert saved(tmp_path / "newest")["init_from"] == str(finished)
    # The same command resumes, and needs the other run no more.
    resumed = config_of("num_steps=2", *STILL[1:], f"init_from={finished}", "seed=5")
    train(resumed, tmp_path / "newest")
    assert "after step 1 of 2\n" in capsys.readouterr().out
    # With fewer steps than it has made.
    train(config_of(*STILL, f"init_from={finished}", "seed=5"), tmp_path / "newest")
    words = "after step 2; no step is left to take (config.num_steps=1)"
    assert words in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_begins_again_takes_the_weights_that_it_took(finished, tmp_path, capsys):
    """Though the other run has gone on since; and so does its replay."""
    other = shutil.copytree(finished, tmp_path / "other")
    config = config_of(*STILL, f"init_from={other}")
    assert train(config, tmp_path / "run", lambda: "SIGTERM").stopped
    train(config_of("num_steps=3"), other)
    capsys.readouterr()
    train(config, tmp_path / "run")
    assert f"begins with the weights of {other} after step 2" in capsys.readouterr().out
    flags = parse_flags([f"--replay={tmp_path / 'run'}", f"--workdir={tmp_path / 'again'}"])
    assert replayed_config(tmp_path / "run", *flags)[0].init_from == f"{other}@2"


@pytest.mark.slow
def test_adapters_come_from_another_run_of_the_same_base(tmp_path):
    lora = {"train": {**TINY["train"], "lora": {"rank": 2}}}
    train(config_of("num_steps=1", **lora), tmp_path / "first")
    train(config_of(*STILL, f"init_from={tmp_path / 'first'}", **lora), tmp_path / "second")
    assert_equal(begun(tmp_path / "second"), parameters(tmp_path / "first", 1))
    other = config_of(*STILL, f"init_from={tmp_path / 'first'}", "seed=5", **lora)
    with pytest.raises(InputError, match="has adapters of another base than"):
        train(other, tmp_path / "third")
    full = config_of(*STILL, f"init_from={tmp_path / 'first'}")
    with pytest.raises(InputError, match="rank=2, and this one has .*rank=0: name .* export as"):
        train(full, tmp_path / "fourth")


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        ("{run}@7", [], "there is no such checkpoint; the steps of .* are 2$"),
        ("{run}/nowhere", [], "holds no checkpoint of a run; name the workdir"),
        ("{run}", ["model.width=32"], "config.model.width is 16 there, 32 here"),
        ("{run}", ["train.lora.rank=2"], "rank=0, and this one has .*rank=2: name .* export as"),
        ("{run}", ["model.path={model}"], "config.model.path is '' there, '.*' here"),
    ],
)
def test_weights_that_cannot_be_taken_over(finished, tmp_path, source, overrides, words):
    model = ROOT / "tests/reference/qwen2_tied"
    overrides = [each.format(model=model) for each in overrides]
    given = TINY | ({"model": {}} if "path" in str(overrides) else {})
    source = source.format(run=finished)
    config = make_config(given, [*overrides, f"init_from={source}"])
    with pytest.raises(InputError, match=words):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_weights_of_a_checkpoint_with_other_positions_are_an_error(tmp_path):
    """It has the same shapes and tokenizer; it is found where the other run found it, or named."""
    folders = [tmp_path / name for name in ("theirs", "ours")]
    for folder in folders:
        shutil.copytree(ROOT / "tests/reference/qwen2_tied", folder)
    settings = folders[0] / "config.json"
    given = json.loads(settings.read_text())
    given["rope_parameters"]["rope_theta"] = 77.0
    settings.write_text(json.dumps(given))
    # The tokenizer is the checkpoint's.
    rollout = {**TINY["rollout"], "episodes_per_step": 16}
    theirs, ours = (
        make_config({**TINY, "rollout": rollout, "model": {"path": str(each)}}) for each in folders
    )
    train(dataclasses.replace(theirs, num_steps=1), tmp_path / "first")
    begins = dataclasses.replace(ours, init_from=str(tmp_path / "first"))
    with pytest.raises(InputError, match=r"config.model.rope\S* is 77.0 there"):
        train(begins, tmp_path / "second")
    folders[0].rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"config.model.path of .*first is .*no such folder"):
        train(begins, tmp_path / "second")
    weights = folders[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(InputError, match="model.safetensors"):
        train(ours, tmp_path / "third")


def test_weights_of_another_tokenizer_are_an_error(finished, tmp_path):
    """Its vocabulary is padded to the same size, so that its parameters would fit."""
    folder = tmp_path / "source"
    shutil.copytree(finished, folder)
    world = build_run(config_of(), folder / "tokenizer")
    source = open_source(str(folder))
    source.check(world)
    save_tokenizer(build_tokenizer(["another text " * 9], 300), folder / "tokenizer")
    with pytest.raises(InputError, match="is a run of another tokenizer"):
        source.check(world)


# Episodes that all fail.


class Failing:
    """Fails from task `first` on, each or `one_in` so many: at its start, or at the first reply.

    Evaluation does not fail, nor what comes from task `last` on.
    """

    def __init__(
        self, *, index: int, first: int, at_start: bool, one_in: int = 1, last: int = 2**30
    ):
        self.fails = first <= index < last and index % one_in == 0
        self.at_start = at_start

    def all_choices(self):
        return ("yes", "no")

    def start(self):
        if self.fails and self.at_start:
            raise OSError("the sandbox is down")
        return Start(text="say", choices=self.all_choices())

    def step(self, reply):
        if self.fails:
            raise OSError("the sandbox is down")
        return StepResult(reward=1.0, done=True, stop_reason="said")


def failing(model, *overrides, **args):
    return config_of(
        "checkpoint.every_steps=50",
        "num_steps=3",
        *overrides,
        env={"name": "tests.test_going_on:Failing", "args": args},
        model=model,
        rollout={**TINY["rollout"], "episodes_per_step": 16},
        train={**TINY["train"], "ratio": "model"},
    )


# Its tokenizer needs no episodes.
MODEL = {"path": str(ROOT / "tests/reference/qwen2_tied")}


@pytest.mark.slow
def test_a_first_step_whose_episodes_all_fail_ends_the_run(tmp_path, capsys):
    """At their first reply: status 1 of the command, and one message with the reasons."""
    config = failing(MODEL, first=0, at_start=False)
    assert exit_status(lambda: train(config, tmp_path / "run") and 0) == 1
    words = capsys.readouterr().err
    assert words.startswith("error: every episode of step 1 failed (config.env)")
    assert words.count("\n  environment_error: OSError: the sandbox is down") == 1
    assert words.count("the sandbox is down") == 1
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row for row in rows if "eval" not in row] == [], "nothing was trained"


class Hanging(Failing):
    """Hangs where Failing fails."""

    released = threading.Event()

    def step(self, reply):
        if self.fails:
            Hanging.released.wait()
        return super().step(reply)


class Endless(Failing):
    """Never ends."""

    def step(self, reply):
        return StepResult(text="say", reward=0.0, done=False, choices=self.all_choices())


@pytest.mark.slow
def test_an_environment_that_never_ends_holds_no_run(tmp_path):
    """The tokens of the checkpoint's model are a limit; turns have one too (test_collect.py)."""
    given = failing(
        MODEL, "num_steps=1", "eval.games=1", "eval.final_games=1", first=99, at_start=True
    )
    assert given.rollout.max_turns == MAX_TURNS
    env = dataclasses.replace(given.env, name=f"{__name__}:Endless")
    train(dataclasses.replace(given, env=env), tmp_path / "run")
    (path,) = (tmp_path / "run" / "trajectories").glob("*.jsonl")
    episodes = read_trajectories(path)
    assert len(episodes) == 16
    assert all(e["stop_reason"] == "episode_too_long" for e in episodes)
    assert max(e["num_tokens"] for e in episodes) <= 128


@pytest.mark.slow
def test_calls_that_hang_end_their_episodes_and_are_counted(tmp_path):
    given = failing(MODEL, "env.timeout_s=3.0", "num_steps=2", first=16, at_start=False, one_in=8)
    config = dataclasses.replace(
        given, env=dataclasses.replace(given.env, name=f"{__name__}:Hanging")
    )
    try:
        train(config, tmp_path / "run")
    finally:
        Hanging.released.set()
    rows = steps_of(tmp_path / "run")
    assert "hung_calls" not in rows[0] and rows[1]["hung_calls"] == 2
    assert rows[1]["failed_share"] == 0.125
    assert rows[1]["failure"].startswith("environment_timeout: no answer within 3.0 s")


@pytest.mark.slow
def test_a_step_whose_episodes_all_fail_leaves_the_weights_as_they_are(tmp_path, capsys):
    """Step 2 has no tokens to learn from, where the run may go on; the selector takes it too."""
    config = failing(MODEL, "checkpoint.every_steps=1", first=16, last=32, at_start=True)
    train(config, tmp_path / "run")
    rows = steps_of(tmp_path / "run")
    assert [row["failed_share"] for row in rows] == [0.0, 1.0, 0.0]
    assert rows[1]["rollout_tokens"] == rows[1]["context_tokens_max"] == 0
    assert [row["skipped_updates"] for row in rows] == [0, 0, 0]
    assert_equal(final_parameters(tmp_path / "run", 1), final_parameters(tmp_path / "run", 2))
    assert any(
        (one != other).any()
        for one, other in zip(
            final_parameters(tmp_path / "run", 2),
            final_parameters(tmp_path / "run", 3),
            strict=True,
        )
    )
    assert capsys.readouterr().out.count("16 of 16 episodes failed as environment_error") == 1
    # An evaluation in which all fail has no mean, and says why.
    evaluate_command(
        [f"--workdir={tmp_path / 'run'}", "--games=8", f"--config.env.args.last={2**31}"]
    )
    shown = capsys.readouterr().out
    assert "reward_mean" not in shown and "failed_share           1.000" in shown
    assert "no means: all 8 episodes failed, as environment_error: OSError: the sandbox" in shown


@pytest.mark.slow
def test_an_outage_ends_no_run_that_has_worked(tmp_path, monkeypatch, capsys):
    """All episodes of the steps 2 to 14 fail; the run goes on over a resume, and learns again."""
    behind = []
    monkeypatch.setattr("earl_jax.training.pause_s", lambda steps, _: behind.append(steps) or 0)
    outage = {"first": 16, "last": 16 * 14, "at_start": True}
    for num_steps in (5, 14, 16):
        config = failing(MODEL, f"num_steps={num_steps}", **outage)
        assert not train(config, tmp_path / "run").stopped
    shares = [row["failed_share"] for row in steps_of(tmp_path / "run")]
    assert shares == [0.0, *[1.0] * 13, 0.0, 0.0]
    # Nobody waits behind a run's last step.
    assert behind == [1, 2, 3, *range(5, 13)]
    shown = capsys.readouterr().out
    assert "step 5: every episode failed in 4 steps in a row, which taught nothing\n" in shown
    assert "in 12 steps in a row, which taught nothing; the next begins in 0 s\n" in shown
    assert_equal(final_parameters(tmp_path / "run", 5), final_parameters(tmp_path / "run", 14))


def test_the_pause_behind_failed_steps_doubles_up_to_five_minutes():
    assert [pause_s(number) for number in range(11)] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert pause_s(10_000) == 300
    # The episodes of three steps fail together.
    assert [pause_s(number, 3) for number in range(10)] == [0, 0, 0, 1, 0, 0, 2, 0, 0, 4]


def test_a_signal_ends_the_pause_behind_failed_steps(tmp_path, monkeypatch):
    """The run is saved with the step that failed, and goes on behind it."""
    monkeypatch.setattr("earl_jax.training.pause_s", lambda *steps: 3600)
    config = failing(MODEL, first=16, at_start=True)

    def stop():
        path = tmp_path / "run" / "metrics.jsonl"
        return "SIGTERM" if path.exists() and len(steps_of(tmp_path / "run")) == 2 else ""

    assert train(config, tmp_path / "run", stop).stopped.startswith(
        "stopped by SIGTERM after step 2"
    )
    assert final_parameters(tmp_path / "run", 2)


@pytest.mark.slow
def test_first_steps_that_take_what_failed_at_once_end_no_run(tmp_path, monkeypatch):
    """Half of 80 episodes fail at their start, and the rule takes those that finish first."""
    waits = []
    monkeypatch.setattr("earl_jax.training.pause_s", lambda *n: waits.append(pause_s(*n)) or 0)
    ahead = ("asynchrony.max_staleness=4", "asynchrony.rule=wait", "rollout.num_slots=80")
    config = failing(MODEL, *ahead, "num_steps=6", first=0, at_start=True, one_in=2)
    train(config, tmp_path / "run")
    shares = [row["failed_share"] for row in steps_of(tmp_path / "run")]
    assert shares[:2] == [1.0, 1.0] and shares[2] < 1 and len(shares) == 6
    assert waits == [0, 0]
    # Where all fail, the bound is the number of steps that it plays ahead.
    config = failing(MODEL, *ahead, first=0, at_start=True)
    config = dataclasses.replace(config, num_steps=6)
    for _ in range(2):
        with pytest.raises(EpisodesFailed, match="every episode of step 5 failed"):
            train(config, tmp_path / "broken")
    # Repaired, it goes on with the same tasks.
    repaired = property(lambda self: False, lambda self, fails: None)
    monkeypatch.setattr("tests.test_going_on.Failing.fails", repaired, raising=False)
    train(config, tmp_path / "broken")
    shares = [row["failed_share"] for row in steps_of(tmp_path / "broken")]
    assert shares == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_replay_waits_out_no_pause(tmp_path, monkeypatch):
    """The second of three steps failed; behind it the run waited."""
    config = failing(MODEL, first=16, last=32, at_start=True)
    train(config, tmp_path / "run")
    monkeypatch.setattr("earl_jax.training.pause_s", lambda *steps: pytest.fail("it waits"))
    train(config, tmp_path / "again", replay=tmp_path / "run")
    assert_equal(final_parameters(tmp_path / "run", 3), final_parameters(tmp_path / "again", 3))


def test_an_environment_that_fails_before_there_is_a_tokenizer_says_so(tmp_path):
    with pytest.raises(RunError, match="failed: OSError: the sandbox is down"):
        train(failing(TINY["model"], first=0, at_start=True), tmp_path / "run")


def test_a_call_that_holds_the_interpreter_is_not_timed_out():
    """As a loop in C does: the pool sees what it took when it has returned."""
    pool, sleep = EnvironmentPool(1, timeout_s=0.5), ctypes.PyDLL(None).usleep
    since_s = time.monotonic()
    pool.run([lambda: sleep(800_000)])
    assert time.monotonic() - since_s >= 0.8
    assert pool.run([lambda: "next"]) == ["next"]
    pool.close()
