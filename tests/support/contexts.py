# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The log-prob of every token that a service samples, beside a full forward of its context.

Behind a weight swap with `kv="keep"` a context was written by several versions of the weights. The
forward pass here then computes each position with the weights that wrote it.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.models.attention.kernels import attend_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.contraction import contract_flat
from earl_jax.models.decoder import (
    _embed,
    head_weights,
    positions_in_segments,
)
from earl_jax.models.layers.kinds import layer_kind
from earl_jax.models.layers.layer import compute_layer
from earl_jax.models.layers.parts import Parts, norm
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.reply import NewTokens
from earl_jax.rollout.service import RolloutService
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.trajectory import Trajectory
from tests.support.forward import next_logprobs, row_logits

# Rows of a forward pass.
ROWS = 256


class Sampled(NamedTuple):
    """A token, its log-prob as it was drawn, and the version of the weights that drew it."""

    token: int
    logprob: float
    version: int


@dataclasses.dataclass
class Reading:
    """A sample of an episode in the KV cache, from when it is read until it is read again.

    `versions` are those of the weights that wrote each position; `sampled` are the tokens that were
    drawn behind them meanwhile, by position.
    """

    versions: list[int] = dataclasses.field(default_factory=list)
    sampled: dict[int, Sampled] = dataclasses.field(default_factory=dict)


class Recorder:
    """Notes which weights write which position of a service's episodes, by ticket.

    `on_tokens` is the service's. `look` is called behind each step and each change of weights.
    """

    def __init__(self) -> None:
        self.service: RolloutService | None = None
        self.readings: dict[int, list[Reading]] = {}
        self._episodes: dict[int, LiveEpisode] = {}

    def on_tokens(self, ticket: int, tokens: NewTokens) -> None:
        [episode] = [each for each in self._live() if each.ticket == ticket]
        reading, version = self._note(episode), self._version
        for offset, token in enumerate(tokens.token_ids):
            position = episode.length - len(tokens.token_ids) + offset
            reading.sampled[position] = Sampled(token, tokens.logprobs[offset], version)

    def look(self) -> None:
        for episode in self._live():
            self._note(episode)

    def all(self) -> list[tuple[list[int], Reading]]:
        """All readings in which tokens were sampled, each with the ids of its episode."""
        return [
            (self.ids(ticket), reading)
            for ticket, readings in self.readings.items()
            for reading in readings
            if reading.sampled
        ]

    def ids(self, ticket: int) -> list[int]:
        """All ids of the episode, the turn included that it is in."""
        episode = self._episodes[ticket]
        return [*(token for turn in episode.turns for token in turn.token_ids), *episode.reply.ids]

    def check(self, ticket: int, trajectory: Trajectory) -> None:
        """Checks that the client was given what was sampled, round by round."""
        drawn = {}
        for reading in self.readings.get(ticket, ()):
            drawn |= reading.sampled
        given, position = {}, 0
        for turn in trajectory.turns:
            for offset, version in enumerate(turn.versions):
                values = turn.token_ids[offset], turn.logprobs[offset], version
                given[position + offset] = Sampled(*values)
            position += len(turn.token_ids)
        assert given == drawn

    @property
    def _version(self) -> int:
        assert self.service is not None
        return self.service.session.policy.version

    def _live(self) -> list[LiveEpisode]:
        assert self.service is not None
        return [episode for episode in self.service._slots if episode is not None]

    def _note(self, episode: LiveEpisode) -> Reading:
        """Its newest reading, with what was written since the last look by the weights of now."""
        self._episodes[episode.ticket] = episode
        readings = self.readings.setdefault(episode.ticket, [Reading()])
        if episode.num_written < len(readings[-1].versions):
            assert episode.num_written == 0, "a cache is read again from its first token on"
            readings.append(Reading())
        versions = readings[-1].versions
        versions += [self._version] * (episode.num_written - len(versions))
        return readings[-1]


class Gap(NamedTuple):
    """The distance of a token's log-prob from that of a forward pass.

    `exact`: of one in which each position has the weights that wrote it. `alone`: of the trainer's,
    under the weights that drew the token. `whole`: one version wrote all of its context, so that
    both say the same.
    """

    exact: float
    alone: float
    whole: bool


def gaps_of(
    model: ModelConfig,
    params: Sequence[Any],
    readings: Sequence[tuple[Sequence[int], Reading]],
    length: int,
) -> list[Gap]:
    """The gap of each token that was sampled in these readings, each with its episode's ids.

    `params` are the trainer's, of version v at v modulo their number; rows are `length` tokens.
    """
    found = []
    for first in range(0, len(readings), ROWS):
        found += _gaps_of_rows(model, params, readings[first : first + ROWS], length)
    return found


def _gaps_of_rows(model, params, readings, length) -> list[Gap]:
    ids = np.zeros((ROWS, length), np.int32)
    segments, versions = np.zeros_like(ids), np.zeros_like(ids)
    for row, (tokens, reading) in enumerate(readings):
        ids[row, : len(tokens)], segments[row, : len(tokens)] = tokens, 1
        versions[row, : len(reading.versions)] = np.array(reading.versions) % len(params)
    exact = np.asarray(_mixed_scores(model)(tuple(params), ids, segments, versions))
    alone = [np.asarray(_scores(model)(each, ids, segments)) for each in params]
    found = []
    for row, (tokens, reading) in enumerate(readings):
        for position, drawn in reading.sampled.items():
            context = reading.versions[:position]
            assert len(context) == position and context[-1] == drawn.version
            assert tokens[position] == drawn.token
            of_version = alone[drawn.version % len(params)][row, position - 1]
            found.append(
                Gap(
                    abs(float(exact[row, position - 1]) - drawn.logprob),
                    abs(float(of_version) - drawn.logprob),
                    len(set(context)) == 1,
                )
            )
    return found


@functools.cache
def _scores(model: ModelConfig):
    """Log-probs of rows of ids by the trainer's forward pass."""

    @jax.jit
    def score(params, ids_BT, segments_BT):
        return next_logprobs(row_logits(model, params, ids_BT, segments_BT), ids_BT)

    return score


@functools.cache
def _mixed_scores(model: ModelConfig):
    """Log-probs of rows of ids, where each position has the weights of its own version.

    By the layers of the trainer's decoder, one after the other: keys and values come from all
    versions, and each position's from its own.
    """
    layout = make_layout(MeshShape(), jax.devices()[:1])

    @jax.jit
    def score(params, ids_BT, segments_BT, versions_BT):
        positions_BT = positions_in_segments(segments_BT)

        def pick(values: Sequence[jax.Array]) -> jax.Array:
            chosen = versions_BT.reshape(versions_BT.shape + (1,) * (values[0].ndim - 2))
            return sum(jnp.where(chosen == v, each, 0.0) for v, each in enumerate(values))

        x_BTD = pick([_embed(model, each["embed"][ids_BT]) for each in params])
        for index in range(model.num_layers):
            take = functools.partial(jax.tree.map, operator.itemgetter(index))
            layers = [take(each["layers"]) for each in params]
            kind, own = layer_kind(model, index), []

            def note(query, key, value, sinks, own=own):
                own.append((key, value))
                return query

            def block(layer, x_BTD, attend, kind=kind):
                given = model, kind, positions_BT, attend, _no_experts, _no_states
                return compute_layer(layer, x_BTD, Parts(*given, contract_flat))

            for layer in layers:
                block(layer, x_BTD, note)
            key_BKTH, value_BKTH = (
                pick(each).transpose(0, 2, 1, 3) for each in zip(*own, strict=True)
            )

            def attend(query, key, value, sinks, kind=kind, mixed=(key_BKTH, value_BKTH)):
                return attend_rows(
                    "blockwise", layout, query, *mixed, segments_BT,
                    scale=model.attention_scale, softcap=model.attention_softcap,
                    window=kind.window, sinks_KG=sinks,
                )  # fmt: skip

            x_BTD = pick([block(layer, x_BTD, attend) for layer in layers])
        normed = [norm(model, x_BTD, each["final_norm"]) for each in params]
        heads = [head_weights(each) for each in params]
        logits = [jnp.einsum("BTD,DV->BTV", *each) for each in zip(normed, heads, strict=True)]
        return next_logprobs(pick(logits), ids_BT)

    return score


def _no_experts(layer: Any, x_BTD: jax.Array) -> jax.Array:
    raise NotImplementedError("of dense models only")


def _no_states(mixed: Any) -> jax.Array:
    raise NotImplementedError("of models that attend in all layers only")


def trainer_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's parameters, layers stacked, from those of the engine."""
    layers = jax.tree.map(lambda *each: np.stack(each), *values["layers"])
    return {**values, "layers": layers}
