# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The speed model: seconds by hand arithmetic."""

import dataclasses

import pytest
from test_footprint import D1, D4T2, H100, LAYER, NUMBERS, SIZES, TINY, WORK

from earl_jax.placement.problem import model_sizes
from earl_jax.selector.footprint import cache_token_bytes, device_bytes, train_footprint
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.roofline import (
    MATMUL_REACHED,
    MEMORY_REACHED,
    Seconds,
    all_reduce_s,
    cache_read,
    calibration,
    decode_s,
    keys_s,
    ring_s,
    rollout_tokens_per_s,
    round_s,
    train_s,
    waves,
    weights_read,
)
from earl_jax.sharding.layout import MeshShape


def test_an_all_reduce_is_a_ring():
    # Seven eighths of the bytes twice, over NVLink at 0.8 of 450 GB/s, and 14 steps.
    expected = 6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * 1e6 / (0.8 * 450e9)
    assert all_reduce_s(H100, 1e6, 8) == pytest.approx(expected)
    assert all_reduce_s(H100, 1e6, 1) == 0.0
    # On a TPU along an axis of the torus.
    v5e = parse_topology("v5e:4x4")
    expected = 1e-6 + 6 * 1e-6 + 2 * 3 / 4 * 1e6 / (0.8 * 100e9)
    assert all_reduce_s(v5e, 1e6, 4) == pytest.approx(expected)


def test_a_ring_through_several_hosts_uses_their_network_cards():
    pod = parse_topology("h100:4x8")
    inside, across = all_reduce_s(pod, 1e9, 8), all_reduce_s(pod, 1e9, 8, stride=8)
    # One member a host: 50 GB/s instead of 450.
    assert across / inside == pytest.approx(9, rel=0.01)
    # Sixteen in a row are eight a host, with eight cards.
    assert all_reduce_s(pod, 1e9, 16) == pytest.approx(2 * 15 / 16 * 1e9 / (0.8 * 400e9), rel=0.01)


def test_a_decode_step_by_hand():
    """Three rows behind ten tokens, of which the first layer looks at six."""
    found = decode_s(H100, SIZES, WORK, D1, rows=3, context=10)
    # All weights but the embedding; keys and values of 2 heads of 4 numbers in fp32.
    read = 4 * (NUMBERS - 32 * 8) + 3 * (6 + 10) * 2 * 2 * 4 * 4
    assert found.memory_s == pytest.approx(read / (MEMORY_REACHED * 3350e9))
    matrices = 2 * (LAYER - 16) + 8 * 32
    attention = 2 * (6 + 10) * 4 * 4
    flops = 3 * 2 * (matrices + attention)
    assert found.compute_s == pytest.approx(flops / (MATMUL_REACHED * 989e12))
    assert found.collectives_s == 0.0
    assert found.total == found.memory_s


def test_tensor_parallelism_halves_what_is_read_and_adds_collectives():
    one, two = (decode_s(H100, SIZES, WORK, m, rows=8, context=64) for m in (D1, D4T2))
    # Norms are whole everywhere.
    assert two.memory_s == pytest.approx(one.memory_s / 2, rel=0.03)
    # Two a layer, one of the embedding, and half a one of the logits: so far all are latency.
    assert two.collectives_s == pytest.approx(5.5 * all_reduce_s(H100, 0, 2), rel=0.01)


def test_over_context_a_row_is_read_by_all_and_a_chunk_cut():
    """By hand: of a word the head and the layers are everybody's, of a chunk the head only."""
    mesh, free = MeshShape(context=2), dataclasses.replace(H100, start_s=0.0, hop_s=0.0)
    word, whole = (decode_s(free, SIZES, WORK, m, rows=1, context=9) for m in (mesh, D1))
    cache = (9 + 6) * 2 * 2 * 4 * 4
    assert whole.memory_s - word.memory_s == pytest.approx(cache / 2 / (MEMORY_REACHED * 3350e9))
    chunk, uncut = (decode_s(free, SIZES, WORK, m, 1, 9, tokens=6) for m in (mesh, D1))
    head = 2 * 8 * 32 / (MATMUL_REACHED * 989e12)
    assert chunk.compute_s - head == pytest.approx((uncut.compute_s - head) / 2)
    # Four heads and two key/value heads of size 4, in fp32; a gather is half of an all-reduce.
    scores, sums, sides = 6 * 4 * 4, 6 * 4 * 5 * 4, 6 * (4 + 2 * 2) * 4 * 4
    layer = all_reduce_s(H100, scores, 2)
    layer += (all_reduce_s(H100, sums, 2) + all_reduce_s(H100, sides, 2)) / 2
    assert keys_s(H100, SIZES, mesh, 6, True) == pytest.approx(2 * layer)


def test_of_a_mixture_the_experts_are_read_that_some_token_goes_to():
    config = dataclasses.replace(TINY, num_experts=4, experts_per_token=2, expert_ffn_size=16)
    sizes = model_sizes(config, 32, engine_dtype="float32")
    experts = 2 * 4 * 3 * 8 * 16 * 4
    rest = device_bytes(sizes.engine, D1) - experts - 32 * 8 * 4
    assert weights_read(sizes, D1, 1) == pytest.approx(rest + experts / 2)
    assert weights_read(sizes, D1, 2) == pytest.approx(rest + experts * 3 / 4)
    assert weights_read(sizes, D1, 99) == pytest.approx(rest + experts)


def test_windows_bound_what_is_read_of_the_cache():
    assert cache_read(SIZES, WORK, D1, 4) == 4 * cache_token_bytes(SIZES, WORK, D1)
    assert cache_read(SIZES, WORK, D1, 100) == 53 * cache_token_bytes(SIZES, WORK, D1)


def test_rows_that_do_not_fit_wait_for_others():
    assert waves(16, 7) == [7, 7, 2]
    assert waves(16, 16) == waves(16, 40) == [16]
    hardware = H100.with_devices(1)
    all_at_once = rollout_tokens_per_s(hardware, SIZES, WORK, D1, 8, 16)
    assert all_at_once == pytest.approx(16 * 4 / round_s(hardware, SIZES, WORK, D1, 16, 8))
    assert rollout_tokens_per_s(hardware, SIZES, WORK, D1, 8, 15) < all_at_once


def test_slots_that_take_turns_have_more_steps_of_fewer_rows():
    """Of 16 slots on four row shards six rows are two each: four slots take turns in pairs."""
    work = dataclasses.replace(WORK, step_rows=6)
    assert [work.rows_a_step(D4T2, rows) for rows in (1, 2, 4)] == [1, 2, 2]
    assert [WORK.rows_a_step(D4T2, rows) for rows in (1, 4)] == [1, 4]
    append = 2 * decode_s(H100, SIZES, work, D4T2, 2, 8, 4).total
    step = decode_s(H100, SIZES, work, D4T2, 2, 8).total
    assert round_s(H100, SIZES, work, D4T2, 4, 8) == pytest.approx(append + 4 * 2 * step)


def test_an_update_costs_four_forward_passes_with_remat():
    """Where matrices are all that counts."""
    wide = dataclasses.replace(TINY, width=512, ffn_size=4096, windows=())
    sizes = model_sizes(wide, 32, engine_dtype="float32")
    work = dataclasses.replace(WORK, num_rows=1024)
    found = train_s(H100, sizes, work, D1, 4)
    layer = 2 * 512 * 16 + 2 * 512 * 8 + 3 * 512 * 4096
    flops = 4096 * (4 * 2 * 2 * layer + 4 * 2 * 512 * 32)
    assert found.compute_s == pytest.approx(flops / (MATMUL_REACHED * 989e12), rel=0.01)
    eight = train_s(H100, sizes, work, MeshShape(data=8), 4)
    assert eight.compute_s == pytest.approx(found.compute_s / 8)
    assert eight.collectives_s > 0.0 == found.collectives_s


def test_keys_and_values_go_round_by_hand():
    """Eight shards of 16 tokens each, two key/value heads of 4 numbers in fp32, two layers."""
    keys_and_values = 2 * 8 * 16 * 2 * 4 * 4
    # A pass there, one again for remat, and one back, with gradients that are as many bytes.
    expected = 2 * 4 * 0.5 * all_reduce_s(H100, keys_and_values, 8)
    assert ring_s(H100, SIZES, WORK, MeshShape(context=8), 16) == pytest.approx(expected)
    assert ring_s(H100, SIZES, WORK, MeshShape(fsdp=8), 16) == 0.0


def test_a_row_on_eight_devices_is_as_much_work_as_eight_rows():
    """And as many bytes of activations, of gathered weights, and of state."""
    eight = dataclasses.replace(WORK, num_rows=8, micro_batches=1)
    one = dataclasses.replace(eight, num_rows=1)
    cut, whole = MeshShape(context=8), MeshShape(fsdp=8)
    assert train_footprint(SIZES, one, cut, 512, "gpu") == train_footprint(
        SIZES, eight, whole, 64, "gpu"
    )
    ours, theirs = train_s(H100, SIZES, one, cut, 512), train_s(H100, SIZES, eight, whole, 64)
    assert ours.memory_s == theirs.memory_s
    # But that tokens look further back.
    assert ours.compute_s > theirs.compute_s
    short = dataclasses.replace(SIZES, windows=(1, 1))
    ours, theirs = train_s(H100, short, one, cut, 512), train_s(H100, short, eight, whole, 64)
    assert ours.compute_s == theirs.compute_s


def test_the_longer_of_computing_and_reading_counts():
    assert Seconds(compute_s=1.0, memory_s=3.0, collectives_s=0.5).total == 3.5


def test_one_factor_calibrates_a_stage():
    assert calibration([]) == 1.0
    assert calibration([(50.0, 100.0), (80.0, 100.0), (60.0, 100.0)]) == 0.6
