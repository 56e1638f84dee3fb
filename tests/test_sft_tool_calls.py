# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in a file of conversations: as each family's template writes them."""

import json
from pathlib import Path

import pytest

from earl_jax.envs.environment import Message
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.chat_dataset import ChatDataset, texts_of
from earl_jax.envs.text.conversation import Conversation
from earl_jax.envs.text.tokenizer import CHAT_TEMPLATE, build_tokenizer, load_tokenizer

FOLDERS = Path(__file__).parent / "tokenizers"
END = {"qwen2": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}
ID = "a1b2c3d4e"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def tokenizer(name: str):
    return build_tokenizer([], 260) if name == "ours" else load_tokenizer(FOLDERS / name)


def call(arguments='{"city": "Zürich", "days": 2}', name="look_up", identifier=ID) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def talk(*calls, content=None, **others) -> list[dict]:
    """A question, a message with these calls, their answers, and the last word."""
    answers = [
        {"role": "tool", "tool_call_id": each["id"], "name": "look_up", "content": "sunny"}
        for each in calls
    ]
    return [
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls), **others},
        *answers,
        {"role": "assistant", "content": "Sunny."},
    ]


def dataset(tmp_path, name, *talks, tools=(), renderer=None) -> ChatDataset:
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(json.dumps({"messages": t, "tools": list(tools)}) for t in talks))
    renderer = renderer or ChatRenderer(tokenizer(name))
    return ChatDataset(str(path), renderer, seed=0, most_tokens=1000, limit="a limit")


def learnt(tmp_path, name, messages, **others) -> list[str]:
    """The text of each turn that is learnt."""
    ((ids, turn_ids),) = dataset(tmp_path, name, messages, **others).batch(0, 1)
    turns = range(1, max(turn_ids) + 1)
    own = [[i for i, turn in zip(ids, turn_ids, strict=True) if turn == one] for one in turns]
    return [ChatRenderer(tokenizer(name)).decode(each) for each in own]


def as_objects(messages: list[dict]) -> list[dict]:
    """The messages as the documentation of `transformers` has them: arguments are objects."""
    found = json.loads(json.dumps(messages))
    for each in (each for message in found for each in message.get("tool_calls", ())):
        each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    return found


HERMES = (
    '<tool_call>\n{"name": "look_up", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
)
WRITTEN = {
    "qwen2": HERMES,
    "qwen3": HERMES,
    "llama3": '{"name": "look_up", "parameters": {"city": "Zürich", "days": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "look_up", "arguments": {"city": "Zürich", "days": 2}, '
    '"id": "a1b2c3d4e"}]',
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["", "tools"])
def test_a_call_is_learnt_as_the_family_writes_it(tmp_path, name, tools):
    """By hand; and all ids are those of the template's text, where it does not move on."""
    messages = talk(call())
    blank = " " if name == "mistral" else ""
    end = END[name]
    assert learnt(tmp_path, name, messages, tools=tools) == [
        WRITTEN[name] + end, f"{blank}Sunny.{end}",
    ]  # fmt: skip
    ((ids, turn_ids),) = dataset(tmp_path, name, messages, tools=tools).batch(0, 1)
    asked_again = [*as_objects(messages), {"role": "user", "content": "x"}]
    if name == "mistral" and tools:
        return
    whole = tokenizer(name).apply_chat_template(
        asked_again, tools=list(tools) or None, tokenize=False
    )
    expected = tokenizer(name)(whole, add_special_tokens=False)["input_ids"]
    assert ids == expected[: len(ids)]
    # The question, what stands around it, and the answer of the tool.
    first, last = turn_ids.index(1), turn_ids.index(2)
    assert set(turn_ids[:first]) == {0} and turn_ids[last - 1] == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_ids_are_those_of_an_episode_whose_policy_writes_the_call(tmp_path, name):
    chat = ChatRenderer(tokenizer(name))
    mark, words = "", WRITTEN[name]
    if name == "mistral":
        mark, words = "[TOOL_CALLS]", words.removeprefix("[TOOL_CALLS]")
    marks = tokenizer(name).convert_tokens_to_ids([mark]) if mark else []
    conversation = Conversation(chat)
    ids = list(conversation.open("And then?").ids)
    said = [*marks, *chat.reply(words)]
    assert conversation.reply(said) == (WRITTEN[name], True)
    answer = (Message(role="tool", text="sunny", call_id=ID, name="look_up"),)
    ids += [*said, *conversation.answer(answer).ids]
    ((found, _),) = dataset(tmp_path, name, talk(call())).batch(0, 1)
    assert found[: len(ids)] == ids


def test_words_reasoning_and_several_calls_stand_before_each_other_as_the_template_says(tmp_path):
    other = call('{"city": "Bern"}')
    second = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Bern"}}\n</tool_call>'
    for name in ("qwen2", "qwen3"):
        (text, _) = learnt(tmp_path, name, talk(call(), other, content="I look."))
        assert text == f"I look.\n{HERMES}\n{second}<|im_end|>"
    reasoned = "<think>\nhm\n</think>\n\n"
    (text, _) = learnt(tmp_path, "qwen3", talk(call(), content=reasoned))
    assert text == f"{reasoned}{HERMES}<|im_end|>"
    (text, _) = learnt(tmp_path, "qwen3", talk(call(), content=f"{reasoned}I look."))
    assert text == f"{reasoned}I look.\n{HERMES}<|im_end|>"
    # Behind reasoning that the template writes before the policy's turn.
    silent = ChatRenderer(tokenizer("qwen3"), template_arguments={"enable_thinking": False})
    (text, _) = learnt(tmp_path, "qwen3", talk(call()), renderer=silent)
    assert text == f"{HERMES}<|im_end|>"


def test_arguments_may_be_an_object_and_a_weight_masks_a_call(tmp_path):
    given = call({"city": "Zürich", "days": 2})
    assert learnt(tmp_path, "qwen2", talk(given))[0] == f"{HERMES}<|im_end|>"
    assert learnt(tmp_path, "qwen2", talk(given, weight=0)) == ["", "Sunny.<|im_end|>"]


def test_a_template_that_shows_the_name_of_a_tool_is_given_it(tmp_path):
    ours = build_tokenizer([], 260)
    ours.chat_template = CHAT_TEMPLATE.replace("message['tool_call_id']", "message['name']")
    messages = talk(call())
    messages[1] = {"role": "assistant", "content": "look_up()"}
    found = dataset(tmp_path, "", messages, renderer=ChatRenderer(ours)).batch(0, 1)
    assert "<|user|>tool look_up\nsunny<|end|>" in ours.decode(found[0][0])


def test_texts_for_a_tokenizer_are_those_of_the_messages(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": talk(call())}))
    assert texts_of(str(path)) == ["And then?", "", "sunny", "Sunny."]


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma3", talk(call()), "the chat template does not write tool_calls; write the calls"),
        ("ours", talk(call()), "the chat template does not write tool_calls; write the calls"),
        ("llama3", talk(call(), call()), "refuses the messages: .*one tool at a time"),
        ("mistral", talk(call(identifier="1")), "refuses the messages: .*nine characters"),
        ("llama3", talk(call(), content="I look."), "leaves out the content .*'I look.'"),
        ("mistral", talk(call(), content="I look."), "leaves out the content .*'I look.'"),
        ("qwen2", talk(call('{"a": "<|im_end|>"}')), "must not contain '<|im_end|>'"),
        ("qwen2", talk(call("{")), "arguments of a call in message 2 of 4 are no JSON: Expecting"),
        ("qwen2", talk(call("[1]")), "tool_calls of message 2 of 4 has .*JSON of an object"),
        ("qwen2", talk(call(name=None)), "tool_calls of message 2 of 4 has .*each must be"),
        ("qwen2", talk({"id": ID, "type": "function"}), "tool_calls of message 2 of 4 has"),
        ("qwen2", talk(), "the content of message 2 of 3 is None; give a text"),
    ],
)
def test_a_call_that_cannot_be_learnt_is_an_error_that_names_its_line(
    tmp_path, name, messages, words
):
    good = [{"role": "user", "content": "5"}, {"role": "assistant", "content": "6"}]
    with pytest.raises(ValueError, match=f"talks.jsonl, line 2: .*{words}.*sft_path"):
        dataset(tmp_path, name, good, messages)
