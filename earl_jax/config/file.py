# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The only way to a `Config`: ConfigDict -> Config, strictly.

A config file (configs/*.py) returns an `ml_collections.ConfigDict` with what differs from the
defaults; `--config.section.key=value` changes it further. Every key must be a field, of the field's
type, within its rules, and have an effect in this run.
"""

import ast
import copy
import dataclasses
import difflib
import importlib.util
import json
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from earl_jax.algorithms.algorithms import find_algorithm
from earl_jax.config.config import Config, with_setting
from earl_jax.config.idle import idle_settings
from earl_jax.config.names import meant_by
from earl_jax.envs.registry import EnvConfig
from earl_jax.models.presets import fill_section, preset_named
from earl_jax.settings.errors import InputError, check_choice, where_raised

# A wheel has configs/ in the package, a checkout beside it.
_PACKAGE = Path(__file__).parents[1]
_CONFIGS = next(p / "configs" for p in (_PACKAGE, _PACKAGE.parent) if (p / "configs").is_dir())
# The run of a newcomer, and the config that benchmarks begin with.
DEFAULT_CONFIG = _CONFIGS / "trail_tiny_cpu.py"
BENCH_CONFIG = _CONFIGS / "tictactoe_tiny_cpu.py"

# Beside a run's config.json, where this names other runs.
SOURCES = "sources.json"

_PREEMPTED = (
    "the cheaper way is taken; to read all again, set config.rollout.preemption_host_gib to 0"
)
_FAILED = (
    "episodes that fail end a run in its first step only; later it waits and goes on, at most 5 "
    "minutes behind each step in which all failed"
)
_SPEEDS = "plans are chosen by the speeds of config.selector.table, and nothing is timed beforehand"
# Keys of the model that earlier versions wrote into each config.json, and that a preset or a
# checkpoint gives now.
_FORMER_OF_MODEL = (
    "attention_every",
    "latent_size",
    "linear_key_heads",
    "linear_key_size",
    "linear_value_heads",
    "linear_value_size",
    "num_dense_layers",
    "query_latent_size",
    "rope_size",
    "rope_theta",
    "shared_ffn_size",
    "value_size",
)
# Keys of earlier versions: the key that took their place, or a sentence about those that are no
# more, without which the config.json of an earlier run is read.
RENAMED_KEYS = {
    "config.dispatch": "a move goes all at once, a trainer's in pieces where memory is short",
    "config.rollout.append_rows": "it is fixed (APPEND_TOKENS in engine/config.py)",
    "config.rollout.copy_prefixes": "prompts are copied from shard to shard where that is faster",
    "config.rollout.model_logprobs": "they are recorded where config.train.ratio is 'model'",
    "config.rollout.parking": _PREEMPTED,
    "config.rollout.parking_host_gib": "config.rollout.preemption_host_gib",
    "config.rollout.preemption": _PREEMPTED,
    "config.rollout.share_prefixes": "what prompts have in common is always computed once",
    "config.rollout.step_rows": "a decode step has a row for each slot",
    "config.rollout.speculation": (
        "set config.rollout.num_draft_tokens, such as 4 (0: no speculation)"
    ),
    "config.eval.averaged": (
        "with config.train.ema_decay the average is evaluated, exported and served"
    ),
    "config.selector.compile_ahead": (
        "programs are compiled ahead with config.selector.table 'auto' on devices that are no CPUs"
    ),
    "config.selector.horizon_steps": "a switch has to pay for itself over 20 steps",
    "config.selector.hysteresis": "a plan that fits is left for a step shorter by more than 10 %",
    "config.selector.measure": _SPEEDS,
    "config.selector.measure_rounds": _SPEEDS,
    "config.selector.order": f"{_SPEEDS}; 'model' there is the same on every machine",
    "config.selector.page_sizes": "config.rollout.page_size (one size for the run)",
    "config.train.demonstration_steps": "config.train.sft_steps",
    "config.train.demonstration_updates": "config.train.sft_updates",
    "config.train.demonstration_learning_rate": "config.train.sft_learning_rate",
    "config.train.lora.base_dtype": "frozen weights are kept in config.model.compute_dtype",
    "config.train.max_skipped_steps": "a run ends behind 3 steps in a row without an update",
    "config.train.advantage": "config.algorithm",
    "config.train.turn_discount": "config.algorithm_args.turn_discount",
    "config.train.normalize_advantages": "config.algorithm_args.normalize_advantages",
    "config.train.clip_low": "config.algorithm_args.clip_low",
    "config.train.clip_high": "config.algorithm_args.clip_high",
    "config.log.report_every_steps": "report.html is made anew every 25 steps and at the end",
    "config.log.tensorboard": 'set config.log.trackers=("tensorboard",)',
    "config.env.game": (
        "config.env.name (or config.env.args.game with config.env.name='board_game')"
    ),
    "config.env.max_failed_share": _FAILED,
    "config.env.max_failed_steps": _FAILED,
    "config.env.trail": "config.env.args",
    **{
        f"config.env.{name}": f"config.env.args.{name}"
        for name in (
            "opponent", "mcts_simulations", "illegal_reward", "show_board", "mask_illegal"
        )
    },
}  # fmt: skip


def load_config_file(path: str | Path) -> ConfigDict:
    """Returns `get_config()` of a config file. Raises ValueError if the file is not one."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=3)
        raise InputError(
            f"--config={path}: no such file"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    spec = importlib.util.spec_from_file_location(f"earl_jax_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(
            f"--config={path}: a config is a Python file, NAME.py, with a function get_config(); "
            "to go on with a run, give the file that it began with"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        given = module.get_config() if hasattr(module, "get_config") else None
    # Whatever a user's file raises is a user's mistake.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        what = f"{type(error).__name__}: {error}{where_raised(error)}"
        raise InputError(f"--config={path}: {what}") from error
    if not isinstance(given, ConfigDict):
        raise InputError(
            f"--config={path}: it must have a function get_config() that returns an "
            "ml_collections.ConfigDict"
        )
    return given


def read_workdir_config(
    workdir: Path, overrides: Sequence[str] = (), *, learns: bool = True
) -> Config:
    """Returns the config of the run in a workdir; `learns` as in `Config.validate`.

    Raises ValueError where there is none.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise InputError(f"--workdir={workdir} holds no run: there is no {path}")
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise InputError(f"{path} is damaged: it is {given!r:.60}, and no object of settings")
    if "model_type" in given:
        raise InputError(
            f"--workdir={workdir} holds no run: it is a checkpoint of transformers; serve it with "
            "--model, or train from it with config.model.path, whose eval@0 is of the checkpoint"
        )
    return make_config(without_former(given), overrides, learns=learns, is_kept=True)


def without_former(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a workdir's config.json without the keys of earlier versions.

    Those of a model that no preset has are left, to be refused.
    """
    kept = copy.deepcopy(kept)
    if isinstance(model := kept.get("model"), dict):
        name = model.get("preset", "")
        defaults = preset_named(name if isinstance(name, str) else "")
        for key in _FORMER_OF_MODEL:
            if key in model and model[key] == getattr(defaults, key):
                del model[key]
    for path in (path for path, now in RENAMED_KEYS.items() if not now.startswith("config.")):
        _, *sections, key = path.split(".")
        values: Any = kept
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        if isinstance(values, dict):
            values.pop(key, None)
    return kept


def read_sources(workdir: Path) -> dict[str, int]:
    """Returns the steps of the other runs that a run began with, by the text that names these."""
    path = workdir / SOURCES
    return json.loads(path.read_text()) if path.is_file() else {}


def make_config(
    given: Mapping[str, Any] | ConfigDict,
    overrides: Sequence[str] = (),
    *,
    learns: bool = True,
    is_kept: bool = False,
) -> Config:
    """Returns the Config of a file's values and `section.key=value` overrides, fully checked.

    A file may leave a value to the command line: `config_dict.required_placeholder(str)`. An
    override of `algorithm` leaves out the file's `algorithm_args`, which are of its own algorithm,
    and one of `env.name` its `env.args`.
    One of `model.path` or `model.preset` leaves out the file's model, but for its `compute_dtype`.
    What overrides leave without effect takes its default: `train.sft_steps=0` is enough. So does
    what is without effect in a config that a workdir kept (`is_kept`), which may be of an earlier
    version with other defaults. `learns` as in `Config.validate`.

    Raises:
        ValueError: an unknown key (with the nearest name), a value of the wrong type, a broken
            rule, a key without effect, or a required key that is missing.
    """
    required: list[str] = []
    if isinstance(given, ConfigDict):
        values = _plain(given, "", required)
    else:
        values = copy.deepcopy(dict(given))
    # What the file itself leaves without effect is an error whatever overrides there are.
    own = set() if is_kept or not overrides else _idle_paths(values)
    _leave_out_of_others(values, overrides)
    if model_named(overrides) and isinstance(values.get("model"), dict):
        values["model"] = {k: v for k, v in values["model"].items() if k == "compute_dtype"}
        required = [path for path in required if not path.startswith("model.")]
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise InputError(f"--config.{override}: write it as --config.{path}=VALUE")
        _set(values, path.split("."), _parse(text), path)
    for path in required:
        if path not in (override.partition("=")[0] for override in overrides):
            raise InputError(
                f"config.{path} is left open by this config; give it: --config.{path}=VALUE"
            )
    config = _config_of(values)
    if overrides or is_kept:
        config = _without_idle(config, own | {each.partition("=")[0] for each in overrides})
    config.validate(learns=learns)
    return config


def _config_of(values: Mapping[str, Any]) -> Config:
    """Returns the Config of these values, of which only the types are checked."""
    values = dict(values)
    if isinstance(values.get("model"), Mapping):
        values["model"] = fill_section(values["model"])
    values["algorithm_args"] = _algorithm_settings(values)
    return _build(Config, values, "config")


def _idle_paths(values: Mapping[str, Any]) -> set[str]:
    """Returns the settings without effect among these values; none of values that cannot be."""
    try:
        config = _config_of(values)
        return {path for path, _, _ in idle_settings(config, config.defaults())}
    except InputError:
        return set()


def _leave_out_of_others(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Removes the arguments of the file's algorithm and environment where overrides name others."""

    def last(path: str, before: Any) -> Any:
        given = [
            _parse(each.partition("=")[2]) for each in overrides if each.startswith(f"{path}=")
        ]
        return given[-1] if given else before

    algorithm = values.get("algorithm", Config.algorithm)
    if last("algorithm", algorithm) != algorithm:
        values.pop("algorithm_args", None)
    env = values.get("env")
    name = env.get("name", EnvConfig.name) if isinstance(env, dict) else ""
    if isinstance(env, dict) and last("env.name", name) != name:
        env.pop("args", None)


def _without_idle(config: Config, given: Collection[str]) -> Config:
    """Returns the config with the defaults of what overrides leave without effect, but for them."""
    while left := [
        (path, default)
        for path, default, _ in idle_settings(config, config.defaults())
        if path not in given
    ]:
        # One that takes its default may leave others without effect.
        for path, default in left:
            config = with_setting(config, path.split("."), default)
    return config


def model_named(overrides: Sequence[str]) -> str:
    """Returns the path or preset by which an override says which model it is; "" for none."""
    pairs = (override.partition("=") for override in overrides)
    named = (_parse(text) for path, _, text in pairs if path in ("model.path", "model.preset"))
    return str(next(filter(None, named), ""))


def given_config(path: Path | None, overrides: Sequence[str]) -> tuple[ConfigDict, str]:
    """Returns what a training command begins with, and the name of its workdir.

    That is the file at `path`. Without one it is DEFAULT_CONFIG, or nothing where the command line
    names a model: the default's settings are for a model from scratch. Its budget and meshes are
    for its own episodes: without them where the command line names conversations to learn.
    """
    if path is None and (name := model_named(overrides)):
        return ConfigDict(), Path(name).name
    given = load_config_file(path or DEFAULT_CONFIG)
    if path is None and any(each.startswith("train.sft_path=") for each in overrides):
        del given["selector"]
    return given, (path or DEFAULT_CONFIG).stem


def _algorithm_settings(values: Mapping[str, Any]) -> Any:
    """Returns the algorithm's settings with what `values` give. Raises ValueError."""
    name = _typed(str, values.get("algorithm", Config.algorithm), "config.algorithm")
    settings = find_algorithm(name).settings
    given = _build_fields(type(settings), values.get("algorithm_args", {}), "config.algorithm_args")
    return dataclasses.replace(settings, **given)


def _plain(given: ConfigDict, prefix: str, required: list[str]) -> dict[str, Any]:
    """Returns `given` as plain dicts; adds the paths of required placeholders to `required`."""
    values = {}
    for key in given:
        try:
            value = given[key]
        except RequiredValueError:
            required.append(f"{prefix}{key}")
            continue
        nested = isinstance(value, ConfigDict)
        values[key] = _plain(value, f"{prefix}{key}.", required) if nested else value
    return values


def _set(values: dict[str, Any], names: list[str], value: Any, path: str) -> None:
    for name in names[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise InputError(f"config.{path}: {name} is a value, not a section")
    values[names[-1]] = value


def _parse(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _build(cls: type, values: Any, path: str) -> Any:
    return cls(**_build_fields(cls, values, path))


def _build_fields(cls: type, values: Any, path: str) -> dict[str, Any]:
    """Returns the values, checked and converted to the types of the fields of `cls`."""
    if not isinstance(values, Mapping):
        raise InputError(f"{path} is {values!r}; it is a section: set its fields, {path}.NAME")
    types = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise InputError(_unknown_key(cls, key, path, fields))
    return {
        key: _build(types[key], value, f"{path}.{key}")
        if dataclasses.is_dataclass(types[key])
        else _typed(types[key], value, f"{path}.{key}")
        for key, value in values.items()
    }


def _unknown_key(cls: type, key: str, path: str, fields: set[str]) -> str:
    if renamed := RENAMED_KEYS.get(f"{path}.{key}"):
        is_key = renamed.startswith("config.")
        return f"{path}.{key} {'is now' if is_key else 'is no setting any more:'} {renamed}"
    hint = meant_by(f"{path}.{key}", fields) or f"its fields are {', '.join(sorted(fields))}"
    return f"{path}.{key} is not a field of {cls.__name__}; {hint}"


def _typed(kind: Any, value: Any, path: str) -> Any:
    """Returns the value as the field's type; ints become floats and lists tuples."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        check_choice(value, arguments, path)
        # The choice itself: 1 is as good as True, and is written down as True.
        return arguments[arguments.index(value)]
    if origin in (typing.Union, UnionType):
        kind, words = arguments
        return _typed_or_word(kind, words, value, path)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise InputError(f"{path} is {value!r}; name its entries: {path}.NAME=VALUE")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{path} is {value!r}; give a list, {_listed(value, arguments[0])}")
        return tuple(_typed(arguments[0], entry, path) for entry in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value, path)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(
            f"{path} is {value!r}, a {type(value).__name__}; it must be of type {kind.__name__}"
        )
    return value


def _listed(value: Any, kind: type) -> str:
    """Returns how a list is written, with the value as its entries where it can be that."""
    entries: list[Any] = ["a", "b"] if kind is str else [1, 2]
    if isinstance(value, kind):
        # A mesh has commas of its own: data=4,tensor=2.
        is_several = isinstance(value, str) and "=" not in value
        if isinstance(value, str):
            # A list whose quotes a shell took: (data=4,).
            value = value.strip("()[]").rstrip(",")
        entries = value.split(",") if is_several else [value]
    return f"such as {entries} (on a command line in quotes)"


def _float(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"{path} is larger than any number of type float") from error


def _typed_or_word(kind: Any, words: Any, value: Any, path: str) -> Any:
    """Returns the value of a field such as `int | Literal["auto"]`."""
    if not isinstance(value, str):
        return _typed(kind, value, path)
    if value not in typing.get_args(words):
        each = " or ".join(map(repr, typing.get_args(words)))
        raise InputError(f"{path} is {value!r}; give {each}, or a value of {kind.__name__}")
    return value
