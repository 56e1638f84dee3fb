# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The forecast of contexts that grow, and the arithmetic of the growing benchmark."""

import dataclasses
import json

import pytest

from benchmarks import growing
from benchmarks.growing import Arm, Run, page_rows, read_run
from benchmarks.pages import table
from earl_jax.config.file import load_config_file, make_config
from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.load import expected_load
from earl_jax.telemetry.load import Load, LoadHistory


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
        # Growing by 20 a step, to buckets that are configured.
        ((100, 120, 140, 160), 0, 180, 20),
        # 260 would take a bucket that is not: a round of two tokens ends the last one at 254.
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
def test_growth_is_foreseen_within_the_buckets_that_are_configured(
    longest, limit, expected, growth
):
    rollout = RolloutConfig(context_buckets=(32, 96, 256), burst=2, max_episode_tokens=limit)
    load = expected_load(rollout, history(*longest))
    assert load is not None
    assert (load.context_tokens_max, load.growth_tokens) == (expected, growth)
    assert expected_load(rollout, LoadHistory()) is None


# The benchmark.

RUN = Run(
    arm="ours",
    seed=0,
    cache="warm",
    wall_s=30.0,
    refused="",
    needs=None,
    reward=[-1.0, 0.0, 0.5, 0.75, 1.0, 0.25, 0.5],
    longest=[15, 20, 30, 60, 120, 240, 240],
    tokens=[100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0],
    seconds=[1.0, 1.0, 18.0, 1.0, 2.0, 1.0, 1.0],
    peak_bytes=[10, 10, 20, 20, 40, 30, 30],
    meshes=["a + b"] * 3 + ["a + c"] * 2 + ["a + b"] * 2,
)


def test_speed_of_a_run_is_that_of_all_its_steps_those_that_switched_too():
    # 2,800 tokens in 25 s, 18 of them in the third step.
    assert RUN.tokens_per_s == pytest.approx(112)
    assert RUN.switches == 2


def test_run_breaks_the_budget_at_its_first_step_over_it_or_without_a_plan():
    assert [RUN.breaks(budget) for budget in (9, 10, 20, 39, 40)] == [1, 3, 5, 5, None]
    refused = dataclasses.replace(RUN, refused="config.selector.budget_bytes_per_device is 40")
    assert [refused.breaks(budget) for budget in (39, 40)] == [5, 8]


def test_page_compares_runs_of_one_seed_and_cache_that_kept_the_budget():
    static = dataclasses.replace(RUN, arm="static a + b", seconds=[5.0] * 7)
    cold = dataclasses.replace(static, cache="cold")
    broken = dataclasses.replace(static, refused="too small", needs=3 * 2**20)
    rows = page_rows([RUN, static, cold, broken], 40)
    # 25 s against 35 s; of the cold cache there is no run of ours.
    speeds = [row["ours = 1"] for row in rows]
    assert speeds == [1.0, pytest.approx(25 / 35), None, None]
    assert rows[3]["breaks the budget"] == "step 8, needs 3.00 MiB"
    assert rows[0]["reward, last 5 steps"] == pytest.approx(0.6)
    assert rows[0]["contexts"] == "15 to 240"
    assert "| static a + b | 0 | cold | 15 to 240 | no |" in table(rows)


def test_run_is_read_from_what_it_wrote(tmp_path):
    step = {
        "step": 1,
        "reward_mean": -0.05,
        "context_tokens_max": 31,
        "context_tokens_mean": 20.5,
        "episodes": 4,
        "stage_s": {"select": 0.5, "rollout": 2.0, "train": 1.0},
        "peak_bytes_per_device": 10,
        "rollout_mesh": "data=8",
        "train_mesh": "data=1,fsdp=8",
    }
    lines = [{"step": 0, "eval": {"win": 0.0}}, step]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = {"arm": "x", "seed": 4, "cache": "cold", "wall_s": 1.0}
    words = "no mesh fits it; the smallest budget that would do is about 4100 (mesh data=8)"
    found = read_run(tmp_path, **facts, refused=words)
    assert (found.tokens, found.seconds) == ([82.0], [3.5])
    assert (found.meshes, found.needs) == (["data=8 + data=1,fsdp=8"], 4100)
    # One that was refused before its first step has written nothing.
    assert read_run(tmp_path / "none", **facts, refused=words).breaks(10**9) == 1


def test_arms_differ_in_their_meshes_alone():
    def config(arm: Arm):
        return make_config(load_config_file(growing.CONFIG), [*arm.overrides, *growing.ALWAYS])

    configs = {arm.name: config(arm) for arm in growing.arms()}
    ours = configs["ours"]
    assert ours.selector.table == "auto" and len(configs) == 1 + 2 * 4
    for name, found in configs.items():
        if name.startswith("static "):
            rollout, train = name.removeprefix("static ").split(" + ")
            selector = dataclasses.replace(
                ours.selector, rollout_meshes=(rollout,), train_meshes=(train,)
            )
            assert found == dataclasses.replace(ours, selector=selector)


def test_static_pairs_that_fit_to_the_end_are_those_that_cut_both_stages():
    fitting = [arm.name for arm in growing.arms() if growing.fits_to_the_end(arm)]
    rollout, trains = growing.ROLLOUT_MESHES[1], growing.TRAIN_MESHES[1:]
    assert fitting == ["ours", *(f"static {rollout} + {train}" for train in trains)]
