# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A model starts wherever it fits: whole runs on devices with an allocator limit.

The model is wide, so that parameters and moments are nearly all that a device holds: of the
trainer alone 12 bytes a parameter where nothing is cut.
"""

import gc
import re

import pytest

from earl_jax.placement import placement
from earl_jax.placement.stages import compiled_bytes
from earl_jax.rollout.load import expected_tokens
from earl_jax.run.build import build_run
from earl_jax.run.saved_position import new_placement
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.training import train
from tests.support.allocator import live_bytes, memory_limit
from tests.support.runs import steps_of
from tests.support.settings import make_config

WIDE = {
    "num_steps": 2,
    "env": {"name": "tic_tac_toe"},
    "model": {
        "num_layers": 2,
        "width": 256,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_size": 32,
        "ffn_size": 1024,
    },
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 16,
        "burst": 2,
        "max_turn_tokens": 4,
        "context_buckets": (32,),
        "max_episode_tokens": 32,
        "chunk_size": 8,
        "patience_s": 10.0,
    },
    "train": {"sft_steps": 0, "micro_batches": 2, "logprob_chunk": 8, "epochs": 1},
    "eval": {"every_steps": 2, "games": 8, "final_games": 8},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


FSDP = ("data=8", "data=4,fsdp=2", "data=2,fsdp=4", "data=1,fsdp=8")


def start(tmp_path, limit, budget=None, **selector):
    """Trains two steps under a limit per device; returns their metrics and the allocator."""
    selector = {"budget_bytes_per_device": budget or limit, **selector}
    config = make_config({**WIDE, "selector": selector})
    gc.collect()
    # Arrays of other tests in this process do not count.
    held = max(live_bytes().values(), default=0)
    with memory_limit(limit + held) as allocator:
        train(config, tmp_path / "run")
    allocator.peak_bytes -= held
    rows = steps_of(tmp_path / "run")
    return rows, allocator


@pytest.mark.slow
def test_model_that_needs_fsdp_8_starts(tmp_path):
    """Replicated, the state of 27 MB alone would not fit; over fewer shards no update does."""
    problem = build_run(make_config(WIDE)).problem
    for text in FSDP[:3]:
        plans = [plan for plan in problem.train_plans(32) if str(plan.mesh) == text]
        assert min(problem.update_footprint(plan, 32).total for plan in plans) > 19_000_000
    rows, allocator = start(tmp_path, 19_000_000, 17_000_000, train_meshes=FSDP, table="auto")
    assert [row["train_mesh"] for row in rows] == ["data=1,fsdp=8"] * 2
    assert not any("out_of_memory" in row for row in rows)
    assert allocator.peak_bytes <= 19_000_000 and not allocator.refused


@pytest.mark.slow
def test_model_that_fits_a_device_by_five_percent_starts(tmp_path):
    meshes = {"train_meshes": ("data=8",), "rollout_meshes": ("data=8",), "table": "model"}
    stages = build_run(make_config({**WIDE, "selector": meshes})).stages
    problem = stages.problem
    plans = sorted(
        problem.train_plans(32), key=lambda plan: problem.update_footprint(plan, 32).total
    )
    # The least that any way to train takes, by XLA, of those that take least by computed bytes.
    least = min(filter(None, (compiled_bytes(stages, plan, 32) for plan in plans[:3])))
    rows, allocator = start(tmp_path, int(least / 0.95), **meshes)
    assert len(rows) == 2 and not any("out_of_memory" in row for row in rows)
    assert not allocator.refused


def test_model_that_fits_nowhere_says_the_smallest_budget_and_hardware(tmp_path):
    with pytest.raises(BudgetTooSmall) as raised:
        start(tmp_path, 2_000_000, table="model")
    message = " ".join(str(raised.value).split())
    assert re.search(r"the smallest budget that would do is (about )?\d+", message)
    assert re.search(
        r"By computed bytes, at a context of \d+ tokens, the smallest hardware that would do "
        r"\(powers of two\): \d+ cpu, 1 v4, 1 v5e, 1 v5p, 1 v6e, 1 tpu7x, 1 a100, 1 h100, "
        r".* 1 gb300$",
        message,
    )


@pytest.mark.slow
def test_at_most_two_programs_of_a_stage_are_compiled_before_the_first_step(monkeypatch):
    compiled = []

    def count(stages, plan, tokens, **how):
        compiled.append(plan)
        return compiled_bytes(stages, plan, tokens, **how)

    monkeypatch.setattr(placement, "compiled_bytes", count)
    selector = {"budget_bytes_per_device": 17_000_000, "table": "model"}
    run = build_run(make_config({**WIDE, "selector": selector}))
    chosen = new_placement(run, print)
    chosen.choose_step(expected_tokens(run.stages.rollout, None), None)
    assert compiled and chosen.plans.rollout is not None
    stages = [type(plan) for plan in compiled]
    assert max(map(stages.count, stages)) <= 2
