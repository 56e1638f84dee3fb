# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""Qwen2.5-7B-Instruct learns Connect Four with reasoning, on 8 x H100 or a v5e-64.

uv run python -m earl_jax.main --config=configs/qwen25_7b.py --workdir=/shared/qwen25_7b

docs/howto/launch.md has the commands for a v5e-64.

No GPU or TPU has run it. By the planner, for episodes that fill each context; the step's time is a
roofline of data sheets:

uv run python -m earl_jax.plan --config=configs/qwen25_7b.py \
  --topology=h100:1x8 --config.model.path= --config.model.preset=qwen2.5-7b

  context  train          micro-batches  rollout          a step
    1,024  data=1,fsdp=8              2  data=2,tensor=4    14 s
    2,048  data=1,fsdp=8              2  data=2,tensor=4    31 s
    4,096  data=1,fsdp=8              2  data=2,tensor=4    72 s
    8,192  data=1,fsdp=8              4  data=2,tensor=4   186 s

uv run python -m earl_jax.plan --config=configs/qwen25_7b.py \
  --topology=v5e:8x8 --config.model.path= --config.model.preset=qwen2.5-7b

  context  train                    micro-batches  rollout           a step
    1,024  data=2,fsdp=32                       2  data=16,tensor=4    15 s
    2,048  data=2,fsdp=32                       2  data=16,tensor=4    31 s
    4,096  data=2,fsdp=32                       4  data=16,tensor=4    67 s
    8,192  data=2,fsdp=32                       8  data=16,tensor=4   156 s
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 500,
            "env": {"name": "connect_four", "num_workers": 32},
            "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
            "rollout": {
                "num_slots": 256,
                "episodes_per_step": 512,
                # A game begins with some 100 tokens of rules, and has up to 21 turns of reasoning.
                "max_turn_tokens": 512,
                "max_episode_tokens": 8192,
            },
            "train": {
                "remat": "full",
            },
            "checkpoint": {"every_steps": 20},
        }
    )
