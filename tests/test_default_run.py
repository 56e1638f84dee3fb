# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The default run: it learns, contexts grow with it, and both meshes change within the budget."""

import re
import subprocess
import sys

import pytest

from earl_jax.telemetry.metrics import read_metrics
from tests.support import ROOT, link_programs
from tests.support.runs import environment

MOVES = {
    "train": ("data=1,fsdp=8", "data=1,fsdp=2,context=4"),
    "rollout": ("data=8", "data=4,tensor=2"),
}
# Of the config, bytes a device.
BUDGET = 1_900_000
# It has learnt by then, and both meshes have changed; the run goes on to 40.
STEPS = 28


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_meshes_change_as_the_policy_learns(tmp_path):
    """With nobody's earlier measurements. test_install.py compiles programs as a user's."""
    # Nothing is asserted of its last evaluation.
    settings = {"num_steps": STEPS, "eval.final_games": 8}
    link_programs(tmp_path / "cache")
    run = subprocess.run(
        [sys.executable, "-m", "earl_jax.main", f"--workdir={tmp_path / 'run'}"]
        + [f"--config.{key}={value}" for key, value in settings.items()],
        cwd=ROOT,
        env=environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr
    written = read_metrics(tmp_path / "run" / "metrics.jsonl")
    lines = [line for line in written if "eval" not in line]
    assert len(lines) == STEPS

    rewards = [line["reward_mean"] for line in lines]
    assert rewards[0] < -0.5 and sum(rewards[-5:]) / 5 > 0.3
    contexts = [line["context_tokens_max"] for line in lines]
    assert contexts[0] <= 32 and max(contexts) > 8 * contexts[0]

    for line in lines:
        assert 0 < line["peak_bytes_per_device"] <= BUDGET
        assert line.get("out_of_memory") is None
    for stage, (first, last) in MOVES.items():
        meshes = [line[f"{stage}_mesh"] for line in lines]
        moved = meshes.index(last)
        assert meshes == [first] * moved + [last] * (len(lines) - moved)
        assert 0 < moved and stage in lines[moved]["switched"]
        # What the mesh in use would have needed is on the screen, in a line of its own.
        (reason,) = re.findall(rf"step \d+: {stage}: {first} -> {last}.*", run.stdout)
        size, unit = re.search(r"needs ([\d.]+) (KiB|MiB)/device", reason).groups()
        assert float(size) * {"KiB": 2**10, "MiB": 2**20}[unit] > BUDGET
