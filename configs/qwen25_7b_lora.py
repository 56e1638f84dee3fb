# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""Qwen2.5-7B-Instruct learns Connect Four with adapters of rank 32, on one H100.

uv run python -m earl_jax.main --config=configs/qwen25_7b_lora.py --workdir=/shared/qwen25_7b_lora

One H100 has run steps of it (benchmarks/chip.md). By the planner, for episodes that fill each
context; the step's time is a roofline of data sheets:

uv run python -m earl_jax.plan --config=configs/qwen25_7b_lora.py \
  --topology=h100:1x1 --config.model.path= --config.model.preset=qwen2.5-7b

  context  train   micro-batches  rollout  a step
    1,024  data=1              4  data=1     24 s
    2,048  data=1              4  data=1     53 s
    4,096  data=1              4  data=1    127 s
    8,192  data=1              8  data=1    337 s
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 500,
            "env": {"name": "connect_four", "num_workers": 16},
            "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
            "rollout": {
                "num_slots": 64,
                "episodes_per_step": 128,
                "max_turn_tokens": 512,
                "max_episode_tokens": 8192,
            },
            "train": {
                # Adapters take a larger step than the weights themselves.
                "learning_rate": 2e-5,
                "remat": "full",
                # Masters and moments of all weights would take 91 GB; the frozen base takes 15.
                "lora": {"rank": 32, "alpha": 64.0},
            },
            "checkpoint": {"every_steps": 20},
        }
    )
