# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the dispatcher counts the bytes that it says it does."""

import json

import numpy as np
import pytest

from benchmarks.dispatch.gather import Controller
from benchmarks.runs import free_port
from tests.support import run_python


def test_rank_0_gathers_and_scatters():
    """Three ranks with two rows each, as threads; ranks 0 and 2 want rows 0 to 2."""
    import threading

    port, parts = free_port(), [slice(0, 3), slice(3, 6), slice(0, 3)]
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    got, through = {}, {}

    def take_part(rank: int) -> None:
        controller = Controller(rank, 3, "127.0.0.1", port)
        got[rank] = controller.gather_and_scatter(rows[2 * rank : 2 * rank + 2], parts)
        through[rank] = controller.through_bytes
        for peer in controller.peers.values():
            peer.close()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(got[rank], rows[part])
    # In: four rows of 8 bytes. Out: three rows to each of two ranks.
    assert through == {0: 4 * 8 + 2 * 3 * 8, 1: 0, 2: 0}


@pytest.mark.slow
def test_two_workers_on_loopback():
    flags = ("--workers=4", "--scale=1024", "--repeats=1", "--loopback", "--json", "--tensor=2")
    done = run_python("-m", "benchmarks.dispatch", *flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["way"] for row in rows] == ["dispatch", "gather"] * 3
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        size = ours["MiB a worker"]
        assert ours["network"] == theirs["network"] == "loopback"
        # Groups are workers 0 and 2, 1 and 3; each wants two workers' rows: 0 and 3 hold one.
        assert ours["total MiB"] == pytest.approx(size * (1 + 2 + 2 + 1))
        assert theirs["through rank 0 MiB"] == pytest.approx(size * (3 + 3 * 2))
