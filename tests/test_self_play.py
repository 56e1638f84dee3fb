# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Self-play: a policy plays both sides, each with its own messages, rewards and role.

Its rollouts are in test_samples.py, its credit in test_advantages.py.
"""

import random

import numpy as np
import pytest

from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.examples import example_ids, play_example
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.loop import rl_step
from earl_jax.run.build import build_run
from tests.support.episodes import renderer
from tests.support.placements import TINY, begin
from tests.support.settings import make_config


def test_hand_played_self_play():
    """x takes 4, 3 and 5; o, which hears of each move once, is not told that it lost."""
    environment = BoardGame(opponent="self", seed=0, index=1)
    start = check_start(environment.start())
    assert (start.role, start.text) == ("x", "tic_tac_toe. you play x. moves are 0 to 8.")
    assert start.metrics == dict.fromkeys(("draw", "illegal", "win_as_x", "win_as_o"), 0.0)
    results = [check_step(environment.step(reply)) for reply in "40315"]
    opening = "tic_tac_toe. you play o. moves are 0 to 8. x plays 4."
    assert [result.text for result in results] == [opening, "0", "3", "1", ""]
    assert [result.role for result in results] == ["o", "x", "o", "x", ""]
    last = results[-1]
    assert (last.reward, last.side_rewards) == (1.0, {"o": -1.0})
    assert (last.stop_reason, last.metrics) == ("win_as_x", {"win_as_x": 1.0})
    # The other side does not earn what an illegal move costs.
    environment = BoardGame(opponent="self", illegal_reward=-2.0)
    environment.start()
    environment.step("4")
    last = check_step(environment.step("4"))
    assert (last.reward, last.side_rewards, last.stop_reason) == (-2.0, {}, "illegal")


def test_a_side_that_moves_again_is_prompted_again_and_the_other_sees_all_moves():
    """mancala gives a side that ends in its own store another move."""
    again = several = 0
    for seed in range(5):
        environment, rng = BoardGame(game="mancala", opponent="self"), random.Random(seed)
        role, untold = environment.start().role, []
        while True:
            reply = environment.example_reply(rng)
            result = check_step(environment.step(reply))
            if result.done:
                break
            untold.append(reply)
            if not result.role:
                assert result.text == "again"
                again += 1
                continue
            assert result.role != role and result.text.rstrip(".").endswith(" ".join(untold))
            several += len(untold) > 1
            role, untold = result.role, []
    assert again and several


def test_an_example_of_self_play_is_a_conversation_for_each_side():
    example = play_example(BoardGame(opponent="self"), random.Random(1))
    x, o = example.conversations
    assert (len(x), len(o)) == (10, 8), "nine moves"
    assert {*x, *o} == set(example.turns)
    ids, turn_ids = example_ids(example, renderer(), side=3)
    expected = [*renderer().first(o[0][1])]
    for author, text in o[1:]:
        expected += renderer().reply(text) if author == "policy" else renderer().answer(text)
    assert ids == expected and max(turn_ids) == 4


SELF_PLAY = {
    "model": TINY,
    "env": {"args": {"opponent": "self", "mask_illegal": True}},
    "rollout": {"num_slots": 8, "episodes_per_step": 16, "context_buckets": (64, 512)},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    "algorithm": "spiral",
    "train": {"ratio": "model", "micro_batches": 2, "sft_steps": 1},
}


@pytest.mark.slow
def test_a_run_of_spiral_in_self_play():
    """Its averages are those of both roles, from the rewards of their own turns."""
    run = build_run(make_config(SELF_PLAY))
    placement, position = begin(run)
    position, record = rl_step(run, placement, position)
    sums: dict[str, list[float]] = {}
    for outcome in record.outcomes:
        roles = outcome.turn_roles or ("x",) * len(outcome.turn_rewards)
        for role in set(roles):
            own = [r for r, side in zip(outcome.turn_rewards, roles, strict=False) if side == role]
            returns = np.cumsum(own[::-1])
            if own:
                sums.setdefault(role, []).append(returns.mean())
    assert set(sums) == {"x", "o"}
    assert position.averages == {role: pytest.approx(np.mean(v)) for role, v in sums.items()}
    assert np.isfinite(record.metrics()["loss"])
    assert record.metrics()["logprob_mismatch_max"] < 1e-3
