# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints under tests/reference, and what `transformers` made of them."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from earl_jax.models.checkpoints.hf_read import Checkpoint, load_parameters, open_checkpoint
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support import ROOT

REFERENCE = ROOT / "tests/reference"
CHECKPOINT = REFERENCE / "qwen2_tied"
NAMES = sorted(path.name for path in REFERENCE.iterdir() if (path / "config.json").is_file())
# One of each kind of layers.
KINDS = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "smollm3",
    "gemma2",
    "gemma3",
]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(REFERENCE / name / "reference.npz") as arrays:
        return dict(arrays)


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(REFERENCE / name)


def given_softcap(name: str) -> dict[str, float]:
    """Returns the soft cap where `transformers` needs it as an argument (make_reference.py)."""
    softcap = checkpoint(name).model.attention_softcap
    return {"softcap": softcap} if softcap and name.startswith("gemma3") else {}


def mixed(name: str) -> MeshShape:
    """The mesh that cuts most of a checkpoint's axes."""
    has_experts = checkpoint(name).model.num_experts > 0
    return MeshShape(fsdp=2, tensor=2, **({"expert": 2} if has_experts else {"data": 2}))


@functools.cache
def loaded(name: str):
    return load_parameters(checkpoint(name), make_layout(MeshShape()))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint's files, by their names there."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal_trees(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def change_config(folder: Path, **changed):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def change_tensors(folder: Path, change):
    """Writes the one file of a checkpoint anew, with its arrays changed."""
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
