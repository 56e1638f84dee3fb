# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of shardings between which arrays move, and a count of bytes read by the host."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array as jax_array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
XYZ = ("x", "y", "z")
# name: (mesh shape, device ids in mesh order, mesh axes that split the array's axes)
LAYOUTS = {
    "8x1x1": ((8, 1, 1), range(8), XYZ),
    "4x1x2": ((4, 1, 2), range(8), ("x", "z", "y")),
    "2x2x2": ((2, 2, 2), range(8), XYZ),
    "1x8x1": ((1, 8, 1), range(8), XYZ),
    "joint": ((2, 2, 2), range(8), (("x", "z"), "y")),
    "transposed": ((2, 4, 1), (0, 4, 1, 5, 2, 6, 3, 7), XYZ),
    "reversed rows": ((8, 1, 1), range(7, -1, -1), XYZ),
    "first half": ((2, 2, 1), range(4), XYZ),
    "second half": ((2, 2, 1), range(4, 8), XYZ),
    "second half, columns": ((1, 4, 1), range(4, 8), XYZ),
    "last six": ((3, 2, 1), range(2, 8), XYZ),
    "replicated": ((8, 1, 1), range(8), ()),
    "partly replicated": ((2, 2, 2), range(8), (None, "y")),
    "replicated on six": ((6, 1, 1), range(2, 8), ()),
}


PAIRS = [
    ("8x1x1", "8x1x1"),
    ("8x1x1", "4x1x2"),
    ("4x1x2", "2x2x2"),
    ("2x2x2", "1x8x1"),
    ("1x8x1", "partly replicated"),
    ("partly replicated", "joint"),
    ("replicated", "8x1x1"),
    ("joint", "replicated"),
    ("8x1x1", "transposed"),
    ("transposed", "2x2x2"),
    ("8x1x1", "reversed rows"),
    ("8x1x1", "first half"),
    ("first half", "8x1x1"),
    ("first half", "second half"),
    ("first half", "second half, columns"),
    ("2x2x2", "last six"),
    ("last six", "1x8x1"),
    ("last six", "first half"),
    ("replicated on six", "first half"),
    ("second half", "replicated on six"),
    ("replicated", "second half"),
    ("partly replicated", "last six"),
]


SHAPES = {
    "logprobs": ((24, 8, 8), np.float32),
    "cache": ((24, 16), jnp.bfloat16),
    "tokens": ((24,), np.int32),
    "mask": ((24, 8), np.bool_),
    "codes": ((24, 8, 8), np.int8),
}


def make_shardings(name: str, axis_type: AxisType = AxisType.Auto) -> dict[str, NamedSharding]:
    mesh_shape, ids, splits = LAYOUTS[name]
    devices = np.array([jax.devices()[n] for n in ids]).reshape(mesh_shape)
    mesh = Mesh(devices, XYZ, axis_types=(axis_type,) * 3)
    return {
        leaf: NamedSharding(mesh, P(*splits[: len(shape)])) for leaf, (shape, _) in SHAPES.items()
    }


def make_values() -> dict[str, np.ndarray]:
    """Random bits: any float32, any bfloat16, NaNs of all kinds among them."""
    rng = np.random.default_rng(0)
    values = {}
    for leaf, (shape, dtype) in SHAPES.items():
        if dtype == np.bool_:
            values[leaf] = rng.integers(0, 2, shape).astype(bool)
        else:
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            values[leaf] = np.frombuffer(rng.bytes(num_bytes), dtype).reshape(shape)
    bits = values["cache"].view(np.uint16).copy()
    # -inf, -0.0, the least subnormal; the usual NaN, one with other bits, one that signals.
    bits[0, :6] = 0xFF80, 0x8000, 0x0001, 0x7FC0, 0x7FE9, 0xFF81
    return {**values, "cache": bits.view(jnp.bfloat16)}


@contextlib.contextmanager
def count_host_bytes() -> Iterator[list[int]]:
    """Collects the bytes of each device-to-host read, below everything that Python can call."""
    reads: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_to_np_array_did_copy", "_single_device_array_to_np_array_did_copy"):
            original = getattr(jax_array.ArrayImpl, name, None)
            if original is not None:

                def counted(array, original=original):
                    value, did_copy = original(array)
                    reads.append(value.nbytes)
                    return value, did_copy

                patch.setattr(jax_array.ArrayImpl, name, counted)
        yield reads


def resident_bytes(shapes: Any, shardings: Any) -> int:
    """Returns bytes per device of a tree of arrays in these shardings."""
    return sum(
        math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, where in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    )
