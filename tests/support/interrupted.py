# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Services that are given up after some rounds, and others that go on where they stopped."""

import dataclasses
import itertools

import pytest

from earl_jax.rollout.open_episodes import read_episodes, write_episodes
from tests.support.episodes import check_nothing_is_held, check_row

RULES = ["in_order", 2]


def play(service, rounds=None) -> tuple[list, int]:
    """Plays so many rounds; all, if None. Returns the trajectories, without rows, and tokens."""
    found = []
    for _ in itertools.count() if rounds is None else range(rounds):
        if not service.is_busy:
            break
        for finished in service.step():
            check_row(service, finished)
            service.release(finished.row)
            found.append(dataclasses.replace(finished.trajectory, row=0))
    return found, service.stats.rollout_tokens


def interrupted(tmp_path, open_one, todo) -> tuple[list, int, int]:
    """Plays with a service that is given up after three rounds, and others that go on, for longer.

    They have to read what was played. Returns the trajectories by episode, the tokens that were
    sampled, and the times.
    """
    done, sampled, episodes, times = [], 0, {}, 0
    while len(done) < len(todo):
        over = {each.episode for each in done}
        service = open_one()
        service.submit(
            [
                dataclasses.replace(task, resumes=episodes.get(task.episode))
                for task in todo
                if task.episode not in over
            ]
        )
        if times:
            assert service.open_episodes() == episodes
        times += 1
        found, tokens = play(service, 3 * times)
        done, sampled = [*done, *found], sampled + tokens
        write_episodes(tmp_path, times, 0, service.open_episodes(), RULES)
        episodes = read_episodes(tmp_path, times, RULES, pytest.fail)
    check_nothing_is_held(service, service.session.max_tokens)
    return sorted(done, key=lambda each: each.episode), sampled, times
