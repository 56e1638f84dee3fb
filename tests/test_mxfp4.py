# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Packed experts of gpt-oss: the numbers of `transformers`, read slice by slice."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from earl_jax.models.checkpoints.hf_read import check_weights, load_parameters, open_checkpoint
from earl_jax.models.checkpoints.mxfp4 import PackedTensor, unpack
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.references import REFERENCE, change_config, change_tensors

PACKED = "model.layers.0.mlp.experts.down_proj"


class Stored:
    """A tensor of a file, as safetensors gives it."""

    def __init__(self, array):
        self._array = array

    def get_shape(self):
        return list(self._array.shape)

    def get_dtype(self):
        return "U8"

    def __getitem__(self, cuts):
        return self._array[cuts]


@pytest.fixture(scope="module")
def stored():
    with np.load(REFERENCE / "mxfp4.npz") as arrays:
        return dict(arrays)


def test_a_block_by_hand():
    """Bytes of codes 1 and 2, of 15 and 7: 0.5 and 1, -6 and 6; times 2, and times 1/4."""
    blocks = np.repeat(np.array([[0x21], [0x7F]], np.uint8), 16, axis=1)
    values = unpack(blocks, np.array([128, 125], np.uint8))
    assert values.tolist() == [1.0, 2.0] * 16 + [-1.5, 1.5] * 16


def test_numbers_are_those_of_transformers(stored):
    """Every byte is tried, with exponents from one end to the other."""
    values = unpack(stored["blocks"], stored["scales"]).swapaxes(1, 2)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, stored["values"])


def test_numbers_are_those_of_transformers_live(stored):
    pytest.importorskip("torch")
    from reference.make_reference import unpack as unpack_by_transformers

    live = unpack_by_transformers()
    for name, array in stored.items():
        np.testing.assert_array_equal(live[name], array)


def test_a_slice_is_that_of_the_whole(stored):
    """Also one that begins and ends within groups of 32."""
    packed = PackedTensor("x", Stored(stored["blocks"]), Stored(stored["scales"]))
    assert packed.get_shape() == [2, 64, 4] and packed.get_dtype() == "BF16"
    for cuts in (
        (slice(0, 2), slice(0, 64), slice(0, 4)),
        (slice(1, 2), slice(5, 37), slice(1, 3)),
        (slice(0, 1), slice(32, 40), slice(1, 4, 2)),
    ):
        np.testing.assert_array_equal(packed[cuts], stored["values"][cuts])


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(REFERENCE / "gpt_oss_mxfp4", tmp_path / "checkpoint"))


def test_blocks_and_scales_may_be_in_two_files(copied):
    tensors = load_file(copied / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scales")}
    (copied / "model.safetensors").unlink()
    files = {}
    for file, part in (("a.safetensors", tensors), ("b.safetensors", scales)):
        save_file(part, copied / file)
        files |= dict.fromkeys(part, file)
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    layout = make_layout(MeshShape())
    found = load_parameters(open_checkpoint(copied), layout)
    expected = load_parameters(open_checkpoint(REFERENCE / "gpt_oss_mxfp4"), layout)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{PACKED}_scales"), f"{PACKED} is missing"),
        (lambda t: t.pop(f"{PACKED}_blocks"), f"{PACKED} is missing"),
        (
            lambda t: t.update({f"{PACKED}_scales": t[f"{PACKED}_scales"][:, :-1]}),
            f"{PACKED}_blocks has the shape .* and {PACKED}_scales .*same first three axes",
        ),
        (
            lambda t: t.update({f"{PACKED}_scales": t[f"{PACKED}_scales"].astype(np.int16)}),
            f"{PACKED} in .* is of type I16 and U8; only F32",
        ),
    ],
)
def test_packed_tensors_that_cannot_be_read_are_errors(copied, change, words):
    change_tensors(copied, change)
    with pytest.raises(ValueError, match=words):
        check_weights(open_checkpoint(copied))


def test_packed_tensors_are_only_read_where_the_config_says_so(copied):
    change_config(copied, quantization_config=None)
    with pytest.raises(ValueError, match="experts.down_proj is missing"):
        check_weights(open_checkpoint(copied))
