# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3's published weights, FP8 with a scale for each block, read slice by slice."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from earl_jax.models.checkpoints.hf_read import check_weights, load_parameters, open_checkpoint
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.references import REFERENCE, assert_equal_trees, change_config, loaded

NAME = "deepseek_v3_tied"
# Not a divisor of all sides of matrices: the last blocks are smaller.
BLOCK = (20, 12)
MATRIX = "model.layers.1.self_attn.kv_b_proj.weight"


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a file of safetensors, whose own function knows no FP8 of numpy's."""
    names = {"float32": "F32", "float8_e4m3fn": "F8_E4M3", "int8": "I8"}
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        dtype = names[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    parts = [len(text).to_bytes(8, "little"), text, *(t.tobytes() for t in tensors.values())]
    path.write_bytes(b"".join(parts))


def by_number(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each number."""
    return np.kron(scales, np.ones(BLOCK, np.float32))[: shape[0], : shape[1]]


@pytest.fixture
def quantized(tmp_path):
    """A folder with matrices of layers in FP8, and the numbers that they stand for."""
    folder = Path(shutil.copytree(REFERENCE / NAME, tmp_path / "checkpoint"))
    rng = np.random.default_rng(0)
    stored, meant = {}, {}
    for name, array in load_file(folder / "model.safetensors").items():
        is_matrix = array.ndim == 2 and ".layers." in name and not name.endswith("gate.weight")
        if not is_matrix:
            stored[name] = meant[name] = array
            continue
        blocks = [-(-size // step) for size, step in zip(array.shape, BLOCK, strict=True)]
        scales = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
        numbers = (array / by_number(scales, array.shape)).astype(ml_dtypes.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = numbers, scales
        meant[name] = numbers.astype(np.float32) * by_number(scales, array.shape)
    write(folder / "model.safetensors", stored)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    change_config(folder, quantization_config=config)
    return folder, stored, meant


def test_numbers_are_multiplied_by_the_scales_of_their_blocks(quantized, tmp_path):
    """As from a checkpoint of the products, on one device and by slices on a mesh."""
    folder, _, meant = quantized
    plain = Path(shutil.copytree(REFERENCE / NAME, tmp_path / "plain"))
    write(plain / "model.safetensors", meant)
    expected = load_parameters(open_checkpoint(plain), make_layout(MeshShape()))
    found = load_parameters(open_checkpoint(folder), make_layout(MeshShape()))
    assert_equal_trees(found, expected)
    mixed = make_layout(MeshShape(fsdp=2, expert=2, tensor=2))
    assert_equal_trees(load_parameters(open_checkpoint(folder), mixed), expected)
    # E4M3 has three bits behind a number's first.
    for one, other in zip(*map(jax.tree.leaves, (found, loaded(NAME))), strict=True):
        assert np.max(np.abs(one - other)) <= 2**-4 * np.max(np.abs(other))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{MATRIX}_scale_inv"), f"{MATRIX} in .* is of type F8_E4M3; only F32"),
        (
            lambda t: t.update({f"{MATRIX}_scale_inv": t[f"{MATRIX}_scale_inv"][:-1]}),
            f"{MATRIX} has the shape .* a scale for each block of 20 x 12",
        ),
        (
            lambda t: t.update({MATRIX: t[MATRIX].astype(np.int8)}),
            f"{MATRIX} in .* is of type F32 and I8; only F32",
        ),
    ],
)
def test_missing_or_mismatched_scales_are_an_error(quantized, change, words):
    folder, stored, _ = quantized
    change(stored)
    write(folder / "model.safetensors", stored)
    with pytest.raises(ValueError, match=words):
        check_weights(open_checkpoint(folder))


def test_other_quantisations_are_refused(quantized):
    folder, *_ = quantized
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="weight_block_size is None; fp8 can be read where it is"):
        open_checkpoint(folder)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match="only the quant_method 'fp8' can be read"):
        open_checkpoint(folder)
