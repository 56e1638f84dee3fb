# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands: --help lists every setting, and a mistake says what to write."""

import importlib
import re
import signal
import sys
from pathlib import Path

import pytest

import earl_jax
from earl_jax import bench, main, plan, view
from earl_jax.config.config import Config
from earl_jax.config.evaluate_flags import parse_flags
from earl_jax.config.file import given_config, make_config
from earl_jax.config.keys import algorithm_sections, all_keys, sections_of
from earl_jax.evaluate import evaluate_command
from earl_jax.launch import console
from earl_jax.serving import serve_flags
from earl_jax.settings.errors import InputError
from earl_jax.train.config import TrainConfig
from tests.support import ROOT, run_python


@pytest.mark.parametrize("parse", [main.parse_flags, plan.parse_flags, bench.bench_command])
def test_help_lists_every_setting(parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    names = [key.removeprefix("config.") for key in all_keys()]
    assert len(names) > 100
    assert [name for name in names if not re.search(rf"^  {re.escape(name)}\b", text, re.M)] == []
    assert f"\n  num_steps = {Config.num_steps}  (int)\n" in text
    assert f"\n  train.max_grad_norm = {TrainConfig.max_grad_norm}  (float)\n" in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_setting_has_a_meaning():
    """The docstring of its record says it; --help and docs/reference/config.md repeat it."""
    sections = [*sections_of(Config, "config"), *(section for _, section in algorithm_sections())]
    assert [key.path for section in sections for key in section.keys if not key.meaning] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.num_steps", "50"], "without a blank, --config.num_steps=50"),
        (["--config.num_steps", "=", "50"], "without a blank, --config.num_steps=50"),
        (["--config.num_steps", "=50"], "without a blank, --config.num_steps=50"),
        (["--num_steps=50"], "--num_steps=50; a setting is written --config.num_steps=50"),
        (["--train.epochs", "2"], "a setting is written --config.train.epochs=2"),
        (["--seed"], "a setting is written --config.seed=VALUE"),
        (["--lr=1"], "there is config.train.learning_rate, written --config.KEY=VALUE"),
        (["--model=x"], "there is config.model.path (a checkpoint)"),
        (["--output_dir=x"], "the flag --workdir=DIR says where the run lives"),
        (["--confg=x"], "unrecognized arguments: --confg=x; did you mean --config?"),
        (["--work_dir=x"], "did you mean --workdir?"),
        (["configs/x.py"], "write --config=configs/x.py"),
        (["--qqq"], "unrecognized arguments: --qqq; see --help"),
    ],
)
def test_a_flag_that_is_none_says_what_to_write(arguments, words):
    with pytest.raises(InputError, match=re.escape(words)):
        main.parse_flags(arguments)


@pytest.mark.parametrize("parse", [serve_flags.parse_flags, view.view_command])
def test_a_command_without_a_config_names_the_nearest_flag(parse):
    first = "--workdir=x" if parse is serve_flags.parse_flags else "x"
    for argument, words in (
        ("--prot=1", "unrecognized arguments: --prot=1; did you mean --port?"),
        ("--qqq=3", "unrecognized arguments: --qqq=3; see --help"),
        ("--port=", "--port= has an empty value"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            parse([first, argument])


@pytest.mark.parametrize(
    ("parse", "arguments", "words"),
    [
        (serve_flags.parse_flags, ["--modle=x"], "--modle=x; did you mean --model?"),
        (serve_flags.parse_flags, ["--modle", "x"], "--modle x; did you mean --model?"),
        (view.view_command, ["--prot=1"], "--prot=1; did you mean --port?"),
        (parse_flags, ["--wrokdir=x"], "--wrokdir=x; did you mean --workdir?"),
        (plan.parse_flags, ["--topolgy=v5e-8"], "--topolgy=v5e-8; did you mean --topology?"),
    ],
)
def test_a_misspelt_flag_is_named_where_the_right_one_is_required(parse, arguments, words):
    with pytest.raises(InputError, match=re.escape(words)):
        parse(arguments)


@pytest.mark.parametrize("flag", ["--workdir", "--replay", "--init_from", "--config"])
def test_an_empty_value_is_a_mistake_and_not_the_current_folder(flag):
    """With --workdir= and --restart the current folder would be renamed."""
    for arguments in ([f"{flag}=", "--restart"], [flag, ""]):
        with pytest.raises(InputError, match=f"{flag}=? has an empty value"):
            main.parse_flags(arguments)
    _, overrides = main.parse_flags(["--config.model.path="])
    assert overrides == ["model.path="]


def test_flags_and_overrides_are_separated():
    flags, overrides = main.parse_flags(
        ["--config=a/b.py", "--config.seed=1", "--config.model.path=--odd"]
    )
    assert (str(flags.config), overrides) == ("a/b.py", ["seed=1", "model.path=--odd"])


def test_a_model_of_the_command_line_without_a_file_has_the_settings_own_defaults():
    """The default config's values are for a model from scratch."""
    given, name = given_config(None, ["model.preset=qwen3-8b"])
    assert (len(given), name) == (0, "qwen3-8b")
    assert make_config(given, ["model.preset=qwen3-8b"]).train.learning_rate == 1e-6
    given, name = given_config(None, ["model.width=64"])
    assert (given.env.name, name) == ("trail", "trail_tiny_cpu")
    given, name = given_config(ROOT / "configs/tictactoe_tiny_cpu.py", ["model.preset=qwen3-8b"])
    assert (given.env.name, name) == ("tic_tac_toe", "tictactoe_tiny_cpu")


# The command earl-jax.


def test_console_without_a_command_lists_them(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        console.hand_on(arguments)
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in console.COMMANDS)


def test_console_knows_its_version_and_refuses_other_commands(capsys):
    console.hand_on(["--version"])
    assert capsys.readouterr().out == f"earl-jax {earl_jax.__version__}\n"
    with pytest.raises(InputError, match="'trian' is not a command of earl-jax; did you mean 'tra"):
        console.hand_on(["trian"])
    with pytest.raises(InputError, match="choose one of train, evaluate, serve, plan, bench, view"):
        console.hand_on(["xyz"])


@pytest.mark.parametrize("name", console.COMMANDS)
def test_console_hands_on_to_each_command(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["earl-jax", name, "--help"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        console.main()
    assert ended.value.code == 0
    assert f"usage: python -m earl_jax.{console.COMMANDS[name][0]} " in capsys.readouterr().out


MISTAKES = {
    "train": ["--confg=x"],
    "evaluate": ["--workdir=nowhere"],
    "serve": ["--model=nowhere"],
    "plan": ["--topology=v9:4x4"],
    "bench": ["train", "--repeats=0"],
    "view": ["nowhere"],
}


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_mistake_ends_each_command_with_status_2_and_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["earl_jax", *MISTAKES[name]])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"earl_jax.{console.COMMANDS[name][0]}").main()
    output, errors = capsys.readouterr()
    assert ended.value.code == 2 and not output
    assert errors.startswith("error: ") and errors.count("\n") == 1


@pytest.mark.parametrize("override", ["train.learning_rate=1", "seed=3", "model.width=8"])
def test_evaluate_takes_settings_of_episodes_alone(tmp_path, override):
    with pytest.raises(InputError, match=r"settings of env, tasks, eval, .* can be given here"):
        evaluate_command([f"--workdir={tmp_path}", f"--config.{override}"])
    with pytest.raises(InputError, match="holds no run"):
        evaluate_command([f"--workdir={tmp_path}", "--config.env.args.opponent=mcts"])


def test_a_checkpoint_of_transformers_is_no_workdir(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64}')
    with pytest.raises(InputError, match="it is a checkpoint of transformers; serve it with --mod"):
        evaluate_command([f"--workdir={tmp_path}"])


@pytest.mark.parametrize("flag", ["workdir", "replay"])
def test_a_folder_may_be_given_by_dots(tmp_path, monkeypatch, flag):
    """A run puts folders beside it by its name."""
    monkeypatch.chdir(tmp_path)
    for text, path in ((".", tmp_path), ("..", tmp_path.parent), ("a", Path("a"))):
        flags, _ = main.parse_flags([f"--{flag}={text}"])
        assert getattr(flags, flag) == path


@pytest.mark.parametrize(
    ("override", "instead"),
    [("tasks.path=x", "tasks.eval_path"), ("rollout.temperature=0.1", "eval.temperature")],
)
def test_evaluate_names_the_settings_that_evaluations_have(tmp_path, override, instead):
    with pytest.raises(InputError, match=f"is of training; give --config.{instead} instead"):
        evaluate_command([f"--workdir={tmp_path}", f"--config.{override}"])


def test_a_run_without_a_dataset_is_evaluated_on_the_rows_of_eval_path_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    flags = [f"--workdir={tmp_path}", "--config.env.name=single_turn"]
    flags += [f"--config.tasks.eval_path={tmp_path / 'rows.jsonl'}"]
    flags += ["--config.tasks.reward=earl_jax.envs.math_answer:correct"]
    _, config = parse_flags(flags)
    assert config.tasks.source == "dataset" and config.tasks.path == config.tasks.eval_path


def test_the_console_finds_modules_in_the_current_folder(tmp_path):
    """It leaves JAX to the command, and ends with the command's status."""
    (tmp_path / "own_words.py").write_text("class Own:\n    def __init__(self, *, most=1): ...\n")
    line = "import sys; sys.path.pop(0); from earl_jax.launch import console; "
    line += "assert 'jax' not in sys.modules; console.main()"
    flags = ("--config.env.name=own_words:Own", "--config.env.args.least=1")
    done = run_python("-c", line, "train", *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert "config.env.args.least is not an argument of Own" in done.stderr
