# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The strict config: every mistake is an error at the start, in words that say what to change."""

import copy
import dataclasses
import json
import re

import pytest
from ml_collections import ConfigDict, config_dict

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.config.config import Config, find_teacher
from earl_jax.config.file import RENAMED_KEYS, load_config_file, make_config, read_workdir_config
from earl_jax.config.keys import all_keys
from earl_jax.config.names import NAMES_ELSEWHERE
from earl_jax.envs.games.board_game import BoardGame
from earl_jax.models.config import ModelConfig
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.presets import preset_named
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.settings.arguments import argument_names
from earl_jax.settings.errors import InputError
from tests.support import ROOT
from tests.support.settings import make_config as make_small_config

SECTIONS = [f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default)]


def with_overrides(*overrides, given=()):
    return make_small_config(dict(given), overrides)


def value_at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


# What is accepted.


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ((), 16),
        (("rollout.context_buckets=(512,1023)",), 16),
        (("rollout.context_buckets=(512,1024)",), 128),
        (("rollout.context_buckets=(512,1024)", "rollout.page_size=32"), 32),
    ],
)
def test_pages_are_large_for_long_contexts_unless_their_size_is_given(given, size):
    assert with_overrides(*given).rollout.tokens_a_page == size


def test_values_of_a_file_are_read_and_other_settings_keep_their_defaults():
    config = make_config(ConfigDict({"num_steps": 7, "model": {"width": 32}}))
    assert config == dataclasses.replace(
        Config(), num_steps=7, model=dataclasses.replace(Config().model, width=32)
    )


@pytest.mark.parametrize(
    "override, path, value",
    [
        ("num_steps=12", "num_steps", 12),
        ("seed=2147483647", "seed", 2**31 - 1),
        ("train.learning_rate=1e-3", "train.learning_rate", 1e-3),
        ("train.learning_rate=1", "train.learning_rate", 1.0),
        ("log.trace=true", "log.trace", True),
        ("env.name=connect_four", "env.name", "connect_four"),
        ("env.args.show_board=True", "env.args", {"show_board": True}),
        ("env.name='tic_tac_toe'", "env.name", "tic_tac_toe"),
        ("model.compute_dtype=bfloat16", "model.compute_dtype", "bfloat16"),
        ("rollout.context_buckets=(16,40)", "rollout.context_buckets", (16, 40)),
        ("rollout.context_buckets=[16, 40]", "rollout.context_buckets", (16, 40)),
        ("rollout.context_buckets=16,40", "rollout.context_buckets", (16, 40)),
        ("selector.rollout_meshes=('data=8',)", "selector.rollout_meshes", ("data=8",)),
        ("selector.train_meshes=()", "selector.train_meshes", ()),
    ],
)
def test_overrides(override, path, value):
    got = value_at(with_overrides(override), path)
    assert got == value
    assert type(got) is type(value)


def test_an_override_changes_its_key_alone_and_the_last_one_counts():
    given = {"train": {"epochs": 2, "micro_batches": 4}, "num_steps": 5}
    config = make_config(given, ["train.epochs=3", "train.epochs=4"])
    assert (config.train.epochs, config.train.micro_batches, config.num_steps) == (4, 4, 5)


def test_making_a_config_leaves_the_given_settings_unchanged():
    given = {"train": {"epochs": 2}}
    before = copy.deepcopy(given)
    make_config(given, ["train.epochs=3"])
    assert given == before


def test_an_int_is_a_float_where_one_is_wanted_and_a_bool_is_no_number():
    rate = make_config({"train": {"learning_rate": 1}}).train.learning_rate
    assert (rate, type(rate)) == (1.0, float)
    for path in ("train.epochs", "train.learning_rate", "num_steps"):
        with pytest.raises(ValueError, match=f"config.{path} is True, a bool; .* type (int|float)"):
            with_overrides(f"{path}=true")


def test_as_dict_is_json_and_builds_the_same_config_again():
    config = with_overrides(
        "rollout.context_buckets=(16,40)",
        "selector.train_meshes=('data=4,fsdp=2', 'data=8')",
        "env.args.opponent=mcts",
        "env.args.mcts_simulations=7",
        "train.learning_rate=0.1",
        "log.trace=true",
    )
    saved = json.loads(json.dumps(config.as_dict(), allow_nan=False))
    # Which process this is says nothing about the run.
    assert set(saved) == {f.name for f in dataclasses.fields(Config)} - {"distributed"}
    for form in (saved, ConfigDict(saved)):
        assert json.loads(json.dumps(make_config(form).as_dict())) == saved
    assert saved["env"]["args"] == {
        "opponent": "mcts",
        "mcts_simulations": 7,
        "illegal_reward": -1.0,
        "show_board": False,
        "mask_illegal": False,
    }


# Unknown keys.


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"rollout": {"num_slot": 4}},
            "config.rollout.num_slot is not a field of RolloutConfig; did you mean 'num_slots'?",
        ),
        ({"rollot": {}}, "config.rollot is not a field of Config; did you mean 'rollout'?"),
        ({"num_step": 3}, "config.num_step is not a field of Config; did you mean 'num_steps'?"),
        (
            {"learning_rate": 0.1},
            "config.learning_rate is not a field of Config; there is config.train.learning_rate "
            "and config.train.critic.learning_rate",
        ),
        (
            {"train": {"num_slots": 8}},
            "config.train.num_slots is not a field of TrainConfig; "
            "there is config.rollout.num_slots",
        ),
        (
            {"log": {"xyz": 1}},
            "config.log.xyz is not a field of LogConfig; its fields are trace, trackers, "
            "trajectories_every_steps",
        ),
    ],
)
def test_an_unknown_key_is_an_error_with_its_path_and_the_nearest_name(given, message):
    for form in (given, ConfigDict(given)):
        with pytest.raises(ValueError) as error:
            make_config(form)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.lr=1", "there is config.train.learning_rate"),
        ("lr=1", "there is config.train.learning_rate"),
        ("batch_size=8", "there is config.rollout.episodes_per_step"),
        ("train.batchSize=8", "there is config.rollout.episodes_per_step"),
        ("rollout.max_new_tokens=8", "there is config.rollout.max_turn_tokens"),
        ("steps=8", "there is config.num_steps"),
        ("model.name=x", "there is config.model.path (a checkpoint) or config.model.preset"),
        ("train.temperature=1", "there is config.rollout.temperature and config.eval.temperature"),
        ("output_dir=x", "the flag --workdir=DIR says where the run lives"),
        ("learning_rat=1", "did you mean config.train.learning_rate?"),
        ("train.clip_lo=1", "did you mean config.algorithm_args.clip_low?"),
        ("algorithm_args.gae_lambda=1", "it is a setting of config.algorithm 'ppo'"),
    ],
)
def test_a_name_of_another_program_or_section_finds_the_key(override, hint):
    with pytest.raises(InputError, match=re.escape(f"; {hint}")):
        with_overrides(override)


def test_names_of_other_programs_lead_to_keys_that_exist():
    keys = set(all_keys())
    meant = {name: re.findall(r"config\.[a-z_.]+", text) for name, text in NAMES_ELSEWHERE.items()}
    assert {one.rstrip(".") for found in meant.values() for one in found} <= keys
    # A key's own name needs no entry.
    assert not meant.keys() & {key.rpartition(".")[2] for key in keys}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_refuses_a_key_that_it_does_not_have(section):
    with pytest.raises(
        ValueError, match=f"^config.{section}.qqq is not a field of \\w+(Config|Settings); "
    ):
        make_config({section: {"qqq": 1}})


@pytest.mark.parametrize("key", RENAMED_KEYS)
def test_a_key_of_an_earlier_version_is_none_now_and_those_that_it_names_are(key):
    known = {*all_keys(), *(f"config.env.args.{name}" for name in argument_names(BoardGame) or ())}
    with pytest.raises(InputError, match=f"{re.escape(key)} is (now config|no setting any more)"):
        make_config({}, [f"{key.removeprefix('config.')}=1"])
    named = re.findall(r"config\.(?!py\b)[\w.]*\w", RENAMED_KEYS[key])
    assert key not in known and set(named) <= known


# Wrong types.


@pytest.mark.parametrize(
    "override, words",
    [
        ("num_steps=3.0", "config.num_steps is 3.0, a float; it must be of type int"),
        ("num_steps=many", "config.num_steps is 'many', a str; it must be of type int"),
        ("train.learning_rate=fast", "config.train.learning_rate is 'fast'"),
        ("train.learning_rate=None", "config.train.learning_rate is None, a NoneType"),
        ("log.trace=1", "config.log.trace is 1, a int; it must be of type bool"),
        ("rollout.context_buckets=32", "buckets is 32; give a list, such as [32] (on a"),
        ("rollout.context_buckets=x", "buckets is 'x'; give a list, such as [1, 2] (on a"),
        ("train.lora.targets=up,out", "is 'up,out'; give a list, such as ['up', 'out'] (on a"),
        ("train.lora.targets=(up,)", "is '(up,)'; give a list, such as ['up'] (on a command"),
        ("rollout.context_buckets=(32,'a')", "config.rollout.context_buckets is 'a'"),
        ("rollout.context_buckets=(32,4.5)", "config.rollout.context_buckets is 4.5"),
        (
            "selector.rollout_meshes=data=8",
            "config.selector.rollout_meshes is 'data=8'; give a list, such as ['data=8'] (on a",
        ),
        ("selector.rollout_meshes=(8,)", "config.selector.rollout_meshes is 8"),
        ("algorithm=3", "config.algorithm is 3, a int; it must be of type str"),
        ("algorithm=gpro", "config.algorithm is 'gpro'; did you mean 'grpo'?"),
        ("algorithm=x", "baseline, ppo, tba, distillation, sft, or give your own as 'module:name'"),
        ("algorithm=no_module:x", "config.algorithm is 'no_module:x', which cannot be imported"),
        ("algorithm=math:pi", "config.algorithm is 'math:pi', which is of type float"),
        ("algorithm_args=3", "config.algorithm_args is 3; it is a section"),
        ("algorithm_args.clip_lo=1", "config.algorithm_args.clip_lo is not a field of Reinf"),
        ("algorithm_args.clip_low=x", "config.algorithm_args.clip_low is 'x', a str"),
        ("train.advantage=grpo", "config.train.advantage is now config.algorithm"),
        ("train.clip_low=.1", "config.train.clip_low is now config.algorithm_args.clip_low"),
        (
            "rollout.weight_dtype=int4",
            "config.rollout.weight_dtype is 'int4'; choose one of 'compute', 'int8'",
        ),
        (
            "rollout.compute_dtype=int8",
            "config.rollout.compute_dtype is 'int8'; choose one of 'model', 'float32', 'bfloat16'",
        ),
        ("train=3", "config.train is 3; it is a section: set its fields, config.train.NAME"),
        ("num_steps.x=3", "config.num_steps is {'x': 3}"),
        ("train.epochs", "--config.train.epochs: write it as --config.train.epochs=VALUE"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(override, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        with_overrides(override)


# Rules of one key by examples; those between keys are in test_combinations.py.
RULES = [
    ("num_steps=0", "config.num_steps is 0; it must be at least 1"),
    ("seed=-1", "config.seed is -1"),
    ("devices.platform=tpux", "config.devices.platform is 'tpux'; choose one of 'auto', 'cpu'"),
    ("env.name=tictactoe", "config.env.name is 'tictactoe'; did you mean 'tic_tac_toe'"),
    ("env.args.opponent=mtcs", "opponent is 'mtcs'; choose one of 'random', 'mcts'"),
    ("model.num_heads=3", "config.model.num_heads is 3.*config.model.num_kv_heads (2)"),
    ("model.head_size=15", "config.model.head_size is 15"),
    ("rollout.num_slots=0", "config.rollout.num_slots is 0"),
    ("rollout.num_draft_tokens=-1", "config.rollout.num_draft_tokens is -1; it must be at least 0"),
    ("rollout.top_p=0", "config.rollout.top_p is 0.0; it must lie in (0, 1]"),
    ("train.ratio=old", "config.train.ratio is 'old'; choose one of 'behaviour', 'model'"),
    ("rollout.temperature=0", "config.rollout.temperature is 0.0"),
    ("rollout.context_buckets=()", "config.rollout.context_buckets is ()"),
    ("rollout.context_buckets=(32,16)", "config.rollout.context_buckets is (32, 16)"),
    ("rollout.context_buckets=(1,16)", "config.rollout.context_buckets is (1, 16)"),
    ("selector.rollout_meshes=('data=4,model=2',)", "config.selector.rollout_meshes.*'model=2'"),
    ("selector.train_meshes=('data=four',)", "config.selector.train_meshes.*'data=four'"),
    ("selector.rollout_meshes=('fsdp=8',)", "config.selector.rollout_meshes has 'fsdp=8'"),
    ("selector.table=", "config.selector.table is empty; give 'auto', 'model', or the path"),
    ("rollout.preemption_host_gib=-1", "preemption_host_gib is -1.0; it must be finite"),
    ("num_steps=3;num_steps.x=4", "config.num_steps.x: num_steps is a value, not a section"),
    (
        "rollout.weight_dtype=int8;train.importance_cap=0.5",
        "config.train.importance_cap is 0.5; it must be at least 1.0",
    ),
    ("train.adam_eps=0.0", "config.train.adam_eps is 0.0; it must be at least 1e-30"),
    ("train.mini_batches=0", "config.train.mini_batches is 0; it must be at least 1"),
    ("algorithm_args.turn_discount=1.01", "config.algorithm_args.turn_discount is 1.01"),
    ("checkpoint.keep=1", "config.checkpoint.keep is 1"),
    ("eval.games=-1", "config.eval.games is -1"),
    ("eval.final_games=0", "config.eval.final_games is 0"),
    ("eval.temperature=0;eval.top_k=3", "config.eval.temperature is 0.*config.eval.top_k"),
]


@pytest.mark.parametrize("override, words", RULES)
def test_a_broken_rule_is_an_error_that_names_the_field(override, words):
    with pytest.raises(ValueError) as error:
        with_overrides(*override.split(";"))
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    assert re.search(pattern, str(error.value)), str(error.value)


# Keys without effect.


def test_the_number_of_devices_that_play_may_be_the_selectors():
    config = with_overrides("devices.num_rollout=auto", "asynchrony.max_staleness=2")
    assert config.devices.num_rollout == "auto" and config.devices.are_apart
    assert not make_config({}).devices.are_apart
    for wrong, words in (
        (["devices.num_rollout=most"], "is 'most'; give 'auto', or a value of int"),
        (["devices.num_rollout=1.5"], "must be of type int"),
        (["devices.num_rollout=-1"], "must be at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            with_overrides(*wrong)


@pytest.mark.parametrize(
    "idle, path, reason",
    [
        (
            ["train.final_learning_rate=0.5", "train.schedule=constant"],
            "train.final_learning_rate",
            "config.train.schedule is 'constant'",
        ),
        (["train.sft_updates=3"], "train.sft_updates", "config.train.sft_steps is 0"),
        (
            ["devices.num_cpu_devices=4", "devices.platform=gpu"],
            "devices.num_cpu_devices",
            "config.devices.platform is 'gpu'",
        ),
        (
            ["selector.offload=on", "devices.num_rollout=4"],
            "selector.offload",
            "config.devices.num_rollout gives the trainer devices of its own",
        ),
        (
            ["train.importance_cap=3", "train.correction=auto"],
            "train.importance_cap",
            "there is no correction here",
        ),
        (
            ["algorithm_args.clip_low=0.1", "rollout.weight_dtype=int8"],
            "algorithm_args.clip_low",
            "config.train.epochs is 1",
        ),
        *(
            (["train.proximal=log_linear", *others], "train.proximal", reason)
            for others, reason in (
                (["train.correction=none", "train.epochs=2"], "there is no correction here"),
                (["asynchrony.max_staleness=2"], "config.train.mini_batches too"),
                (["train.epochs=2", "rollout.weight_dtype=int8"], "max_staleness is 0"),
                (
                    [
                        "algorithm=ppo",
                        "algorithm_args.kl_coefficient=0.1",
                        "train.epochs=2",
                        "asynchrony.max_staleness=2",
                    ],
                    "penalties in the reward are of a pass that also gives these",
                ),
            )
        ),
        (["train.ess_scaling=sqrt"], "train.ess_scaling", "config.train.epochs is 1"),
        (["checkpoint.keep_best=1", "eval.games=0"], "checkpoint.keep_best", "eval.games is 0"),
        (
            ["selector.offload=on", "asynchrony.max_staleness=1"],
            "selector.offload",
            "stays on the devices",
        ),
        *(
            ([value, "algorithm=sft", "train.sft_path=there"], value.partition("=")[0], reason)
            for value, reason in (
                ("rollout.temperature=0.7", "plays nothing"),
                ("rollout.top_p=0.9", "plays nothing"),
                ("train.ratio=model", "plays nothing"),
                ("checkpoint.keep_best=1", "plays nothing, and config.eval.sft_path is ''"),
            )
        ),
        (
            [
                "algorithm_args.anchor=history",
                "algorithm=gigpo",
                "algorithm_args.turn_weight=0",
                "rollout.group_size=2",
            ],
            "algorithm_args.anchor",
            "config.algorithm_args.turn_weight is 0",
        ),
        (
            ["algorithm_args.overlong_buffer=4", "algorithm=dapo", "rollout.group_size=2"],
            "algorithm_args.overlong_buffer",
            "overlong_tokens is 0",
        ),
        (
            [
                "algorithm_args.clip_low=0.1",
                "algorithm=distillation",
                "algorithm_args.kl_in=loss",
                "algorithm_args.kl_estimator=k2",
                "train.epochs=2",
                "reference_from=there",
            ],
            "algorithm_args.clip_low",
            "config.algorithm_args.kl_in is 'loss'",
        ),
        (["tasks.reward=a:b"], "tasks.reward", "a dataset needs config.tasks.path"),
    ],
)
def test_a_key_without_effect_is_an_error_that_says_why(idle, path, reason):
    with pytest.raises(ValueError) as error:
        with_overrides(*idle)
    message = str(error.value)
    assert f"config.{path}" in message and "no effect" in message and reason in message
    # Each is fine without the other.
    make_config({}, idle[1:])


def test_override_resets_settings_that_lose_their_effect_in_turn():
    given = {"algorithm": "dapo", "asynchrony": {"refill": 2, "rule": "drop"}}
    given["rollout"] = {"group_size": 2}
    assert make_config(given, ["algorithm=grpo"]).asynchrony == AsynchronyConfig()
    given = {"asynchrony": {"max_staleness": 2, "rule": "drop", "reuse": 2}}
    assert make_config(given, ["asynchrony.max_staleness=0"]).asynchrony == AsynchronyConfig()


def test_an_algorithm_that_is_named_again_keeps_the_arguments_of_the_file():
    given = {"algorithm": "ppo", "algorithm_args": {"gae_lambda": 0.9}}
    assert make_config(given, ["algorithm=ppo"]).algorithm_args.gae_lambda == 0.9
    assert make_config(given, ["algorithm=grpo", "rollout.group_size=2"]).algorithm_args == (
        ALGORITHMS["grpo"].settings
    )


def test_values_that_python_cannot_hold_are_errors_in_words():
    with pytest.raises(InputError, match="config.env.args is '{.1.:2}'"):
        with_overrides("env.args={[1]:2}")
    with pytest.raises(InputError, match="learning_rate is larger than any number"):
        with_overrides(f"train.learning_rate={10**400}")
    with pytest.raises(InputError, match="template_arguments must hold what JSON can say"):
        with_overrides("chat.template_arguments={'a':{1}}")


def test_a_run_is_known_as_a_teacher_without_its_checkpoints(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config({}).as_dict()))
    assert find_teacher(str(tmp_path)) is find_teacher(f"{tmp_path}@3") is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="model_type is None"):
        find_teacher(str(tmp_path))


# The rollout's precision, and the correction for it.


@pytest.mark.parametrize(
    ("overrides", "dtype", "cap"),
    [
        ([], "float32", 0),
        (["model.compute_dtype=bfloat16"], "bfloat16", 0),
        (["model.compute_dtype=bfloat16", "rollout.compute_dtype=bfloat16"], "bfloat16", 0),
        (["rollout.compute_dtype=bfloat16"], "bfloat16", 2),
        (["model.compute_dtype=bfloat16", "rollout.compute_dtype=float32"], "float32", 2),
        (["rollout.weight_dtype=int8"], "float32", 2),
        (["rollout.weight_dtype=int8", "train.importance_cap=5"], "float32", 5),
        (["rollout.weight_dtype=int8", "train.correction=none"], "float32", 0),
        (["train.correction=truncated"], "float32", 2),
        (["asynchrony.max_staleness=2"], "float32", 2),
        (["asynchrony.max_staleness=2", "train.correction=none"], "float32", 0),
        # Without the correction there is a ratio to be clipped, in one epoch too.
        (
            ["rollout.weight_dtype=int8", "train.correction=none", "algorithm_args.clip_low=0.1"],
            "float32",
            0,
        ),
    ],
)
def test_the_loss_is_corrected_where_the_rollout_has_another_precision_or_is_ahead(
    overrides, dtype, cap
):
    config = with_overrides(*overrides)
    assert config.rollout.computes_as(config.model.compute_dtype) == dtype
    assert config.importance_cap == cap


# Files.

GOOD_FILE = """
from ml_collections import ConfigDict, config_dict
def get_config():
    return ConfigDict({"num_steps": 3})
"""


@pytest.mark.parametrize(
    "source, words",
    [
        ("def get_config():\n    return 1 / 0", "ZeroDivisionError: division by zero (/"),
        ("def get_config():\n    return 1 / 0", "broken.py, line 2)"),
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("def get_config(:", "SyntaxError"),
        ("import no_such_module_of_mine", "ModuleNotFoundError: No module named"),
        ("x = 1", "it must have a function get_config() that returns an ml_collections.Config"),
        (
            "def get_config():\n    return {'num_steps': 3}",
            "get_config() that returns an ml_collections.Config",
        ),
        ("def get_config(needed): pass", "TypeError"),
    ],
)
def test_a_config_file_that_is_none_is_an_error_that_names_it(tmp_path, source, words):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ValueError) as error:
        load_config_file(path)
    assert str(error.value).startswith(f"--config={path}: ")
    assert words in str(error.value)


def test_a_config_file_that_is_no_python_is_an_error(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="config.json: a config is a Python file, NAME.py"):
        load_config_file(path)


def test_a_missing_config_file_names_the_nearest(tmp_path):
    (tmp_path / "tictactoe_tiny_cpu.py").write_text(GOOD_FILE)
    with pytest.raises(ValueError, match="no such file; did you mean tictactoe_tiny_cpu.py?"):
        load_config_file(tmp_path / "tictactoe_tiny.py")
    with pytest.raises(ValueError, match="no such file$"):
        load_config_file(tmp_path / "nowhere" / "zzz.py")
    with pytest.raises(ValueError, match="no such file"):
        load_config_file(tmp_path)


QWEN2 = ROOT / "tests/reference/qwen2"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
@pytest.mark.parametrize("given", [f"model.path={QWEN2}", "model.preset=qwen2.5-0.5b"])
def test_a_model_of_the_command_line_replaces_that_of_the_file(path, given):
    model = make_config(load_config_file(path), [given]).model
    file_s = load_config_file(path).get("model", {}).get("compute_dtype", "bfloat16")
    assert model.compute_dtype == file_s
    if "path" in given:
        assert model == ModelConfig(path=str(QWEN2), compute_dtype=file_s)
    else:
        assert model == dataclasses.replace(preset_named("qwen2.5-0.5b"), compute_dtype=file_s)


def test_the_shape_on_the_command_line_counts_beside_its_preset_and_not_beside_a_path():
    given = {"model": {"num_layers": 1, "ffn_size": 128}}
    model = make_config(given, ["model.num_layers=3", "model.preset=qwen2.5-0.5b"]).model
    assert (model.num_layers, model.width, model.ffn_size) == (3, 896, 4864)
    with pytest.raises(ValueError, match="config.model.num_layers = 3 has no effect in this run"):
        make_config(given, ["model.num_layers=3", "model.path=/here"])
    # No model is named: the file's shape stays.
    assert make_config(given, ["model.path=''"]).model.num_layers == 1


def test_the_defaults_suit_a_pretrained_model():
    config = make_config({"model": {"path": "/here"}})
    assert config.model.compute_dtype == "bfloat16"
    assert make_config({"model": {"preset": "qwen3-8b"}}).model.compute_dtype == "bfloat16"
    assert make_config({}).model.compute_dtype == "float32", "from scratch"
    given = {"model": {"path": "/here", "compute_dtype": "float32"}}
    assert make_config(given).model.compute_dtype == "float32"
    assert (config.algorithm, config.rollout.group_size) == ("grpo", 8)
    assert config.train.learning_rate == 1e-6
    assert config.selector.budget_bytes_per_device == 0 and config.devices.platform == "auto"
    assert config.rollout.max_turn_tokens == 1024 and config.rollout.max_episode_tokens == 0


def test_required_placeholders_of_a_file_must_be_given():
    given = ConfigDict({"seed": 3, "model": {"path": config_dict.required_placeholder(str)}})
    with pytest.raises(ValueError, match=r"config.model.path is left open .*--config.model.path="):
        make_config(given)
    with pytest.raises(ValueError, match="config.model.path is left open"):
        make_config(given, ["model.paths=/here"])
    config = make_config(given, ["model.path=/here"])
    assert (config.seed, config.model.path) == (3, "/here")


def test_override_resets_settings_that_lose_their_effect():
    given = {"train": {"sft_steps": 5, "sft_updates": 3}}
    config = make_config(given, ["train.sft_steps=0"])
    assert (config.train.sft_steps, config.train.sft_updates) == (0, Config().train.sft_updates)
    # The complete config is one that can be read again.
    assert make_config(config.as_dict()).as_dict() == config.as_dict()
    with pytest.raises(ValueError, match="config.train.sft_updates = 4 has no effect"):
        make_config(given, ["train.sft_steps=0", "train.sft_updates=4"])
    # Not what the file left without effect itself.
    for overrides in ([], ["num_steps=5"]):
        with pytest.raises(ValueError, match="config.train.sft_updates = 3 has no effect"):
            make_config({"train": {"sft_updates": 3}}, overrides)
    assert make_config({"train": {"sft_updates": 3}}, ["train.sft_steps=1"]).train.sft_updates == 3


def test_a_run_of_before_is_read_without_the_settings_that_are_no_more(tmp_path):
    given = {
        "selector": {"horizon_steps": 20, "hysteresis": 0.2, "budget_bytes_per_device": 9},
        "dispatch": {"forbid_host_bytes": "auto", "chunk_bytes": 0},
        "log": {"tensorboard": False, "report_every_steps": 5},
        "env": {"max_failed_steps": 3, "max_failed_share": 0.5},
        "train": {"max_skipped_steps": 5, "lora": {"base_dtype": "float32"}},
        "model": {"latent_size": 0, "linear_key_heads": 2, "rope_theta": 10000.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert read_workdir_config(tmp_path).selector.budget_bytes_per_device == 9
    for override in (
        "selector.horizon_steps=3",
        "selector.hysteresis=0.2",
        "log.tensorboard=True",
        "log.report_every_steps=5",
        "train.max_skipped_steps=5",
        "train.lora.base_dtype=float32",
        "env.max_failed_steps=3",
        "env.max_failed_share=0.5",
        "model.rope_theta=20000.0",
    ):
        with pytest.raises(InputError, match=override.partition("=")[0]):
            read_workdir_config(tmp_path, [override])


def test_a_run_of_before_whose_model_has_sizes_that_no_preset_has_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"latent_size": 12}}))
    with pytest.raises(InputError, match="config.model.latent_size is no setting"):
        read_workdir_config(tmp_path)


def test_a_run_of_before_may_have_other_defaults_of_what_is_without_effect(tmp_path):
    given = {"train": {"lora": {"rank": 0, "targets": ["query", "value"]}}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert read_workdir_config(tmp_path).train.lora == LoraConfig()
    with pytest.raises(InputError, match="config.train.lora.targets = .* has no effect"):
        make_config(given)


def test_a_run_reads_the_defaults_of_its_environment_as_they_are(tmp_path):
    """Its config.json has them too, as far as JSON can hold them."""
    env = {"name": "tests.support.environments:WithDefaults", "args": {"word": "b"}}
    config = make_config({"env": env})
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    again = read_workdir_config(tmp_path)
    assert again.env.args == {"limit": None, "pair": [1, 2], "word": "b"}
    made = again.env.maker()(seed=3)
    assert (made.limit, made.pair, made.tools, made.word) == (None, (1, 2), (len,), "b")
    with pytest.raises(InputError, match=r"env.args.limit is 'x', of type str"):
        read_workdir_config(tmp_path, ["env.args.limit=x"])


def test_rules_of_learning_do_not_hold_for_evaluations(tmp_path):
    config = make_config({"train": {"sft_steps": 3}})
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    cut = ["rollout.top_k=5"]
    assert read_workdir_config(tmp_path, cut, learns=False).train.sft_steps == 3
    with pytest.raises(InputError, match="set config.train.ratio"):
        read_workdir_config(tmp_path, cut)


def test_another_environment_has_none_of_the_arguments_of_the_files():
    given = {"env": {"name": "trail", "args": {"num_steps": 4}}}
    other = make_config(given, ["env.name=tic_tac_toe", "env.args.opponent=mcts"])
    assert other.env.args == {"opponent": "mcts"}
    assert make_config(given, ["env.name=trail"]).env.args == {"num_steps": 4}
