# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts as ids, made in processes of their own, which can be ended: see `text_process`."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from earl_jax.envs.text.tokenizer import save_tokenizer
from earl_jax.serving.requests import RequestError
from earl_jax.serving.text_process import LENGTH, pack

# The process has so long to read its tokenizer.
START_S = 120.0
# Workers that are kept, and prompts that are made at once.
MOST_WORKERS = min(8, max(2, (os.cpu_count() or 2) // 2))


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A process that makes one prompt at a time."""

    pid: int
    connection: socket.socket

    @property
    def is_there(self) -> bool:
        """Returns whether an idle one has not ended."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        return True

    def end(self) -> None:
        """Ends the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


class Texts:
    """Makes the ids of prompts, one at a time for each client, under a time limit.

    A prompt that takes longer, or whose client goes away, ends with its worker.
    """

    def __init__(
        self, tokenizer: Any, arguments: Mapping[str, Any], *, timeout_s: float, most_bytes: int
    ) -> None:
        """Starts the process, and does not wait for it: `ready` does.

        Args:
            tokenizer: of the policy, with its chat template.
            arguments: given to the chat template beside those of a request.
            timeout_s: time limit of one prompt.
            most_bytes: length limit of the text that a template makes.
        """
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="earl_jax-")
        save_tokenizer(tokenizer, self._folder.name)
        self._settings = {
            "folder": self._folder.name,
            "arguments": dict(arguments),
            "timeout_s": timeout_s,
            "most_bytes": most_bytes,
        }
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(MOST_WORKERS)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._starting = asyncio.Lock()
        self._is_ready = False
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        line = [sys.executable, "-m", "earl_jax.serving.text_process", json.dumps(self._settings)]
        with theirs:
            self._process = subprocess.Popen(
                line,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                # Ctrl-C in a terminal ends the server, which ends this in its order.
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Returns once prompts can be made; starts the process again if it has ended.

        Raises RuntimeError where it does not start.
        """
        async with self._starting:
            if self._process.poll() is not None and self._is_ready:
                self._control.close()
                self._is_ready = False
                self._start()
            if not self._is_ready:
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(START_S):
                    if not await loop.sock_recv(self._control, 1):
                        raise RuntimeError("earl_jax.serving.text_process ended; see above")
                self._is_ready = True

    def close(self) -> None:
        """Ends the process and its workers."""
        for worker in self._idle:
            worker.end()
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    async def ids_of(self, client: str, **job: Any) -> list[int]:
        """Returns the ids of a `text`, or of what `ChatPrompt.write` makes of the job.

        Raises RequestError for a prompt that cannot be made, or not in time.
        """
        async with self._worker_for(client) as worker:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await _ask(worker, job)
            except TimeoutError:
                raise _refusal(
                    f"writing and encoding this prompt takes more than {self._timeout_s:g} s "
                    "(--text_timeout_s when the server was started); shorten it, or check the "
                    "policy's chat template"
                ) from None
            except (EOFError, ConnectionError):
                raise _refusal(
                    "writing or encoding this prompt takes more memory than it may; shorten it, or "
                    "check the policy's chat template"
                ) from None
            if not answer["is_last"]:
                self._idle.append(worker)
        if "refused" in answer:
            raise _refusal(answer["refused"])
        return answer["ids"]

    @contextlib.asynccontextmanager
    async def _worker_for(self, client: str) -> AsyncIterator[_Worker]:
        """Gives a worker in the client's turn; ends it unless it is among the idle ones then."""
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn, self._free:
            worker = self._idle.pop() if self._idle else await self._fork()
            if not worker.is_there:
                worker.connection.close()
                worker = await self._fork()
            try:
                yield worker
            finally:
                if worker not in self._idle:
                    worker.end()

    async def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self.ready()
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            return _Worker(await _receive(ours), ours)
        except BaseException as error:
            ours.close()
            if isinstance(error, (OSError, EOFError)):
                raise RequestError(
                    grpc.StatusCode.INTERNAL, "the server could not encode this prompt; try again"
                ) from error
            raise


async def _ask(worker: _Worker, job: Mapping[str, Any]) -> dict[str, Any]:
    await asyncio.get_running_loop().sock_sendall(worker.connection, pack(job))
    return await _receive(worker.connection)


async def _receive(connection: socket.socket) -> Any:
    """Returns the next message. Raises EOFError."""
    [size] = LENGTH.unpack(await _read(connection, LENGTH.size))
    return json.loads(await _read(connection, size))


async def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, min(size - len(data), 2**18))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _refusal(words: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, words)
