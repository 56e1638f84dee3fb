# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of runs whose episodes have very different lengths, on eight devices."""

from tests.support.placements import TINY

WANDERERS = {
    "model": TINY,
    "env": {"name": "tests.support.environments:Wanderer"},
    "algorithm": "grpo",
    "algorithm_args": {},
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 16,
        "group_size": 2,
        "context_buckets": (256,),
        "max_turn_tokens": 16,
        # A policy without training writes one of them in most replies.
        "stop_strings": tuple("abcdefghijklmnopqrstuvwxyz0123456789"),
    },
    "devices": {"platform": "cpu", "num_cpu_devices": 8},
    "selector": {"rollout_meshes": ("data=4",), "train_meshes": ("fsdp=4",), "table": "model"},
    "eval": {"every_steps": 100, "games": 8, "final_games": 8},
}
