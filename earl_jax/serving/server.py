# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's gRPC service over a JetStreamEngine: requests checked, ended, counted.

JetStream's own servicer and Driver do the work, in token ids alone; text is made of ids and ids of
text here, because JetStream decodes token by token, which breaks characters of several tokens.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from earl_jax.envs.text_stream import StopStrings, TextStream
from earl_jax.serving._jetstream import LEAST_PREFILL, jetstream_pb2, orchestrator
from earl_jax.serving.driver import PolicyDriver
from earl_jax.serving.jetstream_engine import JetStreamEngine
from earl_jax.serving.requests import (
    RequestError,
    RequestLimits,
    RequestOptions,
    allow,
    check_fields,
    check_ids,
    read_options,
    reader,
)
from earl_jax.serving.scores import LOGPROB, MODEL_LOGPROB, add_scores
from earl_jax.serving.step_tokens import Failure, ScoredToken
from earl_jax.settings.errors import InputError

# The size of a request: for each token of the longest prompt, and in all at least and at most.
BYTES_A_TOKEN, LEAST_BYTES, MOST_BYTES = 32, 2**20, 2**28
# The key of the trailing metadata with the reason why a reply ended.
FINISH_KEY = "finish-reason"
# A client whose machine vanished is noticed after the sum of these.
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 30, 10
LAST_CALL_S, GRACE_S = 0.2, 5.0
# Prompts up to so many tokens find their programs compiled.
WARM_UP_TOKENS = 1024


class _Reply:
    """The part of one reply that was sent, and whether it stops here."""

    def __init__(
        self, options: RequestOptions, decode: Callable[[Sequence[int]], str], *, is_text: bool
    ) -> None:
        self.stopped_by, self.count = "", 0
        self._options, self._is_text = options, is_text
        self._stops = StopStrings(options.stop_strings)
        # Ids need text only where a stop string may end them.
        self._stream = TextStream(decode) if is_text or options.stop_strings else None

    def take(self, token: int) -> Any:
        """Returns the message for a token, with its text; None where it is not to be sent.

        Raises RequestError for a token that is a failure.
        """
        if isinstance(token, Failure):
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, token.words)
        if token in self._options.stop_token_ids:
            self.stopped_by = "stop_token_id"
            return None
        self.count += 1
        text = "" if self._stream is None else self._until_stop(self._stream.push([token]))
        return _message(text, [int(token)], self._scores(token))

    def _scores(self, token: int) -> dict[str, float]:
        """Returns the log-probs that the request wants."""
        if not self._options.scored:
            return {}
        assert isinstance(token, ScoredToken), "prefill was called with logprobs"
        fields = {LOGPROB: self._options.logprobs, MODEL_LOGPROB: self._options.model_logprobs}
        return {name: getattr(token, name) for name, wanted in fields.items() if wanted}

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the reply."""
        if self._stream is None or self._stops.found is not None:
            return ""
        return self._until_stop(self._stream.flush()) + (
            self._stops.flush() if self._is_text else ""
        )

    def _until_stop(self, text: str) -> str:
        text = self._stops.push(text)
        if self._stops.found is not None:
            self.stopped_by = "stop_string"
        return text if self._is_text else ""


class PolicyServicer(orchestrator.LLMOrchestrator):
    """JetStream's servicer, with checks in front.

    `max_waiting` requests may be open beside those that the slots hold.
    """

    def __init__(self, driver: PolicyDriver, engine: JetStreamEngine, max_waiting: int) -> None:
        super().__init__(driver)
        config, serving = engine.engine.config, engine.serving
        self._sampling = serving.sampling
        self._limits = RequestLimits(
            vocab_size=config.vocab_size,
            max_prompt_tokens=serving.max_prefill_length,
            context_tokens=serving.context_tokens,
        )
        self._choice_branches = config.rules.choice_branches
        self._tokenizer = engine.build_tokenizer(engine.get_tokenizer())
        self._max_open = config.num_slots + max_waiting
        self._open: set[str] = set()
        self._names = map(str, itertools.count(1))
        # One thread: a long text must not hold up the loop, nor many the machine.
        self._encoder = concurrent.futures.ThreadPoolExecutor(1, "encode")
        # What every request is answered with from now on.
        self.closed: RequestError | None = None

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Yields the reply, a message for each token; with text where the prompt is text."""
        try:
            check_fields(request, self._limits)
            metadata = context.invocation_metadata()
            options = read_options(metadata, self._sampling, self._limits.vocab_size)
            options = allow(
                options, request.max_tokens, self._choice_branches, self._tokenizer.reply_ids
            )
            name = self._enter(context)
            # The driver works in ids, and knows the request by its session_cache.
            checked = jetstream_pb2.DecodeRequest(session_cache=name, max_tokens=request.max_tokens)
            checked.token_content.token_ids.extend(await self._prompt_ids(request))
            if self.closed:
                raise self.closed
            self._driver.expect(name, options)
            is_text = request.HasField("text_content")
            reply = _Reply(options, self._tokenizer.decode, is_text=is_text)
            async with contextlib.aclosing(super().Decode(checked, context)) as steps:
                async for tokens in steps:
                    for token in tokens:
                        message = None if reply.stopped_by else reply.take(token)
                        if message is not None:
                            yield message
                    if reply.stopped_by:
                        break
            rest = reply.flush()
            if rest:
                yield _message(rest)
            reason = reply.stopped_by or (
                "max_tokens" if reply.count == request.max_tokens else "end_of_turn"
            )
            context.set_trailing_metadata(((FINISH_KEY, reason),))
        except RequestError as error:
            await context.abort(error.code, error.words)

    def process_client_side_tokenization_response(self, response: Any) -> Any:
        """Returns the tokens of a step; `Decode` makes their message."""
        [sample] = response
        return sample.token_ids

    async def HealthCheck(self, request: Any, context: Any = None) -> Any:  # noqa: N802
        """Returns whether requests are taken."""
        is_live = self.closed is None and self._driver.live
        return jetstream_pb2.HealthCheckResponse(is_live=is_live)

    def close(self, error: RequestError) -> None:
        """Ends open requests and all later ones with this error."""
        self.closed = error
        self._driver.fail_all(error)

    def _enter(self, context: Any) -> str:
        """Admits a request until its RPC ends. Returns its name."""
        if self.closed:
            raise self.closed
        if len(self._open) >= self._max_open:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(self._open)} requests are open, which is all this server takes "
                "(--num_slots and --max_waiting when it was started); try again later",
            )
        name = next(self._names)
        self._open.add(name)

        def leave(_: Any) -> None:
            self._open.discard(name)
            self._driver.withdraw(name)

        context.add_done_callback(leave)
        return name

    async def _prompt_ids(self, request: Any) -> list[int]:
        if request.HasField("token_content"):
            return list(request.token_content.token_ids)
        loop = asyncio.get_running_loop()
        text = request.text_content.text
        ids = await loop.run_in_executor(self._encoder, self._tokenizer.ids_of, text)
        check_ids(ids, request.max_tokens, self._limits)
        return ids


def _message(text: str, ids: Sequence[int] = (), scores: Mapping[str, float] | None = None) -> Any:
    sample = jetstream_pb2.DecodeResponse.StreamContent.Sample(text=text, token_ids=ids)
    if scores:
        add_scores(sample, **scores)
    content = jetstream_pb2.DecodeResponse.StreamContent(samples=[sample])
    return jetstream_pb2.DecodeResponse(stream_content=content)


def warm_up(engine: JetStreamEngine, params: Any) -> None:
    """Compiles the programs of serving, and checks that they fit into memory.

    Prompts of more than WARM_UP_TOKENS are compiled for when the first comes.
    """
    state, length = engine.init_decode_state(), LEAST_PREFILL
    while length <= min(engine.max_prefill_length, WARM_UP_TOKENS):
        tokens = np.zeros(length, np.int32)
        # Within half of the table, so that nothing grows yet.
        count = max(1, min(length, engine.serving.first_slot_tokens // 2))
        prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=count)
        state = engine.insert(prefix, state, 0)
        state, result = engine.generate(params, state)
        result.convert_to_numpy()
        length *= 2


async def serve(
    engine: JetStreamEngine,
    params: Any,
    *,
    host: str,
    port: int,
    max_waiting: int,
    on_ready: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then ends open requests with UNAVAILABLE.

    Args:
        engine: the adapter, with the settings of serving.
        params: as `load_params` places them.
        host: an address of this machine.
        port: 0 for any that is free.
        max_waiting: how many requests may wait for a slot.
        on_ready: called with the address once requests are taken.

    Raises:
        ValueError: the address cannot be used.
        RuntimeError: the devices or JetStream failed; open requests have ended with INTERNAL.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    most_bytes = min(MOST_BYTES, max(LEAST_BYTES, BYTES_A_TOKEN * engine.max_prefill_length))
    server = grpc.aio.server(
        options=[
            # Else a second server on the same port would be given half of the requests.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ]
    )
    try:
        bound = server.add_insecure_port(address(host, port))
    except RuntimeError as error:
        raise InputError(_unusable(host, port, error)) from error

    def end() -> None:
        loop.call_soon_threadsafe(stop.set)

    driver = PolicyDriver(engine, params, end)
    try:
        servicer = PolicyServicer(driver, engine, max_waiting)
        server.add_generic_rpc_handlers((_handlers(servicer),))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await server.start()
        on_ready(address(host, bound))
        await stop.wait()
        servicer.close(
            RequestError(
                grpc.StatusCode.UNAVAILABLE,
                "the server is being stopped; send the request again later",
            )
        )
        # For requests that are on their way: gRPC would end them with CANCELLED and no reason.
        await asyncio.sleep(LAST_CALL_S)
        await server.stop(GRACE_S)
    finally:
        # Last, because its threads call the loop.
        await loop.run_in_executor(None, driver.stop)
    if driver.failure is not None:
        raise RuntimeError("the server failed; see above") from driver.failure


def _handlers(servicer: PolicyServicer) -> Any:
    """Returns JetStream's methods as its own registration does, but with `reader`."""
    return grpc.method_handlers_generic_handler(
        "jetstream_proto.Orchestrator",
        {
            "Decode": grpc.unary_stream_rpc_method_handler(
                servicer.Decode,
                request_deserializer=reader(jetstream_pb2.DecodeRequest),
                response_serializer=jetstream_pb2.DecodeResponse.SerializeToString,
            ),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(
                servicer.HealthCheck,
                request_deserializer=reader(jetstream_pb2.HealthCheckRequest),
                response_serializer=jetstream_pb2.HealthCheckResponse.SerializeToString,
            ),
        },
    )


def check_address(host: str, port: int) -> None:
    """Raises ValueError for an address that a server could not have now."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as tried:
            # As gRPC does: a port whose last server has just ended is free.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(where)
    except OSError as error:
        raise InputError(_unusable(host, port, error)) from error


def _unusable(host: str, port: int, error: Exception) -> str:
    return (
        f"--host={host} --port={port} cannot be used ({error}); --host must be an address of this "
        "machine, and no other program may have the port: choose another one, or 0 for any that is "
        "free"
    )


def address(host: str, port: int) -> str:
    """Returns the address in gRPC's form: 127.0.0.1:9000, [::1]:9000."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
