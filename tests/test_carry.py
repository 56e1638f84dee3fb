# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that are carried to another mesh arrive bit for bit, however short memory is."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from earl_jax.selector.memory import unless_out_of_memory
from earl_jax.sharding import carry as carry_module
from earl_jax.sharding.carry import carry, free_sources, is_placed
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.reshard import reshard
from tests.support.allocator import live_bytes, memory_limit

P = PartitionSpec
D8 = make_layout(MeshShape(data=8)).mesh
F8 = make_layout(MeshShape(fsdp=8)).mesh
CUBE = make_layout(MeshShape(data=2, fsdp=2, tensor=2)).mesh
D4T2 = make_layout(MeshShape(data=4, tensor=2)).mesh
NAMES = ("a", "b", "c", "d")


def made(mesh, *spec):
    """Four float32 matrices of 256 KB each."""
    rng = np.random.default_rng(0)
    where = NamedSharding(mesh, P(*spec))
    return {name: jax.device_put(rng.normal(size=(256, 256)).astype("f4"), where) for name in NAMES}


def to(mesh, *spec):
    return dict.fromkeys(NAMES, NamedSharding(mesh, P(*spec)))


def assert_same(expected, tree):
    for name in NAMES:
        assert expected[name].tobytes() == np.array(tree[name]).tobytes(), name


def no_memory():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.mark.parametrize(
    "source, target",
    [
        ((F8, "fsdp"), (CUBE, "fsdp", "tensor")),
        ((CUBE, "fsdp", "tensor"), (F8, None, "fsdp")),
        ((D8,), (F8, "fsdp")),
    ],
)
def test_all_arrays_arrive_and_the_sources_are_freed(source, target):
    tree = made(*source)
    expected = jax.tree.map(np.array, tree)
    gc.collect()
    held = live_bytes()
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in tree.values())
    moved, whole = carry(tree, to(*target), unless_out_of_memory)
    assert whole and is_placed(moved, to(*target))
    assert_same(expected, moved)
    arrived = sum(leaf.addressable_shards[0].data.nbytes for leaf in moved.values())
    gc.collect()
    assert live_bytes() == {device: held[device] - own + arrived for device in held}


def test_relabelled_arrays_keep_their_buffers():
    tree = made(F8, "fsdp")
    expected = jax.tree.map(np.array, tree)
    where = to(D8, "data")
    assert not is_placed(tree, where)
    moved, whole = carry(tree, where, unless_out_of_memory)
    assert whole and is_placed(moved, where)
    assert_same(expected, moved)


def test_arrays_are_placed_only_by_the_labels_of_the_same_mesh():
    tree = made(F8, "fsdp")
    assert is_placed(tree, to(F8, "fsdp"))
    assert not is_placed(tree, to(F8))
    assert not is_placed(tree | {"d": made(F8)["d"]}, to(F8, "fsdp"))
    # The same bytes on the same devices by another mesh.
    other = make_layout(MeshShape(fsdp=4, context=2)).mesh
    same = to(other, ("fsdp", "context"))
    assert same["a"].is_equivalent_to(tree["a"].sharding, 2) and not is_placed(tree, same)


def test_sources_that_share_a_buffer_are_kept():
    tree = made(F8, "fsdp")
    moved = {"a": tree["a"] + 1, "b": reshard(tree["b"], NamedSharding(D8, P("data")))}
    free_sources({name: tree[name] for name in ("a", "b")}, moved)
    assert tree["a"].is_deleted() and not tree["b"].is_deleted()


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_arrays_that_moved_before_memory_ran_out_stay_and_the_others_can_go_elsewhere(
    monkeypatch, fails_at
):
    """All at once never fits; the arrays of `fails_at` and later do not either."""
    tree = made(F8, "fsdp")
    expected = jax.tree.map(np.array, tree)
    calls = []

    def narrow(part, shardings, **options):
        calls.append(len(jax.tree.leaves(part)))
        if calls[-1] > 1 or len(calls) > fails_at:
            no_memory()
        return reshard(part, shardings, **options)

    monkeypatch.setattr(carry_module, "reshard", narrow)
    moved, whole = carry(tree, to(CUBE, "fsdp", "tensor"), unless_out_of_memory)
    monkeypatch.undo()
    arrived = [is_placed(moved[n], to(CUBE, "fsdp", "tensor")[n]) for n in NAMES]
    assert arrived == [k < fails_at - 1 for k in range(4)]
    assert whole == all(arrived)
    assert_same(expected, moved)
    moved, whole = carry(moved, to(D4T2, "tensor"), unless_out_of_memory)
    assert whole and is_placed(moved, to(D4T2, "tensor"))
    assert_same(expected, moved)


def test_other_errors_are_raised(monkeypatch):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(carry_module, "reshard", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        carry(made(F8, "fsdp"), to(CUBE), unless_out_of_memory)


@pytest.mark.parametrize(
    "source, target",
    [
        # Over the same devices by compiled programs, and to other devices as pieces.
        pytest.param((F8, "fsdp"), (F8, None, "fsdp"), marks=pytest.mark.slow),
        ((F8, "fsdp"), (make_layout(MeshShape(fsdp=8), jax.devices()[::-1]).mesh, "fsdp")),
    ],
)
def test_a_move_that_does_not_fit_at_once_fits_piece_by_piece(source, target):
    """The tree's bytes twice are too much for a device; one array more is not."""
    tree, where = made(*source), to(*target)
    expected = jax.tree.map(np.array, tree)
    gc.collect()
    held = max(live_bytes().values())
    # A shard of an array is 32 KB, of all four 128 KB.
    with memory_limit(held + 3 * 2**15) as allocator:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            jax.block_until_ready(reshard(tree, where))
        moved, whole = carry(tree, where, unless_out_of_memory)
    assert whole and is_placed(moved, where)
    assert len(allocator.refused) == 2
    assert_same(expected, moved)
    assert all(leaf.is_deleted() for leaf in tree.values())


def test_a_move_that_fits_in_no_way_leaves_the_tree_where_it_was():
    tree, where = made(F8, "fsdp"), to(F8, None, "fsdp")
    expected = jax.tree.map(np.array, tree)
    gc.collect()
    with memory_limit(max(live_bytes().values()) + 2**10):
        moved, whole = carry(tree, where, unless_out_of_memory)
    assert not whole and is_placed(moved, to(F8, "fsdp"))
    assert_same(expected, moved)
    assert not any(jnp.isnan(leaf).any() for leaf in moved.values())
