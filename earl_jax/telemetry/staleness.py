# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sentences about the cost of an asynchronous run's rule, for the end of the run and its report."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def staleness_words(config: Mapping[str, Any], steps: Sequence[Row]) -> list[str]:
    """Returns what the rule "drop" gave up, or by how much "admission" went beyond the bound.

    `config` is that of the run as a dict, and `steps` are its lines of metrics, without
    evaluations. Empty for the other rules, without a bound, and without lines.
    """
    asynchrony = config.get("asynchrony")
    if not steps or asynchrony is None or not asynchrony["max_staleness"]:
        return []
    if asynchrony["rule"] == "drop":
        return [_dropped(steps, config["rollout"]["group_size"])]
    if asynchrony["rule"] == "admission":
        return [_overshoot(steps, asynchrony["max_staleness"])]
    return []


def _dropped(steps: Sequence[Row], group_size: int) -> str:
    """Returns how many episodes were dropped, and how their length differs: the bias.

    Example: "dropped 12 of 200 episodes as too old (3,400 tokens, 41% longer than those trained
    on)".
    """
    lost, tokens = _sum(steps, "stale_episodes"), _sum(steps, "stale_tokens")
    # A group that was trained on again was played once.
    taken = _sum(steps, "episodes") - _sum(steps, "reused_groups") * group_size
    if not lost:
        return f"dropped none of {taken:,} episodes"
    words = f"dropped {lost:,} of {lost + taken:,} episodes as too old ({tokens:,} tokens"
    trained = sum(_num_trained(row, group_size) for row in steps)
    trained_tokens = sum(_tokens_by_lag(steps))
    if not trained_tokens:
        return f"{words})"
    longer = tokens / lost / (trained_tokens / trained) - 1
    how = "longer" if longer > 0 else "shorter"
    return f"{words}, {abs(longer):.0%} {how} than those trained on)"


def _num_trained(row: Row, group_size: int) -> float:
    """Returns how many episodes a step trained on: neither failed nor of a group left out.

    `dropped_groups` is the share of all groups, those with others in their place too.
    """
    whole = row["episodes"] * (1 - row.get("failed_share", 0.0))
    refilled = row.get("refilled_groups", 0) * group_size
    return (whole + refilled) * (1 - row.get("dropped_groups", 0.0))


def _overshoot(steps: Sequence[Row], bound: int) -> str:
    """Returns how many tokens were trained on beyond the bound, and how old the oldest was.

    Example: "trained on 300 of 1,200 tokens (25%) beyond config.asynchrony.max_staleness=1, up to 3
    versions old".
    """
    tokens = _tokens_by_lag(steps)
    number, beyond = sum(tokens), sum(tokens[bound + 1 :])
    limit = f"config.asynchrony.max_staleness={bound}"
    if not beyond:
        return f"trained on no token beyond {limit}"
    return (
        f"trained on {beyond:,} of {number:,} tokens ({beyond / number:.0%}) beyond {limit}, up to "
        f"{len(tokens) - 1} versions old"
    )


def _tokens_by_lag(steps: Sequence[Row]) -> list[int]:
    """Returns the tokens that all steps trained on, by the versions since they were sampled."""
    each: Iterator[list[int]] = (row.get("staleness_tokens", []) for row in steps)
    return [sum(tokens) for tokens in itertools.zip_longest(*each, fillvalue=0)]


def _sum(steps: Sequence[Row], name: str) -> int:
    return sum(row.get(name, 0) for row in steps)
