# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs of one seed are the same run where the speed model decides, not the clock."""

import gc

import jax
import pytest

from earl_jax.loop import rl_step
from earl_jax.run.build import build_run
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support.placements import TINY, begin
from tests.support.runs import assert_equal, final_parameters, timeless
from tests.support.settings import make_config

GIVEN = {
    "num_steps": 3,
    "seed": 11,
    "model": TINY,
    "env": {"name": "trail", "args": {"num_stones": 4, "num_steps": 4, "mask_illegal": True}},
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 16,
        "group_size": 4,
        "max_turn_tokens": 4,
        "chunk_size": 4,
        "context_buckets": (32, 64),
        "unfinished_reward": 0.0,
        # Every answer of an environment is waited for: rounds do not depend on the machine's load.
        "patience_s": 60.0,
    },
    "selector": {
        "table": "model",
        "rollout_meshes": ("data=8", "data=4,tensor=2"),
        "train_meshes": ("data=8", "data=2,fsdp=4"),
    },
    "train": {"ratio": "model"},
    "checkpoint": {"every_steps": 2},
    "eval": {"every_steps": 2, "games": 8, "final_games": 8},
}


def stopped_in_its_evaluation(workdir) -> str:
    """Names a signal when the second step is written down, and its evaluation is made."""
    metrics = workdir / "metrics.jsonl"
    return "SIGTERM" * (metrics.exists() and read_metrics(metrics)[-1]["step"] == 2)


@pytest.mark.slow
def test_two_runs_of_one_seed_are_the_same_run(tmp_path, monkeypatch):
    """Metrics but for times, plans and their reasons included, and parameters to the bit.

    The second one is stopped in an evaluation and makes it up. Its next step finds no caches of the
    evaluation: behind a checkpoint there are none.
    """
    lines, parameters, config = [], [], make_config(GIVEN)
    for name in ("one", "other"):
        # No table, and nothing else, goes from one to the other.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name / "cache"))
        workdir = tmp_path / name / "run"
        if name == "other":
            end = train(config, workdir, lambda: stopped_in_its_evaluation(workdir))  # noqa: B023
            assert "after step 2" in end.stopped
            assert "eval" not in read_metrics(workdir / "metrics.jsonl")[-1]
        train(config, workdir)
        lines.append([timeless(line) for line in read_metrics(workdir / "metrics.jsonl")])
        parameters.append(final_parameters(workdir, 3))
    one, other = lines
    assert one == other
    steps = [line for line in one if "eval" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert len({line["rollout_tokens"] for line in steps}) > 1
    assert steps[-1]["shared_tokens"] > 0, "prefixes are shared"
    assert_equal(*parameters)


@pytest.mark.slow
def test_a_step_leaves_hardly_anything_to_pythons_collector():
    """And no array, so that it may come seldom (launch/start.py)."""
    run = build_run(make_config(GIVEN))
    placement, position = begin(run)
    for _ in range(2):
        position, _ = rl_step(run, placement, position)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        rl_step(run, placement, position)
        assert gc.collect() < 1000
        assert not [each for each in gc.garbage if isinstance(each, jax.Array)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
