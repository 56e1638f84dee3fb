# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark step_flops: operations and bytes of programs, and blocks of attention, by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.hlo import Program, bytes_accessed, flops, parts, read_program, runs
from benchmarks.step_flops import POINTS, Kernel, needed_flops, pairs

# A loop of four trips: each cuts a layer's matrix out of all, multiplies, and keeps the product.
LOOP = """
HloModule loop, is_scheduled=true

%cut (p0: bf16[4,8,16], p1: s32[]) -> bf16[8,16] {
  %p0 = bf16[4,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = bf16[8,16]{1,0} bitcast(%one)
}

%keep (p0.1: f32[4,32,16], p1.1: f32[32,16], p2: s32[]) -> f32[4,32,16] {
  %p0.1 = f32[4,32,16]{2,1,0} parameter(0)
  %p1.1 = f32[32,16]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %own = f32[1,32,16]{2,1,0} bitcast(%p1.1)
  ROOT %put = f32[4,32,16]{2,1,0} dynamic-update-slice(%p0.1, %own, %p2, %zero.1, %zero.1)
}

%body (state: (s32[], f32[32,8], bf16[4,8,16], f32[4,32,16])) -> (s32[]) {
  %state = (s32[], f32[32,8]{1,0}, bf16[4,8,16]{2,1,0}, /*index=3*/f32[4,32,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[32,8]{1,0} get-tuple-element(%state), index=1
  %all = bf16[4,8,16]{2,1,0} get-tuple-element(%state), index=2
  %kept = f32[4,32,16]{2,1,0} get-tuple-element(%state), index=3
  %matrix = bf16[8,16]{1,0} fusion(%all, %i), kind=kLoop, calls=%cut
  %y = f32[32,16]{1,0} dot(%x, %matrix), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %more = f32[4,32,16]{2,1,0} fusion(%kept, %y, %i), kind=kLoop, calls=%keep
  ROOT %next = (s32[], f32[32,8]{1,0}, bf16[4,8,16]{2,1,0}, f32[4,32,16]{2,1,0}) \
tuple(%i, %x, %all, %more)
}

%condition (state.1: (s32[])) -> pred[] {
  %state.1 = (s32[], f32[32,8]{1,0}, bf16[4,8,16]{2,1,0}, f32[4,32,16]{2,1,0}) parameter(0)
  %at = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(4)
  ROOT %goes = pred[] compare(%at, %end), direction=LT
}

ENTRY %main (given: (s32[])) -> (s32[]) {
  %given = (s32[], f32[32,8]{1,0}, bf16[4,8,16]{2,1,0}, f32[4,32,16]{2,1,0}) parameter(0)
  ROOT %loop = (s32[], f32[32,8]{1,0}, bf16[4,8,16]{2,1,0}, f32[4,32,16]{2,1,0}) while(%given), \
condition=%condition, body=%body
}
"""
# As compilers of chips write products: a library's, and convolutions, one of them in four batches.
PRODUCTS = """
ENTRY %main (a: bf16[32,8]) -> f32[4,32,16] {
  %a = bf16[32,8]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %c = bf16[4,32,8]{2,1,0} parameter(2)
  %d = bf16[4,8,16]{2,1,0} parameter(3)
  %gemm = (f32[32,16]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}
  %flat = f32[32,16]{1,0:T(8,128)S(1)} convolution(%a, %b), dim_labels=bf_io->bf
  %ahead = (bf16[4,8,16]{2,1,0:T(8,128)S(1)}, bf16[4,8,16]{2,1,0}, u32[]{:S(2)}) copy-start(%d)
  %there = bf16[4,8,16]{2,1,0:T(8,128)S(1)} copy-done(%ahead)
  ROOT %each = f32[4,32,16]{2,1,0} convolution(%c, %there), \
window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
"""


def counted(program: Program) -> dict[str, tuple[int, int, int]]:
    """Returns how often each instruction runs, its operations and its bytes, but free ones."""
    found = {}
    for run in runs(program):
        operations = sum(flops(part) for part in parts(program, run))
        costs = operations, bytes_accessed(program, run)
        if any(costs):
            found[run.instruction.name] = run.times, *costs
    return found


def test_a_loop_counts_as_often_as_it_runs_and_a_slice_for_what_it_cuts_out():
    product = 2 * 32 * 16 * 8
    matrix, kept = 8 * 16 * 2, 32 * 16 * 4
    assert counted(read_program(LOOP)) == {
        "matrix": (4, 0, matrix + 4 + matrix),
        "y": (4, product, 32 * 8 * 4 + matrix + kept),
        # What is kept of the other layers is neither read nor written.
        "more": (4, 0, kept + 4 + kept),
    }


def test_a_loop_whose_trips_depend_on_data_is_an_error():
    text = LOOP.replace("%end = s32[] constant(4)", "%end = s32[] add(%at, %at)")
    with pytest.raises(ValueError, match="the trips of loop loop depend on data"):
        list(runs(read_program(text)))


def test_products_of_libraries_and_convolutions_count_like_those_of_matrices():
    product = 2 * 32 * 16 * 8
    left, right, result = 32 * 8 * 2, 8 * 16 * 2, 32 * 16 * 4
    assert counted(read_program(PRODUCTS)) == {
        # What is in a core's own memory is free.
        "gemm": (1, product, left + result),
        "flat": (1, product, left),
        "ahead": (1, 0, 4 * right),
        "each": (1, 4 * product, 4 * (left + result)),
    }


def test_a_compiled_scan_counts_all_of_its_products():
    def three(x, weights):
        return jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 256), (3, 256, 256))]
    program = read_program(jax.jit(three).lower(*shapes).compile().as_text())
    found = counted(program).values()
    assert sum(times * number for times, number, _ in found) == 3 * 2 * 128 * 256 * 256


def test_pairs_of_blocks_by_hand():
    whole = Kernel(2, 2, 2, skips_future=True, skips_documents=False)
    # Of 8 tokens blocks of two: 1 + 2 + 3 + 4 of 4 pairs each.
    assert pairs(whole, [8]) == pairs(whole, [4, 4]) == 10 * 4
    # Two documents of two blocks each: twice 1 + 2.
    assert pairs(whole._replace(skips_documents=True), [4, 4]) == 6 * 4
    # The third and the fourth token are of two documents, and the block begins with the first one.
    assert pairs(whole._replace(skips_documents=True), [3, 5]) == (1 + 2 + 2 + 3) * 4
    assert pairs(whole._replace(skips_future=False), [8]) == 64


def test_an_update_needs_six_operations_for_a_parameter_and_half_of_the_square_of_a_document():
    point = POINTS[0]
    matrices, attention = needed_flops(point, [8192])
    # 1.2358 billion parameters by the model card's 1.23.
    assert matrices / 6 / 8192 == pytest.approx(1.2358e9, rel=1e-4)
    assert attention == 16 * 12 * 2048 * 8192 * 8193 // 2
    assert needed_flops(point, [1024] * 8) == (matrices, 16 * 12 * 2048 * 8 * 1024 * 1025 // 2)
