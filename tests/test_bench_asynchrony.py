# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The figures that the benchmark of asynchronous training takes from metrics and events."""

import json
import math

import pytest

from benchmarks import asynchrony
from benchmarks.asynchrony import (
    LINES,
    PartTimes,
    Rounds,
    beside_simulation,
    counted_steps,
    fixed_cost,
    read_episodes,
    read_part_tokens,
    read_parts,
    read_rounds,
)
from earl_jax.telemetry.trace import Trace


def test_the_most_steps_in_a_row_without_a_new_program_count():
    """Steps 4 to 10; in an asynchronous run the first have episodes of the time of step 3."""
    compiled = {1: 5.0, 3: 7.0, 9: 0.01, 11: 0.4}
    metrics = [{"step": step, "compile_s": compiled.get(step, 0.0)} for step in range(1, 13)]
    del metrics[5]["compile_s"]
    for staleness, steps in ((0, [4, 5, 6, 7, 8, 9, 10]), (2, [6, 7, 8, 9, 10])):
        assert [row["step"] for row in counted_steps(metrics, staleness)] == steps
    # The last ones have less to play.
    assert [row["step"] for row in counted_steps(metrics, 4)] == [8]


def test_fixed_cost_is_the_intercept_of_seconds_over_sizes():
    assert fixed_cost([(10, 3.0), (20, 5.0), (40, 9.0)]) == pytest.approx(1.0)
    assert fixed_cost([(10, 1.0), (20, 3.0)]) == 0.0
    assert fixed_cost([(10, 1.0), (10, 3.0)]) == 0.0


def test_rounds_are_those_before_the_step_took_its_groups_and_beside_its_update(tmp_path):
    events = [
        {"event": "open", "version": 0},
        {"event": "take", "version": 0, "groups": [0], "round": 5},
        {"event": "trained", "version": 0, "step": 1, "round": 7},
        {"event": "publish", "version": 1, "round": 7},
        {"event": "take", "version": 1, "groups": [1], "round": 8},
        {"event": "take", "version": 1, "groups": [2], "round": 11},
        {"event": "trained", "version": 1, "step": 2, "round": 11},
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in events))
    assert read_rounds(tmp_path) == {1: (5, 5, 2), 2: (1, 4, 0)}
    # A synchronous run takes no groups.
    path.write_text(json.dumps({"event": "trained", "version": 0, "step": 1}) + "\n")
    assert read_rounds(tmp_path) == {}


def test_an_episode_takes_a_round_for_every_four_tokens_of_a_reply(tmp_path):
    """Replies of 2 and 5 tokens take 1 and 2 rounds; those of 4 and 8 as many."""
    (tmp_path / "trajectories").mkdir()
    flat = {"logprobs": [], "turn_rewards": [], "reward": 0.0}
    for step, episode, wrote in ((1, 1, "eeppeppppp"), (2, 0, "eppppepppppppp")):
        line = {"episode": episode, "wrote": list(wrote), "num_tokens": len(wrote), **flat}
        (tmp_path / "trajectories" / f"step_{step:06d}.jsonl").write_text(json.dumps(line) + "\n")
    assert read_episodes(tmp_path) == [(3, 14), (3, 10)]


# Metrics of steps 8 and 9, in each of which one of 16 episodes takes 5 and 7 rounds, the others
# one; a round takes 0.1 s, an update 0.2, and all else 0.2 a step. A round is of 10 tokens.
EPISODES = [(1, 10)] * 7 * 16 + [(1, 10)] * 15 + [(5, 50)] + [(1, 10)] * 15 + [(7, 70)]
ROWS = [
    {
        "step": step,
        "train_tokens": 150 + 10 * rounds,
        "train_tokens_per_s": 5 * (150 + 10 * rounds),
        "decode_rows": 16 * 4 * rounds,
        "idle_rows": 4 * (16 * rounds - 15 - rounds),
        "stage_s": {"rollout": 0.1 * rounds, "train": 0.2},
    }
    for step, rounds in ((8, 5), (9, 7))
]


def test_a_synchronous_step_is_simulated_from_its_episodes_and_its_times():
    found = beside_simulation(LINES["synchronous, devices apart"], ROWS, {}, EPISODES, 2.0, {}, {})
    expected = {
        "s a round": 0.1,
        "live in it": 3.5,
        "s beside an update": 0.1,
        "s an update": 0.2,
        "s of the rest": 0.2,
        "s of parts": 0.0,
        "of it fixed": 0.0,
        "s to send one": 0.0,
        "rounds a step": 6.0,
        "simulated": 6.0,
        # 200 and 220 tokens in 2 s.
        "tokens/s, simulated": 210.0,
    }
    assert found == pytest.approx(expected)


def write_spans(workdir, process, step, begin_s, spans):
    trace = Trace(workdir, process)
    for stage, begin, end in spans:
        trace.write(stage, step, begin_s + begin, begin_s + end)


# A step of 1.5 s in two parts, of which one process plays and the other one trains. The gradients
# of the parts take 0.35 and 0.39 s, and the update 0.1 more.
PLAYED = [("rollout", 0.2, 0.5), ("dispatch", 0.5, 0.6), ("rollout", 0.6, 0.95)]
TRAINED = [
    ("rollout", 0.2, 0.5),
    ("dispatch", 0.5, 0.55),
    ("train", 0.55, 0.6),
    ("gradients", 0.6, 0.95),
    ("rollout", 0.6, 0.95),
    ("train", 0.95, 0.96),
    ("gradients", 0.96, 1.35),
    ("train", 1.0, 1.45),
]


def test_times_of_parts_are_those_of_the_traces(tmp_path):
    for step, begin_s in ((8, 0.0), (9, 1.5)):
        write_spans(tmp_path, 0, step, begin_s, PLAYED)
        write_spans(tmp_path, 1, step, begin_s, TRAINED)
    found = read_parts(tmp_path, trainer=1)
    assert found.keys() == {9}
    # Between the gradients before, which ended with 1.35, and the first round: 0.35 s.
    # The first part is there with 0.5 and done with 0.95, the second with 0.95 and 1.35.
    assert found[9].parts_s == pytest.approx((0.45, 0.4), abs=1e-4)
    expected = {"first_s": 0.3, "hand_s": 0.1, "rest_s": 0.35}
    rest = {name: getattr(found[9], name) for name in expected}
    assert rest == pytest.approx(expected, abs=1e-4)


def test_tokens_of_parts_are_those_of_the_groups_that_a_step_took_at_a_time(tmp_path):
    events = [
        {"event": "take", "version": 7, "groups": [1], "round": 5},
        {"event": "take", "version": 7, "groups": [0, 2], "round": 8},
        {"event": "trained", "version": 7, "step": 8, "round": 8},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    episodes = [(1, tokens) for tokens in (1, 2, 3, 4, 5, 6)]
    assert read_part_tokens(tmp_path, episodes, group_size=2) == {8: [7, 14]}


@pytest.mark.parametrize(("num_processes", "tokens"), [(1, 420 / 2.12), (2, 420 / 3.32)])
def test_a_streaming_step_is_simulated_from_the_times_of_its_parts(
    num_processes, tokens, monkeypatch
):
    """A round takes as long with one episode as with many here, and a part with any tokens.

    Seven of eight groups end with round 1, the last one with 5 and 7; a part is two groups.

    Three parts are there with 0.1 s, and are sent until 0.16, each for 0.02; they take 0.1 each,
    until 0.4. The last part is there with 0.56 and 0.76, and its gradients 0.1 later. With 0.3 for
    all else the steps take 0.96 and 1.16 s. In two processes the rounds until the first part count,
    which take 0.2 s. The second and the third one are sent behind the gradients before them and the
    round that is played until then, from 0.42 and 0.64 on. The last part is there with 1.06 and
    1.46, and the steps take 1.46 and 1.86.
    """
    monkeypatch.setattr(asynchrony, "SATURATION", math.inf)
    times = {"first_s": 0.2, "parts_s": (0.1,) * 4, "hand_s": 0.02, "rest_s": 0.3}
    parts = {step: PartTimes(**times) for step in (8, 9)}
    # Calls of the service in which it hands out the last episodes are no rounds.
    line, calls = LINES["streaming in 4 parts, apart"], {8: Rounds(1, 6, 0), 9: Rounds(1, 8, 0)}
    line = {**line, "processes": num_processes}
    # A step in parts has no speed of training.
    rows = [{name: row[name] for name in row if name != "train_tokens_per_s"} for row in ROWS]
    expected = {
        "s a round": 0.1 * num_processes,
        "live in it": 3.5 if num_processes == 1 else 16,
        "s beside an update": 0.1 * num_processes,
        "s an update": 0.0,
        "s of the rest": 0.3,
        "s of parts": 0.4,
        "of it fixed": 0.4,
        "s to send one": 0.02,
        "rounds a step": 6.0,
        "simulated": 6.0,
        "tokens/s, simulated": tokens,
    }
    sizes = {8: [40, 40, 40, 80], 9: [40, 40, 40, 100]}
    found = beside_simulation(line, rows, calls, EPISODES, 2.0, parts, sizes)
    assert found == pytest.approx(expected)
