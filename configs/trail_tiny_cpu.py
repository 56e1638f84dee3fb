# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Contexts that grow 16 times because the policy learns: from one step of a trail to all 40.

uv run python -m earl_jax.main --config=configs/trail_tiny_cpu.py

A few minutes on a laptop. In its first 12 steps the policy is also trained on walks that are right
half the time, which teach it what a step looks like; with each step that it then gets right more
often the walks lengthen, from 15 tokens to 247. Nothing can train on such rows within the budget as
it trains on short ones: the selector changes the mesh, or goes on in smaller micro-batches with
activations computed again. benchmarks/growing.md compares the run with static meshes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """What differs from the defaults."""
    return ConfigDict(
        {
            "num_steps": 26,
            "devices": {"platform": "cpu", "num_cpu_devices": 8},
            "env": {"name": "trail", "args": {"num_stones": 8, "num_steps": 40}},
            # Looking back over few tokens, it walks as well far from the start as near to it.
            "model": {"num_layers": 1, "num_kv_heads": 4, "ffn_size": 128, "windows": (32,)},
            "rollout": {
                "num_slots": 64,
                "episodes_per_step": 64,
                "chunk_size": 8,
                "burst": 2,
                "max_turn_tokens": 4,
                "patience_s": 10.0,
                "context_buckets": (32, 96, 256),
                # Few sizes of the KV cache, so that few programs are compiled.
                "page_size": 128,
            },
            "selector": {
                "budget_bytes_per_device": 3_900_000,
                "rollout_meshes": ("data=8", "data=4,tensor=2"),
                "train_meshes": ("data=8", "data=1,fsdp=8"),
                # The same on every machine.
                "table": "model",
            },
            "train": {
                # The reward of a walk is paid at its end, for all of its steps alike.
                "turn_discount": 1.0,
                "epochs": 2,
                "micro_batches": 4,
                "logprob_chunk": 64,
                "learning_rate": 4e-3,
                "final_learning_rate": 1e-3,
                "adam_b2": 0.99,
                "entropy_coefficient": 0.004,
                "sft_steps": 12,
                "sft_updates": 5,
                "sft_learning_rate": 4e-3,
            },
            "eval": {"every_steps": 26, "games": 16, "final_games": 64},
        }
    )
