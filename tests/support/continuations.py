# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine of a server, and the tokens that it must sample, by full forward passes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Policy
from earl_jax.engine.sampling import model_logprobs, sample, sampling_rows, token_uniforms
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.parameters import is_spec, parameter_specs, unstack_layers
from earl_jax.serving.config import ServingConfig
from earl_jax.serving.driver import Driver
from earl_jax.serving.served_engine import ServedEngine, build_engine, rollout_config
from earl_jax.serving.tokenizer import ServedTokenizer
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.episodes import MODEL, tokenizer

VOCAB, SEED, NUM_SLOTS, CONTEXT_TOKENS, PAGE_SIZE = 320, 11, 8, 96, 8


@functools.cache
def stacked_params(model: ModelConfig = MODEL):
    """Random weights whose distributions are wide, with some mass on the end of turn."""
    rng = np.random.default_rng(0)

    def draw(spec):
        noise = rng.normal(size=spec.shape) * spec.deviation if spec.deviation else np.ones(1)
        return np.broadcast_to(noise, spec.shape).astype(np.float32)

    values = jax.tree.map(draw, parameter_specs(model, VOCAB), is_leaf=is_spec)
    embed, head = values["embed"].copy(), values["head"].copy()
    embed[:, 0], head[0] = 2, 0
    head[0, tokenizer().eos_token_id] = 0.6
    return {**values, "embed": embed, "head": head}


@functools.cache
def served(
    mesh: MeshShape = MeshShape(),  # noqa: B008
    *,
    draft: int = 0,
    num_slots: int = NUM_SLOTS,
    model: ModelConfig = MODEL,
    kv_dtype: str = "compute",
    **serving: int,
) -> ServedEngine:
    """The engine of a server on the first devices; rounds of at most four steps."""
    layout = make_layout(mesh, jax.devices()[: mesh.num_devices])
    rollout = rollout_config(
        num_slots, PAGE_SIZE, chunk_size=16, burst=4, num_draft_tokens=draft, kv_dtype=kv_dtype
    )
    ends = frozenset({tokenizer().eos_token_id})
    engine = build_engine(rollout, model, VOCAB, layout, ends=ends, choice_branches=0, seed=SEED)
    sizes = ServingConfig(max_prompt_tokens=CONTEXT_TOKENS, context_tokens=CONTEXT_TOKENS)
    return ServedEngine(
        engine=engine,
        rollout=rollout,
        serving=dataclasses.replace(sizes, **serving),
        tokenizer=ServedTokenizer(tokenizer(), tuple(ends)),
    )


def policy(engine: ServedEngine) -> Policy:
    model = engine.engine.config.model
    values = unstack_layers(stacked_params(model), model.num_layers)
    params = engine.engine.load_params(jax.tree.map(jnp.asarray, values))
    return Policy(params=params, version=0)


def prompt(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).integers(4, VOCAB, length).astype(np.int32)


def continuations(
    prompts: list[np.ndarray],
    seeds: list[int],
    steps: int,
    sampling: Sampling | None = None,
    model: ModelConfig = MODEL,
) -> np.ndarray:
    """Returns the policy's tokens behind each prompt: a full forward pass for each, no cache."""
    return scored_continuations(prompts, seeds, steps, sampling, model)[0]


def scored_continuations(
    prompts: list[np.ndarray],
    seeds: list[int],
    steps: int,
    sampling: Sampling | None = None,
    model: ModelConfig = MODEL,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`continuations`, their log-probs as they were drawn, and those under the model."""
    step = _step(sampling or Sampling(), model)
    rows = np.stack([np.pad(ids, (0, CONTEXT_TOKENS - len(ids))) for ids in prompts])
    start = np.array([len(ids) for ids in prompts])
    found = []
    for count in range(steps):
        lengths = start + count
        found.append([np.asarray(x) for x in step(rows, lengths, np.array(seeds))])
        rows[np.arange(len(rows)), lengths] = found[-1][0]
    return tuple(np.stack(column, axis=1) for column in zip(*found, strict=True))


@functools.cache
def _step(sampling: Sampling, model: ModelConfig):
    """Returns a function to the next token of each row, its log-prob, and that of the model."""
    layout = make_layout(MeshShape(), jax.devices()[:1])

    @jax.jit
    def step(tokens_BT, lengths_B, seeds_B):
        segments_BT = (jnp.arange(CONTEXT_TOKENS)[None, :] < lengths_B[:, None]).astype(jnp.int32)
        hidden = forward_rows(model, layout, stacked_params(model), tokens_BT, segments_BT)
        last = jnp.take_along_axis(hidden, lengths_B[:, None, None] - 1, axis=1)[:, 0]
        uniforms = token_uniforms(jax.random.key(SEED), seeds_B, lengths_B)
        logits = last @ stacked_params(model)["head"]
        rows = sampling_rows(sampling, len(tokens_BT))
        tokens, logprobs = sample(uniforms, logits, rows)
        return tokens, logprobs, model_logprobs(logits, tokens)

    return step


def pages_in_use(driver: Driver) -> int:
    """Pages of requests that play, shared ones counted once, in the row shard with the most."""
    pages = driver._service.session.pages
    return pages.least_pages(pages.pool.shards)
