# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""Qwen3-30B-A3B, a mixture of 128 experts, learns Connect Four with reasoning, on 2 x 8 H100.

uv run python -m earl_jax.main --config=configs/qwen3_30b_a3b.py --workdir=/shared/qwen3_30b_a3b

docs/howto/launch.md has the commands for Slurm, ssh and Kubernetes.

No GPU or TPU has run it. By the planner, for episodes that fill each context; the step's time is a
roofline of data sheets:

uv run python -m earl_jax.plan --config=configs/qwen3_30b_a3b.py \
  --topology=h100:2x8 --config.model.path= --config.model.preset=qwen3-30b-a3b

  context  train                            micro-batches  rollout                   a step
    1,024  data=1,fsdp=16                               1  data=2,expert=2,tensor=4    16 s
    2,048  data=1,fsdp=16                               1  data=2,expert=2,tensor=4    36 s
    4,096  data=1,fsdp=16                               4  data=2,expert=2,tensor=4    90 s
    8,192  data=1,fsdp=16                               8  data=4,tensor=4            215 s
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 500,
            "env": {"name": "connect_four", "num_workers": 32},
            # Qwen3's template drops earlier turns' reasoning; it stays in the context here.
            "chat": {"history": "append"},
            "model": {"path": "Qwen/Qwen3-30B-A3B"},
            "rollout": {
                "num_slots": 256,
                "episodes_per_step": 512,
                "max_episode_tokens": 8192,
            },
            "train": {
                # The checkpoint's own router_aux_loss_coef.
                "balance_coefficient": 0.001,
                "remat": "full",
            },
            "checkpoint": {"every_steps": 20},
        }
    )
