# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The algorithms that config.algorithm names.

One made of existing parts is one entry of ALGORITHMS. One of a user's own is an `Algorithm` in any
module that Python finds: config.algorithm = "module:name".
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.algorithms.advantages import (
    centred_outcomes,
    group_relative,
    has_different_outcomes,
    leave_one_out,
    moving_means,
    overlong_penalty,
    reinforce,
    state_relative,
)
from earl_jax.algorithms.algorithm import (
    Algorithm,
    CriticMethods,
    Episode,
    RewardFacts,
    TokenFacts,
    TokenLosses,
)
from earl_jax.algorithms.gae import advantage_estimates, value_loss
from earl_jax.algorithms.losses import (
    balanced_log_ratios,
    clipped_surrogate,
    clipped_weight,
    cross_entropy,
    policy_kl,
    reward_penalties,
    sequence_ratio,
    trajectory_balance,
)
from earl_jax.algorithms.sequences import (
    aggregate,
    episode_numbers,
    group_means,
    normalized,
    sequence_sums,
    sums_from,
)
from earl_jax.algorithms.settings import (
    CispoSettings,
    ClippedSettings,
    DapoSettings,
    DistillationSettings,
    GigpoSettings,
    GrpoSettings,
    PolicySettings,
    PpoSettings,
    ReinforceSettings,
    RlooSettings,
    TbaSettings,
)
from earl_jax.settings.named import find_named

# Advantages.


def _rewards(episodes: Sequence[Episode]) -> list[Sequence[float]]:
    return [episode.turn_rewards for episode in episodes]


def _groups(episodes: Sequence[Episode]) -> list[tuple[int, str]]:
    # A group's episodes have one role each, or in self-play several, which are not compared.
    return [(episode.group, episode.role) for episode in episodes]


def grpo_advantages(
    episodes: Sequence[Episode], settings: GrpoSettings | CispoSettings
) -> list[np.ndarray]:
    """Returns `group_relative` advantages of the groups that share a task."""
    return group_relative(
        _rewards(episodes),
        _groups(episodes),
        normalize=settings.normalize_advantages,
        of_sample=settings.deviation == "sample",
    )


def gigpo_advantages(episodes: Sequence[Episode], settings: GigpoSettings) -> list[np.ndarray]:
    """Returns `grpo_advantages` plus the weighted `state_relative` ones of turns (eq. 9)."""
    turns = state_relative(
        _rewards(episodes),
        [[getattr(state, settings.anchor) for state in e.turn_states] for e in episodes],
        _groups(episodes),
        discount=settings.turn_discount,
        normalize=settings.normalize_advantages,
        of_sample=settings.deviation == "sample",
    )
    whole = grpo_advantages(episodes, settings)
    return [one + settings.turn_weight * own for one, own in zip(whole, turns, strict=True)]


def dapo_advantages(episodes: Sequence[Episode], settings: DapoSettings) -> list[np.ndarray]:
    """Returns `group_relative` advantages of outcomes with the penalty of long episodes."""
    penalties = [
        overlong_penalty(
            episode.num_policy_tokens, settings.overlong_tokens, settings.overlong_buffer
        )
        for episode in episodes
    ]
    return group_relative(
        _rewards(episodes),
        _groups(episodes),
        normalize=settings.normalize_advantages,
        of_sample=settings.deviation == "sample",
        penalties=penalties,
    )


def rloo_advantages(episodes: Sequence[Episode], settings: object) -> list[np.ndarray]:
    """Returns `leave_one_out` advantages of the groups that share a task."""
    return leave_one_out(_rewards(episodes), _groups(episodes))


def rloo_token_advantages(facts: RewardFacts, settings: RlooSettings) -> jax.Array:
    """Returns `leave_one_out` of outcomes minus the sum of their episode's penalties.

    The reward of arXiv 2402.14740 has its KL penalty inside. `rewards` are `leave_one_out` of the
    outcomes; of the penalties of n episodes it is n / (n - 1) times each minus the mean of all n.
    """
    assert facts.groups is not None, "settings.needs names the groups"
    penalties = reward_penalties(facts, settings.kl_coefficient, settings.kl_estimator)
    episodes = episode_numbers(facts)
    sums = sequence_sums(penalties, episodes)
    means, counts = group_means(sums, facts.mask, episodes, facts.groups)
    # Sums of shares are rounded; alone in its group an episode gets 0.
    factors = jnp.where(counts > 1.5, counts / jnp.maximum(counts - 1.0, 1.0), 0.0)
    return jnp.where(facts.mask, facts.rewards - factors * (sums - means), 0.0)


def reinforce_advantages(
    episodes: Sequence[Episode],
    settings: ReinforceSettings,
    averages: Mapping[str, float] | None = None,
) -> list[np.ndarray]:
    """Returns `reinforce` advantages, with a baseline for each role.

    The moving average of a role is that of the steps before, so that the baseline does not depend
    on the episodes that it is subtracted from; a role that has none yet counts 0.
    """
    compared, baselines = None, []
    if settings.baseline == "ema":
        assert averages is not None, "the caller keeps the moving averages"
        baselines = [averages.get(episode.role, 0.0) for episode in episodes]
    elif settings.baseline != "none":
        by_group = settings.baseline == "group"
        compared = [(episode.group * by_group, episode.role) for episode in episodes]
    return reinforce(
        _rewards(episodes),
        compared,
        discount=settings.turn_discount,
        normalize=settings.normalize_advantages,
        baselines=baselines,
    )


def role_averages(
    averages: Mapping[str, float], episodes: Sequence[Episode], settings: ReinforceSettings
) -> dict[str, float]:
    """Returns `moving_means` of the roles' returns; {} unless they are the baseline."""
    if settings.baseline != "ema":
        return {}
    return moving_means(
        averages,
        _rewards(episodes),
        [episode.role for episode in episodes],
        discount=settings.turn_discount,
        decay=settings.baseline_decay,
    )


def plus_plus_advantages(episodes: Sequence[Episode], settings: object) -> list[np.ndarray]:
    """Returns `centred_outcomes`, of which `plus_plus_token_advantages` makes advantages.

    The mean that is subtracted here in fp64 is no part of what is normalised.
    """
    return centred_outcomes(_rewards(episodes))


def plus_plus_baseline_advantages(
    episodes: Sequence[Episode], settings: object
) -> list[np.ndarray]:
    """Returns `centred_outcomes` of the groups that share a task."""
    return centred_outcomes(_rewards(episodes), _groups(episodes))


def plus_plus_token_advantages(facts: RewardFacts, settings: ClippedSettings) -> jax.Array:
    """Returns REINFORCE++'s advantages of the tokens (arXiv 2501.03262, eq. 8 to 10).

    Outcome minus the penalties from the token to the end of its sequence, then normalised over all
    tokens of the batch that the policy wrote.
    """
    advantages = facts.rewards
    if settings.penalizes_rewards:
        penalties = reward_penalties(facts, settings.kl_coefficient, settings.kl_estimator)
        advantages = advantages - sums_from(penalties, facts.sequences)
    return normalized(advantages, facts.mask)


def tba_advantages(episodes: Sequence[Episode], settings: TbaSettings) -> list[np.ndarray]:
    """Returns `centred_outcomes` of the groups that share a task, divided by `kl_coefficient`.

    `tba_token_advantages` makes advantages of them. They do not depend on the mean that is
    subtracted here, but in fp64: what is left is small enough for fp32.
    """
    return [
        row / settings.kl_coefficient for row in plus_plus_baseline_advantages(episodes, settings)
    ]


def tba_token_advantages(facts: RewardFacts, settings: TbaSettings) -> jax.Array:
    """Returns `balanced_log_ratios`, the log-ratio to the reference that balances a sequence."""
    return balanced_log_ratios(facts)


def distillation_token_advantages(facts: RewardFacts, settings: DistillationSettings) -> jax.Array:
    """Returns minus the penalty of each token, and of those that follow, discounted.

    With "k1" and no discount they are log teacher - log policy of the token that was sampled, whose
    mean is minus the reverse KL there: on-policy distillation (arXiv 2306.13649, section 3) as a
    policy gradient. 0 where the penalty is in the loss.
    """
    if not settings.penalizes_rewards:
        return jnp.zeros_like(facts.rewards)
    penalties = reward_penalties(facts, settings.kl_coefficient, settings.kl_estimator)
    return jnp.where(facts.mask, -sums_from(penalties, facts.sequences, settings.kl_discount), 0.0)


def no_advantages(episodes: Sequence[Episode], settings: object) -> list[np.ndarray]:
    """Returns zeros: the loss reads no advantages."""
    return [np.zeros(len(episode.turn_rewards)) for episode in episodes]


def turn_rewards(episodes: Sequence[Episode], settings: object) -> list[np.ndarray]:
    """Returns the rewards of the turns, of which a critic's algorithm makes advantages."""
    return [np.asarray(rewards, np.float64) for rewards in _rewards(episodes)]


def outcomes_differ(group: Sequence[Episode], settings: object) -> bool:
    """Returns False for a group whose rewards are all equal: DAPO's dynamic sampling."""
    return has_different_outcomes(_rewards(group))


# Losses.


def policy_loss(
    surrogate: Callable[[TokenFacts, Any], TokenLosses], facts: TokenFacts, settings: PolicySettings
) -> TokenLosses:
    """Returns the losses of a surrogate with the settings' penalty and aggregation.

    A penalty in the reward is that of the policy that the ratio is relative to, and so the same in
    all updates of a batch. Logs `reference_kl`, of the policy that is updated, with a penalty.
    """
    if not settings.kl_coefficient:
        losses, metrics, _ = surrogate(facts, settings)
    else:
        assert facts.reference is not None, "settings.needs names the reference"
        distance = policy_kl(facts.logprobs, facts.reference, settings.kl_estimator)
        penalty = settings.kl_coefficient * distance
        if settings.kl_in == "reward":
            taken = reward_penalties(facts, settings.kl_coefficient, settings.kl_estimator)
            following = sums_from(taken, facts.sequences)
            advantages = (facts.advantages - following) * facts.mask
            facts = dataclasses.replace(facts, advantages=advantages)
        losses, metrics, _ = surrogate(facts, settings)
        losses = losses + penalty if settings.kl_in == "loss" else losses
        metrics = metrics | {"reference_kl": distance}
    aggregation = aggregate(facts, settings.aggregation, settings.aggregation_tokens)
    return TokenLosses(losses, metrics, aggregation)


def _ppo_surrogate(facts: TokenFacts, settings: ClippedSettings) -> TokenLosses:
    return clipped_surrogate(
        facts,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )


def _gspo_surrogate(facts: TokenFacts, settings: ClippedSettings) -> TokenLosses:
    return clipped_surrogate(
        facts,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        ratio=sequence_ratio(facts),
    )


def _cispo_surrogate(facts: TokenFacts, settings: CispoSettings) -> TokenLosses:
    return clipped_weight(facts, clip_low=settings.clip_low, clip_high=settings.clip_high)


def clipped_loss(facts: TokenFacts, settings: ClippedSettings) -> TokenLosses:
    """Returns `clipped_surrogate` losses; decoupled ones where the trainer corrects.

    See `TokenFacts.old`.
    """
    return policy_loss(_ppo_surrogate, facts, settings)


def ppo_loss(facts: TokenFacts, settings: ClippedSettings) -> TokenLosses:
    """Returns `clipped_surrogate` losses; a penalty in the reward is in the advantages already."""
    if not settings.penalizes_rewards:
        return policy_loss(_ppo_surrogate, facts, settings)
    assert facts.reference is not None, "settings.needs names the reference"
    found = policy_loss(_ppo_surrogate, facts, dataclasses.replace(settings, kl_coefficient=0.0))
    distance = policy_kl(facts.logprobs, facts.reference, settings.kl_estimator)
    return found._replace(metrics=found.metrics | {"reference_kl": distance})


def gspo_loss(facts: TokenFacts, settings: ClippedSettings) -> TokenLosses:
    """Returns `clipped_surrogate` losses of the `sequence_ratio`."""
    return policy_loss(_gspo_surrogate, facts, settings)


def cispo_loss(facts: TokenFacts, settings: CispoSettings) -> TokenLosses:
    """Returns `clipped_weight` losses."""
    return policy_loss(_cispo_surrogate, facts, settings)


def tba_loss(facts: TokenFacts, settings: TbaSettings) -> TokenLosses:
    """Returns `trajectory_balance` losses."""
    return trajectory_balance(facts)


def supervised_loss(facts: TokenFacts, settings: object) -> TokenLosses:
    """Returns `cross_entropy` losses."""
    return cross_entropy(facts)


_GRPO = Algorithm(
    settings=GrpoSettings(aggregation="sequence"),
    advantages=grpo_advantages,
    loss=clipped_loss,
    min_group_size=2,
    is_by_group=True,
)
_DR_GRPO = GrpoSettings(normalize_advantages=False, aggregation="constant")
# The intervals of arXiv 2507.18071, section 5.1.
_GSPO = GrpoSettings(clip_low=3e-4, clip_high=4e-4, aggregation="sequence")
_SPIRAL = ReinforceSettings(
    turn_discount=1.0, baseline="ema", baseline_decay=0.95, normalize_advantages=False
)
_PLUS_PLUS = ClippedSettings(kl_estimator="k1", kl_in="reward")
_PLUS_PLUS_BASELINE = ClippedSettings(kl_estimator="k2")

ALGORITHMS: dict[str, Algorithm] = {
    "reinforce": Algorithm(
        settings=ReinforceSettings(),
        advantages=reinforce_advantages,
        loss=clipped_loss,
        averages=role_averages,
    ),
    "spiral": Algorithm(
        settings=_SPIRAL,
        advantages=reinforce_advantages,
        loss=clipped_loss,
        averages=role_averages,
    ),
    "grpo": _GRPO,
    "dr_grpo": dataclasses.replace(_GRPO, settings=_DR_GRPO),
    "gigpo": dataclasses.replace(_GRPO, settings=GigpoSettings(), advantages=gigpo_advantages),
    "dapo": Algorithm(
        settings=DapoSettings(clip_high=0.28),
        advantages=dapo_advantages,
        loss=clipped_loss,
        keep_group=outcomes_differ,
        min_group_size=2,
        is_by_group=True,
    ),
    "gspo": dataclasses.replace(_GRPO, settings=_GSPO, loss=gspo_loss),
    "cispo": dataclasses.replace(_GRPO, settings=CispoSettings(), loss=cispo_loss),
    "rloo": Algorithm(
        settings=RlooSettings(),
        advantages=rloo_advantages,
        token_advantages=rloo_token_advantages,
        loss=ppo_loss,
        min_group_size=2,
        is_by_group=True,
    ),
    "reinforce_plus_plus": Algorithm(
        settings=_PLUS_PLUS,
        advantages=plus_plus_advantages,
        token_advantages=plus_plus_token_advantages,
        loss=ppo_loss,
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        settings=_PLUS_PLUS_BASELINE,
        advantages=plus_plus_baseline_advantages,
        token_advantages=plus_plus_token_advantages,
        loss=ppo_loss,
        min_group_size=2,
    ),
    "ppo": Algorithm(
        settings=PpoSettings(kl_estimator="k1", kl_in="reward"),
        advantages=turn_rewards,
        loss=ppo_loss,
        critic=CriticMethods(estimate=advantage_estimates, loss=value_loss),
    ),
    "tba": Algorithm(
        settings=TbaSettings(),
        advantages=tba_advantages,
        token_advantages=tba_token_advantages,
        loss=tba_loss,
        needs=frozenset({"proximal", "reference", "groups"}),
        min_group_size=2,
        is_by_group=True,
        is_off_policy=True,
    ),
    "distillation": Algorithm(
        settings=DistillationSettings(),
        advantages=no_advantages,
        token_advantages=distillation_token_advantages,
        loss=ppo_loss,
        is_by_group=True,
    ),
    "sft": Algorithm(advantages=no_advantages, loss=supervised_loss),
}


def find_algorithm(name: str) -> Algorithm:
    """Returns the algorithm of this name, or the user's own at `module:name`.

    Raises:
        ValueError: there is none.
    """
    return find_named(name, ALGORITHMS, Algorithm, "config.algorithm")
