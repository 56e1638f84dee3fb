# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reward for answers to questions of mathematics."""

import json
import sys
import threading

import pytest

from earl_jax.envs import math_answer
from earl_jax.envs.environment import check_step
from earl_jax.envs.event_loop import settle
from earl_jax.envs.math_answer import correct
from earl_jax.envs.processes import sandbox, scorers
from earl_jax.envs.processes.scorers import Scorer
from earl_jax.envs.single_turn import SingleTurn
from earl_jax.settings.errors import InputError
from tests.support import run_python


@pytest.mark.parametrize(
    ("answer", "reply", "equal", "answered"),
    [
        ("1/2", r"It is \boxed{\frac{1}{2}}.", 1, 1),
        (r"\frac{1}{2}", "0.5", 1, 1),
        (0.5, "$1/2$", 1, 1),
        (42, "17 and 25 are 42.", 1, 1),
        (42, "42 is wrong, it is 43.", 0, 1),
        ("42", r"First 42, then \boxed{41}", 0, 1),
        ("$x^2$", r"$x \cdot x$", 1, 1),
        (r"\{1, 2\}", r"$\{2, 1\}$", 1, 1),
        ("1,000", "1000", 1, 1),
        (1e-5, r"\boxed{0.00001}", 1, 1),
        (1e-5, "$10^{-5}$", 1, 1),
        (1e22, "$10^{22}$", 1, 1),
        (1e-5, r"\boxed{e-5}", 0, 1),
        ("-3", "I do not know", 0, 0),
        ("-3", "", 0, 0),
        ("-3", '"\n\udc80 $-3$', 1, 1),
    ],
)
def test_a_reply_is_paid_if_its_answer_is_equal(answer, reply, equal, answered):
    env = SingleTurn(row={"prompt": "?", "answer": answer, "source": "a"}, reward=correct)
    end = check_step(settle(env.step(reply)))
    assert (end.reward, end.metrics) == (equal, {"answered": answered})


def test_comparison_beyond_its_time_or_memory_limit_is_not_equal():
    for reply in ("$9^{9^{9^{9}}}$", "$9^{9^9}$"):
        assert correct(reply, answer="2")["reward"] == 0.0
    # The processes are there for the next.
    assert [correct("2", answer="2")["reward"] for _ in range(4)] == [1.0] * 4


def test_a_process_that_ends_is_replaced():
    idle = math_answer._compare._idle
    for _ in range(2):
        process = idle.get()
        if process is not None:
            process.kill()
        idle.put(process)
    assert [correct("2", answer="2")["reward"] for _ in range(4)] == [1.0] * 4


def test_a_process_that_does_not_start_is_an_outage(monkeypatch, tmp_path):
    """As where a library cannot be imported: no reply is wrong for that."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ConnectionError, match="the process for math does not start"):
        Scorer("math")("2", "2")


def test_an_answer_is_scored_where_nothing_can_be_reached(tmp_path):
    """Neither files nor other processes, whatever a library does with an answer."""
    path = tmp_path / "new"
    evil = {
        "1 / 2": "0.5",
        "[True, False, True]": "[true, false, true]",
        # What is no score, or was written by what is evaluated.
        "1e6": "null",
        "'a'": "null",
        "[True]": "null",
        "[__import__('os').write(f, b'1.0\\n1.0') for f in range(3, 9)]": "null",
        "[__import__('os').write(f, bytes([255])) for f in range(3, 9)]": "null",
        f"open({str(path)!r}, 'w')": "null",
        "__import__('os').fork()": "null",
        f"__import__('os').listdir({str(tmp_path)!r})": "null",
        "9 ** 9 ** 9": "null",
    }
    limits = {"paths": sandbox.readable_paths(), "seconds": 1, "memory_bytes": 2**32}
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('child', sys.argv[1])\n"
        "child = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(child)\n"
        "limits, confine = json.loads(sys.argv[2]), child._sandbox().confine\n"
        "for text in json.loads(sys.argv[3]):\n"
        "    print(child._in_a_fork(lambda: eval(text), limits, confine), flush=True)\n"
    )
    arguments = (scorers._scorer_child.__file__, json.dumps(limits), json.dumps([*evil]))
    found = run_python("-c", code, *arguments)
    assert found.stdout.splitlines() == [*evil.values()], found.stderr
    assert not path.exists()


def test_many_at_a_time_are_answered_each_with_its_own():
    found = {}

    def ask(number: int) -> None:
        found[number] = correct(f"it is {number}", answer=number % 7)["reward"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: float(number < 7) for number in range(20)}


def test_a_row_whose_answer_cannot_be_read_is_an_error():
    with pytest.raises(InputError, match="the answer '' of a row is none that math-verify can"):
        correct("1", answer="")
    for answer in (None, True, [1], float("nan")):
        with pytest.raises(InputError, match="the answer of a row is .*; it must be"):
            correct("1", answer=answer)


def test_without_math_verify_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="math-verify is not installed; uv sync --extra math"):
        correct("1", answer="1")
