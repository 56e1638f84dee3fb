# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Kuhn poker: hidden cards, payoffs by hand, and the exploitability of known policies."""

import random
import re

import pytest

from benchmarks.kuhn import information_states, nash_conv
from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.games.kuhn_poker import KuhnPoker, kuhn_poker


def payoff(cards: tuple[int, int], moves: str) -> float:
    """Returns the winnings of the first player, by the rules alone."""
    if moves == "10" or moves == "010":
        return 1.0 if moves == "10" else -1.0
    stake = 1.0 if moves == "00" else 2.0
    return stake if cards[0] > cards[1] else -stake


def test_a_side_sees_its_own_card_and_the_moves_and_wins_by_the_rules():
    deals = set()
    for seed in range(200):
        environment, rng = KuhnPoker(opponent="self", seed=seed), random.Random(seed)
        start = check_start(environment.start())
        assert start.role == "first" and "first plays" not in start.text
        texts, moves, result = {"first": [start.text]}, "", None
        role, rewards = "first", {"first": 0.0, "second": 0.0}
        while result is None or not result.done:
            moves += environment.example_reply(rng)
            result = check_step(environment.step(moves[-1]))
            rewards[role] += result.reward
            for side, more in result.side_rewards.items():
                rewards[side] += more
            if not result.done:
                assert result.role and result.role != role
                role = result.role
                texts.setdefault(role, []).append(result.text)
        cards = tuple(int(re.findall(r"card is (\d)", texts[side][0])[0]) for side in texts)
        assert len(set(cards)) == 2, "the two have different cards"
        name = f"kuhn_poker. you play second. your card is {cards[1]}. 0 passes, 1 bets."
        assert texts["second"] == [f"{name} first plays {moves[0]}."]
        assert texts["first"][1:] == ["1"] * (moves[:2] == "01")
        won = payoff(cards, moves)
        assert rewards == {"first": won, "second": -won}
        assert result.metrics == {"won_as_first": won}
        deals.add((cards, moves))
    assert len({cards for cards, _ in deals}) == 6 and len({moves for _, moves in deals}) == 5


def test_a_random_opponent_plays_the_other_side():
    outcomes = set()
    for seed in range(40):
        environment = KuhnPoker(seed=seed, index=seed % 2)
        start = check_start(environment.start())
        assert start.role == ("first", "second")[seed % 2]
        assert (" first plays " in start.text) == bool(seed % 2)
        result = check_step(environment.step("1"))
        assert result.done, "a bet is called or passed"
        assert result.metrics == {f"won_as_{start.role}": result.reward}
        outcomes.add((start.role, result.reward, result.stop_reason))
    assert {reward for _, reward, _ in outcomes} == {-2.0, 1.0, 2.0}
    illegal = KuhnPoker(illegal_reward=-3.0)
    illegal.start()
    last = check_step(illegal.step("2"))
    assert (last.reward, last.stop_reason, last.metrics) == (-3.0, "illegal", {"illegal": 1.0})
    with pytest.raises(RuntimeError, match="after the end"):
        illegal.step("1")
    assert KuhnPoker(mask_illegal=True).start().choices == ("0", "1")


def test_the_twelve_information_states_have_conversations_of_their_own():
    states = information_states()
    assert len(states) == len(set(states.values())) == 12
    assert states["1pb"] == (
        ("environment", "kuhn_poker. you play first. your card is 1. 0 passes, 1 bets."),
        ("policy", "0"),
        ("environment", "1"),
    )
    (only,) = states["2b"]
    assert only[1].endswith("you play second. your card is 2. 0 passes, 1 bets. first plays 1.")
    # What the game can come to is what an episode says.
    environment = KuhnPoker(opponent="self", seed=1)
    start, answer = environment.start(), environment.step("0")
    assert {(("environment", text),) for text in (start.text, answer.text)} < set(states.values())


def equilibrium(alpha: float) -> dict[str, float]:
    """Kuhn's equilibria (1950): the first player bets the 0 with probability alpha <= 1/3."""
    first = {"0": alpha, "1": 0.0, "2": 3 * alpha, "0pb": 0.0, "1pb": alpha + 1 / 3, "2pb": 1.0}
    second = {"0b": 0.0, "1b": 1 / 3, "2b": 1.0, "0p": 1 / 3, "1p": 0.0, "2p": 1.0}
    return {**first, **second}


def test_nash_conv_by_hand():
    for alpha in (0.0, 0.2, 1 / 3):
        assert nash_conv(equilibrium(alpha)) == pytest.approx(0.0, abs=1e-12)
    # Always passing (a bet too): a best response bets always and wins 1 a deal, on either side.
    passes = dict.fromkeys(information_states(), 0.0)
    assert nash_conv(passes) == pytest.approx(2.0)
    # Uniform play: OpenSpiel's test has 11/12.
    assert nash_conv(dict.fromkeys(passes, 0.5)) == pytest.approx(11 / 12)
    assert kuhn_poker().num_players() == 2
