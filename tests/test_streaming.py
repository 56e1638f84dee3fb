# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming: groups go to the trainer as they are finished, and the update is that of all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax import loop_async
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.placement.parts import Part
from earl_jax.placement.updates import StepUpdate
from earl_jax.rollout.event_files import read_events
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.staleness import Group, choose_part
from earl_jax.run.build import build_run
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import MeshShape
from earl_jax.train.learner import Learner
from earl_jax.train.step import batch_shapes, read_metrics
from earl_jax.training import train
from tests.support.placements import begin, hungry
from tests.support.runs import check_replay, steps_of, taken_by_step
from tests.support.settings import make_config
from tests.support.wanderers import WANDERERS

LENGTH = 256
SETTINGS = {
    **WANDERERS,
    "num_steps": 2,
    "devices": {**WANDERERS["devices"], "num_rollout": 4},
    "selector": {**WANDERERS["selector"], "train_meshes": ("fsdp=4", "data=2,fsdp=2")},
}
CONTROLS = np.array([1e-3, 0.01], np.float32)
F4 = MeshShape(fsdp=4)


def config_of(parts: int, staleness: int = 0, **changes):
    given = {**SETTINGS, "asynchrony": {"max_staleness": staleness, "parts": parts}}
    return make_config({**given, **changes})


def rows(learner, mesh, number, seed=0):
    """A batch of random tokens, of which the policy sampled about a half."""
    rng, shape = np.random.default_rng(seed), (number, LENGTH)
    shapes = batch_shapes(*shape, learner.layout(mesh))
    values = {
        "tokens": rng.integers(0, learner.vocab_size, shape),
        "segment_ids": np.ones(shape),
        "turn_ids": rng.integers(0, 2, shape),
        "logprobs": -rng.random(shape),
        "versions": np.zeros(shape),
        "advantages": rng.normal(size=shape),
    }
    typed = {k: v.astype(getattr(shapes, k).dtype) for k, v in values.items()}
    return jax.device_put(
        dataclasses.replace(shapes, **typed), learner.layout(mesh).activations("NS")
    )


def part_of(batch) -> Part:
    return Part(batch=batch, length=LENGTH, num_tokens=batch.tokens.size)


def first_rows(batch, learner, mesh, start, end):
    layout = learner.layout(mesh).activations("NS")
    return jax.tree.map(lambda field: jax.device_put(np.asarray(field)[start:end], layout), batch)


@pytest.fixture(scope="module")
def world():
    return build_run(config_of(2))


def test_a_step_takes_its_own_groups_in_the_order_in_which_they_finished():
    groups = [Group(4, 0, 2), Group(5, 0, 0), Group(6, 0), Group(7, 0, 1)]
    assert choose_part(groups, 3, 2) == [Group(4, 0, 2), Group(5, 0, 0)]
    assert choose_part(groups, 4, 2) == [Group(5, 0, 0), Group(7, 0, 1)]
    assert choose_part(groups, 3, 3) is None
    assert choose_part(groups[:2], 2, 1) == [Group(5, 0, 0)]


@pytest.mark.slow
def test_a_run_in_parts_learns_what_the_synchronous_run_learns(monkeypatch):
    """The same episodes to the token, nothing through the host, and gradients while it plays.

    With a penalty for the distance from a reference, of which the policy is not a copy any more.
    """
    results, calls = [], []
    add_part, play_round = Learner.add_part, OpenGroups.play_round

    def noted(name, method):
        return lambda *args: calls.append(name) or method(*args)

    monkeypatch.setattr(Learner, "add_part", noted("gradients", add_part))
    monkeypatch.setattr(OpenGroups, "play_round", noted("round", play_round))
    for number in (1, 2):
        run = build_run(config_of(number, algorithm_args={"kl_coefficient": 0.5}))
        placement, position = begin(run)
        other = jax.tree.map(lambda leaf: 1.25 * leaf, position.state.reference)
        state = dataclasses.replace(position.state, reference=other)
        position = dataclasses.replace(position, state=state)
        player = AsyncPlayer(run, placement) if run.config.asynchrony.is_on else None
        position, record = rl_step(run, placement, position, player)
        results.append((record, jax.device_get(position.state.params)))
    (whole, expected), (parts, params) = results
    tokens = [[turn.token_ids for turn in t.turns] for t in whole.trajectories]
    assert [[turn.token_ids for turn in t.turns] for t in parts.trajectories] == tokens
    ours, theirs = parts.metrics(), whole.metrics()
    assert ours["dispatch_host_bytes"] == ours["publish_host_bytes"] == 0
    assert ours["dispatch_bytes"] > 0 and ours["train_tokens_per_s"] is None
    assert theirs["reference_kl"] > 0.01
    for name in ("loss", "grad_norm", "entropy", "policy_tokens", "reference_kl"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5), params, expected
    )
    assert calls.count("gradients") == 2
    assert "round" in calls[calls.index("gradients") :]


@pytest.mark.slow
def test_a_part_whose_episodes_all_fail_adds_nothing(monkeypatch):
    """Half of the groups fail at their start, and are the first part; the update is the same."""
    results, sent = [], []
    send = loop_async.send_parts
    monkeypatch.setattr(
        loop_async, "send_parts", lambda *args, **kw: sent.append(args) or send(*args, **kw)
    )
    for number in (1, 2):
        run = build_run(config_of(number))
        failed = [task.args for task in run.tasks.training(0)[:8]]

        def make(make=run.actor.make, failed=failed, **args):
            if args in failed:
                raise OSError("the sandbox is down")
            return make(**args)

        run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, make=make))
        placement, position = begin(run)
        player = AsyncPlayer(run, placement) if run.config.asynchrony.is_on else None
        position, record = rl_step(run, placement, position, player)
        assert record.metrics()["failed_share"] == 0.5
        results.append((record.metrics(), jax.device_get(position.state.params)))
    assert len(sent) == 2, "both parts were sent"
    (theirs, expected), (ours, params) = results
    assert ours["policy_tokens"] == theirs["policy_tokens"] > 0
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5), params, expected
    )


def test_parts_that_run_out_of_memory_are_added_up_again_on_another_mesh(world, monkeypatch):
    """Parts of unequal sizes make the update of the whole batch: state and metrics."""
    placement, position = begin(world)
    before = jax.device_get(position.state)
    assert placement.train.mesh == F4
    part_steps = Learner.part_steps

    def runs_out(state, part, controls, totals):
        return hungry(donated=0)(jnp.ones(4), controls)

    def steps(plan):
        found = part_steps(world.learner, plan)
        return found._replace(accumulate=runs_out) if plan.mesh == F4 else found

    monkeypatch.setattr(world.learner, "part_steps", steps)
    whole = rows(world.learner, F4, 16, seed=1)
    update = StepUpdate(placement=placement, controls=CONTROLS)
    for start, end in ((0, 4), (4, 16)):
        update.add(position.state, part_of(first_rows(whole, world.learner, F4, start, end)))
    after, (metrics,) = update.finish(position.state)
    assert placement.train.mesh == MeshShape(data=2, fsdp=2)
    assert placement.take_log().failures
    monkeypatch.undo()
    plan = TrainPlan(F4, 1, "none")
    state = jax.device_put(before, world.learner.state_shardings(F4))
    expected, of_whole = world.learner.update(plan, state, whole, CONTROLS)
    assert int(after.updates) == 1
    for name, value in read_metrics(of_whole).items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        # Adam divides small gradients by their own size, and so enlarges their rounding.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_part_whose_rows_find_no_memory_on_their_way_is_taken_again(monkeypatch):
    """The second of two; the update is that of both."""
    run, send, sent = build_run(config_of(2)), loop_async.send_parts, []
    placement, position = begin(run)

    def short_once(*given, **settings):
        sent.append(given)
        if len(sent) == 2:
            jax.block_until_ready(hungry(donated=0)(jnp.ones(4)))
        return send(*given, **settings)

    monkeypatch.setattr(loop_async, "send_parts", short_once)
    position, record = rl_step(run, placement, position, AsyncPlayer(run, placement))
    assert len(sent) == 3
    assert [each.episode for each in record.outcomes] == list(range(16))
    sampled = sum(outcome.num_policy_tokens for outcome in record.outcomes)
    assert record.metrics()["policy_tokens"] == sampled


@pytest.mark.slow
def test_a_stream_with_staleness_keeps_the_bound_and_is_replayed_bit_for_bit(tmp_path):
    first = tmp_path / "run"
    train(config_of(4, staleness=1, num_steps=4), first)
    events = read_events(first)
    steps = taken_by_step(events)
    # A step is taken as a whole where all of its groups were finished before it.
    assert all([len(groups) for groups in taken] in ([2] * 4, [8]) for taken in steps)
    assert [len(groups) for groups in steps[0]] == [2] * 4
    assert [sorted(sum(taken, [])) for taken in steps] == [
        list(range(i, i + 8)) for i in range(0, 32, 8)
    ]
    speeds = [line.get("train_tokens_per_s") for line in steps_of(first)]
    assert [speed is None for speed in speeds] == [len(taken) == 4 for taken in steps]
    check_replay(first, 4)
