# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 server on asyncio; h11 reads and writes the protocol.

A handler is one coroutine a request. It is cancelled when its client goes away. A client that ends
its own side of the connection behind its request (`shutdown(SHUT_WR)`) gets its answer.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import h11

# A client that is refused may ask again after so many seconds.
RETRY_S = 1
# How long a connection stays to drop the remainder of a request that was refused.
LINGER_S = 2.0
# How often a client that has ended its own side is written to, to notice that it went away.
PROBE_S = 0.2
_CHUNK = 2**16
# Bytes that a client may send beyond the request that is being answered.
_MOST_AHEAD = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of a server: a body has `most_bytes`, all that are open together `most_held_bytes`.

    At most `max_connections` are open, half of them of one address. A client has `read_s` for its
    next request, whole, and `write_s` for reading each part of an answer.
    """

    most_bytes: int
    most_held_bytes: int
    max_connections: int
    read_s: float
    write_s: float


class HttpRequest(NamedTuple):
    """A request that was read whole. `content_type` is without its parameters."""

    method: str
    path: str
    content_type: str
    body: bytes


class HttpError(Exception):
    """Answers a request with a status and a sentence; `param` names the field that is wrong."""

    def __init__(self, status: int, words: str, param: str | None = None) -> None:
        super().__init__(words)
        self.status, self.words, self.param = status, words, param

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        fields = {"message": self.words, "type": kind, "param": self.param, "code": self.status}
        return {"error": fields}


class _Gone(Exception):
    """The client went away."""


class Connection:
    """One client's connection: requests one after the other, and their answers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: "HttpServer",
    ) -> None:
        self._reader, self._writer, self._server = reader, writer, server
        self._limits = server.limits
        self._held_bytes, self._is_head = 0, False
        self._http = h11.Connection(h11.SERVER)
        # Of the newest request, as far as it was read.
        self._path = ""
        # The address of the client, without its port.
        self.client = str((writer.get_extra_info("peername") or ("",))[0])
        # No request is open: the connection may be closed at any time.
        self.is_idle = True

    # Called by handlers.

    @property
    def has_begun(self) -> bool:
        """Returns whether an answer was begun."""
        return self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    async def send_json(self, status: int, value: Any, headers: tuple = ()) -> None:
        """Answers with a JSON value."""
        body = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        head = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
        data = [] if self._is_head else [h11.Data(data=body)]
        await self._send(h11.Response(status_code=status, headers=head), *data, h11.EndOfMessage())

    async def send_error(self, error: HttpError, headers: tuple = ()) -> None:
        """Answers with an error."""
        again = (("retry-after", str(RETRY_S)),) if error.status in (429, 503) else ()
        body = self._server.error_body(self._path, error)
        await self.send_json(error.status, body, (*again, *headers))

    async def begin_events(self) -> None:
        """Begins an answer of server-sent events."""
        head = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        await self._send(h11.Response(status_code=200, headers=head))

    async def send_event(self, value: Any) -> None:
        """Sends an event: a JSON value, or a text as it is. A value's "type" is its name."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        name = f"event: {value['type']}\n" if isinstance(value, dict) and "type" in value else ""
        await self._send(h11.Data(data=f"{name}data: {text}\n\n".encode(errors="replace")))

    async def end_events(self) -> None:
        """Ends the answer."""
        await self._send(h11.EndOfMessage())

    # Called by the server.

    async def run(self) -> None:
        """Answers requests until the client goes away, or says nothing for too long."""
        try:
            while await self._answer_next():
                self._http.start_next_cycle()
        except (_Gone, OSError):  # it went away, or took too long
            self._writer.transport.abort()
        except h11.RemoteProtocolError as error:
            with contextlib.suppress(h11.LocalProtocolError, OSError):
                hint = error.error_status_hint
                await self._refuse(HttpError(hint, f"this is no HTTP/1.1 request ({error})"))
        finally:
            self._writer.close()
            if self._writer.transport.get_write_buffer_size():
                # A client that does not read would keep the socket.
                loop = asyncio.get_running_loop()
                loop.call_later(self._limits.write_s, self._writer.transport.abort)

    async def refuse(self, error: HttpError) -> None:
        """Answers with an error whatever the client asks, and ends."""
        # The end of the loop may cancel it, which asyncio would report as an error.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self.send_error(error, (("connection", "close"),))
            if self._server.num_lingering < self._limits.max_connections:
                self._server.num_lingering += 1
                try:
                    await self._linger()
                finally:
                    self._server.num_lingering -= 1
        self._writer.close()

    def forget_body(self) -> None:
        """Counts the body of the present request no more."""
        self._server.held_bytes -= self._held_bytes
        self._held_bytes = 0

    async def _answer_next(self) -> bool:
        """Answers one request. Returns whether another one may follow."""
        try:
            async with asyncio.timeout(self._limits.read_s):
                request = await self._read_request()
        except HttpError as error:
            await self._refuse(error)
            return False
        except TimeoutError:
            if not self.is_idle or self._http.trailing_data[0]:
                seconds = f"{self._limits.read_s:g}"
                await self._refuse(HttpError(408, f"the request was not whole after {seconds} s"))
            return False
        if request is None:
            return False
        work = asyncio.ensure_future(self._server.handle(request, self))
        watch = asyncio.ensure_future(self._wait_until_gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _Gone
            work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
            self.forget_body()
            self.is_idle = True
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _refuse(self, error: HttpError) -> None:
        """Answers with an error, and ends: the remainder of the request is dropped."""
        if self.has_begun:
            return
        self.forget_body()
        await self.send_error(error, (("connection", "close"),))
        await self._linger()

    async def _linger(self) -> None:
        """Reads what the client still sends, for a while.

        A socket that is closed with bytes unread takes the answer away from the client.
        """
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while await self._reader.read(_CHUNK):
                    pass

    async def _read_request(self) -> HttpRequest | None:
        """Returns the next request, None at the end. Raises HttpError for one that is too large."""
        head = await self._next_event()
        if not isinstance(head, h11.Request):
            return None
        self.is_idle, self._is_head = False, head.method == b"HEAD"
        self._path = head.target.decode("latin-1").partition("?")[0]
        headers = dict(head.headers)
        if int(headers.get(b"content-length", b"0")) > self._limits.most_bytes:
            raise self._too_large()
        body = bytearray()
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                return None
            body += event.data
            if len(body) > self._limits.most_bytes:
                raise self._too_large()
            self._held_bytes += len(event.data)
            self._server.held_bytes += len(event.data)
            if self._server.held_bytes > self._limits.most_held_bytes:
                raise HttpError(
                    503,
                    f"the open requests have {self._server.held_bytes} bytes, more than the "
                    f"{self._limits.most_held_bytes} that this server takes at once; try again "
                    "later",
                )
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        return HttpRequest(head.method.decode("latin-1"), self._path, kind, bytes(body))

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body has more than the {self._limits.most_bytes} bytes that this server takes, "
            "as many as its longest prompt can have; shorten it",
        )

    async def _next_event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(_CHUNK))
        return event

    async def _wait_until_gone(self) -> None:
        """Returns when the client went away, or sends too much ahead.

        One that has ended its own side may still read. If it does not, its machine answers what is
        sent to it with a reset, so that the next write fails.
        """
        ahead = 0
        while ahead < _MOST_AHEAD and (data := await self._reader.read(_CHUNK)):
            ahead += len(data)
            self._http.receive_data(data)
        # No HTTP/1.0 client takes an interim answer.
        reads = ahead < _MOST_AHEAD and self._http.their_http_version != b"1.0"
        while reads and not self._writer.transport.is_closing():
            self._write_nothing()
            await asyncio.sleep(PROBE_S)

    def _write_nothing(self) -> None:
        """Writes what clients pass over: an interim answer (RFC 9110, 15.2), or a comment."""
        state, event = self._http.our_state, None
        if state is h11.SEND_RESPONSE:
            event = h11.InformationalResponse(status_code=100, headers=[])
        elif state is h11.SEND_BODY:  # between two events
            event = h11.Data(data=b":\n\n")
        if event is not None:
            self._writer.write(self._http.send(event) or b"")

    async def _send(self, *events: Any) -> None:
        data = b"".join(self._http.send(event) or b"" for event in events)
        self._writer.write(data)
        async with asyncio.timeout(self._limits.write_s):
            await self._writer.drain()


Handler = Callable[[HttpRequest, Connection], Awaitable[None]]
# error_body(path, error): the JSON of an error of this path.
ErrorBody = Callable[[str, HttpError], dict[str, Any]]


class HttpServer:
    """A server of one handler.

    `held_bytes` have the bodies of open requests. Of the connections beyond the limit
    `num_lingering` are read to the end of what they send, as many at most as may be open.
    """

    def __init__(
        self,
        handle: Handler,
        limits: HttpLimits,
        error_body: ErrorBody = lambda path, error: error.body(),
    ) -> None:
        self.handle, self.limits, self.error_body = handle, limits, error_body
        self.held_bytes = self.num_lingering = 0
        self._open: dict[asyncio.Task[None], Connection] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens at the address. Returns its port. Raises OSError."""
        self._server = await asyncio.start_server(
            self._connect, host, port, backlog=self.limits.max_connections
        )
        return self._server.sockets[0].getsockname()[1]

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections, and gives open answers so long to end."""
        if self._server is None:
            return
        self._server.close()
        for task, connection in self._open.items():
            if connection.is_idle:
                task.cancel()
        if self._open:
            await asyncio.wait(set(self._open), timeout=grace_s)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection, most = Connection(reader, writer, self), self.limits.max_connections
        of_client = sum(other.client == connection.client for other in self._open.values())
        if len(self._open) >= most or of_client >= most // 2:
            words = f"{len(self._open)} connections are open, {of_client} of them yours"
            limit = f"this server takes {most}, and {most // 2} of one address; try again later"
            return await connection.refuse(HttpError(503, f"{words}; {limit}"))
        self._open[task] = connection
        try:
            await connection.run()
        except asyncio.CancelledError:
            pass  # `stop`; asyncio would report it as an error
        finally:
            connection.forget_body()
            del self._open[task]
