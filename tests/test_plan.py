# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner: bytes and times by hand arithmetic, against compilers, and the command."""

import dataclasses
import importlib.util
import json
import re
import time

import jax
import pytest

from benchmarks import plan as benchmark
from earl_jax.config_file import make_config
from earl_jax.models.config import ModelConfig
from earl_jax.plan import plan_command
from earl_jax.rollout.engine import EngineConfig, PolicyEngine
from earl_jax.rollout.slots import SlotRules
from earl_jax.scene import make_scene, model_sizes
from earl_jax.selector.choose import Settings
from earl_jax.selector.contenders import calibrated
from earl_jax.selector.enough import smallest_hardware
from earl_jax.selector.footprint import (
    Footprint,
    Workload,
    cache_token_bytes,
    device_bytes,
    parts_of,
    rollout_footprint,
    row_bytes,
    train_footprint,
    trainer_bytes,
)
from earl_jax.selector.hardware import hardware_of, parse_topology
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.memory import resident_bytes
from earl_jax.selector.prospects import Prospect, beside, on_rollout_rung, rollout_prospect
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
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.schedule_text import schedule_lines, schedule_values
from earl_jax.selector.throughput import Measurement
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_abstract_layout
from earl_jax.sharding.topology import CHIPS, make_topology
from earl_jax.train.config import TrainConfig
from earl_jax.train.step import state_shapes, state_shardings

# Two layers of width 8, 4 heads on 2 key/value heads of size 4, a network of 16, 32 entries.
TINY = ModelConfig(
    num_layers=2, width=8, num_heads=4, num_kv_heads=2, head_size=4, ffn_size=16, windows=(6, 0)
)
# Of a layer: two norms of 8, queries and outputs of 8 x 16, keys and values of 8 x 8, three
# matrices of 8 x 16.
LAYER = 2 * 8 + 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16
NUMBERS = 2 * LAYER + 8 + 2 * 32 * 8
SIZES = model_sizes(TINY, 32, engine_dtype="float32")
WORK = Workload(
    num_slots=16,
    num_rows=16,
    micro_batches=2,
    remat=True,
    logprob_chunk=4,
    chunk_size=4,
    append_rows=2,
    burst=4,
    page_size=4,
    kv_itemsize=4,
)
D1 = MeshShape()
D4T2 = MeshShape(data=4, tensor=2)
F4T2 = MeshShape(fsdp=4, tensor=2)
H100 = parse_topology("h100:1x8")


# Hardware.


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "memory_gib"),
    [
        ("v5e:16x16", 256, 64, 16),
        ("v5p:4x4x8", 128, 32, 95),
        ("v6e:4x4", 16, 4, 32),
        ("h100:16x8", 128, 16, 79.6),
        ("h200:1x8", 8, 1, 140.4),
        ("b200:64x8", 512, 64, 179.1),
        ("cpu:8", 8, 1, 2),
    ],
)
def test_a_topology_is_so_many_devices_on_so_many_hosts(name, devices, hosts, memory_gib):
    hardware = parse_topology(name)
    assert (hardware.name, hardware.num_devices, hardware.num_hosts) == (name, devices, hosts)
    assert hardware.memory_bytes / 2**30 == pytest.approx(memory_gib, abs=0.05)
    assert hardware.usable_bytes <= hardware.memory_bytes


def test_every_chip_has_all_facts():
    for chip in CHIPS.values():
        hardware = hardware_of(make_topology(chip.example))
        assert hardware.host_memory_bytes > hardware.memory_bytes
        assert hardware.link_bytes_per_s > hardware.network_bytes_per_s
    # One of the two axes of a v5e's torus, both ways: half of its four links of 50 GB/s.
    assert parse_topology("v5e:4x4").link_bytes_per_s == 100e9


@pytest.mark.parametrize("name", ["v9:4x4", "tpu", "", "H100:1x8"])
def test_an_unknown_topology_is_answered_with_those_known(name):
    with pytest.raises(ValueError, match="'v5e:4x4', .*'b200:1x8', or 'cpu:8'"):
        parse_topology(name)


@pytest.mark.parametrize("name", ["cpu:", "cpu:0", "cpu:2x4", "cpu:²"])
def test_virtual_devices_are_given_by_their_number(name):
    with pytest.raises(ValueError, match="by their number, as in 'cpu:8'"):
        parse_topology(name)


# Bytes.


def test_parameters_are_cut_as_the_rules_say():
    assert parts_of("LDF", F4T2) == 8
    assert parts_of("LD", F4T2) == 4
    assert parts_of("LH", F4T2) == 1
    assert parts_of("LEDF", MeshShape(fsdp=2, expert=4, tensor=3)) == 24
    assert device_bytes(SIZES.trained, D1) == device_bytes(SIZES.engine, D1) == 4 * NUMBERS
    # Each over tensor; norms have no axis that is cut there.
    assert device_bytes(SIZES.engine, MeshShape(tensor=2)) == 4 * (NUMBERS + 5 * 8) // 2


def test_a_token_of_context_has_a_key_and_a_value_in_every_layer():
    assert cache_token_bytes(SIZES, WORK, D1) == 2 * 2 * 2 * 4 * 4
    assert cache_token_bytes(SIZES, WORK, D4T2) == 2 * 2 * 2 * 4 * 4 // 2
    # Nine places are three pages of four.
    assert row_bytes(SIZES, WORK, D1, 9) == 12 * 128
    # In int8 with a scale of 4 bytes for each head.
    eight = dataclasses.replace(WORK, kv_itemsize=1)
    assert cache_token_bytes(SIZES, eight, D1) == 2 * 2 * 2 * (4 + 4)


@pytest.mark.parametrize("family", ["dense", "mixture", "adapters", "int8"])
def test_resident_bytes_are_those_of_placed_shapes(family):
    """On every mesh of eight devices, exactly."""
    mixture = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
    model = dataclasses.replace(TINY, **(mixture if family == "mixture" else {}))
    train = TrainConfig()
    if family == "adapters":
        lora = dataclasses.replace(train.lora, rank=2, base_dtype="bfloat16")
        train = dataclasses.replace(train, lora=lora)
    weight_dtype = "int8" if family == "int8" else "compute"
    sizes = model_sizes(model, 32, engine_dtype="float32", weight_dtype=weight_dtype, train=train)
    meshes = [MeshShape(data=8), D4T2, F4T2, MeshShape(data=2, fsdp=2, tensor=2)]
    meshes += [MeshShape(data=2, fsdp=2, expert=2)] if family == "mixture" else []
    meshes += [MeshShape(data=2, context=2, tensor=2)]
    for mesh in meshes:
        layout = make_abstract_layout(mesh, row_axes=TRAINING_ROWS)
        found = resident_bytes(
            state_shapes(model, train, 32), state_shardings(model, train, 32, layout)
        )
        # Two counters, of updates and of Adam.
        assert sum(trainer_bytes(sizes, mesh)) == found - 2 * 4
        if mesh.fsdp > 1:
            continue
        engine = PolicyEngine(_engine_config(model, weight_dtype), make_abstract_layout(mesh))
        parameters = resident_bytes(engine.parameter_shapes, engine.parameter_shardings)
        cache = engine.state_shapes(12).cache.layers
        pages = resident_bytes(cache, engine.state_shardings.cache.layers)
        rows = 16 // mesh.data
        planned = rollout_footprint(sizes, WORK, mesh, 12, rows, 77, "cpu")
        assert (planned.weights, planned.cache, planned.trainer) == (parameters, pages, 77)


def _engine_config(model, weight_dtype):
    return EngineConfig(
        model=model,
        vocab_size=32,
        weight_dtype=weight_dtype,
        num_slots=16,
        num_rows=16,
        chunk_size=4,
        rules=SlotRules(burst=4, end_of_turn_ids=(0,)),
        seed=0,
        page_size=4,
    )


def test_kinds_add_up_and_gradients_are_as_large_as_parameters():
    planned = train_footprint(SIZES, WORK, F4T2, 8, "gpu")
    assert planned.weights == device_bytes(SIZES.trained, F4T2)
    # In fp32 the sum of those of micro-batches, and of one.
    assert planned.gradients == 2 * planned.weights
    assert planned.optimizer == 2 * planned.weights
    assert planned.total == sum(planned.as_dict().values())
    assert "cache" not in planned.as_dict()


def test_remat_and_micro_batches_save_activations():
    def activations(**changes):
        work = dataclasses.replace(WORK, **changes)
        return train_footprint(SIZES, work, D1, 64, "gpu").activations

    assert activations(remat=False) > activations() > activations(micro_batches=4)


def test_computed_bytes_are_within_a_tenth_of_the_compilers():
    """Of every program in benchmarks/compile.md, context.md and ways.md."""
    points = list(benchmark.measured_points())
    assert len(points) >= 60
    assert sum("no remat" in point.program for point in points) >= 8
    for point in points:
        assert benchmark.predicted_gib(point) == pytest.approx(point.together, rel=0.10), point


# Seconds.


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


# The schedule.


def scene_of(topology="h100:1x8", *overrides, budget=10**12, vocab_size=32):
    rollout = ["rollout.num_slots=64", "rollout.episodes_per_step=64"]
    config = make_config({}, [*rollout, *overrides])
    return make_scene(config, parse_topology(topology), vocab_size, budget)


def test_a_stage_moves_when_its_mesh_does_not_fit_any_more():
    # A row at a time with remat: there is no way in which data=8 would take less.
    scene = scene_of("h100:1x8", "train.micro_batches=8", "train.remat=True")
    rooms = [128, 256, 512, 1024]
    free = make_schedule(scene, rooms)
    first = free[0].train.chosen
    assert {stop.train.chosen.mesh for stop in free} == {first.mesh}
    needs = [stop.train.chosen.footprint.total for stop in free]
    settings = dataclasses.replace(scene.settings, budget_bytes=needs[2] - 1)
    tight = make_schedule(dataclasses.replace(scene, settings=settings), rooms)
    assert [stop.train.chosen.mesh for stop in tight[:2]] == [first.mesh] * 2
    assert tight[2].train.switched
    assert tight[2].train.chosen.mesh != first.mesh
    assert all(
        choice.chosen.footprint.total < needs[2]
        for stop in tight[:3]
        for choice in (stop.train, stop.rollout)
    )


def test_rows_that_are_too_long_for_a_device_are_cut():
    """Where a row at a time does not fit: fewer rows at a time then, of which all have a part."""
    scene = scene_of(
        "h100:1x8",
        "model.preset=llama3.1-8b",
        "model.compute_dtype=bfloat16",
        "train.remat=True",
        "train.micro_batches=8",
        budget=60 * 2**30,
        vocab_size=128_256,
    )
    stops = make_schedule(scene, [4096, 65_536, 131_072])
    assert [stop.train.chosen.mesh.context for stop in stops] == [1, 1, 2]
    assert [stop.train.chosen.rung.micro_batches for stop in stops] == [8, 8, 16]
    # Meshes that the user names are taken for rows of any length, and no other is.
    named = dataclasses.replace(scene, train_meshes=(MeshShape(context=8),), context_meshes=())
    stops = make_schedule(named, [4096, 131_072])
    assert [str(stop.train.chosen.mesh) for stop in stops] == ["data=1,context=8"] * 2


def test_long_contexts_may_be_cut_where_key_value_heads_end():
    """Qwen2.5 7B has four: of eight devices `context` cuts the rest, and a prompt is read faster.

    For one word it does not pay: two all-reduces a layer take as long as half of its cache.
    """
    overrides = ["model.preset=qwen2.5-7b", "model.compute_dtype=bfloat16", "train.remat=True"]
    overrides += ["train.micro_batches=8", "rollout.context_buckets=(1024,)"]
    scene = scene_of("h100:1x8", *overrides, vocab_size=152_064)
    assert {mesh.context for mesh in scene.rollout_meshes_for(8191)} == {1}
    cut, heads = MeshShape(context=2, tensor=4), MeshShape(data=2, tensor=4)
    (stop,) = make_schedule(scene, [131_072])
    by_mesh = {prospect.mesh: prospect for prospect in stop.rollout.prospects}
    assert {cut, heads} <= by_mesh.keys()

    def ratio(rows: int, tokens: int) -> float:
        hardware, sizes, work = scene.hardware, scene.sizes, scene.work
        times = [decode_s(hardware, sizes, work, m, rows, 131_072, tokens) for m in (cut, heads)]
        return times[0].total / times[1].total

    assert ratio(1, 2048) < 0.6 and ratio(8, 1) < 0.8
    assert ratio(1, 1) == pytest.approx(1.0, abs=0.1)
    # Where chunks do not divide there is no such mesh.
    odd = scene_of("h100:1x8", *overrides, "rollout.chunk_size=3", vocab_size=152_064)
    assert {mesh.context for mesh in odd.rollout_meshes_for(131_072)} == {1}


def test_what_does_not_fit_says_by_how_much_and_what_would_do():
    scene = scene_of()
    # On whatever rung that is: in more micro-batches than the config has, and with remat.
    nearest = make_schedule(scene_of(budget=1), [4096])[0].train.least
    assert nearest.rung > TrainRung(scene.work.micro_batches, True)
    least = nearest.footprint.total
    settings = Settings(budget_bytes=least - 5, hysteresis=0.15, horizon_steps=20)
    scene = dataclasses.replace(scene, settings=settings)
    (stop,) = make_schedule(scene, [4096])
    assert (stop.fits, stop.rollout, stop.train.chosen) == (False, None, None)
    assert stop.train.shortfall_bytes == 5
    enough = dict(smallest_hardware(scene, 4096))
    assert next(iter(enough)) == "h100"
    assert enough["h100"] > 8
    # With all of its memory one chip is more than enough for so small a model.
    assert enough["v5p"] == 1


def test_the_moments_leave_where_no_rollout_fits_beside_them():
    """By a byte too little for the whole trainer; as long as there is room they stay."""
    held = ["selector.rollout_meshes=('data=8',)", "selector.train_meshes=('data=1,fsdp=8',)"]
    deep = ["model.num_layers=32", "model.width=256", "model.ffn_size=1024"]
    scene, mesh = scene_of("h100:1x8", *held, *deep), MeshShape(data=8)
    both = weights, moments = trainer_bytes(scene.sizes, MeshShape(fsdp=8))
    assert moments == 2 * weights

    def with_budget(budget, **changes):
        settings = dataclasses.replace(scene.settings, budget_bytes=budget)
        return dataclasses.replace(scene, settings=settings, **changes)

    # Eight rows a device, each of 32 pages of 16 tokens.
    whole = rollout_prospect(scene, mesh, 512, RolloutRung(64, 8 * 32))
    need = whole.footprint.total + weights + moments
    tight = with_budget(need - 1)
    short, long = (stop.rollout.chosen for stop in make_schedule(tight, [64, 512]))
    assert (short.offload, short.footprint.trainer) == (False, weights + moments)
    assert (long.offload, long.footprint.trainer) == (True, weights)
    assert short.moments == long.moments == moments
    assert short.rows_at_once == long.rows_at_once == 8
    for by_speed in (True, False):
        (stop,) = make_schedule(with_budget(need, by_speed=by_speed), [512])
        assert stop.rollout.chosen == beside(scene, whole, MeshShape(fsdp=8))
        (stop,) = make_schedule(with_budget(need - 1, by_speed=by_speed), [512])
        assert stop.rollout.chosen.offload
    # Nor do they leave where the config says so, or devices have no memory of their own.
    # There are fewer pages then, and slots, down to one a device.
    half = rollout_prospect(scene, mesh, 512, RolloutRung(64, 4 * 32))
    for by_speed in (True, False):
        held_up = with_budget(need - 1, offload="off", by_speed=by_speed)
        off = make_schedule(held_up, [512])[0].rollout.chosen
        assert off == beside(held_up, half, MeshShape(fsdp=8))
        assert off.rows_at_once == 4 and off.tokens_per_s < whole.tokens_per_s
    eight = on_rollout_rung(scene, RolloutRung(8, 0))
    least = rollout_prospect(eight, mesh, 512, RolloutRung(8, 32)).footprint.total + sum(both)
    none = make_schedule(with_budget(least - 1, offload="off"), [512])[0]
    assert not none.fits and none.rollout.shortfall_bytes == 1
    assert none.train.chosen.mesh == MeshShape(fsdp=8)
    assert not scene_of("cpu:8", *held).can_offload
    assert scene_of("cpu:8", *held, "selector.offload=on").can_offload

    # It is said what would be free, what is, and what the way there and back takes.
    schedule, contexts = make_schedule(tight, [64, 512]), {64: 64, 512: 512}
    text = "\n".join(schedule_lines(tight, schedule, contexts))
    assert "of each device, may stay, and could wait in host memory" in text
    assert "of each device, wait in host memory (" in text
    assert "beyond 64 tokens: rollout data=8 (the moments in host memory)" in text
    values = schedule_values(tight, schedule, contexts)["contexts"]
    (first,), (then,) = (context["rollout"]["meshes"] for context in values)
    assert (first["moments_bytes"], first["moments_on_host"]) == (moments, False)
    assert (then["moments_bytes"], then["moments_on_host"]) == (moments, True)
    assert then["moments_s"] == pytest.approx(2 * moments / 64e9)


def test_the_moments_stay_where_hosts_have_no_room_for_them():
    """Eight devices' moments and what is parked, to the byte; then no rollout fits beside them."""
    held = ["selector.rollout_meshes=('data=8',)", "selector.train_meshes=('data=1,fsdp=8',)"]
    deep = ["model.num_layers=32", "model.width=256", "model.ffn_size=1024"]
    scene, mesh = scene_of("h100:1x8", *held, *deep), MeshShape(data=8)
    assert scene.parked_bytes == 4 * 2**30
    both = trainer_bytes(scene.sizes, MeshShape(fsdp=8))
    whole = rollout_prospect(scene, mesh, 512, RolloutRung(64, 8 * 32))
    need = whole.footprint.total + sum(both)

    def stop_with(host_bytes):
        settings = dataclasses.replace(scene.settings, budget_bytes=need - 1)
        hardware = dataclasses.replace(scene.hardware, host_memory_bytes=host_bytes)
        there = dataclasses.replace(scene, settings=settings, hardware=hardware)
        (stop,) = make_schedule(there, [512])
        return stop, "\n".join(schedule_lines(there, [stop], {512: 512}))

    enough = 8 * both[1] + scene.parked_bytes
    stop, text = stop_with(enough)
    assert stop.rollout.chosen.offload and "must stay" not in text
    stop, text = stop_with(enough - 1)
    assert not (stop.rollout.chosen and stop.rollout.chosen.offload)
    assert "must stay: that they wait in host memory needs " in text


def test_a_compiler_is_asked_for_what_would_be_chosen_until_that_was_asked():
    scene = scene_of(budget=4 * 2**20)
    asked = []

    def exactly(prospect: Prospect) -> Prospect:
        asked.append((prospect.stage, prospect.mesh))
        # The first training mesh is larger than was computed, beyond the budget.
        total = 2**30 if len(asked) == 1 else 2**20
        return dataclasses.replace(
            prospect, exact=True, footprint=Footprint(weights=0, activations=total)
        )

    (stop,) = make_schedule(scene, [16], exactly)
    assert [stage for stage, _ in asked] == ["train", "train", "rollout"]
    assert asked[0][1] != asked[1][1] == stop.train.chosen.mesh
    assert stop.train.chosen.exact and stop.rollout.chosen.exact


def test_a_stage_that_was_measured_has_one_factor():
    scene = scene_of()
    mesh = scene.train_meshes[0]
    (computed,) = (p for p in make_schedule(scene, [64])[0].train.prospects if p.mesh == mesh)
    entry, other = f"train {mesh} 64", "train data=3 64"
    measurement = Measurement(tokens_per_s=computed.tokens_per_s / 4, program_bytes=1, switch_s=0.0)
    scene = calibrated(scene, {entry: measurement, other: measurement})
    assert scene.factors == {"train": pytest.approx(0.25)}
    (stop,) = make_schedule(scene, [64])
    slower = next(p for p in stop.train.prospects if p.mesh == mesh)
    assert slower.seconds == pytest.approx(4 * computed.seconds)
    assert slower.tokens_per_s == pytest.approx(computed.tokens_per_s / 4)


def test_listed_meshes_go_by_their_order():
    meshes = "selector.rollout_meshes=('data=4,tensor=2','data=8')"
    listed = scene_of("h100:1x8", "selector.order=listed", meshes)
    assert make_schedule(listed, [64])[0].rollout.chosen.mesh == D4T2
    assert make_schedule(scene_of("h100:1x8", meshes), [64])[0].rollout.chosen.mesh.data == 8


def test_four_thousand_devices_are_planned_in_seconds():
    start = time.perf_counter()
    scene = scene_of(
        "h100:512x8",
        "model.preset=qwen2.5-72b",
        "model.compute_dtype=bfloat16",
        "rollout.num_slots=16384",
        "rollout.episodes_per_step=16384",
        "train.remat=True",
        budget=60 * 2**30,
        vocab_size=152_064,
    )
    schedule = make_schedule(scene, [1024 * 2**power for power in range(8)])
    assert time.perf_counter() - start < 10
    assert len(scene.train_meshes) > 30
    assert schedule[0].fits


# The command.


def run(capsys, *arguments):
    plan_command(arguments)
    return capsys.readouterr().out


BIG = (
    "--topology=v5p:4x4x4",
    "--vocab_size=152064",
    "--config.model.preset=qwen2.5-72b",
    "--config.model.compute_dtype=bfloat16",
    "--config.train.remat=True",
    "--config.train.micro_batches=4",
    "--config.rollout.num_slots=256",
    "--config.rollout.episodes_per_step=256",
    "--config.selector.rollout_meshes=()",
    "--config.selector.train_meshes=()",
    "--config.selector.budget_bytes_per_device=0",
    "--config.rollout.context_buckets=(1024,)",
    "--contexts=1024,2048,8192",
)


def test_the_default_config_is_planned_for_this_machine(capsys):
    out = run(capsys, "--topology=cpu:8")
    assert "cpu:8: 8 devices on 1 hosts, 16.21 MiB of each to be used" in out
    for words in ("weights", "optimizer", "cache", "trainer", "data=4,tensor=2", "schedule:"):
        assert words in out
    # Its rooms are those of its context_buckets.
    assert "24: also fit" in out and "40: " in out
    # What a step of both takes, and which pair is next.
    assert "steps, of episodes that fill their room:\n  24: " in out
    assert "s; second: rollout on data=" in out


def test_what_the_text_leaves_out_json_has(capsys):
    """Of v5p:4x4x4 four other meshes are named, and how to see the rest is said."""
    assert re.search(r" and \d+ more \(--json has all\)", run(capsys, *BIG))


def test_json_has_every_candidate_and_where_meshes_change(capsys):
    values = json.loads(run(capsys, *BIG, "--json"))
    assert (values["devices"], values["hosts"], values["mode"]) == (64, 16, "quick")
    assert values["budget_bytes_per_device"] == int(0.97 * 95 * 2**30)
    assert values["expected_error"]["bytes"] == 0.10
    assert [entry["context"] for entry in values["contexts"]] == [1024, 2048, 8192]
    for entry in values["contexts"]:
        for stage in ("train", "rollout"):
            meshes = {found["mesh"]: found for found in entry[stage]["meshes"]}
            assert meshes[entry[stage]["mesh"]]["fits"]
            for found in meshes.values():
                assert found["bytes_per_device"] == sum(found["bytes"].values())
                assert found["fits"] == (
                    found["bytes_per_device"] <= values["budget_bytes_per_device"]
                )
                assert found["tokens_per_s"] > 0
    # The config's rooms double: the schedule has all of them on the way.
    assert [stop["places"] for stop in values["schedule"]] == [1024, 2048, 4096, 8192]
    # 72 billion parameters of 2 bytes on four v5p and more.
    assert all("tensor=" in stop["rollout_mesh"] for stop in values["schedule"])
    # A step is no shorter than its update.
    for entry, stop in zip(
        values["contexts"], (values["schedule"][n] for n in (0, 1, 3)), strict=True
    ):
        (update,) = (m for m in entry["train"]["meshes"] if m["mesh"] == stop["train_mesh"])
        assert stop["step_s"] > update["update_s"] and stop["second"].startswith("second: rollout")


def test_where_nothing_fits_the_plan_says_what_would_do(capsys):
    out = run(capsys, *BIG, "--hbm_gib=22")
    assert "no mesh fits; the least, " in out and " over the budget" in out
    assert "the smallest that would do: " in out and "(quick mode, powers of two)" in out
    values = json.loads(run(capsys, *BIG, "--hbm_gib=22", "--json"))
    assert values["enough"]["devices"]["v5p"] > 64
    assert values["contexts"][0]["train"]["shortfall_bytes"] > 0


def grid(chip, number):
    """The topology of so many chips, as the planner takes it."""
    if chip == "h100":
        return f"h100:{max(1, number // 8)}x{min(8, number)}"
    side = 2 ** (number.bit_length() // 2)
    return f"{chip}:{number // side}x{side}"


@pytest.mark.parametrize(
    ("preset", "chip", "parameters"),
    [("qwen2.5-7b", "v5e", 7.6e9), ("qwen2.5-7b", "h100", 7.6e9), ("qwen2.5-72b", "h100", 72.7e9)],
)
def test_the_smallest_that_would_do_is_planned_to_fit_and_half_of_it_is_not(
    preset, chip, parameters
):
    """Contexts of 32K. By hand: parameters, moments and gradients in fp32 are 16 bytes each."""

    def scene(number):
        hardware = parse_topology(grid(chip, number))
        assert hardware.num_devices == number
        overrides = (
            f"model.preset={preset}",
            "model.compute_dtype=bfloat16",
            "train.remat=True",
            "rollout.context_buckets=(32768,)",
        )
        budget = hardware.usable_bytes
        return scene_of(hardware.name, *overrides, budget=budget, vocab_size=152_064)

    found = dict(smallest_hardware(scene(8), 32_768))
    number = found[chip]
    assert number in (2, 4, 8, 16, 32, 64)
    assert number * scene(8).budget_bytes > 16 * parameters
    # As a run on such hardware would choose.
    assert make_schedule(scene(number), [32_768])[0].fits
    assert not make_schedule(scene(number // 2), [32_768])[0].fits
    # More memory of the same kind is not more chips.
    assert found["b200"] <= found["h200"] <= found["h100"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v9:4x4"], "'v9:4x4' is not known; those known are like"),
        (["--topology=cpu:8", "--contexts=8,4"], "--contexts=8,4: give rising numbers"),
        (["--topology=cpu:8", "--contexts=many"], "--contexts=many: give rising numbers"),
        (["--topology=cpu:8", "--hbm_gib=0"], "--hbm_gib=0.0; give GiB"),
        (["--topology=cpu:8", "--vocab_size=0"], "--vocab_size=0"),
        (["--topology=cpu:8", "--config.rollout.num_slot=8"], "did you mean 'num_slots'?"),
        (["--topology=h100:3x8"], "--config.rollout.num_slots=72"),
        (["--topology=h100:1x4"], "'data=8', a mesh of 8 devices; this run has 4"),
        (["--topology=cpu:8", "--config=nowhere.py"], "no such file"),
        (["--topology=cpu:8", "--table=nowhere.json"], "--table=nowhere.json cannot be read"),
    ],
)
def test_bad_input_is_answered_with_what_to_change(arguments, words):
    with pytest.raises(ValueError) as error:
        plan_command(arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("topology", "extra"), [("v5e:2x4", "tpu-topology"), ("h100:1x8", "gpu-topology")]
)
def test_exact_mode_names_the_extra_that_it_needs(monkeypatch, topology, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match=f"--exact: .*`uv sync --extra {extra}`"):
        plan_command([f"--topology={topology}", "--exact"])


@pytest.mark.slow
def test_exact_bytes_are_those_of_the_programs_of_a_run(capsys):
    """On data=8 this update breaks the budget, which no arithmetic says: data=1,fsdp=8 is next.

    By computed times that is as fast, so that there is no reason for smaller micro-batches.
    """
    assert len(jax.devices()) == 8
    plan_command(["--topology=cpu:8", "--contexts=40", "--exact", "--json"])
    captured = capsys.readouterr()
    (context,) = json.loads(captured.out)["contexts"]
    meshes = {found["mesh"]: found for found in context["train"]["meshes"]}
    assert context["train"]["mesh"] == "data=1,fsdp=8"
    # On data=8 what was compiled does not fit, and the next way was not compiled.
    assert "compiled train on data=8 with room for 40 tokens" in captured.err
    whole, cut = meshes["data=8"], meshes["data=1,fsdp=8"]
    assert (whole["exact"], whole["micro_batches"]) == (False, 2)
    assert (cut["exact"], cut["micro_batches"], cut["fits"]) == (True, 1, True)
    assert 2**20 < cut["bytes_per_device"] < 17_000_000
