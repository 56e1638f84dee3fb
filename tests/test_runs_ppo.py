# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs of PPO, with a critic and a frozen reference: they learn and resume bit for bit."""

import numpy as np
import pytest

from earl_jax.config import file as config_file
from earl_jax.training import train
from tests.support.placements import TINY as TINY_MODEL
from tests.support.runs import check_resume, final_state, steps_of
from tests.support.settings import make_config

GIVEN = {
    "num_steps": 2,
    "model": TINY_MODEL,
    "env": {"name": "trail", "args": {"num_stones": 4, "num_steps": 8}},
    "rollout": {"num_slots": 16, "episodes_per_step": 32, "group_size": 1, "max_turn_tokens": 4},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=2,fsdp=4",)},
    "algorithm": "ppo",
    "algorithm_args": {"kl_coefficient": 0.05, "gae_level": "turn"},
    "train": {
        "epochs": 2,
        "micro_batches": 2,
        "learning_rate": 3e-3,
        "critic": {"learning_rate": 6e-3},
    },
    "checkpoint": {"every_steps": 1},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}
GIVEN["rollout"] |= {"context_buckets": (48,), "patience_s": 10.0}
GIVEN["selector"]["table"] = "model"
STILL = ("num_steps=1", "train.learning_rate=0.0", "train.critic.learning_rate=0.0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run from start to end."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    train(make_config(GIVEN), folder)
    return folder


def test_a_resumed_run_ends_with_the_same_bits(whole):
    """Policy, critic, both moments and the reference, from a checkpoint behind step 1."""
    ones = steps_of(check_resume(make_config(GIVEN), whole, 1))
    assert len(ones) == 2
    names = {"value_loss", "explained_variance", "critic_grad_norm", "reference_kl"}
    assert all(np.isfinite([row[name] for name in names]).all() for row in ones)
    saved = final_state(whole, 2)
    assert (np.asarray(saved["critic"]["value_head"]) != 0).all()


@pytest.mark.slow
def test_the_reference_and_the_critic_are_those_of_the_weights_that_a_run_began_with(
    whole, tmp_path
):
    config = make_config(GIVEN, [*STILL, f"init_from={whole}"])
    train(config, tmp_path / "next")
    first, saved = final_state(whole, 2)["params"], final_state(tmp_path / "next", 1)
    for name in first:
        for tree in ("params", "reference", "critic"):
            if tree == "critic" and name == "head":
                continue
            found, expected = saved[tree][name], first[name]
            pairs = [(found, expected)]
            if isinstance(expected, dict):
                pairs = [(found[key], expected[key]) for key in expected]
            for one, other in pairs:
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


LEARNS = {
    "num_steps": 14,
    "env": {"name": "trail", "args": {"num_stones": 4, "num_steps": 8}},
    "model": {
        "num_layers": 1,
        "width": 32,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_size": 8,
        "ffn_size": 64,
    },
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 64,
        "group_size": 1,
        "chunk_size": 8,
        "burst": 2,
        "max_turn_tokens": 4,
        "context_buckets": (64,),
        "page_size": 64,
    },
    "selector": {
        "rollout_meshes": ("data=8",),
        "train_meshes": ("data=2,fsdp=4",),
        "table": "model",
    },
    "algorithm": "ppo",
    "algorithm_args": {"gae_lambda": 1.0, "value_clip": 0.0},
    "train": {
        "epochs": 4,
        "logprob_chunk": 64,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        "adam_b2": 0.99,
        "critic": {"learning_rate": 6e-3},
        "sft_steps": 8,
        "sft_updates": 4,
        "sft_learning_rate": 4e-3,
    },
    "eval": {"every_steps": 40, "games": 16, "final_games": 16},
}


@pytest.mark.slow
def test_the_critic_learns_to_explain_the_returns(tmp_path):
    """As the walks get longer, what a token's value is worth is seen; the policy learns too."""
    train(config_file.make_config(LEARNS), tmp_path / "run")
    rows = steps_of(tmp_path / "run")
    explained = [row["explained_variance"] for row in rows]
    assert np.mean(explained[:3]) < 0.03
    assert np.mean(explained[-4:]) > 0.1
    assert rows[-1]["reward_mean"] > 0 > rows[2]["reward_mean"]
