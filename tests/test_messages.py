# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Messages that process 0 collects and sends to all: their order, and the ends of connections."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.runs import free_port
from earl_jax.launch.messages import Line, accept, as_sent, error_alone, exchange_lines, join
from tests.support import ROOT

HERE, TOKEN = "127.0.0.1", "token"


@contextlib.contextmanager
def connected(count: int, *strangers: bytes) -> Iterator[list[list[Line]]]:
    """The lines of each process, of which the last connects first, behind strangers."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HERE, 0), backlog=64))
        port = listener.getsockname()[1]
        for words in strangers:
            stranger = stack.enter_context(socket.create_connection((HERE, port)))
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        joined = [[join(HERE, port, TOKEN, index)] for index in range(count - 1, 0, -1)]
        lines = [accept(listener, TOKEN, count), *reversed(joined)]
        for line in itertools.chain(*lines):
            stack.callback(line.close)
        yield lines


def say(lines: list[list[Line]], number: int, words: str) -> list[str]:
    """Returns the messages of all to a process; ends where another process has ended."""
    own = json.dumps(words).encode()
    try:
        return json.loads(exchange_lines(lines[number], own, is_first=number == 0))
    except OSError:
        end(lines[number])
        raise


def end(lines: list[Line]) -> None:
    for line in lines:
        line.end()


@pytest.mark.parametrize("count", [4, 20], ids=["plain", "packed"])
def test_every_process_has_the_messages_in_the_order_of_the_processes(count):
    with connected(count) as lines, ThreadPoolExecutor(count) as threads:
        for words in (["", "b", "c\n", "d"], ["é" * 10**6, "", "", "d" * 10**6]):
            words += ["e"] * (count - 4)
            heard = [threads.submit(say, lines, n, words[n]) for n in range(count)]
            assert [each.result(60) for each in heard] == [words] * count


def test_a_list_is_compressed_where_it_is_sent_to_many():
    every = json.dumps([{"episode": n, "reward": n % 3, "role": "x"} for n in range(500)]).encode()
    assert as_sent(every, 1) == every + b"\n"
    assert len(as_sent(every, 100)) < len(every) / 4


def test_all_processes_receive_errors_where_the_first_alone_gets_the_values():
    own = [json.dumps(each).encode() for each in ({"value": [1]}, {"error": "e"}, {"value": [3]})]
    with connected(3) as lines, ThreadPoolExecutor(3) as threads:
        heard = [
            threads.submit(exchange_lines, lines[n], own[n], is_first=n == 0, answer=error_alone)
            for n in range(3)
        ]
        first, *others = [json.loads(each.result(60)) for each in heard]
    assert first == [{"value": [1]}, {"error": "e"}, {"value": [3]}]
    assert others == [[{}, {"error": "e"}, {}]] * 2


def test_a_process_that_ends_in_the_middle_of_a_packed_list_is_noticed():
    with connected(2) as lines:
        lines[0][0].connection.sendall(as_sent(b"[" + b"1," * 1000 + b"1]", 100)[:-1])
        end(lines[0])
        with pytest.raises(ConnectionResetError):
            lines[1][0].receive_list()


# In a process of its own: a limit that was lowered cannot be raised again.
OPEN_FILES = """
import resource, sys
from earl_jax.launch.open_files import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
print([allow_connections(count) for count in (2, 800)], resource.getrlimit(resource.RLIMIT_NOFILE))
print(allow_connections(1000))
"""


def test_process_0_may_open_as_many_files_as_it_has_connections_or_says_what_to_raise():
    ran = subprocess.run([sys.executable, "-c", OPEN_FILES], cwd=ROOT, capture_output=True)
    allowed, refused = ran.stdout.decode().splitlines()
    assert allowed == "['', ''] (1854, 2000)"
    assert "may open 2000 files, and needs 2254" in refused and "ulimit -Hn" in refused


def test_a_connection_without_the_token_is_no_process():
    strangers = b"", b"GET / HTTP/1.1\r\n\r\n", b"7\n", b"\xff\n", b'["other", 1]\n', b'["token"'
    with connected(2, *strangers) as lines, ThreadPoolExecutor(2) as threads:
        heard = [threads.submit(say, lines, n, str(n)) for n in range(2)]
        assert [each.result(60) for each in heard] == [["0", "1"]] * 2


@pytest.mark.parametrize("ended", range(3))
def test_a_process_that_ended_is_noticed_by_all_that_wait(ended):
    with connected(3) as lines, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(say, lines, n, "") for n in range(3) if n != ended]
        end(lines[ended])
        for each in waiting:
            with pytest.raises(OSError):
                each.result(60)


def test_a_process_that_does_not_reach_process_0_says_what_to_give():
    with pytest.raises(ConnectionError, match=r"not reached at .*give config\.distributed\.coord"):
        join(HERE, free_port(), TOKEN, 1)
