# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The record of an algorithm: its mathematics as pure functions, and what they need to be given."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import numpy as np

from earl_jax.trajectory import Outcome, Trajectory

Episode = Outcome | Trajectory
Need = Literal["proximal", "reference", "groups"]
KlEstimator = Literal["k1", "k2", "k3"]


@flax.struct.dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """The facts about each token of B rows of T that a loss is computed from, f32[B,T] each.

    `mask` bool[B,T] is True where the policy sampled the token in an episode that counts; all other
    fields are 0 elsewhere, so that a loss need not mask anything. `sequences` i32[B,T] numbers the
    samples of a row, each of consecutive tokens; it is 0 in padding, and one number for a whole
    episode unless it forks. `logprobs` and `entropy` are of
    the policy that is updated, and the only fields with a gradient. `behaviour` are
    log-probs of the policy that sampled; `proximal` of the policy that the step begins with, or
    interpolated (config.train.proximal), None unless the algorithm needs them or the trainer
    corrects for who sampled (config.train.correction); `reference` of the frozen reference policy,
    None unless the algorithm needs them.

    Example: prompt p0 p1, reply a0 a1, one place of padding: mask 0 0 1 1 0, sequences 1 1 1 1 0.
    """

    mask: jax.Array
    sequences: jax.Array
    logprobs: jax.Array
    entropy: jax.Array
    behaviour: jax.Array
    advantages: jax.Array
    proximal: jax.Array | None = None
    reference: jax.Array | None = None

    @property
    def old(self) -> jax.Array:
        """Log-probs of the policy that the ratio is relative to: proximal if given, or behaviour.

        Around the proximal policy, with each token weighted by proximal / behaviour, which the
        trainer does for every loss, the clipped objective is the decoupled one of AReaL
        (arXiv 2505.24298, eq. 5).
        """
        return self.behaviour if self.proximal is None else self.proximal


class Aggregation(NamedTuple):
    """The weight of each token's loss in the sum, and its share of the divisor, f32[B,T] each.

    Weights and shares without a gradient. Shares that add up to 1 in each sequence divide the sum
    by the number of sequences, however the batch is cut into micro-batches.
    """

    weights: jax.Array
    shares: jax.Array


class TokenLosses(NamedTuple):
    """A loss for each token, f32[B,T], and metrics by name, each with a value for each token.

    The update minimises the mean loss over the tokens of the mask; with `aggregation`, the sum of
    weights times losses over the sum of shares, over these tokens of the whole batch. A metric is
    logged under its name: the maximum over these tokens if the name ends in `_max`, the mean
    otherwise.
    """

    losses: jax.Array
    metrics: dict[str, jax.Array]
    aggregation: Aggregation | None = None


@flax.struct.dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """The facts about each token that advantages are made of on the devices, [B,T] each.

    `mask`, `sequences` and `reference` are those of TokenFacts. `turns` i32 is t in the policy's
    t-th turn of an episode, 0 elsewhere. `rewards` f32 has at each token of a turn what
    `Algorithm.advantages` returned for the turn. `values` f32 are the critic's, of the state before
    each token (None without a critic), and `old` the log-probs of the policy that the update's
    ratio is relative to; all before the first update. `groups` i32 numbers the groups that share a
    task from 1 across all rows, 0 in padding; None unless the algorithm needs it.
    """

    mask: jax.Array
    sequences: jax.Array
    turns: jax.Array
    rewards: jax.Array
    old: jax.Array
    values: jax.Array | None = None
    reference: jax.Array | None = None
    groups: jax.Array | None = None


class Estimates(NamedTuple):
    """Advantages of the policy's tokens, and the returns that their values are to predict."""

    advantages: jax.Array
    returns: jax.Array


@flax.struct.dataclass(frozen=True, kw_only=True)
class ValueFacts:
    """The facts about each token that a critic's loss is computed from, f32[B,T] each.

    `values` are those of the critic that is updated, with a gradient; `old` those before the first
    update of the batch; `returns` as in Estimates. 0 where `mask` is not True.
    """

    mask: jax.Array
    values: jax.Array
    old: jax.Array
    returns: jax.Array


class CriticMethods(NamedTuple):
    """The functions of an algorithm with a value network.

    `estimate(facts, settings)` is given the RewardFacts of a step's whole batch, on the devices.
    `loss(facts, settings)` is given ValueFacts; the critic minimises the mean of its losses over
    the tokens of the mask, and its `aggregation` is None.
    """

    estimate: Callable[[RewardFacts, Any], Estimates]
    loss: Callable[[ValueFacts, Any], TokenLosses]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSettings:
    """The settings of an algorithm that has none."""


def keep_every_group(group: Sequence[Episode], settings: Any) -> bool:
    """Returns True: every group is trained on."""
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm: functions of facts and of its `settings`, a frozen dataclass with defaults.

    `advantages(episodes, settings)` returns for each episode one advantage per rewarded turn; it is
    given the episodes that count, of all processes; each side of self-play is one of its own.
    `loss(facts, settings)` returns TokenLosses. With a `critic`, `advantages` returns rewards
    instead, and `critic.estimate` makes advantages of them and of the values of a second network,
    which is trained beside the policy. With `token_advantages`, `advantages` are made into those of
    the tokens on the devices: `token_advantages(facts, settings)` is given the RewardFacts of a
    step's whole batch, without values; where `is_by_group`, of the groups that came together
    (config.asynchrony.parts); not where `settings` have a property `makes_token_advantages` that is
    False. If it `needs` "proximal" too, `facts.old` are log-probs of the policy
    that the step begins with, also where the step has one update.
    `is_off_policy` says that the loss is right whoever sampled, so that the trainer's correction
    (config.train.correction) has no part in it.
    `needs` names the facts beyond those that every batch has; `settings` may have more in a
    property `needs` of their own, see `all_needs`. `is_by_group` says that a group's advantages
    depend on its own episodes alone; `settings` may have a property of this name instead.
    `keep_group(episodes, settings)` is given the episodes of one group that their environment did
    not fail; groups for which it returns
    False are not trained on. `min_group_size` is the least config.rollout.group_size.
    `averages(before, episodes, settings)` returns moving averages by name that are kept from step
    to step and in checkpoints; `advantages` is then given those before the batch as a third
    argument, in which this batch has no part.

    config.algorithm_args sets fields of `settings`; a `validate(path)` method, if there is one,
    raises ValueError for values that break a rule. A method `idle()`, if there is one, yields
    `(field, reason)` of each field that has no effect with the others' values; a field that is
    idle and not at its default is an error.
    """

    advantages: Callable[..., list[np.ndarray]]
    loss: Callable[[TokenFacts, Any], TokenLosses]
    settings: Any = NoSettings()
    needs: frozenset[Need] = frozenset()
    keep_group: Callable[[Sequence[Episode], Any], bool] = keep_every_group
    min_group_size: int = 1
    is_by_group: bool = False
    is_off_policy: bool = False
    critic: CriticMethods | None = None
    token_advantages: Callable[[RewardFacts, Any], jax.Array] | None = None
    averages: Callable[[Mapping[str, float], Sequence[Episode], Any], dict[str, float]] | None = (
        None
    )

    @property
    def all_needs(self) -> frozenset[Need]:
        """The needs of the algorithm with its settings."""
        return self.needs | getattr(self.settings, "needs", frozenset())

    @property
    def scores_first_policy(self) -> bool:
        """True if advantages are made of log-probs of the policy that a step begins with."""
        return self.token_advantages is not None and "proximal" in self.all_needs

    @property
    def makes_token_advantages(self) -> bool:
        """True if advantages are made into those of tokens on the devices."""
        is_asked = getattr(self.settings, "makes_token_advantages", True)
        return self.token_advantages is not None and is_asked

    @property
    def allows_self_play(self) -> bool:
        """False for a critic, and for sums, over all tokens of an episode, whoever's side it is."""
        return self.critic is None and "groups" not in self.all_needs

    @property
    def streams(self) -> bool:
        """True if a group's advantages can be computed before the other groups are finished."""
        return self.is_by_group or getattr(self.settings, "is_by_group", False)
