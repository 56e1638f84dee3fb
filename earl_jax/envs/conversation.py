# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One episode's conversation, and the ids that each message adds to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from earl_jax.envs.chat import ChatRenderer, Opening, Rendered
from earl_jax.envs.chat_template import Content, Kind, Place, TemplateRefusal, messages_of
from earl_jax.envs.text_stream import StopWatch

History = Literal["append", "fork"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """What the chat template is told, and what happens where it rewrites earlier turns.

    `template_arguments` are what a template reads beside the messages: {"enable_thinking": False}
    has Qwen3 begin the policy's turns behind reasoning that is empty.

    Some templates rewrite earlier turns, as Qwen3's drops reasoning. `history` "append": never
    anything but the next message, in the form that the template gives it behind a policy's turn;
    the policy goes on to see all that it wrote. "fork": the next message begins a new sample, whose
    prompt is the template's own rendering of the conversation so far. The episode is then several
    samples, each of which is trained on as it was sampled, with the episode's reward. Every fork
    reads the conversation anew, and all samples of an episode lie in its row, which needs room for
    them.
    """

    history: History = "append"
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
    sample's ids against that which the template gives for the whole conversation. The template gets
    the policy's turns as plain text, calls of tools too. One that refuses these (Mistral's, where
    the policy speaks again behind a call) has no other text to give: then the sample goes on.
    """

    def __init__(self, renderer: ChatRenderer, history: History = "append"):
        self._renderer = renderer
        self._forks = history == "fork"
        self._opening = Opening()
        self._sampled: list[tuple[Kind | None, str]] = []
        # Whether the policy's last turn is without an end, which the next answer then begins with.
        self._is_open = False
        self._sample = ""

    def open(self, content: Content, tools: Sequence[Mapping[str, Any]] = ()) -> Heard:
        """The environment begins. Raises as `ChatRenderer.first`."""
        self._opening = self._renderer.opening(content, tools)
        rendered = self._renderer.render_opening(self._opening)
        self._note(content, rendered)
        return Heard(rendered.ids)

    def reply(self, ids: Sequence[int], before_stop: str | None = None) -> tuple[str, bool]:
        """The policy said this. Returns its text without the end of turn, and if there is one.

        `before_stop` is the text of a turn that a stop ended, up to there; it counts as ended.
        """
        text, has_end = self._renderer.decode_reply(ids), self._renderer.ends_turn(ids)
        self._is_open = before_stop is not None and not has_end
        if self._forks:
            self._sampled.append((None, text))
            self._sample += self._renderer.decode(ids)
        return (text, has_end) if before_stop is None else (before_stop, True)

    def choices(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of the turns that say one of these, as the tokenizer writes them, and end.

        Raises ValueError for what cannot be encoded.
        """
        return tuple(self._renderer.reply(text) for text in texts)

    def allowed(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that turns made of these are made of: the end of turn is one of them. () for none."""
        end = self._renderer.end_of_turn_id
        return tuple(dict.fromkeys((*map(int, token_ids), end))) if token_ids else ()

    def text_of(self, ids: Sequence[int]) -> str:
        """What ids of the policy say."""
        return self._renderer.decode(ids)

    def watch_for(self, strings: Sequence[str]) -> StopWatch:
        """Looks for these in a turn of the policy, whose end of turn is no text."""
        ends = self._renderer.end_of_turn_ids

        def decode(ids: Sequence[int]) -> str:
            return self._renderer.decode([token for token in ids if token not in ends])

        return StopWatch(decode, strings)

    def answer(self, content: Content) -> Heard:
        """The environment answers a turn that was ended. Raises as `ChatRenderer.answer`.

        Behind a stop that is no end of turn, the answer begins with the chat template's own.
        """
        rendered = self._renderer.render_answer(content, self._opening)
        if self._is_open:
            end = (self._renderer.end_of_turn_id,)
            rendered = dataclasses.replace(
                rendered, text=self._renderer.decode(end) + rendered.text, ids=end + rendered.ids
            )
        self._note(content, rendered)
        if not self._forks:
            return Heard(rendered.ids)
        try:
            anew = self._renderer.render_whole(self._sampled, self._opening.place.tools)
        except TemplateRefusal:
            return Heard(rendered.ids)
        forks = anew.text != self._sample
        self._sample = anew.text
        return Heard(anew.ids, forks=True) if forks else Heard(rendered.ids)

    def _note(self, content: Content, rendered: Rendered) -> None:
        if self._forks:
            kinds = Place.of(messages_of(content)).kinds
            self._sampled += zip(kinds, rendered.shown, strict=True)
            self._sample += rendered.text
