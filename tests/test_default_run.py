# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The default run: it learns, contexts grow with it, and both meshes change within the budget."""

import re
from pathlib import Path

import pytest

from earl_jax.config.file import load_config_file, make_config
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train

CONFIG = Path(__file__).parent.parent / "configs" / "trail_tiny_cpu.py"
MOVES = {
    "train": ("data=1,fsdp=8", "data=1,fsdp=2,context=4"),
    "rollout": ("data=8", "data=4,tensor=2"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_meshes_change_as_the_policy_learns(tmp_path, monkeypatch, capsys):
    """With nobody's earlier measurements, as a new user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Nothing is asserted of its last evaluation.
    config = make_config(load_config_file(CONFIG), ["eval.final_games=8"])
    train(config, tmp_path / "run")
    printed = capsys.readouterr().out
    written = read_metrics(tmp_path / "run" / "metrics.jsonl")
    lines = [line for line in written if "eval" not in line]
    assert len(lines) == config.num_steps

    rewards = [line["reward_mean"] for line in lines]
    assert rewards[0] < -0.5 and sum(rewards[-5:]) / 5 > 0.3
    contexts = [line["context_tokens_max"] for line in lines]
    assert contexts[0] <= 32 and max(contexts) > 8 * contexts[0]

    budget = config.selector.budget_bytes_per_device
    for line in lines:
        assert 0 < line["peak_bytes_per_device"] <= budget
        assert line.get("out_of_memory") is None
    for stage, (first, last) in MOVES.items():
        meshes = [line[f"{stage}_mesh"] for line in lines]
        moved = meshes.index(last)
        assert meshes == [first] * moved + [last] * (len(lines) - moved)
        assert 0 < moved and stage in lines[moved]["switched"]
        # What the mesh in use would have needed is on the screen, in a line of its own.
        (reason,) = re.findall(rf"step \d+: {stage}: {first} -> {last}.*", printed)
        size, unit = re.search(r"needs ([\d.]+) (KiB|MiB)/device", reason).groups()
        assert float(size) * {"KiB": 2**10, "MiB": 2**20}[unit] > budget
