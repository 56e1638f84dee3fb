# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages are the same bits on every layout and over processes, and those of the papers."""

import typing

import jax
import numpy as np
import pytest

from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.advantage_rows import advantages_of, place_rows, reward_rows
from earl_jax.train.advantages import advantage_table
from earl_jax.train.config import TrainConfig
from tests.support.processes import Processes
from tests.support.shardings import count_host_bytes
from tests.support.trajectories import make_trajectory

TURNS = 8
ESTIMATORS = typing.get_args(typing.get_type_hints(TrainConfig)["advantage"])
CONFIGS = [
    TrainConfig(advantage=name, normalize_advantages=normalize, turn_discount=0.7)
    for name in ESTIMATORS
    for normalize in (True, False)
]
LAYOUTS = ["data=2", "data=4", "data=8", "data=4,tensor=2", "data=2,fsdp=2,expert=2", "fsdp=8"]


def some_trajectories(num: int = 48) -> list:
    """Groups of 6, two roles, ragged turns, a failure, an episode without a turn."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(num):
        turns = 0 if n == 7 else int(rng.integers(1, TURNS + 1))
        rewards = rng.normal(size=turns) * rng.choice((1e-3, 1.0, 1e3))
        reason = "environment_error" if n in (3, 20) else "win"
        role = "xo"[n // 6 % 2]
        rows.append(make_trajectory(n, rewards, group=n // 6, role=role, stop_reason=reason))
    return rows


def table_on(config: TrainConfig, shape: str, trajectories: list) -> jax.Array:
    layout = make_layout(MeshShape.parse(shape), row_axes=TRAINING_ROWS)
    rows = place_rows(reward_rows(config, trajectories, TURNS), layout)
    table = advantages_of(config, rows, layout)
    assert table.sharding.is_equivalent_to(layout.activations("N."), 2)
    return table


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.advantage} {c.normalize_advantages}")
def test_every_layout_gives_the_bits_of_one_device(config):
    trajectories = some_trajectories()
    alone = np.asarray(table_on(config, "data=1", trajectories))
    assert alone.dtype == np.float32 and alone.any()
    for shape in LAYOUTS:
        with count_host_bytes() as reads:
            table = jax.block_until_ready(table_on(config, shape, trajectories))
        assert reads == []
        assert np.asarray(table).tobytes() == alone.tobytes(), shape
    # The same estimator in fp64, in words.
    central = advantage_table(config, trajectories)[:, :TURNS]
    np.testing.assert_allclose(alone, central, rtol=2e-5, atol=2e-6 * np.abs(central).max())
    np.testing.assert_array_equal(alone == 0, central == 0)


def test_sums_are_a_tree_in_the_order_of_the_rows():
    """By hand, in numpy's fp32: halves are added to halves."""
    config = TrainConfig(advantage="grpo", normalize_advantages=False)
    outcomes = np.array([1e8, 1, 2, 3, 4, -1e8, 5, 0.1], np.float32)
    trajectories = [make_trajectory(n, (float(r),)) for n, r in enumerate(outcomes)]
    sums = outcomes
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    expected = outcomes - sums[0] / np.float32(8)
    assert sum(outcomes, np.float32(0)) != sums[0], "another order, another sum"
    for shape in ("data=1", "data=8"):
        table = np.asarray(table_on(config, shape, trajectories))
        np.testing.assert_array_equal(table[:, 0], expected)


def test_one_small_gather_and_nothing_else():
    """8 turns, peers and the number of turns: 40 bytes an episode."""
    layout = make_layout(MeshShape.parse("data=8"), row_axes=TRAINING_ROWS)
    from earl_jax.train.advantage_rows import _program

    rows = place_rows(reward_rows(CONFIGS[0], some_trajectories(), TURNS), layout)
    text = _program("reinforce", True, layout).lower(rows).compile().as_text()
    calls = [line for line in text.splitlines() if " all-gather(" in line or "-start(" in line]
    assert len(calls) == 1 and "s32[48,10]" in calls[0]
    for other in ("all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {other}(" not in text


def rows_of_a_process() -> list[str]:
    """The advantages of this process's rows as hexadecimal bytes, estimator by estimator."""
    every = some_trajectories()
    layout = make_layout(MeshShape.parse("data=4"), row_axes=TRAINING_ROWS)
    tables = []
    for config in CONFIGS:
        table = advantages_of(config, place_rows(reward_rows(config, every, TURNS), layout), layout)
        shards = sorted(table.addressable_shards, key=lambda shard: shard.index[0].start)
        tables.append(np.concatenate([np.asarray(shard.data) for shard in shards]).tobytes().hex())
    return tables


@pytest.mark.slow
def test_two_processes_with_half_the_rows_each_get_the_bits_of_one():
    halves = Processes(2, 2, "test_advantage_rows:rows_of_a_process").results()
    for config, *hexes in zip(CONFIGS, *halves, strict=True):
        alone = np.asarray(table_on(config, "data=1", some_trajectories()))
        assert "".join(hexes) == alone.tobytes().hex()
