# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The address where agents ask for replies: a server in a thread, a path a session."""

import asyncio
import functools
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from earl_jax.envs.agents.session import Asked, Reply, Session
from earl_jax.envs.environment import LARGEST_REWARD
from earl_jax.http.apis import APIS, COUNT_TOKENS, Api, api_at, error_body, send_error
from earl_jax.http.chat import cannot_demand, demanded_call, read_chat
from earl_jax.http.fields import DRAWN, IDS, STRUCTURED, read_object, read_stop, take
from earl_jax.http.server import Connection, HttpError, HttpLimits, HttpRequest, HttpServer
from earl_jax.settings.errors import InputError

_logger = logging.getLogger(__name__)

# Fields that the run sets for all tokens that it trains on: a request's own are not followed.
_RUN_SETS = (
    *DRAWN,
    "max_tokens",
    "max_completion_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
_MODELS, _REWARD = "/v1/models", "/v1/reward"
# An idle connection is kept for so long; agents work between two requests.
_LIMITS = HttpLimits(
    most_bytes=2**26, most_held_bytes=2**30, max_connections=2**14, read_s=600.0, write_s=60.0
)


class AgentEndpoint:
    """A server of the conversations of `APIS`; `open` gives each session an address of its own.

    /reward there pays the newest reply, {"reward": 0.5}, when the next request is taken, or with
    an "id" the reply whose answer had it.
    Whatever `model` a request names, the run's policy answers, with the run's sampling. A request
    has one reply (`n`), without log-probs.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listens at this address, with port 0 at any that is free. Raises ValueError if taken."""
        self._sessions: dict[str, Session] = {}
        self._noted: set[str] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        server = HttpServer(self._handle, _LIMITS, error_body)
        started = asyncio.run_coroutine_threadsafe(server.start(host, port), self._loop)
        try:
            name = f"[{host}]" if ":" in host else host
            self._address = f"http://{name}:{started.result()}"
        except OSError as error:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise InputError(
                f"config.env.args.host is {host!r} and port {port}, where agents cannot be waited "
                f"for: {error}; choose the name of this machine, and 0 for any port that is free"
            ) from error

    def open(self, session: Session) -> str:
        """Returns the base URL of a session: clients add /chat/completions to it."""
        name = secrets.token_urlsafe(12)
        self._sessions[name] = session
        return f"{self._address}/{name}/v1"

    def close(self, base_url: str, session: Session) -> None:
        """Closes a session. Later requests of its agent are refused."""
        session.close(
            "the episode of this address is over: it was paid, or a limit of the run ended it"
        )
        self._sessions.pop(base_url.split("/")[-2], None)

    async def _handle(self, request: HttpRequest, connection: Connection) -> None:
        name, _, path = request.path.removeprefix("/").partition("/")
        path = f"/{path}"
        api = api_at(path)
        try:
            await self._answer(name, path, request, connection, api)
        except HttpError as error:
            if connection.has_begun:
                raise OSError("the session ended in an answer") from error
            await send_error(error, connection, api)
        except OSError:
            raise  # the client went away
        except Exception as error:  # no request may end the server
            _logger.exception("an agent's request could not be answered")
            if not connection.has_begun:
                failed = HttpError(500, f"the server failed: {error!r:.200}")
                await send_error(failed, connection, api)

    async def _answer(
        self, name: str, path: str, request: HttpRequest, connection: Connection, api: Api
    ) -> None:
        chat = functools.partial(self._chat, api=api)
        answers = {
            **{each: ("POST", chat) for each in APIS},
            COUNT_TOKENS: ("POST", functools.partial(self._count_tokens, api=api)),
            _REWARD: ("POST", self._reward),
            _MODELS: ("GET", self._models),
        }
        method, answer = answers.get(path, ("", self._models))
        if not method:
            raise HttpError(
                404, f"there is no {path} here; behind a session there are {', '.join(answers)}"
            )
        if request.method != method:
            raise HttpError(405, f"{path} takes {method}, not {request.method}")
        session = self._sessions.get(name)
        if session is None:
            raise HttpError(410, "the episode of this address is over, or never was")
        await answer(session, request, connection)

    async def _models(self, session: Session, request: HttpRequest, connection: Connection) -> None:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "earl_jax"}
        await connection.send_json(200, {"object": "list", "data": [model]})

    async def _reward(self, session: Session, request: HttpRequest, connection: Connection) -> None:
        given = read_object(request)
        reward: Any = given.get("reward")
        if type(reward) not in (int, float) or not abs(reward) <= LARGEST_REWARD:
            raise HttpError(
                400, f"reward is {reward!r:.80}; it must be a finite number of float32", "reward"
            )
        session.pay(float(reward), take(given, "id", str, ""))
        await connection.send_json(200, {"reward": reward})

    async def _chat(
        self, session: Session, request: HttpRequest, connection: Connection, api: Api
    ) -> None:
        given = api.to_chat(read_object(request))
        asked = session.ask(self._read(given, session))
        try:
            reply = await asyncio.shield(asyncio.wrap_future(asked.reply))
            await _send(given, reply, connection, api)
        except (asyncio.CancelledError, OSError):
            session.lose(asked)
            raise

    async def _count_tokens(
        self, session: Session, request: HttpRequest, connection: Connection, api: Api
    ) -> None:
        asked = self._read(api.to_chat(read_object(request)), session)
        if session.count is None:
            raise HttpError(404, "tokens are not counted here")
        try:
            number = await asyncio.to_thread(session.count, asked)
        except InputError as error:
            raise HttpError(400, str(error), "messages") from error
        await connection.send_json(200, {"input_tokens": number})

    def _read(self, given: Mapping[str, Any], session: Session) -> Asked:
        """Returns the request in these fields. Raises HttpError."""
        left_out = [each for each in _RUN_SETS if each in given]
        left_out += ["parallel_tool_calls"] if given.get("parallel_tool_calls") is False else []
        for field in left_out:
            if field not in self._noted:
                self._noted.add(field)
                _logger.warning(
                    "an agent asks for %s=%s, which is not followed: replies are sampled freely, "
                    "as the run's config.rollout says",
                    field,
                    given[field],
                )
        fields, messages, tools = read_chat({k: v for k, v in given.items() if k not in left_out})
        if take(fields, "n", int, 1) != 1:
            raise HttpError(400, f"n is {fields['n']}; an episode has one reply at a time", "n")
        for name in ("logprobs", "chat_template_kwargs", STRUCTURED, *IDS):
            if fields.get(name) not in (None, False, [], {}):
                raise HttpError(
                    400,
                    f"{name} is not read of an agent's requests; leave it out, and set what the "
                    "config has of it (config.rollout, config.chat)",
                    name,
                )
        for number in (0, len(messages) - 1):
            if messages[number]["role"] == "assistant":
                raise HttpError(
                    400,
                    f"messages[{number}] is the assistant's; a conversation begins with another "
                    "role, and the policy answers the last message",
                    "messages",
                )
        if any("reasoning_content" in message for message in messages):
            raise HttpError(400, "reasoning_content is not read here; leave it out", "messages")
        call = demanded_call(fields, tools)
        if call is not None and not session.may_demand:
            raise cannot_demand()
        return Asked(messages=messages, tools=tools, stop=read_stop(fields), call=call)


async def _send(given: Mapping[str, Any], reply: Reply, connection: Connection, api: Api) -> None:
    """Sends a reply, as events where the request asks for a stream."""
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}-{reply.name}",
        "created": int(time.time()),
        "model": given.get("model", "policy"),
    }
    usage = {
        "prompt_tokens": reply.context_tokens,
        "completion_tokens": reply.reply_tokens,
        "total_tokens": reply.context_tokens + reply.reply_tokens,
    }
    reason = "tool_calls" if "tool_calls" in reply.message else "stop"
    if not take(given, "stream", bool, False):
        choice = {"index": 0, "message": reply.message, "logprobs": None, "finish_reason": reason}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return await connection.send_json(200, api.whole(whole))
    await connection.begin_events()
    head["object"] = "chat.completion.chunk"
    chunks = []
    for delta, ends in _deltas(reply.message, reason):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": ends}
        chunks.append({**head, "choices": [choice]})
    if take(given, "stream_options", dict, {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    for event in (*(each for chunk in chunks for each in api.events(chunk)), *api.end()):
        await connection.send_event(event)
    return await connection.end_events()


def _deltas(message: Mapping[str, Any], reason: str) -> Iterator[tuple[dict[str, Any], str | None]]:
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    delta = {"role": "assistant", "content": message["content"]}
    yield (delta | {"tool_calls": calls} if calls else delta), None
    yield {}, reason


_opening = threading.Lock()
_open_at = functools.cache(AgentEndpoint)


def endpoint_at(host: str, port: int) -> AgentEndpoint:
    """Returns this process's endpoint at an address. Raises ValueError where it is taken."""
    with _opening:
        return _open_at(host, port)
