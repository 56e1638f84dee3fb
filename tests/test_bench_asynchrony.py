# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of asynchronous training makes of a run's metrics and events."""

import json

import pytest

from benchmarks.asynchrony import LINES, beside_simulation, compile_excess_s, read_rounds


def row(train: float, dispatch: float, compile_s: float | None = None):
    more = {} if compile_s is None else {"compile_s": compile_s}
    return {"stage_s": {"train": train, "dispatch": dispatch}, **more}


def test_steps_with_new_programs_count_as_long_as_the_others_take():
    """The medians without the third are 2 and 0.2: it took 9 and 0.5 more, not only 7."""
    rows = [row(1, 0.1), row(2, 0.2), row(11, 0.7, 7.0), row(3, 0.3, 0.01)]
    assert compile_excess_s(rows) == pytest.approx(9.5)
    # Faster than the others: nothing is taken off.
    rows[2] = row(1.5, 0.7, 0.1)
    assert compile_excess_s(rows) == pytest.approx(0.5)
    assert compile_excess_s(rows[:2]) == 0.0


def test_rounds_are_those_before_the_step_took_its_groups_and_beside_its_update(tmp_path):
    events = [
        {"event": "open", "version": 0},
        {"event": "take", "step": 0, "groups": [0], "round": 5},
        {"event": "trained", "step": 1, "round": 7},
        {"event": "publish", "version": 1, "round": 7},
        {"event": "take", "step": 1, "groups": [1], "round": 11},
        {"event": "trained", "step": 2, "round": 11},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    assert read_rounds(tmp_path) == {1: (5, 2), 2: (4, 0)}
    assert read_rounds(tmp_path / "synchronous") == {}


def test_the_simulation_stands_beside_lines_that_it_has():
    assert set(beside_simulation(LINES["synchronous, devices apart"], [], {}, 1.0).values()) == {
        None
    }
