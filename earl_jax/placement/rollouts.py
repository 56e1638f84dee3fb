# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts on the plans of a placement: played by all processes, again where memory is short."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Session
from earl_jax.models.parameters import Params
from earl_jax.placement.moves import grow_noted, open_session, shrink_noted
from earl_jax.placement.placement import Placement
from earl_jax.rollout.actor import Actor
from earl_jax.rollout.end import End, Stopped
from earl_jax.rollout.events import Events
from earl_jax.rollout.gather import gather_outcomes
from earl_jax.rollout.load import expected_tokens
from earl_jax.rollout.results import Played, Rollout
from earl_jax.rollout.share import Share, share_of
from earl_jax.rollout.task import Task
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.memory import moving
from earl_jax.telemetry.load import Load
from earl_jax.trajectory import Outcome, Trajectory

Item = TypeVar("Item")
# Outcomes of all processes, and the episodes of this one.
_Batch = tuple[list[Outcome], list[Trajectory]]


def play(
    actor: Actor,
    placement: Placement,
    session: Session,
    tasks: Sequence[Task],
    share: Share,
    load: Load | None,
    sampling: Sampling | None = None,
    *,
    events: Events | None = None,
) -> Rollout:
    """Plays a share of the tasks from this session, which moves to other plans where need be.

    All that depends on time is noted in `events`; None: it is noted nowhere.
    """
    noted = events or Events()
    return actor.play(
        session,
        tasks,
        share,
        sampling=sampling,
        grow=functools.partial(grow_noted, placement, load=load, events=noted),
        shrink=functools.partial(shrink_noted, placement, load=load, events=noted),
        events=noted,
    )


def play_all(
    actor: Actor,
    placement: Placement,
    session: Session | None,
    tasks: Sequence[Task],
    load: Load | None,
    sampling: Sampling | None = None,
    *,
    events: Events | None = None,
) -> tuple[Rollout | None, Played]:
    """Plays this process's share of the tasks; the placement is then the same in all processes.

    `events` are as of `play`.

    Returns:
        This process's rollout, None where it has no session, and what became of all tasks.

    Raises:
        Stopped: a process was stopped by a signal; all were when their own episodes had ended, or
            with it where they noticed it too. No round waits for another process.
        RolloutShort: of several processes one had too little memory.
    """
    cluster, share = placement.stages.cluster, _share(placement, tasks, events)

    def own_share() -> Rollout | None:
        if session is None:
            return None
        return play(actor, placement, session, tasks, share, load, sampling, events=events)

    rollout = None
    try:
        rollout, end = end_of(placement, own_share)
    finally:
        if session and rollout is None:
            share.close()
    numbers = None if share.is_fixed else sorted(share.numbers)
    played = gather_outcomes(
        cluster,
        rollout,
        placement.as_dict(),
        end,
        numbers,
        together=placement.plays_together,
    )
    placement.restore(played.placement)
    return rollout, played


def end_of(placement: Placement, play: Callable[[], Item]) -> tuple[Item | None, End]:
    """Returns what `play` gives and how it ended, for `gather_ends`.

    None where it was stopped by a signal, or where memory was too short.
    """
    result, shortage, stopped = None, None, ""
    try:
        result = play()
    except Stopped as stop:
        stopped = str(stop)
    except (jax.errors.JaxRuntimeError, BudgetTooSmall) as error:
        if (shortage := placement.shortage(error)) is None:
            raise
    return result, End(shortage=shortage, stopped=stopped)


def _share(placement: Placement, tasks: Sequence[Task], events: Events | None) -> Share:
    """Returns this process's share of a rollout on the plan in use."""
    cluster, rollout = placement.stages.cluster, placement.stages.rollout
    number = len(cluster.players)
    if placement.plays_together:
        return Share(range(len(tasks)))
    if not rollout.has_queue(number):
        return Share(cluster.own(range(len(tasks))))
    num_rows = 2 * rollout.part(number).episodes_per_step
    return share_of(tasks, cluster, placement.rollout.num_slots // number, num_rows, events)


def play_batches(
    actor: Actor,
    placement: Placement,
    params: Params,
    tasks: Sequence[Task],
    *,
    version: int,
    load: Load | None,
    sampling: Sampling,
    beside_live: bool = False,
    keep: Callable[[Sequence[Trajectory]], None] | None = None,
) -> list[Outcome]:
    """Plays any number of tasks with one policy; returns their outcomes, and keeps no rows.

    `keep` is given the episodes of a batch that this process has played. A batch that memory is too
    short for is played again with another plan; with `beside_live` another rollout stays on the
    devices, and later runs do not know of what is short beside it.
    """
    rollout = placement.stages.rollout
    rows, outcomes = rollout.episodes_per_step, []
    for first in range(0, len(tasks), rows):

        def attempt(batch: Sequence[Task] = tasks[first : first + rows]) -> _Batch:
            with moving() if beside_live else contextlib.nullcontext():
                session, _ = open_session(placement, params, version=version)
                own, played = play_all(actor, placement, session, batch, load, sampling)
            # Not the rollout, whose session would be there beside the next.
            return played.outcomes, own.trajectories if own else []

        found = None
        while found is None:
            placement.choose_rollout(expected_tokens(rollout, load), load)
            found = placement.attempt("rollout", attempt)
        outcomes += found[0]
        if keep:
            keep(found[1])
    return outcomes


@contextlib.contextmanager
def plans_kept(placement: Placement) -> Iterator[None]:
    """Puts the plans in use back, however the rollout inside ends.

    What was short beside another rollout is forgotten.
    """
    before, outgrown, tail = placement.as_dict(), placement.outgrown, placement.tail
    placement.beside_live = True
    try:
        yield
    finally:
        placement.beside_live = False
        placement.table = placement.table.after_rollout()
        placement.restore(before)
        placement.outgrown, placement.tail = outgrown, tail
