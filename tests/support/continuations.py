# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A JetStream engine, and the tokens that it must sample, by full forward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.engine.sampling import model_logprobs, sample, sampling_rows, token_uniforms
from earl_jax.models.decoder import forward_rows
from earl_jax.models.parameters import is_spec, parameter_specs, unstack_layers
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.jetstream_engine import JetStreamEngine
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.episodes import MODEL, tokenizer

VOCAB, SEED, NUM_SLOTS, MAX_PREFILL, CONTEXT_TOKENS = 320, 11, 8, 64, 128


@functools.cache
def stacked_params():
    """Random weights whose distributions are wide, with some mass on the end of turn."""
    rng = np.random.default_rng(0)

    def draw(spec):
        noise = rng.normal(size=spec.shape) * spec.deviation if spec.deviation else np.ones(1)
        return np.broadcast_to(noise, spec.shape).astype(np.float32)

    values = jax.tree.map(draw, parameter_specs(MODEL, VOCAB), is_leaf=is_spec)
    embed, head = values["embed"].copy(), values["head"].copy()
    embed[:, 0], head[0] = 2, 0
    head[0, tokenizer().eos_token_id] = 1.6
    return {**values, "embed": embed, "head": head}


def make_engine() -> JetStreamEngine:
    rules = SlotRules(burst=4, end_of_turn_ids=(tokenizer().eos_token_id,))
    config = EngineConfig(
        model=MODEL,
        vocab_size=VOCAB,
        num_slots=NUM_SLOTS,
        num_rows=NUM_SLOTS,
        chunk_size=4,
        rules=rules,
        seed=SEED,
    )
    serving = ServingConfig(max_prefill_length=MAX_PREFILL, context_tokens=CONTEXT_TOKENS)
    engine = Engine(config, make_layout(MeshShape(data=8)))
    return JetStreamEngine(engine, serving, tokenizer())


def load_params(engine: JetStreamEngine):
    values = unstack_layers(stacked_params(), MODEL.num_layers)
    return engine.load_params(jax.tree.map(jnp.asarray, values))


def prompt(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).integers(4, VOCAB, length).astype(np.int32)


def padded(ids: np.ndarray) -> np.ndarray:
    """As JetStream pads: to the next power of two, at least 16."""
    return np.pad(ids, (0, max(16, 1 << (len(ids) - 1).bit_length()) - len(ids)))


def continuations(
    prompts: list[np.ndarray], seeds: list[int], steps: int, sampling: Sampling | None = None
) -> np.ndarray:
    """Returns the policy's tokens behind each prompt: a full forward pass for each, no cache."""
    return scored_continuations(prompts, seeds, steps, sampling)[0]


def scored_continuations(
    prompts: list[np.ndarray], seeds: list[int], steps: int, sampling: Sampling | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`continuations`, their log-probs as they were drawn, and those under the model."""
    layout = make_layout(MeshShape(), jax.devices()[:1])

    @jax.jit
    def step(tokens_BT, lengths_B, seeds_B):
        segments_BT = (jnp.arange(CONTEXT_TOKENS)[None, :] < lengths_B[:, None]).astype(jnp.int32)
        hidden = forward_rows(MODEL, layout, stacked_params(), tokens_BT, segments_BT)
        last = jnp.take_along_axis(hidden, lengths_B[:, None, None] - 1, axis=1)[:, 0]
        uniforms = token_uniforms(jax.random.key(SEED), seeds_B, lengths_B)
        logits = last @ stacked_params()["head"]
        rows = sampling_rows(sampling or Sampling(), len(prompts))
        tokens, logprobs = sample(uniforms, logits, rows)
        return tokens, logprobs, model_logprobs(logits, tokens)

    rows = np.stack([np.pad(ids, (0, CONTEXT_TOKENS - len(ids))) for ids in prompts])
    start = np.array([len(ids) for ids in prompts])
    found = []
    for count in range(steps):
        lengths = start + count
        found.append([np.asarray(x) for x in step(rows, lengths, np.array(seeds))])
        rows[np.arange(len(rows)), lengths] = found[-1][0]
    return tuple(np.stack(column, axis=1) for column in zip(*found, strict=True))
