# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of reasoning-gym: drawn by the seed, and paid by its verifiers."""

import random
import re
import sys
import warnings

import pytest

from earl_jax import training
from earl_jax.config.file import load_config_file, make_config
from earl_jax.envs import reasoning_gym
from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.reasoning_gym import ReasoningGym
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.metrics import read_metrics
from tests.support import ROOT

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match="reasoning_gym is not installed .* uv sync --extra"):
        ReasoningGym(generators=("chain_sum",))


@pytest.fixture
def library():
    """reasoning-gym; `uv run --extra reasoning-gym pytest -m slow` has it."""
    # Of packages that it imports.
    with warnings.catch_warnings(action="ignore"):
        found = pytest.importorskip("reasoning_gym")
    return found


@pytest.mark.slow
def test_the_right_answer_is_paid_and_others_are_not(library):
    env = ReasoningGym(generators=("chain_sum",), settings={"chain_sum": SUM}, seed=5)
    start = check_start(env.start())
    entry = library.create_dataset("chain_sum", **SUM, seed=5, size=1)[0]
    assert start.text == entry["question"] + reasoning_gym.TAGGED
    example = env.example_reply(random.Random(0))
    assert example == f"<answer>{entry['answer']}</answer>"
    wrong = str(int(entry["answer"]) + 1)
    for reply, score, answered in [
        (example, 1.0, 1.0),
        (f"<answer>{wrong}</answer> no: {example}", 1.0, 1.0),
        (f"<answer>{wrong}</answer>", 0.0, 1.0),
        (entry["answer"], 0.0, 0.0),
        ("<answer></answer>", 0.0, 0.0),
        (f"<answer>{entry['answer']}", 0.0, 0.0),
    ]:
        end = check_step(env.step(reply))
        assert (end.reward, end.done, end.metrics) == (score, True, {"answered": answered})


@pytest.mark.slow
def test_questions_depend_on_the_seed_alone_and_come_from_all_generators(library):
    names = ("chain_sum", "leg_counting", "prime_factorization")
    texts, drawn = {}, set()
    for seed in (*range(20), *range(20)):
        env = ReasoningGym(generators=names, tags=False, seed=seed)
        text = env.start().text
        assert texts.setdefault(seed, text) == text
        answer = env.example_reply(random.Random(0))
        end = check_step(env.step(answer))
        (name,) = (key for key in end.metrics if key != "answered")
        drawn.add(name)
        assert (end.reward, end.metrics[name]) == (1.0, 1.0)
        # The verifier of prime_factorization raises for it.
        assert check_step(env.step("]")).reward <= 0.02
    assert drawn == {f"score_{name}" for name in names} and len(set(texts.values())) == 20


@pytest.mark.slow
def test_an_answer_that_a_verifier_evaluates_reaches_nothing(library, tmp_path):
    env = ReasoningGym(generators=("countdown",), tags=False, seed=3)
    env.start()
    path = tmp_path / "new"
    for reply in (f"open({str(path)!r}, 'w')", "__import__('os').kill(1, 9)", "9**9**9**9"):
        assert check_step(env.step(reply)).reward <= 0.05
    assert not path.exists()
    assert check_step(env.step(env.example_reply(random.Random(0)))).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(reasoning_gym._EVALUATING))
def test_right_answers_are_paid_that_are_scored_in_another_process(library, name):
    for seed in range(4):
        env = ReasoningGym(generators=(name,), tags=False, seed=seed)
        env.start()
        assert check_step(env.step(env.example_reply(random.Random(0)))).reward == 1.0
        assert check_step(env.step("[entry['answer']]")).reward < 0.1


@pytest.mark.slow
def test_a_generator_without_answers_has_a_question_mark_as_example(library):
    env = ReasoningGym(generators=("rubiks_cube",), seed=0)
    env.start()
    example = env.example_reply(random.Random(0))
    assert example == "<answer>?</answer>" and check_step(env.step(example)).reward < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"generators is \(\); it must name generators"),
        ({"generators": "chain_sum"}, "it must name generators"),
        ({"generators": ("chain_sun",)}, "chain_sun"),
        ({"generators": ("chain_sum",), "settings": {"ab": {}}}, "has 'ab', which is none of"),
        ({"generators": ("chain_sum",), "settings": {"chain_sum": {"a": 1}}}, "unexpected keyword"),
        (
            {"generators": ("chain_sum",), "settings": {"chain_sum": {"min_terms": 0}}},
            "cannot make a question by them: AssertionError: min_terms must be positive",
        ),
        # Of any of them, whichever the seed draws.
        (
            {"generators": ("ab", "chain_sum"), "settings": {"chain_sum": {"max_terms": 2.5}}},
            "settings of 'chain_sum' are .*cannot make a question",
        ),
        ({"generators": ("composite",)}, "'composite': name several generators instead"),
        ({"generators": ("game_of_life_halting",)}, "its verifier pays any reply in full"),
    ],
)
def test_generators_and_settings_that_cannot_be_used_are_errors(library, arguments, message):
    with pytest.raises(InputError, match=message):
        ReasoningGym(**arguments)


@pytest.mark.slow
def test_the_how_to_learns_from_answers(library, tmp_path):
    """Supervised steps show the answers; the reward of what is played then is above chance."""
    page = (ROOT / "docs" / "howto" / "environment.md").read_text()
    (code,) = re.findall(r"```python\n(# reasoning_config.py.*?)```", page, re.DOTALL)
    (tmp_path / "reasoning_config.py").write_text(code)
    given = load_config_file(tmp_path / "reasoning_config.py")
    # Four supervised updates a step, in a fourth of the page's steps.
    changes = ["num_steps=27", "train.sft_steps=24", "train.sft_updates=4"]
    changes += ["devices.num_cpu_devices=1", "eval.games=32", "eval.final_games=32"]
    training.train(make_config(given, changes), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "reward_mean" in row]
    assert len(rows) == 27 and rows[-1]["reward_mean"] > 0.2
