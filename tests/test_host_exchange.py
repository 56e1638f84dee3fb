# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where devices of different processes have no path, the plan's pieces go by the hosts.

Bit for bit, no byte more than is lacking, each one counted; and it is said.
"""

import time

import jax
import numpy as np
import pytest

from earl_jax.config import DispatchConfig
from earl_jax.loop import only_on_devices
from earl_jax.sharding._coordination import coordination_client
from earl_jax.sharding.host_channel import PART_BYTES, open_channel
from earl_jax.sharding.host_exchange import batches_of, envelopes_of
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfer
from tests.support.exchanges import BETWEEN_PROCESSES, lose_one, odd_things, part_of
from tests.support.processes import Processes
from tests.support.shardings import SHAPES, make_shardings, make_values

# Eight devices over two processes.
PROCESS_OF = {device: device // 4 for device in range(8)}
PAIRS = BETWEEN_PROCESSES[1::4]
WARNING = "cannot send to those of others"


# The letters, as arithmetic.


def rows_to_all():
    """f32[8, 4]: a quarter on each device of the first process, all on each of the other's."""
    rows = {n: ((2 * n, 2 * n + 2), (0, 4)) for n in range(4)}
    whole = {n: ((0, 8), (0, 4)) for n in range(4, 8)}
    return plan_transfer((8, 4), 4, rows, whole, process_of=PROCESS_OF)


def test_what_several_devices_of_a_process_want_is_carried_there_once():
    plan = rows_to_all()
    (batch,) = batches_of((plan,))
    assert [(letter.source, letter.targets) for letter in batch] == [
        (n, (4, 5, 6, 7)) for n in range(4)
    ]
    assert {(letter.sender, letter.receiver) for letter in batch} == {(0, 1)}
    assert sum(letter.num_bytes for letter in batch) == 8 * 4 * 4
    assert plan.moved_bytes == 4 * 8 * 4 * 4, "which the devices would be sent one by one"


def test_a_batch_has_no_more_than_the_bound_and_all_of_them_every_element():
    batches = batches_of((rows_to_all(), rows_to_all()), 24)
    assert max(sum(letter.num_bytes for letter in batch) for batch in batches) <= 24
    covered = np.zeros((2, 8, 4), int)
    for letter in (letter for batch in batches for letter in batch):
        (top, bottom), (left, right) = letter.index
        covered[letter.leaf, top:bottom, left:right] += 1
        assert letter.num_bytes == 4 * (bottom - top) * (right - left) <= 12
    assert (covered == 1).all()
    # A megabyte more than a message may have, of bytes.
    source, target = ({end: ((0, PART_BYTES + 2**20),)} for end in (0, 4))
    large = plan_transfer((PART_BYTES + 2**20,), 1, source, target, process_of=PROCESS_OF)
    (batch,) = batches_of((large,))
    assert [letter.num_bytes for letter in batch] == [PART_BYTES, 2**20]


def test_letters_that_go_the_same_way_share_a_message_of_bounded_size():
    (batch,) = batches_of((rows_to_all(), rows_to_all()))
    back = [letter._replace(sender=1, receiver=0) for letter in batch]
    home = [letter._replace(receiver=0) for letter in batch]
    assert envelopes_of([*batch, *home, *back]) == [list(batch), back]
    large = [letter._replace(num_bytes=PART_BYTES // 3) for letter in batch]
    assert [len(letters) for letters in envelopes_of(large)] == [3, 3, 2]


# Real processes, two of four devices.


def lacking_bytes(source: str, target: str) -> list[int]:
    """What each process must send: all that the other's devices want, and none of them holds."""
    bytes_to = [0, 0]
    for leaf, (shape, dtype) in SHAPES.items():
        sides = [make_shardings(name)[leaf] for name in (source, target)]
        has, wants = np.zeros((2, 2, *shape), bool)
        for table, side in zip((has, wants), sides, strict=True):
            for device, box in shard_ranges(side, shape).items():
                table[PROCESS_OF[device]][tuple(slice(*part) for part in box)] = True
        for process in (0, 1):
            lacks = int((wants[process] & ~has[process]).sum())
            bytes_to[process] += lacks * np.dtype(dtype).itemsize
    return bytes_to[::-1]


def without_a_path() -> None:
    jax.config.update("jax_cpu_collectives_implementation", None)


def check_all() -> dict:
    """Bytes that this process read for each pair of layouts; and what is left in the store."""
    without_a_path()
    values, counted = make_values(), []
    for n, (source, target) in enumerate(PAIRS):
        before, after = make_shardings(source), make_shardings(target)
        tree = {leaf: part_of(values[leaf], before[leaf]) for leaf in SHAPES}
        with only_on_devices(DispatchConfig(), by_hosts=True) as counter:
            moved = jax.block_until_ready(reshard(tree, after, chunk_bytes=64 if n == 0 else None))
        counted.append(counter.num_bytes)
        for leaf, array in moved.items():
            assert array.sharding == after[leaf]
            for shard in array.addressable_shards:
                expected = values[leaf][shard.index].tobytes()
                assert np.asarray(shard.data).tobytes() == expected, (source, target, leaf)
    assert odd_things()
    # What need not go by the hosts is as forbidden as it is where nothing need.
    with (
        pytest.raises(ValueError, match="32 bytes of experience or weights came through the host"),
        only_on_devices(DispatchConfig(), by_hosts=True),
    ):
        jax.device_get(jax.device_put(np.ones(8, np.float32), jax.local_devices()[0]))
    open_channel().gather(b"", "the end")
    left = [key for key, _ in coordination_client().key_value_dir_get_bytes("earl_jax/")]
    return {"counted": counted, "left": [key for key in left if "/of/" not in key]}


@pytest.mark.slow
def test_all_arrives_as_planned_is_counted_and_is_said_once():
    processes = Processes(2, 4, "test_host_exchange:check_all")
    first, second = processes.results(250)
    expected = [lacking_bytes(*pair) for pair in PAIRS]
    assert list(map(list, zip(first["counted"], second["counted"], strict=True))) == expected
    assert sum(map(sum, expected)) > 0
    assert first["left"] == second["left"] == []
    assert [errors.count(WARNING) for errors in processes.errors] == [1, 0]
    assert "dispatch_host_bytes" in processes.errors[0]
    assert "config.dispatch.forbid_host_bytes = True makes it an error" in processes.errors[0]


def lose_one_by_hosts(how: str, timeout_s: float) -> None:
    without_a_path()
    open_channel().timeout_s = timeout_s
    lose_one(how, timeout_s)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_an_error():
    processes = Processes(2, 4, "test_host_exchange:lose_one_by_hosts", "SIGKILL", 5)
    processes.all[-1].wait(100)
    lost_s = time.monotonic()
    _, errors = processes.all[0].communicate(timeout=30)
    assert processes.all[0].returncode == 1, errors
    assert time.monotonic() - lost_s < 20
    assert "arrays by the hosts: nothing came for 5 s in process 0 of 2" in errors
    processes.all[-1].communicate()
