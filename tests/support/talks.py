# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Files of conversations, and runs that learn from them alone."""

import json
from pathlib import Path

from tests.support.placements import EIGHT_SLOTS, TINY


def talk(*pairs, **others) -> str:
    """A line of ("user", "1"), ... and other keys; ("assistant", "1", 0) has that weight."""
    messages = []
    for role, content, *weight in pairs:
        messages.append({"role": role, "content": content})
        if weight:
            messages[-1]["weight"] = weight[0]
    return json.dumps({"messages": messages, **others})


def sums(number: int, added: int = 1) -> list[str]:
    """So many lines of about ten tokens, each with a sum and its result."""
    return [talk(("user", f"{i} + {added}?"), ("assistant", str(i + added))) for i in range(number)]


def sft_run(path: Path, **others) -> dict:
    """The settings of a run on the conversations of a file alone."""
    return {
        "num_steps": 4,
        "algorithm": "sft",
        "model": TINY,
        "rollout": {**EIGHT_SLOTS, "context_buckets": (32,)},
        "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("fsdp=8",), "table": "model"},
        "train": {"sft_path": str(path), "entropy_coefficient": 0.0},
        "checkpoint": {"every_steps": 1, "keep": 5},
        **others,
    }
