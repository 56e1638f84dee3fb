# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the runs that tests make: small, from scratch, and computed in fp32.

The defaults of the package are for pretrained models on accelerators.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.config import file as config_file
from earl_jax.config.config import Config

# Episodes of few tokens, each with a task of its own.
ROLLOUT = {
    "num_slots": 64,
    "episodes_per_step": 128,
    "group_size": 1,
    "chunk_size": 8,
    "burst": 4,
    "max_turn_tokens": 4,
    "context_buckets": (32, 48, 64, 128),
}
# Steps large enough to see in every parameter.
TRAIN = {
    "schedule": "linear",
    "learning_rate": 2e-3,
    "final_learning_rate": 1e-4,
    "entropy_coefficient": 0.03,
}
SMALL = {
    "algorithm": "reinforce",
    "model": {"compute_dtype": "float32"},
    "rollout": ROLLOUT,
    "train": TRAIN,
}


def small(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run: `given`, and SMALL for what it leaves out."""
    merged = {**SMALL, **given}
    for name, section in SMALL.items():
        if isinstance(section, dict) and isinstance(merged[name], Mapping):
            merged[name] = {**section, **merged[name]}
    return merged


def write_config(folder: Path, given: Mapping[str, Any]) -> Path:
    """Writes a file for --config with these settings, for a process of its own."""
    path = folder / "config.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({given!r})\n"
    )
    return path


def make_config(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Returns the Config of a test's settings over SMALL."""
    return config_file.make_config(small(given), overrides)
