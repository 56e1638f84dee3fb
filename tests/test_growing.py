# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The growing run in miniature, and the arithmetic of its benchmark."""

import dataclasses

import pytest

from benchmarks.growing import (
    Arm,
    HeldPair,
    Run,
    arms,
    held_pairs,
    read_run,
    tokens_per_s,
    worst_of_three,
)
from earl_jax.config_file import make_config
from earl_jax.loop import foresee
from earl_jax.rollout.config import RolloutConfig
from earl_jax.run import run
from earl_jax.telemetry.load import Load, LoadHistory

TRAIN_MESHES = ("data=8", "data=1,fsdp=8")
# A trail of two stones is learnt in a dozen steps; walked to its end it is 83 tokens.
TINY = {
    "num_steps": 11,
    "env": {"name": "trail", "trail": {"num_stones": 2, "num_steps": 12}},
    "model": {"num_layers": 1, "width": 32, "ffn_size": 64, "windows": (32,)},
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 16,
        "burst": 2,
        "context_buckets": (24, 96),
        "page_size": 96,
        "patience_s": 10.0,
    },
    "selector": {"order": "listed", "rollout_meshes": ("data=8",), "train_meshes": TRAIN_MESHES},
    "train": {
        "turn_discount": 1.0,
        "learning_rate": 4e-3,
        "demonstration_steps": 9,
        "demonstration_updates": 6,
        "demonstration_learning_rate": 1e-2,
        "logprob_chunk": 32,
    },
    "eval": {"every_steps": 11, "games": 2, "final_games": 2},
    "log": {"trajectories_every_steps": 1},
}


@pytest.mark.slow
def test_contexts_that_grow_change_the_mesh_and_a_hard_limit_loses_reward(tmp_path, monkeypatch):
    """Within a budget that the first mesh breaks at the length that contexts come to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stays, moves = (pair.need for pair in held_pairs(make_config(TINY)))
    budget = (stays[96] + moves[96]) // 2
    assert max(stays[24], moves[24]) < budget and moves[96] < budget < stays[96]

    def played(name: str, **rollout: int) -> Run:
        overrides = [f"rollout.{key}={value}" for key, value in rollout.items()]
        config = make_config(TINY, [*overrides, f"selector.budget_bytes_per_device={budget}"])
        run(config, tmp_path / name)
        return read_run(name, config.seed, tmp_path / name)

    ours, limited = played("ours"), played("limited", max_episode_tokens=36)
    # Nobody has learnt anything at the first step.
    assert ours.longest[0] <= 24 < 48 < max(ours.longest)
    first, then = (f"data=8 + {mesh}" for mesh in TRAIN_MESHES)
    assert ours.where[0] == first and ours.where[-1] == then
    moved = ours.where.index(then)
    assert max(ours.longest[:moved]) <= 24
    assert ours.breaks(budget) is None
    # What is cut is paid nothing.
    assert set(ours.cut) == {0.0} and max(limited.cut) > 0.1
    assert max(limited.longest) == 36
    assert limited.last_reward < ours.last_reward - 0.1


def history(*longest: int) -> LoadHistory:
    loads = (
        Load(
            context_tokens_max=tokens,
            context_tokens_mean=tokens / 2,
            tokens_in_flight_max=tokens,
            rollout_tokens=tokens,
        )
        for tokens in longest
    )
    return LoadHistory(steps=tuple(loads))


@pytest.mark.parametrize(
    ("longest", "limit", "expected", "growth"),
    [
        # Growing by 20 a step, to rooms that are configured.
        ((100, 120, 140, 160), 0, 180, 20),
        # 260 would take a room that is not: a round of two tokens ends the last one at 254.
        ((180, 200, 220, 240), 0, 254, 14),
        # Contexts that are that long already are no news, and grow on when they do.
        ((230, 250, 270, 290), 0, 290, 0),
        # No episode becomes longer than it may.
        ((70, 80, 90, 96), 96, 96, 0),
        ((50, 60, 70, 80), 96, 90, 10),
        # What does not grow.
        ((100, 90, 100, 90), 0, 100, 0),
    ],
)
def test_growth_is_foreseen_within_the_rooms_that_are_configured(longest, limit, expected, growth):
    rollout = RolloutConfig(context_buckets=(32, 96, 256), burst=2, max_episode_tokens=limit)
    load = foresee(rollout, history(*longest))
    assert load is not None
    assert (load.context_tokens_max, load.growth_tokens) == (expected, growth)
    assert foresee(rollout, LoadHistory()) is None


# The benchmark's arithmetic.


RUN = Run(
    arm="ours",
    seed=0,
    reward=[-1.0, 0.0, 0.5, 0.75, 1.0, 0.25, 0.5],
    longest=[15, 20, 30, 60, 120, 240, 240],
    tokens=[100.0] * 7,
    seconds=[1.0, 1.0, 10.0, 1.0, 2.0, 1.0, 1.0],
    peak_bytes=[10, 10, 20, 20, 40, 30, 30],
    where=["data=8 + data=8"] * 7,
    cut=[0.0] * 7,
)


def test_what_a_run_came_to():
    assert RUN.growth == 16
    # Of 0.5, 0.75, 1, 0.25 and 0.5; of 1, 0.25 and 0.5.
    assert RUN.last_reward == pytest.approx(0.6)
    assert worst_of_three(RUN.reward[2:]) == pytest.approx(1.75 / 3)
    assert [RUN.breaks(budget) for budget in (9, 10, 20, 39, 40)] == [1, 3, 5, 5, None]


def test_a_step_that_compiled_is_no_part_of_the_speed():
    # The third step took ten times as long as those around it; the six others 7 s.
    assert tokens_per_s(RUN) == pytest.approx(600 / 7)
    even = dataclasses.replace(RUN, seconds=[2.0] * 7)
    assert tokens_per_s(even) == pytest.approx(50)


def test_a_pair_breaks_the_budget_where_a_step_needs_a_room_that_it_has_too_little_for():
    pair = HeldPair(name="data=8 + data=8", need={32: 10, 96: 20, 256: 40})
    rooms = [32, 32, 96, 32, 256]
    assert [pair.breaks(rooms, budget) for budget in (9, 10, 20, 39, 40)] == [1, 3, 5, 5, None]


def test_the_arms_differ_in_what_they_say_alone():
    ours, free, limited, held = (arm.config(3) for arm in arms(Arm(name="").config(0)))
    budget = ours.selector.budget_bytes_per_device
    assert budget > 0 and ours.rollout.max_episode_tokens == 0 and not ours.train.remat
    selector = dataclasses.replace(ours.selector, budget_bytes_per_device=0)
    assert free == dataclasses.replace(ours, selector=selector)
    rollout = dataclasses.replace(ours.rollout, max_episode_tokens=192)
    assert limited == dataclasses.replace(ours, rollout=rollout)
    assert (held.train.remat, held.train.micro_batches) == (True, 8)
    assert held.selector.rollout_meshes == ("data=8",)
    assert held.selector.train_meshes == ("data=1,fsdp=8",)
