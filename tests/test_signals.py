# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Signals to real runs: the first saves and ends the run, a second Ctrl-C ends it at once."""

import json
import random
import shlex
import signal
import sys
import threading
import time

import pytest

from earl_jax.envs.environment import Start
from earl_jax.launch.start import STOPPED
from earl_jax.main import train_command
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import RunEnd, train
from tests.support.commands import ALL, CONFIG, Command
from tests.support.placements import TINY as TINY_MODEL
from tests.support.runs import assert_equal, cut_off, final_parameters, steps_of, stop_in_rollout
from tests.support.settings import make_config

# So many steps that a signal ends the run, and one line of metrics behind each.
LONG = ALL | {"num_steps": 1000, "log.trajectories_every_steps": 1000}


def last_line(output: str) -> str:
    return output.splitlines()[-1]


@pytest.mark.slow
def test_a_signal_saves_and_the_last_line_goes_on(tmp_path):
    """All processes stop at the same step, whichever of them gets the signal."""
    run = Command(tmp_path / "w", 2, **LONG)
    run.after_step(2)
    run.all[-1].send_signal(signal.SIGINT)
    ends = run.ends()
    assert [status for status, _, _ in ends] == [STOPPED] * 2, ends
    assert "* SIGINT: the run gives up its rollout, or finishes its step" in ends[-1][2]
    step = steps_of(run.workdir)[-1]["step"]
    assert 2 <= step < 1000 and (run.workdir / "checkpoints" / str(step)).is_dir()
    words = last_line(ends[0][1])
    saved = run.workdir / "checkpoints" / str(step)
    assert words.startswith(f"stopped by SIGINT after step {step}; saved in {saved}. To go on: ")
    line = shlex.split(words[words.index(sys.executable) :])
    assert line == run.all[0].args


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("num", [1, 2])
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, monkeypatch, num):
    """Also while the first program is compiled, when Python runs no handler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = Command(tmp_path / "w", num, **LONG, **{"distributed.heartbeat_s": 10})
    run.after(lambda: (run.workdir / "config.json").exists())
    run.all[0].send_signal(signal.SIGINT)
    run.after(lambda: "* SIGINT:" in run.all[0].output()[1])
    run.all[0].send_signal(signal.SIGINT)
    run.all[0].wait(20)
    status, _, errors = run.ends(60)[0]
    assert status == 128 + signal.SIGINT and "Traceback" not in errors
    assert f"stopped at once by a second signal; {run.workdir} holds no checkpoint" in errors


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_run_before_it(tmp_path, monkeypatch):
    """While the first programs are compiled: the cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = Command(tmp_path / "w", 2, **LONG)
    run.after(lambda: (run.workdir / "tokenizer").exists())
    run.all[1].send_signal(signal.SIGTERM)
    ends = run.ends()
    assert [status for status, _, _ in ends] == [STOPPED] * 2, ends
    words = "stopped by SIGTERM before the first step; there was nothing to save. To go on: "
    assert last_line(ends[0][1]).startswith(words)
    assert not (run.workdir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("replays", "is_replayed", "status", "words"),
    [
        (False, False, STOPPED, "To go on: "),
        (True, False, 128 + signal.SIGTERM, "A replay begins again: give it a new --workdir"),
        (True, True, 0, "the run that it replays came no further"),
    ],
)
def test_a_replay_does_not_say_that_it_goes_on(
    tmp_path, monkeypatch, capsys, replays, is_replayed, status, words
):
    """A launcher starts a run again that ends with status 75, and it would refuse the workdir."""
    evaluation = {"episodes": 16, "name": "trail", "reward_mean": -1.0}
    end = RunEnd(evaluation=evaluation, stopped="stopped after step 1", is_replayed=is_replayed)
    monkeypatch.setattr("earl_jax.main.start_jax", lambda *_: None)
    monkeypatch.setattr("earl_jax.training.train", lambda *_, **__: end)
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)
    config = make_config({"asynchrony": {"max_staleness": 1}})
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    own = [f"--replay={tmp_path}"] if replays else [f"--config={CONFIG}"]
    assert train_command([*own, f"--workdir={tmp_path / 'w'}"]) == status
    output = capsys.readouterr().out
    assert words in last_line(output)
    assert "16 episodes" not in output, "an evaluation of an earlier step is no result"


# Rollouts that are given up.

SHORT = {
    "num_steps": 3,
    "model": TINY_MODEL,
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 32,
        "patience_s": 10.0,
        "context_buckets": (24, 48),
    },
    "selector": {
        "rollout_meshes": ("data=8",),
        "train_meshes": ("data=8", "data=2,fsdp=4"),
        "table": "model",
    },
    "eval": {"every_steps": 2, "games": 8, "final_games": 16},
    "checkpoint": {"every_steps": 50},
    "log": {"trajectories_every_steps": 1},
}


class Counter:
    """Names a signal from its call number `last` on; 0: never."""

    def __init__(self, last: int):
        self.calls, self.last = 0, last

    def __call__(self) -> str:
        self.calls += 1
        return "SIGTERM" if self.last and self.calls >= self.last else ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run that is left alone, and how often it looked for a signal."""
    folder, counter = tmp_path_factory.mktemp("whole") / "run", Counter(0)
    assert not train(make_config(SHORT), folder, counter).stopped
    return folder, counter.calls


def lines_of(workdir):
    """The lines of metrics without what depends on time, and on what was compiled before."""
    vary = ("time_s", "stage_s", "rollout_tokens_per_s", "train_tokens_per_s", "env_wait_s")
    vary += ("compile_s", "compiles", "switch_s", "switched", "decision")
    vary += ("expected_step_s", "publish_host_bytes", "shared_tokens", "prefill_tokens")
    return [
        {name: value for name, value in row.items() if name not in vary}
        for row in read_metrics(workdir / "metrics.jsonl")
    ]


def test_without_evaluation_games_nothing_is_evaluated(whole, tmp_path):
    """Nor at the start or the end; an evaluation of an earlier step is not the run's."""
    off = SHORT | {"eval": {"every_steps": 1, "games": 0}}
    assert train(make_config(off | {"num_steps": 1}), tmp_path / "new").evaluation == {}
    assert ["eval" in row for row in lines_of(tmp_path / "new")] == [False]
    again = cut_off(whole[0], tmp_path / "again", 3)
    assert train(make_config(off | {"num_steps": 4}), again).evaluation == {}
    assert [row["step"] for row in lines_of(again) if "eval" in row] == [0, 2, 3]


def test_a_rollout_that_is_given_up_is_played_again_bit_for_bit(whole, tmp_path):
    """At any round of any step or evaluation, and then in the last one, which is made up for."""
    last = random.Random(0).randint(whole[1] // 3, whole[1] - 1)
    folder = tmp_path / "run"
    end = train(make_config(SHORT), folder, Counter(last))
    assert end.stopped.startswith("stopped by SIGTERM")
    done = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    kept = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    assert kept == ([max(done)] if max(done) else []), "saved as it was before the step"
    # In the evaluation behind the last step.
    end = train(make_config(SHORT), folder, stop_in_rollout(folder, 3))
    assert end.stopped.startswith("stopped by SIGTERM after step 3; saved in")
    assert "eval" not in lines_of(folder)[-1]
    (folder / "report.html").unlink()
    assert train(make_config(SHORT), folder).evaluation["episodes"] == 16
    assert (folder / "report.html").exists()
    assert lines_of(folder) == lines_of(whole[0])
    assert_equal(final_parameters(folder, 3), final_parameters(whole[0], 3))
    for path in (whole[0] / "trajectories").glob("*.jsonl"):
        assert (folder / "trajectories" / path.name).read_text() == path.read_text()


class Silent:
    """Answers nothing until the end of the test."""

    asked, released = threading.Event(), threading.Event()

    def __init__(self, *, seed: int):
        del seed

    def all_choices(self):
        return ("yes", "no")

    def start(self):
        return Start(text="say", choices=self.all_choices())

    def step(self, reply):
        Silent.asked.set()
        assert Silent.released.wait(600)
        raise OSError(reply)


def test_signal_stops_a_rollout_that_waits_for_environments(tmp_path):
    """A call may take ten minutes; the first evaluation waits for all."""
    env = {"name": f"{__name__}:Silent", "timeout_s": 600.0}
    config = make_config(SHORT | {"env": env, "train": {"ratio": "model"}})
    began_s = time.monotonic()
    try:
        # When the first call is made no round runs any more, or the last one does.
        stop = lambda: "SIGTERM" if Silent.asked.is_set() else ""  # noqa: E731
        end = train(config, tmp_path / "run", stop)
    finally:
        Silent.released.set()
    assert end.stopped.startswith("stopped by SIGTERM before the first step")
    assert time.monotonic() - began_s < 120
