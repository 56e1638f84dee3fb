# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler draws from softmax(logits / T) and from nothing else, and says with what log-prob."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from earl_jax.rollout.sampling import BLOCK_SIZE, sample, token_uniforms

# Below a block, two blocks and a bit, exactly one block, and one entry more.
VOCABULARIES = (300, 1100, BLOCK_SIZE, BLOCK_SIZE + 1)
JUST_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_sample = jax.jit(sample)


def logits_with_holes(vocab: int, seed: int = 0) -> np.ndarray:
    """Entries of very different mass; a third, both ends and (of three) a whole block have none."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=vocab).astype(np.float32) * 1.5
    logits[rng.permutation(vocab)[: vocab // 3]] = -1e9
    logits[:2] = logits[-2:] = -1e9
    if vocab > 2 * BLOCK_SIZE:
        logits[BLOCK_SIZE : 2 * BLOCK_SIZE] = -1e9
    return logits


def softmax64(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    mass = np.exp(scaled - scaled.max())
    return mass / mass.sum()


def draw(uniforms: np.ndarray, logits: np.ndarray, temperature: float) -> tuple[np.ndarray, ...]:
    """Tokens and log-probs for many uniforms from the same logits, a thousand rows at a time."""
    pad = -len(uniforms) % 1000
    blocks = np.pad(uniforms, (0, pad)).reshape(-1, 1000).astype(np.float32)
    rows = np.broadcast_to(logits, (1000, len(logits)))
    temperatures = np.full(1000, temperature, np.float32)
    out = [_sample(block, rows, temperatures) for block in blocks]
    tokens, logprobs = (np.concatenate(side)[: len(uniforms)] for side in zip(*out, strict=True))
    return tokens, logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [300, 1100])
def test_draws_follow_the_tempered_softmax(vocab, temperature):
    logits, num_draws = logits_with_holes(vocab), 40_000
    uniforms = jax.random.uniform(jax.random.key(vocab), (num_draws,))
    tokens, _ = draw(np.asarray(uniforms), logits, temperature)
    expected = num_draws * softmax64(logits, temperature)
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[logits < -1e8].any()
    # A chi-square test wants at least five expected draws a bin: rare tokens share one.
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert len(counts) > 100
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3
    # The test can tell: the same draws do not come from another temperature.
    other = num_draws * softmax64(logits, 1.7 - temperature)
    other = np.append(other[~rare], other[rare].sum())
    assert stats.chisquare(counts, other * counts.sum() / other.sum()).pvalue < 1e-9


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_an_even_grid_of_uniforms_gives_every_token_its_share(vocab):
    """No noise: of N evenly spaced uniforms a token of probability p gets N p, give or take one."""
    logits, num_draws = logits_with_holes(vocab), 20_000
    tokens, _ = draw((np.arange(num_draws) + 0.5) / num_draws, logits, 0.7)
    counts = np.bincount(tokens, minlength=vocab)
    np.testing.assert_allclose(counts, num_draws * softmax64(logits, 0.7), atol=1.1)
    assert (np.diff(tokens) >= 0).all()


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_the_logprob_is_that_of_the_tempered_softmax(temperature):
    logits = logits_with_holes(1100)
    tokens, logprobs = draw(np.linspace(0, 0.999, 2000), logits, temperature)
    expected = jax.nn.log_softmax(jnp.asarray(logits) / temperature)
    np.testing.assert_allclose(logprobs, np.asarray(expected)[tokens], atol=2e-5)


def test_temperature_zero_takes_the_best_token_and_its_untempered_logprob():
    logits = np.stack([logits_with_holes(1100, seed) for seed in range(20)])
    logits[0] = 0.0
    uniforms = np.linspace(0, 0.999, 20, dtype=np.float32)
    tokens, logprobs = _sample(uniforms, logits, np.zeros(20, np.float32))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[np.arange(20), logits.argmax(-1)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_far_apart_logits_and_low_temperatures_never_make_nan():
    logits = np.array([[1e4, -1e9, 3.0], [0.0, -1e9, 0.0], [88.0, 1e4, -1e4]], np.float32)
    for temperature in (0.0, 0.01, 1.0, 100.0):
        for uniform in (0.0, 0.5, JUST_BELOW_ONE):
            tokens, logprobs = _sample(
                np.full(3, uniform, np.float32), logits, np.full(3, temperature, np.float32)
            )
            assert np.isfinite(logprobs).all()
            assert (logits[np.arange(3), tokens] > -1e8).all()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_ends_of_the_unit_interval_give_the_first_and_last_entry_with_mass(vocab):
    for seed in range(6):
        logits = logits_with_holes(vocab, seed)
        # Enough mass at both ends that a step of 2^-24 does not skip it.
        with_mass = np.flatnonzero(logits > -1e8)
        logits[with_mass[[0, -1]]] = logits.max()
        tokens, _ = draw(np.array([0.0, JUST_BELOW_ONE]), logits, 1.0)
        assert tokens.tolist() == [with_mass[0], with_mass[-1]]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_no_uniform_draws_an_entry_without_mass(vocab):
    """The running sums are rounded; it shows at the uniforms next to them."""
    for seed in range(6):
        logits = logits_with_holes(vocab, seed)
        sums = np.asarray(jnp.cumsum(jnp.exp(jnp.asarray(logits) - logits.max())))
        # `jax.random.uniform` gives multiples of 2^-23.
        steps = np.round(sums / sums[-1] * 2**23) + np.arange(-2, 3)[:, None]
        uniforms = steps[(steps >= 0) & (steps < 2**23)] * 2.0**-23
        tokens, _ = draw(uniforms, logits, 1.0)
        assert (logits[tokens] > -1e8).all()


def test_a_row_is_drawn_alike_whatever_the_other_rows_are():
    logits = np.stack([logits_with_holes(1100, seed) for seed in range(8)])
    uniforms = np.linspace(0.05, 0.95, 8, dtype=np.float32)
    temperatures = np.array([1, 0, 0.7, 1, 2, 0, 0.3, 1], np.float32)
    tokens, logprobs = _sample(uniforms, logits, temperatures)
    order = np.random.default_rng(0).permutation(8)
    shuffled, shuffled_logprobs = _sample(uniforms[order], logits[order], temperatures[order])
    np.testing.assert_array_equal(shuffled, np.asarray(tokens)[order])
    np.testing.assert_array_equal(shuffled_logprobs, np.asarray(logprobs)[order])


def test_token_uniforms_are_uniform_and_depend_on_key_seed_and_position_only():
    key = jax.random.key(3)
    seeds, positions = (a.ravel() for a in np.meshgrid(np.arange(100), np.arange(100)))
    uniforms = np.asarray(token_uniforms(key, jnp.asarray(seeds), jnp.asarray(positions)))
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-3
    assert uniforms.min() >= 0 and uniforms.max() < 1
    # Neither along an episode, nor across episodes, nor on the diagonal do neighbours resemble.
    table = uniforms.reshape(100, 100)
    for shifted in (table[1:, :], table[:, 1:], table[1:, 1:]):
        kept = table[: shifted.shape[0], : shifted.shape[1]]
        assert abs(np.corrcoef(kept.ravel(), shifted.ravel())[0, 1]) < 0.04
    # fold_in(seed) and fold_in(position) are not interchangeable: (a, b) is not (b, a).
    assert (table != table.T).sum() == 100 * 99
    order = np.random.default_rng(0).permutation(len(seeds))[:64]
    alone = token_uniforms(key, jnp.asarray(seeds[order]), jnp.asarray(positions[order]))
    np.testing.assert_array_equal(alone, uniforms[order])
    other = token_uniforms(jax.random.key(4), jnp.asarray(seeds), jnp.asarray(positions))
    assert (np.asarray(other) != uniforms).mean() > 0.99
