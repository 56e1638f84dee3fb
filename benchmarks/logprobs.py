# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs over a long vocabulary: what chunks save, and what rounded logits cost.

    uv run --python=3.12 --all-extras python benchmarks/logprobs.py

8,192 tokens of one row, width 1,024, vocabulary 151,936, bf16. Memory: temporaries of the gradient
to hidden states and head, by each platform's compiler; ours scores log-probs and entropy, the naive
form log-probs alone. Error: the first ERROR_TOKENS tokens against float64, log-probs of targets and
entropies.
Prints two Markdown tables; chips that are not here are compiled for where their extra is installed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.models.logprobs import score_logits, score_tokens
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.sharding.topology import make_topology, missing_compiler

TOKENS, WIDTH, VOCAB = 8192, 1024, 151_936
ERROR_TOKENS = 256
CHUNKS = (512, 1024, 2048)
PLATFORMS = (("CPU", None), ("TPU v5e", "v5e:2x2"), ("H100", "h100:1x1"))

Score = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def naive(hidden_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """All logits at once, in fp32."""
    logits = jnp.einsum("BTD,DV->BTV", hidden_BTD, head_DV, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets_BT[..., None], axis=-1)


def chunked(layout: Layout, chunk_size: int) -> Score:
    """Ours: log-probs, and a little of the entropy so that its gradient is made too."""

    def score(hidden_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array) -> jax.Array:
        scores = score_tokens(
            layout, hidden_BTD, head_DV, targets_BT, temperature=1.0, chunk_size=chunk_size
        )
        return scores.logprobs + 0.01 * scores.entropy

    return score


def gradient_bytes(score: Score, layout: Layout) -> int:
    """Temporaries of the gradient of the scores' sum."""
    hidden = jax.ShapeDtypeStruct(
        (1, TOKENS, WIDTH), jnp.bfloat16, sharding=layout.activations("BT.")
    )
    head = jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.bfloat16, sharding=layout.parameters("DV"))
    targets = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=layout.activations("BT"))
    grad = jax.jit(jax.grad(lambda *inputs: jnp.sum(score(*inputs)), argnums=(0, 1)))
    return grad.lower(hidden, head, targets).compile().memory_analysis().temp_size_in_bytes


def print_memory() -> None:
    """The first table."""
    print("| MiB | naive log_softmax |", " | ".join(f"chunks of {n}" for n in CHUNKS), "|")
    print("|---" * (2 + len(CHUNKS)) + "|")
    for name, topology in PLATFORMS:
        if topology and (missing := missing_compiler(make_topology(topology))):
            print(f"| {name} | {missing} |" + " |" * len(CHUNKS))
            continue
        devices = make_topology(topology).devices() if topology else jax.devices()
        layout = make_layout(MeshShape(), devices)
        forms = [naive, *(chunked(layout, size) for size in CHUNKS)]
        columns = [f"{gradient_bytes(form, layout) / 2**20:,.0f}" for form in forms]
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


def print_errors() -> None:
    """The second table, computed on this machine's CPU."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, ERROR_TOKENS, WIDTH)), jnp.bfloat16)
    # Logits of deviation 3: a policy that is sure of some tokens and not of others.
    head = jnp.asarray(3 * WIDTH**-0.5 * rng.normal(size=(WIDTH, VOCAB)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, VOCAB, (1, ERROR_TOKENS)), jnp.int32)
    exact_logprobs, exact_entropy = _exact(
        np.asarray(hidden[0], np.float64), np.asarray(head, np.float64), targets[0]
    )
    layout = make_layout(MeshShape())
    ours = score_tokens(layout, hidden, head, targets, temperature=1.0, chunk_size=64)
    rounded = score_logits(jnp.einsum("BTD,DV->BTV", hidden, head), targets, 1.0)
    print("| error | of | largest | mean |")
    print("|---|---|---|---|")
    for name, scores in (("ours, fp32 logits", ours), ("logits rounded to bf16", rounded)):
        for what, found, exact in (
            ("log-prob of the target", scores.logprobs, exact_logprobs),
            ("entropy", scores.entropy, exact_entropy),
        ):
            error = np.abs(np.asarray(found[0], np.float64) - exact)
            print(f"| {name} | {what} | {error.max():.1e} | {error.mean():.1e} |")


def _exact(
    hidden_TD: np.ndarray, head_DV: np.ndarray, targets_T: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the targets and entropies in float64, some tokens at a time."""
    logprobs, entropy = [], []
    for first in range(0, len(hidden_TD), 64):
        logits = hidden_TD[first : first + 64] @ head_DV
        top = logits.max(axis=1, keepdims=True)
        total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        picked = np.asarray(targets_T[first : first + 64])
        logprobs.append(logits[np.arange(len(logits)), picked] - total)
        logits -= total[:, None]
        entropy.append(-np.sum(np.exp(logits) * logits, axis=1))
    return np.concatenate(logprobs), np.concatenate(entropy)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print_memory()
    print()
    print_errors()
