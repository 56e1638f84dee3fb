# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The trail against walks that were paid by hand."""

import random

import pytest

from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.examples import play_example
from earl_jax.envs.games.trail import Trail
from tests.support.episodes import game_corpus


def trail(
    seed: int = 0, *, index: int = 0, mask_illegal: bool = False, num_steps: int = 4
) -> Trail:
    return Trail(
        num_stones=5, num_steps=num_steps, seed=seed, index=index, mask_illegal=mask_illegal
    )


def walk(environment: Trail, right_steps: int) -> tuple[str, list[str]]:
    """The stone to go to behind so many right steps, and all that was said on the way."""
    content = [check_start(environment.start()).text]
    for _ in range(right_steps):
        result = check_step(environment.step(content[-1].split(" ")[-1]))
        assert (result.reward, result.done) == (0.0, False)
        content.append(result.text)
    return content[-1].split(" ")[-1], content


def test_the_words():
    stone, content = walk(trail(), 3)
    assert content[0].startswith("a trail of 5 stones, 0 to 4. go to ")
    assert all(text in trail().all_replies() for text in (*content[1:], stone))


# The share of four steps, by hand.
@pytest.mark.parametrize(("right_steps", "reward"), [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wrong_step_is_paid_for_the_right_ones_before_it(right_steps, reward, seed):
    environment = trail(seed)
    stone, _ = walk(environment, right_steps)
    wrong = str((int(stone) + 1) % 5)
    result = check_step(environment.step(wrong))
    assert (result.reward, result.done, result.stop_reason) == (reward, True, "loss")
    assert result.detail == f"went to {wrong} and not to {stone}"
    assert environment.legal_replies() == []


def test_the_whole_trail_is_paid_in_full():
    environment = trail()
    stone, _ = walk(environment, 3)
    result = check_step(environment.step(stone))
    assert (result.reward, result.done, result.stop_reason) == (1.0, True, "win")


@pytest.mark.parametrize("reply", ["5", "-1", " 1", "01", "", "one", "x" * 999])
def test_reply_that_names_no_stone_is_illegal(reply):
    environment = trail()
    walk(environment, 2)
    result = check_step(environment.step(reply))
    assert (result.reward, result.done, result.stop_reason) == (-1.0, True, "illegal")
    assert len(result.detail) < 120


def test_a_trail_is_that_of_its_seed_and_no_other():
    trails = [tuple(walk(trail(seed), 3)[1]) for seed in range(20)]
    assert trails == [tuple(walk(trail(seed), 3)[1]) for seed in range(20)]
    assert len(set(trails)) > 15


def test_example_steps_are_right_half_the_time_and_by_chance():
    # Of 2000 walks 0.5 + 0.5 / 5 begin with a right step: 1200, with a standard deviation of 22.
    rng = random.Random(0)
    walks = [play_example(trail(seed), rng) for seed in range(2000)]
    assert abs(sum(w.reward > 0 for w in walks) - 1200) < 90
    assert {w.stop_reason for w in walks} == {"win", "loss"}


def test_the_choices_are_all_stones_where_others_are_masked():
    environment = trail(mask_illegal=True)
    start = environment.start()
    assert start.choices == tuple("01234") == tuple(environment.legal_replies())
    assert environment.step(start.text[-1]).choices == tuple("01234")
    assert trail().start().choices == ()


def test_calls_out_of_order_are_errors():
    environment = trail()
    assert environment.legal_replies() == []
    with pytest.raises(RuntimeError, match="before start"):
        environment.step("0")
    stone, _ = walk(environment, 0)
    with pytest.raises(RuntimeError, match="twice"):
        environment.start()
    environment.step("no stone")
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step(stone)


def test_the_corpus_has_every_stone():
    corpus = game_corpus(20, seed=3, make=trail)
    assert corpus == game_corpus(20, seed=3, make=trail)
    assert corpus[:5] == list("01234")
    assert sum("a trail of 5 stones" in text for text in corpus) == 20


def test_trails_lengthen_with_the_tasks_of_a_run():
    steps = {
        index: Trail(num_steps=6, first_steps=4, longer_every=10, index=index).num_steps
        for index in (0, 9, 10, 19, 20, 10_000)
    }
    assert steps == {0: 4, 9: 4, 10: 5, 19: 5, 20: 6, 10_000: 6}
    assert trail(index=10_000).num_steps == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_steps": 4}, "first_steps is 4, and without longer_every it has no effect"),
        ({"first_steps": 61, "longer_every": 10}, "first_steps is 61; it must be at most"),
        ({"first_steps": 0, "longer_every": 10}, "first_steps is 0; it must be at least 1"),
        ({"longer_every": -1}, "longer_every is -1; it must be at least 0"),
        ({"num_stones": 1}, "num_stones is 1; it must be at least 2"),
        ({"num_steps": 0}, "num_steps is 0; it must be at least 1"),
        ({"mask_illegal": True, "illegal_reward": -2.0}, "no effect with mask_illegal"),
    ],
)
def test_trails_that_cannot_be_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Trail(**fields)
