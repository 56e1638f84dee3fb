# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A Qwen2 checkpoint in the format of `transformers` plays Connect Four, on a laptop.

uv run python -m earl_jax.main --config=configs/connect_four_qwen2_cpu.py --config.model.path=FOLDER

FOLDER holds config.json, *.safetensors and the tokenizer with its chat template. One with random
weights, of 0.1 M parameters, is written by

uv run python tests/reference/make_checkpoint.py FOLDER

At the end the policy is in WORKDIR/export, in the same format and type. Qwen's template begins with
a system message: an episode begins with 69 tokens, and every move of the game takes 15.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 100,
            "devices": {"platform": "cpu"},
            "env": {"name": "connect_four", "args": {"illegal_reward": -2.0}},
            "model": {
                "path": config_dict.required_placeholder(str),
                "compute_dtype": "float32",
            },
            "rollout": {
                "num_slots": 32,
                "episodes_per_step": 64,
                "group_size": 1,
                "context_buckets": (160, 400),
                "chunk_size": 16,
                "burst": 4,
                "max_turn_tokens": 4,
                "unfinished_reward": -2.0,
            },
            "selector": {
                "rollout_meshes": ("data=8", "data=4,tensor=2"),
                "train_meshes": ("data=8", "data=2,fsdp=4"),
                # The same run on every machine.
                "table": "model",
            },
            "algorithm": "reinforce",
            "algorithm_args": {"turn_discount": 0.9},
            "train": {
                "schedule": "linear",
                "learning_rate": 2e-3,
                "final_learning_rate": 1e-4,
                "entropy_coefficient": 0.03,
                "sft_learning_rate": 3e-3,
                "adam_b2": 0.99,
                "sft_steps": 40,
            },
            "checkpoint": {"every_steps": 20, "export": True},
        }
    )
