# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The mathematics of an update: a batch in, its totals, and the state behind it. Pure functions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from earl_jax.algorithms.algorithm import Algorithm, TokenFacts, ValueFacts
from earl_jax.algorithms.losses import (
    importance_weights,
    kl_estimate,
    likelihood_ratio,
    log_linear_proximal,
)
from earl_jax.algorithms.requirements import Networks
from earl_jax.models.config import ModelConfig
from earl_jax.models.logprobs import TokenScores
from earl_jax.models.moe.routing import Routing, balance_loss, load_of_experts
from earl_jax.models.parameters import (
    Params,
)
from earl_jax.sharding.layout import Layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.optimizer import make_optimizer
from earl_jax.train.scoring import critic_values, score_routed, split_rows
from earl_jax.train.spread import Spread, explained_variance, joined, spread_of
from earl_jax.train.state import (
    TrainState,
    optimized_specs,
    policy_parameters,
    state_shardings,
)
from earl_jax.trajectory import TrajectoryBatch

# Sums over tokens that are no metrics by themselves.
_DIVISOR, _RATIO, _RATIO_SQUARED = "divisor", "ratio", "ratio_squared"
_NEWEST = "newest"
# Of a supervised stream: its mean loss, which is a metric, and the number of its tokens.
_SUPERVISED, _SUPERVISED_TOKENS = "supervised_loss", "supervised_tokens"
# Of a critic's values, a `Spread` of each.
_RETURNS, _ERRORS = "returns", "errors"


class Totals(NamedTuple):
    """Sums over the tokens of one or more batches that an update is made of.

    `grads` are those of each network that is updated, `sums` of metrics by name (some are a
    `Spread`), `routing` of a mixture of experts. `count` i32 is the number of the policy's tokens.
    """

    grads: tuple[Params, ...]
    sums: dict[str, Any]
    routing: Routing | None
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Update:
    """The mathematics of one update, as pure functions of device arrays.

    Gradients of the micro-batches add up as sums and are divided once by all the policy's tokens,
    or by what the loss's `Aggregation` says. Routers are to be balanced within each micro-batch,
    which counts by its part of that divisor.

    A critic is updated beside the policy, from the mean of its own losses over the policy's tokens,
    with its own moments and its own clip of the gradient.

    An update whose loss, gradient or step is not finite is skipped: parameters and moments stay as
    they are. So they do for a batch without a token of the policy, which is not counted as skipped.

    `importance_cap` above 0 corrects for who sampled: the ratio is relative to the proximal policy,
    and the loss of each token is weighted with `importance_weights` of config.correction. With more
    than one update a batch, give the batch what `make_scorer` computes, unless config.proximal is
    "log_linear", which needs versions. Where the update `has_versions`, the last of its controls is
    the version of the weights that the step begins with.

    Its states have no `sft_optimizer`: a supervised update is one of `TrainState.for_sft`.
    """

    model: ModelConfig
    config: TrainConfig
    layout: Layout
    _: dataclasses.KW_ONLY
    vocab_size: int
    temperature: float
    algorithm: Algorithm
    importance_cap: float = 0.0
    networks: Networks = Networks()
    has_versions: bool = False

    @property
    def trains_critic(self) -> bool:
        """True if a critic is updated beside the policy."""
        return self.networks.critic and self.algorithm.critic is not None

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The shardings of the state."""
        return state_shardings(self.model, self.config, self.vocab_size, self.layout, self.networks)

    @functools.cached_property
    def optimizers(self) -> list[optax.GradientTransformation]:
        """The optimizer of each of `TrainState.moments`."""
        specs = optimized_specs(self.model, self.config, self.vocab_size, self.networks)
        return [make_optimizer(self.config, each) for each in specs]

    def totals(self, state: TrainState, batch: TrajectoryBatch, controls: jax.Array) -> Totals:
        """Returns the sums of a batch, whose gradients add up over its micro-batches."""
        grads, (sums, routing) = _accumulate(
            lambda part: self._gradients(state, part, controls),
            batch,
            self.config.micro_batches,
            self.layout,
        )
        return Totals(grads, sums, routing, jnp.sum(batch.turn_ids > 0))

    def apply(
        self, state: TrainState, totals: Totals, controls: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the state behind the update, and its metrics."""
        grads, sums, routing, count = totals
        divisor, sums = _divisor(totals), dict(sums)
        del sums[_DIVISOR]
        streams = {_SUPERVISED: sums.pop(_SUPERVISED)} if _SUPERVISED in sums else {}
        num_learnt = count + sums.pop(_SUPERVISED_TOKENS, 0)
        spreads = [sums.pop(name) for name in (_RETURNS, _ERRORS) if name in sums]
        tokens = jnp.maximum(count, 1).astype(jnp.float32)
        ratios, squares = sums.pop(_RATIO), sums.pop(_RATIO_SQUARED)
        # Kish's (sum w)^2 / sum w^2, as a fraction of the tokens.
        sample_size = ratios**2 / (tokens * jnp.maximum(squares, 1e-30))
        scale = jnp.where(count > 0, sample_size, 1.0)
        rates = _scaled(controls[0], scale, self.config.ess_scaling), *controls[2:]
        moments = state.moments
        each_network = (self.optimizers, grads, moments, state.trained, rates, (divisor, tokens))
        steps = [_network_step(*each) for each in zip(*each_network, strict=False)]
        norms = [sums["loss"], *streams.values(), *(norm for each in steps for norm in each.norms)]
        is_finite = jnp.isfinite(jnp.stack(norms)).all()
        # Without a token the moments alone would move the parameters: the policy's, which a stream
        # has too, or the critic's.
        is_taken, has_values = is_finite & (num_learnt > 0), is_finite & (count > 0)
        before = zip(state.trained, moments, strict=False)
        taken = [
            jax.tree.map(functools.partial(jnp.where, takes), (step.params, step.moments), old)
            for takes, step, old in zip((is_taken, has_values), steps, before, strict=False)
        ]
        trained, new = zip(*taken, strict=True)
        metrics = {
            name: jnp.where(count > 0, value, 0.0) if _is_maximum(name) else value / tokens
            for name, value in sums.items()
        }
        if self.has_versions:
            newest = metrics.pop(_NEWEST)
            metrics["kept_kv_gap_mean"] /= jnp.where(newest > 0, newest, 1.0)
        metrics |= {
            "loss": sums["loss"] / divisor,
            "effective_sample_size": sample_size,
            "grad_norm": steps[0].norms[0],
            "policy_tokens": count.astype(jnp.float32),
            "skipped_updates": 1.0 - is_finite,
        }
        if self.trains_critic:
            metrics["critic_grad_norm"] = steps[1].norms[0]
            metrics["explained_variance"] = explained_variance(*spreads)
        state = dataclasses.replace(
            state,
            updates=state.updates + is_taken,
            params=trained[0],
            critic=trained[1] if self.trains_critic else state.critic,
            ema=self._average(state.ema, trained[0], is_taken),
        ).with_moments(new + moments[len(new) :])
        return state, metrics | streams | _routing_metrics(self.model, routing)

    def _average(self, ema: Params, params: Params, is_taken: jax.Array) -> Params:
        """Returns the moving average behind an update; None where there is none."""
        if ema is None:
            return None
        # In this form an average that equals the parameters stays so to the bit.
        step = jnp.where(is_taken, 1.0 - self.config.ema_decay, 0.0)
        return jax.tree.map(lambda mean, new: mean + step * (new - mean), ema, params)

    def _gradients(self, state: TrainState, batch: TrajectoryBatch, controls: jax.Array) -> Any:
        given = state.params, state.base, batch, controls
        of_policy, (sums, routing) = self._policy_gradients(*given)
        if not self.trains_critic:
            return (of_policy,), (sums, routing)
        of_critic, of_values = self._value_gradients(state.critic, batch)
        return (of_policy, of_critic), (sums | of_values, routing)

    # Jitted so that they are traced once, for shapes and for use; in their place all the same.

    @functools.cached_property
    def _policy_gradients(self) -> Any:
        return jax.jit(jax.grad(self._loss_sums, has_aux=True), inline=True)

    @functools.cached_property
    def _value_gradients(self) -> Any:
        def sums(params: Params, batch: TrajectoryBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
            values = critic_values(self.model, self.config, self.layout, params, batch)
            found = value_sums(self.algorithm, values, batch)
            return found["value_loss"], found

        return jax.jit(jax.grad(sums, has_aux=True), inline=True)

    def _loss_sums(self, params: Params, base: Params, batch: TrajectoryBatch, controls: jax.Array):
        config = self.config
        params = policy_parameters(config, params, base)
        scores, routing = score_routed(
            self.model, config, self.layout, self.temperature, params, batch
        )
        sums = self.loss_sums(scores, batch, controls)
        if routing is not None and config.balance_coefficient:
            weight = config.balance_coefficient * sums[_DIVISOR]
            sums["loss"] += weight * balance_loss(self.model, routing)
        return sums["loss"], (sums, routing)

    def loss_sums(
        self, scores: TokenScores, batch: TrajectoryBatch, controls: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns sums over the policy's tokens: "loss", its "divisor", and metrics by name.

        The second of the `controls` times the entropy is subtracted from each token's loss.
        """
        config, algorithm = self.config, self.algorithm
        with_proximal = self.importance_cap > 0 or "proximal" in algorithm.all_needs
        lag = None
        if config.proximal == "log_linear" and self.has_versions:
            lag = controls[-1] + 1 - batch.versions
        facts = token_facts(scores, batch, with_proximal=with_proximal, lag=lag)
        losses, metrics, aggregation = algorithm.loss(facts, algorithm.settings)
        if self.importance_cap:
            correction = "truncated" if config.correction == "auto" else config.correction
            weight, cut = importance_weights(facts, correction, self.importance_cap)
            losses = losses * weight
            metrics = metrics | {"importance_mean": weight, "truncated_fraction": cut}
        mismatch = jnp.abs(facts.logprobs - facts.behaviour)
        losses -= controls[1] * facts.entropy
        ratio = likelihood_ratio(facts.logprobs, facts.behaviour)
        metrics = metrics | {
            "loss": losses if aggregation is None else losses * aggregation.weights,
            "entropy": facts.entropy,
            "kl": kl_estimate(facts.logprobs, facts.behaviour),
            "logprob_mismatch_mean": mismatch,
            "logprob_mismatch_max": mismatch,
            _RATIO: ratio,
            _RATIO_SQUARED: ratio**2,
            _DIVISOR: jnp.ones_like(losses) if aggregation is None else aggregation.shares,
        }
        if self.has_versions:
            # Its weights are the trainer's: what differs is due to KV that older weights wrote.
            is_newest = batch.versions == controls[-1]
            gap = jnp.where(is_newest, mismatch, 0.0)
            metrics |= {"kept_kv_gap_mean": gap, "kept_kv_gap_max": gap, _NEWEST: is_newest}
        return {name: _total(name, values, facts.mask) for name, values in metrics.items()}


def add_totals(totals: Totals, more: Totals) -> Totals:
    """Returns the totals of two batches together: sums, of metrics named `_max` the larger."""
    sums = _combined(totals.sums, more.sums)
    return jax.tree.map(jnp.add, totals._replace(sums={}), more._replace(sums={}))._replace(
        sums=sums
    )


def add_stream(totals: Totals, more: Totals, weight: float) -> Totals:
    """Returns `totals` with `weight` times the mean loss of the supervised tokens of `more`.

    Its gradient becomes one of `totals`: divided by their divisor it is that of the mean. The sums
    of metrics stay those of `totals`, with the mean loss of the stream beside them.
    """
    own = jnp.maximum(more.count, 1).astype(jnp.float32)
    scale = weight * _divisor(totals) / own
    policy, *others = totals.grads
    policy = jax.tree.map(lambda grad, part: grad + scale * part, policy, more.grads[0])
    stream = {_SUPERVISED: more.sums["loss"] / own, _SUPERVISED_TOKENS: more.count}
    return totals._replace(grads=(policy, *others), sums=totals.sums | stream)


def _divisor(totals: Totals) -> jax.Array:
    """Returns what sums of the policy's losses and gradients are divided by: 1 without a token."""
    return jnp.where(totals.count > 0, totals.sums[_DIVISOR], 1.0)


def _scaled(rate: jax.Array, sample_size: jax.Array, scaling: str) -> jax.Array:
    """Returns a learning rate scaled by the effective sample size, a fraction of the tokens."""
    if scaling == "none":
        return rate
    return rate * (jnp.sqrt(sample_size) if scaling == "sqrt" else sample_size)


class _NetworkStep(NamedTuple):
    """One network after an update, and the norms of its gradient and of its step."""

    params: Params
    moments: Any
    norms: tuple[jax.Array, jax.Array]


def _network_step(
    optimizer: optax.GradientTransformation,
    grads: Params,
    moments: Any,
    params: Params,
    rate: Any,
    divisor: jax.Array,
) -> _NetworkStep:
    """Updates one network by sums of gradients, which are divided by `divisor`."""
    grads = jax.tree.map(lambda grad: grad / divisor, grads)
    direction, moments = optimizer.update(grads, moments, params)
    norms = optax.tree.norm(grads), rate * optax.tree.norm(direction)
    params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
    return _NetworkStep(params, moments, norms)


def value_sums(algorithm: Algorithm, values: jax.Array, batch: TrajectoryBatch) -> dict[str, Any]:
    """Returns sums over the policy's tokens: "value_loss" of the critic's values, and metrics.

    Beside them the spreads of returns and of their differences from the values before the updates.
    """
    assert algorithm.critic and batch.values is not None and batch.returns is not None
    mask = batch.turn_ids > 0
    fields = {"values": values, "old": batch.values, "returns": batch.returns}
    facts = ValueFacts(
        mask=mask, **{name: jnp.where(mask, field, 0.0) for name, field in fields.items()}
    )
    losses, metrics, aggregation = algorithm.critic.loss(facts, algorithm.settings)
    assert aggregation is None, "a critic's loss is the mean over tokens"
    metrics = metrics | {"value_loss": losses}
    return {name: _total(name, field, mask) for name, field in metrics.items()} | {
        _RETURNS: spread_of(facts.returns, mask),
        _ERRORS: spread_of(facts.returns - facts.old, mask),
    }


def token_facts(
    scores: TokenScores,
    batch: TrajectoryBatch,
    *,
    with_proximal: bool = False,
    lag: jax.Array | None = None,
) -> TokenFacts:
    """Returns the facts of a batch, zeros wherever the policy did not sample a token that counts.

    Without `batch.proximal` the update is the batch's first, and the proximal policy this one; or
    it is interpolated with the `lag` of each token (`log_linear_proximal`).
    """
    mask = batch.turn_ids > 0

    def masked(field: jax.Array) -> jax.Array:
        return jnp.where(mask, field, 0.0)

    proximal = None
    if with_proximal:
        current = jax.lax.stop_gradient(scores.logprobs)
        if lag is not None:
            current = log_linear_proximal(current, batch.logprobs, lag)
        proximal = masked(current if batch.proximal is None else batch.proximal)
    return TokenFacts(
        mask=mask,
        sequences=batch.segment_ids,
        logprobs=masked(scores.logprobs),
        entropy=masked(scores.entropy),
        behaviour=masked(batch.logprobs),
        advantages=masked(batch.advantages),
        proximal=proximal,
        reference=jax.tree.map(masked, batch.reference),
    )


def _is_maximum(name: str) -> bool:
    return name.endswith("_max")


def _total(name: str, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the sum or the maximum of a metric over the tokens of the mask; -inf of no tokens."""
    values = values.astype(jnp.float32)
    if _is_maximum(name):
        return jnp.max(jnp.where(mask, values, -jnp.inf))
    return jnp.sum(jnp.where(mask, values, 0.0))


def _combined(total: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    def one(name: str) -> Any:
        if isinstance(total[name], Spread):
            return joined(total[name], part[name])
        return (jnp.maximum if _is_maximum(name) else jnp.add)(total[name], part[name])

    return {name: one(name) for name in total}


def _routing_metrics(model: ModelConfig, routing: Routing | None) -> dict[str, jax.Array]:
    """Returns the metrics of a mixture of experts, none for a dense model."""
    if routing is None:
        return {}
    load = load_of_experts(routing)
    return {
        "balance_loss": balance_loss(model, routing),
        "expert_load_max": load.busiest,
        "expert_load_entropy": load.entropy,
    }


def _accumulate(
    gradients: Callable[[TrajectoryBatch], tuple[Any, tuple[dict[str, Any], Routing | None]]],
    batch: TrajectoryBatch,
    micro_batches: int,
    layout: Layout,
) -> tuple[Any, tuple[dict[str, Any], Routing | None]]:
    """Returns the sums of `gradients` over micro-batches, each with rows of every shard."""
    if micro_batches == 1:
        return gradients(batch)

    def add(total: Any, part: TrajectoryBatch) -> tuple[Any, None]:
        grads, (sums, routing) = total
        more_grads, (more_sums, more_routing) = gradients(part)
        grads, routing = jax.tree.map(jnp.add, (grads, routing), (more_grads, more_routing))
        return (grads, (_combined(sums, more_sums), routing)), None

    parts = split_rows(batch, micro_batches, layout)
    shapes = jax.eval_shape(gradients, jax.tree.map(lambda field: field[0], parts))
    zeros, (sums, routing) = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums = {name: zero - jnp.inf if _is_maximum(name) else zero for name, zero in sums.items()}
    total, _ = jax.lax.scan(add, (zeros, (sums, routing)), parts)
    return total
