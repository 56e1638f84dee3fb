# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves in the middle of a run and of a rollout: what is learnt and what is said stay the same.

The policy may say legal moves only, so that games are whole from the first step on.
"""

import dataclasses

import jax
import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.loop import rl_step
from earl_jax.placement.moves import grow_session, open_session
from earl_jax.placement.rollouts import play
from earl_jax.rollout.config import Limits
from earl_jax.rollout.share import Share
from earl_jax.rollout.tasks import Tasks
from earl_jax.run.build import build_run
from tests.support.episodes import assert_same_episodes
from tests.support.placements import (
    D4T2,
    D8,
    F8,
    TINY,
    first_position,
    given,
    place,
    table_of,
    too_large_for,
)
from tests.support.settings import make_config

# A whole game is up to 40 tokens.
SMALL, MIDDLE, LARGE = BUCKETS = (24, 32, 48)
# Episodes of so many tokens in each step.
LONGEST = (SMALL, SMALL, MIDDLE, LARGE)
ROLLOUT = {
    "num_slots": 8,
    "episodes_per_step": 16,
    "burst": 2,
    "max_turn_tokens": 4,
    "context_buckets": BUCKETS,
    # Rounds wait for every answer.
    "patience_s": 60.0,
}
SETTINGS = given(ROLLOUT, (D8, D4T2), (D8, F8)) | {
    "num_steps": len(LONGEST),
    "env": {"args": {"mask_illegal": True}},
    "model": TINY | {"width": 32, "ffn_size": 64},
    "train": {"ratio": "model", "learning_rate": 4e-3, "epochs": 2, "sft_steps": 0},
}


@pytest.fixture(scope="module")
def world():
    return build_run(make_config(SETTINGS))


def table(world):
    """Returns a table in which data=8 is the fastest mesh of both stages, of those that fit."""
    return table_of(world.problem, {D8: 4000.0, F8: 1000.0}, {D8: 4000.0, D4T2: 1000.0}, BUCKETS)


# Training.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The trainer's plan and state after a step."""

    record: object
    plan: object
    state: object

    @property
    def numbers(self):
        """Loss and norm of the gradients of each update."""
        return np.array([(update["loss"], update["grad_norm"]) for update in self.record.updates])


class LimitedTasks(Tasks):
    """Episodes end at the step's number of tokens."""

    def training(self, step):
        limits = Limits(max_turn_tokens=4, max_episode_tokens=LONGEST[step])
        return [dataclasses.replace(task, limits=limits) for task in super().training(step)]


def learn(run, placement):
    """All steps with the same tasks."""
    run = dataclasses.replace(run, tasks=LimitedTasks(**vars(run.tasks)))
    placement.choose_step(SMALL, None)
    position, steps = first_position(run, placement), []
    while position.step < len(LONGEST):
        position, record = rl_step(run, placement, position)
        state = jax.tree.map(np.array, position.state)
        steps.append(Step(record=record, plan=placement.train, state=state))
    return steps


def difference(ours, theirs, least=0.0):
    """The largest, as a part of the largest number, or of `least` where that is more."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / max(least, np.abs(theirs).max()))


@pytest.mark.slow
def test_trainer_that_changes_mesh_and_micro_batches_learns_as_one_that_stays(world):
    """The budget holds data=8 for short games, fsdp=8 for longer ones, whole ones in two parts.

    What differs is the order of sums. A number of fp32 is exact to 6e-8; a part of a batch that is
    forgotten or counted twice is off by more than a hundredth.
    """
    only = {"rollout_meshes_named": (str(D8),)}
    tight = too_large_for(
        table(world), world.problem, train=((D8, MIDDLE), (D8, LARGE)), in_one_part=((F8, LARGE),)
    )
    stays = learn(world, place(world, table(world), **only))
    moves = learn(world, place(world, tight, budget_bytes=10**9, **only))

    plans = [step.plan for step in moves]
    first = next(number for number, plan in enumerate(plans) if plan != plans[0])
    assert {step.plan for step in stays} == {plans[0]} and plans[0].mesh == D8
    assert 2 <= first < len(plans) - 1, "steps on both sides of a switch"
    assert {plan.mesh for plan in plans} == {D8, F8} and plans[-1].micro_batches == 2
    # The same rollouts, in the same place.
    for one, other in zip(stays, moves, strict=True):
        assert {one.record.rollout_mesh, other.record.rollout_mesh} == {str(D8)}
        for ours, theirs in zip(one.record.trajectories, other.record.trajectories, strict=True):
            assert [t.token_ids for t in ours.turns] == [t.token_ids for t in theirs.turns]
            assert ours.reward == theirs.reward
    assert len({outcome.reward for outcome in moves[-1].record.outcomes}) > 1

    # To the last bit before the switch, and by rounding behind it.
    for one, other in zip(stays[:first], moves[:first], strict=True):
        np.testing.assert_array_equal(one.numbers, other.numbers)
        jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    pairs = list(zip(stays[first:], moves[first:], strict=True))
    # A loss is a mean of terms as large as an advantage, 1, and may itself be about 0.
    curves = max(difference(other.numbers, one.numbers, least=1.0) for one, other in pairs)
    ends = moves[-1].state.params, stays[-1].state.params
    weights = max(map(difference, *map(jax.tree.leaves, ends)))
    print(f"largest difference: loss and norms {curves:.1e}, parameters {weights:.1e}")
    assert 0 < curves < 1e-6
    assert 0 < weights < 1e-6


# Rollouts.


@pytest.mark.slow
def test_rollout_that_outgrows_the_budget_goes_on_elsewhere_with_the_same_episodes(
    world, monkeypatch
):
    """On data=8 the budget holds the smallest context only, on tensor=2 the largest too."""
    tight = too_large_for(table(world), world.problem, rollout=((D8, MIDDLE), (D8, LARGE)))
    params = world.learner.init_state(D8).params

    def rollout(table, **changes):
        placement = place(world, table, train_meshes_named=(str(D8),), **changes)
        placement.choose_step(SMALL, None)
        assert (placement.rollout.mesh, placement.max_tokens) == (D8, SMALL)
        moves = []

        def noting(placement, session, *wanted):
            grown = grow_session(placement, session, *wanted)
            cached = np.asarray(session.state.cached)
            moves.append(
                (session.engine.layout.shape, grown.engine.layout.shape, (cached > 0).sum())
            )
            return grown

        monkeypatch.setattr("earl_jax.placement.moves.grow_session", noting)
        session, _ = open_session(placement, params, version=0)
        tasks, sampling = world.tasks.training(0), Sampling()
        share = Share(range(len(tasks)))
        played = play(world.actor, placement, session, tasks, share, None, sampling)
        return played, placement, moves

    stayed, _, moves = rollout(table(world))
    assert {(was, is_) for was, is_, _ in moves} == {(D8, D8)}
    moved, placement, moves = rollout(tight, budget_bytes=10**9)
    (live,) = [live for was, is_, live in moves if (was, is_) == (D8, D4T2)]
    assert placement.rollout.mesh == moved.session.engine.layout.shape == D4T2
    assert any(c.stage == "rollout" and c.switched for c in placement.take_log().choices)
    assert live >= 4 and max(t.num_tokens for t in moved.trajectories) > MIDDLE
    assert_same_episodes(stayed.trajectories, moved.trajectories)
    for count in ("rollout_tokens", "preempted_episodes", "recomputed_tokens"):
        assert getattr(moved.stats, count) == getattr(stayed.stats, count), count
    # Two slots of a row shard may share what their prompts have in common; nothing is read twice.
    read = [
        rollout.stats.prefill_tokens + rollout.stats.shared_tokens for rollout in (moved, stayed)
    ]
    assert read[0] == read[1]
