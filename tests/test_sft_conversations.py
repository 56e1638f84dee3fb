# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised updates on a file of conversations: their ids, order, errors, and a run of them."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from earl_jax.config.config import Config
from earl_jax.config.file import DEFAULT_CONFIG, given_config, load_config_file
from earl_jax.config.file import make_config as file_config
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.chat_dataset import ChatDataset
from earl_jax.envs.text.tokenizer import build_tokenizer, load_tokenizer, save_tokenizer
from earl_jax.loop import rl_step
from earl_jax.placement.packing import supervised_parts
from earl_jax.run.build import build_run, with_conversations
from earl_jax.run.supervised_step import supervised_step
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support import ROOT
from tests.support.forward import row_logits
from tests.support.placements import EIGHT_SLOTS, TINY, begin, place
from tests.support.runs import check_replay, check_resume
from tests.support.settings import make_config
from tests.support.talks import sums, talk

FOLDERS = Path(__file__).parent / "tokenizers"
PAD, USER, ASSISTANT, END = range(4)
OURS = build_tokenizer([], 260)


def dataset(tmp_path, *lines, tokenizer=OURS, most_tokens=1000, **others) -> ChatDataset:
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(lines))
    arguments = {"seed": 3, "most_tokens": most_tokens, "limit": "a limit"} | others
    return ChatDataset(str(path), ChatRenderer(tokenizer), **arguments)


def first(tmp_path, line, **others):
    (example,) = dataset(tmp_path, line, **others).batch(0, 1)
    return example


def ids_of(text: str) -> list[int]:
    return OURS(text, add_special_tokens=False)["input_ids"]


# Ids.


def test_the_assistants_tokens_and_ends_of_turn_are_learnt_and_no_others(tmp_path):
    (five,), (six,), (seven,), (eight,) = map(ids_of, "5678")
    line = talk(("user", "5"), ("assistant", "6"), ("user", "7"), ("assistant", "8"))
    ids, turn_ids = first(tmp_path, line)
    assert ids == [USER, five, END, ASSISTANT, six, END, USER, seven, END, ASSISTANT, eight, END]
    assert turn_ids == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 2, 2]


def test_a_weight_of_0_masks_a_message_and_what_follows_the_last_reply_is_left_out(tmp_path):
    line = talk(("user", "5"), ("assistant", "6", 0), ("user", "7"), ("assistant", "8", 1))
    assert first(tmp_path, line)[1] == [0] * 10 + [2, 2]
    line = talk(("user", "5"), ("assistant", "6"), ("user", "7"))
    assert first(tmp_path, line) == first(tmp_path, talk(("user", "5"), ("assistant", "6")))


def test_mask_is_the_templates_own_for_every_kind_of_message(tmp_path):
    """By `transformers` and the marks of generation in our template; with a tool that is shown."""
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?", "name": None},
        {"role": "assistant", "content": "clock()"},
        {"role": "tool", "content": "12:00", "tool_call_id": "7"},
        {"role": "tool", "content": "late"},
        {"role": "assistant", "content": "It is 12:00."},
    ]
    line = json.dumps({"messages": messages, "tools": [tool], "id": 7})
    ids, turn_ids = first(tmp_path, line)
    whole = OURS.apply_chat_template(
        messages, tools=[tool], return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == whole["input_ids"]
    assert [int(turn > 0) for turn in turn_ids] == whole["assistant_masks"]
    assert set(turn_ids) == {0, 1, 2}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3", "mistral", "gemma3"])
def test_ids_are_those_of_the_familys_template(tmp_path, name):
    tokenizer = load_tokenizer(FOLDERS / name)
    pairs = (
        ("user", "Why not?"),
        ("assistant", " So be it.\n"),
        ("user", "Ha"),
        ("assistant", "Yes"),
    )
    ids, turn_ids = first(tmp_path, talk(*pairs), tokenizer=tokenizer)
    # Not the last turn, where Qwen3's template writes an empty block of reasoning.
    messages = [{"role": role, "content": content} for role, content in (*pairs, ("user", "x"))]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"][: len(ids)]
    learnt = [
        ChatRenderer(tokenizer).decode(np.array(ids)[np.array(turn_ids) == turn]) for turn in (1, 2)
    ]
    end, trims = tokenizer.decode(ids[-1]), name in ("llama3", "mistral", "gemma3")
    blank = " " if name == "mistral" else ""
    assert learnt == [blank + ("So be it." if trims else " So be it.\n") + end, blank + "Yes" + end]


def test_a_conversation_forks_where_an_episode_would(tmp_path):
    """Qwen3's template drops reasoning where the user asks again."""
    tokenizer = load_tokenizer(FOLDERS / "qwen3")
    line = talk(
        ("user", "What?"),
        ("assistant", "<think>\nhm\n</think>\n\nSunny."),
        ("user", "Sure?"),
        ("assistant", "Yes."),
    )
    found = dataset(tmp_path, line, tokenizer=tokenizer, history="fork")
    texts = {
        (tokenizer.decode(ids), tokenizer.decode([i for i, t in zip(ids, turns) if t]))  # noqa: B905
        for ids, turns in found.batch(0, 2)
    }
    asked = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    reasoned, sure = "<think>\nhm\n</think>\n\nSunny.<|im_end|>", "Yes.<|im_end|>"
    again = "Sunny.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == {(asked + reasoned, reasoned), (asked + again + sure, sure)}
    assert "1 conversations in 2 samples, of up to" in str(found)
    # Appended to, it is one sample, as an episode is.
    (whole,) = dataset(tmp_path, line, tokenizer=tokenizer).batch(0, 1)
    assert tokenizer.decode(whole[0]).count("hm") == 1 and max(whole[1]) == 2


# Order.


def test_each_pass_has_every_conversation_once_in_an_order_of_seed_and_pass(tmp_path):
    lines = [talk(("user", "?"), ("assistant", str(number))) for number in range(5)]
    found = dataset(tmp_path, *lines[:2], "", *lines[2:])

    def order(found, updates) -> list[int]:
        batches = [found.batch(number, 2) for number in updates]
        return [int(OURS.decode(ids[-2])) for batch in batches for ids, _ in batch]

    expected = [np.random.default_rng([3, number]).permutation(5).tolist() for number in range(2)]
    assert order(found, range(5)) == expected[0] + expected[1]
    assert expected[0] != expected[1]
    # A function of the number of the update alone: that of a resumed run.
    later = [*expected[1][1:3], expected[0][4], expected[1][0]]
    assert order(dataset(tmp_path, *lines), (3, 2)) == later
    other = np.random.default_rng([4, 0]).permutation(5).tolist()
    assert order(dataset(tmp_path, *lines, seed=4), (0, 1)) == other[:4]


def test_other_conversations_are_not_gone_on_with(tmp_path):
    lines = [talk(("user", "?"), ("assistant", str(number))) for number in range(3)]
    kept = dataset(tmp_path, *lines).state()
    dataset(tmp_path, *lines).restore(kept)
    with pytest.raises(ValueError, match="whose 2 conversations are not the 3 that this run"):
        dataset(tmp_path, *lines[:2]).restore(kept)


# Errors.

GOOD = talk(("user", "5"), ("assistant", "6"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("\xff", "Expecting value"),
        ("[1]", "it must be a JSON object"),
        ('{"message": []}', "'messages' is None; it must be a list of messages such as"),
        ('{"messages": []}', "'messages' is .*; it must be a list of messages"),
        ('{"messages": ["x"]}', "message 1 of 1 is 'x'; it must be an object with a 'role', one"),
        (talk(("developer", "x")), "one of system, user, tool and assistant, and a 'content'"),
        (talk(("user", "x"), ("user", "y")), "no message is the assistant's, or all of them have"),
        (talk(("user", "x"), ("assistant", "y", 0)), "weight 0: there is nothing to learn"),
        (talk(("assistant", "y")), "message 1 of 1 is the assistant's with no message of another"),
        (talk(*[("user", "x")], *[("assistant", "y")] * 2), "message 3 of 3 is the assistant's"),
        (talk(("user", ["x"])), r"the content of message 1 of 1 is \['x'\]; give a text"),
        (talk(("user", "x"), ("assistant", None)), "the content of message 2 of 2 is None"),
        (talk(("user", "x"), ("assistant", "y", 2)), "weight of message 2 of 2 is 2; it must be 0"),
        (talk(("user", "x", 1)), "has the key 'weight'; the user's messages have role, content"),
        (
            '{"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}',
            "has the key 'tool_calls'; the user's messages have role, content",
        ),
        (talk(("user", "x"), ("assistant", "y"), tools="clock"), "'tools' is 'clock'; it must be"),
        (talk(("user", "\ud800"), ("assistant", "y")), "cannot be encoded as UTF-8"),
    ],
)
def test_a_line_that_is_no_conversation_is_an_error_that_names_it(tmp_path, line, words):
    with pytest.raises(ValueError, match=f"talks.jsonl, line 3: .*{words}.*sft_path"):
        dataset(tmp_path, GOOD, "", line)


def test_a_file_without_conversations_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="config.train.sft_path is .*, which holds no rows"):
        dataset(tmp_path, "", "")
    monkeypatch.chdir(tmp_path)
    words = f"config.train.sft_path is 'none', .*: No such .*the current folder is {tmp_path}"
    with pytest.raises(ValueError, match=words):
        ChatDataset("none", ChatRenderer(OURS), seed=0, most_tokens=1, limit="a limit")


def test_a_conversation_that_is_too_long_is_an_error_that_names_it_and_counts_the_others(tmp_path):
    """GOOD has 6 tokens; each digit more is one more."""
    long = talk(("user", "55"), ("assistant", "66"))
    dataset(tmp_path, GOOD, long, most_tokens=8)
    words = (
        "line 2: the conversation has 8 tokens, more than a limit, and so have 2 of 4; shorten or "
        "remove these lines"
    )
    with pytest.raises(ValueError, match=words):
        dataset(tmp_path, GOOD, long, GOOD, long, most_tokens=7)


# Settings.


class Silent:
    """An environment without example replies."""

    def start(self):
        raise NotImplementedError

    def step(self, reply):
        raise NotImplementedError


# Instead of what the settings of tests have (SMALL).
PLAIN = {"entropy_coefficient": 0.0}
SILENT = {"env": {"name": f"{__name__}:Silent"}}


def test_an_environment_needs_no_examples_beside_conversations():
    for train_by in ({"sft_steps": 3}, {"sft_weight": 0.5}):
        with pytest.raises(ValueError, match="or name a file of conversations in config.train.sft"):
            make_config({**SILENT, "train": train_by})
        make_config({**SILENT, "train": {**train_by, "sft_path": "talks.jsonl"}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"sft_path": "x"}}, "sft_path = 'x' has no effect .*sft_steps is 0 and"),
        ({"algorithm": "sft"}, "'sft' with no config.train.sft_path; .*name a file of convers"),
        (
            {
                "algorithm": "sft",
                "train": {"sft_path": "x", "sft_steps": 2, "epochs": 2, **PLAIN},
                "devices": {"num_rollout": 4},
            },
            "config.train.sft_steps = 2 has no effect in this run, because config.algorithm 'sft' "
            "makes supervised updates alone; config.train.epochs = 2 has no effect in this run, "
            r"because a step .*\(num_steps says how many\); config.devices.num_rollout = 4 has no "
            "effect in this run, because config.algorithm 'sft' plays nothing; remove these",
        ),
        (
            {"algorithm": "sft", "train": {"sft_path": "x", **PLAIN, "entropy_coefficient": 0.1}},
            "entropy_coefficient = 0.1 has no effect .*cross-entropy of tokens that nobody sampled",
        ),
    ],
)
def test_settings_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=words):
        make_config(given)


FILES = sorted((ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_two_overrides_make_a_run_on_conversations_of_any_config(file):
    """The file's settings of rollouts, rewards and further updates take their defaults."""
    supervised = ["algorithm=sft", "train.sft_path=x", "model.path=/here"]
    config = file_config(load_config_file(file), supervised[: 3 if "qwen" in file.stem else 2])
    train = config.train
    assert not config.plays and config.algorithm_args == Config.defaults(config).algorithm_args
    assert (train.sft_steps, train.sft_weight, train.epochs, train.mini_batches) == (0, 0, 1, 1)
    assert train.entropy_coefficient == train.final_entropy_coefficient == 0
    # What means the same for it stays.
    as_given = load_config_file(file).get("train", {})
    for name in {"learning_rate", "schedule", "micro_batches", "remat"} & set(as_given):
        assert getattr(train, name) == as_given[name]


def test_the_default_config_has_no_budget_for_conversations():
    """Its own is for short walks; that of a file that is named stays."""
    supervised = ["algorithm=sft", "train.sft_path=x"]
    config = file_config(given_config(None, supervised)[0], supervised)
    assert config.selector == Config().selector and config.train.learning_rate == 4e-3
    given = given_config(DEFAULT_CONFIG, supervised)[0]
    assert file_config(given, supervised).selector.budget_bytes_per_device == 1_900_000


def test_settings_without_effect_beside_sft_are_named_together():
    supervised = ["algorithm=sft", "train.sft_path=x", "train.epochs=3", "train.mini_batches=3"]
    words = "config.train.epochs = 3 .*; config.train.mini_batches = 3 .*; remove these$"
    with pytest.raises(ValueError, match=words) as error:
        file_config(load_config_file(DEFAULT_CONFIG), supervised)
    assert "sft_steps" not in str(error.value)


def test_a_run_on_conversations_alone_scores_the_untempered_policy():
    given = {"train": {"sft_path": "x", "sft_steps": 1, **PLAIN}, "rollout": {"temperature": 0.5}}
    assert make_config(given).train_temperature == 0.5
    assert make_config(given, ["algorithm=sft"]).train_temperature == 1.0


# Updates.


def settings(path, **others) -> dict:
    given = {
        "num_steps": 4,
        "model": TINY,
        "rollout": {**EIGHT_SLOTS, "context_buckets": (32, 64)},
        "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
        "train": {"sft_path": str(path), "learning_rate": 3e-3, "entropy_coefficient": 0.0},
        "eval": {"every_steps": 100, "games": 8, "final_games": 8},
        "checkpoint": {"every_steps": 1, "keep": 5},
    }
    return {**given, **others, "train": given["train"] | others.get("train", {})}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Eleven conversations, of which one is longer than any game of Tic-Tac-Toe."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("\n".join([*sums(10), talk(("user", "a" * 40), ("assistant", "Indeed."))]))
    save_tokenizer(OURS, file.parent / "tokenizer")
    return file


def built(path, **others):
    """A run from scratch whose tokens are bytes."""
    return build_run(make_config(settings(path, **others)), path.parent / "tokenizer")


@pytest.fixture(scope="module")
def world(path):
    """A run on conversations alone, from scratch."""
    return with_conversations(built(path, algorithm="sft"))


def test_the_tokenizer_of_a_model_from_scratch_knows_the_conversations(path):
    config = make_config(settings(path, algorithm="sft"))
    texts = config.corpus()
    assert texts[:4] == ["0 + 1?", "1", "1 + 1?", "2"] and len(texts) > 22


def test_conversations_are_whole_and_the_selector_plans_for_the_longest(world, path):
    """The environment's examples are cut at the rollouts' contexts of 32 tokens.

    The longest conversation has 40 bytes, 7 bytes and 4 control tokens.
    """
    longest = world.stages.example_tokens
    assert longest == 51
    placement, _ = begin(world)
    assert placement.length == 64
    examples = [*world.tasks.examples(0, 1)[0], *world.tasks.examples(1, 1)[0]][:11]
    long = [example for example in examples if len(example[0]) == longest]
    assert len(long) == 1
    (part,) = supervised_parts(placement, [*long * 2, *examples[:6]], 32, 1)
    assert part.length == 64
    assert part.num_tokens == 2 * longest + sum(len(ids) for ids, _ in examples[:6])
    plain = built(path, train={"sft_path": ""})
    placement = place(plain)
    placement.choose_step(32, None)
    assert placement.length == 32
    (part,) = supervised_parts(placement, long * 8, 32, 1)
    assert (part.length, part.num_tokens) == (32, 8 * 32)


def test_a_step_is_an_update_by_the_cross_entropy_of_its_conversations(world):
    """By the logits of the model's own forward pass, one conversation at a time."""
    placement, position = begin(world)
    examples = world.tasks.examples(0, 1)[0]
    params = jax.tree.map(np.asarray, world.learner.policy(position.state))
    row, segments = np.zeros((2, 8, 64), np.int32)
    for index, (ids, _) in enumerate(examples):
        row[index, : len(ids)], segments[index, : len(ids)] = ids, 1
    logits = jax.jit(functools.partial(row_logits, world.learner.model))(params, row, segments)
    logs = np.asarray(jax.nn.log_softmax(logits))
    found = [
        logs[index, at - 1, ids[at]]
        for index, (ids, turn_ids) in enumerate(examples)
        for at, turn in enumerate(turn_ids)
        if turn
    ]
    position, record = supervised_step(world, placement, position)
    line = record.metrics()
    assert abs(line["loss"] + np.mean(found)) < 1e-4
    assert line["policy_tokens"] == len(found)
    assert line["train_tokens"] == sum(len(ids) for ids, _ in examples)
    assert line["context_tokens_max"] == max(len(ids) for ids, _ in examples)
    assert (position.step, record.step, int(position.state.updates)) == (1, 1, 1)
    # The rate of the config's schedule, and not sft_learning_rate.
    np.testing.assert_allclose(line["learning_rate"], 3e-3 / 11, rtol=1e-5)


def test_state_of_the_conversations_is_in_the_checkpoint(world):
    kept = world.tasks.state()
    assert kept["conversations"]["conversations"] == 11
    world.tasks.restore(kept)
    with pytest.raises(ValueError, match="are not the 0 that this run began with"):
        world.tasks.restore({})


@pytest.mark.slow
def test_a_warm_start_and_a_stream_take_the_conversations(path):
    supervised = {"sft_steps": 1, "sft_updates": 2, "sft_weight": 0.5}
    world = with_conversations(built(path, train=supervised))
    placement, position = begin(world)
    position, record = rl_step(world, placement, position)
    numbers = [
        sum(turn > 0 for _, turns in examples for turn in turns)
        for examples in world.tasks.examples(0, 2)
    ]
    assert [update["policy_tokens"] for update in record.sft_updates] == numbers
    assert record.updates[0]["supervised_loss"] > 0


@pytest.mark.slow
def test_a_run_on_conversations_alone_is_resumed_and_replayed_bit_for_bit(path, tmp_path):
    """It plays nothing."""
    config = make_config(settings(path, algorithm="sft"))
    end = train(config, tmp_path / "whole")
    assert end.evaluation == {} and not end.stopped
    again = check_resume(config, tmp_path / "whole", 2)
    assert [line["step"] for line in read_metrics(again / "metrics.jsonl")] == [1, 2, 3, 4]
    assert not (tmp_path / "whole" / "trajectories").exists()
    check_replay(tmp_path / "whole", 4)
    # A run with rollouts goes on from its weights.
    rollouts = settings(path, train={"sft_path": ""}, num_steps=1)
    rollouts["checkpoint"] = {"every_steps": 1, "keep": 2}
    train(make_config(rollouts, [f"init_from={tmp_path / 'whole'}"]), tmp_path / "rl")
