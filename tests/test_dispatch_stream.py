# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that go one by one make the batch that they make together."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from earl_jax.dispatch.pack import dispatch
from earl_jax.dispatch.stream import RowStream
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.telemetry.host_bytes import HostByteCounter
from tests.support.batches import (
    ROWS,
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
from tests.support.episodes import CONFIG, ROOM, collect, engine, tasks
from tests.support.processes import Processes

PAIRS = [
    ("data=8", "data=4,tensor=2", 24),
    ("data=4,tensor=2", "data=8", 16),
    ("data=8", "data=8", 20),
    ("data=4 on 0 1 2 3", "data=2,tensor=2 on 4 5 6 7", 20),
    ("data=1", "data=1,fsdp=8", 24),
]


@pytest.mark.parametrize(("source", "target", "length"), PAIRS)
def test_a_streamed_batch_is_the_dispatched_one_and_no_byte_is_read(source, target, length):
    experience, lengths, advantages = make_experience()
    source, target = layout_of(source), layout_of(target)
    facts = {"length": length, "lengths": lengths, "advantages": advantages}
    together = dispatch(place(experience, source), target, **facts)

    rows = place(experience, source)
    stream = RowStream(rows, target, length=length)
    order = np.random.default_rng(1).permutation(ROWS)
    with both_counters() as (counter, reads):
        for some in np.array_split(order, 5):
            stream.send(rows, [(int(row), int(row)) for row in some])
        moved_bytes = stream.moved_bytes
        streamed = dispatch(stream.take(), target, **facts)
        jax.block_until_ready(streamed.batch)
    assert (counter.num_bytes, reads) == (0, [])
    assert streamed.plan.moved_bytes == 0, "it is there already"
    assert moved_bytes == together.plan.moved_bytes
    for field in dataclasses.fields(streamed.batch):
        ours, theirs = (getattr(d.batch, field.name) for d in (streamed, together))
        if ours is not None:
            assert ours.sharding.is_equivalent_to(theirs.sharding, 2)
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)


def test_rows_take_the_places_that_they_are_given_and_a_stream_begins_anew():
    experience, _, _ = make_experience()
    rows = place(experience, layout_of("data=8"))
    stream = RowStream(rows, layout_of("data=2,tensor=4"), length=20)
    for batch in range(2):
        assert stream.num_missing == ROWS
        stream.send(rows, [(row, (row + 5) % ROWS) for row in range(ROWS)][:10])
        assert stream.num_missing == ROWS - 10
        # Written in the meantime: what was sent has been read before.
        stream.send(rows, [(row, (row + 5) % ROWS) for row in range(10, ROWS)])
        taken = stream.take()
        np.testing.assert_array_equal(taken.tokens, np.roll(experience.tokens, 5, axis=0)), batch


def test_a_send_compiles_nothing_for_another_row():
    experience, _, _ = make_experience()
    rows = place(experience, layout_of("data=1"))
    stream = RowStream(rows, layout_of("data=1 on 3"), length=20)
    stream.send(rows, [(0, 0)])
    events = []

    def listen(event: str, duration_s: float, **_: object) -> None:
        if "/compile/" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        stream.send(rows, [(9, 1), (4, 7)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert events == []


def test_errors_name_the_place():
    experience, _, _ = make_experience()
    rows = place(experience, layout_of("data=8"))
    stream = RowStream(rows, layout_of("data=8"), length=20)
    stream.send(rows, [(1, 2)])
    with pytest.raises(ValueError, match="place 2 of 16, which has its row already"):
        stream.send(rows, [(3, 2)])
    with pytest.raises(ValueError, match="row 16 of 16 is to go to place 3"):
        stream.send(rows, [(16, 3)])
    with pytest.raises(ValueError, match="15 of 16 places have no row yet, the first of them 0"):
        stream.take()
    five = make_layout(MeshShape(data=3), jax.devices()[:3], row_axes=TRAINING_ROWS)
    with pytest.raises(ValueError, match="16 rows do not divide over the 3 row shards"):
        RowStream(rows, five, length=20)


class Sending:
    """An engine that is looked at before each of its rounds."""

    def __init__(self, player, look):
        self.player, self.look = player, look

    def __getattr__(self, name):
        return getattr(self.player, name)

    def play(self, params, state, *arguments, **settings):
        self.look(state.experience)
        return self.player.play(params, state, *arguments, **settings)


def test_rows_of_a_rollout_arrive_while_other_episodes_are_played(pool):
    """One device plays 12 games on 4 slots; two others have the rows of those that are over."""
    rows, player, target = 12, engine(4, MeshShape()), layout_of("data=2 on 4 5")
    collectors, stream, sent, held_bytes, before = [], None, {}, [], 0

    def send_finished(experience):
        nonlocal stream, before
        before = before or bytes_on(4)
        stream = stream or RowStream(experience, target, length=ROOM)
        finished = collectors[0]._finished
        new = [(row, row) for row in finished if row not in sent]
        with both_counters() as (counter, reads):
            stream.send(experience, new)
            jax.block_until_ready(stream.shards)
        assert (counter.num_bytes, reads) == (0, [])
        live = sum(slot is not None for slot in collectors[0]._slots)
        sent.update({row: live for row, _ in new})
        held_bytes.append(bytes_on(4) - before)
        for row, _ in new:
            ids = [token for turn in finished[row].turns for token in turn.token_ids]
            here = np.array(stream.shards[4].tokens)[row]
            np.testing.assert_array_equal(here[: len(ids)], ids)

    rollout = collect(
        pool, tasks(rows), num_slots=4, num_devices=1, player=Sending(player, send_finished),
        collectors=collectors,
    )  # fmt: skip
    early = [live for live in sent.values() if live]
    assert len(early) >= rows - 4, "of the others some were still at play"
    # Of each row only what lies in the batch is kept: 48 places of 32 tokens in four fields.
    assert CONFIG.episodes_per_step == 48
    assert set(held_bytes) == {48 // 2 * ROOM * 4 * 4}
    stream.send(rollout.experience, [(row, row) for row in range(48) if row not in sent])
    taken = stream.take()
    for t in rollout.trajectories:
        for field in ("tokens", "turn_ids", "logprobs", "versions"):
            ours, theirs = (np.asarray(getattr(e, field)) for e in (taken, rollout.experience))
            np.testing.assert_array_equal(
                ours[t.row, : t.num_tokens], theirs[t.row, : t.num_tokens], err_msg=field
            )


def bytes_on(device: int) -> int:
    """What arrays hold there, of which no part is elsewhere."""
    gc.collect()
    held = {
        array.unsafe_buffer_pointer(): array.nbytes
        for array in jax.live_arrays()
        if [one.id for one in array.devices()] == [device] and not array.is_deleted()
    }
    return sum(held.values())


# Over processes. Each of them runs this.


def stream_over_processes(source: str, target: str, length: int) -> list:
    """Bytes read here, and the fields of the batch that this process has, compared."""
    experience, lengths, advantages = make_experience()
    source, target = layout_of(source), layout_of(target)
    rows = own_rows(experience, source)
    stream = RowStream(rows, target, length=length)
    with HostByteCounter() as counter:
        for some in np.array_split(np.random.default_rng(1).permutation(ROWS), 5):
            stream.send(rows, [(int(row), int(row)) for row in some])
        jax.block_until_ready(stream.shards)
    moved_bytes, held = stream.moved_bytes, rows_held(target)
    assert moved_bytes == moved_bytes_by_hand(source, target, length)
    facts = {"lengths": lengths[held], "advantages": advantages[held]}
    delivery = dispatch(stream.take(), target, length=length, **facts)
    assert delivery.plan.moved_bytes == 0, "it is there already"
    expected = batch_by_hand(experience, lengths, advantages, length)
    return [counter.num_bytes, matching_fields(delivery.batch, expected)]


@pytest.mark.slow
def test_rows_go_from_the_processes_that_play_to_one_that_trains():
    """Two devices of the first process play; both of the other want every row."""
    length = 24
    told = Processes(
        2, 2, "test_dispatch_stream:stream_over_processes",
        "data=2 on 0 1", "data=1,tensor=2 on 2 3", length,
    ).results()  # fmt: skip
    fields = ["advantages", "logprobs", "segment_ids", "tokens", "turn_ids", "versions"]
    assert told == [[0, []], [0, fields]]
