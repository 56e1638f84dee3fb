# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Messages that process 0 collects and sends to all: their order, and the ends of connections."""

import contextlib
import itertools
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.runs import free_port
from earl_jax.launch.messages import Line, accept, exchange_lines, join

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
    """What a process hears when all say something; it ends where another one has."""
    own = json.dumps(words).encode()
    try:
        return json.loads(exchange_lines(lines[number], own, is_first=number == 0))
    except OSError:
        end(lines[number])
        raise


def end(lines: list[Line]) -> None:
    for line in lines:
        line.end()


def test_every_process_has_the_messages_in_the_order_of_the_processes():
    with connected(4) as lines, ThreadPoolExecutor(4) as threads:
        for words in (["", "b", "c\n", "d"], ["é" * 10**6, "", "", "d" * 10**6]):
            heard = [threads.submit(say, lines, n, words[n]) for n in range(4)]
            assert [each.result(60) for each in heard] == [words] * 4


def test_what_does_not_say_the_token_is_no_process():
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
