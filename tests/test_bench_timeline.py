# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The spans and steps that the picture of a run shows, of events and metrics made by hand."""

import pytest

from benchmarks.timeline import spans_of, steps_shown


def event(name: str, tid: int, step: int, begin_s: float, end_s: float):
    times = {"ts": int(1e6 * (100 + begin_s)), "dur": int(1e6 * (end_s - begin_s))}
    return {"name": name, "ph": "X", "pid": 0, "tid": tid, "args": {"step": step}, **times}


EVENTS = [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "play"}},
    event("rollout", 1, 1, 0, 1),
    event("rollout", 1, 2, 2, 4),
    event("train", 2, 2, 4, 5.5),
    event("gradients", 3, 2, 3, 4.5),
    event("select", 2, 2, 1.5, 2),
    event("rollout", 1, 3, 6, 7),
]


def test_spans_are_those_of_the_steps_from_the_first_of_them_on():
    found = spans_of(EVENTS, 2, 2)
    assert [(s.stage, s.row, s.begin_s, s.end_s) for s in found] == [
        # Below the update that waits for them.
        ("gradients", "train", 1.5, 3.0),
        ("rollout", "play", 0.5, 2.5),
        ("train", "train", 2.5, 4.0),
        ("select", "train", 0.0, 0.5),
    ]
    assert len(spans_of(EVENTS, 1, 3)) == 6


def rows(*compiled: int):
    return [{"step": n, **({"compile_s": 1.0} if n in compiled else {})} for n in range(1, 21)]


def test_steps_that_are_shown_are_the_first_calm_ones_behind_the_warm_up():
    assert steps_shown([rows(1, 2), rows(3)]) == (8, 11)
    assert steps_shown([rows(1, 2, 9), rows(3, 11)]) == (12, 15)
    assert steps_shown([rows(*range(8, 17)), rows()]) == (17, 20)
    with pytest.raises(SystemExit, match="without a new program"):
        steps_shown([rows(11), rows(14, 17, 20)])
