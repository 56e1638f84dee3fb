# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Requests over one driver, whatever their protocol: admitted, encoded, decoded, ended.

The driver works in token ids alone; text is made of ids and ids of text here.
"""

import asyncio
import collections
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from earl_jax.engine.config import MAX_STOP_IDS
from earl_jax.rollout.config import Limits, Stops
from earl_jax.rollout.task import Prompt, Task
from earl_jax.serving.config import MAX_SEED
from earl_jax.serving.driver import Driver, Event, Request
from earl_jax.serving.reply import Reply, Token
from earl_jax.serving.requests import (
    RequestError,
    RequestLimits,
    RequestOptions,
    allow,
    check_ids,
)
from earl_jax.serving.texts import Texts


class Service:
    """The open requests of a driver: as many as the engine's slots hold, and some more that wait.

    A client is an address, whatever the number of its connections and their protocols.
    """

    def __init__(
        self,
        driver: Driver,
        texts: Texts,
        *,
        max_waiting: int,
        max_waiting_per_client: int,
    ) -> None:
        """Begins without requests. `texts` makes the ids of their prompts."""
        served, config = driver.served, driver.served.engine.config
        serving = served.serving
        self.sampling = serving.sampling
        self.limits = RequestLimits(
            vocab_size=config.vocab_size,
            max_prompt_tokens=serving.max_prompt_tokens,
            context_tokens=serving.context_tokens,
            prompt_limit=serving.prompt_limit,
        )
        self.max_open = config.num_slots + max_waiting
        self.max_open_per_client = config.num_slots + min(max_waiting, max_waiting_per_client)
        self._tokenizer = served.tokenizer
        self.decode = self._tokenizer.decode
        self.chat_template = self._tokenizer.chat_template
        self._choice_branches = config.rules.choice_branches
        self._driver = driver
        self._texts = texts
        # The client of each open request, and the number of requests of each client.
        self._open: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        # Those that were given to the driver.
        self._placed: dict[str, Request] = {}
        self._numbers = itertools.count(1)
        # What every request is answered with from now on.
        self.closed: RequestError | None = None

    @property
    def is_live(self) -> bool:
        """Returns whether requests are taken."""
        return self.closed is None and self._driver.live

    def close(self, error: RequestError) -> None:
        """Ends open requests and all later ones with this error."""
        self.closed = error
        self._driver.fail_all(error)

    def enter(self, client: str) -> str:
        """Admits a request of a client until `leave`. Returns its name. Raises RequestError."""
        if self.closed:
            raise self.closed
        if len(self._open) >= self.max_open:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(self._open)} requests are open, which is all this server takes "
                "(--num_slots and --max_waiting when it was started); try again later",
            )
        if self._counts[client] >= self.max_open_per_client:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._counts[client]} requests of {client} are open, which is all this server "
                "takes of one address (--num_slots and --max_waiting_per_client when it was "
                "started); try again later",
            )
        name = f"{client}/{next(self._numbers)}"
        self._open[name] = client
        self._counts[client] += 1
        return name

    def leave(self, name: str) -> None:
        """Ends a request, which may be complete or not."""
        client = self._open.pop(name, None)
        if client is not None:
            self._counts[client] -= 1
            self._counts += collections.Counter()  # drops those without requests
        placed = self._placed.pop(name, None)
        if placed is not None:
            self._driver.withdraw(placed)

    def allow(self, options: RequestOptions, max_tokens: int, where: str) -> RequestOptions:
        """Returns the options with their choices as ids. Raises RequestError."""
        tokenizer = self._tokenizer
        return allow(
            options,
            max_tokens,
            self._choice_branches,
            tokenizer.reply_ids,
            tokenizer.longest_token_bytes,
            where=where,
        )

    async def encode(self, name: str, **job: Any) -> list[int]:
        """Returns the ids of the prompt of a request that has entered, as `Texts.ids_of` does."""
        return await self._texts.ids_of(self._open[name], **job)

    def reply(
        self,
        name: str,
        ids: Sequence[int],
        max_tokens: int,
        options: RequestOptions,
        *,
        is_text: bool,
    ) -> Reply:
        """Places a request that has entered. Raises RequestError for ids that do not fit."""
        check_ids(ids, max_tokens, self.limits)
        tokens = self._tokens(name, ids, max_tokens, options)
        ends = self._tokenizer.ends
        return Reply(tokens, max_tokens, options, self.decode, ends, is_text=is_text)

    async def _tokens(
        self, name: str, ids: Sequence[int], max_tokens: int, options: RequestOptions
    ) -> AsyncIterator[Sequence[Token]]:
        """Yields the tokens of each round."""
        # Here and not before: what is given to the driver behind `close` nobody would end.
        if self.closed:
            raise self.closed
        events: asyncio.Queue[Event] = asyncio.Queue()
        request = self._placed[name] = Request(
            client=self._open[name],
            task=_task(next(self._numbers), ids, max_tokens, options),
            put=events.put_nowait,
        )
        self._driver.submit(request)
        while (event := await events.get()) is not None:
            if isinstance(event, RequestError):
                raise event
            yield [*map(Token, *event)] if options.scored else [*map(Token, event.token_ids)]


def deliver_in(
    loop: asyncio.AbstractEventLoop,
) -> Callable[[Sequence[tuple[Request, Event]]], None]:
    """Returns a function for other threads that gives requests their events in this loop."""

    def put(events: Sequence[tuple[Request, Event]]) -> None:
        for request, event in events:
            request.put(event)

    return lambda events: loop.call_soon_threadsafe(put, events) and None


def _task(number: int, ids: Sequence[int], max_tokens: int, options: RequestOptions) -> Task:
    """Returns the task of a request; `number` is that of no other."""
    prompt = Prompt(
        token_ids=tuple(ids), choices=options.choice_ids, allowed=options.allowed_token_ids
    )
    seed = MAX_SEED + 1 + number % (MAX_SEED + 1) if options.seed is None else options.seed
    return Task(
        episode=number,
        group=number,
        prompt=prompt,
        seed=seed,
        limits=Limits(max_turn_tokens=max_tokens),
        sampling=options.sampling,
        # Where there are more, `Reply` finds them a round later.
        stops=Stops(strings=options.stop_strings, token_ids=options.stop_token_ids[:MAX_STOP_IDS]),
    )
