# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The requests of one agent, which wait for replies of the policy."""

import asyncio
import collections
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from earl_jax.http.server import HttpError
from earl_jax.settings.errors import InputError

_GONE = 410


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The policy's reply: an assistant's message in OpenAI's form, and its numbers of tokens.

    `name` is that of `StepResult.reply_rewards`.
    """

    name: str
    message: Mapping[str, Any]
    context_tokens: int
    reply_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A request: a conversation as `http.chat.read_chat` returns it, and the reply to come.

    `stop` are texts that end the reply; with `call` it begins with a call of this tool, any if "".
    `digests` are those of the tools, of these and the first message, and so on; `digest` is that of
    the whole request. They are made with the record.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    stop: tuple[str, ...] = ()
    call: str | None = None
    reply: "Future[Reply]" = dataclasses.field(default_factory=Future)
    digests: tuple[bytes, ...] = dataclasses.field(init=False)
    digest: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Makes the digests."""
        digests = [digest_of(json.dumps(self.tools, sort_keys=True).encode())]
        for message in self.messages:
            digests.append(digest_of(message_key(message).encode(), digests[-1]))
        object.__setattr__(self, "digests", tuple(digests))
        whole = digest_of(json.dumps([self.stop, self.call]).encode(), digests[-1])
        object.__setattr__(self, "digest", whole.hex())

    def is_like(self, other: "Asked") -> bool:
        """Returns whether the other one asks for the same."""
        return self.digest == other.digest


def digest_of(text: bytes, before: bytes = b"") -> bytes:
    """Returns 16 bytes for a text behind another one of this digest."""
    return hashlib.blake2b(before + text, digest_size=16).digest()


class Paid(NamedTuple):
    """A reward, and the name of the reply that it is for; "": the newest one.

    In words "0.5@7.1", or "0.5".
    """

    reward: float
    reply: str = ""

    def __str__(self) -> str:
        """Returns it in words."""
        return f"{self.reward!r}@{self.reply}" if self.reply else repr(self.reward)


def rewards_in(name: str) -> list[Paid]:
    """Returns the rewards in the name of a request (`Taken.name`)."""
    parts = (each.partition("@") for each in name.split()[1:])
    return [Paid(float(reward), reply) for reward, _, reply in parts]


def message_key(message: Mapping[str, Any]) -> str:
    """Returns what makes two messages equal: its role, the text, and calls by their values."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # as it is
        calls.append([call.get("id"), call["function"]["name"], arguments])
    content = [message["role"], message.get("content") or "", calls]
    beside = [message.get("tool_call_id"), message.get("name")]
    return json.dumps([*content, *beside], sort_keys=True)


class Session:
    """The requests of an agent until it ends. Any thread may use it.

    A client that went away before it had its reply may ask again: it gets the same reply.
    `count` returns the number of tokens of a request, None where nobody knows; `may_demand` is
    whether a request may demand a call.
    """

    count: Callable[[Asked], int] | None = None
    may_demand = True

    def __init__(self) -> None:
        """Begins without requests."""
        # Python's collector may call `close` anywhere, here too.
        self._lock = threading.RLock()
        self._waiting: collections.deque[Asked] = collections.deque()
        # The requests whose replies are sampled, and those whose clients went away without them.
        self._taken: list[Asked] = []
        self._lost: list[Asked] = []
        # The names of the replies that were sent.
        self._answered: set[str] = set()
        self._result: Callable[[], Any] | None = None
        self._closed = ""
        self._wakes: Future[None] | None = None
        # Rewards that the environment has not taken.
        self._paid: list[Paid] = []
        self._on_close: Callable[[], Any] = lambda: None

    # Called by the endpoint.

    def ask(self, asked: Asked) -> Asked:
        """Queues a request. Returns it, or the one before whose reply was lost and that is like it.

        Raises HttpError where the session is over.
        """
        with self._lock:
            self._check_open()
            for lost in self._lost:
                if lost.is_like(asked):
                    self._lost.remove(lost)
                    return lost
            self._lost = [lost for lost in self._lost if not lost.reply.done()]
            self._waiting.append(asked)
            self._wake()
        return asked

    def lose(self, asked: Asked) -> None:
        """Notes that the client of a request went away without its reply."""
        with self._lock:
            if asked in self._waiting:
                self._waiting.remove(asked)
            elif asked not in self._lost and not self._closed:
                self._lost.append(asked)

    def pay(self, reward: float, reply_id: str = "") -> None:
        """Adds a reward, which `take_rewards` returns: for the newest reply, or the one of this id.

        An id ends with the name of its reply. Raises HttpError where there is no such reply yet.
        """
        with self._lock:
            self._check_open()
            name = reply_id.rpartition("-")[2]
            if not self._answered:
                raise HttpError(409, "there is no reply yet that could be paid")
            if reply_id and name not in self._answered:
                raise HttpError(400, f"id is {reply_id!r:.80}, which no reply here has", "id")
            self._paid.append(Paid(reward, name))
            self._wake()

    # Called by the agent's own thread or task.

    def end(self, result: Callable[[], Any]) -> None:
        """Notes that the agent has ended: `result` returns what it returned, or raises."""
        with self._lock:
            self._result = result
            self._wake()

    # Called by the environment.

    async def next(self, wanted: str | None = None) -> Asked | Callable[[], Any]:
        """Waits for the next request, or for the agent's end: then returns the result of `end`.

        In a replay for the request that is `wanted` (`take`), and for the end where there is none.
        """
        while True:
            with self._lock:
                if wanted and (asked := self.take(wanted)) is not None:
                    return asked
                if self._result is not None and wanted:
                    raise InputError(
                        "the agent has ended, and in the run that is replayed it asked for a reply "
                        "before, or paid one; what it asks and pays must be a function of its task "
                        "and of the replies"
                    )
                if self._result is not None:
                    return self._result
                if (asked := self.take(wanted)) is not None:
                    return asked
                wakes = self._wakes = Future()
            await asyncio.wrap_future(wakes)

    def take(self, wanted: str | None = None) -> Asked | None:
        """Returns the next request if one waits, of an agent that has not ended.

        In a replay the request that is `wanted`, by a name that begins with its digest, once the
        rewards in the name have come, too; "": none.
        """
        with self._lock:
            if wanted is None:
                chosen = next(iter(() if self._result is not None else self._waiting), None)
            else:
                digest, rewards = wanted.partition(".")[0], collections.Counter(rewards_in(wanted))
                alike = (each for each in self._waiting if each.digest == digest)
                chosen = next(alike, None) if rewards <= collections.Counter(self._paid) else None
            if chosen is not None:
                self._waiting.remove(chosen)
                self._taken.append(chosen)
            return chosen

    def answer(self, asked: Asked, reply: Reply) -> None:
        """Sends the reply to a request that was taken."""
        with self._lock:
            if asked in self._taken:
                self._taken.remove(asked)
                self._answered.add(reply.name)
        if not asked.reply.done():
            asked.reply.set_result(reply)

    def take_rewards(self, wanted: str | None = None) -> list[Paid]:
        """Returns the rewards that came since the last call, in the order of their values.

        In a replay those in the name of the request that was `wanted`; None: all, at the end.
        """
        with self._lock:
            taken = sorted(self._paid if wanted is None else rewards_in(wanted))
            for reward in taken:
                self._paid.remove(reward)
        return taken

    def on_close(self, call: Callable[[], Any]) -> None:
        """Has `close` call this: the end of an agent that is still at work."""
        self._on_close = call

    def close(self, why: str) -> None:
        """Ends it: requests that are open, and all later ones, are refused with these words."""
        with self._lock:
            if self._closed:
                return
            self._closed = why
            left = [*self._waiting, *self._taken]
            self._waiting.clear()
            self._taken.clear()
            self._lost.clear()
        for asked in left:
            if not asked.reply.done():
                asked.reply.set_exception(HttpError(_GONE, why))
        self._on_close()

    def _check_open(self) -> None:
        if self._closed or self._result is not None:
            raise HttpError(_GONE, self._closed or "the agent of this address has ended")

    def _wake(self) -> None:
        wakes, self._wakes = self._wakes, None
        if wakes is not None and not wakes.done():
            wakes.set_result(None)
