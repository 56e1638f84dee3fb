# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One episode's conversation, and the ids that each message adds to it."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from earl_jax.envs.environment import ASSISTANT, Message
from earl_jax.envs.text.chat import ChatRenderer, Opening, Rendered
from earl_jax.envs.text.chat_template import Content, Kind, Place, TemplateRefusal, messages_of
from earl_jax.envs.text.stream import StopWatch
from earl_jax.settings.arguments import check_json
from earl_jax.settings.errors import InputError

History = Literal["append", "fork"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Settings of the chat template, and of templates that rewrite earlier turns.

    `template_arguments` are variables of the template beside the messages: {"enable_thinking":
    False} makes Qwen3 begin the policy's turns after an empty reasoning block.

    Some templates rewrite earlier turns; Qwen3's drops reasoning. `history` "append": only the next
    message is appended, as the template renders it after a policy's turn; the policy still sees all
    that it wrote. "fork": where the template rewrites, the next message begins a new sample, whose
    prompt is the template's rendering of the conversation so far. Such an episode is several
    samples; each is trained on as it was sampled, with the episode's reward. Every fork prefills
    the conversation again, and the max tokens of an episode must hold all of its samples.
    """

    history: History = "append"
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def validate(self) -> None:
        """Raises ValueError for template arguments that config.json cannot hold."""
        check_json(self.template_arguments, "config.chat.template_arguments")


@dataclasses.dataclass(frozen=True)
class Observation:
    """Token ids of an environment's messages; with `forks` they are a new sample's prompt.

    `array` i32[tokens] has the same ids. It is made with the record: of 16,384 ids that takes
    0.3 ms, which whoever renders them has, and not the thread that speaks to the devices.
    """

    ids: tuple[int, ...]
    forks: bool = False
    array: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes the array."""
        object.__setattr__(self, "array", np.fromiter(self.ids, np.int32, len(self.ids)))


class Conversation:
    """The conversation of one episode. Call `open`, then `reply` and `answer` in turns.

    With `history` "fork" the conversation is kept as text, and `answer` compares the text of the
    sample's ids with the template's rendering of the whole conversation. The template gets the
    policy's turns as plain text, calls of tools too. Where it refuses them (Mistral's, for a turn
    of the policy after a call), the sample goes on.
    """

    def __init__(self, renderer: ChatRenderer, history: History = "append"):
        self._renderer = renderer
        self._forks = history == "fork"
        self._opening = Opening()
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._turns: list[tuple[Kind | None, str]] = []
        # True if the policy's last turn has no end of turn; the next answer then begins with one.
        self._is_open = False
        self._sample = ""
        # The beginning of the policy's next turn, which it has read and not sampled.
        self._begun = ""

    def of_another_side(self) -> "Conversation":
        """Returns a conversation for another side of self-play, with the same tools."""
        other = Conversation(self._renderer, "fork" if self._forks else "append")
        other._tools = self._tools
        return other

    def may_fit(self, content: Content, most_tokens: int) -> bool:
        """Returns False for messages that certainly are so many tokens or more.

        Only their length is looked at, so that a text of any size costs nothing.
        """
        size = sum(len(message.text) for message in messages_of(content))
        return size < most_tokens * self._renderer.longest_token

    def open(self, content: Content, tools: Sequence[Mapping[str, Any]] = ()) -> Observation:
        """Returns the ids of the environment's opening messages, earlier replies among them or not.

        Raises as `ChatRenderer.first`.
        """
        self._tools = tools or self._tools
        if any(message.role == ASSISTANT for message in messages_of(content)):
            return Observation(self._open_whole(messages_of(content)))
        self._opening = self._renderer.opening(content, self._tools)
        rendered = self._renderer.render_opening(self._opening)
        self._note(content, rendered)
        return Observation(rendered.ids)

    def open_anew(self, content: Content, tools: Sequence[Mapping[str, Any]]) -> Observation:
        """Returns the ids of a whole conversation in place of this one: a new sample's prompt.

        Raises as `ChatRenderer.first`.
        """
        self._tools, self._turns, self._sample, self._is_open = tools, [], "", False
        return dataclasses.replace(self.open(content), forks=True)

    def _open_whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the ids of a conversation with earlier replies, which go in as plain text."""
        turns: list[tuple[Kind | None, str]] = []
        for is_reply, group in itertools.groupby(messages, lambda each: each.role == ASSISTANT):
            block = tuple(group)
            if is_reply:
                turns += [(None, message.text) for message in block]
                continue
            if not turns:
                self._opening = self._renderer.opening(block, self._tools)
                place, shown = self._opening.place, self._opening.texts
            else:
                place = Place.of(block, opening=self._opening.place)
                shown = self._renderer.shown(place, block)
            turns += zip(place.kinds, shown, strict=True)
        rendered = self._renderer.render_whole(turns, self._opening.place.tools)
        if self._forks:
            self._turns, self._sample = turns, rendered.text
        return rendered.ids

    def count(
        self, content: Content, tools: Sequence[Mapping[str, Any]], call: str | None = None
    ) -> int:
        """Returns the number of tokens of a conversation that opens with these messages.

        With the beginning of a `call` (`begin_call`). This conversation is not changed, and any
        thread may count. Raises as `open` and `begin_call`.
        """
        other = self.of_another_side()
        opened = other.open(content, tools)
        return len((opened if call is None else other.begin_call(opened, call)).ids)

    def writes_calls(self) -> bool:
        """Returns whether a call may be demanded: the chat template has a form that begins one."""
        return bool(self._renderer.call_opening(""))

    def begin_call(self, observation: Observation, name: str) -> Observation:
        """Returns the newest messages, and behind them the beginning of a call of this tool.

        That of any tool if ""; the policy's reply goes on with it, and its text has it too.

        Raises ValueError for a chat template that does not write calls between <tool_call> tags.
        """
        self._begun = self._renderer.call_opening(name)
        if not self._begun:
            raise InputError(
                "a call is demanded, and this policy's chat template does not write calls between "
                "<tool_call> and </tool_call>"
            )
        self._sample += self._begun if self._forks else ""
        ids = self._renderer.beginning(self._begun)
        return dataclasses.replace(observation, ids=observation.ids + ids)

    def reply(self, ids: Sequence[int], before_stop: str | None = None) -> tuple[str, bool]:
        """Adds the policy's turn. Returns its text, and True if it has an end of turn.

        `before_stop` is the text before the stop of a turn that a stop ended; it counts as ended.
        """
        begun, self._begun = self._begun, ""
        text, has_end = begun + self._renderer.decode_reply(ids), self._renderer.ends_turn(ids)
        self._is_open = before_stop is not None and not has_end
        if self._forks:
            self._turns.append((None, text))
            self._sample += self._renderer.decode(ids)
        return (text, has_end) if before_stop is None else (begun + before_stop, True)

    def choices(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the ids of a policy turn for each text, end of turn included.

        Raises ValueError for text that cannot be encoded.
        """
        return tuple(self._renderer.reply(text) for text in texts)

    def allowed(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns these ids and the end of turn, each once; () for none."""
        end = self._renderer.end_of_turn_id
        return tuple(dict.fromkeys((*map(int, token_ids), end))) if token_ids else ()

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of ids of the policy."""
        return self._renderer.decode(ids)

    def watch_for(self, strings: Sequence[str]) -> StopWatch:
        """Returns a watch for these strings in a turn of the policy, end of turn left out."""
        ends = self._renderer.end_of_turn_ids

        def decode(ids: Sequence[int]) -> str:
            return self._renderer.decode([token for token in ids if token not in ends])

        return StopWatch(decode, strings)

    def answer(self, content: Content) -> Observation:
        """Returns the ids of the answer to a turn that ended. Raises as `ChatRenderer.answer`.

        After a stop that is no end of turn, the answer begins with the template's end of turn.
        """
        rendered = self._renderer.render_answer(content, self._opening)
        if self._is_open:
            end = (self._renderer.end_of_turn_id,)
            rendered = dataclasses.replace(
                rendered, text=self._renderer.decode(end) + rendered.text, ids=end + rendered.ids
            )
        self._note(content, rendered)
        if not self._forks:
            return Observation(rendered.ids)
        try:
            anew = self._renderer.render_whole(self._turns, self._opening.place.tools)
        except TemplateRefusal:
            return Observation(rendered.ids)
        forks = anew.text != self._sample
        self._sample = anew.text
        return Observation(anew.ids, forks=True) if forks else Observation(rendered.ids)

    def _note(self, content: Content, rendered: Rendered) -> None:
        if self._forks:
            kinds = Place.of(messages_of(content)).kinds
            self._turns += zip(kinds, rendered.shown, strict=True)
            self._sample += rendered.text


class Completion:
    """The one reply to a prompt that was given as ids, without a chat template."""

    def __init__(self, decode: Callable[[Sequence[int]], str], end_ids: Collection[int]) -> None:
        """`decode` as of `TextCodec`; each of `end_ids` ends the reply."""
        self._decode, self._end_ids = decode, frozenset(end_ids)

    def reply(self, ids: Sequence[int], before_stop: str | None = None) -> tuple[str, bool]:
        """Returns the text of the reply, and True if it has an end, see `Conversation.reply`."""
        if before_stop is not None:
            return before_stop, True
        has_end = ids[-1] in self._end_ids
        return self._decode(ids[:-1] if has_end else ids), has_end

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of ids of the policy."""
        return self._decode(ids)

    def watch_for(self, strings: Sequence[str]) -> StopWatch:
        """Returns a watch for these strings in the reply, its end left out."""
        return StopWatch(
            lambda ids: self._decode([token for token in ids if token not in self._end_ids]),
            strings,
        )
