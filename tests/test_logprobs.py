# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy: exact, whatever the chunk, the temperature and the compute type."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.logprobs import score_logits, score_tokens
from earl_jax.sharding.layout import MeshShape, make_layout

ROWS, LENGTH, WIDTH, VOCAB = 8, 23, 32, 64
ONE_DEVICE = MeshShape()


def make_inputs(dtype=jnp.float32):
    """Hidden states and a head that give logits of deviation about 3."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    head = jnp.asarray(0.5 * rng.normal(size=(WIDTH, VOCAB)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32)


def scores_by_hand(hidden, head, targets, temperature):
    """float64 numpy, from the definitions."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / temperature
    logits = logits - logits.max(axis=-1, keepdims=True)
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(probs, np.asarray(targets)[..., None], axis=-1)[..., 0]
    return np.log(picked), -np.sum(probs * np.log(probs), axis=-1)


jitted_score = jax.jit(score_logits)


@functools.cache
def jitted(chunk_size: int, temperature: float, shape: MeshShape = ONE_DEVICE):
    return jax.jit(
        functools.partial(
            score_tokens, make_layout(shape), temperature=temperature, chunk_size=chunk_size
        )
    )


def test_scores_of_three_logits_by_hand():
    # Logits log(1), log(2), log(5): probabilities 1/8, 2/8, 5/8.
    logits = jnp.log(jnp.array([1.0, 2.0, 5.0]))
    scores = jitted_score(jnp.tile(logits, (3, 1)), np.array([0, 1, 2]), 1.0)
    np.testing.assert_allclose(scores.logprobs, np.log([1 / 8, 2 / 8, 5 / 8]), rtol=1e-5)
    entropy = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    np.testing.assert_allclose(scores.entropy, [entropy] * 3, rtol=1e-5)
    # Temperature 0.5 squares the odds: 1, 4, 25 of 30.
    scores = jitted_score(logits, np.array(2), 0.5)
    assert scores.logprobs == pytest.approx(math.log(25 / 30), abs=1e-6)


def test_scores_among_allowed_tokens_by_hand():
    """Odds of 1 to 5 for the first and the last, certainty for the last alone; then all three."""
    logits = jnp.tile(jnp.log(jnp.array([1.0, 2.0, 5.0])), (4, 1))
    allowed = jnp.array([1, 1, 3, 0]), jnp.array([3, 3, 0, 0])
    scores = jitted_score(logits, np.array([0, 2, 2, 1]), 1.0, allowed)
    np.testing.assert_allclose(scores.logprobs, np.log([1 / 6, 5 / 6, 1, 2 / 8]), atol=1e-6)
    of_two = -(1 / 6 * math.log(1 / 6) + 5 / 6 * math.log(5 / 6))
    of_all = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    np.testing.assert_allclose(scores.entropy, [of_two, of_two, 0, of_all], atol=1e-6)


@pytest.mark.parametrize("shape", [ONE_DEVICE, MeshShape(data=2, tensor=2, context=2)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scores_among_allowed_tokens_have_the_gradient_of_a_masked_softmax(shape, softcap):
    """As JAX derives it from the definition; chunks, and rows without a restriction, beside."""
    hidden, head, _ = make_inputs()
    hidden = hidden[:, :22]
    rng = np.random.default_rng(2)
    # Four different tokens, of which one to four count, or any token.
    ids = np.argsort(rng.random((ROWS, 22, VOCAB)), axis=-1)[..., :4]
    number = rng.integers(0, 5, (ROWS, 22))
    allowed = jnp.asarray(np.where(np.arange(4) < number[..., None], 1 + ids, 0), jnp.int32)
    targets = jnp.asarray(ids[..., 0], jnp.int32)
    weights = jnp.asarray(rng.normal(size=(2, ROWS, 22)), jnp.float32)
    mask = (number == 0)[..., None] | np.any(np.eye(VOCAB + 1, dtype=bool)[allowed], -2)[..., 1:]

    def loss(scores):
        return jnp.sum(weights[0] * scores[0] + weights[1] * scores[1])

    def ours(hidden, head):
        layout, split = make_layout(shape), tuple(jnp.moveaxis(allowed, -1, 0))
        return loss(
            score_tokens(
                layout,
                hidden,
                head,
                targets,
                temperature=0.7,
                chunk_size=4,
                softcap=softcap,
                allowed_BT=split,
            )
        )

    def masked(hidden, head):
        logits = hidden @ head
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        logprobs = jax.nn.log_softmax(logits / 0.7, where=mask)
        known = jnp.where(mask, logprobs, 0.0)
        picked = jnp.take_along_axis(known, targets[..., None], axis=-1)[..., 0]
        return loss((picked, -jnp.sum(jnp.where(mask, jnp.exp(known), 0.0) * known, axis=-1)))

    value, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(hidden, head)
    expected, by_jax = jax.jit(jax.value_and_grad(masked, argnums=(0, 1)))(hidden, head)
    assert value == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(grads, by_jax, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-5)


def test_a_certain_distribution_has_no_entropy_and_stays_finite():
    logits = jnp.array([1e4, 0.0, -1e4])
    scores = jitted_score(jnp.tile(logits, (2, 1)), np.array([0, 1]), 1.0)
    np.testing.assert_array_equal(scores.entropy, [0, 0])
    np.testing.assert_array_equal(scores.logprobs, [0, -1e4])


# 23 tokens: one chunk, 4 that do not divide, 23, and a chunk larger than the row.
@pytest.mark.parametrize(
    ("chunk_size", "temperature"), [(23, 0.7), (7, 1.0), (7, 0.7), (1, 0.7), (512, 0.7)]
)
def test_scores_equal_numpy_for_every_chunk_and_temperature(chunk_size, temperature):
    inputs = make_inputs()
    scores = jitted(chunk_size, temperature)(*inputs)
    logprobs, entropy = scores_by_hand(*inputs, temperature)
    assert scores.logprobs.shape == scores.entropy.shape == (ROWS, LENGTH)
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=2e-5)


def test_gradients_do_not_depend_on_the_chunk():
    """And equal (1{v = target} - p_v) / temperature, carried to hidden states and head by hand."""
    hidden, head, targets = make_inputs()
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(2, ROWS, LENGTH)), jnp.float32)

    def loss(hidden, head, chunk_size, entropy_weight):
        scores = jitted(chunk_size, 0.7)(hidden, head, targets)
        return jnp.sum(weights[0] * scores.logprobs + entropy_weight * weights[1] * scores.entropy)

    grads = {size: jax.grad(loss, argnums=(0, 1))(hidden, head, size, 1.0) for size in (LENGTH, 7)}
    for one, other in zip(grads[LENGTH], grads[7], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-5)

    grad_hidden, grad_head = jax.grad(loss, argnums=(0, 1))(hidden, head, 7, 0.0)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / 0.7
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    pull = np.asarray(weights[0])[..., None] * (np.eye(VOCAB)[np.asarray(targets)] - probs) / 0.7
    np.testing.assert_allclose(grad_hidden, pull @ np.asarray(head, np.float64).T, atol=1e-3)
    by_hand = np.einsum("btd,btv->dv", np.asarray(hidden, np.float64), pull)
    np.testing.assert_allclose(grad_head, by_hand, atol=1e-3)


def test_bf16_inputs_are_accumulated_in_fp32():
    inputs = make_inputs(jnp.bfloat16)
    scores = jitted(7, 1.0)(*inputs)
    assert scores.logprobs.dtype == scores.entropy.dtype == jnp.float32
    logprobs, entropy = scores_by_hand(*inputs, 1.0)
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=1e-4)
    np.testing.assert_allclose(scores.entropy, entropy, atol=1e-4)
    # The bound means something: logits rounded to bf16 miss it by far.
    hidden, head, targets = inputs
    rounded = score_logits(jnp.einsum("btd,dv->btv", hidden, head), targets, 1.0)
    assert np.abs(rounded.logprobs - logprobs).max() > 1e-2


def test_sums_over_chunks_in_bf16_have_small_errors_without_a_bias():
    """The gradient of the head: 16 chunks are added up in its type, each an fp32 product."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 2048, 64)), jnp.bfloat16)
    head = jnp.asarray(0.2 * rng.normal(size=(64, 512)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, 512, (1, 2048)))
    # Advantages of episodes of 128 tokens.
    weights = jnp.asarray(np.repeat(rng.normal(size=(1, 16)), 128, axis=1), jnp.float32)

    def of_head(dtype, chunk_size: int):
        def loss(head):
            scores = jitted(chunk_size, 1.0)(hidden.astype(dtype), head, targets)
            return jnp.sum(weights * scores.logprobs)

        return np.asarray(jax.jit(jax.grad(loss))(head.astype(dtype)), np.float64)

    exact = of_head(jnp.float32, 2048)
    errors = {size: of_head(jnp.bfloat16, size) - exact for size in (2048, 128)}
    relative = {k: np.linalg.norm(e) / np.linalg.norm(exact) for k, e in errors.items()}
    assert relative[2048] < 0.003 < relative[128] < 0.007
    bias = np.sum(errors[128] * np.sign(exact)) / np.sum(np.abs(exact))
    assert abs(bias) < 0.001


def test_a_split_vocabulary_and_split_rows_give_the_same_scores():
    inputs = make_inputs()
    alone = jitted(7, 0.7)(*inputs)
    shape = MeshShape(data=2, fsdp=2, tensor=2)
    layout = make_layout(shape)
    placed = jax.device_put(
        inputs, (layout.activations("BT."), layout.parameters("DV"), layout.activations("BT"))
    )
    split = jitted(7, 0.7, shape)(*placed)
    np.testing.assert_allclose(split.logprobs, alone.logprobs, atol=1e-5)
    np.testing.assert_allclose(split.entropy, alone.entropy, atol=1e-5)


def gradient_bytes(score, length: int) -> int:
    """XLA's figure: temporaries of the gradient to hidden states and head, over 32,768 entries."""
    hidden = jax.ShapeDtypeStruct((1, length, 64), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((64, 32_768), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((1, length), jnp.int32)
    grad = jax.jit(jax.grad(lambda *inputs: jnp.sum(score(*inputs)), argnums=(0, 1)))
    return grad.lower(hidden, head, targets).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_a_chunk_however_long_the_row():
    """Nothing is run."""

    def chunks_of(size: int):
        def score(*inputs):
            scores = jitted(size, 1.0)(*inputs)
            return scores.logprobs + 0.01 * scores.entropy

        return score

    def naive(hidden, head, targets):
        logits = jnp.einsum("btd,dv->btv", hidden, head, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)

    of_256 = gradient_bytes(chunks_of(256), 8192)
    # A chunk's logits are 32 MiB in fp32; some copies of these, the head's gradient, the states.
    assert of_256 < 6 * 2**25
    assert of_256 < gradient_bytes(chunks_of(256), 2048) + 2**25
    assert 1.5 * of_256 < gradient_bytes(chunks_of(512), 8192) < 2.2 * of_256
    # All logits are 1 GiB, and the naive form has them twice.
    assert gradient_bytes(naive, 8192) > 8 * of_256


def test_no_chunk_reads_an_array_as_large_as_its_logits_from_outside():
    """JAX takes what is the same in all chunks out of the scan, and would keep it in memory."""

    def loss(hidden, head, targets):
        return sum(jnp.sum(score) for score in jitted(7, 0.7)(hidden, head, targets))

    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*make_inputs()).as_text()
    loops = [line for line in text.splitlines() if "stablehlo.while" in line]
    # Forward and backward.
    assert len(loops) == 2
    assert not any(f"<{ROWS}x7x{VOCAB}x" in line for line in loops)
