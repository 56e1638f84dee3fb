# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""JetStream's gRPC service, jetstream_proto.Orchestrator, over the requests of a Service."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc

from earl_jax.serving._jetstream import jetstream_pb2
from earl_jax.serving.reply import Piece
from earl_jax.serving.requests import (
    IN_METADATA,
    RequestError,
    RequestOptions,
    check_fields,
    read_options,
    reader,
)
from earl_jax.serving.scores import LOGPROB, MODEL_LOGPROB, add_scores
from earl_jax.serving.service import Service

# The key of the trailing metadata with the reason why a reply ended.
FINISH_KEY = "finish-reason"


class PolicyServicer:
    """JetStream's methods, with checks in front."""

    def __init__(self, service: Service, write_s: float) -> None:
        """Serves `service`. A client has `write_s` to read each message of a reply."""
        self._service, self._write_s = service, write_s

    async def Decode(self, request: Any, context: Any) -> None:  # noqa: N802
        """Sends the reply, a message for each round; with text where the prompt is text."""
        service = self._service
        try:
            check_fields(request, service.limits)
            metadata = context.invocation_metadata()
            options = read_options(metadata, service.sampling, service.limits.vocab_size)
            options = service.allow(options, request.max_tokens, IN_METADATA)
            name = service.enter(_client(context.peer()))
            try:
                finish_reason = await self._send(request, name, options, context)
            finally:
                # Here and not when the call is over: that waits for a client that does not read.
                service.leave(name)
            context.set_trailing_metadata(((FINISH_KEY, finish_reason),))
        except RequestError as error:
            await context.abort(error.code, error.words)
        except TimeoutError:
            words = f"the client has not read the reply for {self._write_s:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, words)

    async def _send(self, request: Any, name: str, options: RequestOptions, context: Any) -> str:
        """Sends the reply to a request that has entered. Returns its finish reason."""
        service, is_text = self._service, request.HasField("text_content")
        ids = (
            await service.encode(name, text=request.text_content.text)
            if is_text
            else request.token_content.token_ids
        )
        reply = service.reply(name, ids, request.max_tokens, options, is_text=is_text)
        async with aclosing(reply.pieces()) as pieces:
            async for together in pieces:
                if some := [piece for piece in together if not piece.is_end]:
                    async with asyncio.timeout(self._write_s):
                        await context.write(_message(some, options))
        return reply.finish_reason

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Returns whether requests are taken."""
        return jetstream_pb2.HealthCheckResponse(is_live=self._service.is_live)

    def handlers(self) -> Any:
        """Returns the methods as JetStream's own registration does, but with `reader`."""
        return grpc.method_handlers_generic_handler(
            "jetstream_proto.Orchestrator",
            {
                "Decode": grpc.unary_stream_rpc_method_handler(
                    self.Decode,
                    request_deserializer=reader(jetstream_pb2.DecodeRequest),
                    response_serializer=jetstream_pb2.DecodeResponse.SerializeToString,
                ),
                "HealthCheck": grpc.unary_unary_rpc_method_handler(
                    self.HealthCheck,
                    request_deserializer=reader(jetstream_pb2.HealthCheckRequest),
                    response_serializer=jetstream_pb2.HealthCheckResponse.SerializeToString,
                ),
            },
        )


def _client(peer: str) -> str:
    """Returns the address in gRPC's words for a peer: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _message(pieces: Sequence[Piece], options: RequestOptions) -> Any:
    tokens = [piece.token for piece in pieces if piece.token is not None]
    sample = jetstream_pb2.DecodeResponse.StreamContent.Sample(
        text="".join(piece.text for piece in pieces), token_ids=[token.id for token in tokens]
    )
    if options.scored:
        wanted = {LOGPROB: options.logprobs, MODEL_LOGPROB: options.model_logprobs}
        names = [name for name, is_wanted in wanted.items() if is_wanted]
        add_scores(sample, **{name: [getattr(token, name) for token in tokens] for name in names})
    content = jetstream_pb2.DecodeResponse.StreamContent(samples=[sample])
    return jetstream_pb2.DecodeResponse(stream_content=content)
