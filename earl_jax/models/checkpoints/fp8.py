# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices as DeepSeek-V3 is published: FP8 (E4M3), and a scale in fp32 for each block of numbers.

A matrix [outputs, inputs] is cut in blocks, by config.json of 128 x 128; beside it stands one of
their scales, by which numbers are multiplied (arXiv 2412.19437, section 3.3.2).
"""

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from earl_jax.settings.errors import InputError

# How the name of the scales goes on behind that of the matrix.
SCALES = "_scale_inv"


class ScaledTensor:
    """A matrix and its scales in files, read like a tensor that has their product: by slices."""

    def __init__(self, name: str, file: Path, stored: Any, scales: Any, block: Any) -> None:
        """Takes both tensors, lazily; `file` has the matrix.

        Raises ValueError where they do not go together.
        """
        shape, found = tuple(stored.get_shape()), tuple(scales.get_shape())
        if len(shape) != 2 or found != tuple(
            -(-size // step) for size, step in zip(shape, block, strict=True)
        ):
            raise InputError(
                f"{name} has the shape {shape} and {name}{SCALES} {found}; there must be a scale "
                f"for each block of {block[0]} x {block[1]} (quantization_config)"
            )
        self._name, self._file, self._block = name, file, block
        self._stored, self._scales = stored, scales

    def get_shape(self) -> list[int]:
        """Returns [outputs, inputs]."""
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        """Returns the type of the products, by its name in safetensors."""
        types = self._stored.get_dtype(), self._scales.get_dtype()
        return "F32" if types == ("F8_E4M3", "F32") else " and ".join(sorted(set(types)))

    def __getitem__(self, cuts: tuple[slice, slice]) -> np.ndarray:
        """Returns a part in fp32."""
        values = _numbers(self._file, self._name)[cuts].astype(np.float32)
        rows, columns = (
            np.arange(size)[cut] // step
            for size, cut, step in zip(self.get_shape(), cuts, self._block, strict=True)
        )
        return values * self._scales[:][rows[:, None], columns[None, :]]


def _numbers(file: Path, name: str) -> np.ndarray:
    """Returns a tensor of the file, mapped: safetensors gives numpy no FP8."""
    start, listed = _list_of(file, file.stat().st_mtime_ns)
    entry = listed[name]
    start += entry["data_offsets"][0]
    return np.memmap(file, ml_dtypes.float8_e4m3fn, "r", start, tuple(entry["shape"]))


@functools.lru_cache(maxsize=8)
def _list_of(file: Path, _changed: int) -> tuple[int, dict[str, Any]]:
    """Returns where the tensors of a file begin, and its list of them.

    A file is eight bytes, the length of its list; the list, in JSON; and the tensors.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))
