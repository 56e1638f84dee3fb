# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""generation_config.json: its ends of turn are taken, the rest is said."""

import json
import shutil
from pathlib import Path

import pytest

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.generation import read_generation_settings
from earl_jax.run.build import build_run
from tests.support.references import CHECKPOINT
from tests.support.settings import make_config

TOKENIZERS = Path(__file__).parent / "tokenizers"


def write(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_generation_config_gives_the_end_ids_and_names_unused_settings():
    settings = read_generation_settings(TOKENIZERS / "llama3")
    tokenizer = load_tokenizer(TOKENIZERS / "llama3")
    names = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    ids = tuple(tokenizer.convert_tokens_to_ids(list(names)))
    assert settings.end_ids_of(tokenizer) == settings.eos_token_ids == ids
    (note,) = settings.unused(ids)
    assert "temperature=0.6, top_p=0.9 not used" in note and "config.eval.temperature" in note
    assert settings.unused(ids, plays=False) == []


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}, None),
        ({"do_sample": True, "temperature": 0.7, "top_p": None}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, {"temperature": 0.0}),
        ({"temperature": 0, "top_k": 20}, {"temperature": 0.0}),
        ({"min_p": 0.1, "top_k": 0}, {"min_p": 0.1}),
        ({}, {}),
    ],
)
def test_generation_settings_set_the_servers_sampling(given, drawn, tmp_path):
    settings = read_generation_settings(write(tmp_path, json.dumps(given)))
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8} if drawn is None else drawn
    assert settings.drawn_by() == expected


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_k", 2.5), ("top_p", False), ("min_p", [1])]
)
def test_setting_that_is_no_number_is_an_error_of_the_server(name, value, tmp_path):
    settings = read_generation_settings(write(tmp_path, json.dumps({name: value})))
    with pytest.raises(ValueError, match=rf"generation_config.json: {name} is .*; it must be a"):
        settings.drawn_by()


def test_neutral_generation_settings_change_nothing(tmp_path):
    neutral = {"temperature": 1.0, "top_k": 0, "max_new_tokens": None, "use_cache": True}
    for folder in (tmp_path, write(tmp_path, json.dumps(neutral))):
        settings = read_generation_settings(folder)
        assert settings.eos_token_ids == () and settings.unused(()) == []


def test_a_text_is_no_end_of_turn(tmp_path):
    """Ids of words, and ids of nothing, do not end turns; that is said."""
    tokenizer = load_tokenizer(TOKENIZERS / "qwen2")
    word = tokenizer.convert_tokens_to_ids("e")
    end = tokenizer.eos_token_id
    mark = tokenizer.convert_tokens_to_ids("<tool_call>")
    given = {"eos_token_id": [word, end, mark, 10**6]}
    settings = read_generation_settings(write(tmp_path, json.dumps(given)))
    ids = settings.end_ids_of(tokenizer)
    assert ids == (end,)
    (note,) = settings.unused(ids)
    assert f"{word}, {mark}, 1000000 is no control token" in note


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is no JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ('{"eos_token_id": [true]}', "eos_token_id is .True."),
    ],
)
def test_a_damaged_file_is_named(text, words, tmp_path):
    with pytest.raises(ValueError, match=f"generation_config.json.*{words}"):
        read_generation_settings(write(tmp_path, text))


def test_a_run_takes_the_ends_of_its_checkpoint(tmp_path):
    folder = tmp_path / "copied"
    shutil.copytree(CHECKPOINT, folder)
    plain = build_run(make_config({"model": {"path": str(folder)}}))
    assert plain.actor.renderer.end_of_turn_ids == (3,) and len(plain.notes) == 2
    write(folder, json.dumps({"eos_token_id": [0, 3], "top_p": 0.9}))
    run = build_run(
        make_config({"model": {"path": str(folder)}}, ["chat.history=fork"]), tmp_path / "none"
    )
    assert run.actor.renderer.end_of_turn_ids == (3, 0) and len(run.notes) == 3
    engine = run.stages.engines.engine(run.problem.meshes("rollout")[0])
    assert engine.config.rules.end_of_turn_ids == (3, 0)
    conversation = run.actor.new_conversation()
    conversation.open("go")
    assert conversation.reply([0]) == ("", True)
    # The template would have written its own end there, so that what follows is told anew.
    assert conversation.answer("on").forks


def test_a_run_gives_its_template_the_arguments_of_its_config():
    text = "chat.template_arguments.enable_thinking=False"
    config = make_config({"model": {"path": str(CHECKPOINT)}}, [text])
    assert config.chat.template_arguments == {"enable_thinking": False}
    saved = make_config(json.loads(json.dumps(config.as_dict())))
    assert saved.chat == config.chat and saved.as_dict() == config.as_dict()
    # This checkpoint's template knows no such thing, and is given it.
    with pytest.raises(ValueError, match="'enable_thinking', which the chat template does not"):
        build_run(config)
    with pytest.raises(ValueError, match="template_arguments is 3; name its entries"):
        make_config({}, ["chat.template_arguments=3"])


def test_forks_without_a_template_that_forks_are_an_error():
    with pytest.raises(ValueError, match="config.chat.history = 'fork' has no effect.*model.path"):
        make_config({"chat": {"history": "fork"}})
    with pytest.raises(ValueError, match="config.chat.history is 'forks'; choose one of 'append'"):
        make_config({"chat": {"history": "forks"}})
