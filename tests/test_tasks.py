# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of a task and their effect: how its tokens are sampled, and learnt from."""

import dataclasses
import json

import numpy as np
import pytest

from earl_jax.engine.config import Sampling
from earl_jax.rollout.tasks import Tasks
from earl_jax.run.build import build_run, check_prompts
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.metrics import sampling_kl
from tests.support.episodes import (
    RATIO_RUN,
    assert_same_episodes,
    check_rows,
    collect,
    engine,
    tasks,
)
from tests.support.placements import one_step
from tests.support.settings import make_config

WAYS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.5),
    Sampling(top_k=2),
    Sampling(temperature=2.0, top_p=0.6, min_p=0.05),
)


def test_each_episode_is_drawn_as_its_task_says(pool):
    """Four ways beside each other, and none: each as in a rollout that draws all that way.

    To the last bit, though a round in which no episode truncates has a program without branches.
    """
    player = engine(model_logprobs=True)
    ways = (*WAYS, None)
    todo = [
        dataclasses.replace(task, sampling=ways[index % len(ways)])
        for index, task in enumerate(tasks(20))
    ]
    mixed = collect(pool, todo, player=player)
    check_rows(mixed, 20)
    for index, way in enumerate(ways):
        alike = collect(pool, tasks(20), player=player, sampling=way or Sampling())
        drawn_so = slice(index, None, len(ways))
        assert_same_episodes(mixed.trajectories[drawn_so], alike.trajectories[drawn_so])
        pairs = zip(mixed.trajectories[drawn_so], alike.trajectories[drawn_so], strict=True)
        assert all(one.turns == other.turns for one, other in pairs)
    # A cut makes what is kept likelier than the model says; a plain draw is the model's own.
    for trajectory in mixed.trajectories:
        way = ways[trajectory.episode % len(ways)]
        for turn in trajectory.turns[1::2]:
            assert len(turn.model_logprobs) == len(turn.logprobs)
            gap = np.array(turn.logprobs) - turn.model_logprobs
            if way is None or way == WAYS[0]:
                np.testing.assert_allclose(gap, 0, atol=1e-6)
            elif way == WAYS[2]:
                # Two of nine digits, about equally likely, were kept.
                assert gap[0] > 0.5


@pytest.mark.slow
def test_task_that_asks_gets_log_probs_under_the_model(pool):
    """By an engine that writes them down for none: for these alone, and nothing else changes."""
    drawn = [dataclasses.replace(task, sampling=WAYS[2]) for task in tasks(16)]
    asked = [dataclasses.replace(t, model_logprobs=t.episode % 3 == 0) for t in drawn]
    found = collect(pool, asked).trajectories
    all_of_them = collect(pool, drawn, player=engine(model_logprobs=True)).trajectories
    for one, other in zip(found, all_of_them, strict=True):
        assert len(one.turns) == len(other.turns)
        for turn, full in zip(one.turns, other.turns, strict=True):
            assert turn.token_ids == full.token_ids
            np.testing.assert_allclose(turn.logprobs, full.logprobs, atol=1e-5)
            wanted = full.model_logprobs if one.episode % 3 == 0 else ()
            np.testing.assert_allclose(turn.model_logprobs, wanted, atol=1e-5)


def test_invalid_task_settings_are_refused_before_the_rollout(pool):
    for asked, words in (
        ({"sampling": Sampling(top_p=0)}, r"episode 0: Task.sampling.top_p is 0"),
        ({"seed": -1}, r"episode 0: Task.seed is -1; it must lie between 0 and 2147483647"),
    ):
        with pytest.raises(ValueError, match=words):
            collect(pool, [dataclasses.replace(tasks(1)[0], **asked)])


def test_an_episodes_tokens_are_those_of_its_seed(pool):
    """The default is the episode's number: 0 and 8 to 15 are sampled as the first nine are."""
    alike = [dataclasses.replace(task, args={"seed": 5, "index": 0}) for task in tasks(16)]
    plain = collect(pool, alike).trajectories
    seeds = [9, *range(1, 8), *range(8)]
    seeded = [dataclasses.replace(task, seed=seed) for task, seed in zip(alike, seeds, strict=True)]
    for seed, trajectory in zip(seeds, collect(pool, seeded).trajectories, strict=True):
        assert [turn.token_ids for turn in trajectory.turns] == [
            turn.token_ids for turn in plain[seed].turns
        ]
    assert len({trajectory.turns[1].token_ids for trajectory in plain}) > 3


class Asking(Tasks):
    """Each episode of a step has a sampling of its own."""

    def training(self, step):
        return [dataclasses.replace(task, sampling=WAYS[2]) for task in super().training(step)]


def asking(settings):
    """A run whose tasks ask."""
    run = build_run(make_config(settings))
    return dataclasses.replace(run, tasks=Asking(**vars(run.tasks)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [asking, lambda settings: build_run(make_config(settings))])
def test_a_ratio_against_the_model_is_one_before_the_first_update_whatever_was_cut_off(make):
    """Under tempering and a cut that take a nat off: the trainer sees none of it."""
    record = one_step(make(RATIO_RUN))
    gap = sampling_kl(record.trajectories)
    assert gap is not None and gap > 0.5
    first, second = record.updates
    assert first["logprob_mismatch_max"] < 1e-4 and first["clip_fraction"] == 0
    assert abs(first["kl"]) < 1e-6 < second["kl"]


def test_prompts_that_are_all_too_long_are_an_error_before_a_run_compiles(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1 2 3 4 5 6 7 8 9", "answer": "x"}))
    tasks = {"path": str(path), "reward": "earl_jax.envs.math_answer:correct"}
    given = {"env": {"name": "single_turn"}, "tasks": tasks, "rollout": {"max_episode_tokens": 8}}
    with pytest.raises(InputError, match=r"config\.tasks\.path .* tokens or more, .* at most 8 \("):
        check_prompts(build_run(make_config(given)))
    # One that is short enough: the others' episodes fail.
    path.write_text(f"{path.read_text()}\n" + json.dumps({"prompt": "x", "answer": "x"}))
    check_prompts(build_run(make_config(given)))
