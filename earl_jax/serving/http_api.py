# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoints: OpenAI's, Anthropic's /v1/messages, and one for token ids as vLLM's.

Log-probs are, in every answer, under the distribution that a token was drawn from (`logprob`) and
under the model itself (`model_logprob`).
"""

import asyncio
import contextlib
import dataclasses
import re
import time
import urllib.parse
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import grpc

from earl_jax.envs.tools.calls import call_opening
from earl_jax.http.apis import APIS, COUNT_TOKENS, Api, api_at, send_error
from earl_jax.http.chat import cannot_demand, demanded_call, read_chat
from earl_jax.http.fields import STRUCTURED, read_object, take
from earl_jax.http.server import Connection, HttpError, HttpRequest
from earl_jax.serving.driver import report
from earl_jax.serving.http_answers import (
    FINISH,
    ChatForm,
    Choice,
    CompletionForm,
    Form,
    generated,
    has_news,
    usage,
)
from earl_jax.serving.http_requests import (
    DEFAULT_MAX_TOKENS,
    ReplyParams,
    read_completion,
    read_generate,
    read_reply_params,
)
from earl_jax.serving.requests import RequestError, check_ids
from earl_jax.serving.service import Service

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}
# Before the name of one model, in which a slash is %2F or as it is.
_ONE_MODEL = "/v1/models/"
# A prompt: its ids, or what `Service.encode` makes them of.
Prompt = list[int] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The policy as clients see it: its name, and its version (the training step of a run)."""

    name: str
    version: int
    created: int


class HttpApi:
    """The endpoints over a service; `handle` answers one request."""

    def __init__(self, service: Service, model: ServedModel) -> None:
        self._service, self._model = service, model
        self._routes = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/v1/completions": ("POST", self._completions),
            **{path: ("POST", self._chat) for path in APIS},
            COUNT_TOKENS: ("POST", self._count_tokens),
            "/inference/v1/generate": ("POST", self._generate),
        }

    async def handle(self, request: HttpRequest, connection: Connection) -> None:
        """Answers a request."""
        api = api_at(request.path)
        try:
            await self._answer(request, connection, api)
        except HttpError as error:
            await send_error(error, connection, api)
        except RequestError as error:
            failed = HttpError(_STATUS.get(error.code, 500), error.words)
            await send_error(failed, connection, api)
        except OSError:
            raise  # the client went away
        except Exception as error:  # noqa: BLE001 - no request may end the server
            report("a request could not be answered", error)
            failed = HttpError(500, "the server could not answer this request")
            await send_error(failed, connection, api)

    async def _answer(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        path = request.path
        if path.startswith(_ONE_MODEL):
            self._check_name(urllib.parse.unquote(path.removeprefix(_ONE_MODEL)))
            path = "/v1/models"
        if path not in self._routes:
            raise HttpError(404, f"there is no {path} here; there are {', '.join(self._routes)}")
        method, answer = self._routes[path]
        if request.method != method:
            raise HttpError(405, f"{request.path} takes {method}, not {request.method}")
        await answer(request, connection, api)

    async def _health(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        is_live = self._service.is_live
        words = "ok" if is_live else "the server is ending"
        await connection.send_json(200 if is_live else 503, {"status": words})

    async def _models(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        model = {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "earl_jax",
            "max_model_len": self._service.limits.context_tokens,
            "policy_version": self._model.version,
        }
        is_one = request.path.startswith(_ONE_MODEL)
        await connection.send_json(200, model if is_one else {"object": "list", "data": [model]})

    async def _completions(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        given = self._read(request)
        prompts = read_completion(given)
        params = self._reply_params({"max_tokens": DEFAULT_MAX_TOKENS, **given})
        given = [{"text": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
        await self._reply(params, given, CompletionForm(self._service.decode), connection, api)

    async def _chat(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        fields, prompt = self._read_chat(request, api)
        params = self._reply_params(fields)
        form = ChatForm(self._service.decode, tools=prompt["tools"], opening=prompt["opening"])
        await self._reply(params, [prompt], form, connection, api)

    async def _count_tokens(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        _, prompt = self._read_chat(request, api)
        with self._admitted(1, connection.client) as names:
            ids = await self._ids(prompt, names[0])
        await connection.send_json(200, {"input_tokens": len(ids)})

    def _read_chat(
        self, request: HttpRequest, api: Api
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Returns the sampling fields of a chat request, and its prompt."""
        fields, messages, tools = read_chat(api.to_chat(self._read(request)))
        prompt = {
            "messages": messages,
            "tools": tools,
            "arguments": take(fields, "chat_template_kwargs", dict, {}),
            "opening": self._opening(demanded_call(fields, tools)),
        }
        return fields, prompt

    def _opening(self, call: str | None) -> str:
        """Returns the text that begins a reply in which a call of this tool is demanded."""
        opening = "" if call is None else call_opening(self._service.chat_template, call)
        if call is not None and not opening:
            raise cannot_demand()
        return opening

    async def _generate(self, request: HttpRequest, connection: Connection, api: Api) -> None:
        given = self._read(request)
        fields, ids = read_generate(given)
        fields = {"max_tokens": DEFAULT_MAX_TOKENS, **fields}
        params = self._reply_params(fields, "sampling_params.")
        async with self._replies(params, [ids], connection, is_text=False) as (replies, counts):
            choices = [Choice(index) for index in range(len(replies))]
            await _together(_collect(*each) for each in zip(replies, choices, strict=True))
        answer = {
            "request_id": given.get("request_id", f"gen-{uuid.uuid4().hex}"),
            "model": self._model.name,
            "policy_version": self._model.version,
            "choices": [generated(choice) for choice in choices],
            "usage": usage(sum(counts), choices),
        }
        await connection.send_json(200, answer)

    def _read(self, request: HttpRequest) -> dict[str, Any]:
        given = read_object(request)
        self._check_name(take(given, "model", str, self._model.name))
        return given

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            raise HttpError(
                404, f"the model {name!r} is not served here; {self._model.name!r} is", "model"
            )

    def _reply_params(self, fields: Mapping[str, Any], where: str = "") -> ReplyParams:
        service = self._service
        try:
            params = read_reply_params(fields, service.sampling, service.limits, where)
            most = params.max_tokens or service.limits.context_tokens
            options = service.allow(params.options, most, where)
        except RequestError as error:
            words = re.sub(r"\bchoices\b", f"{STRUCTURED}.choice", error.words)
            raise RequestError(error.code, words) from None
        return dataclasses.replace(params, options=options)

    async def _ids(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, list) or prompt.get("text") == "":
            return list(prompt) if isinstance(prompt, list) else []
        return await self._service.encode(name, **prompt)

    @contextlib.asynccontextmanager
    async def _replies(
        self,
        params: ReplyParams,
        prompts: Sequence[Prompt],
        connection: Connection,
        *,
        is_text: bool,
    ) -> AsyncIterator[tuple[list[Any], list[int]]]:
        """Gives the replies to all prompts, which end with the context, and the prompts' lengths.

        All are admitted first, or none is.
        """
        service, replies, counts = self._service, [], []
        with self._admitted(len(prompts) * params.count, connection.client) as names:
            for prompt in prompts:
                ids = await self._ids(prompt, names[0])
                left = service.limits.context_tokens - len(ids)
                max_tokens = params.max_tokens or max(1, left)
                check_ids(ids, max_tokens, service.limits)
                counts.append(len(ids))
                for number in range(params.count):
                    options, name = params.options_of(number), names[len(replies)]
                    replies.append(service.reply(name, ids, max_tokens, options, is_text=is_text))
            yield replies, counts

    @contextlib.contextmanager
    def _admitted(self, count: int, client: str) -> Iterator[list[str]]:
        service = self._service
        if count > service.max_open_per_client:
            raise HttpError(
                400,
                f"the request wants {count} replies, and this server takes "
                f"{service.max_open_per_client} at once of one address (--num_slots, --max_waiting "
                "and --max_waiting_per_client when it was started); send fewer prompts, or a "
                "smaller n",
            )
        names: list[str] = []
        try:
            for _ in range(count):
                names.append(service.enter(client))
            yield names
        finally:
            for name in names:
                service.leave(name)

    async def _reply(
        self,
        params: ReplyParams,
        prompts: Sequence[Prompt],
        form: Form,
        connection: Connection,
        api: Api,
    ) -> None:
        """Answers with the replies to these prompts, as one object or as events."""
        facts = {
            "id": form.prefix + uuid.uuid4().hex,
            "object": form.part_name if params.streams else form.name,
            "created": int(time.time()),
            "model": self._model.name,
            "policy_version": self._model.version,
        }
        async with self._replies(params, prompts, connection, is_text=True) as (replies, counts):
            choices = [Choice(index) for index in range(len(replies))]
            pairs = list(zip(replies, choices, strict=True))
            if not params.streams:
                await _together(_collect(*pair) for pair in pairs)
                whole = [form.whole(choice) for choice in choices]
                answer = {**facts, "choices": whole, "usage": usage(sum(counts), choices)}
                await connection.send_json(200, api.whole(answer))
                return

            async def send(part: dict[str, Any]) -> None:
                for event in api.events({**facts, "choices": [part]}):
                    await connection.send_event(event)

            await connection.begin_events()
            await _together(_stream(*pair, form, send) for pair in pairs)
        counted = {**facts, "choices": [], "usage": usage(sum(counts), choices)}
        for event in (*(api.events(counted) if params.counts_usage else ()), *api.end()):
            await connection.send_event(event)
        await connection.end_events()


async def _collect(reply: Any, choice: Choice) -> None:
    """Reads a reply to its end."""
    async with contextlib.aclosing(reply.pieces()) as pieces:
        async for together in pieces:
            choice.pieces += together
    choice.finish_reason, choice.stop = FINISH[reply.finish_reason], reply.stop


async def _stream(
    reply: Any, choice: Choice, form: Form, send: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    """Sends a reply round by round, and keeps its pieces for their count."""
    begin = form.begin(choice.index)
    if begin is not None:
        await send(begin)
    async with contextlib.aclosing(reply.pieces()) as pieces:
        async for together in pieces:
            choice.pieces += together
            part = form.part(Choice(choice.index, together))
            if has_news(part):
                await send(part)
    await send(form.part(Choice(choice.index, [], FINISH[reply.finish_reason], reply.stop)))


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines at once. The first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
