# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A dataset of conversations: for supervised updates (config.train.sft_path), or held out."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from earl_jax.envs.environment import ROLES, Author, Message
from earl_jax.envs.examples import Ids, sample_ids
from earl_jax.envs.tasks import Shuffled, read_rows
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.chat_template import Content, Kind
from earl_jax.envs.text.conversation import Conversation, History
from earl_jax.settings.errors import InputError

_SETTING = "config.train.sft_path"
# Keys of a message beside its role and content.
_KEYS = {"assistant": ("weight", "tool_calls"), "tool": ("tool_call_id", "name")}


class ChatDataset:
    """The conversations of a JSONL file as examples, each once an epoch, in an order of `seed`.

    A line is {"messages": [{"role": ..., "content": ...}, ...]}, beside "tools" as of
    `Start.tools`, and other keys that mean nothing here. The ids are those of an episode with these
    messages (`sample_ids`), whose policy writes replies, and calls of tools ("tool_calls"), as the
    chat template does; where its conversation forks, each sample is an example of its own. The
    policy's tokens are those of the assistant's messages and their ends of turn, but for messages
    with a "weight" of 0. Messages behind the last of the assistant's are left out.

    `setting` is what names the file; `limit` says where the bound `most_tokens` of an example comes
    from.

    Raises ValueError, with the line's number, for a line that is no such conversation, and for one
    that is too long.
    """

    def __init__(
        self,
        path: str,
        renderer: ChatRenderer,
        *,
        history: History = "append",
        seed: int,
        most_tokens: int,
        limit: str,
        setting: str = _SETTING,
    ):
        write = _writer(renderer)

        def take(row: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
            examples = _examples_of(row, Conversation(renderer, history), renderer, write)
            return [(np.array(ids, np.int32), np.array(turns, np.int16)) for ids, turns in examples]

        found, self._digest = read_rows(path, setting, take)
        longest = {line: max(len(ids) for ids, _ in each) for line, each in found.items()}
        too_long = [line for line, number in longest.items() if number > most_tokens]
        if too_long:
            raise InputError(
                f"{path}, line {too_long[0]}: the conversation has {longest[too_long[0]]} tokens, "
                f"more than {limit}, and so have {len(too_long)} of {len(found)}; shorten or "
                f"remove these lines, or change that ({setting})"
            )
        self.path, self.num_conversations = path, len(found)
        self.max_tokens = max(longest.values())
        self._examples = [example for each in found.values() for example in each]
        self.mean_tokens = sum(len(ids) for ids, _ in self._examples) / len(self._examples)
        self._shuffled = Shuffled(seed, len(self._examples))

    def __str__(self) -> str:
        """Returns the dataset in words."""
        forked = len(self._examples) - self.num_conversations
        samples = f" in {len(self._examples)} samples" if forked else ""
        return (
            f"{self.path} has {self.num_conversations} conversations{samples}, of up to "
            f"{self.max_tokens} tokens"
        )

    def batch(self, number: int, size: int) -> list[Ids]:
        """Returns the `size` examples of supervised update `number`."""
        first = number * size
        chosen = (self._examples[self._shuffled[first + i]] for i in range(size))
        return [(ids.tolist(), turn_ids.tolist()) for ids, turn_ids in chosen]

    def in_order(self, size: int) -> Iterator[list[Ids]]:
        """Yields all examples in the order of the file, `size` at a time, the last ones empty."""
        examples = [(ids.tolist(), turn_ids.tolist()) for ids, turn_ids in self._examples]
        for first in range(0, len(examples), size):
            some = examples[first : first + size]
            yield some + [([], [])] * (size - len(some))

    def state(self) -> dict[str, Any]:
        """Returns a digest of the conversations."""
        return {"conversations": self.num_conversations, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError where these are other conversations than when the run began."""
        if state != self.state():
            raise InputError(
                f"{_SETTING} is {self.path!r}, whose {self.num_conversations} conversations are "
                f"not the {state.get('conversations', 0)} that this run began with; put these "
                "back, or name another --workdir"
            )


def texts_of(path: str) -> list[str]:
    """Returns the text of every message of a file of conversations, to train a tokenizer on.

    Raises ValueError as `ChatDataset`.
    """

    def take(row: dict[str, Any]) -> list[str]:
        turns, _ = _turns_of(row)
        return [
            text
            for _, turn in turns
            for text in ([turn.content] if isinstance(turn, _Reply) else [m.text for m in turn])
        ]

    found, _ = read_rows(path, _SETTING, take)
    return [text for texts in found.values() for text in texts]


def _writer(renderer: ChatRenderer) -> Callable[[str], str]:
    """Returns the function that gives a reply's text as the chat template writes it.

    That of Mistral begins with a blank; those of Mistral, Llama 3 and Gemma are trimmed.
    """
    probe = "earl-reply"

    def written(reply: str) -> str:
        turns = [(Kind("user"), "earl"), (None, reply), (Kind("user"), "earl")]
        return renderer.render_whole(turns, "[]").text

    asked = renderer.render_opening(renderer.opening("earl")).text
    head, _, _ = written(probe).partition(probe)
    lead = head.removeprefix(asked) if head.startswith(asked) else ""
    trims = f" {probe} " not in written(f" {probe} ")
    return lambda text: lead + (text.strip() if trims else text)


@dataclasses.dataclass(frozen=True)
class _Reply:
    """A message of the assistant, with its calls of tools."""

    content: str
    calls: Sequence[Mapping[str, Any]]


def _examples_of(
    row: Mapping[str, Any],
    conversation: Conversation,
    renderer: ChatRenderer,
    write: Callable[[str], str],
) -> list[Ids]:
    """Returns the samples of a conversation that have a token to learn."""
    (turns, learnt), tools = _turns_of(row), _tools_of(row)

    def written(turn: _Reply | tuple[Message, ...]) -> Content | tuple[int, ...]:
        if not isinstance(turn, _Reply):
            return turn
        if turn.calls:
            return renderer.reply_with_calls(turn.content, turn.calls, tools)
        return write(turn.content)

    samples = sample_ids([(who, written(turn)) for who, turn in turns], tools, conversation)
    masked = [(ids, [t if t in learnt else 0 for t in turn_ids]) for ids, turn_ids in samples]
    return [example for example in masked if any(example[1])]


def _turns_of(
    row: Mapping[str, Any],
) -> tuple[list[tuple[Author, _Reply | tuple[Message, ...]]], set[int]]:
    """Returns the turns up to the assistant's last, and the numbers of the policy's that count."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"'messages' is {messages!r:.60}; it must be a list of messages such as "
            '{"role": "user", "content": "..."}'
        )
    turns: list[tuple[Author, _Reply | tuple[Message, ...]]] = []
    waiting: list[Message] = []
    learnt, number = set[int](), 0
    for index, message in enumerate(messages, start=1):
        where = f"message {index} of {len(messages)}"
        _check_message(message, where)
        if message["role"] != "assistant":
            words = {"call_id": message.get("tool_call_id"), "name": message.get("name")}
            named = {key: value for key, value in words.items() if value}
            waiting.append(Message(role=message["role"], text=message["content"], **named))
            continue
        if not waiting:
            raise InputError(
                f"{where} is the assistant's with no message of another role before it; an episode "
                "begins with others, and each reply follows one"
            )
        reply = _Reply(message.get("content") or "", _calls_of(message, where))
        turns += [("environment", tuple(waiting)), ("policy", reply)]
        waiting, number = [], number + 1
        if message.get("weight") != 0:
            learnt.add(number)
    if not learnt:
        raise InputError(
            "no message is the assistant's, or all of them have the weight 0: there is nothing to "
            "learn; remove the line"
        )
    return turns, learnt


def _calls_of(message: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Returns a message's calls of tools with arguments as objects, which templates write as JSON.

    Raises ValueError for what is no call.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        given = call if isinstance(call, dict) else {}
        function = given.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            raise InputError(f"the arguments of a call in {where} are no JSON: {error}") from error
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise InputError(
                f"tool_calls of {where} has {call!r:.80}; each must be "
                '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}, '
                "with the JSON of an object as arguments"
            )
        calls.append({**given, "function": {**function, "arguments": arguments}})
    return calls


def _check_message(message: Any, where: str) -> None:
    """Raises ValueError unless it has a known role, a text as content, and no unknown key."""
    if not isinstance(message, dict) or message.get("role") not in (*ROLES, "assistant"):
        raise InputError(
            f"{where} is {message!r:.60}; it must be an object with a 'role', one of "
            f"{', '.join(ROLES)} and assistant, and a 'content'"
        )
    role = message["role"]
    known = ("role", "content", *_KEYS.get(role, ()))
    # Exported tables have null for a key that a message lacks.
    unknown = [key for key, value in message.items() if key not in known and value is not None]
    if unknown:
        raise InputError(
            f"{where} has the key {unknown[0]!r}; the {role}'s messages have {', '.join(known)}"
        )
    if not isinstance(message.get("tool_calls") or [], list):
        raise InputError(f"the tool_calls of {where} is not a list")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(f"the content of {where} is {content!r:.60}; give a text")
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key) or "", str):
            raise InputError(f"the {key} of {where} is not a text")
    if message.get("weight") not in (None, 0, 1):
        raise InputError(f"the weight of {where} is {message['weight']!r:.60}; it must be 0 or 1")


def _tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"'tools' is {tools!r:.60}; it must be a list of objects, one for a tool")
    return tools
