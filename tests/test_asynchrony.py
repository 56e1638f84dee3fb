# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs: the bound, each task once, weights that change between rounds, and replay."""

import collections
import itertools
import json

import jax
import numpy as np
import pytest

from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.rollout.events import EVENTS
from earl_jax.run import build_run
from earl_jax.settings.errors import InputError, RunError
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support.placements import TINY, begin
from tests.support.runs import final_parameters
from tests.support.settings import make_config

STEPS, EPISODES = 4, 16
SETTINGS = {
    "num_steps": STEPS,
    "model": TINY,
    "env": {"name": "tests.support.environments:Wanderer"},
    "algorithm": "grpo",
    "algorithm_args": {},
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": EPISODES,
        "group_size": 2,
        "context_buckets": (256,),
        "max_turn_tokens": 16,
        # A policy without training writes one of them in most replies.
        "stop_strings": tuple("abcdefghijklmnopqrstuvwxyz0123456789"),
        "patience_s": 0.001,
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 8},
    "selector": {"rollout_meshes": ("data=4",), "train_meshes": ("fsdp=4",), "table": "model"},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
    "checkpoint": {"every_steps": 2},
    "log": {"trajectories_every_steps": 1},
}
SHARED = {"rollout_meshes": ("data=8",), "train_meshes": ("fsdp=8",)}


def config_of(*, apart: bool = True, staleness: int = 2, **asynchrony):
    given = {**SETTINGS, "asynchrony": {"max_staleness": staleness, **asynchrony}}
    if apart:
        given["devices"] = {**given["devices"], "num_rollout": 4}
    else:
        given["selector"] = {**given["selector"], **SHARED}
    return make_config(given)


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


def steps_of(workdir):
    return [line for line in read_metrics(workdir / "metrics.jsonl") if "reward_mean" in line]


def episodes_of(workdir) -> collections.Counter:
    """How often each episode was trained on, by the lines of its trajectory."""
    files = sorted((workdir / "trajectories").glob("*"))
    return collections.Counter(t["episode"] for file in files for t in read_trajectories(file))


def check_bound(lines, bound: int) -> None:
    for line in lines:
        assert line["version_lag_max"] <= bound
        assert len(line["staleness_tokens"]) == line["version_lag_max"] + 1
        assert sum(line["staleness_tokens"]) > 0


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("apart", [False, True])
def test_with_no_staleness_it_is_the_synchronous_loop_bit_for_bit(apart):
    run = build_run(config_of(apart=apart, staleness=0))
    results = []
    for make in (lambda run, placement: None, AsyncPlayer):
        placement, position = begin(run)
        player = make(run, placement)
        for _ in range(2):
            position, record = rl_step(run, placement, position, player)
        assert record.metrics()["version_lag_max"] == 0
        results.append(jax.tree.leaves(jax.device_get(position.state)))
    assert_equal(*results)


@pytest.mark.slow_except("True-recompute")
@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_run_keeps_the_bound_and_its_replay_is_the_same_bit_for_bit(
    tmp_path, monkeypatch, apart, kv
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, again = tmp_path / "run", tmp_path / "again"
    config = config_of(apart=apart, kv=kv)
    train(config, first)
    lines = steps_of(first)
    check_bound(lines, 2)
    assert max(line["version_lag_max"] for line in lines) > 0
    assert episodes_of(first) == dict.fromkeys(range(STEPS * EPISODES), 1)
    # Nothing that was trained on went through the host.
    assert {line["dispatch_host_bytes"] for line in lines} == {0}
    assert {line["publish_host_bytes"] for line in lines} == {0}
    flags, overrides = parse_flags([f"--replay={first}", f"--workdir={again}"])
    replayed, workdir = replayed_config(first, flags, overrides)
    assert (replayed, workdir) == (config, again)
    train(replayed, again, replay=first)
    assert (again / EVENTS).read_text() == (first / EVENTS).read_text()
    assert_equal(final_parameters(first, STEPS), final_parameters(again, STEPS))
    if apart:
        # Rounds were played beside updates.
        assert any(line["stage_s"].get("overlap") for line in lines)


def test_a_run_that_was_stopped_goes_on_within_the_bound_and_is_replayed_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, again = tmp_path / "run", tmp_path / "again"
    config = config_of()
    looks = itertools.count()

    def stop() -> str:
        """Names a signal in the middle of the third step."""
        metrics = first / "metrics.jsonl"
        return "SIGTERM" * (metrics.exists() and len(steps_of(first)) == 2 and next(looks) > 3)

    end = train(config, first, stop)
    assert "SIGTERM" in end.stopped
    train(config, first)
    check_bound(steps_of(first), 2)
    assert episodes_of(first) == dict.fromkeys(range(STEPS * EPISODES), 1)
    events = [json.loads(line) for line in (first / EVENTS).read_text().splitlines()]
    opened = [event["version"] for event in events if event["event"] == "open"]
    assert opened == [0, 2]
    train(config, again, replay=first)
    assert_equal(final_parameters(first, STEPS), final_parameters(again, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["wait", "drop", "mask", "admission"])
def test_rules(tmp_path, monkeypatch, rule):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train(config_of(rule=rule, staleness=1), tmp_path / "run")
    lines, counts = steps_of(tmp_path / "run"), episodes_of(tmp_path / "run")
    assert set(counts.values()) == {1}
    assert sum(counts.values()) == STEPS * EPISODES
    if rule in ("wait", "drop"):
        check_bound(lines, 1)
    if rule != "drop":
        assert sorted(counts) == list(range(STEPS * EPISODES))
        assert not any("stale_tokens" in line for line in lines)


@pytest.mark.slow
def test_a_replay_that_does_something_else_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, first = config_of(), tmp_path / "run"
    train(config, first)
    events = [json.loads(line) for line in (first / EVENTS).read_text().splitlines()]
    place = next(i for i, event in enumerate(events) if event["event"] == "take")
    events[place]["groups"][0] += 1
    (first / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(RunError, match=rf"event {place + 1} of the run that is replayed is "):
        train(config, tmp_path / "again", replay=first)
    with pytest.raises(InputError, match="events.jsonl cannot be read"):
        train(config, tmp_path / "other", replay=tmp_path)


def test_what_has_no_effect_is_refused():
    with pytest.raises(InputError, match="asynchrony.kv = 'keep' has no effect"):
        config_of(staleness=0, kv="keep")
