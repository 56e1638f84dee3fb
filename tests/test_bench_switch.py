# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the selector: what they count, and that the commands run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.regret_points import (
    Kept,
    Pair,
    Timed,
    pairs_within,
    regret,
    rivals,
    summary,
    time_pairs,
)
from benchmarks.selector_regret import turn_tokens
from benchmarks.switch_ahead import row_of, until_switch
from earl_jax.bench import parse_flags
from earl_jax.config import Config
from earl_jax.selector.throughput import Measurement

ROOT = Path(__file__).parent.parent


def test_the_regret_of_a_choice_by_hand():
    """Rollouts of 3 s, 2 s and 4 s, training of 5 s and 1 s: at best 2 s and 1 s."""
    step_s = {Pair(r, t): a + b for r, a in enumerate((3, 2, 4)) for t, b in enumerate((5, 1))}
    assert regret(step_s, Pair(1, 1)) == (0.0, (1, 1))
    assert regret(step_s, Pair(0, 1)) == (pytest.approx(1 / 3), (1, 1))
    assert regret(step_s, Pair(2, 0)) == (2.0, (1, 1))
    # Where the best does not fit, the next is: 3 s and 1 s.
    del step_s[Pair(1, 1)]
    assert regret(step_s, Pair(2, 1)) == (pytest.approx(1 / 4), (0, 1))


def test_pairs_that_the_budget_does_not_hold_are_no_rivals():
    """Rollouts of 60 and 30 beside trainers that leave 40 and 5, and take 80 and 50."""
    arguments = [60, 30], [80, 50], [40, 5]
    assert pairs_within(*arguments, None) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pairs_within(*arguments, 99) == [(0, 1), (1, 0), (1, 1)]
    assert pairs_within(*arguments, 79) == [(0, 1), (1, 1)]
    assert pairs_within(*arguments, 34) == []


def test_points_are_counted():
    assert summary([0.0, 0.05, 0.08, 0.2]) == (
        "2 of 4 points at most 5 % slower than the best (50%), 3 at most 10 %, the worst 20.0%"
    )
    assert summary([]) == "no point was measured"


def test_pairs_that_are_far_behind_get_no_more_rounds_but_the_chosen_one():
    step_s = {Pair(0, 0): 1.0, Pair(0, 1): 1.25, Pair(1, 0): 1.9, Pair(1, 1): 2.1}
    assert rivals(step_s, Pair(0, 0), 1) == [(0, 0), (0, 1), (1, 0)]
    assert rivals(step_s, Pair(0, 0), 2) == rivals(step_s, Pair(0, 0), 3) == [(0, 0), (0, 1)]
    assert rivals(step_s, Pair(1, 1), 2) == [(0, 0), (0, 1), (1, 1)]


def test_the_rounds_of_pairs_take_turns():
    seen = []

    def timed(name, takes_s=0.0):
        return Timed(lambda: (seen.append(name), time.sleep(takes_s)))

    play, slow, learn = timed("play"), timed("slow", 0.05), timed("learn", 0.01)
    pairs = [Pair(0, 0), Pair(1, 0)]
    step_s = time_pairs({0: play, 1: slow}, {0: learn}, pairs, Pair(0, 0), 3)
    # Each once to compile and once on the clock; then without what is five times as slow.
    assert seen[:6] == ["play", "play", "slow", "slow", "learn", "learn"]
    assert seen[6:] == ["play", "learn"] * 2
    assert step_s[Pair(1, 0)] > 0.06 > 0.03 > step_s[Pair(0, 0)] > 0.01
    # What has had its rounds is not run again, and who is chosen has all of them.
    seen.clear()
    time_pairs({0: play, 1: slow}, {0: learn}, pairs, Pair(1, 0), 3)
    assert seen == ["slow"] * 2


def test_points_that_are_in_the_file_are_known_by_their_config(tmp_path):
    path = tmp_path / "points.jsonl"
    kept = Kept(path, Config(), repeats=5)
    assert not kept.has("even", 24)
    kept.append({"load": "even", "room": 24, "slower by": 0.02})
    again = Kept(path, Config(), repeats=5)
    assert again.has("even", 24) and not again.has("even", 40) and not again.has("tail", 24)
    assert not Kept(path, Config(num_steps=7), repeats=5).has("even", 24)
    assert not Kept(path, Config(), repeats=3).has("even", 24)
    # The selector's measurements are of this config alone, and come back.
    entry = Measurement(tokens_per_s=1.0, program_bytes=1, switch_s=0.0)
    kept.table().with_measurement("train data=8 24", entry)
    assert again.table().measurements == {"train data=8 24": entry}
    assert not Kept(path, Config(num_steps=7), repeats=5).table().measurements
    assert Kept(None, Config()).table() is None


def test_the_loads_of_the_regret():
    assert turn_tokens("even", 3, 40) == [40, 40, 40]
    assert turn_tokens("half", 2, 40) == [20, 20]
    assert turn_tokens("tail", 10, 40) == [40, *[5] * 7, 40, 5]


def test_switch_is_a_stage_of_bench():
    flags = parse_flags(["switch", "--config.model.width=32"])
    assert (flags.stage, flags.only, flags.overrides) == ("switch", "switch", ["model.width=32"])
    assert parse_flags(["dispatch"]).only == "processes,links,within,weights,compiled,paper"


TINY = (
    "num_layers=1,width=16,num_heads=2,num_kv_heads=2,head_size=8,ffn_size=16".split(","),
    "num_slots=8 episodes_per_step=16 context_buckets=(16,)".split(),
)


@pytest.mark.slow
def test_switches_of_a_tiny_model(tmp_path):
    model, rollout = TINY
    line = [sys.executable, "-m", "earl_jax.bench", "switch", "--json", "--repeats=1"]
    line += [f"--config.model.{one}" for one in model]
    line += [f"--config.rollout.{one}" for one in rollout]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert [row["what"] for row in rows] == [
        "trainer",
        "new weights",
        "new weights",
        "live rollout",
    ]
    # Whole on every device before; a device keeps its part and needs nothing.
    assert rows[0]["moved MiB"] == 0 and rows[0]["to"] == "data=1,fsdp=8"
    live = rows[3]
    assert live["moved MiB"] > 0 and live["times a copy"] > 0
    assert live["plan ms"] > 0 and live["tables ms"] > 0 and rows[0]["tables ms"] is None
    for row in rows:
        assert row["stalled ms"] > 0 and row["program ms"] > 0
        assert row["times writing"] == pytest.approx(row["stalled ms"] / row["writing ms"])


def test_what_a_run_waited_for_by_hand():
    """Of two steps, the second of which has more room; what the first step took is its own."""
    steps = [
        {"step": 1, "time_s": 50.0, "compile_s": 40.0, "compile_waited_s": 40.0},
        {"step": 2, "time_s": 52.0, "compile_s": 1.0, "compile_waited_s": 1.0},
        {"step": 3, "time_s": 60.0, "compile_s": 9.0, "compile_waited_s": 3.0},
        {"step": 4, "time_s": 61.0},
    ]
    steps = [step | {"rollout_places": 24 if step["step"] < 3 else 40} for step in steps]
    assert until_switch([{"step": 0, "eval": {}}, *steps[:2]]) == []
    found = until_switch([{"step": 0, "eval": {}}, *steps])
    assert found == steps[:3]
    assert row_of(found) == {
        "step": 3,
        "room": "24 to 40",
        "compile s": 10.0,
        "hidden s": 6.0,
        "waited s": 4.0,
        "that step s": 8.0,
        "a step s": 2.0,
        "first step s": 50.0,
    }
