# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays move between processes as planned, bit for bit and with no byte on the host."""

import re
from collections import Counter

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from earl_jax.sharding import exchange as exchange_module
from earl_jax.sharding.moves import Move
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.rounds import colour, rounds_of, separate
from earl_jax.sharding.schedule import Shipment
from earl_jax.sharding.transfer_plan import plan_transfer
from tests.support.exchanges import BETWEEN_PROCESSES, P, part_of
from tests.support.processes import Processes
from tests.support.shardings import SHAPES, count_host_bytes, make_shardings, make_values

# The rounds, as arithmetic.


@st.composite
def links(draw):
    ends = st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda link: link[0] != link[1])
    return draw(st.lists(ends, max_size=30))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(links())
def test_there_are_as_many_rounds_as_the_busiest_device_has_pieces(links):
    colours = colour(links)
    busiest = max(
        [*Counter(s for s, _ in links).values(), *Counter(r for _, r in links).values()], default=0
    )
    for tangled in (None, separate(links, colours)):
        rounds = set(zip(links, colours, strict=True))
        for end in (0, 1):
            assert len({(link[end], number) for link, number in rounds}) == len(links)
        assert set(colours) == set(range(busiest))
        mutual = any(
            ((receiver, sender), number) in rounds for (sender, receiver), number in rounds
        )
        assert tangled in (None, mutual)


@pytest.mark.parametrize("num", [3, 5, 8, 16])
def test_no_two_devices_send_each_other_something_in_one_round(num):
    links = [(s, r) for s in range(num) for r in range(num) if s != r]
    colours = colour(links)
    assert not separate(links, colours)
    again = colour(links)
    separate(links, again)
    assert again == colours  # as every process must find it


def test_all_to_all_over_eight_takes_seven_rounds_and_no_piece_is_above_the_limit():
    rows = {n: ((n, n + 1), (0, 16)) for n in range(8)}
    columns = {n: ((0, 8), (2 * n, 2 * n + 2)) for n in range(8)}
    plan = plan_transfer((8, 16), 4, rows, columns)
    rounds = rounds_of(plan)
    assert [round_.stays for round_ in rounds] == [True] + [False] * 7
    assert {round_.shape for round_ in rounds} == {(1, 2)}
    assert sorted(p for round_ in rounds for p in map(repr, round_.pieces)) == sorted(
        map(repr, plan.pieces)
    )
    small = rounds_of(plan, max_bytes=4)
    assert len(small) == 2 * len(rounds)
    assert {round_.shape for round_ in small} == {(1, 1)}
    assert sum(p.num_bytes for round_ in small for p in round_.pieces) == 8 * 16 * 4


@pytest.mark.parametrize(
    ("rows", "columns", "num_rounds"),
    [(4, 8192, 6), (3, 8192, 6), (4, 256, 3), (3, 9001, 3)],
    ids=["even", "odd rows", "small", "odd"],
)
def test_four_that_all_send_to_all_send_halves_so_that_no_pair_is_mutual(rows, columns, num_rounds):
    """Pieces are f32[rows, columns]; small ones, and those that have no half, go whole."""
    shape = (4 * rows, 4 * columns)
    by_rows = {n: ((n * rows, (n + 1) * rows), (0, shape[1])) for n in range(4)}
    by_columns = {n: ((0, shape[0]), (n * columns, (n + 1) * columns)) for n in range(4)}
    plan = plan_transfer(shape, 4, by_rows, by_columns)
    rounds = [round_ for round_ in rounds_of(plan) if not round_.stays]
    assert len(rounds) == num_rounds
    covered = np.zeros(shape, int)
    mutual = 0
    for round_ in rounds:
        links = {(piece.source_device, piece.target_device) for piece in round_.pieces}
        assert len({s for s, _ in links}) == len({r for _, r in links}) == len(round_.pieces) == 4
        mutual += any((receiver, sender) in links for sender, receiver in links)
        for piece in round_.pieces:
            (top, bottom), (left, right) = piece.index
            assert piece.num_bytes == 4 * (bottom - top) * (right - left)
            covered[top:bottom, left:right] += 1
    assert bool(mutual) == (num_rounds == 3)
    away = [s != r for s in range(4) for r in range(4)]
    blocks = np.array(away, int).reshape(4, 4)
    assert (covered == np.kron(blocks, np.ones((rows, columns), int))).all()


def test_a_piece_is_cut_along_more_axes_where_one_does_not_do():
    plan = plan_transfer((4, 6), 4, {0: ((0, 4), (0, 6))}, {1: ((0, 4), (0, 6))})
    boxes = [p.index for round_ in rounds_of(plan, max_bytes=8) for p in round_.pieces]
    covered = np.zeros((4, 6), int)
    for (a, b), (c, d) in boxes:
        assert (b - a) * (d - c) <= 2
        covered[a:b, c:d] += 1
    assert (covered == 1).all()


# The programs, over the devices of this process.


def shipments_of(tree, shardings):
    for leaf, array in tree.items():
        source, target = (
            shard_ranges(sharding, array.shape) for sharding in (array.sharding, shardings[leaf])
        )
        yield Shipment(
            plan=plan_transfer(array.shape, array.dtype.itemsize, source, target),
            move=Move(
                shape=array.shape, dtype=array.dtype, source=array.sharding, target=shardings[leaf]
            ),
        )


def sent_by(text: str) -> int:
    """Bytes that the collectives of a compiled program send between devices."""
    total = 0
    for shape, rest in re.findall(
        r"= (\w+\[[\d,]*\])\S* collective-permute(?:-start)?\((.*)", text
    ):
        dtype, sizes = shape.rstrip("]").split("[")
        elements = int(np.prod([int(size) for size in sizes.split(",") if size]))
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
        total += elements * int(re.search(r"\d+", dtype)[0]) // 8 * pairs[1].count("{")
    return total


@pytest.mark.parametrize(("source", "target"), BETWEEN_PROCESSES[4::8])
def test_the_compiled_program_sends_the_bytes_of_the_plan_and_no_others(source, target):
    tree = jax.device_put(make_values(), make_shardings(source))
    shipments = tuple(shipments_of(tree, make_shardings(target)))
    sides = [
        side for shipment in shipments for side in (shipment.move.source, shipment.move.target)
    ]
    devices = {device for side in sides for device in side.device_set}
    mesh = jax.sharding.Mesh(sorted(devices, key=lambda device: device.id), ("device",))
    rows = [
        exchange_module._as_row(*each, mesh) for each in zip(tree.values(), shipments, strict=True)
    ]
    text = exchange_module._program(shipments, mesh, None).lower(rows).compile().as_text()
    assert not re.search(r"(all-gather|all-reduce|all-to-all|reduce-scatter)[\w-]*\(", text)
    assert sent_by(text) == sum(shipment.plan.moved_bytes for shipment in shipments)


@pytest.mark.parametrize("order", [("cut", "copies"), ("copies", "cut")])
def test_alike_pieces_are_cut_out_of_the_shards_that_each_array_has(order):
    """Devices 0 and 1 send a half each: one array is cut over them, the other is whole on both."""
    here, there = (jax.sharding.Mesh(jax.devices()[n : n + 2], ("x",)) for n in (0, 4))
    specs = {"cut": P("x"), "copies": P()}
    values = {"cut": np.arange(4.0, dtype=np.float32), "copies": 9 - np.arange(4, dtype=np.float32)}
    tree = {name: jax.device_put(values[name], NamedSharding(here, specs[name])) for name in order}
    target = NamedSharding(there, P("x"))
    shipments = tuple(shipments_of(tree, dict.fromkeys(order, target)))
    assert len({each.plan.senders.tobytes() for each in shipments}) == 1
    moved = exchange_module.exchange(list(tree.values()), list(shipments), None)
    for name, array in zip(order, moved, strict=True):
        np.testing.assert_array_equal(np.asarray(array), values[name])


# Real processes. Each of them runs one of these functions.


def check_pairs(every: int) -> int:
    """Pairs of layouts, in turn; returns how many."""
    values, pairs = make_values(), BETWEEN_PROCESSES[::every]
    with count_host_bytes() as reads:
        for source, target in pairs:
            before, after = make_shardings(source), make_shardings(target)
            tree = {leaf: part_of(values[leaf], before[leaf]) for leaf in SHAPES}
            del reads[:]  # those of putting the values there
            moved = jax.block_until_ready(reshard(tree, after))
            assert reads == [], (source, target)
            for leaf, array in moved.items():
                assert array.sharding == after[leaf]
                for shard in array.addressable_shards:
                    expected = values[leaf][shard.index].tobytes()
                    assert np.asarray(shard.data).tobytes() == expected, (source, target, leaf)
            del reads[:]
    return len(pairs)


@pytest.mark.slow
def test_pairs_of_layouts_over_real_processes():
    results = Processes(4, 2, "test_exchange:check_pairs", 2).results(250)
    assert results == [len(BETWEEN_PROCESSES[::2])] * 4


@pytest.mark.slow
def test_scalars_empty_arrays_narrow_floats_and_keys_over_real_processes():
    assert Processes(2, 4, "tests.support.exchanges:odd_things").results() == [True] * 2


def move_on_a_mesh(mesh_shape: list[int]) -> int:
    """Rows over all to a mesh of this shape, in the other order of devices; returns the devices."""
    devices = np.array(jax.devices()[: np.prod(mesh_shape)])
    source = NamedSharding(jax.sharding.Mesh(devices, ("x",)), P("x"))
    mesh = jax.sharding.Mesh(devices[::-1].reshape(mesh_shape), ("x", "y"))
    value = np.arange(64 * 128, dtype=np.int32).reshape(64, 128)
    for target in (NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("y"))):
        array = jax.device_put(value, source)
        with count_host_bytes() as reads:
            moved = jax.block_until_ready(reshard(array, target))
        assert reads == []
        assert moved.sharding == target
        np.testing.assert_array_equal(np.asarray(moved), value)
    return len(devices)


@pytest.mark.slow
def test_sixty_four_devices():
    assert Processes(1, 64, "test_exchange:move_on_a_mesh", [8, 8]).results() == [64]


def test_one_device():
    assert move_on_a_mesh([1, 1]) == 1
