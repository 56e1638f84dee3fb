# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peer: the reward, the columns of the table, our loss, and a few steps of our side.

TRL's side needs an environment of its own.
"""

import pytest

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.telemetry.episodes import read_trajectories


def test_reward_is_the_share_of_capital_letters_among_eight_characters_or_more():
    from benchmarks.peer.work import reward

    assert reward("") == reward("abc") == 0.0
    assert reward("ABCD", prompt="letters 0") == 0.5
    assert reward("ABCDEFGH") == reward("ABCDEFGHIJKL") == 1.0
    assert reward("ABCDEFGHij") == 0.8


def test_row_of_the_table_has_the_median_second_and_the_mean_curve():
    from benchmarks.peer.__main__ import curve

    rising = [step / 20 for step in range(20)]
    runs = [
        {"rewards": rising, "seconds": [3.0, 1.0, 2.0]},
        {"rewards": [0.5] * 20, "seconds": [9.0, 9.0]},
    ]
    row = curve("TRL", runs)
    assert (row["trainer"], row["s a step"], row["fastest"]) == ("TRL", 3.0, 1.0)
    # Tenths of two steps: the first run's last is 0.925, and its first 0.025.
    assert row["reward at the end"] == pytest.approx((0.925 + 0.5) / 2)
    assert row["2"] == pytest.approx((0.025 + 0.5) / 2)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    from benchmarks.peer.__main__ import write_task

    folder = tmp_path_factory.mktemp("peer")
    write_task(folder)
    return folder


@pytest.mark.slow
def test_loss_of_a_batch_is_the_mean_over_replies_of_clipped_terms(task):
    from benchmarks.peer.__main__ import compare_updates, our_updates

    # Both replies are clipped at every token: one was nearly impossible and is better than its
    # group, so that its ratio counts as 1.2; the other was certain, is worse, and counts as 0.8.
    batch = {
        "tokens": [[0, 1, 9, 5, 3, 0, 0], [1, 9, 2, 7, 8, 6, 3]],
        "attended": [[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
        "replied": [[1, 1, 0, 0], [1, 1, 1, 1]],
        "behaviour": [[-50.0] * 4, [0.0] * 4],
        "advantages": [1.0, -0.5],
    }
    [(loss, norm)] = our_updates(task, [batch])
    assert loss == pytest.approx((-1.2 + 0.8 * 0.5) / 2, rel=1e-6)
    assert norm == 0.0
    with pytest.raises(SystemExit, match="not the same update"):
        compare_updates(task, [batch | {"loss": -0.41, "norm": 1.0}])


@pytest.mark.slow
def test_our_side_plays_the_task_of_the_page(task):
    from benchmarks.peer import work
    from benchmarks.peer.__main__ import settings_of
    from benchmarks.staleness import run_config

    found = run_config(settings_of(task, 0, 3), task / "seed_0")
    assert len(found["rewards"]) == 3 and len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0.0
    played = read_trajectories(task / "seed_0/trajectories/step_000001.jsonl")
    prompts = [episode["messages"][0]["content"] for episode in played]
    assert {text: prompts.count(text) for text in prompts} == dict.fromkeys(work.PROMPTS, 8)
    tokenizer = load_tokenizer(task / "checkpoint")
    ends = (tokenizer.eos_token_id, *work.end_ids(tokenizer))
    earned = []
    for episode in played:
        # 12 ids of the prompt; the last is an end, or the reply is cut and earns nothing.
        ended = episode["token_ids"][-1] in ends
        assert ended or episode["wrote"].count("p") == work.MAX_TOKENS
        reply = tokenizer.decode(episode["token_ids"][12:-1])
        earned.append(work.reward(reply) if ended else 0.0)
    assert found["rewards"][0] == pytest.approx(sum(earned) / 64) and 0 < sum(earned) < 64
