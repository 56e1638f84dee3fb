# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A batch is the engine's rows and the host's facts, joined on the training layout, never read."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from earl_jax.dispatch.pack import dispatch, order_bytes, order_rows
from earl_jax.trajectory import Experience
from tests.support.batches import (
    LENGTH,
    batch_by_hand,
    both_counters,
    layout_of,
    make_experience,
    matching_fields,
    moved_bytes_by_hand,
    own_rows,
    place,
    rows_held,
)
from tests.support.processes import Processes

# The count below every door of Python, of the test that any array gets anywhere.

PAIRS: Sequence[tuple[str, str, int]] = [
    ("data=8", "data=8", 20),
    ("data=8", "data=2,fsdp=2,tensor=2", 24),
    ("data=1,tensor=8", "data=2,fsdp=4", 16),
    ("data=4,tensor=2", "data=1,tensor=8", 24),
    ("data=2,tensor=2 on 4 5 6 7", "data=1,fsdp=4 on 0 1 2 3", 24),
    ("data=4 on 4 5 6 7", "data=8", 24),
    ("data=8", "data=2,fsdp=2 on 4 5 6 7", 16),
    ("data=2 on 6 7", "data=4 on 1 2 3 6", 20),
    ("data=8", "data=8 on 7 6 5 4 3 2 1 0", 24),
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
        # A row is 20 tokens of four fields of 4 bytes: 320 bytes.
        ("data=8", "data=8", 20, 0),
        # Devices 2i and 2i + 1 want the four rows of which each holds two: 8 x 2 rows.
        ("data=8", "data=4,tensor=2", 20, 16 * 320),
        # Cut to 10 tokens before it moves: half of that. Padded to 40: twice.
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
    assert names == [name for name in fields if jax.tree.leaves(getattr(experience, name))]


def test_tokens_have_the_number_of_their_episodes_group():
    source, target, length = PAIRS[1]
    experience, lengths, advantages = make_experience()
    groups = 1 + np.arange(len(lengths)) // 4
    facts = {"lengths": lengths, "advantages": advantages, "groups": groups}
    rows, target = place(experience, layout_of(source)), layout_of(target)
    batch = dispatch(rows, target, length=length, **facts).batch
    batch.validate()
    inside = np.arange(length) < lengths[:, None]
    np.testing.assert_array_equal(batch.groups, np.where(inside, groups[:, None], 0))
    assert batch.groups.sharding.is_equivalent_to(target.activations("NS"), 2)


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


@pytest.mark.parametrize(("source", "target"), [PAIRS[0][:2], PAIRS[1][:2], PAIRS[4][:2]])
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
    """Programs and plans are kept for the same layouts and lengths, as a loop needs."""
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


# Rows whose order is another than that of the episodes.

# Of sixteen rows those of twelve episodes; half of them stay on their device of four.
ORDER = (4, 0, 1, 7, 3, 8, 15, 2, 9, 14, 10, 12)


@pytest.mark.parametrize(
    "where", ["data=4 on 0 1 2 3", "data=2,tensor=4", "data=2,fsdp=2,tensor=2"]
)
def test_rows_are_ordered_bit_for_bit_and_no_byte_is_read(where):
    experience, _, _ = make_experience()
    # Bits that a sum of floats would change.
    experience.logprobs[0, :3] = (-0.0, np.nan, np.inf)
    layout = layout_of(where)
    rows = place(experience, layout)
    with both_counters() as (counter, reads):
        ordered = jax.block_until_ready(order_rows(rows, ORDER, layout))
    assert (counter.num_bytes, reads) == (0, [])
    for name in ("tokens", "turn_ids", "logprobs", "versions"):
        field = getattr(ordered, name)
        assert field.sharding.is_equivalent_to(layout.activations("NS"), 2)
        expected = getattr(experience, name)[list(ORDER)]
        np.testing.assert_array_equal(np.asarray(field).view(np.int32), expected.view(np.int32))


def test_bytes_of_rows_that_are_ordered_are_those_that_change_device():
    experience, _, _ = make_experience()
    # Four rows of each device become three: of 4 0 1 | 7 3 8 | 15 2 9 | 14 10 12 stay 0 1, 7, 9, 14
    # and 12; the others are six rows of four fields.
    layout = layout_of("data=4 on 0 1 2 3")
    assert order_bytes(place(experience, layout), ORDER, layout) == 6 * LENGTH * 16
    # Of the halves 0 to 7 and 8 to 15 the first half has 8 and the second 2; each on four devices.
    layout = layout_of("data=2,tensor=4")
    assert order_bytes(place(experience, layout), ORDER, layout) == 2 * LENGTH * 16 * 4


# Over processes. Each of them runs this.


def order_over_processes(where: str) -> list[int]:
    """The first token of each row that this process has, of rows ordered over all processes."""
    experience, _, _ = make_experience()
    layout = layout_of(where)
    rows = own_rows(experience, layout)
    with both_counters() as (counter, reads):
        ordered = jax.block_until_ready(order_rows(rows, ORDER, layout))
    assert (counter.num_bytes, reads, ordered.tokens.shape) == (0, [], (len(ORDER), LENGTH))
    for field, expected in zip(jax.tree.leaves(ordered), jax.tree.leaves(experience), strict=True):
        for shard in field.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[list(ORDER)][shard.index])
    return [shard.index[0].start or 0 for shard in ordered.tokens.addressable_shards]


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


ORDERED = {"data=4,tensor=2": [[0, 0, 3, 3], [6, 6, 9, 9]], "data=4 on 0 1 2 3": [[0, 3, 6, 9], []]}
DELIVERED = {
    ("data=8", "data=2,fsdp=2,tensor=2"): [True, True],
    ("data=4 on 0 1 2 3", "data=2,tensor=2 on 4 5 6 7"): [False, True],
}


def in_one_of_two() -> list[list]:
    """Returns this process's part of all of them."""
    ordered = [order_over_processes(where) for where in ORDERED]
    return [ordered, [deliver_over_processes(*pair, 24) for pair in DELIVERED]]


def test_rows_are_ordered_and_experience_goes_from_process_to_process():
    fields = ["advantages", "logprobs", "segment_ids", "tokens", "turn_ids", "versions"]
    both = Processes(2, 4, "test_dispatch_pack:in_one_of_two").results()
    for number, (ordered, delivered) in enumerate(both):
        assert ordered == [starts[number] for starts in ORDERED.values()]
        assert delivered == [fields if does[number] else [] for does in DELIVERED.values()]
