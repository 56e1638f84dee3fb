# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The default: contexts grow 16 times because the policy learns, and both meshes change for it.

uv run python -m earl_jax.main --config=configs/trail_tiny_cpu.py

About three minutes on 2 cores. The policy walks a trail of stones, one call a stone; the first
wrong step ends the walk. At first it cannot even name a stone (reward -1). In its first 12 steps it
is also trained on walks that are right half the time, which teach what a step looks like. The
better it then gets, the longer its walks: from 15 tokens to 247, and to a reward above 0.7, where 1
is the whole trail.

1.9 MB per device are enough for training on data=1,fsdp=8 and rollouts on data=8 while walks are
short. Rows of 96 tokens would need 2.7 MB, and training moves to data=1,fsdp=2,context=4, which
splits each row over four devices; contexts of 256 tokens would need 2.4 MB, and the rollout moves
to data=4,tensor=2. Both moves are printed with their reasons. The selector goes by bytes and the
speed model, not by the clock: equal seeds are equal runs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the settings that differ from the defaults."""
    return ConfigDict(
        {
            "num_steps": 40,
            "devices": {"platform": "cpu", "num_cpu_devices": 8},
            "env": {"name": "trail", "args": {"num_stones": 8, "num_steps": 40}},
            # Looking back over few tokens, it walks as well far from the start as near to it.
            "model": {"num_layers": 1, "num_kv_heads": 4, "ffn_size": 128, "windows": (32,)},
            "rollout": {
                # Seven slots a device on data=8, which cannot be halved.
                "num_slots": 56,
                "episodes_per_step": 64,
                "group_size": 1,
                "chunk_size": 8,
                "burst": 2,
                "max_turn_tokens": 4,
                "patience_s": 10.0,
                "context_buckets": (32, 96, 256),
                # Few sizes of the KV cache, so that few programs are compiled.
                "page_size": 128,
            },
            "selector": {
                "budget_bytes_per_device": 1_900_000,
                "rollout_meshes": ("data=8", "data=4,tensor=2"),
                "train_meshes": ("data=1,fsdp=8", "data=1,fsdp=2,context=4"),
                # By the speed model: the same run on every machine.
                "table": "model",
            },
            "algorithm": "reinforce",
            "algorithm_args": {"turn_discount": 1.0},
            "train": {
                # The reward of a walk is paid at its end, for all of its steps alike.
                "epochs": 2,
                "micro_batches": 4,
                "logprob_chunk": 64,
                "schedule": "linear",
                "learning_rate": 4e-3,
                "final_learning_rate": 1e-3,
                "adam_b2": 0.99,
                "entropy_coefficient": 0.004,
                "sft_steps": 12,
                "sft_updates": 5,
                "sft_learning_rate": 4e-3,
            },
            "eval": {"every_steps": 40, "games": 16, "final_games": 64},
        }
    )
