# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs with adapters, on a checkpoint of `transformers`: they learn, resume and hand out."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support import ROOT
from tests.support.runs import assert_equal, cut_off, final_parameters, timeless
from tests.support.settings import make_config

GIVEN = {
    "num_steps": 6,
    "rollout": {"num_slots": 16, "episodes_per_step": 32, "context_buckets": (40,)},
    "selector": {
        "table": "model",
        "rollout_meshes": ("data=4,tensor=2",),
        "train_meshes": ("data=2,fsdp=2,tensor=2",),
    },
    "train": {
        "lora": {"rank": 8, "alpha": 32.0},
        "sft_steps": 6,
        "sft_updates": 10,
        "sft_learning_rate": 2e-2,
        "max_grad_norm": 10.0,
    },
    "checkpoint": {"every_steps": 2, "keep": 2, "export": True},
    "eval": {"games": 64, "final_games": 64, "every_steps": 6},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "qwen2"
    return Path(shutil.copytree(ROOT / "tests/reference/qwen2_tied", folder))


def run(base: Path, workdir: Path) -> None:
    train(make_config(GIVEN, [f"model.path={base}"]), workdir)


@pytest.fixture(scope="module")
def whole(base) -> Path:
    """A run from start to end."""
    workdir = base.parent / "run"
    run(base, workdir)
    return workdir


def exported(workdir: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(next((workdir / "export" / name).glob("*.safetensors")))


@pytest.mark.slow
def test_supervised_steps_teach_the_adapters_what_a_reply_looks_like(whole):
    rows = read_metrics(whole / "metrics.jsonl")
    first, last = (row["eval"] for row in rows if "eval" in row)
    # Random weights never stop talking. Trained ones say one thing and end their turn.
    assert first["turn_too_long"] > 0.9
    assert last.get("turn_too_long", 0.0) < 0.1
    for row in rows:
        if "eval" not in row:
            assert row["logprob_mismatch_max"] <= 1e-4
            assert row["publish_host_bytes"] == 0


@pytest.mark.slow
def test_the_newest_steps_are_handed_out_merged_and_as_adapters(whole, base):
    names = {f"step_00000{step}{kind}" for step in (4, 6) for kind in ("", "_adapter")}
    assert {path.name for path in (whole / "export").iterdir()} == names
    for step in (4, 6):
        merged, adapter = (exported(whole, f"step_00000{step}{kind}") for kind in ("", "_adapter"))
        before = load_file(base / "model.safetensors")
        adapted = 0
        for name, weight in before.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" not in adapter:
                assert merged[name].tobytes() == weight.tobytes()
                continue
            a, b = (adapter[f"{module}.lora_{side}.weight"] for side in "AB")
            np.testing.assert_allclose(merged[name], weight + 4.0 * b @ a, atol=2e-6)
            assert np.abs(merged[name] - weight).max() > 1e-3
            adapted += 1
        assert adapted == len(adapter) / 2 == 14
        # The checkpoint holds the same adapters, two moments of each for both kinds of updates, and
        # three counters; behind the warm start moments and counter of one kind are gone.
        saved = final_parameters(whole, step)
        assert len(saved) == (5 * 14 + 3 if step < 6 else 3 * 14 + 2)
        numbers = {leaf.size for leaf in saved}
        assert before["model.embed_tokens.weight"].size not in numbers
        name = "base_model.model.model.layers.{}.mlp.up_proj.lora_B.weight"
        stacked = np.stack([adapter[name.format(layer)] for layer in (0, 1)])
        kept = [leaf.tobytes() for leaf in saved]
        assert np.ascontiguousarray(stacked.transpose(0, 2, 1)).tobytes() in kept


@pytest.mark.slow
def test_stopped_and_resumed_ends_with_the_same_bits(whole, base, tmp_path, capsys):
    """As a run that was killed while it wrote the exports of step 4, and of step 6."""
    workdir = cut_off(whole, tmp_path / "again", 4)
    shutil.rmtree(workdir / "export/step_000004_adapter")
    (workdir / "export/step_000006_adapter").rename(workdir / "export/step_000006_adapter.tmp")
    capsys.readouterr()
    run(base, workdir)
    printed = capsys.readouterr().out
    assert "after step 4 of 6" in printed
    assert "exported " + str(workdir / "export/step_000004_adapter") in printed
    assert_equal(final_parameters(workdir, 6), final_parameters(whole, 6))
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (workdir, whole)]
    assert [timeless(row) for row in rows[0]] == [timeless(row) for row in rows[1]]
    files = [path.relative_to(whole) for path in (whole / "export").rglob("*") if path.is_file()]
    assert files and all(
        (workdir / path).read_bytes() == (whole / path).read_bytes() for path in files
    )
    assert {path.name for path in (workdir / "export").iterdir()} == {
        path.name for path in (whole / "export").iterdir()
    }
