# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Experiences of known rows, and the batches that dispatch must make of them, by hand."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.sharding.placing import absent_array
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.trajectory import Experience, TrajectoryBatch
from tests.support.shardings import count_host_bytes

ROWS, LENGTH, TURNS = 16, 20, 8


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
        tokens=rng.integers(1, 64, (ROWS, LENGTH)).astype(np.int32),
        turn_ids=rng.integers(0, TURNS + 1, (ROWS, LENGTH)).astype(np.int32),
        logprobs=rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
        versions=rng.integers(0, 9, (ROWS, LENGTH)).astype(np.int32),
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


def own_rows(experience: Experience, layout: Layout) -> Experience:
    """The rows of all processes, of which each puts its own."""
    sharding = layout.activations("NS")

    def part(field: np.ndarray) -> jax.Array:
        if not sharding.addressable_devices:
            return absent_array(field.shape, field.dtype, sharding)
        return jax.make_array_from_callback(field.shape, sharding, lambda index: field[index])

    return jax.tree.map(part, experience)


def rows_held(layout: Layout) -> list[int]:
    """Returns the rows that this process holds."""
    sharding = layout.activations("NS")
    mine = sharding.addressable_devices_indices_map((ROWS, LENGTH)).values()
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


def make_turns(vocab: int, rows: int, length: int, seed: int = 0) -> TrajectoryBatch:
    """On the host: a prompt of 3 tokens, then replies of 3 and answers of 2."""
    rng = np.random.default_rng(seed)
    shape, positions = (rows, length), np.arange(length)
    turn_ids = np.where((positions >= 3) & ((positions - 3) % 5 < 3), 1 + (positions - 3) // 5, 0)
    return TrajectoryBatch(
        tokens=rng.integers(0, vocab, shape).astype(np.int32),
        segment_ids=np.ones(shape, np.int32),
        turn_ids=np.broadcast_to(turn_ids, shape).astype(np.int32),
        logprobs=-rng.random(shape, np.float32) * 4,
        versions=np.zeros(shape, np.int32),
        advantages=rng.normal(size=shape).astype(np.float32),
    )
