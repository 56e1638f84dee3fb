# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts within a run: contexts beyond the configured buckets."""

import functools

import jax
import pytest

from earl_jax.loop import rl_step
from earl_jax.placement.moves import grow_session, open_session
from earl_jax.run.build import Run, build_run
from earl_jax.run.evaluation import evaluate
from tests.support.placements import begin
from tests.support.settings import make_config

MAX_TOKENS = 32
GIVEN = {
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 32},
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 16,
        # A policy of random weights hardly ever ends a turn.
        "max_turn_tokens": 28,
        "burst": 8,
        "chunk_size": 4,
        "context_buckets": (MAX_TOKENS,),
        "page_size": 16,
        "patience_s": 10.0,
    },
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
}


@functools.cache
def world() -> Run:
    return build_run(make_config(GIVEN))


@pytest.mark.slow
def test_episodes_outgrow_the_last_context_bucket_and_are_trained_on_whole(monkeypatch):
    """Prompts of eight tokens or more, and turns of 28: 32 are too few, and no limit cuts.

    The session grows in the first step; the second begins with the larger one.
    """
    placement, position = begin(world())
    made = []

    def noting(placement, session, tokens, *others):
        made.append((session.max_tokens, tokens))
        return grow_session(placement, session, tokens, *others)

    monkeypatch.setattr("earl_jax.placement.moves.grow_session", noting)
    for step in range(2):
        position, record = rl_step(world(), placement, position)
        grown = [max_tokens for max_tokens, tokens in made if tokens > max_tokens]
        assert grown == [MAX_TOKENS], f"step {step}"
        assert record.rollout_max_tokens == 2 * MAX_TOKENS
        assert MAX_TOKENS < max(o.num_tokens for o in record.outcomes) <= 2 * MAX_TOKENS
        for trajectory in record.trajectories:
            assert trajectory.stop_reason != "episode_too_long"
            if trajectory.stop_reason == "turn_too_long":
                assert len(trajectory.turns[-1].token_ids) == 28
        # The trainer scores each token as it was sampled: also those beyond the configured buckets.
        assert record.updates[0]["logprob_mismatch_max"] < 1e-4


@pytest.mark.slow
def test_an_evaluation_beside_a_live_rollout_leaves_its_plan(monkeypatch):
    """Memory is too short for a second session of so many pages: fewer are taken.

    They do not hold the longest episode, which fewer slots play from the start.
    """
    run = build_run(make_config(GIVEN | {"rollout": GIVEN["rollout"] | {"num_slots": 16}}))
    placement, position = begin(run)
    placement.choose_step(2 * MAX_TOKENS, None)
    before, slots = placement.as_dict(), []

    def short_of_memory(*given, **named):
        slots.append(placement.rollout.num_slots)
        if len(slots) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return open_session(*given, **named)

    monkeypatch.setattr("earl_jax.placement.rollouts.open_session", short_of_memory)
    evaluate(run, placement, position, games=8, beside_live=True)
    assert slots == [16, 16, 8], "or the test shows nothing"
    assert placement.as_dict() == before


# One slot, on eight heads that divide over eight devices.
FEW = {
    "model": GIVEN["model"] | {"num_heads": 8, "num_kv_heads": 8},
    "rollout": GIVEN["rollout"] | {"num_slots": 1, "episodes_per_step": 2, "group_size": 1},
    "selector": {"train_meshes": ("data=2,tensor=4",), "table": "model"},
}


def test_meshes_whose_data_axis_does_not_divide_slots_and_episodes_are_not_used():
    assert [str(mesh) for mesh in build_run(make_config(FEW)).problem.meshes("rollout")] == [
        "data=1,tensor=8"
    ]
    twelve = FEW["rollout"] | {"num_slots": 12, "episodes_per_step": 4}
    some = build_run(make_config(FEW | {"rollout": twelve})).problem.meshes("rollout")
    assert [mesh.data for mesh in some] == [4, 2, 1]
    named = FEW["selector"] | {"rollout_meshes": ("data=8",)}
    with pytest.raises(
        ValueError, match=r"'data=8', .* rollout.num_slots = 1 does not divide by data=8"
    ):
        build_run(make_config(FEW | {"selector": named}))
    odd = {"model": GIVEN["model"], "rollout": GIVEN["rollout"] | {"num_slots": 3}}
    with pytest.raises(
        ValueError, match=r"data=8: rollout.num_slots = 3 does not divide by data=8"
    ):
        build_run(make_config(odd))
