# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Finding the lost process: the answers of others, and the meaning of silence."""

import socket

from earl_jax.launch.presence import Place, Presence
from earl_jax.telemetry.timing import StageTimer
from tests.support.processes import free_port

HERE = "127.0.0.1"


def test_those_that_ended_hang_or_are_elsewhere_are_named():
    one, waiting, elsewhere = (Presence(HERE) for _ in range(3))
    one.waits("the end")
    waiting.waits("the end")
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        places = [
            Place(1, "a", HERE, waiting.port),
            Place(2, "b", HERE, elsewhere.port),
            Place(3, "c", HERE, free_port()),
            # The kernel accepts for a process that does not run.
            Place(4, "d", HERE, stopped.getsockname()[1]),
        ]
        one.meet(places)
        with StageTimer()("train"):
            assert one.lost("nothing came").split("; ") == [
                "process 2 on b is still in the stage train",
                "process 3 on c has ended",
                "process 4 on d does not answer (stopped, or its host or network hangs)",
            ]
            assert one.here() == "in the stage train, waiting for the end"


def test_a_process_that_ends_is_blamed_only_if_it_failed_itself():
    survivor, failed, asking = (Presence(HERE) for _ in range(3))
    survivor.meet([Place(9, "gone", HERE, free_port())])
    assert survivor.lost("no answer") == "process 9 on gone has ended"
    failed.meet([Place(0, "asking", HERE, asking.port)])
    asking.waits("the end")
    assert failed.lost("the chip is lost") == ""
    asking.meet([Place(1, "a", HERE, survivor.port), Place(2, "b", HERE, failed.port)])
    assert asking.lost("no answer") == "process 2 on b failed: the chip is lost"
