# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The process in which prompts are written and encoded: python -m earl_jax.serving.text_process.

A chat template is a program, and a text can be made to take a tokenizer minutes and gigabytes.
Neither can be interrupted in a thread (counting the template's steps would not count those of its
filters, which are C code), but a process can be killed. A new one takes 2 s for its imports, and
the server's own cannot fork, because JAX has threads. So this process, which has one thread, reads
the tokenizer once and forks a worker, in a few milliseconds, for each socket that it is sent.

A message is its length, 4 bytes, and JSON. A worker sends its process id; then it answers jobs,
each `{"text": ...}` or the arguments of `ChatPrompt.write`, with `{"ids": ...}` or
`{"refused": words}`, until the socket closes. `is_last`: it ends now, to return its memory.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.serving.chat_prompt import ChatPrompt, prompt_encoder
from earl_jax.settings.errors import InputError

LENGTH = struct.Struct(">I")
# A worker's memory beyond what it begins with: this, and so much for each byte of the longest text.
# An encoding has about 100 bytes a token.
WORKER_BYTES, TIMES_TEXT = 2**30, 128
# One that has grown by more than this ends after its job.
KEPT_BYTES = 2**27
# It ends by itself so long after the server should have ended it.
GRACE_S = 2.0
_CONTROL = 0


def main() -> None:
    """Forks workers for the sockets that come through standard input, until it closes."""
    settings = json.loads(sys.argv[1])
    tokenizer = load_tokenizer(settings["folder"])
    chat, encode = ChatPrompt(tokenizer, settings["arguments"]), prompt_encoder(tokenizer)
    most = settings["most_bytes"]

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        try:
            text = job["text"] if "text" in job else chat.write(**job)
            if len(text) > most:
                raise InputError(
                    f"the chat template makes a text of {len(text)} letters of the messages; this "
                    f"server's context holds at most {most}: shorten them"
                )
            return {"ids": encode(text)}
        except InputError as error:
            return {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            return {"refused": f"the prompt cannot be encoded ({type(error).__name__}: {error})"}

    # Workers are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=_CONTROL) as control:
        control.sendall(b"r")
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    control.close()
                    with contextlib.suppress(ConnectionError):
                        _work(connection, answer, settings["timeout_s"] + GRACE_S, most)
                    os._exit(0)


def _work(
    connection: socket.socket,
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    limit_s: float,
    most_bytes: int,
) -> None:
    """Answers jobs. SIGALRM ends the process where one takes longer than `limit_s`."""
    _limit_memory(WORKER_BYTES + TIMES_TEXT * most_bytes)
    before = _peak_bytes()
    with connection.makefile("rb") as file:
        connection.sendall(pack(os.getpid()))
        while head := file.read(LENGTH.size):
            job = json.loads(file.read(LENGTH.unpack(head)[0]))
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            result = answer(job)
            is_last = _peak_bytes() > before + KEPT_BYTES
            connection.sendall(pack({**result, "is_last": is_last}))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if is_last:
                return


def pack(value: Any) -> bytes:
    """Returns a message."""
    data = json.dumps(value).encode()
    return LENGTH.pack(len(data)) + data


def _limit_memory(more_bytes: int) -> None:
    """Limits the process's address space to so much more than it has, where that is known."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
