# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The sentences about what a rule has cost, by hand-computed values."""

import pytest

from earl_jax.telemetry.staleness import staleness_words


def words_of(rule: str, steps: list[dict], *, bound: int = 1) -> list[str]:
    config = {"asynchrony": {"rule": rule, "max_staleness": bound}, "rollout": {"group_size": 2}}
    return staleness_words(config, steps)


def test_dropped_groups_are_reported_with_the_bias_in_lengths():
    """16 episodes were trained on with 160 tokens, 10 each; 4 were dropped with 60, 15 each."""
    steps = [
        {"step": 1, "episodes": 8, "staleness_tokens": [80]},
        {
            "step": 2,
            "episodes": 8,
            "staleness_tokens": [50, 30],
            "stale_episodes": 4,
            "stale_tokens": 60,
        },
    ]
    assert words_of("drop", steps) == [
        "dropped 4 of 20 episodes as too old (60 tokens, 50% longer than those trained on)"
    ]
    assert words_of("drop", steps[:1]) == ["dropped none of 8 episodes"]
    # Of 1,500 tokens each, they would be 100% longer than episodes of 750.
    long = [{"step": 1, "episodes": 2, "staleness_tokens": [0, 1500], "stale_episodes": 2}]
    assert words_of("drop", [{**long[0], "stale_tokens": 3000}]) == [
        "dropped 2 of 4 episodes as too old (3,000 tokens, 100% longer than those trained on)"
    ]
    assert words_of("drop", [{**long[0], "stale_tokens": 600}]) == [
        "dropped 2 of 4 episodes as too old (600 tokens, 60% shorter than those trained on)"
    ]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        # Each step trains on 6 episodes of 10 tokens: in the first a quarter of 8 failed; in the
        # second 3 groups of 2 were trained on, one was left out and one given up for another, so
        # that 2 of 5 are not kept. The dropped ones have 11 tokens.
        (
            {"failed_share": 0.25, "staleness_tokens": [60]},
            {"dropped_groups": 0.4, "refilled_groups": 1, "staleness_tokens": [0, 60]}
            | {"stale_episodes": 2, "stale_tokens": 22},
            "dropped 2 of 18 episodes as too old (22 tokens, 10% longer than those trained on)",
        ),
        # Of 8 groups in two steps 2 were taken again: 12 episodes were played, and 2 dropped.
        (
            {"staleness_tokens": [80]},
            {"reused_groups": 2, "staleness_tokens": [40, 40]}
            | {"stale_episodes": 2, "stale_tokens": 24},
            "dropped 2 of 14 episodes as too old (24 tokens, 20% longer than those trained on)",
        ),
    ],
    ids=["left out", "again"],
)
def test_dropped_episodes_are_compared_with_those_that_were_played_and_count(first, second, words):
    steps = [{"step": step, "episodes": 8, **row} for step, row in enumerate((first, second), 1)]
    assert words_of("drop", steps) == [words]


def test_the_overshoot_of_admission_is_reported():
    """Lags 0 to 4: 50, 20, 10, 0 and 20 tokens; beyond 1 are 30, and beyond 2 are 20."""
    steps = [
        {"step": 1, "staleness_tokens": [40, 20]},
        {"step": 2, "staleness_tokens": [10, 0, 10, 0, 20]},
        {"step": 3},
    ]
    limit = "beyond config.asynchrony.max_staleness"
    assert words_of("admission", steps) == [
        f"trained on 30 of 100 tokens (30%) {limit}=1, up to 4 versions old"
    ]
    assert words_of("admission", steps, bound=2) == [
        f"trained on 20 of 100 tokens (20%) {limit}=2, up to 4 versions old"
    ]
    assert words_of("admission", steps, bound=4) == [f"trained on no token {limit}=4"]


def test_other_rules_and_other_runs_report_nothing():
    steps = [{"step": 1, "episodes": 8, "staleness_tokens": [40, 20]}]
    assert words_of("in_order", steps) == words_of("drop", []) == []
    assert words_of("drop", steps, bound=0) == staleness_words({"num_steps": 3}, steps) == []
