# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's Driver for one JetStreamEngine, which survives errors and lets requests go.

The Driver as it comes answers any exception in its threads with SIGKILL, decodes on for clients
that are gone, and leaves callers waiting when it stops. Its threads and queues are used unchanged.
"""

import collections
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from earl_jax.serving._jetstream import orchestrator, padded_length
from earl_jax.serving.jetstream_engine import PROMPT_CHUNK, JetStreamEngine
from earl_jax.serving.requests import RequestError, RequestOptions


class _PrefillEngine:
    """The engine for JetStream's prefill thread: `prefill` uses the options of the request."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self.options: RequestOptions | None = None
        self.max_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, **prompt: Any) -> Any:
        options = self.options
        if options is None:
            return self._engine.prefill(**prompt)
        return self._engine.prefill(
            **prompt,
            sampling=options.sampling,
            seed=options.seed,
            choices=options.allowed,
            logprobs=options.scored,
            max_tokens=self.max_tokens,
        )


class _GenerateEngine:
    """The engine for JetStream's other threads: `generate` hands on the ends of turns."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._ends = frozenset(engine.build_tokenizer(engine.get_tokenizer()).stop_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]:
        state, tokens = self._engine.generate(params, decode_state)
        return state, tokens.with_ends(self._ends)


def request_name(client: str, number: int) -> str:
    """Returns the name of a client's request, which no other request has."""
    return f"{client}/{number}"


def _client_of(request: Any) -> str:
    """Returns the client of a request; None is JetStream's end of queue."""
    return "" if request is None else request.history_path.rpartition("/")[0]


class PromptQueue(queue.Queue):
    """JetStream's queue of prompts that wait to be read: those of each client in their order.

    The next one is of the client with the fewest requests that were read and are not over; among
    equals, of the one whose turn was longest ago.

    Its generate thread makes no step while this is not `empty` and a slot is free: it waits for the
    prompt that is being read, so that steps have full batches. A long prompt, of several pieces,
    would hold them up: while it is the next to be read, or is read, replies go on.
    """

    is_reading_long = False

    def empty(self) -> bool:
        """Returns whether replies go on: no prompt waits, or the next or present one is long."""
        with self.mutex:
            return (
                self.is_reading_long
                or not self._waiting
                or _is_long(self._waiting[self._next_client()][0])
            )

    def remove(self, request: Any) -> None:
        """Removes a request that is over: from the queue, or else from those that were read."""
        client = _client_of(request)
        with self.mutex:
            waiting = self._waiting.get(client, ())
            # By identity: requests hold arrays, which have no truth value when compared.
            kept = collections.deque(other for other in waiting if other is not request)
            if len(kept) == len(waiting):
                self._num_read[client] -= 1
                self._num_read += collections.Counter()  # drops clients without requests
            elif kept:
                self._waiting[client] = kept
            else:
                del self._waiting[client]

    # Called by `queue.Queue` with its lock held: a request is always either waiting or read.

    def _init(self, maxsize: int) -> None:
        # By client, in the order of their turns.
        self._waiting: dict[str, collections.deque[Any]] = {}
        # The number of requests of each client that were read and are not over.
        self._num_read: collections.Counter[str] = collections.Counter()

    def _qsize(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _put(self, item: Any) -> None:
        self._waiting.setdefault(_client_of(item), collections.deque()).append(item)

    def _get(self) -> Any:
        client = self._next_client()
        waiting = self._waiting.pop(client)
        request = waiting.popleft()
        if waiting:
            self._waiting[client] = waiting
        if request is not None:
            self._num_read[client] += 1
        self.is_reading_long = _is_long(request)
        return request

    def _next_client(self) -> str:
        return min(self._waiting, key=lambda client: self._num_read[client])


class _FreeSlots(queue.Queue):
    """JetStream's queue of free slots; the engine frees the pages of each."""

    def __init__(self, size: int, engine: JetStreamEngine) -> None:
        super().__init__(size)
        self._engine = engine

    def put(self, item: int, block: bool = True, timeout: float | None = None) -> None:
        self._engine.free_resource(item)
        super().put(item, block, timeout)


class PolicyDriver(orchestrator.Driver):
    """A driver whose open requests have a name, given by the service as their `history_path`.

    A prompt that cannot be read fails its own request with INTERNAL. A later error, with every
    slot's state on the devices, fails all of them; then `failure` holds it, and `on_failure` is
    called from the thread that failed.
    """

    def __init__(
        self, engine: JetStreamEngine, params: Any, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Starts the threads. `params` are placed as `load_params` does."""
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._open: dict[str, Any] = {}
        self._options: dict[str, RequestOptions] = {}
        self._engine = engine
        self._prefill_engine = _PrefillEngine(engine)
        self._opening = threading.Lock()
        self._in_prefill = ""
        super().__init__(
            prefill_engines=[self._prefill_engine],
            generate_engines=[_GenerateEngine(engine)],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
            jax_padding=False,
        )

    @property
    def _generate_slots(self) -> list[queue.Queue]:
        """The queues of free slots, by JetStream's name."""
        return self._free_slots

    @_generate_slots.setter
    def _generate_slots(self, queues: list[queue.Queue]) -> None:
        self._free_slots: list[queue.Queue] = [_FreeSlots(q.maxsize, self._engine) for q in queues]

    @property
    def _prefill_backlog(self) -> queue.Queue:
        """The queue of prompts, by JetStream's name."""
        return self._prompts

    @_prefill_backlog.setter
    def _prefill_backlog(self, _: queue.Queue) -> None:
        self._prompts = PromptQueue()

    @property
    def num_free_slots(self) -> int:
        """The number of slots without a request."""
        return self._generate_slots[0].qsize()

    # Called by the service.

    def expect(self, name: str, options: RequestOptions) -> None:
        """Sets the options of the request of this name, which is about to be placed."""
        with self._opening:
            self._options[name] = options

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Takes a request that was checked."""
        request.prefill_content = np.asarray(request.prefill_content, np.int32)
        with self._opening:
            self._open[request.history_path] = request
        super().place_request_on_prefill_queue(request)

    def withdraw(self, name: str) -> None:
        """Withdraws a request; one that is complete is only forgotten.

        A waiting prompt is not read. A slot is free after the step that it is in, and the 8 at most
        that were decoded ahead of their reading.
        """
        with self._opening:
            self._options.pop(name, None)
            request = self._open.pop(name, None)
        if request is None:
            return
        self._prompts.remove(request)
        # The Driver takes a request for complete when it has more tokens than this.
        request.max_tokens = 0

    def fail(self, name: str, error: RequestError) -> None:
        """Ends a request with this error, behind the tokens that it was sent."""
        with self._opening:
            request = self._open.get(name)
        if request is not None:
            request.return_channel.set_exception(error)
            self.withdraw(name)

    def fail_all(self, error: RequestError) -> None:
        """Ends every open request with this error."""
        with self._opening:
            names = list(self._open)
        for name in names:
            self.fail(name, error)

    # The bodies of JetStream's threads.

    def _process_prefill_content(
        self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int
    ) -> Any:
        self._in_prefill = request.history_path
        with self._opening:
            self._prefill_engine.options = self._options.pop(self._in_prefill, None)
            self._prefill_engine.max_tokens = request.max_tokens
        # JetStream's own padding knows no length above 32,768.
        ids = request.prefill_content
        return np.pad(ids, (0, padded_length(len(ids)) - len(ids))), len(ids)

    def _prefill_thread(self, idx: int) -> None:
        while self.live:
            try:
                return super()._prefill_thread(idx)
            except Exception as error:  # noqa: BLE001 - a device may raise anything
                # Nothing but this prompt's own cache was written.
                report("a prompt could not be read", error)
                self.fail(
                    self._in_prefill,
                    _internal(f"the server could not read this prompt ({_words(error)})"),
                )

    def _transfer_thread(self, idx: int) -> None:
        self._or_fail(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        free = self._generate_slots[idx]

        def generate(idx: int) -> None:
            while self.live:
                try:
                    return super(PolicyDriver, self)._generate_thread(idx)
                except AssertionError:
                    # It asserts that a slot is busy where the last may just have become free.
                    # Then nothing is lost by starting with empty slots.
                    if not free.full():
                        raise

        self._or_fail(generate, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._or_fail(super()._detokenize_thread, idx)

    def _or_fail(self, body: Callable[[int], None], idx: int) -> None:
        try:
            body(idx)
        except Exception as error:  # noqa: BLE001 - a device may raise anything
            if not self.live:
                return  # `stop` takes the channels away from under the threads
            self.failure, self.live = error, False
            report("the server cannot go on", error)
            self.fail_all(_internal(f"the server failed, and ends ({_words(error)})"))
            self._on_failure()


def _is_long(request: Any) -> bool:
    """Returns whether its prompt is read in several pieces; None is JetStream's end of queue."""
    return request is not None and len(request.prefill_content) > PROMPT_CHUNK


def _internal(words: str) -> RequestError:
    return RequestError(grpc.StatusCode.INTERNAL, words)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def report(what: str, error: BaseException) -> None:
    """Prints an error that a client cannot have caused."""
    print(f"{what}:", file=sys.stderr)
    traceback.print_exception(error, file=sys.stderr)
