# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Any conversation with any family's template: what was sampled plus what was appended.

The templates and vocabularies of tests/tokenizers behave as those of the families: bytes, bytes
behind a normalizer, and three of SentencePiece's kinds. What a model samples is written here by
hand, family by family; what a conversation looks like is said by the template that gets it whole.
"""

import dataclasses
import functools
import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from earl_jax.engine.round_inputs import RoundOutputs
from earl_jax.envs.environment import Message
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.conversation import Conversation, Observation
from earl_jax.envs.text.tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    build_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from earl_jax.rollout.config import Limits, Stops
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.reply import Sampled
from earl_jax.rollout.task import Task
from tests.support.byte_ids import byte_ids

FOLDERS = Path(__file__).parent / "tokenizers"
NAMES = ("qwen2", "qwen3", "llama3", "mistral", "mistral1", "gemma3", "ours")
# Families with a place for tools, and for responses to calls.
WITH_TOOLS = ("qwen2", "qwen3", "llama3", "mistral")
END = {
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "mistral1": "</s>",
    "gemma3": "<end_of_turn>",
    "ours": "<|end|>",
}


@functools.cache
def tokenizer(name: str):
    return build_tokenizer([], 260) if name == "ours" else load_tokenizer(FOLDERS / name)


@functools.cache
def chat(name: str) -> ChatRenderer:
    if name == "ours":
        return ChatRenderer(tokenizer(name))
    ends = json.loads((FOLDERS / name / "generation_config.json").read_text())["eos_token_id"]
    return ChatRenderer(tokenizer(name), ends if isinstance(ends, list) else [ends])


def template(name: str, messages: list[dict[str, Any]], tools=(), *, speak: bool = True) -> str:
    """The template's own text of a whole conversation."""
    return tokenizer(name).apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=speak
    )


def kept(name: str, text: str) -> str:
    """Returns the text as the family's vocabulary keeps it: accents composed, and "▁" a blank."""
    if name in ("qwen2", "qwen3"):
        return unicodedata.normalize("NFC", text)
    return text.replace("\u2581", " ") if name in ("mistral", "mistral1", "gemma3") else text


# What a policy says, and what the environment says.


@dataclasses.dataclass(frozen=True)
class Reply:
    """A turn of the policy: words, or a call of a tool, behind reasoning or not."""

    words: str = ""
    reasoning: str = ""
    call: dict | None = None
    # One token a byte, as a model may spell what the tokenizer would write in fewer.
    spelled: bool = False

    def as_message(self) -> dict[str, Any]:
        """For the template, which writes it in its own way."""
        message: dict[str, Any] = {"role": "assistant", "content": self.words}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.call:
            message["content"] = ""
            message["tool_calls"] = [{"type": "function", "id": "a1b2c3d4e", "function": self.call}]
        return message

    def content(self, name: str) -> str:
        """Returns the text that a model of the family writes, without its end of turn."""
        words = self.words
        if self.call:
            arguments = json.dumps(self.call["arguments"], ensure_ascii=False)
            call = f'{{"name": "{self.call["name"]}", "arguments": {arguments}'
            words = {
                "llama3": call.replace('"arguments"', '"parameters"', 1) + "}",
                "mistral": f'[TOOL_CALLS] [{call}, "id": "a1b2c3d4e"}}]',
            }.get(name, f"<tool_call>\n{call}}}\n</tool_call>")
        elif name in ("mistral", "mistral1"):
            words = " " + words
        return f"<think>\n{self.reasoning}\n</think>\n\n{words}" if self.reasoning else words


def as_messages(content) -> list[dict[str, str]]:
    """Returns an environment's messages as the template gets them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [
        {"role": m.role, "content": m.text} | ({"tool_call_id": m.call_id} if m.call_id else {})
        for m in content
    ]


# Texts that an environment may say: any unicode, line breaks and blanks at the ends, and what would
# be control tokens and marks of the families if it were not text.
HOSTILE = [
    *(*END.values(), *SPECIAL_TOKENS, "<|im_start|>", "<start_of_turn>model\n", "[/INST]"),
    *("<|start_header_id|>", "<think>", "</think>", "<bos>", '"}', "{{ messages }}", "\n", "  "),
    *("<unk>", "<s>", "<0x41>"),
]
# And what tokenizers may change: accents apart, blanks that are none, many code points in one sign.
DELICATE = [
    *("e\u0301", "\u0301", "\u212b", "\u1100\u1161\u11a8", "\u2581", "\u2581\u2581 "),
    *(" ", "   ", "\n\n", " \n", "\t", "🙂🙃", "\U0001f469\u200d\U0001f467", "\ufb01"),
]
PARTS = st.one_of(st.text(max_size=12), st.sampled_from(HOSTILE), st.sampled_from(DELICATE))
TEXTS = st.lists(PARTS, min_size=1, max_size=4).map("".join)
# Words that every template leaves as they are: some trim, and Qwen3 looks for reasoning.
SIGNS = st.text(st.one_of(st.characters(exclude_categories=("C", "Z")), st.just(" ")), max_size=9)
WORDS = (
    st.lists(SIGNS | st.sampled_from([t for t in DELICATE if "\n" not in t]), max_size=4)
    .map("".join)
    .map(lambda text: text.strip("\t \u2581") or "so")
)
VALUES = st.dictionaries(st.sampled_from(["city", "größe", "日付"]), WORDS | st.integers(-9, 9))
CALLS = st.builds(lambda a: {"name": "look_up", "arguments": a}, VALUES)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up the “Wetter”: 天気",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclasses.dataclass(frozen=True)
class Script:
    """A conversation: how it is opened, and the turns of both sides."""

    opening: str | tuple[Message, ...]
    tools: tuple[dict, ...]
    turns: tuple[tuple[Reply, str | tuple[Message, ...]], ...]


@st.composite
def scripts(draw, name: str, *, calls: bool = True) -> Script:
    """Conversations that the family's template takes."""
    calls = calls and name in WITH_TOOLS
    opening: Any = draw(TEXTS)
    if draw(st.booleans()):
        user = Message(role="user", text=opening)
        opening = (Message(role="system", text=draw(TEXTS)), user)
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        reasoning = draw(WORDS) if name == "qwen3" and draw(st.booleans()) else ""
        if calls and draw(st.booleans()):
            reply = Reply(reasoning=reasoning, call=draw(CALLS), spelled=draw(st.booleans()))
            many = 1 if name == "llama3" else draw(st.integers(1, 3))
            answer: Any = tuple(
                Message(role="tool", text=draw(TEXTS), call_id="a1b2c3d4e") for _ in range(many)
            )
        else:
            reply = Reply(words=draw(WORDS), reasoning=reasoning, spelled=draw(st.booleans()))
            answer = draw(TEXTS)
        turns.append((reply, answer))
    tools = (TOOL,) if calls and draw(st.booleans()) else ()
    return Script(opening, tools, tuple(turns))


FAMILIES_AND_SCRIPTS = st.sampled_from(NAMES).flatmap(lambda n: st.tuples(st.just(n), scripts(n)))


def sampled_ids(name: str, text: str, *, spelled: bool = False) -> tuple[int, ...]:
    """Ids of a turn as a model samples them: calls are control tokens, words are not."""
    marked = text.startswith("[TOOL_CALLS]")
    mark, words = ("[TOOL_CALLS]", text.removeprefix("[TOOL_CALLS]")) if marked else ("", text)
    plain = byte_ids(words.encode(), tokenizer(name)) if spelled else chat(name).reply(words)[:-1]
    control = tokenizer(name).convert_tokens_to_ids([*([mark] if mark else []), END[name]])
    return (*control[:-1], *plain, control[-1])


# An episode as the collector plays it, in which the test is the engine.
CHUNK, BURST = 5, 3


def begin(conversation: Conversation, script: Script) -> LiveEpisode:
    episode = LiveEpisode(
        task=Task(episode=0, group=0, args={}),
        ticket=0,
        buffer_row=0,
        conversation=conversation,
        limits=Limits(max_turn_tokens=1000),
        stops=Stops(),
    )
    episode.append_message(script.opening, conversation.open(script.opening, script.tools))
    return episode


def read_all(episode: LiveEpisode) -> list[int]:
    """Takes the queued ids off the episode, chunk by chunk, and returns them."""
    news = []
    while len(episode.queue):
        part, number = episode.take(CHUNK)
        news += part[len(part) - number :].tolist()
    return news


def say(episode: LiveEpisode, ids, *, version: int) -> list[float]:
    """The engine samples these, burst by burst, beside another slot. Returns their log-probs."""
    logprobs = []
    for first in range(0, len(ids), BURST):
        part = ids[first : first + BURST]
        logprobs += [-float(episode.length + place) for place in range(len(part))]
        beside = [7] * (BURST - len(part))
        report = RoundOutputs(
            tokens=np.array([[7] * BURST, [*part, *beside]], np.int32),
            logprobs=np.array([[9.0] * BURST, [*logprobs[first:], *beside]], np.float32),
            count=np.array([BURST, len(part)], np.int32),
            active=np.array([True, first + BURST < len(ids)]),
        )
        assert episode.append_sampled(Sampled.of(report, version), 1) == 0
    return logprobs


def sample_of(episode: LiveEpisode, written: list[int]) -> list[int]:
    """Returns the newest of the episode's samples, out of all ids that were written."""
    assert episode.length == len(written)
    return written[episode.finish("over").sample_starts[-1] :]


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(FAMILIES_AND_SCRIPTS)
def test_a_stream_is_what_was_sampled_and_what_was_appended(family_and_script):
    """Texts are the template's while it keeps its prefix, its tail where not.

    The ids are those that went through the engine: `stream` are those that it was given, which no
    policy wrote, and those that it reported; the episode must come to the same, with these authors.
    What it was given is what the tokenizer makes of the template's whole text there.
    """
    name, script = family_and_script
    episode = begin(Conversation(chat(name)), script)
    stream = read_all(episode)
    authors: list[str] = ["environment"] * len(stream)
    logprobs, versions = [], []
    messages = as_messages(script.opening)
    whole = template(name, messages, script.tools)
    assert kept(name, chat(name).decode(stream)) == kept(name, whole)
    assert has_control(script.opening) or stream == ids_of(name, whole)
    keeps, expected = True, whole
    for number, (reply, answer) in enumerate(script.turns):
        text = reply.content(name)
        ids = sampled_ids(name, text, spelled=reply.spelled)
        logprobs += say(episode, ids, version=number)
        versions += [number] * len(ids)
        reply_text, whole_turn = episode.end_turn()
        assert whole_turn and kept(name, reply_text) == kept(name, text)
        observation = episode.conversation.answer(answer)
        assert not observation.forks
        episode.append_message(answer, observation)
        appended_ids = read_all(episode)
        stream += [*ids, *appended_ids]
        authors += ["policy"] * len(ids) + ["environment"] * len(appended_ids)
        messages += [reply.as_message(), *as_messages(answer)]
        spoken, whole = whole + text + END[name], template(name, messages, script.tools)
        keeps &= whole.startswith(spoken)
        appended = text_behind(name, observation.ids)
        assert kept(name, whole).endswith(kept(name, appended))
        expected += text + END[name] + appended
        assert kept(name, chat(name).decode(stream)) == kept(name, expected)
        harmless = Conversation(chat(name))
        harmless.open(without_text(script.opening), script.tools)
        assert control_ids(name, observation.ids) == control_ids(
            name, harmless.answer(without_text(answer)).ids
        )
        if keeps:
            assert kept(name, expected) == kept(name, whole)
            behind = END[name] + whole.removeprefix(spoken)
            known = has_control(script.opening) or has_control(answer)
            assert known or appended_ids == ids_of(name, behind)[1:]
        assert keeps or breaks(name, script, reply, answer)
    trajectory = episode.finish("over")
    turns = trajectory.turns
    assert_is(episode, stream, authors, logprobs)
    assert [number for turn in turns for number in turn.versions] == versions
    assert trajectory.num_policy_tokens == len(logprobs) == authors.count("policy")
    assert trajectory.sample_starts == (0,)


def text_behind(name: str, ids) -> str:
    """Returns the text of ids behind an end of turn, without the blank that mistral1 adds."""
    (end,) = tokenizer(name).convert_tokens_to_ids([END[name]])
    return chat(name).decode([end, *ids]).removeprefix(END[name])


def ids_of(name: str, text: str) -> list[int]:
    """Returns the ids that `transformers` gives for a text of the template."""
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def has_control(content) -> bool:
    """Returns True if an environment's message has the name of a control token in it."""
    texts = [content] if isinstance(content, str) else [message.text for message in content]
    return any(name in text for name in control_names() for text in texts)


@functools.cache
def control_names() -> frozenset[str]:
    added = [t for name in NAMES for t in tokenizer(name).added_tokens_decoder.values()]
    return frozenset(str(token) for token in added if token.special)


def without_text(content):
    """The same messages, with nothing in them that could be taken for control."""
    if isinstance(content, str):
        return "x"
    return tuple(dataclasses.replace(message, text="x") for message in content)


def control_ids(name: str, ids) -> list[int]:
    added = tokenizer(name).added_tokens_decoder
    return [i for i in ids if i in added and added[i].special]


def breaks(name: str, script: Script, reply: Reply, answer) -> bool:
    """Returns True if the family's template may rewrite earlier text at this answer."""
    if name == "qwen3":
        return any(r.reasoning for r, _ in script.turns)
    return name == "mistral" and (bool(script.tools) or not isinstance(script.opening, str))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES).flatmap(lambda n: st.tuples(st.just(n), scripts(n))))
def test_a_forked_sample_begins_with_the_templates_own_text(family_and_script):
    """A fork exactly where the sample's text is no beginning of the template's; and only then."""
    name, script = family_and_script
    episode = begin(Conversation(chat(name), "fork"), script)
    sample = written = read_all(episode)
    authors: list[str] = ["environment"] * len(written)
    logprobs: list[float] = []
    expected = template(name, as_messages(script.opening), script.tools)
    messages = as_messages(script.opening)
    for number, (reply, answer) in enumerate(script.turns):
        ids = sampled_ids(name, reply.content(name), spelled=reply.spelled)
        logprobs += say(episode, ids, version=number)
        content = chat(name).decode([*sample, *ids])
        text, _ = episode.end_turn()
        observation = episode.conversation.answer(answer)
        episode.append_message(answer, observation)
        # The template gets what the policy wrote, as it wrote it.
        messages += [{"role": "assistant", "content": text}, *as_messages(answer)]
        appended = read_all(episode)
        assert appended == list(observation.ids)
        written = [*written, *ids, *appended]
        authors += ["policy"] * len(ids) + ["environment"] * len(appended)
        expected += reply.content(name) + END[name] + text_behind(name, appended)
        assert_is(episode, written, authors, logprobs)
        assert kept(name, chat(name).decode(written)) == kept(name, expected)
        sample = sample_of(episode, written)
        try:
            whole = template(name, messages, script.tools)
        except TemplateError:
            # It takes no second word behind a call that it gets as text: the sample goes on.
            assert (
                name == "mistral" and any(r.call for r, _ in script.turns) and not observation.forks
            )
            opening = chat(name).opening(script.opening, script.tools)
            assert observation.ids == chat(name).answer(answer, opening)
            continue
        whole, content = kept(name, whole), kept(name, content)
        assert observation.forks == (not whole.startswith(content))
        appended = kept(name, text_behind(name, observation.ids))
        assert appended == (whole if observation.forks else whole[len(content) :])
        assert kept(name, chat(name).decode(sample)) == whole
        if observation.forks:
            assert name in ("qwen3", "mistral")
        # Mistral's has a blank before what it takes for words.
        assert not (name == "mistral" and reply.call and not observation.forks)


def assert_is(episode: LiveEpisode, ids, authors, logprobs) -> None:
    """The episode holds these ids, by these authors, sampled with these log-probs."""
    turns = episode.finish("over").turns
    assert [token for turn in turns for token in turn.token_ids] == ids
    assert [turn.author for turn in turns for _ in turn.token_ids] == authors
    assert [number for turn in turns for number in turn.logprobs] == logprobs


# By hand, family by family.

SYSTEM = Message(role="system", text="Be brief.")
ASK = Message(role="user", text=" Hi \n")
ANSWER = Message(role="tool", text='sunny "☀"\n', call_id="a1b2c3d4e")


QWEN = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi \n<|im_end|>\n"
    "<|im_start|>assistant\n",
    "\n<|im_start|>user\n Hi \n<|im_end|>\n<|im_start|>assistant\n",
    '\n<|im_start|>user\n<tool_response>\nsunny "☀"\n\n</tool_response><|im_end|>\n'
    "<|im_start|>assistant\n",
)


@pytest.mark.parametrize(
    ("name", "first", "user", "tool"),
    [
        ("qwen2", *QWEN),
        ("qwen3", *QWEN),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"sunny \\"☀\\"\\n"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "mistral",
            "<s>[INST] Be brief.\n\n Hi \n[/INST]",
            "[INST] Be brief.\n\n Hi \n[/INST]",
            '[TOOL_RESULTS] {"content": sunny "☀"\n, "call_id": "a1b2c3d4e"}[/TOOL_RESULTS]',
        ),
        ("mistral1", "<s>[INST] Be brief.\n\n Hi \n [/INST]", "[INST]  Hi \n [/INST]", None),
        (
            "gemma3",
            "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n",
            "\n<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
            None,
        ),
        (
            "ours",
            "<|user|>system\nBe brief.<|end|><|user|> Hi \n<|end|><|assistant|>",
            "<|user|> Hi \n<|end|><|assistant|>",
            '<|user|>tool a1b2c3d4e\nsunny "☀"\n<|end|><|assistant|>',
        ),
    ],
)
def test_appended_ids_by_hand(name, first, user, tool):
    conversation = Conversation(chat(name))
    assert chat(name).decode(conversation.open((SYSTEM, ASK)).ids) == first
    assert text_behind(name, conversation.answer((ASK,)).ids) == user
    if tool is None:
        with pytest.raises(
            ValueError, match="refuses the messages.*(must alternate|roles are user)"
        ):
            conversation.answer((ANSWER,))
    else:
        assert chat(name).decode(conversation.answer((ANSWER,)).ids) == tool
    assert chat(name).reply("")[-1] == tokenizer(name).convert_tokens_to_ids(END[name])


def test_texts_that_a_template_repeats_must_be_known():
    """Mistral's system message stands in every later question of a user."""
    opening = chat("mistral").opening((SYSTEM, ASK))
    ids = chat("mistral").answer("So?", opening)
    assert chat("mistral").decode(ids) == "[INST] Be brief.\n\nSo?[/INST]"
    with pytest.raises(ValueError, match="says again how the conversation began"):
        chat("mistral").answer("So?", dataclasses.replace(opening, texts=()))


def test_two_responses_of_tools_are_one_turn_where_the_template_says_so():
    ids = chat("qwen2").answer((ANSWER, dataclasses.replace(ANSWER, text="42")))
    text = chat("qwen2").decode(ids)
    assert text.count("<|im_start|>user") == 1
    assert text.index("sunny") < text.index("</tool_response>\n<tool_response>\n42\n")


@pytest.mark.parametrize("name", ["gemma3", "mistral1"])
def test_tools_that_the_template_would_swallow_are_refused(name):
    with pytest.raises(ValueError, match="no place for tools"):
        chat(name).first("go", [TOOL])


@pytest.mark.parametrize("word", ["<|im_end|>", "earl-opening<0>"])
def test_tools_and_call_ids_cannot_write_control_tokens(word):
    """They stand where only the template writes."""
    for render in (
        lambda: chat("qwen2").first("go", [TOOL | {"note": f"a{word}"}]),
        lambda: chat("qwen2").answer((dataclasses.replace(ANSWER, call_id=word),)),
    ):
        with pytest.raises(ValueError, match="must not contain"):
            render()


def test_a_call_id_that_the_template_wants_is_asked_for():
    with pytest.raises(ValueError, match="refuses the messages.*nine characters"):
        chat("mistral").answer((Message(role="tool", text="42"),))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen2", ["<|im_end|>", "<|endoftext|>"]),
        ("llama3", ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
        ("mistral", ["</s>"]),
        ("gemma3", ["<end_of_turn>", "<eos>"]),
        ("ours", ["<|end|>"]),
    ],
)
def test_a_turn_ends_with_any_of_the_familys_ends(name, ends):
    """The template's own first, with which an example reply ends."""
    ids = tokenizer(name).convert_tokens_to_ids(ends)
    assert chat(name).end_of_turn_ids == tuple(ids)
    (four,) = chat(name).reply("4")[:-1]
    assert chat(name).reply("4") == (four, ids[0])
    for end in ids:
        conversation = Conversation(chat(name))
        conversation.open("go")
        assert conversation.reply([four, end]) == ("4", True)
        assert conversation.answer("5").ids == chat(name).answer("5")
    assert Conversation(chat(name)).reply([four]) == ("4", False)


def test_qwen3_forgets_its_reasoning_only_where_the_user_asks_again():
    conversation = Conversation(chat("qwen3"), "fork")
    conversation.open("What?")
    conversation.reply(
        sampled_ids("qwen3", "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>")
    )
    assert not conversation.answer((ANSWER,)).forks
    conversation.reply(sampled_ids("qwen3", "<think>\naha\n</think>\n\nSunny."))
    observation = conversation.answer("Sure?")
    assert observation.forks
    assert chat("qwen3").decode(observation.ids) == (
        "<|im_start|>user\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\nsunny "☀"\n\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nSunny.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Without reasoning nothing is rewritten, and nothing forks.
    conversation.reply(sampled_ids("qwen3", "Yes."))
    assert conversation.answer("Thanks.").ids == chat("qwen3").answer("Thanks.")


def test_mistrals_template_forks_at_a_call_and_refuses_what_comes_behind_it():
    """It gets the call as words, which it writes a blank before, and which then are a turn."""
    conversation = Conversation(chat("mistral"), "fork")
    conversation.open("What?")
    conversation.reply(sampled_ids("mistral", '[TOOL_CALLS] [{"name": "look_up"}]'))
    observation = conversation.answer((ANSWER,))
    assert observation.forks
    assert chat("mistral").decode(observation.ids) == (
        '<s>[INST] What?[/INST] [TOOL_CALLS] [{"name": "look_up"}]</s>'
        '[TOOL_RESULTS] {"content": sunny "☀"\n, "call_id": "a1b2c3d4e"}[/TOOL_RESULTS]'
    )
    conversation.reply(sampled_ids("mistral", " Sunny."))
    assert conversation.answer("Sure?") == Observation(chat("mistral").answer("Sure?"))


def test_a_fork_keeps_an_environments_text_a_text():
    """Also where the text is told anew, and where the policy quotes the renderer's stand-ins."""
    conversation = Conversation(chat("qwen3"), "fork")
    conversation.open("<|im_end|><|im_start|>earl-message<0>")
    conversation.reply(sampled_ids("qwen3", "<think>\nx\n</think>\n\nearl-message<0> earl-reply"))
    observation = conversation.answer("earl-message<1><|im_end|>")
    assert observation.forks
    end = chat("qwen3").end_of_turn_id
    assert observation.ids.count(end) == 3
    assert chat("qwen3").decode(observation.ids) == (
        "<|im_start|>user\n<|im_end|><|im_start|>earl-message<0><|im_end|>\n"
        "<|im_start|>assistant\nearl-message<0> earl-reply<|im_end|>\n"
        "<|im_start|>user\nearl-message<1><|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "opening", "tools", "words"),
    [
        ("qwen2", "go", (), None),
        ("qwen2", "go", (TOOL,), None),
        ("llama3", (SYSTEM, ASK), (TOOL,), None),
        ("gemma3", (SYSTEM, ASK), (), None),
        ("qwen3", "go", (), "drops earlier reasoning"),
        ("mistral", "go", (), None),
        ("mistral", "go", (TOOL,), "moves what it wrote at the beginning"),
        ("mistral", (SYSTEM, ASK), (), "moves what it wrote at the beginning"),
    ],
)
def test_a_template_that_rewrites_is_named_once(name, opening, tools, words, caplog):
    renderer = ChatRenderer(load_tokenizer(FOLDERS / name))
    with caplog.at_level(logging.WARNING, logger="earl_jax"):
        for _ in range(3):
            Conversation(renderer).open(opening, tools)
    content = [record.getMessage() for record in caplog.records]
    assert len(content) == (words is not None)
    assert words is None or (words in content[0] and "config.chat.history" in content[0])


def test_arguments_of_the_template_are_given_to_it_at_every_turn():
    """Qwen3 without thinking: the policy speaks behind reasoning that is empty."""
    qwen3 = tokenizer("qwen3")
    renderer = ChatRenderer(qwen3, template_arguments={"enable_thinking": False})
    written = qwen3.apply_chat_template(
        [{"role": "user", "content": "go"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert renderer.decode(renderer.first("go")) == written
    assert written.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert renderer.decode(renderer.answer("on")) == (
        "\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    thinking = ChatRenderer(qwen3, template_arguments={"enable_thinking": True})
    assert thinking.first("go") == ChatRenderer(qwen3).first("go")


@pytest.mark.parametrize(
    ("name", "argument"),
    [("qwen2", "enable_thinking"), ("qwen3", "enable_thinkin"), ("qwen3", "messages")],
)
def test_an_argument_that_a_template_does_not_read_is_an_error(name, argument):
    with pytest.raises(ValueError, match=f"template_arguments has '{argument}', which the chat"):
        ChatRenderer(tokenizer(name), template_arguments={argument: False})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, r"'<\|user\|>said.*it must keep text"),
        ({"normalizer": {"type": "NFKC"}}, "fiVIII.*it must keep text"),
        ({"normalizer": {"type": "StripAccents"}}, "it must keep text"),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "keep text"),
        ({"rstrip": True}, "other ids as a whole than in parts.*rstrip"),
        ({"lstrip": True}, "other ids as a whole than in parts.*lstrip"),
    ],
)
def test_a_tokenizer_that_changes_text_is_refused(changed, message):
    """More than by composing characters, or by taking "▁" for a blank."""
    lossy = build_tokenizer([], 260)
    content = json.loads(lossy.backend_tokenizer.to_str())
    if "normalizer" in changed:
        content |= changed
    else:
        content["added_tokens"] = [token | changed for token in content["added_tokens"]]
    lossy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    lossy.chat_template = CHAT_TEMPLATE
    if "normalizer" in changed:
        lossy.chat_template = CHAT_TEMPLATE.replace("<|user|>{{", "<|user|>Said: {{")
    with pytest.raises(ValueError, match=message):
        ChatRenderer(lossy)


def test_a_tokenizer_that_leaves_letters_out_is_refused():
    """As a byte-level one is whose trainer was given no alphabet."""
    lossy = build_tokenizer([], 260)
    content = json.loads(lossy.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab["unused"] = vocab.pop("z")
    lossy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    lossy.chat_template = CHAT_TEMPLATE
    with pytest.raises(ValueError, match="has no tokens for 'z', and none that says so"):
        ChatRenderer(lossy)


def test_a_template_that_is_none_is_an_error_with_its_file(tmp_path):
    save_tokenizer(build_tokenizer([], 260), tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for m in messages %}")
    with pytest.raises(ValueError, match=f"^{template}: the chat template refuses the messages: "):
        ChatRenderer(load_tokenizer(tmp_path))


def test_a_template_that_fails_at_all_refuses_the_messages():
    broken = build_tokenizer([], 260)
    broken.chat_template = "{{ 1 / 0 }}" + CHAT_TEMPLATE
    with pytest.raises(ValueError, match="refuses the messages: ZeroDivisionError"):
        ChatRenderer(broken)


@pytest.mark.parametrize(
    ("name", "first", "answer"),
    [
        (
            "mistral",
            "<s> [INST] ▁the ▁ e <0xCC> <0x81> ▁ <0xE2> <0x98> <0x83> [/INST]",
            "[INST] ▁the [/INST]",
        ),
        # v0.1's have a blank behind every control token, which `decode` knows.
        (
            "mistral1",
            "<s> ▁ [ I N S T ] ▁the ▁ e <0xCC> <0x81> ▁ <0xE2> <0x98> <0x83> ▁ [ / I N S T ]",
            "▁ [ I N S T ] ▁the ▁ [ / I N S T ]",
        ),
        (
            "gemma3",
            "<bos> <start_of_turn> user \n t he ▁ e <0xCC> <0x81> ▁ <0xE2> <0x98> <0x83> "
            "<end_of_turn> \n <start_of_turn> mo de l \n",
            "\n <start_of_turn> user \n t he <end_of_turn> \n <start_of_turn> mo de l \n",
        ),
        (
            "qwen3",
            "<|im_start|> user Ċ t he Ġ Ã © Ġ â ĺ ĥ <|im_end|> Ċ <|im_start|> a s sis tant Ċ",
            "Ċ <|im_start|> user Ċ t he <|im_end|> Ċ <|im_start|> a s sis tant Ċ",
        ),
    ],
)
def test_the_ids_of_the_middle_of_a_text_by_hand(name, first, answer):
    """No blank that nobody wrote; the template's own blank is one token with the word behind it."""
    tokens = tokenizer(name).convert_ids_to_tokens
    assert tokens(list(chat(name).first("the e\u0301 \u2603"))) == first.split(" ")
    assert tokens(list(chat(name).answer("the"))) == answer.split(" ")
    # A reply that begins with a blank keeps it, and one that does not gets none.
    for text in ("the", " the", "  the\n"):
        assert chat(name).decode_reply(chat(name).reply(text)) == text


def test_a_text_on_which_the_template_acts_is_an_error_of_its_own():
    odd = build_tokenizer([], 260)
    odd.chat_template = CHAT_TEMPLATE.replace(
        "<|user|>{{ message['content'] }}",
        "{{ '<|assistant|>' if 'sudo' in message['content'] else '<|user|>' }}"
        "{{ message['content'] | trim }}",
    )
    renderer = ChatRenderer(odd)
    assert renderer.decode(renderer.first(" ls ")) == "<|user|>ls<|end|><|assistant|>"
    with pytest.raises(ValueError, match="something else around the text ' sudo ls'"):
        renderer.first(" sudo ls")


def test_tokenizers_in_the_repository_are_those_of_the_script(tmp_path):
    import sys

    sys.path.insert(0, str(FOLDERS))
    try:
        from make_tokenizers import FAMILIES, make
    finally:
        sys.path.remove(str(FOLDERS))
    for name in FAMILIES:
        folder = tmp_path / name
        make(name, folder)
        made, here = load_tokenizer(folder), tokenizer(name)
        assert made.get_vocab() == here.get_vocab()
        assert made.chat_template == here.chat_template
        assert made.special_tokens_map == here.special_tokens_map
        for text in [*HOSTILE, *END.values(), "“Wetter” in Paris: naïve 天気\n\n 42"]:
            for split in (False, True):
                ids = [t(text, split_special_tokens=split)["input_ids"] for t in (made, here)]
                assert ids[0] == ids[1]
        expected = [f / "generation_config.json" for f in (folder, FOLDERS / name)]
        assert expected[0].read_text() == expected[1].read_text()
        assert sum(path.stat().st_size for path in (FOLDERS / name).iterdir()) < 60_000
