# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Combinations of settings that are refused: each rule of the table by configs that break it."""

import functools
import re
from dataclasses import replace

import pytest

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.config.combinations import OF_LEARNING, OF_MODEL, OF_SETTINGS, check_model
from earl_jax.config.config import Config, with_setting
from earl_jax.models.config import ModelConfig
from earl_jax.models.presets import preset_named
from earl_jax.settings.errors import InputError
from tests.support.settings import make_config

DEFAULTS = {name: algorithm.settings for name, algorithm in ALGORITHMS.items()}
LATE = {"asynchrony.max_staleness": 2}
STREAMED = {"asynchrony.parts": 2, "devices.num_rollout": 4}
IN_REWARD = {"kl_coefficient": 0.1, "kl_in": "reward"}
LINEAR = ModelConfig(attention_every=2)

# Changes of a config of 16 groups of 8 with GRPO, and words of the message.
SETTINGS_REFUSED = [
    ({"rollout.group_size": 3}, "128; it must be a multiple of config.rollout.group_size (3)"),
    ({"rollout.max_episode_tokens": 4}, "max_turn_tokens 4; an episode has a first message"),
    ({"train.micro_batches": 3}, "3; it must divide config.rollout.episodes_per_step (128)"),
    ({"tasks.name": "dataset"}, "config.tasks.name is 'dataset', and config.tasks.path is empty"),
    ({"eval.samples": 2, "eval.temperature": 0.0}, "give a temperature, or 1 sample"),
    ({"algorithm": "sft"}, "whatever their reward: set config.train.sft_steps"),
    ({"algorithm": "distillation"}, "name a run or a checkpoint there"),
    ({"rollout.group_size": 1}, "config.algorithm is 'grpo' with config.rollout.group_size of 1"),
    (
        {
            "rollout.group_size": 1,
            "algorithm": "reinforce",
            "algorithm_args": replace(DEFAULTS["reinforce"], baseline="group"),
        },
        "set config.rollout.group_size to 2 or more",
    ),
    (
        {"algorithm_args": replace(DEFAULTS["grpo"], kl_coefficient=0.1, kl_estimator="k1")},
        "the mean gradient of k1 is 0",
    ),
    *(
        (
            {"algorithm": name, "algorithm_args": replace(DEFAULTS[name], **IN_REWARD)},
            "its weight would change with them: set config.algorithm_args.kl_in to 'loss'",
        )
        for name in ("grpo", "cispo", "reinforce")
    ),
    ({"algorithm_args": replace(DEFAULTS["grpo"], dual_clip=1.1)}, "it must be 0, or above 1 +"),
    ({"algorithm": "tba", "train.correction": "truncated"}, "its loss is right whoever sampled"),
    *(
        (
            {"algorithm": name, "algorithm_args": args, "asynchrony.rule": "mask", **LATE},
            "whole episodes or sequences: set config.asynchrony.rule to 'in_order', 'wait' or",
        )
        for name, args in (
            ("ppo", DEFAULTS["ppo"]),
            ("tba", DEFAULTS["tba"]),
            ("rloo", replace(DEFAULTS["rloo"], **IN_REWARD)),
        )
    ),
    ({"asynchrony.refill": 1}, "refill is 1 with config.asynchrony.rule 'in_order'"),
    ({"asynchrony.reuse": 2, "asynchrony.rule": "wait", **LATE}, "reuse is 2 with config.asynchr"),
    (
        {"asynchrony.reuse": 2, "asynchrony.rule": "drop"},
        "reuse is 2 and config.asynchrony.max_staleness 0",
    ),
    (
        {"asynchrony.reuse": 2, "asynchrony.rule": "drop", "asynchrony.refill": 1, **LATE},
        "reuse is 2 and config.asynchrony.refill 1",
    ),
    ({**STREAMED, "asynchrony.rule": "drop", **LATE}, "set the rule to 'in_order'"),
    ({**STREAMED, "asynchrony.parts": 3}, "parts is 3; it must divide the 16 groups of a step"),
    ({"asynchrony.parts": 2}, "share their devices; set config.devices.num_rollout"),
    ({**STREAMED, "algorithm": "reinforce_plus_plus"}, "take one that compares within groups"),
    ({"train.mini_batches": 3}, "mini_batches is 3; it must divide the 16 groups of a step"),
    ({**STREAMED, "train.mini_batches": 2}, "are finished: set one of them to 1"),
    ({"devices.num_rollout": "auto"}, "is 'auto' in a synchronous run; its stages take turns"),
    (
        {"checkpoint.keep_every_steps": 70},
        "keep_every_steps is 70 and config.checkpoint.every_steps 50; steps without a checkpoint",
    ),
    (
        {"checkpoint.export": True, "model": ModelConfig(num_experts=4, windows=(8, 0))},
        "change its layers: no known family has layers with config.model.num_experts=4",
    ),
]
LEARNING_REFUSED = [
    *(
        (
            {"env.name": "tests.support.environments:WithDefaults", f"train.{field}": 1},
            f"config.train.{field} is 1, and config.env.name 'tests.support.environments:With",
        )
        for field in ("sft_steps", "sft_weight")
    ),
    *(
        ({"env.args": {"opponent": "self"}, **algorithm}, "for those of one side: set config.algo")
        for algorithm in (
            {"algorithm": "ppo"},
            {"algorithm": "tba"},
            {"algorithm": "rloo", "algorithm_args": replace(DEFAULTS["rloo"], **IN_REWARD)},
        )
    ),
    ({"rollout.top_k": 5}, "config.rollout.top_k is 5 with config.train.ratio 'behaviour'"),
    ({"rollout.top_p": 0.9}, "a change of the policy: set config.train.ratio to 'model'"),
    ({"rollout.min_p": 0.1}, "a change of the policy: set config.train.ratio to 'model'"),
    (
        {"algorithm": "ppo", "num_steps": 4, "train.critic.pretrain_steps": 4},
        "pretrain_steps is 4 and config.num_steps 4; the critic would learn alone in every step",
    ),
]
MODEL_REFUSED = [
    ({"rollout.kv_dtype": "int8"}, preset_named("deepseek-v3"), "kv_dtype is 'int8', but this mo"),
    ({"rollout.num_draft_tokens": 2}, LINEAR, "num_draft_tokens is 2, but this model has layers"),
    ({"rollout.preemption_host_gib": 1.0}, LINEAR, "is 1.0, but the model of config.model.path"),
    ({"train.balance_coefficient": 0.1}, ModelConfig(), "('there') has no experts; there is"),
]


def changed(changes):
    """Returns a config with these changes, which is not checked."""
    changes = {"algorithm_args": DEFAULTS[changes.get("algorithm", "grpo")], **changes}
    return functools.reduce(
        lambda config, change: with_setting(config, change[0].split("."), change[1]),
        changes.items(),
        make_config({"algorithm": "grpo", "rollout": {"group_size": 8}}),
    )


def broken(rules, config, *environment):
    return [rule for rule in rules if rule.breaks(config, *environment)]


def environment_of(config):
    played = config.open_environment()
    return played.make(**played.first_args)


@pytest.mark.parametrize(("changes", "words"), SETTINGS_REFUSED)
def test_settings_that_break_a_rule_are_refused_in_its_words(changes, words):
    config = changed(changes)
    [rule] = broken(OF_SETTINGS, config)
    with pytest.raises(InputError, match=re.escape(words)) as error:
        config.validate()
    assert str(error.value) == rule.words(config)


@pytest.mark.parametrize(("changes", "words"), LEARNING_REFUSED)
def test_rules_of_learning_refuse_training_but_not_evaluation(changes, words):
    config = changed(changes)
    [rule] = broken(OF_LEARNING, config, environment_of(config))
    with pytest.raises(InputError, match=re.escape(words)) as error:
        config.validate()
    assert str(error.value) == rule.words(config)
    config.validate(learns=False)


@pytest.mark.parametrize(("changes", "model", "words"), MODEL_REFUSED)
def test_settings_that_do_not_go_with_the_model_are_refused(changes, model, words):
    """The model of a path is known when the checkpoint is read; another is at once."""
    config = changed({"model.path": "there", **changes})
    assert broken(OF_MODEL, replace(config, model=ModelConfig(num_experts=4))) == []
    [rule] = broken(OF_MODEL, replace(config, model=replace(model, path="there")))
    with pytest.raises(InputError, match=re.escape(words)):
        check_model(config, model)
    with pytest.raises(InputError) as error:
        changed({"model": model, **changes}).validate()
    at_once = str(error.value)
    # Without a path the last two settings are of those without effect.
    assert "no effect" in at_once or at_once == rule.words(config)


def test_the_defaults_of_every_algorithm_break_no_rule():
    needs = {"sft": {"train.sft_path": "there"}, "distillation": {"reference_from": "there"}}
    for name in DEFAULTS:
        config = changed({"algorithm": name, **needs.get(name, {})})
        assert broken((*OF_SETTINGS, *OF_MODEL), config) == [], name
        assert broken(OF_LEARNING, config, environment_of(config)) == [], name
    Config().validate()


def test_a_run_that_plays_nothing_may_be_evaluated_where_replies_are_choices():
    changes = {"algorithm": "sft", "train.sft_path": "there", "env.args": {"mask_illegal": True}}
    config = changed(changes)
    assert broken(OF_LEARNING, config, environment_of(config)) == []


def test_conversations_to_learn_from_may_be_shorter_than_a_turn_that_nobody_plays():
    changes = {"algorithm": "sft", "train.sft_path": "there", "rollout.max_episode_tokens": 4}
    assert broken(OF_SETTINGS, changed(changes)) == []


def test_every_rule_is_broken_by_one_of_these_configs():
    found = []
    for changes, _ in SETTINGS_REFUSED:
        found += broken(OF_SETTINGS, changed(changes))
    for changes, _ in LEARNING_REFUSED:
        config = changed(changes)
        found += broken(OF_LEARNING, config, environment_of(config))
    for changes, model, _ in MODEL_REFUSED:
        found += broken(OF_MODEL, replace(changed(changes), model=model))
    assert set(found) == {*OF_SETTINGS, *OF_LEARNING, *OF_MODEL}
