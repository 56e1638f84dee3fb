# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
import io

import pytest
from rich.console import Console

from earl_jax.telemetry.progress import Progress

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _run(num_steps, seconds_per_step, stop=None):
    stream, clock = io.StringIO(), Clock()
    with Progress(num_steps, stream, clock=clock) as progress:
        for step in range(1, (stop or num_steps) + 1):
            clock.now += seconds_per_step
            progress.update({"step": step, "reward_mean": step / 100})
    return stream.getvalue().splitlines()


def test_plain_lines_are_few_with_the_first_and_the_last():
    lines = _run(num_steps=300, seconds_per_step=1.0)
    assert 25 <= len(lines) <= 40
    assert lines[0] == "step   1/300  reward +0.010"
    assert lines[-1] == "step 300/300  reward +3.000"


def test_a_short_run_prints_every_step_and_a_slow_one_once_in_five_minutes():
    assert len(_run(num_steps=5, seconds_per_step=1.0)) == 5
    assert len(_run(num_steps=3000, seconds_per_step=300.0, stop=10)) == 10


def test_a_plain_line_says_what_matters():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, stream, clock=clock)
    progress.update({"step": 0, "eval": {"win": 0.5, "illegal": 0.125, "draw": 0.1}})
    for step in (1, 2):
        clock.now += 10.0
        progress.update(
            {
                "step": step,
                "reward_mean": 0.25,
                "rollout_tokens_per_s": 12345.0,
                "rollout_mesh": "data=8",
                "train_mesh": "fsdp=8",
            }
        )
    # One step took ten seconds and two are left.
    assert stream.getvalue().splitlines()[-1] == (
        "step 2/4  reward +0.250  eval@0 win 0.5, illegal 0.125, draw 0.1  12.3k tok/s  "
        "rollout data=8  train fsdp=8  20 s left"
    )


REWARD, WIN = {"reward_mean": 0.5}, {"eval": {"win": 1.0}}


@pytest.mark.parametrize(
    ("num_steps", "updates", "lines"),
    [
        # What is done otherwise than the config says.
        (
            9,
            [{"step": 1, "train_mesh": "fsdp=8", "plan": "training in 2 micro-batches"}],
            ["step 1/9  train fsdp=8  (training in 2 micro-batches)"],
        ),
        (
            9,
            [{"step": n, "failed_share": 0.125 * (n == 1), **REWARD} for n in (1, 2)],
            ["step 1/9  reward +0.500  12.5% failed", "step 2/9  reward +0.500  0 s left"],
        ),
        # The last step's line comes once, with its evaluation.
        (
            2,
            [{"step": 1, **REWARD}, {"step": 2, **REWARD}, {"step": 2, **WIN}],
            ["step 1/2  reward +0.500", "step 2/2  reward +0.500  eval@2 win 1"],
        ),
        # Stopped by a signal, or an error, behind an evaluation.
        (
            9,
            [{"step": 1, **REWARD}, {"step": 1, **WIN}],
            ["step 1/9  reward +0.500", "step 1/9  eval@1 win 1"],
        ),
    ],
)
def test_lines_of_a_run(num_steps, updates, lines):
    stream = io.StringIO()
    with Progress(num_steps, stream, clock=Clock()) as progress:
        for update in updates:
            progress.update(update)
    assert stream.getvalue().splitlines() == lines


def test_plain_notes_are_printed_at_once_and_an_evaluation_after_the_last_step_is_shown():
    stream = io.StringIO()
    with Progress(1, stream) as progress:
        progress.update({"step": 1})
        progress.note("step 1: rollout data=8 -> data=4,tensor=2 [why]")
        assert stream.getvalue().endswith("* step 1: rollout data=8 -> data=4,tensor=2 [why]\n")
        progress.update({"step": 1, "eval": {"win": 1.0}})
    assert stream.getvalue().splitlines()[-1] == "step 1/1  eval@1 win 1"


def test_a_file_gets_no_escape_sequences_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "\x1b" not in "".join(_run(num_steps=3, seconds_per_step=1.0))


def _terminal():
    return Console(
        file=io.StringIO(), force_terminal=True, width=100, color_system=None, _environ={}
    )


def test_a_terminal_shows_one_display_and_notes_above_it():
    console = _terminal()
    with Progress(10, console=console) as progress:
        progress.update(
            {"step": 4, "reward_mean": 0.5, "rollout_mesh": "data=8", "train_mesh": "fsdp=8"}
        )
        progress.update({"step": 4, "eval": {"win": 0.75, "illegal": 0.0}})
        progress.note("switched [rollout]")
    text = console.file.getvalue()
    for part in ("step 4/10", "reward +0.500", "eval@4 win 0.75, illegal 0", "rollout data=8"):
        assert part in text
    assert text.index("* switched [rollout]") < text.rindex("step 4/10")


def test_an_exception_gives_the_terminal_back():
    console = _terminal()
    with pytest.raises(RuntimeError, match="boom"), Progress(10, console=console) as progress:
        progress.update({"step": 1})
        raise RuntimeError("boom")
    text = console.file.getvalue()
    assert text.count(HIDE_CURSOR) == 1
    assert text.rindex(SHOW_CURSOR) > text.index(HIDE_CURSOR)
    progress.close()
    assert console.file.getvalue() == text
