# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The environment's contract: what a config may say, what a step may return, what is imported."""

import numpy as np
import pytest

from earl_jax.envs.environment import Message, Start, StepResult, check_start, check_step
from earl_jax.envs.games.openspiel import load_game, playable_games
from earl_jax.envs.registry import MOST_WORKERS, EnvConfig, open_environment
from earl_jax.envs.tasks import TasksConfig
from earl_jax.settings.errors import InputError
from tests.support import run_python


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"game": "tictactoe"}, r"game is 'tictactoe'.*did you mean 'tic_tac_toe'"),
        ({"game": ""}, r"game is ''.*playable are amazons"),
        ({"game": "zzz"}, "playable are amazons"),
        ({"game": "kuhn_poker"}, "imperfect information"),
        ({"game": "backgammon"}, "explicit stochastic"),
        ({"game": "matrix_rps"}, "simultaneous"),
        ({"game": "2048"}, r"1 player\(s\)"),
        ({"game": "connect_four(foo=1)"}, "Available parameters are: columns"),
        ({"game": "connect_four(rows=0,columns=0)"}, "no player can move"),
        ({"game": "connect_four(rows=-1)"}, "OpenSpiel refuses"),
        ({"game": "chess(chess960=true)"}, "no player can move"),
        ({"opponent": "mtcs"}, r"opponent is 'mtcs'; choose one of 'random', 'mcts'"),
        ({"opponent": "mcts", "mcts_simulations": 0}, "at least 1"),
        ({"mcts_simulations": 60}, "no effect with opponent 'random'"),
        ({"illegal_reward": 1e999}, "must hold what JSON can say"),
        ({"illegal_reward": -2, "mask_illegal": True}, "no effect with mask_illegal"),
        ({"show_board": 1}, r"config.env.args.show_board is 1, of type int; .* of type bool"),
        ({"show_bord": True}, "show_bord is not an argument of BoardGame; did you mean 'show_boa"),
        ({"seed": 3}, "config.env.args.seed is not an argument of BoardGame; it takes game, ill"),
    ],
)
def test_bad_arguments_are_refused_with_their_names(change, message):
    config = EnvConfig(name="board_game", args=change)
    with pytest.raises(ValueError, match=message):
        open_environment(config, TasksConfig(), seed=0, num_tasks=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeout_s": 0.0}, r"config\.env\.timeout_s is 0\.0"),
        ({"timeout_s": float("inf")}, r"config\.env\.timeout_s is inf"),
        ({"num_workers": -1}, r"config\.env\.num_workers is -1"),
        ({"name": "trial"}, r"config\.env\.name is .trial.*did you mean .trail."),
        ({"args": {"game": "chess"}}, "config.env.args.game is not an argument of BoardGame"),
    ],
)
def test_bad_configs_are_refused_with_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(**change).validate()


def test_there_is_a_worker_for_each_slot_up_to_a_limit_unless_the_setting_says_so():
    assert [EnvConfig().workers_for(slots) for slots in (1, 8, 512)] == [1, 8, MOST_WORKERS]
    assert EnvConfig(num_workers=3).workers_for(512) == 3
    assert EnvConfig(num_workers=100).workers_for(8) == 100


def test_playable_games_load():
    names = playable_games()
    assert {"tic_tac_toe", "connect_four", "chess", "go", "hex", "othello"} <= set(names)
    assert not {"kuhn_poker", "backgammon", "goofspiel", "phantom_ttt"} & set(names)
    for name in names:
        load_game(name)


MESSAGES = (Message(role="system", text=""), Message(role="tool", text="5", call_id="a"))


def test_well_formed_results_pass():
    for start in (
        Start(text="go", role="x"),
        Start(
            messages=MESSAGES, role="x", tools=({"name": "look", "parameters": {"a": [1, None]}},)
        ),
    ):
        assert check_start(start) is start
    for result in (
        step(messages=MESSAGES),
        step(),
        step(text="5", choices=("1", "")),
        step(text="5", allowed_token_ids=(1, 0)),
        end(reward=np.float32(1)),
        end(reward=-1, stop_reason="illegal", detail="x"),
    ):
        assert check_step(result) is result


class Unprintable:
    def __repr__(self):
        raise ZeroDivisionError


def step(**given) -> StepResult:
    return StepResult(**{"reward": 0.0, "done": False, **given})


def end(**given) -> StepResult:
    return step(**{"done": True, "stop_reason": "win", **given})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "step.. must return a StepResult; got None"),
        (("5", 0.0, False), "got a tuple"),
        (Unprintable(), "got a Unprintable"),
        (step(text=b"5"), "text must be a str"),
        (step(reward="1"), "reward must be a number"),
        (step(reward=True), "reward must be a number"),
        (step(reward=float("nan")), "number from"),
        (step(done=1), "done must be a bool"),
        (end(done=np.bool_(True)), "got a numpy.bool"),
        (step(done=True), "exactly if done"),
        (step(stop_reason="win"), "exactly if"),
        (end(stop_reason="unencodable"), "'unencodable'; .*, unencodable, .* are the run's own"),
        (end(text="5"), "empty when"),
        (end(messages=MESSAGES), "StepResult.messages must be empty when done"),
        (step(text="5", messages=MESSAGES), "both a text"),
        (step(choices=["1"]), "choices must be"),
        (step(choices=(1,)), "choices must be"),
        (step(allowed_token_ids=[1]), "allowed_token_ids must be a tuple; got a list"),
        (step(allowed_token_ids=(1, True)), "allowed_token_ids must hold int; got True"),
        (
            step(choices=("1",), allowed_token_ids=(1,)),
            "both choices and allowed_token_ids, .* give one of them",
        ),
        (end(allowed_token_ids=(1,)), "StepResult.allowed_token_ids must be empty when done"),
        (end(choices=("1",)), "StepResult.choices must be empty when done"),
        (step(metrics=1), "metrics must be a mapping"),
        (step(metrics={1: 1}), "name in StepResult.metr"),
        (step(metrics={"a": float("nan")}), r"StepResult.metrics\['a'\] must be a number; got nan"),
        (step(messages="hi"), "messages must be a tuple"),
        (step(role=1), "role must be a str"),
        (end(role="o"), "StepResult.role must be empty when done; got 'o'"),
        (step(side_rewards=1), "must be a mapping; got 1"),
        (step(side_rewards={1: 1.0}), "a role in StepResult.side_rewards must be a str"),
        (step(side_rewards={"o": float("inf")}), r"rewards\[.o.\] must be a number from .* inf"),
        (step(reply_rewards={"7": 1.0}), "the name '7'; it must be such as '7.1'"),
        (step(reply_rewards={"7.1": "1"}), r"reply_rewards\['7.1'\] must be a number; got '1'"),
        (step(messages=("hi",)), "must hold Message"),
    ],
)
def test_garbage_steps_are_named(result, message):
    with pytest.raises(InputError, match=message):
        check_step(result)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(role="policy", text="5"), "role is 'policy'; it must be one of system, us"),
        (Message(role="user", text=b"5"), "Message.text must be a str"),
        (Message(role="tool", text="5", call_id=7), "Message.call_id must be a str"),
    ],
)
def test_garbage_messages_are_named(message, words):
    with pytest.raises(InputError, match=words):
        check_start(Start(messages=(message,), role="x"))
    with pytest.raises(InputError, match=words):
        check_step(step(messages=(message,)))


@pytest.mark.parametrize("tools", [[{}], ("look",), ({"parameters": {1, 2}},)])
def test_garbage_tools_are_no_start(tools):
    with pytest.raises(InputError, match=r"Start\.tools"):
        check_start(Start(text="go", role="x", tools=tools))


@pytest.mark.parametrize(
    "result",
    [
        None,
        "text",
        Start(text="", role="x"),
        Start(text=1, role="x"),
        Start(role="x"),
        Start(text="go", role="x", choices="12"),
        Start(text="go", role="x", messages=MESSAGES),
    ],
)
def test_garbage_starts_are_named(result):
    with pytest.raises(InputError, match="Start"):
        check_start(result)


def test_envs_run_without_jax_and_other_modules_of_ours_and_print_nothing():
    code = """
import importlib, pkgutil, sys
for name in ('jax', 'jaxlib', 'flax', 'torch', 'tensorflow'):
    sys.modules[name] = None  # an import of it raises
import earl_jax.envs
for module in pkgutil.walk_packages(earl_jax.envs.__path__, 'earl_jax.envs.'):
    importlib.import_module(module.name)
ours = {m.split('.')[1] for m in sys.modules if m.startswith('earl_jax.')}
assert ours == {'envs', 'http', 'settings'}, ours
from earl_jax.envs.games.board_game import BoardGame
environment = BoardGame(seed=1, index=0)
print(environment.start().role, environment.step('4').done)
import logging
import transformers
logging.getLogger('transformers').warning('another warning')
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "x False\n"
    # Not "PyTorch was not found", but every other warning of transformers.
    assert done.stderr.strip() == "[transformers] another warning"
