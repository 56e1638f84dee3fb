# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler draws from softmax(logits / T) and from nothing else, and says with what log-prob."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from earl_jax.engine.config import Sampling
from earl_jax.engine.round_inputs import pack_outputs, unpack_outputs
from earl_jax.engine.sampling import (
    BLOCK_SIZE,
    SamplingRows,
    model_logprobs,
    sample,
    sampling_rows,
    token_uniforms,
)

# Below a block, two blocks and a bit, exactly one block, and one entry more.
VOCABULARIES = (300, 1100, BLOCK_SIZE, BLOCK_SIZE + 1)
JUST_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_sample_rows = jax.jit(sample)


def _sample(uniforms, logits, temperatures):
    whole = sampling_rows(Sampling(), len(uniforms))
    return _sample_rows(uniforms, logits, whole._replace(temperature=temperatures))


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


def test_a_temperature_too_small_to_divide_by_is_greedy():
    logits = np.array([[3.0, 5.0, 4.0], [1.0, 0.0, 2.0]], np.float32)
    for temperature in (1e-6, 1e-30, 1e-45):
        tokens, logprobs = _sample(
            np.full(2, 0.999, np.float32), logits, np.full(2, temperature, np.float32)
        )
        greedy, untempered = _sample(np.zeros(2, np.float32), logits, np.zeros(2, np.float32))
        np.testing.assert_array_equal(tokens, [1, 2])
        np.testing.assert_array_equal(greedy, [1, 2])
        np.testing.assert_array_equal(logprobs, untempered)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_logits_that_are_not_finite_have_no_logprob(fault):
    """In their own row only."""
    logits = np.zeros((3, 600), np.float32)
    logits[1, 7] = fault
    settings = sampling_rows(Sampling(), 3)
    _, logprobs = _sample_rows(np.full(3, 0.5, np.float32), logits, settings)
    np.testing.assert_array_equal(np.isfinite(logprobs), [True, False, True])


def test_outputs_name_the_first_token_of_each_slot_whose_logits_are_not_finite():
    """By hand: row 1 sampled two tokens, and the second has no log-prob; the third is not read."""
    logprobs = np.float32([[-1, -1, np.nan], [-1, np.nan, -1], [np.inf, -1, np.nan]])
    tokens, active = np.ones((3, 3), np.int32), np.ones(3, bool)
    for count, faults in (([2, 1, 0], {}), ([2, 2, 3], {1: 1, 2: 0})):
        packed = pack_outputs(tokens, jnp.asarray(logprobs), jnp.asarray(count), active)
        found = unpack_outputs(np.asarray(packed))
        assert found.faults == faults and found.count.tolist() == count


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_ends_of_the_unit_interval_give_the_first_and_last_entry_with_mass(vocab):
    for seed in range(3):
        logits = logits_with_holes(vocab, seed)
        # Enough mass at both ends that a step of 2^-24 does not skip it.
        with_mass = np.flatnonzero(logits > -1e8)
        logits[with_mass[[0, -1]]] = logits.max()
        tokens, _ = draw(np.array([0.0, JUST_BELOW_ONE]), logits, 1.0)
        assert tokens.tolist() == [with_mass[0], with_mass[-1]]


@pytest.mark.parametrize("vocab", [300, BLOCK_SIZE + 1])
def test_no_uniform_draws_an_entry_without_mass(vocab):
    """The running sums are rounded; it shows at the uniforms next to them."""
    for seed in range(3):
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


# What is cut off. Probabilities 0.4, 0.3, 0.2, 0.1 in another order, and the grid of uniforms gives
# each token that is left its share.

PROBABILITIES = np.array([0.2, 0.1, 0.4, 0.3])
GRID = ((np.arange(1000) + 0.5) / 1000).astype(np.float32)


def shares(settings: Sampling, probabilities: np.ndarray = PROBABILITIES) -> np.ndarray:
    """Returns the share of each token, and checks that its log-prob says just that."""
    logits = np.broadcast_to(np.log(probabilities).astype(np.float32), (1000, len(probabilities)))
    tokens, logprobs = _sample_rows(GRID, logits, sampling_rows(settings, 1000))
    found = np.bincount(tokens, minlength=len(probabilities)) / 1000
    np.testing.assert_allclose(np.exp(logprobs), found[np.asarray(tokens)], atol=2e-3)
    return found


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [0.2, 0.1, 0.4, 0.3]),
        ({"top_k": 1}, [0, 0, 1, 0]),
        ({"top_k": 2}, [0, 0, 4 / 7, 3 / 7]),
        ({"top_k": 3}, [2 / 9, 0, 4 / 9, 3 / 9]),
        ({"top_k": 4}, [0.2, 0.1, 0.4, 0.3]),
        ({"top_k": 9}, [0.2, 0.1, 0.4, 0.3]),
        ({"top_p": 0.39}, [0, 0, 1, 0]),
        ({"top_p": 1e-300}, [0, 0, 1, 0]),  # 0 in fp32
        ({"top_p": 0.41}, [0, 0, 4 / 7, 3 / 7]),  # 0.4 is not enough, 0.7 is
        ({"top_p": 0.69}, [0, 0, 4 / 7, 3 / 7]),
        ({"top_p": 0.71}, [2 / 9, 0, 4 / 9, 3 / 9]),
        ({"min_p": 0.24}, [0.2, 0.1, 0.4, 0.3]),  # 0.1 is a quarter of 0.4
        ({"min_p": 0.26}, [2 / 9, 0, 4 / 9, 3 / 9]),
        ({"min_p": 0.76}, [0, 0, 1, 0]),
        # The share is one of what top_k leaves: 4 / 7 are 57 %.
        ({"top_k": 2, "top_p": 0.5}, [0, 0, 1, 0]),
        ({"top_k": 2, "top_p": 0.58}, [0, 0, 4 / 7, 3 / 7]),
        # Tempered first: at T = 1/2 the squares, 16 : 9 : 4 : 1 of 30.
        ({"temperature": 0.5, "top_p": 0.52}, [0, 0, 1, 0]),
        ({"temperature": 0.5, "top_p": 0.55}, [0, 0, 16 / 25, 9 / 25]),
        ({"temperature": 0.5, "min_p": 0.26}, [0, 0, 16 / 25, 9 / 25]),
    ],
)
def test_top_k_top_p_and_min_p_leave_what_arithmetic_says(settings, expected):
    np.testing.assert_allclose(shares(Sampling(**settings)), expected, atol=2e-3)


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}])
def test_tokens_as_likely_as_the_last_that_is_kept_are_kept_too(cut):
    ties = np.array([0.3, 0.3, 0.3, 0.1])
    np.testing.assert_allclose(shares(Sampling(**cut), ties), [1 / 3, 1 / 3, 1 / 3, 0], atol=2e-3)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_cuts_equal_those_of_a_sorted_row(vocab):
    logits = logits_with_holes(vocab)
    mass = softmax64(logits, 0.7)
    order = np.argsort(-mass, kind="stable")
    in_order = np.cumsum(mass[order])
    for top_k, top_p in ((17, 1.0), (0, 0.83), (40, 0.6)):
        left = order[: top_k or None]
        share = in_order[: len(left)] / in_order[len(left) - 1]
        left = left[: np.searchsorted(share, top_p) + 1]
        expected = np.zeros(vocab)
        expected[left] = mass[left] / mass[left].sum()
        settings = sampling_rows(Sampling(temperature=0.7, top_k=top_k, top_p=top_p), 1000)
        rows = np.broadcast_to(logits, (1000, vocab))
        tokens, logprobs = map(np.asarray, _sample_rows(GRID, rows, settings))
        counts = np.bincount(tokens, minlength=vocab)
        np.testing.assert_allclose(counts, 1000 * expected, atol=1.1)
        np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_a_row_that_cuts_nothing_keeps_every_bit_beside_rows_that_do():
    logits = np.stack([logits_with_holes(1100, seed) for seed in range(8)])
    uniforms = np.linspace(0.05, 0.95, 8, dtype=np.float32)
    plain = sampling_rows(Sampling(), 8)
    cutting = SamplingRows(
        temperature=plain.temperature,
        top_k=np.array([0, 3, 0, 0, 5, 0, 0, 0], np.int32),
        top_p=np.array([1, 1, 0.5, 1, 0.5, 1, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0.5, 0, 0, 0, 0], np.float32),
    )
    alone, beside = (_sample_rows(uniforms, logits, rows) for rows in (plain, cutting))
    untouched = [0, 5, 6, 7]
    for left, right in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(np.asarray(left)[untouched], np.asarray(right)[untouched])


def test_a_temperature_next_to_zero_cuts_nothing_whatever_the_other_rows_do():
    logits = np.stack([logits_with_holes(1100, 3)] * 4)
    uniforms = np.full(4, 0.3, np.float32)
    _, plain = _sample_rows(uniforms, logits, sampling_rows(Sampling(temperature=0.0), 4))
    rows = SamplingRows(
        temperature=np.array([1e-6, 1e-6, 1e-6, 1], np.float32),
        top_k=np.array([5, 0, 0, 7], np.int32),
        top_p=np.array([1, 0.5, 1, 0.5], np.float32),
        min_p=np.array([0, 0, 0.5, 0], np.float32),
    )
    np.testing.assert_array_equal(_sample_rows(uniforms, logits, rows)[1][:3], plain[:3])


def test_the_models_own_logprob_knows_neither_temperature_nor_cuts():
    logits = np.log(PROBABILITIES).astype(np.float32)[None] + 3.0
    np.testing.assert_allclose(
        model_logprobs(jnp.asarray(logits), jnp.array([1])), np.log(0.1), atol=1e-6
    )


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
