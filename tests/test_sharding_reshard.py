# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Any layout to any layout: bit for bit, and no byte through the host."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from earl_jax.sharding import reshard as reshard_module
from earl_jax.sharding.moves import Move
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import choose_route, plan_transfer
from tests.support import run_python
from tests.support.shardings import PAIRS, SHAPES, P, count_host_bytes, make_shardings, make_values
from tests.support.traffic import collectives


@contextlib.contextmanager
def no_host() -> Iterator[None]:
    """Fails on a counted read, and on whatever the transfer guards of the platform notice."""
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
        count_host_bytes() as reads,
    ):
        yield
    assert reads == []


def assert_same_bits(tree, values) -> None:
    for leaf, value in values.items():
        assert np.asarray(tree[leaf]).tobytes() == value.tobytes(), leaf


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_reaches_every_other_bit_for_bit_without_the_host(source, target):
    values = make_values()
    tree = jax.device_put(values, make_shardings(source))
    shardings = make_shardings(target)
    with no_host():
        moved = jax.block_until_ready(reshard(tree, shardings))
    for leaf in SHAPES:
        assert moved[leaf].sharding == shardings[leaf]
        for shard in moved[leaf].addressable_shards:
            expected = values[leaf][shard.index]
            assert np.asarray(shard.data).tobytes() == expected.tobytes(), (leaf, shard.device)
    assert_same_bits(moved, values)


def test_the_pairs_take_every_route():
    shape = SHAPES["logprobs"][0]
    routes = {
        choose_route(*(shard_ranges(make_shardings(name)["logprobs"], shape) for name in pair))
        for pair in PAIRS
    }
    assert routes == {"in place", "compiled", "pieces"}


def test_the_counter_sees_device_put_read_the_whole_array():
    values = make_values()
    source, target = (make_shardings(name)["logprobs"] for name in ("8x1x1", "4x1x2"))
    array = jax.device_put(values["logprobs"], source)
    with count_host_bytes() as reads:
        jax.block_until_ready(jax.device_put(array, target))
    assert sum(reads) == values["logprobs"].nbytes
    fresh = jax.device_put(values["logprobs"], source)
    with pytest.raises(AssertionError), no_host():
        with jax.transfer_guard_device_to_host("allow"), jax.transfer_guard_host_to_device("allow"):
            jax.device_put(fresh, target)


@pytest.mark.parametrize("target", ["4x1x2", "last six", "reversed rows"])
def test_explicit_axes_and_an_ambient_mesh_make_no_difference(target):
    values = make_values()
    source = make_shardings("8x1x1", AxisType.Explicit)
    shardings = make_shardings(target, AxisType.Explicit)
    tree = jax.device_put(values, source)
    with no_host(), jax.set_mesh(source["tokens"].mesh):
        moved = reshard(tree, shardings)
    assert jax.tree.map(lambda array: array.sharding, moved) == shardings
    assert_same_bits(moved, values)


def test_a_repeated_reshard_traces_and_compiles_nothing():
    events = []

    def listen(event: str, duration_s: float, **_: object) -> None:
        if "/compile/" in event:
            events.append((event, duration_s))

    def round_trip(tree):
        for name in ("4x1x2", "last six", "8x1x1"):
            tree = reshard(tree, {leaf: make_shardings(name)[leaf] for leaf in tree})
        return tree

    values = {"mask": make_values()["mask"], "tokens": np.arange(24, dtype=np.int16)}
    tree = jax.device_put(values, {leaf: make_shardings("8x1x1")[leaf] for leaf in values})
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        tree = round_trip(tree)
        assert events  # the listener works
        events.clear()
        tree = round_trip(tree)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert events == []
    assert_same_bits(tree, values)


def test_arrays_already_in_place_are_not_copied():
    x = jax.device_put(np.arange(24), make_shardings("8x1x1")["tokens"])
    assert reshard(x, make_shardings("8x1x1")["tokens"]) is x
    flat = Mesh(np.array(jax.devices()[::-1]), ("row",))
    same_places = NamedSharding(Mesh(flat.devices[::-1], ("row",)), P("row"))
    moved = reshard(x, same_places)
    assert moved.sharding == same_places
    pointers = [
        {s.device.id: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}
        for array in (x, moved)
    ]
    assert pointers[0] == pointers[1]


@pytest.mark.parametrize("target", ["4x1x2", "first half"])
def test_scalars_empty_arrays_and_keys_move_too(target):
    source, goal = make_shardings("8x1x1")["mask"], make_shardings(target)["mask"]
    tree = {
        "step": jax.device_put(np.int32(7), NamedSharding(source.mesh, P())),
        "empty": jax.device_put(np.zeros((0, 8), np.float32), source),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(3), 8), NamedSharding(source.mesh, P("x"))
        ),
        "new": jnp.arange(8),
    }
    shardings = {
        "step": NamedSharding(goal.mesh, P()),
        "empty": goal,
        "keys": NamedSharding(goal.mesh, P("x")),
        "new": NamedSharding(goal.mesh, P("x")),
    }
    with no_host():
        moved = reshard(tree, shardings)
    assert jax.tree.map(lambda array: array.sharding, moved) == shardings
    assert int(moved["step"]) == 7
    assert all(
        shard.data.shape == goal.shard_shape((0, 8)) for shard in moved["empty"].addressable_shards
    )
    keys = jax.random.split(jax.random.key(3), 8)
    np.testing.assert_array_equal(jax.random.key_data(moved["keys"]), jax.random.key_data(keys))
    np.testing.assert_array_equal(moved["new"], np.arange(8))


def test_errors_name_what_to_change():
    x = jax.device_put(np.zeros((6, 4), np.float32), jax.devices()[0])
    mesh = make_shardings("4x1x2")["mask"].mesh
    with pytest.raises(
        ValueError,
        match=r"\['w'\] of shape \(6, 4\) does not divide: axis 0 has 6 elements.*"
        r"over 8 devices \(mesh axes \('x', 'z'\) of mesh \{'x': 4, 'y': 1, 'z': 2\}\); "
        r"pad axis 0 to a multiple of 8 or write None",
    ):
        reshard({"w": x}, {"w": NamedSharding(mesh, P(("x", "z")))})
    with pytest.raises(ValueError, match="has 3 entries for an array of shape"):
        reshard(x, NamedSharding(mesh, P("x", None, "z")))
    with pytest.raises(ValueError, match="leaves an axis open"):
        reshard(x, NamedSharding(mesh, P(P.UNCONSTRAINED)))
    with pytest.raises(ValueError, match="same structure"):
        reshard({"w": x}, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match=r"\['w'\] is a ndarray; reshard moves jax.Arrays"):
        reshard({"w": np.zeros(8)}, {"w": NamedSharding(mesh, P())})
    with pytest.raises(ValueError, match="a mesh of real devices"):
        reshard(x, NamedSharding(AbstractMesh((2,), ("x",)), P()))


@pytest.mark.parametrize(
    ("source", "target", "chunk_bytes"),
    [*((*pair, 100) for pair in PAIRS[1::3]), (*PAIRS[1], 1), ("last six", "1x8x1", 700)],
)
def test_chunks_arrive_bit_for_bit_without_the_host(source, target, chunk_bytes):
    values = {leaf: make_values()[leaf] for leaf in ("cache", "tokens", "mask")}
    if chunk_bytes == 1:  # an element at a time
        values = {"tokens": values["tokens"]}
    tree = {
        leaf: jax.device_put(value, make_shardings(source)[leaf]) for leaf, value in values.items()
    }
    shardings = {leaf: make_shardings(target)[leaf] for leaf in tree}
    with count_host_bytes() as reads:
        moved = jax.block_until_ready(reshard(tree, shardings, chunk_bytes=chunk_bytes))
    assert reads == []
    assert jax.tree.map(lambda array: array.sharding, moved) == shardings
    assert_same_bits(moved, values)
    assert_same_bits(tree, values)


def test_donated_buffers_are_freed_unless_shared():
    """In chunks too: test_carry.py."""
    values = make_values()
    for target, freed in (("4x1x2", True), ("last six", True), ("8x1x1", False)):
        tree = jax.device_put(values, make_shardings("8x1x1"))
        moved = reshard(tree, make_shardings(target), donate=True)
        assert [array.is_deleted() for array in tree.values()] == [freed] * len(tree), target
        assert_same_bits(moved, values)
    with pytest.raises(ValueError, match="chunk_bytes is 0"):
        reshard(tree, make_shardings("8x1x1"), chunk_bytes=0)


MEMORY = """
import ctypes, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from earl_jax.sharding.reshard import reshard
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(field)) // 1024
devices = np.array(jax.devices()).reshape(2, 2)
rows, columns = (NamedSharding(Mesh(devices, ("x", "y")), s) for s in (P(("x", "y")), P("y", "x")))
chunk = int(sys.argv[1]) or None
def run(mib):
    array = jax.jit(lambda: jnp.ones((mib, 2**18), jnp.float32), out_shardings=rows)()
    goal = NamedSharding(Mesh(devices[::-1], ("x", "y")), columns.spec)
    jax.block_until_ready(array)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    jax.block_until_ready(reshard(array, goal, chunk_bytes=chunk))
    return status("VmHWM") - before
run(8)
print(run(256))
"""


@pytest.mark.slow
def test_chunks_bound_the_memory_beside_source_and_result():
    """A result of 256 MiB over four devices, all at once and in chunks of 4 MiB a device."""
    ran = [run_python("-c", MEMORY, str(chunk)) for chunk in (0, 4 * 2**20)]
    whole, chunked = (int(done.stdout) for done in ran)
    assert 256 <= chunked < 256 + 64
    assert whole > 256 + 128


@pytest.mark.parametrize(
    ("source", "target", "ratio"),
    [
        # What all want is gathered, and single shards change their axis: nothing goes twice.
        ("8x1x1", "replicated", 1),
        ("8x1x1", "4x1x2", 1),
        ("8x1x1", "1x8x1", 1),
        ("2x2x2", "partly replicated", 1),
        # Three cuts of two: two steps of half a shard each, where a device lacks three quarters.
        ("8x1x1", "2x2x2", 4 / 3),
        ("2x2x2", "8x1x1", 4 / 3),
        # Three such steps, where it lacks seven eighths.
        ("2x2x2", "1x8x1", 12 / 7),
        # Left to itself XLA sends twice as much as is lacking.
        ("8x1x1", "partly replicated", 8 / 7),
        # Parts of the same sizes on other devices: one permute.
        ("4x1x2", "joint", 1),
    ],
)
def test_a_compiled_move_sends_hardly_more_than_the_plan(source, target, ratio):
    (shape, dtype), sides = SHAPES["logprobs"], [source, target]
    before, after = (make_shardings(name)["logprobs"] for name in sides)
    plan = plan_transfer(shape, 4, *(shard_ranges(side, shape) for side in (before, after)))
    assert plan.route == "compiled"
    move = Move(shape, np.dtype(dtype), before, after)
    given = jax.ShapeDtypeStruct(shape, dtype, sharding=before)
    text = reshard_module._identity((move,)).lower((given,)).compile().as_text()
    sent = sum(each.received_bytes for each in collectives(text, 8))
    assert sent == pytest.approx(ratio * plan.moved_bytes)


def test_a_move_does_not_wait_for_what_others_compute():
    """Two devices compute while two others send rows to a third pair."""
    pairs = [Mesh(np.array(jax.devices()[n : n + 2]), ("x",)) for n in (0, 2)]
    sides = [NamedSharding(mesh, P("x")) for mesh in pairs]
    array = jax.device_put(np.arange(24, dtype=np.int32), sides[0])
    jax.block_until_ready(reshard(array, sides[1]))

    # Of what looks cheap XLA makes no thread of its own on CPUs.
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ x, x))
    busy = [
        multiply(jax.device_put(np.eye(400, dtype=np.float32), jax.devices()[n])) for n in (6, 7)
    ]
    moved = jax.block_until_ready(reshard(array, sides[1]))
    assert not any(each.is_ready() for each in busy)
    np.testing.assert_array_equal(moved, np.arange(24))
    jax.block_until_ready(busy)
