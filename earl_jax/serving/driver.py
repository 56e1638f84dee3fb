# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The thread that plays requests: a client of the rollouts' scheduler.

Each request is a task of one turn behind the ids of its prompt (`rollout.task.Prompt`). The
thread gives a `RolloutService` as many as it has slots, plays rounds, and hands each request the
tokens of each round. What waits for a slot waits here, so that clients take turns.
"""

import collections
import dataclasses
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import jax

from earl_jax.engine.engine import Policy, Session, empty_session
from earl_jax.engine.relocation import relocate
from earl_jax.engine.row_copies import RowMove
from earl_jax.engine.rows import NO_ROW
from earl_jax.envs.environment import NONFINITE_LOGITS
from earl_jax.envs.text.conversation import Completion
from earl_jax.rollout.config import CacheRules, Limits
from earl_jax.rollout.reply import NewTokens
from earl_jax.rollout.rounds import OnTokens
from earl_jax.rollout.row_pool import move_rows
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from earl_jax.serving.requests import RequestError
from earl_jax.serving.served_engine import ServedEngine
from earl_jax.trajectory import Trajectory

# Of a request: tokens of a round; the end of its reply; or an error, which ends it.
Event = NewTokens | RequestError | None


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """A request of a client: its task, and what comes of it.

    `put` takes its events, in the thread that `Driver.start` names. `ticket` is that of its task
    once this plays.
    """

    client: str
    task: Task
    put: Callable[[Event], Any]
    ticket: int | None = None


Deliver = Callable[[Sequence[tuple[Request, Event]]], None]


class FairQueue:
    """Requests that wait for a slot: those of each client in their order.

    The next one is of the client with the fewest requests that were taken and are not over; among
    equals, of the one whose turn was longest ago.
    """

    def __init__(self) -> None:
        # By client, in the order of their turns.
        self._waiting: dict[str, collections.deque[Request]] = {}
        # The number of requests of each client that were taken and are not over.
        self._num_taken: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> None:
        """Lets a request wait."""
        self._waiting.setdefault(request.client, collections.deque()).append(request)

    def take(self) -> Request:
        """Returns the next request, which waits no longer."""
        client = min(self._waiting, key=lambda client: self._num_taken[client])
        waiting = self._waiting.pop(client)
        request = waiting.popleft()
        if waiting:
            self._waiting[client] = waiting
        self._num_taken[client] += 1
        return request

    def remove(self, request: Request) -> None:
        """Removes a request that waits, if it does."""
        waiting = self._waiting.get(request.client, ())
        kept = collections.deque(other for other in waiting if other is not request)
        if kept:
            self._waiting[request.client] = kept
        else:
            self._waiting.pop(request.client, None)

    def end(self, request: Request) -> None:
        """Notes that a request that was taken is over."""
        self._num_taken[request.client] -= 1
        self._num_taken += collections.Counter()  # drops clients without requests

    def take_all(self) -> list[Request]:
        """Returns all requests, none of which is played."""
        waiting, self._waiting = self._waiting, {}
        return [request for requests in waiting.values() for request in requests]


class Driver:
    """Plays the requests of one policy in a thread of its own, between `start` and `stop`.

    An error of the devices ends all requests with INTERNAL: then `failure` holds it.
    """

    def __init__(self, served: ServedEngine, policy: Policy) -> None:
        """Makes the slots and the KV cache on the devices."""
        self.served = served
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._queue = FairQueue()
        # By ticket; and those of them that are to be given up.
        self._playing: dict[int, Request] = {}
        self._withdrawn: list[Request] = []
        self._is_stopped = False
        self._events: list[tuple[Request, Event]] = []
        self._deliver: Deliver = lambda events: None
        self._on_failure: Callable[[], None] = lambda: None
        self._service = open_service(served, policy, self._on_tokens)
        self._thread = threading.Thread(target=self._run, name="driver")

    @property
    def live(self) -> bool:
        """True while requests are played."""
        return self.failure is None and not self._is_stopped

    def warm_up(self) -> None:
        """Compiles the programs of a round, and checks that they fit into memory."""
        _play_one(self._service)

    def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        """Starts the thread.

        `deliver` is called in it with the events of each round, and is to call `Request.put`;
        `on_failure` when it ends for an error.
        """
        self._deliver, self._on_failure = deliver, on_failure
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread behind the round that it is in."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # Called by clients, from any thread.

    def submit(self, request: Request) -> None:
        """Takes a request that was checked. Raises RequestError where the thread has ended."""
        with self._changed:
            if self.failure is not None:
                raise _failed(self.failure)
            self._queue.add(request)
            self._changed.notify()

    def withdraw(self, request: Request) -> None:
        """Withdraws a request that waits or plays. Its slot is free before the next round."""
        with self._changed:
            if request.ticket is None:
                self._queue.remove(request)
            elif self._plays(request):
                self._withdrawn.append(request)
                self._changed.notify()

    def fail_all(self, error: RequestError) -> None:
        """Ends every open request with this error, behind the tokens that it was sent."""
        with self._changed:
            playing = list(self._playing.values())
            self._withdrawn += playing
            failed = [*playing, *self._queue.take_all()]
            self._changed.notify()
        self._deliver([(request, error) for request in failed])

    # The thread.

    def _run(self) -> None:
        try:
            while self._admit():
                self._play_round()
        except Exception as error:  # noqa: BLE001 - a device may raise anything
            with self._changed:
                self.failure = error
            report("the server cannot go on", error)
            self.fail_all(_failed(error))
            self._on_failure()

    def _admit(self) -> bool:
        """Waits for work, and gives the service what has come. False at the end."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._is_stopped:
                return False
            withdrawn, self._withdrawn = self._withdrawn, []
            # One may be over by now, or be withdrawn twice.
            self._abort([each for each in dict.fromkeys(withdrawn) if self._plays(each)])
            while self._queue and len(self._playing) < self.served.rollout.num_slots:
                request = self._queue.take()
                [request.ticket] = self._service.submit([request.task])
                self._playing[request.ticket] = request
        return True

    def _plays(self, request: Request) -> bool:
        return request.ticket in self._playing

    def _has_work(self) -> bool:
        more = self._queue or self._withdrawn
        return bool(self._is_stopped or more or self._service.is_busy)

    def _abort(self, requests: Sequence[Request]) -> None:
        self._service.abort({request.ticket for request in requests if request.ticket is not None})
        for request in requests:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        assert request.ticket is not None
        del self._playing[request.ticket]
        self._queue.end(request)

    def _play_round(self) -> None:
        finished = self._service.step()
        with self._changed:
            for each in finished:
                self._service.release(each.row)
                request = self._playing.get(each.ticket)
                # None: its client had all that it wanted, up to a stop string, and left.
                if request is not None:
                    self._events.append((request, _failure_of(each.trajectory)))
                    self._forget(request)
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    def _on_tokens(self, ticket: int, tokens: NewTokens) -> None:
        request = self._playing.get(ticket)
        # None: the prompt of `warm_up`.
        if request is not None:
            self._events.append((request, tokens))


def _failure_of(reply: Trajectory) -> RequestError | None:
    """Returns the error of a reply that failed; None for others."""
    if reply.stop_reason != NONFINITE_LOGITS:
        return None
    return RequestError(grpc.StatusCode.INTERNAL, reply.detail)


def _failed(error: BaseException) -> RequestError:
    words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return RequestError(grpc.StatusCode.INTERNAL, f"the server failed, and ends ({words})")


def report(what: str, error: BaseException) -> None:
    """Prints an error that a client cannot have caused."""
    print(f"{what}:", file=sys.stderr)
    traceback.print_exception(error, file=sys.stderr)


def open_service(engine: ServedEngine, policy: Policy, on_tokens: OnTokens) -> RolloutService:
    """Returns a service with empty slots, whose tables and rows are short at first.

    Before that a round runs with the longest that a request can widen them to: no request is the
    first to need so much memory.

    Raises:
        JaxRuntimeError: there is too little memory.
    """
    if engine.serving.first_slot_tokens < engine.serving.context_tokens:
        _play_longest(engine, policy)
    return _open(engine, policy, on_tokens)


def _play_longest(engine: ServedEngine, policy: Policy) -> None:
    service = _open(engine, policy, lambda ticket, tokens: None)
    while (tokens := service.session.max_tokens) < engine.serving.context_tokens:
        service.move(_widen(engine, service.session, tokens + 1, 0))
    _play_one(service)
    # Rows that are written again are cleared by a program that holds as many once more.
    jax.block_until_ready(move_rows(service.session, [RowMove(0, NO_ROW, 0)]).state)


def _open(engine: ServedEngine, policy: Policy, on_tokens: OnTokens) -> RolloutService:
    tokenizer, serving = engine.tokenizer, engine.serving
    return RolloutService(
        empty_session(engine.engine, policy, serving.first_slot_tokens, engine.pool),
        engine.rollout,
        lambda: Completion(tokenizer.decode, tokenizer.ends),
        None,
        None,
        functools.partial(_widen, engine),
        num_devices=engine.engine.layout.num_row_shards,
        sampling=serving.sampling,
        max_context=serving.context_tokens,
        cache_rules=CacheRules(keep_replies=serving.keep_replies),
        on_tokens=on_tokens,
    )


def _widen(engine: ServedEngine, session: Session, tokens: int, pages: int) -> Session:
    """Returns a session whose tables and rows hold so many tokens, at least twice as many.

    Its pool stays: where requests want more `pages` some of them are preempted.
    """
    del pages
    if tokens <= session.max_tokens:
        return session
    max_tokens = min(max(tokens, 2 * session.max_tokens), engine.serving.context_tokens)
    return relocate(session, engine.engine, max_tokens, session.pool)


def _play_one(service: RolloutService) -> None:
    """Plays a prompt of one token with a reply of one: compiles and runs the program of a round."""
    limits = Limits(max_turn_tokens=1)
    service.submit([Task(episode=0, group=0, prompt=Prompt(token_ids=(0,)), limits=limits)])
    for finished in service.drain():
        for each in finished:
            service.release(each.row)
