# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints under tests/reference, and what `transformers` made of them."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from earl_jax.models.checkpoints.hf_read import Checkpoint, load_parameters, open_checkpoint
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support import ROOT

REFERENCE = ROOT / "tests/reference"
CHECKPOINT = REFERENCE / "qwen2_tied"
NAMES = sorted(path.name for path in REFERENCE.iterdir() if (path / "config.json").is_file())
# One of each kind of layers.
KINDS = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3"]
MESHES = [
    MeshShape(data=8),
    MeshShape(fsdp=8),
    MeshShape(tensor=2),
    MeshShape(data=2, fsdp=2, tensor=2),
]
EXPERT_MESHES = [MeshShape(expert=8), MeshShape(fsdp=2, expert=2, tensor=2)]
# Every kind on the mesh that cuts most, and two on every mesh that can cut them.
PLACED = [
    *((name, MESHES[-1]) for name in KINDS),
    *(("gemma3", mesh) for mesh in MESHES[:-1]),
    *(("qwen3_moe", mesh) for mesh in EXPERT_MESHES),
]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(REFERENCE / name / "reference.npz") as arrays:
        return dict(arrays)


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(REFERENCE / name)


@functools.cache
def loaded(name: str):
    return load_parameters(checkpoint(name), make_layout(MeshShape()))


def assert_equal_trees(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def change_config(folder: Path, **changed):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
