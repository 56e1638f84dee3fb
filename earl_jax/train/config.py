# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the trainer."""

import dataclasses
from typing import Literal

from earl_jax.models.lora_config import LoraConfig
from earl_jax.settings.errors import check_bounds, check_choices
from earl_jax.settings.remat import Remat

_BOUNDS: dict[str, tuple[float, float | None]] = {
    "epochs": (1, None),
    "mini_batches": (1, None),
    "micro_batches": (1, None),
    "logprob_chunk": (1, None),
    "warmup_steps": (0, None),
    "ema_decay": (0.0, 0.9999999),
    "sft_steps": (0, None),
    "sft_updates": (1, None),
    "sft_learning_rate": (0.0, None),
    "sft_weight": (0.0, None),
    "learning_rate": (0.0, None),
    "final_learning_rate": (0.0, None),
    "weight_decay": (0.0, None),
    "max_grad_norm": (1e-30, None),
    "adam_b1": (0.0, 0.999999),
    "adam_b2": (0.0, 0.999999),
    # Above 0: a parameter whose gradients have all been 0 would get 0 / 0.
    "adam_eps": (1e-30, None),
    "importance_cap": (1.0, None),
    "entropy_coefficient": (0.0, None),
    "final_entropy_coefficient": (0.0, None),
    "balance_coefficient": (0.0, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Settings of the value network of an algorithm with a critic, such as "ppo".

    It is a decoder like the policy with a scalar head, begins with the model's weights, and is
    updated whenever the policy is by the trainer's optimizer, with moments and a clip of its own.
    `learning_rate` rises over config.train.warmup_steps and is constant from then on. In the first
    `pretrain_steps` RL steps the learning rate of the policy is 0, so that only the critic learns.
    """

    learning_rate: float = 1e-5
    pretrain_steps: int = 0

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        bounds = {"learning_rate": (0.0, None), "pretrain_steps": (0, None)}
        check_bounds(self, "config.train.critic", bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the trainer, whatever the algorithm (config.algorithm).

    The defaults are for a pretrained model; one from scratch needs a `learning_rate` near 1e-3.

    A step's episodes are learnt from `epochs` times. `mini_batches` is the number of updates in
    each epoch: the groups are dealt out at random to as many parts, which come in another order in
    each epoch. Log-probs that updates are relative to, a reference's and a critic's are those
    before the first of them. `micro_batches` accumulate gradients within one update.

    The learning rate rises over `warmup_steps` RL steps. `schedule` is the course of the learning
    rate behind the warmup. `final_learning_rate` is the learning rate that would be reached one
    step behind the last, with a schedule other than "constant". `ess_scaling` multiplies the
    policy's rate in each update by the effective sample size of its tokens, as a fraction of them
    (the metric `effective_sample_size`), or by its root: "linear" or "sqrt" (VCPO, arXiv
    2602.17616, which takes the root for AdamW). So a batch that few large ratios dominate makes a
    small update.

    An entropy bonus, added to the algorithm's loss, has `entropy_coefficient` at first and goes
    linearly to another. `final_entropy_coefficient` is the coefficient of the entropy bonus in the
    last step. `logprob_chunk` tokens of every row are scored at a time. `remat` computes a layer's
    activations again in the backward pass instead of keeping them: "full" all, "dots" all but the
    results of its projections and of attention (but for tokamax's), "offload" all, with the layer's
    input in pinned host memory until then. The selector takes it, or more of it, where memory is
    short; "offload" only on GPUs and TPUs.

    `optimizer` is optax's "adamw", "lion", "adafactor" (second moments of matrices of at least 128
    by 128 factored, no momentum, updates of at most RMS 1, no scaling by the parameter) or "muon",
    which makes the updates of matrices orthogonal, a layer's and an expert's projection each by
    itself, and updates vectors, embedding and head as AdamW. Muon's updates have the size of
    AdamW's (RMS 0.2), so learning rates are alike; Lion's rates are 3 to 10 times smaller.
    `adam_b1` and `adam_b2` are Lion's too; `adam_eps` is added to the root of the second moment.
    `momentum_dtype` "bfloat16" halves the bytes of the first moment. `weight_decay`, times the
    learning rate, shrinks matrices; it leaves norms, biases and the embedding alone. Gradients
    whose norm, over all parameters, is above `max_grad_norm` are scaled down to it.

    `attention` is the kernel: "blockwise" runs anywhere, "splash" on TPUs, "triton" on GPUs in
    bfloat16, and "tokamax" on Hopper and Blackwell GPUs, where it is installed; "auto" takes the
    last of these that runs, but "blockwise" for rows of at most 128 tokens.

    `ratio` is the reference of the policy's probability of a token. "behaviour": the distribution
    that the token was drawn from, both at the sampling temperature; correct if sampling cuts no
    token off. "model": the untempered model at the time of sampling, recorded by the engine,
    whatever was cut off. The ratio is then 1 before the first update and measures the change of the
    policy alone; the difference from the sampling distribution is not corrected: tokens that are
    cut off are never tried, and the untempered policy is trained. With both a token of a reply that
    was restricted to some choices has its probability among the tokens that it was chosen from.

    `correction` applies where the policy that sampled differs from the one that an update begins
    with. "none": the ratio is relative to the policy that sampled. "truncated": it is
    relative to the policy that the step begins with, as this trainer scores it, and the loss of
    each token is weighted by how much likelier that one finds it than the one that sampled, at most
    `importance_cap`. "truncated_sequence": the same with the product of these weights over the
    token's sequence. "masked": tokens whose weight is above `importance_cap` or below
    1 / `importance_cap` have no loss (see `algorithms.losses.importance_weights`). "auto" is
    "truncated" where the rollout has another precision than the trainer
    (config.rollout.weight_dtype, kv_dtype or compute_dtype), or older weights
    (config.asynchrony.max_staleness), else "none".

    `proximal` is how a correction finds the log-probs of the policy that the step begins with, if a
    step has more than one update. "recompute": with one more forward pass a step. "log_linear":
    without one, interpolated between those of the policy that sampled and of the one that is
    updated, by how many versions they are apart (`algorithms.losses.log_linear_proximal`).

    `sft_steps`: in the first so many RL steps, the batch is followed by supervised updates on
    example replies of the environment (its method example_reply: random legal moves in the board
    games, steps that are right half the time on a trail), with an optimizer state of their own,
    which is dropped behind the last of these steps. 0 turns them off. `sft_updates` is the number
    of supervised updates a step. `sft_learning_rate` is the learning rate of supervised updates.

    `sft_path` is a JSONL file of conversations, {"messages": [{"role": ..., "content": ...}]} a
    line, which supervised updates learn from instead (docs/howto/conversations.md).

    `sft_weight` above 0 adds so many times the mean cross-entropy of example episodes to the loss
    of every update, in the same gradient: as many as the step's episodes, fresh in each step, and
    dealt out to mini-batches.

    `ema_decay` above 0 keeps an exponential moving average of the trained weights, in fp32: after
    each update it is `ema_decay` of itself and the rest of the new weights. It is what is
    evaluated, exported and served then, and what another run's --init_from begins with.

    An update whose loss, gradient or step is not finite is skipped: parameters and moments stay as
    they are. After 3 RL steps in a row without an update the run ends (run/step_log.py).

    `balance_coefficient` times the load-balancing loss of a mixture's routers (routing.py)
    is added to the loss, on the scale of a checkpoint's `router_aux_loss_coef`; 0 leaves balance to
    the policy's gradient.

    `lora.rank` above 0 trains low-rank adapters instead of the model's own weights. `critic` is the
    value network of an algorithm that has one.
    """

    learning_rate: float = 1e-6
    final_learning_rate: float = 0.0
    warmup_steps: int = 10
    ess_scaling: Literal["none", "linear", "sqrt"] = "none"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    optimizer: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    correction: Literal["auto", "none", "truncated", "truncated_sequence", "masked"] = "auto"
    importance_cap: float = 2.0
    proximal: Literal["recompute", "log_linear"] = "recompute"
    entropy_coefficient: float = 0.0
    final_entropy_coefficient: float = 0.0
    ratio: Literal["behaviour", "model"] = "behaviour"
    balance_coefficient: float = 0.0
    epochs: int = 1
    mini_batches: int = 1
    micro_batches: int = 1
    remat: Remat = "none"
    attention: Literal["auto", "blockwise", "splash", "tokamax", "triton"] = "auto"
    logprob_chunk: int = 512
    sft_steps: int = 0
    sft_updates: int = 1
    sft_learning_rate: float = 1e-5
    sft_weight: float = 0.0
    sft_path: str = ""
    lora: LoraConfig = LoraConfig()
    critic: CriticConfig = CriticConfig()

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        self.lora.validate()
        self.critic.validate()
        check_choices(self, "config.train")
        check_bounds(self, "config.train", _BOUNDS)
