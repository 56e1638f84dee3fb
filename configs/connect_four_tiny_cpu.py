# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Connect Four, the game of the EARL paper, on a laptop: contexts of up to 140 tokens.

uv run python -m earl_jax.main --config=configs/connect_four_tiny_cpu.py

About five minutes on 2 cores. benchmarks/connect_four.md has what it reaches.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 200,
            "devices": {"platform": "cpu"},
            "env": {"name": "connect_four", "args": {"illegal_reward": -2.0}},
            "model": {"width": 64, "ffn_size": 192},
            "rollout": {
                "num_slots": 64,
                "group_size": 1,
                "context_buckets": (40, 144),
                "chunk_size": 10,
                "burst": 4,
                "max_turn_tokens": 4,
                "unfinished_reward": -2.0,
                # A game answers at once: with rounds that wait for every answer, a run repeats
                # itself in everything but its times.
                "patience_s": 10.0,
            },
            "selector": {
                "rollout_meshes": ("data=8", "data=4,tensor=2"),
                "train_meshes": ("data=8", "data=1,fsdp=8"),
                # The same run on every machine.
                "table": "model",
            },
            "algorithm": "reinforce",
            "algorithm_args": {"turn_discount": 0.9},
            "train": {
                "schedule": "linear",
                "learning_rate": 2e-3,
                "final_learning_rate": 1e-4,
                "adam_b2": 0.99,
                "entropy_coefficient": 0.05,
                "sft_steps": 80,
                "sft_learning_rate": 4e-3,
            },
        }
    )
