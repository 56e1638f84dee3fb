# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a rollout that several processes play, gathered so that all know the same facts.

Each process plays its share of the episodes on an engine of its own, and schedules by itself.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from earl_jax.launch.cluster import Cluster
from earl_jax.rollout.end import End, RolloutShort, Shortage, Stopped
from earl_jax.rollout.results import Played, Rollout, RowOrder
from earl_jax.rollout.stats import RolloutStats
from earl_jax.telemetry.metrics import sampling_gap
from earl_jax.trajectory import Outcome, TurnState


def row_order(numbers: Sequence[Sequence[int]]) -> RowOrder:
    """Returns the order of rows where each process played the tasks of these numbers."""
    total = sum(map(len, numbers))
    part = max(1, -(-total // len(numbers)))
    of_each = -(-max(map(len, numbers)) // part) * part
    rows = {
        number: player * of_each + row
        for player, own in enumerate(numbers)
        for row, number in enumerate(own)
    }
    assert sorted(rows) == list(range(total)), f"{total} tasks, of which some were played twice"
    return RowOrder(of_each, tuple(rows[number] for number in range(total)))


def gather_ends(cluster: Cluster, own: Any, what: str, end: End) -> list[Any]:
    """Returns what each process that plays gives as its `own`, in the order of the episodes.

    Every process calls it; `what` is as for `Cluster.gather`.

    Raises:
        Stopped: some process was stopped.
        RolloutShort: some process had a shortage; of several, the first one's.
    """
    each = cluster.gather([own, dataclasses.asdict(end)], what)
    parts = cluster.of_players(each)
    for _, ended in parts:
        if ended["stopped"]:
            raise Stopped(ended["stopped"])
    for _, ended in parts:
        if ended["shortage"] is not None:
            raise RolloutShort(Shortage(**ended["shortage"]))
    return [own for own, _ in parts]


def furthest(placements: Sequence[dict[str, Any]]) -> int:
    """Returns which process needed the longest rows, by the placement of each."""
    needs = [where["max_tokens"] for where in placements]
    return needs.index(max(needs))


def gather_outcomes(
    cluster: Cluster,
    rollout: Rollout | None,
    placement: dict[str, Any],
    end: End,
    numbers: Sequence[int] | None = None,
    *,
    together: bool = False,
) -> Played:
    """Returns the outcomes of all processes; every process calls it when its rollout has ended.

    `rollout` is None in a process that plays nothing, had a shortage, or was stopped. `numbers` are
    those of its tasks, ascending; None: processes have fixed parts of them. Where they played
    `together` each has them all.

    Raises Stopped and RolloutShort, as `gather_ends`.
    """
    own = None if rollout is None else facts_of(rollout, placement, numbers)
    parts = gather_ends(cluster, own, "the end of a rollout", end)
    parts = parts[:1] if together else parts
    outcomes, dropped, refilled = (
        [_outcome(fields) for part in parts for fields in part[name]]
        for name in ("outcomes", "dropped", "refilled")
    )
    order = None
    if numbers is not None:
        order = row_order([part["numbers"] for part in parts])
        played = itertools.chain.from_iterable(part["numbers"] for part in parts)
        numbered = sorted(zip(played, outcomes, strict=True), key=operator.itemgetter(0))
        outcomes = [outcome for _, outcome in numbered]
    return Played(
        outcomes=outcomes,
        stats=total_stats([RolloutStats(**part["stats"]) for part in parts]),
        placement=parts[furthest([part["placement"] for part in parts])]["placement"],
        gaps=[gap for part in parts for gap in part["gaps"]],
        dropped=dropped,
        refilled=refilled,
        num_reused=sum(part["num_reused"] for part in parts),
        order=order,
    )


def facts_of(
    rollout: Rollout, placement: dict[str, Any], numbers: Sequence[int] | None
) -> dict[str, Any]:
    """Returns what a process tells the others of its rollout, for `gather_outcomes`."""
    trajectories = rollout.trajectories
    return {
        "outcomes": [dataclasses.asdict(trajectory.outcome) for trajectory in trajectories],
        "dropped": [dataclasses.asdict(outcome) for outcome in rollout.dropped],
        "refilled": [dataclasses.asdict(outcome) for outcome in rollout.refilled],
        "num_reused": rollout.num_reused,
        "stats": dataclasses.asdict(rollout.stats),
        "placement": placement,
        "gaps": [sampling_gap(trajectory) for trajectory in trajectories],
        "numbers": numbers,
    }


def _outcome(fields: dict[str, Any]) -> Outcome:
    """Returns an outcome from its fields as JSON, in which tuples are lists."""
    tuples = {name: tuple(fields[name]) for name in ("turn_rewards", "turn_roles", "sample_starts")}
    versions = tuple((version, number) for version, number in fields["versions"])
    states = tuple(TurnState(*digests) for digests in fields["turn_states"])
    return Outcome(**{**fields, **tuples, "versions": versions, "turn_states": states})


def total_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """Returns the stats of all processes: sums, but for rounds, longest contexts and times.

    The sum of tokens in flight is an upper bound: the maxima are not at one moment. Of words, such
    as how episodes were preempted, those of the first process that has some count.
    """
    greatest = ("rounds", "context_tokens_max", "env_wait_s", "full_s")

    def total(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if isinstance(each[0], str):
            return next(filter(None, each), "")
        return max(each) if name in greatest else sum(each)

    return RolloutStats(**{f.name: total(f.name) for f in dataclasses.fields(RolloutStats)})
