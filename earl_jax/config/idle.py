# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings that have no effect in a run, because of others."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from earl_jax.algorithms.algorithm import keep_every_group
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.algorithms.requirements import needs_first_policy
from earl_jax.models.config import MODEL_SETTINGS
from earl_jax.settings.errors import InputError

if TYPE_CHECKING:
    from earl_jax.config.config import Config

# A setting that may do nothing in a run: whether it does nothing, its path, and why.
_Idle = tuple[bool, str, str]


def check_effects(config: "Config", defaults: "Config") -> None:
    """Raises ValueError for settings that differ from their defaults and have no effect here."""
    found: dict[str, str] = {}
    for path, _, reason in idle_settings(config, defaults):
        found.setdefault(path, reason)
    if not found:
        return
    each = [
        f"config.{path} = {_get(config, path)!r} has no effect in this run, because {reason}"
        for path, reason in found.items()
    ]
    advice = "remove it, or change the other" if len(each) == 1 else "remove these"
    raise InputError(f"{'; '.join(each)}; {advice}")


def idle_settings(config: "Config", defaults: "Config") -> Iterator[tuple[str, Any, str]]:
    """Yields the settings that differ from `defaults` and have no effect in this run.

    Each with its default, and the reason in words.
    """
    for is_idle, path, reason in (
        *_idle_supervised(config),
        *_idle_model(config),
        *_idle_rollout(config),
        *_idle_training(config),
    ):
        if is_idle and _get(config, path) != _get(defaults, path):
            yield path, _get(defaults, path), reason


def _idle_supervised(config: "Config") -> Iterator[_Idle]:
    """Yields what a run of supervised updates alone does not do (config.algorithm "sft")."""
    reasons = {
        "config.algorithm 'sft' makes supervised updates alone": ("sft_steps", "sft_weight"),
        "a step of config.algorithm 'sft' is one update on new conversations (num_steps says how "
        "many)": ("epochs", "mini_batches"),
        "the loss of config.algorithm 'sft' is the cross-entropy of tokens that nobody sampled": (
            "entropy_coefficient",
            "final_entropy_coefficient",
            "correction",
            "ess_scaling",
        ),
    }
    for reason, names in reasons.items():
        for name in names:
            yield not config.plays, f"train.{name}", reason
    asynchrony = ("asynchrony.max_staleness", "asynchrony.parts", "asynchrony.refill")
    # Not the others of config.rollout: an evaluation of such a run has them.
    sampling = (f"rollout.{name}" for name in ("temperature", "top_k", "top_p", "min_p"))
    for path in (*asynchrony, "devices.num_rollout", "selector.offload", "train.ratio", *sampling):
        yield not config.plays, path, "config.algorithm 'sft' plays nothing"
    has_ratings = config.eval.sft_path != "" or (config.plays and config.eval.games > 0)
    unplayed = "config.eval.games is 0" if config.plays else "config.algorithm 'sft' plays nothing"
    unrated = f"{unplayed}, and config.eval.sft_path is '': there are no evaluations"
    yield not has_ratings, "checkpoint.keep_best", unrated


def _idle_model(config: "Config") -> Iterator[_Idle]:
    model = config.model
    for name in MODEL_SETTINGS:
        if name not in ("path", "compute_dtype"):
            yield model.path != "", f"model.{name}", "config.model.path gives the model"
    for name in ("experts_per_token", "expert_ffn_size"):
        yield model.num_experts == 0, f"model.{name}", "config.model.num_experts is 0"
    no_dense = model.num_experts > 0 and model.num_dense_layers == 0
    yield no_dense, "model.ffn_size", "experts are of model.expert_ffn_size"


def _idle_rollout(config: "Config") -> Iterator[_Idle]:
    read_again = "the states of linear attention are no pages: preempted episodes are read again"
    # The model of a path is known later (combinations.py).
    has_states = config.model.has_states and not config.model.path
    yield has_states, "rollout.preemption_host_gib", read_again
    apart = "config.devices.num_rollout gives the trainer devices of its own"
    yield config.devices.are_apart, "selector.offload", apart
    goes_on = (
        "the rollout of an asynchronous run goes on behind an update, and stays on the devices"
    )
    yield config.asynchrony.is_on, "selector.offload", goes_on
    ours = "without config.model.path the chat template is ours, which only appends"
    yield config.model.path == "", "chat.history", ours
    for name in ("path", "eval_path", "reward"):
        is_other = config.tasks.source != "dataset"
        why = f"config.tasks.name is {config.tasks.name!r}, and a dataset needs config.tasks.path"
        yield is_other, f"tasks.{name}", why
    platform = config.devices.platform
    elsewhere = f"config.devices.platform is {platform!r}"
    yield platform in ("gpu", "tpu"), "devices.num_cpu_devices", elsewhere
    in_turn, asynchrony = "config.asynchrony.max_staleness is 0", config.asynchrony
    yield asynchrony.max_staleness == 0, "asynchrony.kv", in_turn
    yield asynchrony.max_staleness == 0, "asynchrony.reuse", in_turn
    is_in_turn = asynchrony.max_staleness == asynchrony.refill == 0
    yield is_in_turn, "asynchrony.rule", f"{in_turn} and config.asynchrony.refill too"
    keeps_all = f"config.algorithm {config.algorithm!r} keeps every group"
    is_kept = config.make_algorithm().keep_group is keep_every_group
    yield is_kept, "asynchrony.refill", keeps_all
    anew = "a synchronous run opens its rollouts with the weights of each step"
    yield not config.asynchrony.is_on, "asynchrony.checksums", anew


def _idle_training(config: "Config") -> Iterator[_Idle]:
    train, model = config.train, config.model
    # The model of a path is known later (combinations.py).
    without_experts = model.num_experts == 0 and not model.path
    yield without_experts, "train.balance_coefficient", "config.model.num_experts is 0"
    chosen = f"config.train.optimizer is {train.optimizer!r}"
    for name in ("adam_b1", "adam_b2", "momentum_dtype"):
        yield train.optimizer == "adafactor", f"train.{name}", chosen
    yield train.optimizer in ("adafactor", "lion"), "train.adam_eps", chosen
    constant = "config.train.schedule is 'constant'"
    yield train.schedule == "constant", "train.final_learning_rate", constant
    # Without a correction, a rollout of another precision has ratios that are not 1 from the start.
    # So has one of older weights.
    same_policy = config.rollout.is_precise_as(model.compute_dtype)
    same_policy = same_policy and not config.asynchrony.max_staleness
    is_one_update = train.epochs == train.mini_batches == 1
    one_update = "config.train.epochs is 1 and config.train.mini_batches too"
    never_clips = is_one_update and (config.importance_cap > 0 or same_policy)
    for name in ("clip_low", "clip_high", "dual_clip") if config.algorithm in ALGORITHMS else ():
        if hasattr(config.algorithm_args, name):
            yield never_clips, f"algorithm_args.{name}", one_update
    for name, reason in getattr(config.algorithm_args, "idle", tuple)():
        yield True, f"algorithm_args.{name}", reason
    yield config.importance_cap == 0, "train.importance_cap", "there is no correction here"
    yield from _idle_proximal(config, is_one_update=is_one_update)
    yield is_one_update and same_policy, "train.ess_scaling", one_update
    for name in ("alpha", "targets"):
        yield train.lora.rank == 0, f"train.lora.{name}", "config.train.lora.rank is 0"
    value_clip = config.algorithm in ALGORITHMS and hasattr(config.algorithm_args, "value_clip")
    yield value_clip and is_one_update, "algorithm_args.value_clip", one_update
    for name in ("learning_rate", "pretrain_steps"):
        none = f"config.algorithm {config.algorithm!r} has no critic"
        yield config.make_algorithm().critic is None, f"train.critic.{name}", none
    no_reference = f"config.algorithm {config.algorithm!r} needs no reference with its settings"
    yield "reference" not in config.make_algorithm().all_needs, "reference_from", no_reference
    for name in ("sft_updates", "sft_learning_rate"):
        none = "config.train.sft_steps is 0"
        yield train.sft_steps == 0, f"train.{name}", none
    no_updates = "config.train.sft_steps is 0 and config.train.sft_weight too"
    is_supervised = train.sft_steps > 0 or train.sft_weight > 0 or not config.plays
    yield not is_supervised, "train.sft_path", no_updates


def _idle_proximal(config: "Config", *, is_one_update: bool) -> Iterator[_Idle]:
    no_correction = config.importance_cap == 0
    algorithm = config.make_algorithm()
    is_interpolated = "proximal" in algorithm.all_needs and not algorithm.scores_first_policy
    penalties = "penalties in the reward are of a pass that also gives these log-probs"
    updates = config.train.epochs * config.train.mini_batches
    is_scored = needs_first_policy(algorithm, updates=updates, corrects=not no_correction)
    no_correction = no_correction and not is_interpolated
    one_update = "the only update of a step has these log-probs without a pass: "
    one_update += "config.train.epochs is 1 and config.train.mini_batches too"
    newest = "the newest weights sampled every token: config.asynchrony.max_staleness is 0"
    yield no_correction, "train.proximal", "there is no correction here"
    yield is_scored, "train.proximal", penalties
    yield is_one_update, "train.proximal", one_update
    yield config.asynchrony.max_staleness == 0, "train.proximal", newest


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config
