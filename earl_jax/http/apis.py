# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The APIs in which clients converse: OpenAI's chat completions, and others translated to these."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from earl_jax.http.messages import Messages
from earl_jax.http.responses import Responses
from earl_jax.http.server import Connection, HttpError


class Api(Protocol):
    """One request in an API, and its answer."""

    def to_chat(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the request in the form of chat completions. Raises HttpError."""
        ...

    def whole(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a whole answer of chat completions in this API's form."""
        ...

    def events(self, chunk: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the events for a chunk of a streamed answer."""
        ...

    def end(self) -> Sequence[Any]:
        """Returns the events behind the last chunk."""
        ...

    def error(self, error: HttpError, *, is_event: bool) -> dict[str, Any]:
        """Returns an error: the body of an answer, or the last event of a streamed one."""
        ...


class Chat:
    """The form of OpenAI's chat completions, as it is."""

    def to_chat(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the request."""
        return dict(given)

    def whole(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the answer."""
        return answer

    def events(self, chunk: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the chunk."""
        return (chunk,)

    def end(self) -> Sequence[Any]:
        """Returns the mark of the end."""
        return ("[DONE]",)

    def error(self, error: HttpError, *, is_event: bool) -> dict[str, Any]:
        """Returns an error."""
        return error.body()


APIS: dict[str, Callable[[], Api]] = {
    "/v1/chat/completions": Chat,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
# Answers with the number of tokens of a request's prompt.
COUNT_TOKENS = "/v1/messages/count_tokens"


def api_at(path: str) -> Api:
    """Returns the API of a path, and of what is below it; of any other path OpenAI's chat."""
    return next((make for each, make in APIS.items() if each in path), Chat)()


def error_body(path: str, error: HttpError) -> dict[str, Any]:
    """Returns the body of an error in the form of the path's API."""
    return api_at(path).error(error, is_event=False)


async def send_error(error: HttpError, connection: Connection, api: Api) -> None:
    """Answers with an error: as an event where events were begun."""
    if connection.has_begun:
        await connection.send_event(api.error(error, is_event=True))
        await connection.end_events()
    else:
        await connection.send_error(error)
