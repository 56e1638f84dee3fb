# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A model starts wherever it fits: whole runs on devices with an allocator limit.

The model is wide, so that parameters and moments are nearly all that a device holds: of the
trainer alone 12 bytes a parameter where nothing is cut.
"""

import pytest

from earl_jax.config_file import make_config
from earl_jax.run import run
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.telemetry.metrics import read_metrics
from tests.support.allocator import memory_limit

WIDE = {
    "num_steps": 2,
    "env": {"game": "tic_tac_toe"},
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
    "train": {"demonstration_steps": 0, "micro_batches": 2, "logprob_chunk": 8, "epochs": 1},
    "eval": {"every_steps": 2, "games": 8, "final_games": 8},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def start(tmp_path, limit, name, *, train_meshes=(), table="model"):
    """Two steps under a limit, the budget what is left beside a tenth; returns the metrics."""
    selector = {
        "budget_bytes_per_device": int(0.9 * limit),
        "train_meshes": train_meshes,
        "table": table,
    }
    config = make_config({**WIDE, "selector": selector})
    workdir = tmp_path / name
    with memory_limit(limit) as allocator:
        run(config, workdir)
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval" not in row]
    return rows, allocator


@pytest.mark.slow
def test_model_that_needs_its_state_cut_in_eight_starts(tmp_path):
    """Replicated, the state alone takes three times the limit; the audited start made one."""
    rows, allocator = start(tmp_path, 15_000_000, "cut", table="auto")
    assert len(rows) == 2
    assert "out_of_memory" not in rows[0]
    assert allocator.peak_bytes <= 15_000_000


@pytest.mark.slow
def test_model_that_fits_nowhere_says_the_smallest_hardware(tmp_path):
    with pytest.raises(BudgetTooSmall, match="smallest budget that would do") as raised:
        start(tmp_path, 2_000_000, "nowhere")
    assert "the smallest hardware that would do" in str(raised.value)
