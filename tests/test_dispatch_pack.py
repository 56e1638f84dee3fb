# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A batch is the engine's rows and the host's facts, joined on the training layout, never read."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest
from processes import Processes

# The count below every door of Python, of the test that any array gets anywhere.
from test_sharding_reshard import count_host_bytes

from earl_jax.dispatch.pack import dispatch
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.sharding.reshard import absent_array
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.trajectory import Experience, TrajectoryBatch

ROWS, PLACES, TURNS = 16, 20, 8


def layout_of(text: str) -> Layout:
    """A layout over all devices, or over those of "data=4 on 4 5 6 7"."""
    shape, _, ids = text.partition(" on ")
    devices = [jax.devices()[int(n)] for n in ids.split()] if ids else None
    return make_layout(MeshShape.parse(shape), devices)


def make_experience(seed: int = 0) -> tuple[Experience, np.ndarray, np.ndarray]:
    """On the host: rows full of an earlier episode's garbage, lengths, advantages per turn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 17, ROWS)
    lengths[3], lengths[5] = 0, 16
    experience = Experience(
        tokens=rng.integers(1, 64, (ROWS, PLACES)).astype(np.int32),
        turn_ids=rng.integers(0, TURNS + 1, (ROWS, PLACES)).astype(np.int32),
        logprobs=rng.normal(size=(ROWS, PLACES)).astype(np.float32),
        versions=rng.integers(0, 9, (ROWS, PLACES)).astype(np.int32),
    )
    return experience, lengths, rng.normal(size=(ROWS, TURNS)).astype(np.float32)


def place(experience: Experience, layout: Layout) -> Experience:
    """Fresh arrays: what was read once would be kept on the host and not be counted again."""
    return jax.device_put(experience, layout.activations("NS"))


def batch_by_hand(experience, lengths, advantages, length) -> dict[str, np.ndarray]:
    """Place by place in Python."""
    fields = ("tokens", "segment_ids", "turn_ids", "logprobs", "versions", "advantages")
    batch = {name: np.zeros((ROWS, length)) for name in fields}
    for row in range(ROWS):
        for at in range(lengths[row]):
            batch["tokens"][row, at] = experience.tokens[row, at]
            batch["segment_ids"][row, at] = 1
            turn = experience.turn_ids[row, at]
            if turn > 0:
                batch["turn_ids"][row, at] = turn
                batch["advantages"][row, at] = advantages[row, turn - 1]
                batch["logprobs"][row, at] = experience.logprobs[row, at]
                batch["versions"][row, at] = experience.versions[row, at]
    return batch


def moved_bytes_by_hand(source: Layout, target: Layout, length: int) -> int:
    """Rows that a device of the target needs and does not hold, at 16 bytes a place."""

    def rows_of(layout: Layout) -> dict[int, set[int]]:
        indices = layout.activations("N").devices_indices_map((ROWS,))
        return {device.id: set(range(ROWS)[index[0]]) for device, index in indices.items()}

    held = rows_of(source)
    missing = sum(len(rows - held.get(device, set())) for device, rows in rows_of(target).items())
    return missing * length * 4 * 4


@contextlib.contextmanager
def both_counters() -> Iterator[tuple[HostByteCounter, list[int]]]:
    """The product's counter, and the tests' own below it."""
    with HostByteCounter() as counter, count_host_bytes() as reads:
        yield counter, reads


PAIRS: Sequence[tuple[str, str, int]] = [
    ("data=8", "data=8", 20),
    ("data=8", "data=4,tensor=2", 20),
    ("data=8", "data=4,tensor=2", 16),
    ("data=8", "data=4,tensor=2", 24),
    ("data=8", "data=2,fsdp=2,tensor=2", 24),
    ("data=4,tensor=2", "data=1,fsdp=8", 16),
    ("data=2,tensor=4", "data=8", 24),
    ("data=1,tensor=8", "data=2,fsdp=4", 16),
    ("data=4,tensor=2", "data=1,tensor=8", 24),
    ("data=4 on 0 1 2 3", "data=4 on 4 5 6 7", 24),
    ("data=4 on 0 1 2 3", "data=2,tensor=2 on 4 5 6 7", 16),
    ("data=2,tensor=2 on 4 5 6 7", "data=1,fsdp=4 on 0 1 2 3", 24),
    ("data=4 on 4 5 6 7", "data=8", 24),
    ("data=8", "data=2,fsdp=2 on 4 5 6 7", 16),
    ("data=2 on 6 7", "data=4 on 1 2 3 6", 20),
    ("data=8", "data=8 on 7 6 5 4 3 2 1 0", 24),
    ("data=1", "data=8", 24),
]


@pytest.mark.parametrize(("source", "target", "length"), PAIRS)
def test_a_batch_is_the_rows_and_the_facts_and_no_byte_is_read(source, target, length):
    experience, lengths, advantages = make_experience()
    source, target = layout_of(source), layout_of(target)
    rows = place(experience, source)
    with (
        both_counters() as (counter, reads),
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        delivery = dispatch(rows, target, length=length, lengths=lengths, advantages=advantages)
        jax.block_until_ready(delivery.batch)
    assert (counter.num_bytes, reads) == (0, [])

    expected = batch_by_hand(experience, lengths, advantages, length)
    delivery.batch.validate()
    spoken = expected["turn_ids"] > 0
    assert spoken.any()
    for name, values in expected.items():
        field = getattr(delivery.batch, name)
        assert field.sharding.is_equivalent_to(target.activations("NS"), 2), name
        assert field.dtype == (np.float32 if name in ("logprobs", "advantages") else np.int32)
        got = np.asarray(field)
        if name in ("logprobs", "versions"):  # told to mean nothing elsewhere
            got, values = got[spoken], values[spoken]
        np.testing.assert_array_equal(got, values, err_msg=name)
    assert delivery.plan.moved_bytes == moved_bytes_by_hand(source, target, length)
    # The engine's rows are still there: the loop reads its episodes from them.
    np.testing.assert_array_equal(rows.tokens, experience.tokens)


@pytest.mark.parametrize(
    ("source", "target", "length", "moved"),
    [
        # A row is 20 places of four fields of 4 bytes: 320 bytes.
        ("data=8", "data=8", 20, 0),
        # Devices 2i and 2i + 1 want the four rows of which each holds two: 8 x 2 rows.
        ("data=8", "data=4,tensor=2", 20, 16 * 320),
        # Cut to 10 places before it moves: half of that. Padded to 40: twice.
        ("data=8", "data=4,tensor=2", 10, 16 * 160),
        ("data=8", "data=4,tensor=2", 40, 16 * 640),
        # Everyone wants all 16 rows and holds 2.
        ("data=8", "data=1,tensor=8", 20, 8 * 14 * 320),
        # Everyone holds all.
        ("data=1,tensor=8", "data=8", 20, 0),
        # All rows leave, once each.
        ("data=4 on 0 1 2 3", "data=4 on 4 5 6 7", 20, 16 * 320),
        # Devices 4 to 7 want four rows each, and hold rows 8 and 9, 10 and 11, ...: only device 7
        # (rows 12 to 15, holds 14 and 15) and device 6 (8 to 11, holds 12 and 13) could match.
        ("data=8", "data=4 on 4 5 6 7", 20, (4 + 4 + 4 + 2) * 320),
    ],
)
def test_the_plan_says_how_many_bytes_change_device(source, target, length, moved):
    experience, lengths, advantages = make_experience()
    delivery = dispatch(
        place(experience, layout_of(source)),
        layout_of(target),
        length=length,
        lengths=np.minimum(lengths, 10),
        advantages=advantages,
    )
    assert delivery.plan.moved_bytes == moved
    names = [name for name, _ in delivery.plan.leaves]
    fields = [field.name for field in dataclasses.fields(Experience)]
    # What was not written down does not travel.
    assert names == [name for name in fields if getattr(experience, name) is not None]


def test_the_counters_catch_the_plain_way():
    """The same rows by device_put: each of the four fields is read whole, 16 x 20 x 4 bytes."""
    experience, _, _ = make_experience()
    rows = place(experience, layout_of("data=8"))
    target = layout_of("data=4,tensor=2").activations("NS")
    with both_counters() as (counter, reads):
        jax.block_until_ready(jax.device_put(rows, target))
    assert counter.num_bytes == sum(reads) == 4 * 16 * 20 * 4


def test_the_test_above_fails_for_a_dispatch_by_device_put(monkeypatch):
    """The one with the counters, run with a dispatcher that moves rows the plain way."""
    monkeypatch.setattr("earl_jax.dispatch.pack.reshard", jax.device_put)
    # jax 0.10.2 lets the read pass, and the counters see it; 0.12's transfer guard refuses it.
    seen = (AssertionError, jax.errors.JaxRuntimeError)
    with pytest.raises(seen, match="5120|Disallowed device-to-host"):
        test_a_batch_is_the_rows_and_the_facts_and_no_byte_is_read("data=8", "data=4,tensor=2", 20)


def test_rows_that_do_not_fit_are_refused():
    experience, lengths, advantages = make_experience()
    rows = place(experience, layout_of("data=8"))
    facts = {"lengths": lengths, "advantages": advantages}
    with pytest.raises(ValueError, match="an episode of 16 tokens does not fit rows of 15"):
        dispatch(rows, layout_of("data=8"), length=15, **facts)
    twelve = jax.tree.map(lambda field: field[:12], experience)
    rows = jax.device_put(twelve, layout_of("data=4 on 0 1 2 3").activations("NS"))
    facts = {"lengths": lengths[:12], "advantages": advantages[:12]}
    with pytest.raises(ValueError, match=r"does not divide: axis 0 has 12 elements"):
        dispatch(rows, layout_of("data=8"), length=16, **facts)


@pytest.mark.parametrize(("source", "target"), [PAIRS[0][:2], PAIRS[1][:2], PAIRS[10][:2]])
def test_a_batch_of_no_rows_is_one(source, target):
    experience, lengths, advantages = make_experience()
    none, target = jax.tree.map(lambda field: field[:0], experience), layout_of(target)
    with both_counters() as (counter, reads):
        delivery = dispatch(
            place(none, layout_of(source)),
            target,
            length=24,
            lengths=lengths[:0],
            advantages=advantages[:0],
        )
        jax.block_until_ready(delivery.batch)
    assert (counter.num_bytes, reads, delivery.plan.moved_bytes) == (0, [], 0)
    for field in jax.tree.leaves(delivery.batch):
        assert field.sharding.is_equivalent_to(target.activations("NS"), 2)
        assert {shard.data.shape for shard in field.addressable_shards} == {(0, 24)}


def test_a_second_delivery_compiles_nothing():
    """What a loop needs: programs and plans are kept for the same layouts and lengths."""
    events = []

    def listen(event: str, duration_s: float, **_: object) -> None:
        if "/compile/" in event:
            events.append(event)

    layouts = layout_of("data=8"), layout_of("data=4,tensor=2")
    deliveries = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for seed in range(2):
            experience, lengths, advantages = make_experience(seed)
            rows = place(experience, layouts[0])
            events.clear()
            deliveries.append(
                dispatch(rows, layouts[1], length=23, lengths=lengths, advantages=advantages)
            )
            assert bool(events) == (seed == 0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert deliveries[0].plan is deliveries[1].plan
    assert (np.asarray(deliveries[0].batch.tokens) != deliveries[1].batch.tokens).any()


# Over processes. Each of them runs this.


def deliver_over_processes(source: str, target: str, length: int) -> list[str]:
    """The fields of the batch that this process has, compared place by place."""
    experience, lengths, advantages = make_experience()
    source, target = layout_of(source), layout_of(target)
    rows, held = own_rows(experience, source), rows_held(source)
    with both_counters() as (counter, reads):
        delivery = dispatch(
            rows, target, length=length, lengths=lengths[held], advantages=advantages[held]
        )
        jax.block_until_ready(delivery.batch)
    assert (counter.num_bytes, reads) == (0, [])
    assert delivery.plan.moved_bytes == moved_bytes_by_hand(source, target, length)
    return matching_fields(delivery.batch, batch_by_hand(experience, lengths, advantages, length))


def own_rows(experience: Experience, layout: Layout) -> Experience:
    """The rows of all processes, of which each puts its own."""
    sharding = layout.activations("NS")

    def part(field: np.ndarray) -> jax.Array:
        if not sharding.addressable_devices:
            return absent_array(field.shape, field.dtype, sharding)
        return jax.make_array_from_callback(field.shape, sharding, lambda index: field[index])

    return jax.tree.map(part, experience)


def rows_held(layout: Layout) -> list[int]:
    """Those of this process."""
    sharding = layout.activations("NS")
    mine = sharding.addressable_devices_indices_map((ROWS, PLACES)).values()
    return sorted({row for index in mine for row in range(ROWS)[index[0]]})


def matching_fields(batch: TrajectoryBatch, expected: dict[str, np.ndarray]) -> list[str]:
    """The fields of a batch of which this process has a part, each compared place by place."""
    spoken, seen = expected["turn_ids"] > 0, []
    for name, values in expected.items():
        field = getattr(batch, name)
        assert field.shape == values.shape
        for shard in field.addressable_shards:
            got, wanted, says = (
                a[i]
                for a, i in (
                    (np.asarray(shard.data), ...),
                    (values, shard.index),
                    (spoken, shard.index),
                )
            )
            if name in ("logprobs", "versions"):
                got, wanted = got[says], wanted[says]
            np.testing.assert_array_equal(got, wanted, err_msg=name)
            seen.append(name)
    return sorted(set(seen))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "trains"),
    [
        ("data=8", "data=2,fsdp=2,tensor=2", [True, True]),
        ("data=4 on 0 1 2 3", "data=2,tensor=2 on 4 5 6 7", [False, True]),
    ],
)
def test_experience_goes_from_process_to_process(source, target, trains):
    fields = ["advantages", "logprobs", "segment_ids", "tokens", "turn_ids", "versions"]
    results = Processes(
        2, 4, "test_dispatch_pack:deliver_over_processes", source, target, 24
    ).results()
    assert results == [fields if does else [] for does in trains]
