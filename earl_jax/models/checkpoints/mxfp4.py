# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Experts as gpt-oss is published: MXFP4, four bits a number (OCP Microscaling Formats 1.0).

Of each output, 32 inputs at a time share a power of two, by which one of FP4's sixteen numbers is
multiplied. A matrix that `transformers` has as [experts, inputs, outputs] is in two tensors, blocks
u8[experts, outputs, inputs / 32, 16], where a byte has two inputs, the first in its lower half, and
scales u8[experts, outputs, inputs / 32], exponents plus 127.
"""

from typing import Any

import numpy as np

from earl_jax.settings.errors import InputError

# How the names of both tensors end.
BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# Both numbers of each byte; as one of 64 bits, which numpy looks up five times as fast.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint64)[:, 0]
_GROUP = 32


class PackedTensor:
    """The numbers of two tensors of a file, read like a tensor that has them: by slices."""

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        """Takes both tensors, lazily. Raises ValueError where they do not go together."""
        shape, groups = tuple(blocks.get_shape()), tuple(scales.get_shape())
        if shape != (*groups, _GROUP // 2) or len(shape) != 4:
            raise InputError(
                f"{name}{BLOCKS} has the shape {shape} and {name}{SCALES} {groups}; packed numbers "
                f"are [experts, outputs, inputs / {_GROUP}, {_GROUP // 2}] and their scales have "
                "the same first three axes"
            )
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Returns [experts, inputs, outputs]."""
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * _GROUP, outputs]

    def get_dtype(self) -> str:
        """Returns the type that holds each number exactly, by its name in safetensors."""
        types = {self._blocks.get_dtype(), self._scales.get_dtype()}
        return "BF16" if types == {"U8"} else " and ".join(sorted(types))

    def __getitem__(self, cuts: tuple[slice, slice, slice]) -> np.ndarray:
        """Returns a part in fp32."""
        experts, inputs, outputs = cuts
        first = inputs.start // _GROUP
        part = (experts, outputs, slice(first, -(-inputs.stop // _GROUP)))
        values = unpack(self._blocks[part], self._scales[part])
        values = values[..., inputs.start - first * _GROUP : inputs.stop - first * _GROUP]
        return values.swapaxes(1, 2)


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers of blocks u8[..., G, 16] with scales u8[..., G]: f32[..., G * 32].

    Example: a block of bytes 0x21 with scale 128: 1, 2, 1, 2, ... (0.5 and 1, times 2).
    """
    values = _PAIRS[blocks].view(np.float32)
    values *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)
