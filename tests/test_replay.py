# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Replays of synchronous runs, and of runs that went on asynchronously, by their events."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from earl_jax.config import file as config_file
from earl_jax.placement.placement import Placement
from earl_jax.rollout.event_files import read_events
from earl_jax.rollout.rounds import Rounds
from earl_jax.run.build import build_run
from earl_jax.selector import choose
from earl_jax.sharding.layout import MeshShape
from earl_jax.train.learner import Learner
from earl_jax.training import train
from tests.support.placements import D4T2, D8, F8, hungry, table_of, too_large_for
from tests.support.runs import check_replay, episodes_of, kill, steps_of, stop_in_rollout
from tests.support.settings import make_config, small
from tests.support.wanderers import WANDERERS

F4T2, EPISODES = MeshShape(fsdp=4, tensor=2), 16
ROLLOUT = {**WANDERERS["rollout"], "num_slots": 16, "context_buckets": (64, 256)}
GIVEN = {
    **WANDERERS,
    "num_steps": 2,
    "rollout": {**ROLLOUT, "patience_s": 0.001},
    "selector": {
        "rollout_meshes": (str(D8), str(D4T2)),
        "train_meshes": (str(F8), str(F4T2)),
        "table": "model",
        "budget_bytes_per_device": 10**9,
    },
    "checkpoint": {"every_steps": 1},
    "log": {"trajectories_every_steps": 1},
}


class Times:
    """Times that a run observes: data=8 and fsdp=8 are fast, or their rivals, step by step."""

    def __init__(self, monkeypatch, workdir):
        self.fast, self.too_large = ["eight"], ()
        problem = build_run(make_config(GIVEN)).problem

        def known(own):
            step = len(steps_of(workdir))
            speeds = (1e4, 1e3) if self.fast[step % len(self.fast)] == "eight" else (1e3, 1e4)
            train, rollout = (
                dict(zip(each, speeds, strict=True)) for each in ((F8, F4T2), (D8, D4T2))
            )
            table = table_of(problem, train, rollout, (64, 256))
            table = too_large_for(table, problem, rollout=self.too_large)
            return table.over(own.kept)

        def keep(own, table):
            own.kept = table

        monkeypatch.setattr(Placement, "table", property(known, keep), raising=False)
        # Plans that are slower are left at once.
        monkeypatch.setattr(choose, "WINDOW", 0)


@pytest.fixture
def times(monkeypatch, tmp_path):
    return Times(monkeypatch, tmp_path / "run")


def plans_of(workdir) -> list[tuple[str, str, str]]:
    """The events with plans, and the meshes that they name."""
    events = [e for e in read_events(workdir) if "placement" in e]
    return [(e["event"], *(e["placement"][s][0] for s in ("rollout", "train"))) for e in events]


def test_a_synchronous_run_is_replayed_on_the_meshes_that_its_times_chose(tmp_path, times):
    """Contexts outgrow data=8 within the first rollout, and fsdp=8 is slower in the second step."""
    first = tmp_path / "run"
    times.fast, times.too_large = ["eight", "four"], ((D8, 256),)
    train(make_config(GIVEN), first)
    eight, four = "data=1,fsdp=8", "data=1,fsdp=4,tensor=2"
    assert plans_of(first) == [
        ("plans", str(D8), eight),
        ("grow", str(D4T2), eight),
        ("plans", str(D4T2), eight),
        ("plans", str(D4T2), four),
        ("plans", str(D4T2), four),
    ]
    # By its own times the replay would stay.
    times.fast, times.too_large = ["eight"], ()
    check_replay(first, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("times")
def test_a_synchronous_run_that_was_short_of_memory_is_replayed(tmp_path, monkeypatch):
    """In the fourth round, whose rollout is played again, and in the first update."""
    first, rounds = tmp_path / "run", itertools.count()
    play, program, fail = Rounds.play, Learner.program, hungry(donated=0)

    def short_once(own, session):
        # Not in the evaluation before.
        if (first / "metrics.jsonl").exists() and next(rounds) == 3:
            jax.block_until_ready(fail(jnp.ones(4)))
        return play(own, session)

    def short_on_eight(own, plan, *, sft=False):
        return fail if plan.mesh == F8 else program(own, plan, sft=sft)

    with monkeypatch.context() as patch:
        # What ran out of memory is remembered there.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setattr(Rounds, "play", short_once)
        patch.setattr(Learner, "program", short_on_eight)
        train(make_config(GIVEN | {"num_steps": 1}), first)
    names = [e["event"] for e in read_events(first) if e["event"] not in ("answers", "grow")]
    # The update is tried in smaller parts, too, before it moves.
    assert names[:5] == ["open", "plans", "open", "plans", "plans"] and names[-1] == "trained"
    assert len(names) > 6 and set(names[5:-1]) == {"plans"}
    assert plans_of(first)[-1][2] == "data=1,fsdp=4,tensor=2"
    check_replay(first, 1)


@pytest.mark.slow
def test_a_run_that_was_killed_and_went_on_asynchronously_is_replayed(tmp_path):
    """SIGKILL in a synchronous step; it goes on, is stopped in a rollout, and ends synchronously.

    Each task is trained on once.
    """
    first, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    meshes = {"rollout_meshes": (str(D8),), "train_meshes": (str(F8),), "table": "model"}
    given = GIVEN | {"num_steps": 9, "selector": meshes}
    saved = first / "checkpoints" / "1"
    is_time = lambda: saved.exists() and '{"step": 2, "time_s"' in metrics.read_text()  # noqa: E731
    kill(tmp_path, first, small(given), is_time)
    done = len(read_events(first)) and max(e.get("step", 0) for e in read_events(first))
    ahead = given | {"asynchrony": {"max_staleness": 1}}
    # The second asynchronous step finds its episodes played, and plays no round.
    last = done + 5
    for each, stop in [
        (given | {"num_steps": done + 1}, str),
        (ahead | {"num_steps": last}, stop_in_rollout(first, done + 3)),
        (ahead | {"num_steps": done + 4}, str),
        (given | {"num_steps": last}, str),
    ]:
        train(config_file.make_config(small(each)), first, stop)
    opened = [e for e in read_events(first) if e["event"] == "open"]
    bounds = [e["settings"]["asynchrony"]["max_staleness"] for e in opened]
    assert bounds == [0] * (done + 1) + [1, 1] + [0]
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == last
    assert episodes_of(first) == dict.fromkeys(range(last * EPISODES), 1)
    check_replay(first, last)
