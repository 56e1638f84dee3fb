# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments that fail or exit where examples are played, and prompts that no episode holds."""

import dataclasses
import random

import pytest

from earl_jax.config.file import read_workdir_config
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.event_loop import settle
from earl_jax.run.source import open_source
from earl_jax.run.step_end import EpisodesFailed
from earl_jax.settings.errors import InputError, RunError
from earl_jax.training import train
from tests.support.runs import steps_of
from tests.support.settings import make_config

SETTINGS = {
    "num_steps": 2,
    "algorithm": "reinforce",
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 1, "head_size": 8},
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 8,
        "group_size": 1,
        "max_turn_tokens": 4,
        "context_buckets": (64,),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 8},
    "eval": {"games": 2, "final_games": 2},
    "train": {"sft_steps": 1},
}


class Failing:
    """Every so many-th task fails when it is answered, by an error or by an exit."""

    def __init__(self, *, seed: int, every: int = 2, exits: bool = False, words: int = 1):
        self._fails, self._exits = seed % every == 0, exits
        self._text = "".join(random.Random(seed).choices("0123456789", k=words))

    def start(self):
        return Start(text=f"say a {self._text}")

    def step(self, reply):
        if self._fails and self._exits:
            raise SystemExit(0)
        if self._fails:
            raise ConnectionError("the service is away")
        return StepResult(reward=float(reply == "a"), done=True, stop_reason="end")

    def example_reply(self, rng):
        return "a"


class Awaited(Failing):
    async def step(self, reply):
        return super().step(reply)


def config_of(kind: str = "Failing", most_tokens: int = 0, **args):
    rollout = {**SETTINGS["rollout"], "max_episode_tokens": most_tokens}
    env = {"name": f"{__name__}:{kind}", "args": args}
    return make_config({**SETTINGS, "rollout": rollout, "env": env})


@pytest.mark.parametrize("kind", ["Failing", "Awaited"])
def test_an_environment_that_exits_is_a_failure_in_words(kind):
    """A status of 0 would say that the run was done, and a coroutine's exit ended its thread."""
    with pytest.raises(
        RunError, match="whose text the tokenizer is trained on, failed: SystemExit"
    ):
        config_of(kind, every=1, exits=True).corpus()
    assert config_of(kind, every=2, exits=True).corpus()

    async def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        settle(leave())
    assert settle(7) == 7


def test_examples_are_of_the_next_tasks_where_some_fail(tmp_path):
    train(config_of(every=2), tmp_path / "run")
    lines = steps_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["failed_share"] < 1
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="config.json is damaged: it is no config of a run"):
        open_source(str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_whose_prompts_are_all_too_long_ends_with_the_reason(tmp_path):
    # Of as many tasks as its tokenizer sees none is one token.
    config = config_of(most_tokens=32, every=10**9, words=400)
    config = dataclasses.replace(config, num_steps=100)
    with pytest.raises(EpisodesFailed, match="every episode of step 1 failed.*\n.*prompt_too_long"):
        train(config, tmp_path / "run")


def test_a_config_that_is_none_is_refused_in_words(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="config.json is damaged: it is .1., and no object"):
        read_workdir_config(tmp_path)
