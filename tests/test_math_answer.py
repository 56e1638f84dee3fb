# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The reward for answers to questions of mathematics."""

import threading

import pytest

from earl_jax.envs import math_answer
from earl_jax.envs.environment import check_step
from earl_jax.envs.event_loop import settle
from earl_jax.envs.math_answer import correct
from earl_jax.envs.single_turn import SingleTurn
from earl_jax.settings.errors import InputError


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
        ("-3", "I do not know", 0, 0),
        ("-3", "", 0, 0),
        ("-3", '"\n\udc80 $-3$', 1, 1),
    ],
)
def test_a_reply_is_paid_if_its_answer_is_equal(answer, reply, equal, answered):
    env = SingleTurn(row={"prompt": "?", "answer": answer, "source": "a"}, reward=correct)
    end = check_step(settle(env.step(reply)))
    assert (end.reward, end.metrics) == (equal, {"answered": answered})


def test_what_takes_too_long_or_too_much_memory_is_not_equal(monkeypatch):
    monkeypatch.setattr(math_answer, "_PATIENCE_S", 3.0)
    assert correct("$9^{9^{9^{9}}}$", answer="2")["reward"] == 0.0
    # The processes are there for the next.
    assert [correct("2", answer="2")["reward"] for _ in range(4)] == [1.0] * 4


def test_a_process_that_ends_is_replaced():
    for _ in range(2):
        process = math_answer._idle.get()
        if process is not None:
            process.kill()
        math_answer._idle.put(process)
    assert [correct("2", answer="2")["reward"] for _ in range(4)] == [1.0] * 4


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


def test_without_math_verify_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="math-verify is not installed; uv sync --extra math"):
        correct("1", answer="1")
