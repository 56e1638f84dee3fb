# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the algorithms (config.algorithm_args), each with its bounds and its paper."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from earl_jax.algorithms.algorithm import KlEstimator, Need
from earl_jax.algorithms.sequences import AggregationName
from earl_jax.settings.errors import InputError, check_bounds, check_choices

Deviation = Literal["population", "sample"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of a loss of the policy's ratio.

    `clip_low`: a ratio counts down to 1 - clip_low. `clip_high`: a ratio counts up to
    1 + clip_high.

    `aggregation` is the mean that the update minimises. "token": over all tokens of the batch.
    "sequence": over sequences, of each one's mean over its tokens. "constant": over sequences, of
    each one's sum over its tokens divided by `aggregation_tokens`.

    `kl_coefficient` times an estimate of the KL divergence from the policy to the reference is a
    penalty; 0 is no penalty. `kl_estimator`, with r = reference / policy: "k1" is -log r, "k2" is
    (log r)^2 / 2, "k3" is r - 1 - log r. `kl_in` "loss" adds the penalty to each token's loss;
    "reward" subtracts from each token's advantage the penalties from that token to the end of its
    sequence, of the policy that the ratio is relative to.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: AggregationName = "token"
    aggregation_tokens: int = 1024
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"

    @property
    def needs(self) -> frozenset[Need]:
        """The facts that a penalty needs."""
        return frozenset({"reference"} if self.kl_coefficient else ())

    @property
    def penalizes_rewards(self) -> bool:
        """True if there is a penalty, and it is part of the rewards."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        if self.aggregation != "constant":
            reason = f"config.algorithm_args.aggregation is {self.aggregation!r}"
            yield "aggregation_tokens", reason
        for field in ("kl_estimator", "kl_in") if not self.kl_coefficient else ():
            yield field, "config.algorithm_args.kl_coefficient is 0"

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, path)
        bounds = {
            "clip_low": (0.0, 1.0),
            "clip_high": (0.0, None),
            "aggregation_tokens": (1, None),
            "kl_coefficient": (0.0, None),
        }
        check_bounds(self, path, bounds)


def _idle_deviation(*, is_normalized: bool) -> Iterator[tuple[str, str]]:
    """Yields the field `deviation` where advantages are not divided by one."""
    if not is_normalized:
        yield "deviation", "config.algorithm_args.normalize_advantages is False"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedSettings(PolicySettings):
    """Settings of PPO's clipped loss.

    `dual_clip` bounds the loss of a token with a negative advantage A at -dual_clip * A, however
    large its ratio (arXiv 1912.09729, where it is 3); 0 sets no bound.
    """

    dual_clip: float = 0.0

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        super().validate(path)
        check_bounds(self, path, {"dual_clip": (0.0, None)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooSettings(ClippedSettings):
    """Settings of RLOO (arXiv 2402.14740).

    With `kl_in` "reward" the penalties of all of an episode's tokens are subtracted from its
    reward, before the mean of the others of its group is.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """The facts that a penalty needs."""
        groups: frozenset[Need] = frozenset({"groups"} if self.penalizes_rewards else ())
        return super().needs | groups

    @property
    def makes_token_advantages(self) -> bool:
        """True if advantages have a part that is computed on the devices: penalties."""
        return self.penalizes_rewards


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoSettings(ClippedSettings):
    """Settings of GRPO (arXiv 2402.03300).

    `normalize_advantages` divides by the standard deviation of the group; False as in "dr_grpo".
    `deviation` is how it is computed: as that of a "population" of N outcomes, sqrt(sum / N), or of
    a "sample", sqrt(sum / (N - 1)), as TRL and verl do.
    """

    normalize_advantages: bool = True
    deviation: Deviation = "population"

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        yield from super().idle()
        yield from _idle_deviation(is_normalized=self.normalize_advantages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GigpoSettings(GrpoSettings):
    """Settings of GiGPO (arXiv 2505.10978).

    To GRPO's advantage of an episode comes `turn_weight` times that of each turn: its return, with
    later rewards discounted by `turn_discount` a turn, compared with those of the group's turns in
    the same state. `anchor` says what a state is: the "message" that the turn answers, or the whole
    "history" before it. Both parts are divided by deviations, or neither.
    """

    turn_weight: float = 1.0
    turn_discount: float = 0.95
    anchor: Literal["message", "history"] = "message"

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        yield from super().idle()
        for field in ("turn_discount", "anchor") if not self.turn_weight else ():
            yield field, "config.algorithm_args.turn_weight is 0"

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        super().validate(path)
        check_bounds(self, path, {"turn_weight": (0.0, None), "turn_discount": (0.0, 1.0)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DapoSettings(GrpoSettings):
    """Settings of DAPO (arXiv 2503.14476).

    `overlong_tokens` is the number of tokens of an episode's replies at which the penalty of a long
    episode (eq. 13) reaches -1; it is 0 up to `overlong_buffer` tokens less, and goes linearly
    between. `overlong_tokens` 0 is no penalty.
    """

    overlong_tokens: int = 0
    overlong_buffer: int = 0

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        yield from super().idle()
        if not self.overlong_tokens:
            yield "overlong_buffer", "config.algorithm_args.overlong_tokens is 0"

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        super().validate(path)
        check_bounds(self, path, {"overlong_tokens": (0, None), "overlong_buffer": (0, None)})
        if self.overlong_tokens and not 1 <= self.overlong_buffer <= self.overlong_tokens:
            raise InputError(
                f"{path}.overlong_buffer is {self.overlong_buffer}; it must be at least 1 and at "
                f"most {path}.overlong_tokens ({self.overlong_tokens})"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CispoSettings(PolicySettings):
    """Settings of CISPO (arXiv 2506.13585).

    `clip_low` bounds the weight of a token's log-prob from below; 1 is no bound. `clip_high` bounds
    the weight from above.
    `normalize_advantages` divides by the standard deviation of the group, by `deviation` that of a
    "population" of N outcomes, or of a "sample", with N - 1.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    normalize_advantages: bool = True
    deviation: Deviation = "population"

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        yield from super().idle()
        yield from _idle_deviation(is_normalized=self.normalize_advantages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceSettings(ClippedSettings):
    """Settings of REINFORCE.

    `turn_discount` discounts a reward once for each turn before it. `baseline` is the mean return
    of the same role at the same turn, over the "batch" or over the "group" that shares a task.
    "ema" is an exponential moving average over the steps before of the role's returns, of all
    turns (SPIRAL, arXiv 2506.24119); it keeps `baseline_decay` of itself at each step, and is saved
    with the run. "none" subtracts nothing. `normalize_advantages` divides by the standard deviation
    of the batch, unless all advantages of the batch are equal up to rounding.
    """

    turn_discount: float = 0.7
    baseline: Literal["batch", "group", "ema", "none"] = "batch"
    baseline_decay: float = 0.95
    normalize_advantages: bool = True

    @property
    def is_by_group(self) -> bool:
        """True if a group's advantages depend on its own episodes alone."""
        return self.baseline in ("group", "none") and not self.normalize_advantages

    @property
    def min_group_size(self) -> int:
        """The least config.rollout.group_size: alone in its group an episode is its own mean."""
        return 2 if self.baseline == "group" else 1

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        yield from super().idle()
        if self.baseline != "ema":
            yield "baseline_decay", f"config.algorithm_args.baseline is {self.baseline!r}"

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        super().validate(path)
        check_bounds(self, path, {"turn_discount": (0.0, 1.0), "baseline_decay": (0.0, 1.0)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationSettings(ClippedSettings):
    """Settings of on-policy distillation (arXiv 2306.13649).

    The reference is the teacher (config.reference_from), and the divergence from it all that is
    minimised. With `kl_in` "reward" a token's advantage is minus its own penalty: that of "k1"
    gives the reverse KL, KL(policy, teacher), of each token given those before. With "loss" the
    gradient of "k2" is that of the reverse KL, and the gradient of "k3" that of the forward KL,
    KL(teacher, policy). `kl_discount` above 0 adds the penalties that follow in the sequence to a
    token's own, each so many times less for every token between.
    """

    kl_coefficient: float = 1.0
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    kl_discount: float = 0.0

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yields `(field, reason)` of each field without effect beside the others' values."""
        yield from super().idle()
        # Without advantages there is no ratio in the loss.
        for field in ("kl_discount", "clip_low", "clip_high", "dual_clip"):
            if self.kl_in == "loss":
                yield field, "config.algorithm_args.kl_in is 'loss'"

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        super().validate(path)
        check_bounds(self, path, {"kl_coefficient": (1e-6, None), "kl_discount": (0.0, 1.0)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TbaSettings:
    """Settings of trajectory balance (TBA, arXiv 2503.18929).

    `kl_coefficient` is the weight of the KL divergence to the reference against the reward, the
    paper's beta: the policy that minimises the loss is the reference times exp(reward / beta),
    normalised.
    """

    kl_coefficient: float = 0.05

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_bounds(self, path, {"kl_coefficient": (1e-6, None)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PpoSettings(ClippedSettings):
    """Settings of PPO with a critic (arXiv 1707.06347).

    Advantages are generalised estimates (GAE, arXiv 1506.02438) with discount `gamma` and
    `gae_lambda`: 0 trusts the critic, 1 the rewards. `gae_level` "token" takes each token of the
    policy for a step, with a turn's reward at its last token; "turn" takes each turn for one, whose
    tokens share its advantage. Turns as steps are ArCHer's (arXiv 2402.19446); its critic, which is
    learnt off-policy with targets of its own, is not. Either way only the policy's own tokens are
    steps. With `kl_in` "reward" the penalties are part of the rewards.

    `value_clip` bounds the change of a value within a step's updates: the critic's loss is the
    larger of those of the value and of the value clipped to that distance from its first one; 0 is
    no bound. `normalize_advantages` brings them to mean 0 and deviation 1 over the step's batch,
    before it is dealt out to mini-batches.
    """

    gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_level: Literal["token", "turn"] = "token"
    value_clip: float = 0.2
    normalize_advantages: bool = True

    def validate(self, path: str) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        super().validate(path)
        bounds = {"gamma": (0.0, 1.0), "gae_lambda": (0.0, 1.0), "value_clip": (0.0, None)}
        check_bounds(self, path, bounds)
