# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that were started by hand, with numbers, counts or a port that make no run."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.runs import free_port
from earl_jax.launch import rendezvous
from earl_jax.launch.addresses import addresses_here, listen
from earl_jax.launch.rendezvous import Member, find_mistake, join, wait_for_others
from earl_jax.settings.errors import InputError
from tests.support.commands import ALL, Command

TWICE = "two processes have config.distributed.process_id=1, on b and on c; number those of this"


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([(0, 2, "a")], ""),
        ([(0, 3, "a"), (2, 3, "b"), (1, 3, "b")], ""),
        ([(0, 3, "a"), (1, 3, "b"), (1, 3, "c")], TWICE),
        (
            [(0, 4, "a"), (0, 4, "b"), (0, 4, "b")],
            "3 processes have config.distributed.process_id=0",
        ),
        (
            [(0, 2, "a"), (1, 3, "b")],
            "config.distributed.num_processes is 2 in process 0 on a and 3 in process 1 on b",
        ),
    ],
)
def test_inconsistent_members_are_named(members, words):
    mistake = find_mistake([Member(*member) for member in members])
    assert mistake.startswith(words) and bool(mistake) == bool(words)


def comes(port: int, own: Member, timeout_s: float = 20.0, others_end_s: float = 10.0):
    """Returns the answer to a process other than 0."""
    return join("127.0.0.1", port, own, timeout_s=timeout_s, others_end_s=others_end_s)


def meet(*others: tuple[int, int], num: int, timeout_s: float = 20.0, noise: bytes = b""):
    """Returns the results or errors of process 0 and of the others (process_id, num_processes)."""
    port = free_port()
    with ThreadPoolExecutor(len(others) + 1) as pool:
        ends = [
            pool.submit(comes, port, Member(number, count, f"h{number}"), timeout_s)
            for number, count in others
        ]
        time.sleep(0.1)  # The others come first, and find nobody.
        listeners = listen(f"127.0.0.1:{port}", addresses_here("127.0.0.1", port), num)
        own = pool.submit(wait_for_others, listeners, Member(0, num, "h0"), timeout_s)
        if noise:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(noise)
        statuses = [end.result() for end in ends]
        try:
            result = own.result()
        except InputError as error:
            result = str(error)
        # JAX's coordinator listens there next.
        assert all(listener.fileno() == -1 for listener in listeners)
        return result, statuses


def test_processes_that_fit_go_on():
    assert meet((2, 3), (1, 3), num=3) == ([], [0, 0])
    assert meet((1, 2), num=2, noise=b"GET / HTTP/1.1\r\n\r\n") == ([], [0])


def test_all_end_where_two_have_one_number(monkeypatch):
    mistake, statuses = meet((1, 3), (1, 3), num=3)
    assert mistake.startswith("two processes have config.distributed.process_id=1, on h1 and on h1")
    assert statuses == [2, 2]
    # The third, which would come later, is not waited for.
    monkeypatch.setattr(rendezvous, "_LATE_S", 0.5)
    start_s = time.monotonic()
    mistake, statuses = meet((1, 4), (1, 4), num=4)
    assert mistake.startswith("two processes have") and statuses == [2, 2]
    assert time.monotonic() - start_s < 10


def test_all_end_where_one_was_given_another_number_of_processes():
    mistake, statuses = meet((1, 3), num=2)
    assert "num_processes is 2 in process 0 on h0 and 3 in process 1 on h1" in mistake
    assert statuses == [2]


def test_those_that_did_not_come_in_time_are_named():
    assert meet((2, 4), num=4, timeout_s=3.0) == ([1, 3], [1])


def test_those_that_are_waited_for_are_named_once(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_SILENT_S", 1.0)
    assert meet((2, 4), num=4, timeout_s=3.0) == ([1, 3], [1])
    limit = "up to 3 s (config.distributed.start_timeout_s)\n"
    assert capsys.readouterr().err == f"waiting for processes 1, 3, {limit}"
    assert join("127.0.0.1", 1, Member(1, 2, "h1"), timeout_s=3.0, others_end_s=1.0) is None
    assert capsys.readouterr().err == f"waiting for process 0 at 127.0.0.1:1, {limit}"


def test_process_that_starts_again_is_not_there_twice():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        listeners = listen(f"127.0.0.1:{port}", addresses_here("127.0.0.1", port), 2)
        own = pool.submit(wait_for_others, listeners, Member(0, 3, "h0"), 20.0)
        with socket.create_connection(("127.0.0.1", port)) as killed:
            assert killed.recv(100) == b"earl_jax rendezvous\n"
            killed.sendall(b'[1, 3, "h1"]\n')
            time.sleep(0.2)
        ends = [pool.submit(comes, port, Member(1, 3, "h1"))]
        assert comes(port, Member(2, 3, "h2")) == 0
        assert (own.result(), ends[0].result()) == ([], 0)


@contextlib.contextmanager
def another_program(first: bytes):
    """The port of a program that says this to all who connect."""
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def answer() -> None:
            while True:
                try:
                    connection, _ = taken.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(first)

        threading.Thread(target=answer, daemon=True).start()
        yield taken.getsockname()[1]
        taken.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("first", [b"\0\0\x12\4\0", b""], ids=["speaks", "closes"])
def test_another_program_at_the_address_is_a_mistake(first):
    """Such as the gRPC server of a run that has begun."""
    with another_program(first) as port:
        with pytest.raises(InputError, match=f"'127.0.0.1:{port}', and another program listens"):
            comes(port, Member(1, 2, "h1"), others_end_s=0.5)


def test_run_that_has_yet_to_end_is_waited_for():
    """A process that is started again comes before the others of its old run have ended."""
    with ThreadPoolExecutor(1) as pool:
        with another_program(b"\0\0\x12\4\0") as port:
            other = pool.submit(comes, port, Member(1, 2, "h1"))
            time.sleep(1.0)
        listeners = listen(f"127.0.0.1:{port}", addresses_here("127.0.0.1", port), 2)
        assert wait_for_others(listeners, Member(0, 2, "h0"), 20.0) == []
        assert other.result() == 0


@pytest.mark.slow
def test_two_processes_with_one_number_end_all_with_status_2(tmp_path):
    """One message, from a process 0, long before the time for the start is over."""
    own = [[], [], ["--config.distributed.process_id=0"]]
    settings = ALL | {"devices.num_cpu_devices": 2}
    ends = Command(tmp_path / "w", 3, *own, **settings).ends(100)
    assert [status for status, _, _ in ends] == [2, 2, 2], ends
    said = "".join(errors for _, _, errors in ends)
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert "error: two processes have config.distributed.process_id=0, on " in said
    assert not (tmp_path / "w").exists()


def test_a_name_with_the_same_address_twice_is_listened_at_once(monkeypatch):
    """As of /etc/hosts with two lines for it: getaddrinfo gives what both say."""
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: 2 * known("127.0.0.1", *a, **k)
    )
    port = free_port()
    listeners = listen(f"twice.example:{port}", addresses_here("twice.example", port), 2)
    assert len(listeners) == 1
    listeners[0].close()
