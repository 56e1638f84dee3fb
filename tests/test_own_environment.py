# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments, datasets and task sources of a user's own, by the config alone."""

import asyncio
import gc
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from earl_jax import training
from earl_jax.config.config import CORPUS_EPISODES
from earl_jax.config.file import given_config
from earl_jax.config.file import make_config as make_config_of
from earl_jax.config.train_flags import parse_flags
from earl_jax.envs.environment import Message, Start, StepResult
from earl_jax.envs.event_loop import settle
from earl_jax.envs.examples import example_ids, play_example
from earl_jax.envs.single_turn import SingleTurn
from earl_jax.envs.tasks import Dataset, read_rows
from earl_jax.placement.moves import open_session
from earl_jax.rollout.evaluation import best_of, rating_of, summarize, why_no_means
from earl_jax.run.build import build_run
from earl_jax.run.evaluation import evaluate
from earl_jax.settings.errors import InputError, RunError
from earl_jax.telemetry.episodes import failures_of, read_trajectories
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.trajectory import Trajectory
from tests.support import ROOT, python_path
from tests.support.episodes import renderer
from tests.support.forks import run_python
from tests.support.placements import TINY, begin, one_step
from tests.support.runs import cut_off
from tests.support.settings import make_config

HOW_TO = ROOT / "docs" / "howto"
# Two steps of a tiny model.
SMALL = {
    "num_steps": 2,
    **{f"model.{name}": value for name, value in TINY.items()},
    "algorithm": "reinforce",
    "devices.num_cpu_devices": 2,
    "rollout.num_slots": 8,
    "rollout.group_size": 1,
    "rollout.chunk_size": 8,
    "rollout.burst": 4,
    "rollout.episodes_per_step": 8,
    "rollout.context_buckets": "(128,)",
    "rollout.patience_s": 10.0,
    # So that random weights often end a turn.
    "rollout.max_turn_tokens": 40,
    "rollout.stop_token_ids": tuple(range(40, 48)),
    "selector.table": "model",
    "selector.rollout_meshes": "('data=2',)",
    "selector.train_meshes": "('data=2',)",
    "checkpoint.every_steps": 1,
    "eval.every_steps": 1,
    "eval.games": 3,
    "eval.final_games": 5,
    "log.trajectories_every_steps": 1,
}
GIVEN = {
    "num_steps": 3,
    "model": TINY,
    "rollout": {"num_slots": 8, "episodes_per_step": 8},
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
}
TIMES = ("_s", "stage_s", "tokens_per_s")


def command(module: str, folder: Path, *flags: str) -> subprocess.CompletedProcess:
    """Runs a command as a user does, in the folder that holds the user's own files."""
    return run_python("-m", f"earl_jax.{module}", *flags, cwd=folder, PYTHONPATH=python_path(ROOT))


def train(folder: Path, config: str, workdir: str, **changes) -> str:
    flags = [f"--config.{key}={value}" for key, value in (SMALL | changes).items()]
    done = command("main", folder, f"--config={config}", f"--workdir={workdir}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_examples(page: str, folder: Path) -> None:
    """Writes the page's files as a reader would: Python files by the name in their first line."""
    for language, code in re.findall(r"```(python|json)\n(.*?)```", page, re.DOTALL):
        name = "sums.jsonl" if language == "json" else code.split("\n")[0].removeprefix("# ")
        (folder / name).write_text(code)


def timeless(path: Path) -> list[dict]:
    rows = read_metrics(path)
    # A run that goes on compiles its programs anew.
    left_out = (*TIMES, "compiles")
    return [{k: v for k, v in row.items() if not k.endswith(left_out)} for row in rows]


@pytest.mark.slow
def test_the_environment_of_the_how_to_trains_and_its_metrics_arrive_everywhere(tmp_path):
    write_examples((HOW_TO / "environment.md").read_text(), tmp_path)
    output = train(tmp_path, "guess_config.py", "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps, evaluations = ([r for r in rows if ("eval" in r) == e] for e in (False, True))
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["env"].keys() == {"found"}
        episodes = read_trajectories(tmp_path / f"run/trajectories/step_{row['step']:06d}.jsonl")
        assert row["env"]["found"] == np.mean([e["stop_reason"] == "found" for e in episodes])
        assert all("guess a number" in e["messages"][0]["content"] for e in episodes)
    assert [row["eval"]["episodes"] for row in evaluations] == [3, 3, 5]
    for row in evaluations:
        assert row["eval"]["name"] == "guess:Guess" and 0 <= row["eval"]["found"] <= 1
        assert "win" not in row["eval"] and "games" not in row["eval"]
    assert re.search(r"eval@\d reward [-\d.]+, .*found [\d.]+", output)
    assert re.search(r"5 episodes of guess:Guess: reward [-\d.]+, .*found [\d.]+", output)
    assert "found" in (tmp_path / "run" / "report.html").read_text()
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["env"]["args"] == {"highest": 9}
    shown = command("evaluate", tmp_path, "--workdir=run", "--games=3")
    assert shown.returncode == 0, shown.stderr
    assert "guess:Guess, 3 episodes, policy after step 2\n" in shown.stdout
    assert re.search(r"  found +[\d.]+", shown.stdout)


def write_readme(folder: Path) -> list[list[str]]:
    """Writes the README's files as a reader would; returns the flags of its commands with them."""
    page = (ROOT / "README.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for name, row in re.findall(r"^# (\w+\.jsonl): (.*)$", code, re.MULTILINE):
            (folder / name).write_text(row)
        (folder / re.findall(r"^# (\w+\.py)$", code, re.MULTILINE)[0]).write_text(code)
    lines = re.findall(r"`uv run python -m earl_jax\.main (--workdir=.*?)`", page)
    return [line.split() for line in lines]


def test_the_commands_of_the_readme_are_right_as_printed(tmp_path, monkeypatch):
    """With the default config; the first one learns from example replies."""
    commands = write_readme(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    configs = []
    for flags in commands:
        parsed, overrides = parse_flags(flags)
        given, _ = given_config(parsed.config, overrides)
        configs.append(make_config_of(given, overrides))
    assert [config.env.name for config in configs] == ["echo:Echo", "single_turn"]
    assert [config.train.sft_steps for config in configs] == [12, 0]


@pytest.mark.slow
def test_the_commands_of_the_readme_train(tmp_path):
    for flags in write_readme(tmp_path):
        shorter = ("num_steps=2", "eval.games=8", "eval.final_games=8")
        done = command("main", tmp_path, *flags, *(f"--config.{each}" for each in shorter))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2/2" in done.stdout and "failed" not in done.stdout


@pytest.mark.slow
def test_the_dataset_of_the_how_to_trains_and_resumes_exactly(tmp_path, monkeypatch, capsys):
    """In this process, in the folder of the user's files."""
    write_examples((HOW_TO / "dataset.md").read_text(), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # The README has a module of this name too.
    monkeypatch.delitem(sys.modules, "sums", raising=False)
    changes = {"rollout.group_size": 4, "algorithm": "grpo", "devices.num_cpu_devices": 8}
    changes |= {f"selector.{stage}_meshes": "('data=8',)" for stage in ("rollout", "train")}
    overrides = [f"{key}={value}" for key, value in (SMALL | changes).items()]

    def train_here(workdir: str) -> None:
        given, _ = given_config(Path("sums_config.py"), overrides)
        training.train(make_config_of(given, overrides), Path(workdir))

    train_here("whole")
    cut_off(tmp_path / "whole", tmp_path / "cut", 1)
    train_here("cut")
    assert "after step 1 of 2" in capsys.readouterr().out
    whole, cut = (timeless(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert whole == cut
    assert all(row["env"].keys() == {"is_number"} for row in whole if "eval" not in row)
    pages = [tmp_path / name / "trajectories/step_000002.jsonl" for name in ("whole", "cut")]
    assert pages[0].read_text() == pages[1].read_text()
    prompts = [e["messages"][0]["content"] for e in read_trajectories(pages[0])]
    assert len(set(prompts)) == 2 and prompts[:4] == prompts[:1] * 4

    # Other rows are another run.
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "2")
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "5 + 1 =", "answer": "6"}\n')
    with pytest.raises(InputError, match="4 rows are not the 3 that this run began with"):
        train_here("cut")


# Environments of this file.


class Echo:
    """Wants the word of its first message back, twice; reports how often it came."""

    def __init__(self, *, word: str = "ab", times: int = 2, seed: int, index: int):
        if times < 1:
            raise ValueError(f"times is {times}; it must be at least 1")
        self.word, self.left, self.index, self.hits = word, times, index, 0

    def start(self):
        return Start(text=f"say {self.word}", metrics={"hits": 0, "odd": self.index % 2})

    def step(self, reply):
        self.left -= 1
        self.hits += reply == self.word
        metrics = {"hits": self.hits}
        if self.left:
            return StepResult(text="again", reward=0.0, done=False, metrics=metrics)
        done = {"done": True, "stop_reason": "over"}
        return StepResult(reward=self.hits / 2, metrics=metrics, **done)


class Tools(Echo):
    """Its policy has a function to call; half of them have a control token in their name."""

    def start(self):
        name = "look<|end|>" if self.index % 2 else "look"
        tool = {"type": "function", "function": {"name": name, "parameters": {}}}
        return Start(text="look", tools=(tool,))


class Talker(Echo):
    """Speaks in several messages, and shows how a policy might reply."""

    def start(self):
        first, second = (Message(role="user", text=text) for text in ("say", self.word))
        return Start(messages=(first, second))

    def example_reply(self, rng):
        return rng.choice((self.word, "no"))


class Endless(Talker):
    """Has no end."""

    def step(self, reply):
        return StepResult(text="again", reward=0.0, done=False)


class Stepless:
    """Has no step."""

    def start(self):
        return Start(text="go")


class Deaf(Stepless):
    """Its step takes no reply."""

    def step(self):
        return StepResult(reward=0.0, done=True, stop_reason="over")


class Mute(Deaf):
    """Its start is no Start."""

    def start(self):
        return "go"

    def step(self, reply):
        return super().step()


class Flaky(Mute):
    """Raises in every second episode, the first included."""

    numbers = itertools.count()

    def start(self) -> Start:
        if next(self.numbers) % 2 == 0:
            raise ConnectionError("nobody answers")
        return Start(text="hello")


class Gone(Mute):
    """Its start raises."""

    def start(self):
        raise ConnectionError("nobody answers")


class OfRows(Echo):
    """Plays a row without a reward function."""

    def __init__(self, *, row):
        super().__init__(word=row["answer"], seed=0, index=0)


class Countdown:
    """A task source: words by the step, the last ones for evaluation."""

    def __init__(self, *, num_tasks: int, words: list):
        self.num_tasks, self.words = num_tasks, words

    def batch(self, step):
        return [{"word": self.words[step], "seed": i, "index": i} for i in range(self.num_tasks)]

    def evaluation(self, number):
        return [{"word": self.words[-1], "seed": i, "index": i} for i in range(number)]


def own(name: str, **changes):
    return make_config(GIVEN | {"env": {"name": f"{__name__}:{name}"}} | changes)


@pytest.mark.slow
def test_episodes_that_the_template_cannot_begin_say_so_and_end_nothing_else():
    """Half of them describe a tool by a control token of the template."""
    record = one_step(build_run(own("Tools")))
    failed = [e for e in record.trajectories if e.stop_reason == "unencodable"]
    assert len(failed) == 4 and all("<|end|>" in episode.detail for episode in failed)
    words = record.failures.in_words()
    assert words.startswith("4 of 8 episodes failed as unencodable: descriptions and")
    assert failures_of(record.trajectories) == record.failures
    assert record.metrics()["failed_share"] == 0.5
    assert record.metrics()["failure"].startswith("unencodable: descriptions and")
    assert all(np.isfinite(update["loss"]) for update in record.updates)


@pytest.mark.slow
def test_a_task_source_of_ones_own_gives_the_tasks():
    tasks = {"name": f"{__name__}:Countdown", "args": {"words": ["one", "two", "three"]}}
    world = build_run(own("Echo", tasks=tasks))
    assert [t.args["word"] for t in world.tasks.training(1)] == ["two"] * 8
    assert [t.args["word"] for t in world.tasks.evaluation(3)] == ["three"] * 3
    assert world.actor.make_environment(world.tasks.training(0)[0]).start().text == "say one"


def test_examples_may_be_of_several_messages():
    example = play_example(Talker(seed=0, index=0), random.Random(0))
    assert example.texts[:2] == ["say", "ab"] and example.texts[3] == "again"
    ids, turns = example_ids(example, renderer())
    assert len(ids) == len(turns) and set(turns) == {0, 1, 2}
    reply = renderer().decode_reply([i for i, turn in zip(ids, turns, strict=True) if turn == 1])
    assert reply == example.texts[2]
    (first, second) = (Message(role="user", text=text) for text in ("say", "ab"))
    begin = renderer().first((first, second))
    assert tuple(ids[: len(begin)]) == begin


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "no_such_module:Echo"}, "config.env.name is 'no_such_module:Echo', which cannot"),
        (
            {"name": f"{__name__}:Ecko"},
            "test_own_environment.py has no 'Ecko'; did you mean 'Echo'",
        ),
        ({"name": f"{__name__}:ROOT"}, "ROOT', which is of type PosixPath; it must be a class$"),
        ({"name": "own.py:Echo"}, "it is a file; write the module's name, 'own', before the :"),
        ({"name": "tic_tac_to"}, "config.env.name is 'tic_tac_to'; did you mean 'tic_tac_toe'"),
        (
            {"name": f"{__name__}:Echo", "args": {"wort": "x"}},
            "config.env.args.wort is not an argument of Echo; did you mean 'word'",
        ),
        (
            {"name": f"{__name__}:Echo", "args": {"times": "x"}},
            "config.env.args.times is 'x', of type str; it must be of type int",
        ),
        (
            {"name": f"{__name__}:Echo", "args": {"times": 0}},
            "its environment cannot be made: times is 0; it must be at least 1",
        ),
        ({"name": "single_turn"}, "cannot be made: it needs config.tasks.path and config.tasks.re"),
        ({"name": f"{__name__}:Stepless"}, "Stepless', which has no method step.reply."),
        ({"name": f"{__name__}:Start"}, "which has no method start.."),
        (
            {"name": f"{__name__}:Deaf"},
            "step.reply. of config.env.name .*Deaf' cannot be called: too many positional",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_an_error_that_says_why(given, words):
    with pytest.raises(ValueError, match=words):
        make_config({"env": given})


def test_an_environment_whose_start_is_wrong_has_no_tokenizer():
    """A Start of another type is the user's mistake; what raises may be a tool that is away."""
    with pytest.raises(InputError, match="trained on, failed: start.. must return a Start; got 'g"):
        own("Mute").corpus()
    with pytest.raises(RunError, match="trained on, failed: ConnectionError: nobody answers"):
        own("Gone").corpus()
    texts = own("Flaky").corpus()
    assert 0 < len(texts) < CORPUS_EPISODES and set(texts) == {"hello"}, "those that failed are out"
    with pytest.raises(InputError, match="trained on, failed: it is not done after 10000 replies"):
        own("Endless").corpus()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = (", "SyntaxError: '(' was never closed (FILE, line 1)"),
        ("import math\n\nx = 1 / 0", "ZeroDivisionError: division by zero (FILE, line 3)"),
        ("import no_such_thing", "No module named 'no_such_thing' (FILE, line 1)"),
        ("Ecko = 3", "and FILE has no 'Echo'; did you mean 'Ecko'?"),
        ("Echo = 3", "of type int; it must be a class"),
        (
            None,
            "No module named 'NAME'; Python looks in the current folder and those of PYTHONPATH",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_says_where_it_fails(
    tmp_path, monkeypatch, request, code, words
):
    # Python imports a module of one name once.
    name = f"own_module_{request.node.callspec.indices['code']}"
    path = tmp_path / f"{name}.py"
    if code:
        path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    words = words.replace("FILE", str(path)).replace("NAME", name)
    with pytest.raises(InputError, match=re.escape(words)):
        make_config({"env": {"name": f"{name}:Echo"}})


# Datasets.

GOOD = {"prompt": "1 + 1 =", "answer": "2"}


def paid(reply, *, prompt, answer):
    return float(reply == answer)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3: no JSON at column 2: Expecting property name"),
        ("[" * 100_000, "line 3: arrays or objects of too many levels"),
        ("[1]", "line 3: it must be a JSON object; got b'.1.'"),
        ('{"answer": "2"}', "line 3: 'prompt' is None; it must be a text, or a list of messages"),
        ('{"prompt": ""}', "line 3: 'prompt' is ''; it must be a text"),
        ('{"prompt": [{"role": "user"}]}', "line 3: a message of 'prompt' .* role and content"),
        ('{"prompt": [{"role": "me", "content": ""}]}', "line 3: .*must be 'system' or 'user'"),
        ('{"prompt": "x", "reply": 3}', "line 3: a field is named 'reply'"),
    ],
)
def test_a_row_that_is_none_is_an_error_with_its_line(tmp_path, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    tasks = {"path": str(path), "reward": f"{__name__}:paid"}
    with pytest.raises(ValueError, match=words) as error:
        make_config({"env": {"name": "single_turn"}, "tasks": tasks})
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"path": "/nowhere.jsonl", "reward": f"{__name__}:paid"}, "path is '/nowhere.jsonl', whi"),
        ({"path": "/dev/null", "reward": f"{__name__}:paid"}, "which holds no rows"),
        ({"reward": f"{__name__}:paid"}, "config.tasks.reward = .* no effect"),
        ({"name": "datasets"}, "config.tasks.name is 'datasets'; did you mean 'dataset'"),
        ({"args": {"words": 3}}, "config.tasks.args.words is not an argument of Seeds"),
    ],
)
def test_tasks_that_cannot_be_are_an_error_that_says_why(tasks, words):
    with pytest.raises(ValueError, match=words):
        make_config({"env": {"name": "single_turn"}, "tasks": tasks})


def test_a_reward_without_a_module_is_an_error_that_names_the_form(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD))
    tasks = {"path": str(path), "reward": "paid"}
    with pytest.raises(InputError, match="reward is 'paid'; give your own as 'module:name'"):
        make_config({"env": {"name": "single_turn"}, "tasks": tasks})


async def judge(reply, *, prompt, answer):
    await asyncio.sleep(0)
    return {"reward": float(reply == answer), "asked": 1.0}


def step_of(function, reply="2"):
    return settle(SingleTurn(row=GOOD, reward=function).step(reply))


def test_a_reward_is_a_number_alone_or_in_a_dict_and_may_be_awaited():
    assert [step_of(paid).reward, step_of(paid, "3").reward] == [1.0, 0.0]
    for given, reward in ((True, 1.0), (np.float32(0.5), 0.5), (2, 2.0)):
        assert step_of(lambda reply, given=given, **row: given).reward == reward
    assert step_of(judge).reward == 1.0 and step_of(judge, "3").metrics == {"asked": 1.0}
    numbers = {"reward": np.float64(1.0), "ok": np.bool_(True), "size": np.array(3)}
    assert step_of(lambda reply, **row: numbers).metrics == {"ok": 1.0, "size": 3.0}


@pytest.mark.parametrize("given", [None, "1.0", [1.0], {"score": 1.0}, {"reward": None}])
def test_invalid_reward_is_named_with_its_setting(given):
    with pytest.raises(InputError, match=r"\(config.tasks.reward\) returned ") as error:
        step_of(lambda reply, **row: given)
    assert repr(given) in str(error.value)


def bare(reply, *, answer):
    return 0.0


@pytest.mark.parametrize(
    ("env", "reward", "words"),
    [
        (
            "single_turn",
            "bare",
            "reward(reply, prompt=..., answer=...) of config.tasks.reward .*:b",
        ),
        ("single_turn", "bare", "cannot be called: got an unexpected keyword argument 'prompt'"),
        ("single_turn", "GOOD", "GOOD', which is of type dict; it must be a function"),
        ("trail", "", "config.tasks.path is given, and config.env.name 'trail' takes no rows of a"),
        (f"{__name__}:OfRows", "paid", "config.tasks.reward is given, .*no argument 'reward'"),
    ],
)
def test_an_environment_or_reward_that_does_not_take_the_rows_is_an_error(
    tmp_path, env, reward, words
):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD))
    tasks = {"path": str(path), "reward": f"{__name__}:{reward}" if reward else ""}
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace(")", r"\)")):
        make_config({"env": {"name": env}, "tasks": tasks})
    tasks["reward"] = f"{__name__}:paid"
    make_config({"env": {"name": "single_turn"}, "tasks": tasks})


def test_a_reward_must_take_the_fields_of_every_row(tmp_path):
    path, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    # Fields with the names of parameters of ours.
    whole = {"prompt": "a", "answer": "b", "function": "f", "call": "g"}
    path.write_text(json.dumps(whole))
    tasks = {"path": str(path), "reward": f"{__name__}:of_answers"}
    make_config({"env": {"name": "single_turn"}, "tasks": tasks})
    held_out.write_text(f'{json.dumps(whole)}\n\n{{"prompt": "a"}}\n{{"prompt": "c"}}\n')
    for given in ({"path": str(held_out)}, {"eval_path": str(held_out)}):
        with pytest.raises(InputError, match=r"held_out.jsonl, line 3: reward\(.*'answer'$"):
            make_config({"env": {"name": "single_turn"}, "tasks": {**tasks, **given}})


def of_answers(reply, *, answer, **row):
    return float(reply == answer)


def test_an_epoch_has_each_row_once_and_its_order_is_that_of_the_step(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(7)))

    def source(seed=0):
        return Dataset(path=str(path), seed=seed, num_tasks=3, environment=Echo)

    def prompts(source, steps):
        return [task["row"]["prompt"] for step in steps for task in source.batch(step)]

    played = prompts(source(), range(14))
    epochs = [played[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list("0123456") for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 6
    assert prompts(source(), range(5, 14)) == played[15:], "whatever was asked for before"
    assert prompts(source(1), range(14)) != played
    assert [t["row"]["prompt"] for t in source().evaluation(9)] == list("012345601")
    assert source().batch(0)[0].keys() == {"row", "seed", "index"}
    assert read_rows(str(path), "x", dict)[1] == source().state()["digest"]


def test_the_best_of_some_samples_is_that_of_all_their_choices():
    """One or two of four are right: pass@2 is 1 - C(wrong, 2) / C(4, 2)."""
    right = np.array([[0, 1, 0, 1], [0, 0, 0, 1.0]])
    assert best_of(right, 1) == right.mean() and best_of(right, 4) == 1.0
    assert best_of(right, 2) == pytest.approx((5 / 6 + 1 / 2) / 2)
    # The best of (1, 2), (1, 3) and (2, 3).
    assert best_of(np.array([[3.0, 1.0, 2.0]]), 2) == pytest.approx((2 + 3 + 3) / 3)
    rewards = np.random.default_rng(0).normal(size=(3, 6))
    pairs = itertools.combinations(range(6), 2)
    expected = np.mean([rewards[:, list(pair)].max(1) for pair in pairs])
    assert best_of(rewards, 2) == pytest.approx(expected)


@pytest.mark.slow
def test_an_evaluation_plays_each_task_as_often_as_it_says(monkeypatch):
    """Five tasks in two batches; the samples of a task come one after the other."""
    evaluation, played = {"samples": 3, "temperature": 1.0}, []
    run = build_run(own("Echo", eval=evaluation))

    def noted(outcomes, *rest):
        played.extend(outcomes)
        return summarize(outcomes, *rest)

    monkeypatch.setattr("earl_jax.run.evaluation.summarize", noted)
    placement, position = begin(run)
    opened = []

    def only_one(*given, **named):
        gc.collect()
        assert not any(each() for each in opened), "the session of the batch before is there yet"
        session, moved = open_session(*given, **named)
        opened.append(weakref.ref(session))
        return session, moved

    monkeypatch.setattr("earl_jax.placement.rollouts.open_session", only_one)
    episodes = []
    found = evaluate(run, placement, position, games=5, keep=episodes.extend)
    assert found["episodes"] == 15 and len(opened) == 2
    names = [name for name in found if name.startswith("reward")]
    assert names == ["reward_mean", "reward_best_of_2", "reward_best_of_3"]
    assert [each.metrics["odd"] for each in played] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3 + [
        0
    ] * 3
    rewards = np.array([each.reward for each in played]).reshape(5, 3)
    assert found["reward_best_of_3"] == pytest.approx(rewards.max(1).mean())
    # They are other episodes, with other draws.
    assert len({each.episode for each in episodes}) == 15
    assert len({each.turns[-1].token_ids for each in episodes[:3]}) > 1
    with pytest.raises(InputError, match="samples is 3 and config.eval.temperature is 0; all"):
        own("Echo", eval=evaluation | {"temperature": 0.0})


def test_a_mean_is_over_the_episodes_that_have_the_metric():
    def episode(reason, **metrics):
        return Trajectory(
            episode=0, group=0, role="", turns=(), turn_rewards=(0.5,), stop_reason=reason,
            row=0, metrics=metrics,
        )  # fmt: skip

    found = summarize(
        [episode("won", win=1.0, first=1.0), episode("lost", win=0.0), episode("turn_too_long")],
        "a game",
        "games",
    )
    expected = {
        "name": "a game",
        "episodes": 3,
        "games": 3,
        "reward_mean": 0.5,
        "turns_mean": 0.0,
        "win": 0.5,
        "first": 1.0,
        "turn_too_long": 1 / 3,
    }
    assert list(found.items()) == list(expected.items())


def test_an_evaluation_is_over_the_episodes_that_did_not_fail():
    """Two samples of each of three tasks: rewards 1 and 3, 2 and a failure, and two failures."""

    def episode(reward, stop_reason="done", **fields):
        return Trajectory(
            episode=0, group=0, role="", turns=(), turn_rewards=(reward,), row=0,
            stop_reason=stop_reason, metrics={"win": reward / 2}, **fields,
        )  # fmt: skip

    failed = episode(100.0, "environment_error", detail="KeyError: 'lost'")
    cut = episode(2.0, "turn_too_long")
    counts = {"name": "a game", "episodes": 6, "games": 6}
    failure = "environment_error: KeyError: 'lost'"
    found = summarize(
        [episode(1.0), episode(3.0), cut, failed, failed, failed], "a game", "games", samples=2
    )
    assert found == counts | {
        "reward_mean": 2.0,
        "turns_mean": 0.0,
        "failed_share": 0.5,
        "failure": failure,
        "reward_best_of_2": 3.0,
        "win": 1.0,
        "turn_too_long": 1 / 3,
    }
    assert rating_of(found) == 2.0 and why_no_means(found) == ""
    found = summarize([failed] * 6, "a game", "games", samples=2)
    assert found == counts | {"failed_share": 1.0, "failure": failure}
    assert rating_of(found | {"sft_loss": 2.0}) is None
    assert why_no_means(found) == f"no means: all 6 episodes failed, as {failure}"
