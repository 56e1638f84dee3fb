# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Combinations of settings that a run refuses, each with its reason.

Rules of one setting are beside its record, settings without effect in idle.py. What depends on the
devices, the processes or a checkpoint's files is refused where it is found.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from earl_jax.algorithms.settings import PolicySettings
from earl_jax.engine.config import Sampling
from earl_jax.envs.environment import OffersExamples
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.config import RolloutConfig
from earl_jax.settings.errors import InputError

if TYPE_CHECKING:
    from earl_jax.config.config import Config


class Rule(NamedTuple):
    """A combination of settings that is refused.

    `breaks(config)` is true of a config that has it; rules of OF_LEARNING are given the environment
    too. `given` says in words what was given, and `reason` why it is refused and what to change;
    both name values of the config `c` in braces.
    """

    breaks: Callable[..., object]
    given: str
    reason: str

    def words(self, config: "Config") -> str:
        """Returns the message about a config that breaks the rule."""
        return f"{self.given}; {self.reason}".format(c=config)


def check(rules: Iterable[Rule], config: "Config", *environment: Any) -> None:
    """Raises ValueError in the words of the first of the rules that the config breaks."""
    for rule in rules:
        if rule.breaks(config, *environment):
            raise InputError(rule.words(config))


def check_model(config: "Config", model: ModelConfig) -> None:
    """Raises ValueError for settings that do not go with the run's model, which a path may give."""
    model = dataclasses.replace(model, path=config.model.path)
    check(OF_MODEL, dataclasses.replace(config, model=model))


def _penalizes_normalized(c: "Config") -> bool:
    args = c.algorithm_args
    is_normalized = getattr(args, "normalize_advantages", False) and not c.make_algorithm().critic
    return isinstance(args, PolicySettings) and is_normalized and args.penalizes_rewards


def _computes_with_episodes(c: "Config") -> bool:
    algorithm = c.make_algorithm()
    has_whole = algorithm.is_off_policy or algorithm.critic is not None
    return has_whole or "groups" in algorithm.all_needs


# Rules of a run's settings alone, in the order in which they are checked.
OF_SETTINGS = (
    Rule(
        lambda c: c.plays and c.rollout.episodes_per_step % c.rollout.group_size,
        "config.rollout.episodes_per_step is {c.rollout.episodes_per_step}",
        "it must be a multiple of config.rollout.group_size ({c.rollout.group_size})",
    ),
    Rule(
        lambda c: c.plays and 0 < c.rollout.max_episode_tokens <= c.rollout.max_turn_tokens,
        "config.rollout.max_episode_tokens is {c.rollout.max_episode_tokens} and "
        "config.rollout.max_turn_tokens {c.rollout.max_turn_tokens}",
        "an episode has a first message beside its turns, so no turn could be as long: lower "
        "max_turn_tokens, or raise max_episode_tokens",
    ),
    Rule(
        lambda c: c.rollout.episodes_per_step % c.train.micro_batches,
        "config.train.micro_batches is {c.train.micro_batches}",
        "it must divide config.rollout.episodes_per_step ({c.rollout.episodes_per_step})",
    ),
    Rule(
        lambda c: c.tasks.source == "dataset" and not c.tasks.path,
        "config.tasks.name is 'dataset', and config.tasks.path is empty",
        "name the file of its rows there",
    ),
    Rule(
        lambda c: c.eval.samples > 1 and not c.eval.temperature,
        "config.eval.samples is {c.eval.samples} and config.eval.temperature is 0",
        "all samples of a task would be the same: give a temperature, or 1 sample",
    ),
    Rule(
        lambda c: not c.plays and not c.train.sft_path,
        "config.algorithm is 'sft' with no config.train.sft_path",
        "a run's episodes are the policy's own samples, and it would learn to repeat them whatever "
        "their reward: set config.train.sft_steps, for supervised updates on the environment's "
        "examples, and take an algorithm of rewards, such as 'grpo'; or name a file of "
        "conversations",
    ),
    Rule(
        lambda c: c.algorithm == "distillation" and not c.reference_from,
        "config.algorithm is 'distillation' with no config.reference_from",
        "the teacher would be the policy that the run begins with: name a run or a checkpoint "
        "there",
    ),
    Rule(
        lambda c: c.rollout.group_size < c.min_group_size,
        "config.algorithm is {c.algorithm!r} with config.rollout.group_size of "
        "{c.rollout.group_size}",
        "it compares the episodes of a group: set config.rollout.group_size to {c.min_group_size} "
        "or more",
    ),
    Rule(
        lambda c: (
            isinstance(c.algorithm_args, PolicySettings)
            and c.algorithm_args.kl_coefficient
            and (c.algorithm_args.kl_estimator, c.algorithm_args.kl_in) == ("k1", "loss")
        ),
        "config.algorithm_args.kl_estimator is 'k1' with config.algorithm_args.kl_in 'loss'",
        "the mean gradient of k1 is 0, so it is no penalty: set config.algorithm_args.kl_estimator "
        "to 'k2' or 'k3', or config.algorithm_args.kl_in to 'reward'",
    ),
    Rule(
        _penalizes_normalized,
        "config.algorithm_args.kl_in is 'reward' with config.algorithm_args.normalize_advantages, "
        "and config.algorithm {c.algorithm!r} has no critic",
        "the penalty would be subtracted behind the division by the deviation of the rewards, so "
        "that its weight would change with them: set config.algorithm_args.kl_in to 'loss', or "
        "config.algorithm_args.normalize_advantages to False",
    ),
    Rule(
        lambda c: (
            isinstance(c.algorithm_args, PolicySettings)
            and 0 < getattr(c.algorithm_args, "dual_clip", 0) <= 1 + c.algorithm_args.clip_high
        ),
        "config.algorithm_args.dual_clip is {c.algorithm_args.dual_clip} with "
        "config.algorithm_args.clip_high {c.algorithm_args.clip_high}",
        "it must be 0, or above 1 + config.algorithm_args.clip_high, where the other clip ends",
    ),
    Rule(
        lambda c: c.make_algorithm().is_off_policy and c.train.correction not in ("auto", "none"),
        "config.train.correction is {c.train.correction!r} with config.algorithm {c.algorithm!r}",
        "its loss is right whoever sampled, and would be weighted wrongly: set "
        "config.train.correction to 'none' or 'auto'",
    ),
    Rule(
        lambda c: c.asynchrony.rule == "mask" and _computes_with_episodes(c),
        "config.asynchrony.rule is 'mask' with config.algorithm {c.algorithm!r}",
        "the rule takes the overdue tokens out of an episode, and the algorithm computes with "
        "whole episodes or sequences: set config.asynchrony.rule to 'in_order', 'wait' or 'drop'",
    ),
    Rule(
        lambda c: c.asynchrony.refill and c.asynchrony.rule != "drop",
        "config.asynchrony.refill is {c.asynchrony.refill} with config.asynchrony.rule "
        "{c.asynchrony.rule!r}",
        "groups are given up and others taken in their place only with the rule 'drop': set it, or "
        "set refill to 0",
    ),
    Rule(
        lambda c: c.asynchrony.reuse > 1 and c.asynchrony.rule != "drop",
        "config.asynchrony.reuse is {c.asynchrony.reuse} with config.asynchrony.rule "
        "{c.asynchrony.rule!r}",
        "a step takes groups again in place of others only with the rule 'drop': set it, or set "
        "reuse to 1",
    ),
    Rule(
        lambda c: c.asynchrony.reuse > 1 and c.asynchrony.max_staleness == 0,
        "config.asynchrony.reuse is {c.asynchrony.reuse} and config.asynchrony.max_staleness 0",
        "a group that was trained on is beyond this bound in the next step: set max_staleness to "
        "at least 1, or use config.train.epochs",
    ),
    Rule(
        lambda c: c.asynchrony.reuse > 1 and c.asynchrony.refill,
        "config.asynchrony.reuse is {c.asynchrony.reuse} and config.asynchrony.refill "
        "{c.asynchrony.refill}",
        "one takes old groups in place of missing ones, the other plays new ones: set reuse to 1 "
        "or refill to 0",
    ),
    Rule(
        lambda c: c.asynchrony.parts > 1 and c.asynchrony.rule != "in_order",
        "config.asynchrony.parts is {c.asynchrony.parts} with config.asynchrony.rule "
        "{c.asynchrony.rule!r}",
        "groups are trained on before the others of their step are finished only where it is known "
        "which these are: set the rule to 'in_order' (config.asynchrony.refill and reuse need "
        "'drop'), or set parts to 1",
    ),
    Rule(
        lambda c: c.plays and c.num_groups % c.asynchrony.parts,
        "config.asynchrony.parts is {c.asynchrony.parts}",
        "it must divide the {c.num_groups} groups of a step (config.rollout.episodes_per_step / "
        "group_size)",
    ),
    Rule(
        lambda c: c.plays and c.asynchrony.parts > 1 and not c.devices.are_apart,
        "config.asynchrony.parts is {c.asynchrony.parts}, and rollouts and training share their "
        "devices",
        "set config.devices.num_rollout, so that the trainer can work while episodes are played",
    ),
    Rule(
        lambda c: c.plays and c.asynchrony.parts > 1 and not c.make_algorithm().streams,
        "config.asynchrony.parts is {c.asynchrony.parts}, and the advantages of config.algorithm "
        "{c.algorithm!r} are known when all episodes of a step are finished",
        "take one that compares within groups, such as 'grpo', 'rloo' or 'dapo', or set it to 1",
    ),
    Rule(
        lambda c: c.plays and c.num_groups % c.train.mini_batches,
        "config.train.mini_batches is {c.train.mini_batches}",
        "it must divide the {c.num_groups} groups of a step (config.rollout.episodes_per_step / "
        "group_size)",
    ),
    Rule(
        lambda c: c.plays and c.train.mini_batches > 1 and c.asynchrony.parts > 1,
        "config.train.mini_batches is {c.train.mini_batches} with config.asynchrony.parts of "
        "{c.asynchrony.parts}",
        "streamed parts add up to one update, and mini-batches are dealt out when all episodes are "
        "finished: set one of them to 1",
    ),
    Rule(
        lambda c: c.plays and c.devices.num_rollout == "auto" and not c.asynchrony.is_on,
        "config.devices.num_rollout is 'auto' in a synchronous run",
        "its stages take turns, so that all devices had better do both: set it to 0, or set "
        "config.asynchrony.max_staleness or parts",
    ),
    Rule(
        lambda c: c.checkpoint.keep_every_steps % c.checkpoint.every_steps,
        "config.checkpoint.keep_every_steps is {c.checkpoint.keep_every_steps} and "
        "config.checkpoint.every_steps {c.checkpoint.every_steps}",
        "steps without a checkpoint have none to keep: make keep_every_steps a multiple of "
        "every_steps",
    ),
    Rule(
        lambda c: c.checkpoint.export is True and not c.model.path and c.export_obstacle,
        "config.checkpoint.export is True with no config.model.path, and `transformers` has no "
        "such model",
        "set it to 'auto', or change its layers: {c.export_obstacle}",
    ),
)

# Rules of settings and the model: of the config, or that of the checkpoint in config.model.path.
OF_MODEL = (
    Rule(
        lambda c: c.rollout.kv_dtype != "compute" and c.model.latent_size,
        "config.rollout.kv_dtype is {c.rollout.kv_dtype!r}, but this model caches latents",
        "one scale a token is too coarse for them: set it to 'compute'",
    ),
    Rule(
        lambda c: c.rollout.num_draft_tokens and c.model.has_states,
        "config.rollout.num_draft_tokens is {c.rollout.num_draft_tokens}, but this model has "
        "layers of linear attention",
        "their states do not go back before drafts that are not taken: set it to 0",
    ),
    Rule(
        lambda c: (
            c.rollout.preemption_host_gib != RolloutConfig.preemption_host_gib
            and c.model.has_states
        ),
        "config.rollout.preemption_host_gib is {c.rollout.preemption_host_gib}, but the model of "
        "config.model.path ({c.model.path!r}) has layers of linear attention",
        "their states are no pages, so that preempted episodes are read again: remove it",
    ),
    Rule(
        lambda c: c.train.balance_coefficient and not c.model.num_experts,
        "config.train.balance_coefficient is {c.train.balance_coefficient}, but the model of "
        "config.model.path ({c.model.path!r}) has no experts",
        "there is no load to balance: remove it",
    ),
)


def _cuts(field: str) -> Rule:
    return Rule(
        lambda c, _: (
            c.train.ratio == "behaviour" and getattr(c.rollout, field) != getattr(Sampling, field)
        ),
        f"config.rollout.{field} is {{c.rollout.{field}}} with config.train.ratio 'behaviour'",
        "the trainer scores under all tokens, so what is cut off would look like a change of the "
        "policy: set config.train.ratio to 'model'",
    )


def _lacks_examples(field: str) -> Rule:
    return Rule(
        lambda c, environment: (
            getattr(c.train, field)
            and not (c.train.sft_path or isinstance(environment, OffersExamples))
        ),
        f"config.train.{field} is {{c.train.{field}}}, and config.env.name {{c.env.name!r}} offers "
        "no examples to learn from (a method example_reply)",
        "set it to 0, or name a file of conversations in config.train.sft_path",
    )


# Rules of what is learnt from episodes of an environment; evaluations do not have them.
OF_LEARNING = (
    *map(_lacks_examples, ("sft_steps", "sft_weight")),
    # Of an environment of the user's own the sides are known when it has played (`assign_credit`).
    Rule(
        lambda c, _: (
            c.env.args.get("opponent") == "self" and not c.make_algorithm().allows_self_play
        ),
        "config.env.args.opponent is 'self' with config.algorithm {c.algorithm!r}",
        "the policy plays several sides, and the algorithm, with its settings, takes all turns of "
        "an episode for those of one side: set config.algorithm to another one, such as 'spiral'",
    ),
    *map(_cuts, ("top_k", "top_p", "min_p")),
    Rule(
        lambda c, _: c.make_algorithm().critic and c.train.critic.pretrain_steps >= c.num_steps,
        "config.train.critic.pretrain_steps is {c.train.critic.pretrain_steps} and "
        "config.num_steps {c.num_steps}",
        "the critic would learn alone in every step, and the policy nothing: lower pretrain_steps",
    ),
)
