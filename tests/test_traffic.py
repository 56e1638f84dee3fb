# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""tests/support/traffic.py counts the bytes of a compiled program's collectives."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.traffic import collectives

# One of each kind as XLA writes them, at a device; all devices together receive so many bytes.
LINES = {
    # Each of eight has 64 bytes, and gets the 448 of the others.
    "%a = f32[16,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}": 8 * 448,
    # Begun and done apart: operand and result; two groups of four.
    "%b = (bf16[2,8]{1,0}, bf16[8,8]{1,0:T(8,128)(2,1)}) all-gather-start(%p), "
    "replica_groups=[2,4]<=[8], dimensions={0}": 8 * 96,
    "%m = bf16[8,8]{1,0} all-gather(%p), "
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}": 8 * 96,
    "%n = bf16[8,8]{1,0} all-gather(%p), replica_groups=mesh['a'=8] {'a':(1)4}": 8 * 96,
    # Several arrays in one.
    "%c = (s8[8]{0}, f32[4]{0}) all-gather(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0)": 8 * 12,
    "%d = f32[8,4]{1,0} all-to-all(%p), replica_groups={{0,1,2,3},{4,5,6,7}}": 8 * 96,
    "%o = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%p), replica_groups=[2,4]<=[8]": 8 * 96,
    "%e = f32[4]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], to_apply=%add": 8 * 112,
    "%f = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add": 8 * 28,
    # A device that sends itself something sends nothing.
    "%g = u16[10]{0} collective-permute(%p), source_target_pairs={{0,1},{1,1},{2,0}}": 2 * 20,
    "%h = (u16[10]{0}, u16[10]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
    "source_target_pairs={{0,1}}, metadata={op_name={3,4}}": 20,
    "%i = f32[4]{0} all-gather-done(%b)": None,
    "%j = f32[4]{0} fusion(%all-gather.2, %all-reduce), kind=kLoop": None,
}


def test_the_bytes_of_a_programs_text_by_hand():
    for line, num_bytes in LINES.items():
        found = [each.received_bytes for each in collectives(line, 8)]
        assert found == ([] if num_bytes is None else [num_bytes]), line
    assert len(collectives("\n".join(LINES), 8)) == 11


def test_the_bytes_of_a_compiled_program():
    """Eight rows of 32 bytes to everyone: each lacks seven."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    shape = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows)
    text = jax.jit(lambda x: x, out_shardings=whole).lower(shape).compile().as_text()
    assert collectives(text, 8) == [("all-gather", 8 * 7 * 32)]
