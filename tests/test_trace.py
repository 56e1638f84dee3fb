# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The trace of a run: valid trace events whose spans nest and cover its steps."""

import itertools
import json
import time

import jax.numpy as jnp
import pytest

from earl_jax.telemetry.timing import StageTimer
from earl_jax.telemetry.trace import TRACKS, Trace, read_trace, trace_file
from earl_jax.training import train
from tests.support.runs import steps_of
from tests.support.settings import make_config
from tests.support.wanderers import WANDERERS

SETTINGS = {
    **WANDERERS,
    "num_steps": 2,
    "devices": {**WANDERERS["devices"], "num_rollout": 4},
    "log": {"trace": True},
}


def spans(workdir, track: str = ""):
    """The spans of a run's first process, in all tracks or one, by their begins."""
    events = [event for event in read_trace(trace_file(workdir)) if event["ph"] == "X"]
    own = [event for event in events if track in ("", TRACKS[event["tid"] - 1])]
    return sorted(own, key=lambda event: (event["ts"], -event["dur"]))


def end(span) -> int:
    return span["ts"] + span["dur"]


def names(found):
    return [(span["name"], span["args"]["step"]) for span in found]


def assert_nested(found):
    """Each span of a track begins behind those before it, or ends within one that it began in."""
    open_ends = []
    for span in found:
        while open_ends and open_ends[-1] <= span["ts"]:
            open_ends.pop()
        assert not open_ends or end(span) <= open_ends[-1], span
        open_ends.append(end(span))


def covered(found) -> int:
    """Microseconds in which there is a span."""
    total = until = 0
    for span in found:
        total += max(0, end(span) - max(until, span["ts"]))
        until = max(until, end(span))
    return total


def test_spans_are_events_a_line_and_have_tracks_by_stage(tmp_path):
    trace = Trace(tmp_path)
    before = time.time()
    timer = StageTimer(trace, step=3)
    with timer("train"), timer("overlap"):
        time.sleep(0.02)
    text = trace_file(tmp_path).read_text()
    # As it is in the file; a reader adds the bracket.
    events = json.loads(text.removesuffix(",\n") + "]")
    assert len(text.splitlines()) == 1 + len(events)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == list(TRACKS)
    overlap, whole = (event for event in events if event["ph"] == "X")
    assert names([overlap, whole]) == [("overlap", 3), ("train", 3)]
    assert (tracks[overlap["tid"]], tracks[whole["tid"]]) == ("play", "train")
    assert whole["ts"] <= overlap["ts"] and end(overlap) <= end(whole)
    # Begin and end are whole microseconds, of a clock in steps of a quarter of one.
    assert overlap["dur"] == pytest.approx(1e6 * timer.seconds["overlap"], abs=2)
    assert overlap["dur"] >= 20_000
    # On the clock of the wall, which other processes have too.
    assert abs(overlap["ts"] - 1e6 * before) < 60e6


def test_a_run_that_goes_on_appends_behind_the_last_whole_line(tmp_path):
    Trace(tmp_path).write("rollout", 1, 1.0, 2.0)
    path = trace_file(tmp_path)
    path.write_text(path.read_text() + '{"name": "train", "ph"')
    assert names(spans(tmp_path)) == [("rollout", 1)], "what was cut is left out"
    Trace(tmp_path).write("train", 1, 2.0, 3.0)
    assert names(spans(tmp_path)) == [("rollout", 1), ("train", 1)]
    assert len(read_trace(path)) == 1 + len(TRACKS) + 2


def test_each_process_has_a_file_and_a_number(tmp_path):
    for process in (0, 1):
        Trace(tmp_path, process).write("rollout", 1, 1.0, 2.0)
    numbers = [
        {event["pid"] for event in read_trace(tmp_path / name)}
        for name in ("trace.json", "trace.1.json")
    ]
    assert numbers == [{0}, {1}]


def wait_for_spans(workdir, track: str, number: int):
    """The spans of a track when there are as many: a thread writes them."""
    deadline = time.monotonic() + 60
    while len(found := spans(workdir, track)) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_computations_that_nobody_waits_for_follow_each_other(tmp_path):
    timer = StageTimer(Trace(tmp_path), step=3)
    # All are begun at once, 20 ms ago.
    start_s = time.perf_counter() - 0.02
    for number in (1, 2, 3):
        timer.count_until_ready("gradients", start_s, jnp.full((), number))
    found = wait_for_spans(tmp_path, "gradients", 3)
    assert names(found) == [("gradients", 3)] * 3
    assert all(end(one) <= other["ts"] for one, other in itertools.pairwise(found))
    computed_s = sum(span["dur"] for span in found) / 1e6
    assert computed_s >= 0.02
    assert not timer.seconds, "they are no stages"
    # A moment in which nothing was computed does not count, and the stage's last block does.
    time.sleep(0.02)
    with timer("train"):
        time.sleep(0.02)
    block_s = timer.seconds["train"]
    assert timer.busy_s("train") == pytest.approx(computed_s + block_s, abs=1e-3)
    # What is computed within the block counts once.
    with timer("train"):
        timer.count_until_ready("gradients", time.perf_counter(), jnp.full((), 4))
        time.sleep(0.02)
    block_s = timer.seconds["train"] - block_s
    assert timer.busy_s("train") == pytest.approx(computed_s + block_s, abs=1e-3)


@pytest.mark.slow
def test_spans_of_a_synchronous_run_are_its_stages_and_cover_its_steps(tmp_path):
    train(make_config(SETTINGS), tmp_path / "run")
    lines = steps_of(tmp_path / "run")
    in_stages = whole = 0.0
    for line in lines:
        own = [span for span in spans(tmp_path / "run") if span["args"]["step"] == line["step"]]
        sums = dict.fromkeys(line["stage_s"], 0.0)
        for span in own:
            sums[span["name"]] += span["dur"] / 1e6
        assert sums == pytest.approx(line["stage_s"], abs=1e-4)
        assert_nested(own)
        step = max(map(end, own)) - own[0]["ts"]
        # A short step may have a pause of the machine between its stages.
        assert covered(own) > 0.5 * step
        in_stages, whole = in_stages + covered(own), whole + step
    # What is between the stages takes little of the steps.
    assert in_stages > 0.9 * whole
    assert {span["args"]["step"] for span in spans(tmp_path / "run")} == {1, 2}


@pytest.mark.slow
def test_rounds_beside_updates_and_gradients_of_parts_have_their_spans(tmp_path):
    asynchrony = {"asynchrony": {"max_staleness": 1, "parts": 2}}
    train(make_config({**SETTINGS, **asynchrony}), tmp_path / "run")
    # Two parts of each of two steps.
    gradients = wait_for_spans(tmp_path / "run", "gradients", 4)
    assert names(gradients) == [("gradients", step) for step in (1, 1, 2, 2)]
    play, trained = (spans(tmp_path / "run", track) for track in ("play", "train"))
    for found in (play, trained, gradients):
        assert_nested(found)
    beside = [span for span in play if span["name"] == "overlap"]
    assert beside
    for span in beside:
        (update,) = [
            each
            for each in trained
            if each["name"] == "train" and each["ts"] <= span["ts"] and end(span) <= end(each)
        ]
        assert update["args"] == span["args"]
        # The update waits for the gradients of all parts.
        assert all(end(g) <= end(update) for g in gradients if g["args"] == update["args"])
    # A step's first part goes to the trainer before its second one is played.
    for step in (1, 2):
        first, _ = (span for span in gradients if span["args"]["step"] == step)
        rounds = [s for s in play if (s["name"], s["args"]["step"]) == ("rollout", step)]
        assert first["ts"] < rounds[-1]["ts"]
