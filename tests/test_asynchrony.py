# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs: the bound, each task once, weights that change between rounds, and replay."""

import collections
import dataclasses
import gc
import itertools
import json
import random
import shutil
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.config import file as config_file
from earl_jax.config.resume import replayed_parts, replayed_settings
from earl_jax.envs.environment import ENVIRONMENT_ERROR, ENVIRONMENT_TIMEOUT
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.launch.cluster import Cluster
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.placement import moves, rollouts
from earl_jax.rollout.event_files import EVENTS, read_events
from earl_jax.rollout.events import Events
from earl_jax.rollout.host_rows import as_row
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.rounds import Rounds
from earl_jax.run import evaluation, live_service
from earl_jax.run.build import build_run
from earl_jax.run.live_service import since_version
from earl_jax.settings.errors import InputError, RunError
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.train.learner import Learner
from earl_jax.training import train
from earl_jax.trajectory import FAILURES, Experience
from tests.support.environments import Troubled
from tests.support.forward import next_logprobs, row_logits
from tests.support.placements import begin, hungry
from tests.support.runs import (
    assert_equal,
    check_bound,
    check_lags,
    check_replay,
    episodes_of,
    final_parameters,
    kill,
    lags_of,
    rounds_beside_updates,
    steps_of,
    stop_in_rollout,
)
from tests.support.settings import make_config, small
from tests.support.simulated import check_events
from tests.support.wanderers import WANDERERS

STEPS, EPISODES = 4, 16
SETTINGS = {
    **WANDERERS,
    "num_steps": STEPS,
    "rollout": {**WANDERERS["rollout"], "patience_s": 0.001},
    "checkpoint": {"every_steps": 2},
    "log": {"trajectories_every_steps": 1},
}
SHARED = {"rollout_meshes": ("data=8",), "train_meshes": ("fsdp=8",)}


def given_of(*, apart: bool = True, staleness: int = 2, env: str = "", **asynchrony):
    given = {**SETTINGS, "asynchrony": {"max_staleness": staleness, **asynchrony}}
    if env:
        # Turns that no stop string ends would end its episodes.
        given["env"] = {"name": env}
        # Other groups than its long ones are over in time whatever the machine does beside.
        more = {"max_turn_tokens": 64, "context_buckets": (512,), "patience_s": 60.0}
        given["rollout"] = {**given["rollout"], **more}
    if apart:
        given["devices"] = {**given["devices"], "num_rollout": 4}
    else:
        given["selector"] = {**given["selector"], **SHARED}
    return given


def config_of(**changes):
    return make_config(given_of(**changes))


@pytest.mark.slow
def test_with_no_staleness_it_is_the_synchronous_loop_bit_for_bit():
    run = build_run(config_of(apart=False, staleness=0))
    results = []
    for make in (lambda run, placement: None, AsyncPlayer):
        placement, position = begin(run)
        player = make(run, placement)
        for _ in range(2):
            position, record = rl_step(run, placement, position, player)
        assert record.metrics()["version_lag_max"] == 0
        results.append(jax.tree.leaves(jax.device_get(position.state)))
    assert_equal(*results)


@pytest.mark.slow
def test_devices_never_hold_two_policies_of_the_rollout(monkeypatch):
    """The weights before are gone when the next ones arrive; so is a service that is given up."""
    run = build_run(config_of(staleness=1))
    placement, position = begin(run)
    player, before, publish = AsyncPlayer(run, placement), [], moves.publish_policy

    def watched(*given):
        gc.collect()
        assert [held for held in before if held() is not None] == []
        policy, num_bytes = publish(*given)
        before[:] = map(weakref.ref, jax.tree.leaves(policy.params))
        return policy, num_bytes

    for module in (moves, live_service):
        monkeypatch.setattr(module, "publish_policy", watched)
    for _ in range(3):
        position, _ = rl_step(run, placement, position, player)
    assert len(before) > 10
    service = weakref.ref(player._live.service)
    player._live.close()
    gc.collect()
    assert service() is None


@pytest.mark.slow
@pytest.mark.parametrize("proximal", ["recompute", "log_linear"])
def test_both_epochs_weight_tokens_by_the_versions_that_sampled_them(monkeypatch, proximal):
    """In the second step; weights are recomputed from its trajectories."""
    update, params = Learner.update, []

    def watched(own, plan, state, *given, **more):
        params.append(jax.device_get(state.params))
        return update(own, plan, state, *given, **more)

    monkeypatch.setattr(Learner, "update", watched)
    settings = {"epochs": 2, "proximal": proximal, "learning_rate": 0.02}
    run = build_run(make_config(given_of(apart=False, staleness=1) | {"train": settings}))
    placement, position = begin(run)
    player = AsyncPlayer(run, placement)
    for _ in range(2):
        position, record = rl_step(run, placement, position, player)
    rows = [as_row(each.turns, 256, scored=False) for each in record.trajectories]
    tokens = np.stack([row.tokens for row in rows])
    is_sampled = np.stack([row.turn_ids for row in rows])[:, 1:] > 0
    behaviour = np.stack([row.logprobs for row in rows])[:, 1:]
    lag = 2 - np.stack([row.versions for row in rows])[:, 1:]
    assert {*lag[is_sampled]} == {1, 2}
    model = run.learner.model
    score = jax.jit(lambda params: next_logprobs(row_logits(model, params, tokens), tokens))
    # Recomputed, or interpolated, with the parameters of both epochs: only one of them is right.
    gaps = [np.asarray(score(each)) - behaviour for each in params[2:]]
    gaps += [gap * (1 - 1 / lag) for gap in gaps]
    means = [np.minimum(np.exp(gap[is_sampled]), 2.0).mean() for gap in gaps]
    assert min(np.diff(sorted(means))) > 3e-5
    expected = means[:1] * 2 if proximal == "recompute" else means[2:]
    found = [metrics["importance_mean"] for metrics in record.updates]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_rounds_are_played_while_the_reference_scores_and_the_update_is_made(monkeypatch):
    """Nothing waits between the begin of the scoring and the first of them."""
    calls = []

    def noted(owner, name):
        method = getattr(owner, name)
        watched = lambda *given, **named: calls.append(name) or method(*given, **named)  # noqa: E731
        monkeypatch.setattr(owner, name, watched)

    for owner, name in [
        (Learner, "score"),
        (Learner, "update"),
        (OpenGroups, "play_round"),
        (Cluster, "wait"),
    ]:
        noted(owner, name)
    given = given_of(staleness=1) | {"algorithm_args": {"kl_coefficient": 0.5}}
    run = build_run(make_config(given))
    assert "reference" in run.learner.scored
    placement, position = begin(run)
    _, record = rl_step(run, placement, position, AsyncPlayer(run, placement))
    beside = calls[calls.index("score") :]
    assert beside[:3] == ["score", "update", "play_round"] and beside[-1] == "wait"
    assert record.metrics()["reference_kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow_except("True-recompute")
@pytest.mark.parametrize(("apart", "kv"), [(True, "recompute"), (False, "keep"), (True, "finish")])
def test_a_run_keeps_the_bound_and_its_replay_is_the_same_bit_for_bit(tmp_path, apart, kv):
    first = tmp_path / "run"
    config = config_of(apart=apart, kv=kv, checksums=True)
    train(config, first)
    lines = steps_of(first)
    check_lags(first, 2)
    assert max(line["version_lag_max"] for line in lines) > 0
    assert episodes_of(first) == dict.fromkeys(range(STEPS * EPISODES), 1)
    # KV that is computed anew leaves rounding; what older weights wrote is another distribution.
    gap = max(line["kept_kv_gap_max"] for line in lines)
    assert gap > 1e-4 if kv == "keep" else gap < 1e-5
    policies = [len(set(versions) - {None}) for versions in versions_of(first)]
    assert max(policies) == 1 if kv == "finish" else max(policies) > 1
    # Nothing that was trained on went through the host.
    assert {line["dispatch_host_bytes"] for line in lines} == {0}
    assert {line["publish_host_bytes"] for line in lines} == {0}
    assert check_replay(first, STEPS) == config
    events = read_events(first)
    check_events(events)
    check_versions(events, first)
    # The weights were other ones in each step, and in the replay those of then.
    sums = {event["version"]: event["sum"] for event in events if event["event"] == "checksum"}
    assert list(sums) == list(range(STEPS)) and len(set(sums.values())) == STEPS
    if apart:
        assert any(rounds_beside_updates(events))
        assert any(line["stage_s"].get("overlap") for line in lines)


def check_versions(events, workdir) -> None:
    """The versions of what begins and of what a step takes are those of tokens and steps."""
    assert {"submit", "answers", "take"} <= {e["event"] for e in events if e["version"] > 0}
    begun = {g: e["version"] for e in events if e["event"] == "submit" for g in e["groups"]}
    taken = {e["version"]: e["groups"] for e in events if e["event"] == "take"}
    for step, groups in taken.items():
        played = read_trajectories(workdir / "trajectories" / f"step_{step + 1:06d}.jsonl")
        assert {each["episode"] // 2 for each in played} == set(groups)
        for each in played:
            oldest = min(version for version in each["versions"] if version is not None)
            assert begun[each["episode"] // 2] <= oldest <= step


def versions_of(workdir) -> list[list[int | None]]:
    """The versions of each episode's tokens."""
    files = (workdir / "trajectories").glob("*")
    return [each["versions"] for file in files for each in read_trajectories(file)]


OF_TWO_STEPS = {**given_of(staleness=1), "num_steps": 2}


def opened(version: int, config) -> dict:
    settings = json.loads(json.dumps(replayed_settings(config)))
    return {"event": "open", "version": version, "settings": settings}


def test_a_replay_has_a_part_for_each_change_of_the_settings():
    first, other = make_config(OF_TWO_STEPS), {"train": {"remat": "full"}}
    kept = {"asynchrony": OF_TWO_STEPS["asynchrony"] | {"kv": "keep"}}
    last = make_config(OF_TWO_STEPS | kept | other | {"num_steps": 3, "eval": {"games": 7}})
    own, more = [opened(0, first), {"event": "trained"}, opened(1, first)], [opened(2, last)]
    # What says nothing about what is played is that of its end.
    begun = dataclasses.replace(first, eval=last.eval)
    assert replayed_parts(own + more, last) == [(begun, own), (last, more)]
    for events in ([{"event": "open", "version": 1}], [{**own[0], "settings": {"num_steps": 2}}]):
        with pytest.raises(InputError, match="events of a version that wrote other settings"):
            replayed_parts(events, first)


@pytest.mark.slow
def test_a_run_that_went_on_with_other_settings_is_replayed(tmp_path, capsys):
    """More steps, over which the learning rate falls; and then, in a rollout, another treatment."""
    first = tmp_path / "run"
    falls = {"train": {"schedule": "linear"}}
    given = given_of(staleness=1) | falls
    train(make_config(given | {"num_steps": 2}), first)
    stop = stop_in_rollout(first, 3)
    assert train(make_config(given | {"num_steps": 5}), first, stop).stopped
    more = {"asynchrony": {"max_staleness": 2, "kv": "keep", "rule": "drop"}, "num_steps": 6}
    train(make_config(given | more), first)
    versions = [e["version"] for e in read_events(first) if e["event"] == "open"]
    assert versions == [0, 2, 3]
    capsys.readouterr()
    check_replay(first, 6)
    assert capsys.readouterr().out.count("went on with other settings here") == 2
    rates = [
        [line["learning_rate"] for line in steps_of(run)] for run in (first, tmp_path / "again")
    ]
    assert rates[0] == rates[1] and rates[0][1] < rates[0][2], "it fell to 0 over two steps first"


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run whose rollout runs out of memory in its twelfth round, by XLA's own error."""
    folder, play, rounds = tmp_path_factory.mktemp("short") / "run", Rounds.play, itertools.count()

    def short_once(own, session):
        if next(rounds) == 11:
            jax.block_until_ready(hungry(donated=0)(jnp.ones(4)))
        return play(own, session)

    with pytest.MonkeyPatch.context() as patch:
        # What ran out of memory is remembered there.
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        patch.setattr(Rounds, "play", short_once)
        train(make_config(OF_TWO_STEPS), folder)
    return folder


@pytest.mark.slow
def test_a_run_whose_rollout_ran_out_of_memory_is_replayed_bit_for_bit(short):
    """The replay has the memory, and plays again too."""
    assert [e["version"] for e in read_events(short) if e["event"] == "open"] == [0, 0]
    assert episodes_of(short) == dict.fromkeys(range(2 * EPISODES), 1)
    check_replay(short, 2)


@pytest.mark.slow
def test_open_episodes_make_way_for_an_evaluation_that_does_not_fit_beside_them(
    tmp_path, monkeypatch
):
    """They are played again behind it; the replay, which has the memory, plays them again too."""
    # What ran out of memory is remembered there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = tmp_path / "run"
    opened, evaluated, beside = moves.open_session, evaluation.evaluate, []

    def evaluate(*given, beside_live=False, **more):
        beside.append(beside_live)
        try:
            return evaluated(*given, beside_live=beside_live, **more)
        finally:
            beside.append(False)

    def short_beside_episodes(placement, params, version):
        if beside[-1]:
            jax.block_until_ready(hungry(donated=0)(jnp.ones(4)))
        return opened(placement, params, version)

    config = make_config(
        {
            **given_of(staleness=1),
            "num_steps": 2,
            "eval": {"every_steps": 1, "games": 8, "final_games": 8},
        }
    )
    with monkeypatch.context() as short:
        short.setattr(evaluation, "evaluate", evaluate)
        for module in (rollouts, live_service):
            short.setattr(module, "open_session", short_beside_episodes)
        train(config, first)
    # Before step 1 no episode is open; behind each step it is tried beside them, and then alone.
    assert beside[::2] == [False, True, False, True, False]
    assert [e["version"] for e in read_events(first) if e["event"] == "open"] == [0, 1]
    assert episodes_of(first) == dict.fromkeys(range(2 * EPISODES), 1)
    check_bound(steps_of(first), 1)
    assert [line["step"] for line in read_metrics(first / "metrics.jsonl") if "eval" in line] == [
        0,
        1,
        2,
    ]
    check_replay(first, 2)


@pytest.mark.slow
def test_environments_that_hang_and_raise_hold_no_run_and_its_replay_fails_alike(tmp_path):
    """Their episodes end with a reason, count nowhere, and are each of another task."""
    first = tmp_path / "run"
    env = {"name": "tests.support.environments:Troubled", "timeout_s": 1.0}
    config = make_config({**given_of(staleness=2), "env": env})
    with Troubled.hanging():
        train(config, first)
        check_replay(first, STEPS)
    lines, reasons, lost_tokens = steps_of(first), collections.Counter(), 0
    check_bound(lines, 2)
    assert episodes_of(first) == dict.fromkeys(range(STEPS * EPISODES), 1)
    for step, line in enumerate(lines, 1):
        played = read_trajectories(first / "trajectories" / f"step_{step:06d}.jsonl")
        num_failed, tokens = 0, collections.Counter()
        for each in played:
            is_failed = each["stop_reason"] in FAILURES
            tokens[is_failed] += sum(version is not None for version in each["versions"])
            num_failed += is_failed
            reasons[each["stop_reason"]] += 1
        assert line["policy_tokens"] == sum(line["staleness_tokens"]) == tokens[False]
        assert line["failed_share"] == num_failed / EPISODES
        lost_tokens += tokens[True]
    # A reply that is too long ends an episode before its environment can hang.
    assert 0 < reasons[ENVIRONMENT_TIMEOUT] <= 8 and 0 < reasons[ENVIRONMENT_ERROR] < 16
    assert lost_tokens > 0, "they had sampled some"


DROPPING = given_of(apart=False, staleness=1, rule="drop", reuse=2)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A run of two steps with "drop", whose next group does not follow from the step's number."""
    folder = tmp_path_factory.mktemp("dropping") / "run"
    train(make_config(DROPPING | {"num_steps": 2}), folder)
    return folder


@pytest.mark.slow
def test_a_synchronous_step_that_was_not_saved_leaves_what_was_open(dropping, tmp_path):
    run = shutil.copytree(dropping, tmp_path / "run")
    before = (run / EVENTS).read_text()
    synchronous = make_config(DROPPING | {"num_steps": 4, "asynchrony": {}})
    assert train(synchronous, run, stop_in_rollout(run, 2)).stopped
    assert len(steps_of(run)) == 2 and (run / EVENTS).read_text() == before
    train(make_config(DROPPING | {"num_steps": 4}), run)
    assert (run / EVENTS).read_text().startswith(before) and not (run / "until_2").exists()
    assert len(steps_of(run)) == 4 and max(episodes_of(run).values()) <= 2


@pytest.mark.slow
def test_events_that_are_damaged_or_gone_end_a_run_in_words(dropping, tmp_path):
    run = shutil.copytree(dropping, tmp_path / "run")
    lines = (run / EVENTS).read_bytes().splitlines(keepends=True)
    for damage, words in [
        ([*lines[:2], lines[2][:9] + b"\n", *lines[3:]], "events.jsonl is damaged in line 3"),
        ([*lines[:2], b"17\n", *lines[3:]], "line 3: 17 is no event"),
        ([*lines[:2], b"\xff\n", *lines[3:]], "events.jsonl is damaged in line 3"),
        (lines[: len(lines) // 2], "has no events of step 2, behind which groups .* were open"),
        ([], "has no events of step 2"),
    ]:
        (run / EVENTS).write_bytes(b"".join(damage))
        with pytest.raises(InputError, match=words):
            train(make_config(DROPPING | {"num_steps": 3}), run)
    (run / EVENTS).write_bytes(b"".join(lines))
    train(make_config(DROPPING | {"num_steps": 3}), run)
    assert len(steps_of(run)) == 3


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_within_the_bound_and_is_replayed(tmp_path):
    """Up to where it was stopped; whole runs that went on are replayed where they were killed."""
    first, half = tmp_path / "run", tmp_path / "half"
    config = config_of(staleness=1)
    end = train(config, first, stop_in_rollout(first, 2))
    assert "SIGTERM" in end.stopped
    # A replay ends where the last step did.
    end = train(config, half, replay=first)
    assert end.is_replayed and "the end of the events" in end.stopped
    assert_equal(final_parameters(first, 2), final_parameters(half, 2))
    train(config, first)
    check_bound(steps_of(first), 1)
    assert episodes_of(first) == dict.fromkeys(range(STEPS * EPISODES), 1)
    opened = [event["version"] for event in read_events(first) if event["event"] == "open"]
    assert opened == [0, 2]


def episodes_by_step(workdir) -> dict[str, list[int]]:
    """The episodes of each step, sorted."""
    files = (workdir / "trajectories").glob("*")
    return {file.name: sorted(t["episode"] for t in read_trajectories(file)) for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["recompute", "finish"])
def test_killed_at_any_moment_it_uses_each_task_as_often_and_can_be_replayed(tmp_path, capsys, kv):
    """SIGKILL in a process of its own, at a random moment behind its third step.

    And behind its first checkpoint, which a busy disk may finish later than that.
    """
    first, steps = tmp_path / "run", 10
    given = small({**given_of(kv=kv), "num_steps": steps})
    saved, metrics = first / "checkpoints" / "2", first / "metrics.jsonl"

    def is_behind_its_third_step() -> bool:
        if not (saved.exists() and '{"step": 3, "time_s"' in metrics.read_text()):
            return False
        time.sleep(random.uniform(0.0, 0.2))
        return True

    kill(tmp_path, first, given, is_behind_its_third_step)
    before = read_events(first) if (first / EVENTS).read_text().endswith("\n") else None
    train(config_file.make_config(given), first)
    said = capsys.readouterr().out
    assert "resuming" in said
    assert ("open episodes go on behind the" in said) == (kv != "finish")
    # Each task in the step in which a run left alone trains on it, and within the bound.
    assert episodes_by_step(first) == {
        f"step_{step + 1:06d}.jsonl": list(range(step * EPISODES, (step + 1) * EPISODES))
        for step in range(steps)
    }
    check_lags(first, 2)
    events = read_events(first)
    check_events(events)
    # What was before the checkpoint is as it was; what was behind it has come in another way.
    opened = [event["version"] for event in events if event["event"] == "open"]
    assert len(opened) == 2 and opened[1] in range(2, steps, 2)
    if kv == "finish":
        # What was open is played again: no episode is of two policies.
        assert max(len(set(versions) - {None}) for versions in versions_of(first)) == 1
    else:
        # What was sampled before the checkpoint is trained on behind it.
        assert max(lags_of(first, opened[1] + 1)) > 0
    end = events.index({**events[0], "version": opened[1]}, 1)
    assert before is None or events[:end] == before[:end]
    check_replay(first, steps)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["wait", "drop"])
def test_rules_without_stale_tokens(tmp_path, rule, capsys):
    train(config_of(rule=rule, staleness=1), tmp_path / "run")
    lines, counts = steps_of(tmp_path / "run"), episodes_of(tmp_path / "run")
    assert set(counts.values()) == {1}
    assert sum(counts.values()) == STEPS * EPISODES
    check_bound(lines, 1)
    assert ("* dropped " in capsys.readouterr().out) == (rule == "drop")
    if rule == "wait":
        assert sorted(counts) == list(range(STEPS * EPISODES))
        assert not any("stale_tokens" in line for line in lines)


@pytest.mark.slow
def test_groups_are_trained_on_again_within_the_bound_and_the_run_can_be_replayed(tmp_path):
    """Devices are shared, so that no group of a later step is finished when its step begins."""
    run = tmp_path / "run"
    train(config_of(apart=False, rule="drop", staleness=2, reuse=2), run)
    lines, counts = steps_of(run), episodes_of(run)
    check_bound(lines, 2)
    size, seen = EPISODES // 2, set()
    for step, line in enumerate(lines, 1):
        played = read_trajectories(run / "trajectories" / f"step_{step:06d}.jsonl")
        groups = {each["episode"] // 2 for each in played}
        assert len(played) == EPISODES and len(groups) == size
        assert line.get("reused_groups", 0) == len(groups & seen) <= size // 2
        assert line["dispatch_host_bytes"] == 0
        seen |= groups
    assert any(line.get("reused_groups") for line in lines)
    assert set(counts.values()) <= {1, 2}
    # An episode that is trained on again has the tokens, versions and log-probs of the first time.
    episodes = collections.defaultdict(list)
    for step in range(1, STEPS + 1):
        for each in read_trajectories(run / "trajectories" / f"step_{step:06d}.jsonl"):
            episodes[each["episode"]].append((each["token_ids"], each["versions"]))
    assert all(len(set(map(str, each))) == 1 for each in episodes.values())
    check_replay(run, STEPS)


@pytest.mark.slow
def test_groups_of_equal_rewards_are_replaced_by_groups_of_later_tasks(tmp_path):
    """Half of them have equal rewards for sure; tokens are all of the step's own policy."""
    run = tmp_path / "run"
    given = given_of(
        apart=False,
        staleness=0,
        rule="drop",
        refill=4,
        env="tests.support.environments:EvenIsSolved",
    )
    train(make_config({**given, "algorithm": "dapo"}), run)
    lines, numbers = steps_of(run), []
    for step, line in enumerate(lines, 1):
        assert line["version_lag_max"] == 0 and line["episodes"] == EPISODES
        played = read_trajectories(run / "trajectories" / f"step_{step:06d}.jsonl")
        rewards = collections.defaultdict(set)
        for each in played:
            rewards[each["episode"] // 2].add(each["reward"])
        assert len(rewards) == EPISODES // 2
        groups = EPISODES // 2 + line["refilled_groups"]
        assert line["refilled_groups"] < 4 * EPISODES // 2, "the bound is not reached"
        assert all(len(values) == 2 for values in rewards.values())
        assert line["dropped_groups"] == pytest.approx(line["refilled_groups"] / groups)
        numbers += rewards
    assert len(set(numbers)) == len(numbers) == STEPS * EPISODES // 2
    check_replay(run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["admission", "mask"])
def test_a_group_beyond_the_bound_is_trained_on_or_masked(tmp_path, rule, capsys):
    """The first group plays through all three updates, and only the last step can take it."""
    run, env = tmp_path / "run", "tests.support.environments:FirstIsLong"
    train(config_of(apart=False, rule=rule, staleness=1, env=env), run)
    assert episodes_of(run) == dict.fromkeys(range(STEPS * EPISODES), 1)
    *others, last = steps_of(run)
    lags = lags_of(run, STEPS)
    assert max(lags) == 3
    kept = sum(number for lag, number in lags.items() if lag <= 1)
    assert last["policy_tokens"] == (kept if rule == "mask" else sum(lags.values()))
    words = f"* trained on {sum(lags.values()) - kept:,} of "
    assert (words in capsys.readouterr().out) == (rule == "admission")
    assert last["overdue_tokens"] == sum(lags.values()) - kept
    assert last["version_lag_max"] == (1 if rule == "mask" else 3)
    for step, line in enumerate(others, 1):
        lags = lags_of(run, step)
        assert max(lags) <= 1 and line["policy_tokens"] == sum(lags.values())
        assert "overdue_tokens" not in line


def test_tokens_of_old_versions_are_masked():
    """Two rows: version 3 is too old for a step of version 5 with a bound of 1."""
    turn_ids = np.array([[0, 1, 1, 1], [0, 1, 0, 2]], np.int32)
    versions = np.array([[0, 3, 3, 4], [0, 2, 0, 5]], np.int32)
    logprobs = np.full((2, 4), -1.0, np.float32)
    rows = Experience(tokens=turn_ids + 7, turn_ids=turn_ids, logprobs=logprobs, versions=versions)
    kept = since_version(rows, 5 - 1)
    np.testing.assert_array_equal(kept.turn_ids, [[0, 0, 0, 1], [0, 0, 0, 2]])
    assert_equal([kept.tokens, kept.versions], [turn_ids + 7, versions])


@pytest.mark.slow
def test_weights_that_are_overwritten_while_they_are_played_are_noticed():
    run = build_run(config_of(apart=False, staleness=1, checksums=True))
    placement, position = begin(run)
    player = AsyncPlayer(run, placement)
    position, _ = rl_step(run, placement, position, player)
    player.step_ended(position.step)
    position, _ = rl_step(run, placement, position, player)
    session = player._live.service.session
    broken = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(1), session.policy.params)
    policy = dataclasses.replace(session.policy, params=broken)
    player._live.service.session = dataclasses.replace(session, policy=policy)
    with pytest.raises(RunError, match="the weights that step 2 played with have checksum"):
        player.step_ended(position.step)


@pytest.mark.slow
def test_a_weight_that_was_not_published_is_noticed(monkeypatch):
    """The second policy arrives with one leaf of the first; the engine's sum alone is no sign."""
    run = build_run(config_of(staleness=1, checksums=True))
    placement, position = begin(run)
    player, kept, publish = AsyncPlayer(run, placement), [], moves.publish_policy

    def leaves_one_out(*given):
        policy, num_bytes = publish(*given)
        first, *others = jax.tree.leaves(policy.params)
        kept.append(jax.numpy.copy(first))
        tree = jax.tree.structure(policy.params)
        return dataclasses.replace(policy, params=tree.unflatten([kept[0], *others])), num_bytes

    for module in (moves, live_service):
        monkeypatch.setattr(module, "publish_policy", leaves_one_out)
    position, _ = rl_step(run, placement, position, player)
    player.step_ended(position.step)
    with pytest.raises(RunError, match="the weights of version 1 .* were not published whole"):
        rl_step(run, placement, position, player)
    assert (kept[0] != kept[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.compute_dtype=bfloat16"],
        ["rollout.weight_dtype=int8", "train.lora.rank=2", "train.lora.targets=('query', 'up')"],
    ],
)
def test_weights_that_are_cast_quantised_or_merged_have_the_checksum_of_the_trainers(overrides):
    """On the same devices, where the engine's are made by another program than the checksum."""
    run = build_run(make_config(given_of(apart=False, staleness=1, checksums=True), overrides))
    placement, position = begin(run)
    player, sums = AsyncPlayer(run, placement), []
    for _ in range(2):
        position, _ = rl_step(run, placement, position, player)
        player.step_ended(position.step)
        sums.append(player._live._checksum)
        assert sums[-1] == int(player._live._trained_checksum)
    assert sums[0] != sums[1]


@pytest.mark.slow
def test_a_replay_that_does_something_else_says_so(short, tmp_path):
    config, first = make_config(OF_TWO_STEPS), shutil.copytree(short, tmp_path / "run")
    events = [json.loads(line) for line in (first / EVENTS).read_text().splitlines()]
    place = next(i for i, event in enumerate(events) if event["event"] == "take")
    events[place]["groups"][0] += 1
    (first / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(RunError, match=rf"event {place + 1} of the run that is replayed is "):
        train(config, tmp_path / "again", replay=first)
    with pytest.raises(InputError, match="events.jsonl cannot be read"):
        train(config, tmp_path / "other", replay=tmp_path)


def test_settings_without_effect_are_refused():
    with pytest.raises(InputError, match="asynchrony.kv = 'keep' has no effect"):
        config_of(staleness=0, kv="keep")
    with pytest.raises(InputError, match="refill = 1 has no effect.*'grpo' keeps every group"):
        config_of(staleness=0, rule="drop", refill=1)
    with pytest.raises(InputError, match="asynchrony.rule = 'drop' has no effect"):
        config_of(staleness=0, rule="drop")


def test_a_replay_does_not_wait_for_an_answer_that_nobody_was_asked_for():
    pool = EnvironmentPool(1, 5.0)
    due = {"event": "answers", "version": 0, "call": 1, "tickets": [7, 8], "failed": {}}
    calls = Events(replayed=[due]).record_calls(pool.calls())
    calls.submit({7: lambda: "answered"})
    with pytest.raises(RunError, match="the answer to ticket 8 came in look 1"):
        calls.take()


def test_a_replay_waits_for_no_call_that_failed_in_the_run():
    """It is given up at once, and what becomes of it here is of no account."""
    pool, failed = EnvironmentPool(1, 0.2), [ENVIRONMENT_TIMEOUT, "no answer"]
    due = {"event": "answers", "version": 0, "call": 1, "tickets": [7], "failed": {"7": failed}}
    calls = Events(replayed=[due]).record_calls(pool.calls())
    calls.submit({7: lambda: time.sleep(0.5)})
    (found,) = calls.take().values()
    assert [found.stop_reason, found.detail] == failed
    assert calls.take(at_least_one=True) == {}
