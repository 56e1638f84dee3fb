# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The growing run in miniature, and the arithmetic of its benchmark."""

import dataclasses
import statistics

import pytest

from benchmarks.growing import Arm, Run, arms, read_run, tokens_per_s
from earl_jax.calibrate import Calibration, open_table
from earl_jax.config import Config
from earl_jax.config_file import make_config
from earl_jax.run import run
from earl_jax.sharding.layout import MeshShape
from earl_jax.survival import Ladder
from earl_jax.world import World

TRAIN_MESHES = ("data=8", "data=1,fsdp=8")
# A trail of two stones is learnt in a dozen steps; walked to its end it is 83 tokens.
TINY = {
    "num_steps": 14,
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
        "demonstration_steps": 10,
        "demonstration_updates": 6,
        "demonstration_learning_rate": 1e-2,
        "logprob_chunk": 32,
    },
    "eval": {"every_steps": 14, "games": 2, "final_games": 2},
    "log": {"trajectories_every_steps": 1},
}


def need(world: World, places: int) -> list[int]:
    """What each pair of meshes takes of a device with so much room, the larger of its stages."""
    table, _ = open_table(world)
    calibration, ladder = Calibration(world, table, lambda text: None), Ladder(world)
    (rollout,) = calibration.rollout_options(places, 0)
    return [
        max(option.bytes_per_device, rollout.bytes_per_device + ladder.trainer_bytes(option.mesh))
        for option in calibration.train_options(places)
    ]


@pytest.mark.slow
def test_contexts_that_grow_change_the_mesh_and_a_hard_limit_loses_reward(tmp_path, monkeypatch):
    """Within a budget that the first mesh breaks at the length that contexts come to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world = World(make_config(TINY))
    short, (stays, moves) = need(world, 24), need(world, 96)
    budget = (stays + moves) // 2
    assert max(short) < budget and moves < budget < stays

    def played(name: str, **rollout: int) -> Run:
        overrides = [f"rollout.{key}={value}" for key, value in rollout.items()]
        config = make_config(TINY, [*overrides, f"selector.budget_bytes_per_device={budget}"])
        run(config, tmp_path / name)
        return read_run(name, config.seed, tmp_path / name)

    ours, limited = played("ours"), played("limited", max_episode_tokens=36)
    # Nobody has learnt anything at the first step.
    assert ours.longest[0] <= 24 < 60 <= max(ours.longest)
    assert ours.where[0] == "data=8 + data=8" and ours.where[-1] == "data=8 + fsdp=8"
    moved = ours.where.index("data=8 + fsdp=8")
    assert max(ours.longest[:moved]) <= 24
    assert ours.breaks(budget) is None
    assert ours.breaks(stays) is None and ours.breaks(0) == 1
    # What is cut is paid nothing.
    assert set(ours.cut) == {0.0} and statistics.fmean(limited.cut[-5:]) > 0.1
    assert max(limited.longest) == 36
    assert limited.last_reward < ours.last_reward - 0.1


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
    # Of 0.5, 0.75, 1, 0.25, 0.5 and of the five steps before the last two.
    assert RUN.last_reward == pytest.approx(0.6) and RUN.best_reward == pytest.approx(0.6)
    assert [RUN.breaks(budget) for budget in (9, 10, 20, 39, 40)] == [1, 3, 5, 5, None]


def test_a_step_that_compiled_is_no_part_of_the_speed():
    # The third step took ten times as long as those around it; the six others 7 s.
    assert tokens_per_s(RUN) == pytest.approx(600 / 7)
    even = dataclasses.replace(RUN, seconds=[2.0] * 7)
    assert tokens_per_s(even) == pytest.approx(50)


def test_every_pair_of_meshes_is_held_still_once():
    """But for the first, which a run without a budget stays on; the last also in small parts."""
    config: Config = Arm(name="").config(0)
    main, held = arms(config)
    assert [arm.name for arm in main] == ["ours", "unconstrained", "limit 96"]
    pairs = {
        arm.config(0).selector.rollout_meshes + arm.config(0).selector.train_meshes for arm in held
    }
    free = config.selector
    assert pairs == {
        (rollout, train) for rollout in free.rollout_meshes for train in free.train_meshes
    } - {(free.rollout_meshes[0], free.train_meshes[0])}
    assert [arm.config(0).train.remat for arm in held] == [False] * (len(held) - 1) + [True]
    assert {arm.config(0).selector.budget_bytes_per_device for arm in held} == {0}
    for meshes in (free.rollout_meshes, free.train_meshes):
        assert all(MeshShape.parse(text).num_devices == 8 for text in meshes)
