# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A small decoder learns Kuhn poker by playing both sides, each with a baseline of its own.

uv run python -m earl_jax.main --config=configs/kuhn_self_play_cpu.py

The policy sees its own card and the moves only. The algorithm is SPIRAL's: each side is trained on
its own moves, with its own winnings minus the moving average of that side. In its first 40 steps
the policy is also trained on random moves, which teach what a reply looks like. The logged reward
is the sum over both sides, 0 but for illegal moves; won_as_first is what the first side wins,
-1/18 where both play without a mistake.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 300,
            "devices": {"platform": "cpu", "num_cpu_devices": 8},
            "env": {"name": "kuhn_poker", "args": {"opponent": "self", "illegal_reward": -3.0}},
            "rollout": {
                "num_slots": 128,
                "episodes_per_step": 256,
                "group_size": 1,
                "chunk_size": 16,
                "burst": 2,
                "max_turn_tokens": 4,
                "unfinished_reward": -3.0,
                "patience_s": 10.0,
                "context_buckets": (96, 192),
            },
            "selector": {
                "rollout_meshes": ("data=8",),
                "train_meshes": ("data=8",),
                "table": "model",
            },
            "algorithm": "spiral",
            "train": {
                "schedule": "linear",
                "learning_rate": 1e-3,
                "final_learning_rate": 1e-4,
                "adam_b2": 0.99,
                # An equilibrium is mixed: a bluff that pays now does not pay for long.
                "entropy_coefficient": 0.3,
                "final_entropy_coefficient": 0.05,
                "sft_steps": 40,
                "sft_learning_rate": 4e-3,
            },
            "eval": {"every_steps": 100, "games": 128, "final_games": 512},
        }
    )
