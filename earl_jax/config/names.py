# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The setting that was meant by a name which is none: words of other programs, near names."""

import difflib
from collections.abc import Collection

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.config.keys import all_keys

# Names of settings in TRL, verl, OpenRLHF and the like, by the last word of their path: the keys
# here, or a sentence.
NAMES_ELSEWHERE = {
    **dict.fromkeys(
        ("lr", "actor_lr", "actor_learning_rate", "step_size"), "config.train.learning_rate"
    ),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size"),
        "config.rollout.episodes_per_step",
    ),
    **dict.fromkeys(
        ("n", "num_generations", "n_samples_per_prompt", "num_samples", "num_return_sequences"),
        "config.rollout.group_size",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "micro_train_batch_size", "per_device_train_batch_size",
         "gradient_accumulation_steps", "accumulation_steps"),
        "config.train.micro_batches",
    ),
    **dict.fromkeys(
        ("mini_batch_size", "ppo_mini_batch_size", "num_mini_batches", "num_minibatches"),
        "config.train.mini_batches",
    ),
    **dict.fromkeys(
        ("max_new_tokens", "max_tokens", "max_completion_length", "max_response_length",
         "generate_max_len", "response_length"),
        "config.rollout.max_turn_tokens",
    ),
    **dict.fromkeys(
        ("max_length", "max_len", "max_seq_length", "max_seq_len", "max_model_len",
         "max_context", "context_length"),
        "config.rollout.max_episode_tokens",
    ),
    **dict.fromkeys(
        ("num_turns", "turns", "max_num_turns", "max_assistant_turns", "max_user_turns",
         "max_tool_calling_iterations"),
        "config.rollout.max_turns",
    ),
    **dict.fromkeys(
        ("steps", "max_steps", "total_steps", "train_steps", "num_train_steps", "iterations",
         "total_training_steps"),
        "config.num_steps",
    ),
    **dict.fromkeys(
        ("num_epochs", "num_train_epochs", "ppo_epochs", "num_ppo_epochs", "num_iterations",
         "max_epochs"),
        "config.train.epochs",
    ),
    **dict.fromkeys(
        ("model_name", "model_path", "model_name_or_path", "pretrain", "pretrained", "name_or_path",
         "base_model"),
        "config.model.path",
    ),
    **dict.fromkeys(
        ("dtype", "torch_dtype", "precision", "bf16", "param_dtype"), "config.model.compute_dtype"
    ),
    **dict.fromkeys(
        ("epsilon", "eps_clip", "clip_eps", "clip_range", "cliprange", "clip_ratio"),
        "config.algorithm_args.clip_low and config.algorithm_args.clip_high",
    ),
    **dict.fromkeys(("clip_ratio_low", "eps_clip_low"), "config.algorithm_args.clip_low"),
    **dict.fromkeys(
        ("clip_ratio_high", "epsilon_high", "eps_clip_high"), "config.algorithm_args.clip_high"
    ),
    **dict.fromkeys(("clip_ratio_c",), "config.algorithm_args.dual_clip"),
    **dict.fromkeys(("lam", "lambd"), "config.algorithm_args.gae_lambda"),
    **dict.fromkeys(
        ("cliprange_value", "vf_clip", "value_clip_range"), "config.algorithm_args.value_clip"
    ),
    **dict.fromkeys(
        ("critic_lr", "critic_learning_rate", "value_lr"), "config.train.critic.learning_rate"
    ),
    **dict.fromkeys(
        ("critic_warmup", "freezing_actor_steps"), "config.train.critic.pretrain_steps"
    ),
    **dict.fromkeys(
        ("teacher", "teacher_model", "teacher_path", "ref_model", "reference_model"),
        "config.reference_from",
    ),
    **dict.fromkeys(("ema", "use_ema", "ema_rate"), "config.train.ema_decay"),
    **dict.fromkeys(
        ("kl_coef", "kl_loss_coef", "init_kl_coef", "kl_penalty_coef", "beta"),
        "config.algorithm_args.kl_coefficient",
    ),
    **dict.fromkeys(
        ("kl_loss_type", "kl_penalty"), "config.algorithm_args.kl_estimator"
    ),
    **dict.fromkeys(
        ("loss_agg_mode", "loss_aggregation"), "config.algorithm_args.aggregation"
    ),
    **dict.fromkeys(
        ("grad_clip", "clip_grad", "clip_grad_norm", "max_norm"), "config.train.max_grad_norm"
    ),
    **dict.fromkeys(
        ("warmup", "num_warmup_steps", "lr_warmup_steps"), "config.train.warmup_steps"
    ),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "config.train.schedule"),
    **dict.fromkeys(
        ("entropy_coef", "entropy_coeff", "ent_coef"), "config.train.entropy_coefficient"
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "enable_gradient_checkpointing"),
        "config.train.remat",
    ),
    **dict.fromkeys(
        ("pack", "packing", "sample_packing", "packing_samples", "use_remove_padding"),
        "there is no such setting: episodes always share rows (packed), without padding between",
    ),
    **dict.fromkeys(("optim", "optimizer_type", "optimizer_name"), "config.train.optimizer"),
    **dict.fromkeys(("adam_epsilon", "eps"), "config.train.adam_eps"),
    **dict.fromkeys(("lora_rank", "lora_r"), "config.train.lora.rank"),
    **dict.fromkeys(("lora_alpha",), "config.train.lora.alpha"),
    **dict.fromkeys(("target_modules", "lora_target_modules"), "config.train.lora.targets"),
    **dict.fromkeys(
        ("adv_estimator", "advantage_estimator", "loss_type", "algo"), "config.algorithm"
    ),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), "config.checkpoint.every_steps"),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num"), "config.checkpoint.keep"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), "config.eval.every_steps"),
    **dict.fromkeys(
        ("dataset", "dataset_name", "train_files", "prompt_data", "data_path"), "config.tasks.path"
    ),
    **dict.fromkeys(("val_files", "eval_dataset"), "config.tasks.eval_path"),
    **dict.fromkeys(
        ("reward_fn", "reward_func", "reward_funcs", "reward_function", "reward_model"),
        "config.tasks.reward",
    ),
    **dict.fromkeys(
        ("num_gpus", "num_devices", "n_gpus_per_node"),
        "all devices are used; CUDA_VISIBLE_DEVICES hides some, and config.devices.num_cpu_devices "
        "is the number of virtual CPU devices",
    ),
    **dict.fromkeys(("device", "backend", "accelerator"), "config.devices.platform"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tp_size", "tp", "tensor_model_parallel_size",
         "vllm_tensor_parallel_size"),
        "config.selector.rollout_meshes and config.selector.train_meshes (without them the "
        "selector chooses)",
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "memory_budget"), "config.selector.budget_bytes_per_device"
    ),
    **dict.fromkeys(("stop", "stop_sequences"), "config.rollout.stop_strings"),
    **dict.fromkeys(("environment", "env_name", "game"), "config.env.name"),
    **dict.fromkeys(
        ("output_dir", "save_path", "ckpt_path", "logdir", "log_dir", "default_local_dir"),
        "the flag --workdir=DIR says where the run lives",
    ),
    **dict.fromkeys(("report_to",), "config.log.trackers"),
}  # fmt: skip
# The same for words that mean one thing in this place alone, by their whole path.
_PATHS_ELSEWHERE = {
    "config.model.name": "config.model.path (a checkpoint) or config.model.preset (a shape)",
    "config.model": "config.model.path (a checkpoint) or config.model.preset (a shape)",
    "config.env.id": "config.env.name",
}


def meant_by(path: str, siblings: Collection[str] = ()) -> str | None:
    """Returns a hint about what a path that is no setting may mean, or None.

    `siblings` are the names in its section; the nearest of them comes before one elsewhere.
    """
    name = path.rpartition(".")[2]
    if path in _PATHS_ELSEWHERE:
        return f"there is {_PATHS_ELSEWHERE[path]}"
    keys = all_keys()
    if path in keys:
        # A setting of an algorithm, and not of the one that is chosen.
        settings = {title: algorithm.settings for title, algorithm in ALGORITHMS.items()}
        owners = [repr(title) for title, own in settings.items() if hasattr(own, name)]
        return f"it is a setting of config.algorithm {' or '.join(owners)}"
    same = [key for key in keys if key.endswith(f".{name}")]
    if same:
        return f"there is {' and '.join(same)}"
    plain = {_plain(word): meant for word, meant in NAMES_ELSEWHERE.items()}
    if meant := plain.get(_plain(name)):
        return f"there is {meant}" if meant.startswith("config.") else meant
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {near[0]!r}?"
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.8)
    return f"did you mean {by_name[near[0]]}?" if near else None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
