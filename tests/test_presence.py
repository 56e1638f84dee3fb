# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Finding the lost process: the answers of others, and the meaning of silence. Counters of all."""

import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.runs import free_port
from earl_jax.launch.presence import Place, Presence
from earl_jax.telemetry.timing import StageTimer

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


# Counters.


def presences(number: int) -> list[Presence]:
    """Returns the presences of all processes, which know each other."""
    every = [Presence(HERE) for _ in range(number)]
    places = [Place(index, "host", HERE, one.port) for index, one in enumerate(every)]
    for index, one in enumerate(every):
        one.meet(places[:index] + places[index + 1 :])
    return every


def test_processes_that_count_at_once_get_different_numbers():
    every = presences(3)
    for counter in (1, 2):
        assert {one.new_counter() for one in every} == {counter}

        def take(one: Presence, counter: int = counter) -> list[int]:
            return [one.count(counter, 2) for _ in range(50)]

        with ThreadPoolExecutor(len(every)) as threads:
            taken = list(threads.map(take, every))
        assert sorted(sum(taken, [])) == list(range(0, 300, 2))
        assert all(numbers == sorted(numbers) for numbers in taken)


def test_malformed_requests_leave_the_counter_running():
    first, other = presences(2)
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"7\n", b"\xff\n"):
        with socket.create_connection((HERE, first.port)) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.makefile("rb").read() == b""
    assert (other.count(1, 5), other.count(1, 1), first.count(1, 1)) == (0, 5, 6)
    with socket.create_connection((HERE, first.port)):
        # It says nothing; the next one waits a second for it.
        assert other.count(1, 1) == 7


def test_it_answers_on_after_a_nested_request_and_when_no_descriptor_was_free():
    asked, other = presences(2)
    asked.waits("the end")
    with socket.create_connection((HERE, asked.port)) as stranger:
        stranger.sendall(1000 * b"[" + b"\n")
        assert stranger.makefile("rb").read() == b""
    assert other.lost("nothing came") == ""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            stranger.connect((HERE, asked.port))
            # A thread that waits has a descriptor for one connection, and none for the next.
            stranger.close()
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert other.lost("nothing came") == ""


def test_process_0_that_has_ended_counts_no_more():
    other = Presence(HERE)
    other.meet([Place(0, "host", "no-such-host.invalid", 1)])
    with pytest.raises(OSError):
        other.count(1, 1)
    other.meet([Place(0, "host", HERE, free_port())])
    with pytest.raises(OSError):
        other.count(1, 1)
    with socket.create_server((HERE, 0)) as ending:
        other.meet([Place(0, "host", HERE, ending.getsockname()[1])])
        with ThreadPoolExecutor(1) as threads:
            counting = threads.submit(other.count, 1, 1)
            ending.accept()[0].close()
            with pytest.raises(OSError):
                counting.result(10)
