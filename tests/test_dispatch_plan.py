# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Transfer plans move the lower bound of bytes and deliver every element once."""

import itertools
import math
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from earl_jax.dispatch.plan import plan_dispatch
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.rounds import rounds_of
from earl_jax.sharding.transfer_plan import plan_transfer, plan_transfers
from earl_jax.trajectory import TrajectoryBatch

P = PartitionSpec


def slices(index):
    return tuple(slice(start, stop) for start, stop in index)


def mask(shape, index):
    """Returns a mask of the elements that a box covers."""
    covered = np.zeros(shape, bool)
    covered[slices(index)] = True
    return covered


def check_plan(plan, source, target):
    """Counts elements with masks: the bound is met, each arrives once, from who holds it."""
    nowhere = np.zeros(plan.shape, bool)
    held = {device: mask(plan.shape, index) for device, index in source.items()}
    arrived = {device: np.zeros(plan.shape, int) for device in target}
    for piece in plan.pieces:
        assert held[piece.source_device][slices(piece.index)].all()
        arrived[piece.target_device][slices(piece.index)] += 1
        assert piece.num_bytes == mask(plan.shape, piece.index).sum() * plan.itemsize
    received, kept = {}, {}
    for device, index in target.items():
        wanted = mask(plan.shape, index)
        np.testing.assert_array_equal(arrived[device], wanted)
        own = held.get(device, nowhere)
        received[device] = int((wanted & ~own).sum()) * plan.itemsize
        kept[device] = int((wanted & own).sum()) * plan.itemsize
    assert plan.received_bytes == {d: n for d, n in received.items() if n}
    assert {d: n for d, n in plan.kept_bytes.items() if n} == {d: n for d, n in kept.items() if n}
    assert plan.moved_bytes == sum(received.values()) == sum(plan.sent_bytes.values())
    assert plan.in_place_bytes == sum(kept.values())


@st.composite
def placements(draw):
    """A shape, a source that holds each cell of a random grid, and random boxes as the target."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))}) for size in shape]
    cells = list(itertools.product(*(list(itertools.pairwise(points)) for points in cuts)))
    num_holders = len(cells) + draw(st.integers(0, 6))
    owners = draw(st.permutations([cells[n % len(cells)] for n in range(num_holders)]))
    ids = draw(st.permutations(range(num_holders + 4)))
    source = dict(zip(ids, owners, strict=False))
    box = st.tuples(
        *(
            st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda e: (min(e), max(e)))
            for size in shape
        )
    )
    targets = draw(st.lists(st.sampled_from(sorted(ids)), unique=True, max_size=6))
    return shape, draw(st.sampled_from((1, 2, 4))), source, {d: draw(box) for d in targets}


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(placements())
def test_any_plan_moves_the_lower_bound_and_delivers_each_element_once(placement):
    shape, itemsize, source, target = placement
    check_plan(plan_transfer(shape, itemsize, source, target), source, target)


def test_holders_share_the_load_across_arrays():
    everything = ((0, 4),)
    source = {device: everything for device in range(4)}
    target = {device: everything for device in range(4, 8)}
    assert plan_transfer((4,), 4, source, target).sent_bytes == dict.fromkeys(range(4), 16)
    one = {4: everything}
    plans = plan_transfers([((4,), 4, source, one)] * 4)
    assert [list(plan.sent_bytes) for plan in plans] == [[0], [1], [2], [3]]


def test_routes():
    rows, columns = (
        {0: ((0, 2), (0, 4)), 1: ((2, 4), (0, 4))},
        {0: ((0, 4), (0, 2)), 1: ((0, 4), (2, 4))},
    )
    swapped = dict(reversed(list(columns.items())))
    assert plan_transfer((4, 4), 4, rows, dict(rows)).route == "in place"
    assert plan_transfer((4, 4), 4, rows, columns).route == "compiled"
    assert plan_transfer((4, 4), 4, rows, swapped).route == "pieces"
    assert plan_transfer((4, 4), 4, rows, {0: columns[0]}).route == "pieces"


def test_errors_name_the_fault():
    with pytest.raises(ValueError, match="not the cells of a grid"):
        plan_transfer((4,), 4, {0: ((0, 2),)}, {})
    with pytest.raises(ValueError, match="not the cells of a grid"):
        plan_transfer((4,), 4, {0: ((0, 3),), 1: ((2, 4),)}, {})
    with pytest.raises(ValueError, match="not the cells of a grid"):
        plan_transfer((4,), 4, {}, {})
    with pytest.raises(ValueError, match="target device 5 wants"):
        plan_transfer((4,), 4, {0: ((0, 4),)}, {5: ((0, 5),)})
    leaf = {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=NamedSharding(MESH_2, P()))}
    with pytest.raises(ValueError, match=r"w of shape \(6,\) does not divide"):
        plan_dispatch(leaf, {"w": NamedSharding(AbstractMesh((4,), ("x",)), P("x"))})
    with pytest.raises(ValueError, match="same structure"):
        plan_dispatch(leaf, NamedSharding(MESH_2, P()))


MESH_2 = AbstractMesh((2,), ("x",))


def test_the_nearest_holder_sends_and_of_these_the_least_loaded():
    """Devices 0 to 3 hold everything; 0, 1 and 4 are in one process, 2, 3 and 5 in another."""
    everything = ((0, 4),)
    process_of = {0: 0, 1: 0, 4: 0, 2: 1, 3: 1, 5: 1, 6: 2}
    source = {device: everything for device in range(4)}
    target = {device: everything for device in (4, 5, 6)}
    plan = plan_transfer((4,), 4, source, target, process_of=process_of)
    assert plan.route == "rounds"
    assert dict(zip(plan.receivers.tolist(), plan.senders.tolist(), strict=True)) == {
        4: 0,
        5: 2,
        6: 1,
    }
    busy = plan_transfer(
        (4,), 4, source, target, process_of=process_of, sent_bytes={0: 99, 2: 99, 1: 9}
    )
    assert dict(zip(busy.receivers.tolist(), busy.senders.tolist(), strict=True)) == {
        4: 1,
        5: 3,
        6: 3,
    }


@st.composite
def pairs_of_layouts(draw):
    """Two NamedShardings on meshes over overlapping or disjoint devices, replicated or not."""
    shape = tuple(draw(st.lists(st.sampled_from((4, 8, 12, 24)), min_size=1, max_size=3)))
    sides = []
    for _ in range(2):
        mesh_shape = tuple(draw(st.lists(st.sampled_from((1, 2, 4)), min_size=3, max_size=3)))
        split: dict[int, list[str]] = {axis: [] for axis in range(-1, len(shape))}
        for name in draw(st.permutations("xyz")):
            axis = draw(st.integers(-1, len(shape) - 1))  # -1: replicated along this mesh axis
            sizes = dict(zip("xyz", mesh_shape, strict=True))
            parts = math.prod(sizes[other] for other in [*split[axis], name])
            split[axis if axis >= 0 and shape[axis] % parts == 0 else -1].append(name)
        spec = P(*(tuple(split[axis]) or None for axis in range(len(shape))))
        ranges = shard_ranges(NamedSharding(AbstractMesh(mesh_shape, tuple("xyz")), spec), shape)
        shift = draw(st.integers(0, 8))
        ids = draw(st.permutations(range(shift, shift + len(ranges))))
        sides.append(dict(zip(ids, ranges.values(), strict=True)))
    return shape, *sides


@pytest.mark.slow
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(pairs_of_layouts())
def test_plans_between_random_layouts_move_the_lower_bound(pair):
    shape, source, target = pair
    process_of = {device: device // 4 for device in (*source, *target)}
    plan = plan_transfer(shape, 2, source, target, process_of=process_of)
    check_plan(plan, source, target)
    rounds = rounds_of(plan, max_bytes=64)
    pieces = [piece for round_ in rounds for piece in round_.pieces]
    assert sum(piece.num_bytes for piece in pieces) == plan.moved_bytes + plan.in_place_bytes
    for round_ in rounds:
        for ends in zip(*((p.source_device, p.target_device) for p in round_.pieces), strict=True):
            assert len(set(ends)) == len(ends)


def test_1024_devices_are_planned_in_two_seconds_of_cpu():
    mesh = AbstractMesh((32, 32), ("x", "y"))
    rows, columns = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P(None, ("x", "y")))
    # The worst case: each of 1,024 devices needs a piece from each, in each of six arrays.
    leaf = jax.ShapeDtypeStruct((1024, 4096), jnp.int32, sharding=rows)
    fields = ("tokens", "segment_ids", "turn_ids", "logprobs", "versions", "advantages")
    batch = TrajectoryBatch(**dict.fromkeys(fields, leaf))
    for goal, moved in (
        (columns, 1023 / 1024),
        # Each device holds one row of 1,024 and wants half of each of 32.
        (NamedSharding(mesh, P("x", "y")), 1 - 1 / 32),
        (NamedSharding(mesh, P()), 1023),
    ):
        start = time.process_time()
        plan = plan_dispatch(batch, TrajectoryBatch(**dict.fromkeys(fields, goal)))
        total = 6 * math.prod(leaf.shape) * 4
        assert plan.moved_bytes == moved * total
        assert time.process_time() - start < 2.0
        assert [name for name, _ in plan.leaves] == list(fields)
    text = str(plan_dispatch(batch, TrajectoryBatch(**dict.fromkeys(fields, rows))))
    assert text.count("\n") == 1 + 6 + 1 + 1 + 1024
