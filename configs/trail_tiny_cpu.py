# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Contexts that grow because the policy learns: from two steps of a trail to all 60, on a laptop.

uv run python -m earl_jax.main --config=configs/trail_tiny_cpu.py

Todo:
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """What differs from the defaults."""
    return ConfigDict(
        {
            "num_steps": 60,
            "devices": {"platform": "cpu", "num_cpu_devices": 8},
            "env": {"name": "trail", "trail": {"num_stones": 8, "num_steps": 60}},
            "model": {"width": 64, "ffn_size": 192},
            "rollout": {
                "num_slots": 32,
                "episodes_per_step": 64,
                "chunk_size": 8,
                "burst": 2,
                "max_turn_tokens": 4,
                "patience_s": 10.0,
                "context_buckets": (24, 48, 96, 192, 384),
            },
            "selector": {
                "rollout_meshes": ("data=8", "data=4,tensor=2", "data=2,tensor=4"),
                "train_meshes": ("data=8", "data=4,fsdp=2", "data=1,fsdp=8"),
            },
            "train": {
                "turn_discount": 1.0,
                "epochs": 2,
                "learning_rate": 4e-3,
                "final_learning_rate": 1e-3,
                "adam_b2": 0.99,
                "entropy_coefficient": 0.01,
                "demonstration_steps": 10,
                "demonstration_updates": 2,
                "demonstration_learning_rate": 4e-3,
            },
            "eval": {"every_steps": 60, "games": 16, "final_games": 64},
        }
    )
