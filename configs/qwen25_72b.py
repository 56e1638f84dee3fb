# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""Qwen2.5-72B-Instruct learns Connect Four, on the EARL paper's 16 x 8 H100 or a v5p-256.

uv run python -m earl_jax.main --config=configs/qwen25_72b.py --workdir=/shared/qwen25_72b

docs/howto/launch.md has the commands for Slurm, Kubernetes and TPU VMs.

No GPU or TPU has run it. By the planner, for episodes that fill each context; the step's time is a
roofline of data sheets:

uv run python -m earl_jax.plan --config=configs/qwen25_72b.py \
  --topology=h100:16x8 --config.model.path= --config.model.preset=qwen2.5-72b

  context  train                    micro-batches  rollout            a step
    2,048  data=1,fsdp=128                      1  data=16,tensor=8     67 s
    4,096  data=1,fsdp=128                      1  data=16,tensor=8    141 s
    8,192  data=1,fsdp=128                      2  data=16,tensor=8    315 s
   16,384  data=1,fsdp=128                      4  data=16,tensor=8    760 s
   32,768  data=1,fsdp=128                      8  data=16,tensor=8  2,040 s

uv run python -m earl_jax.plan --config=configs/qwen25_72b.py \
  --topology=v5p:4x4x8 --config.model.path= --config.model.preset=qwen2.5-72b

  context  train                              micro-batches  rollout            a step
    2,048  data=1,fsdp=128                                1  data=16,tensor=8     80 s
    4,096  data=1,fsdp=128                                1  data=16,tensor=8    171 s
    8,192  data=1,fsdp=128                                4  data=16,tensor=8    384 s
   16,384  data=1,fsdp=128                                8  data=16,tensor=8    939 s
   32,768  data=1,fsdp=32,context=2,tensor=2             32  data=16,tensor=8  2,589 s
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 500,
            "env": {"name": "connect_four", "num_workers": 64},
            "model": {"path": "Qwen/Qwen2.5-72B-Instruct"},
            "rollout": {
                "num_slots": 512,
                "episodes_per_step": 1024,
                "max_episode_tokens": 32768,
                "context_buckets": (2048, 4096, 8192, 16384, 32768),
            },
            "train": {
                "remat": "full",
            },
            # A checkpoint is 870 GB.
            "checkpoint": {"keep": 2},
        }
    )
