# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes that were open where an asynchronous run goes on, found again in its workdir."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from earl_jax.rollout.event_files import (
    Begun,
    begun_groups,
    drop_events,
    last_noted_step,
    set_events_aside,
)
from earl_jax.rollout.open_episodes import drop_episodes, read_episodes
from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.settings.errors import InputError
from earl_jax.train.checkpoint import Checkpoints


def with_open_episodes(
    run: Run, position: Position, workdir: Path, say: Callable[[str], None]
) -> Position:
    """Returns the position with what the episodes of open groups had there."""
    rules = run.config.asynchrony.episode_rules
    episodes = read_episodes(workdir, position.step, rules, say)
    if episodes:
        sampled = sum(each.num_sampled for each in episodes.values())
        say(f"{len(episodes)} open episodes go on behind the {sampled} tokens that they have")
    return dataclasses.replace(position, open_episodes=episodes)


def find_open_groups(
    run: Run, checkpoints: Checkpoints, workdir: Path, position: Position | None
) -> Begun | None:
    """Returns the groups of episodes that were begun before the position; None where none was.

    Every process calls it, in a synchronous run too. What steps behind the position left in the
    workdir, which the run takes again, is dropped.

    Raises:
        InputError: groups were open, and their events are not there or damaged.
    """
    cluster, step = run.cluster, position.step if position else 0
    settings = run.config.asynchrony
    has_open = bool(position and position.open_groups) and settings.rule != "in_order"
    # In words where there is something wrong.
    begun: Begun | str | None = None
    if cluster.is_first:
        drop_episodes(workdir, [each for each in checkpoints.steps() if each <= step])
        try:
            # Those of all processes, of which there may have been others.
            drop_events(workdir, step)
            begun, is_whole = begun_groups(workdir, step), last_noted_step(workdir) == step
        except InputError as error:
            begun, is_whole = str(error), False
        if begun is None and has_open:
            begun = (
                f"{workdir} has no events of step {step}, behind which groups of episodes were "
                "open; put events*.jsonl back, or begin again (--restart)"
            )
        if not settings.is_on:
            begun = None
        if begun is None and not is_whole:
            set_events_aside(workdir, step)
    begun = cluster.gather(begun, "the groups that are open")[0]
    if isinstance(begun, str):
        raise InputError(begun)
    return begun and Begun(*begun)
