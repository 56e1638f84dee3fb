# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One episode's conversation, and the ids that each message adds to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from earl_jax.envs.chat import ChatRenderer
from earl_jax.envs.chat_template import Kind, Place, Said, messages_of

History = Literal["append", "fork"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """What happens where the chat template rewrites earlier turns, as Qwen3's drops reasoning.

    `history` "append": never anything but the next message, in the form that the template gives it
    behind a policy's turn; the policy goes on to see all that it wrote. "fork": the next message
    begins a new sample, whose prompt is the template's own rendering of the conversation so far.
    The episode is then several samples, each of which is trained on as it was sampled, with the
    episode's reward; every fork reads the conversation anew.
    """

    history: History = "append"

    def validate(self) -> None:
        """Nothing can be wrong that its type does not say."""


@dataclasses.dataclass(frozen=True)
class Heard:
    """Ids of what an environment said: to be appended, or the prompt of a new sample."""

    ids: tuple[int, ...]
    forks: bool = False


class Conversation:
    """What was said in one episode. Call `open`, then `reply` and `answer` in turns.

    With `history` "fork" the conversation is kept as text, and `answer` compares: the text of the
    sample's ids against that which the template gives for the whole conversation.
    """

    def __init__(self, renderer: ChatRenderer, history: History = "append"):
        self._renderer = renderer
        self._forks = history == "fork"
        self._opening = Place(kinds=())
        self._said: list[tuple[Kind | None, str]] = []
        self._sample = ""

    def open(self, said: Said, tools: Sequence[Mapping[str, Any]] = ()) -> Heard:
        """The environment begins. Raises as `ChatRenderer.first`."""
        self._opening = self._renderer.opening(said, tools)
        ids = self._renderer.first(said, tools)
        if self._forks:
            self._sample = self._note(said, self._opening)
        return Heard(ids)

    def reply(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The policy said this. Returns its text without the end of turn, and if there is one."""
        text = self._renderer.decode_reply(ids)
        if self._forks:
            self._said.append((None, text))
            self._sample += self._renderer.decode(ids)
        return text, self._renderer.ends_turn(ids)

    def answer(self, said: Said) -> Heard:
        """The environment answers a turn that was ended. Raises as `ChatRenderer.answer`."""
        ids = self._renderer.answer(said, self._opening)
        if not self._forks:
            return Heard(ids)
        place = Place.of(messages_of(said), opening=self._opening)
        appended = self._sample + self._note(said, place)
        self._sample, anew = self._renderer.whole(self._said, self._opening.tools)
        return Heard(ids) if self._sample == appended else Heard(anew, forks=True)

    def _note(self, said: Said, place: Place) -> str:
        """Keeps what was said; returns what the template writes of it."""
        self._said += zip(place.kinds, self._renderer.shown(said, place), strict=True)
        return self._renderer.written(said, place)
