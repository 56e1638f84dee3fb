# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A 0.13 M parameter decoder learns Tic-Tac-Toe on a laptop.

uv run python -m earl_jax.main --config=configs/tictactoe_tiny_cpu.py

About seven minutes on 2 cores. Against a random opponent, both sides in turn, it ends at about 89 %
wins and 0 to 5 % illegal moves at temperature 1 (random legal play wins 43.7 %, the best possible
96.7 %): benchmarks/learning.md has five seeds, and two settings that learn without the supervised
games.

In its first 120 steps the policy is also trained on games of random legal moves, which teach what
a reply looks like. The selector goes by bytes and the speed model, so that equal seeds are equal
runs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 1000,
            # Eight virtual devices on 2 cores cost nothing against one, and every sharding is real.
            "devices": {"platform": "cpu", "num_cpu_devices": 8},
            # Worse than a loss: a policy that is to lose must not prefer to break the rules.
            "env": {"name": "tic_tac_toe", "args": {"illegal_reward": -2.0}},
            "rollout": {
                "num_slots": 64,
                "episodes_per_step": 128,
                "group_size": 1,
                "chunk_size": 10,
                "burst": 4,
                "max_turn_tokens": 4,
                "unfinished_reward": -2.0,
                # A game answers at once: with rounds that wait for every answer, a run repeats
                # itself in everything but its times.
                "patience_s": 10.0,
                "context_buckets": (24, 40),
            },
            "selector": {
                "budget_bytes_per_device": 17_000_000,
                "rollout_meshes": ("data=8", "data=4,tensor=2"),
                "train_meshes": ("data=8", "data=1,fsdp=8"),
                # The same run on every machine.
                "table": "model",
            },
            "algorithm": "reinforce",
            "algorithm_args": {"turn_discount": 0.7},
            "train": {
                "epochs": 2,
                "schedule": "linear",
                "learning_rate": 2e-3,
                "final_learning_rate": 1e-4,
                "adam_b2": 0.99,
                # Without it the policy settles on one order of moves and stops learning.
                "entropy_coefficient": 0.1,
                "final_entropy_coefficient": 0.01,
                "sft_steps": 120,
                "sft_learning_rate": 4e-3,
            },
            "eval": {"every_steps": 100, "games": 128, "final_games": 512},
        }
    )
