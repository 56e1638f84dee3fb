# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder: each piece is its formula, and decoding with a cache is the full forward."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.attention.kernels import Kernel
from earl_jax.models.attention.rows import Positions, attention
from earl_jax.models.attention.segment_blocks import attend_packed_rows
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import (
    forward_chunk,
    forward_rows,
    head_weights,
)
from earl_jax.models.kv_cache import PagedCache
from earl_jax.models.layers.kinds import rope_frequencies
from earl_jax.models.layers.parts import rms_norm, rotate
from earl_jax.models.parameters import (
    init_parameters,
    num_parameters,
    parameter_shapes,
    parameter_shardings,
    parameter_specs,
    unstack_layers,
)
from earl_jax.settings.remat import REMATS, Remat
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from tests.support.caches import empty_cache, rows_of

VOCAB = 64
ROWS, LENGTH = 5, 24
MODEL = ModelConfig(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=48, init_scale=4.0
)


def init_jitted(specs, key):
    return jax.jit(lambda key: init_parameters(specs, key))(key)


@functools.cache
def make_params(seed: int = 0, model: ModelConfig = MODEL):
    """Norm scales away from one, so that leaving one out shows."""
    params = init_jitted(parameter_specs(model, VOCAB), jax.random.key(seed))
    rng, layers = np.random.default_rng(seed + 1), params["layers"]

    def norm(shape):
        return jnp.asarray(1.0 + 0.3 * rng.normal(size=shape), jnp.float32)

    layers |= {name: norm(layers[name].shape) for name in ("attention_norm", "ffn_norm")}
    return params | {"layers": layers, "final_norm": norm((model.width,))}


def make_logits(model: ModelConfig):
    """Logits of whole rows on one device, [B, T, V]."""
    layout = make_layout(MeshShape())

    @jax.jit
    def logits(params, tokens_BT, segment_ids_BT):
        hidden_BTD = forward_rows(model, layout, params, tokens_BT, segment_ids_BT)
        head_DV = head_weights(params).astype(hidden_BTD.dtype)
        return jnp.einsum("BTD,DV->BTV", hidden_BTD, head_DV, preferred_element_type=jnp.float32)

    return logits


@pytest.fixture(scope="module")
def full_logits():
    return make_logits(MODEL)


def make_tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)


# The pieces.


def test_rms_norm_is_its_arithmetic():
    # Mean square of (3, 4): 12.5; 3 / sqrt(12.5) = 0.8485, 4 / sqrt(12.5) = 1.1314.
    norm = jax.jit(rms_norm, static_argnums=2)
    out = norm(jnp.array([[[3.0, 4.0]]]), jnp.array([1.0, 10.0]), 0.0)
    np.testing.assert_allclose(out, [[[3 / math.sqrt(12.5), 40 / math.sqrt(12.5)]]], rtol=1e-6)
    # eps under the root: 1e-3 / sqrt(1e-6 + 3e-6) = 0.5.
    out = norm(np.full((1, 4), 1e-3, np.float32), np.ones(4, np.float32), 3e-6)
    np.testing.assert_allclose(out, np.full((1, 4), 0.5), rtol=1e-5)
    # In fp32 inside: the squares of bf16 values near 1e-25 are 0 in bf16 arithmetic's reach.
    tiny = norm(np.array([[3e4, 4e4]], jnp.bfloat16), np.ones(2, jnp.bfloat16), 1e-6)
    assert tiny.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(tiny).astype(np.float32), [[0.8485, 1.1314]], rtol=4e-3)


def rotate_by_hand(x_TH: np.ndarray, positions: list[int], theta: float) -> np.ndarray:
    """Pairs (i, i + H/2) turned by position * theta^(-2i/H), as complex numbers."""
    half = x_TH.shape[-1] // 2
    out = np.zeros_like(x_TH, np.float64)
    for row, position in enumerate(positions):
        for i in range(half):
            turned = complex(x_TH[row, i], x_TH[row, i + half]) * np.exp(
                1j * position * theta ** (-2 * i / (2 * half))
            )
            out[row, i], out[row, i + half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("axes_between", [(3,), (2, 3)])
def test_rotary_is_a_turn_of_pairs(axes_between):
    rng = np.random.default_rng(0)
    positions = np.array([[0, 1, 7], [100, 3, 0]])
    x = rng.normal(size=(2, 3, *axes_between, 8)).astype(np.float32)
    out = np.asarray(jax.jit(rotate)(x, positions, rope_frequencies(8, 100.0)))
    for row in range(2):
        for place in np.ndindex(*axes_between):
            index = (row, slice(None), *place)
            expected = rotate_by_hand(x[index], positions[row].tolist(), 100.0)
            np.testing.assert_allclose(out[index], expected, atol=3e-5)


def attention_by_hand(query, key, value, may_look, *, scale, softcap=math.inf) -> np.ndarray:
    """Softmax attention one query at a time in float64; query head (k, g) reads key head k."""
    rows, length, kv_heads, groups, _ = query.shape
    out = np.zeros(query.shape, np.float64)
    for b, t, k, g in np.ndindex(rows, length, kv_heads, groups):
        seen = [s for s in range(key.shape[2]) if may_look(b, t, s)]
        if not seen:
            continue
        scores = np.array([query[b, t, k, g] @ key[b, k, s] for s in seen]) * scale
        scores = scores if softcap == math.inf else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, k, g] = (weights / weights.sum()) @ value[b, k, seen]
    return out


def row_positions(segments: np.ndarray) -> Positions:
    order = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    return Positions(jnp.asarray(order), jnp.asarray(segments))


def test_memory_of_attention_grows_with_the_length_not_its_square():
    """XLA's own figure for forward and backward: twice the tokens, twice the bytes."""

    def at_once(query, key, value, segments):
        order = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
        positions = Positions(order, segments)
        return attention(query, key, value, positions, positions, scale=0.25)

    blockwise = functools.partial(attend_packed_rows, make_layout(MeshShape()), scale=0.25)

    def temporaries(attend, length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, 2, 1, 16), jnp.float32)
        side = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(query, key, value, segments):
            return jnp.sum(attend(query, key, value, segments) ** 2)

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        compiled = grad.lower(shape, side, side, segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(blockwise, 8192) < 2.3 * temporaries(blockwise, 4096)
    assert temporaries(at_once, 4096) > 3.5 * temporaries(at_once, 2048)
    assert temporaries(blockwise, 4096) < temporaries(at_once, 4096) / 8


@pytest.mark.slow
def test_memory_of_layers_in_a_scan_grows_with_the_length_not_its_square():
    """Without remat. With masks of all pairs of tokens, taken out of the scan, it was 2.6 times."""
    model = dataclasses.replace(MODEL, head_size=4, ffn_size=16)
    layout = make_layout(MeshShape(), jax.devices()[:1])
    params = parameter_shapes(parameter_specs(model, VOCAB))

    def temporaries(length: int) -> int:
        rows = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(params, tokens, segments):
            return jnp.sum(forward_rows(model, layout, params, tokens, segments))

        compiled = jax.jit(jax.grad(loss)).lower(params, rows, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.1 * temporaries(1024)


def test_remat_but_for_projections_computes_no_projection_again():
    """All that full remat computes beyond it: the projections, but for the last, which is not read.

    Nothing else is computed oftener than without remat but attention, norms and the gate.
    """
    model = ModelConfig(num_layers=1, width=64, num_heads=4, num_kv_heads=2, head_size=16)
    model = dataclasses.replace(model, ffn_size=256)
    layout = make_layout(MeshShape(), jax.devices()[:1])
    params = parameter_shapes(parameter_specs(model, VOCAB))
    rows = jax.ShapeDtypeStruct((4, 32), jnp.int32)

    def flops(remat: Remat) -> float:
        def loss(params, tokens, segments):
            return jnp.sum(forward_rows(model, layout, params, tokens, segments, remat=remat))

        return jax.jit(jax.grad(loss)).lower(params, rows, rows).cost_analysis()["flops"]

    none, dots, full, offload = map(flops, REMATS)
    projections = 2 * 4 * 32 * 64 * (2 * 64 + 2 * 32 + 2 * 256)
    attention = 2 * 4 * 32 * 2 * 32 * 64
    assert full - dots == pytest.approx(projections, rel=0.02)
    assert offload == full
    assert attention < dots - none < 1.5 * attention


def traced_gradient(mesh: str, rows: tuple[int, int], remat: Remat, kernel: Kernel = "blockwise"):
    """The gradient of a loss of MODEL over random rows, traced for its arguments, and these."""
    shape = MeshShape.parse(mesh)
    layout = make_layout(shape, jax.devices()[: shape.num_devices], row_axes=TRAINING_ROWS)
    params = make_params()
    tokens = jax.random.randint(jax.random.key(1), rows, 0, VOCAB)

    def loss(params):
        hidden = forward_rows(
            MODEL, layout, params, tokens, tokens * 0 + 1, remat=remat, kernel=kernel
        )
        return jnp.sum(hidden * hidden)

    return jax.jit(jax.grad(loss)).trace(params), params


@pytest.mark.slow_except("blockwise-*")
@pytest.mark.parametrize(
    ("kernel", "mesh", "of_attention"),
    [
        # Of XLA's program: it takes a kernel out whose results nobody reads.
        ("splash", "data=1", " while("),
        ("blockwise", "data=1", "while["),
        ("blockwise", "data=1,context=2", "ppermute["),
    ],
)
def test_attention_is_computed_again_with_full_remat_alone(kernel, mesh, of_attention):
    """In rows of several blocks, by the loops or exchanges in the program."""

    def count(remat: Remat) -> int:
        traced, _ = traced_gradient(mesh, (2, 256), remat, kernel)
        text = traced.lower().compile().as_text() if kernel == "splash" else str(traced.jaxpr)
        return text.count(of_attention)

    once, kept, again = map(count, ("none", "dots", "full"))
    assert 0 < once == kept < again


def test_layers_inputs_go_to_host_memory_and_no_bit_of_a_gradient_changes():
    """One array goes there and comes back, in the loop over layers; nothing else does."""

    def gradients(remat: Remat):
        traced, params = traced_gradient("fsdp=4,context=2", (8, 16), remat)
        ways = re.findall(r"devices=\(MemorySpace\.(\w+),\)", str(traced.jaxpr))
        return traced.lower().compile()(params), ways

    (full, none), (offload, ways) = gradients("full"), gradients("offload")
    assert none == [] and ways == ["Host", "Device"]
    jax.tree.map(np.testing.assert_array_equal, full, offload)


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_is_softmax_attention_with_groups_causality_segments_windows(window, softcap):
    rng = np.random.default_rng(2)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    query = rng.normal(size=(2, 8, 2, 3, 4)).astype(np.float32) * 2
    key, value = rng.normal(size=(2, 2, 2, 8, 4)).astype(np.float32) * 2

    def may_look(b: int, t: int, s: int) -> bool:
        near = window is None or s > t - window
        return s <= t and near and segments[b, t] == segments[b, s] > 0

    positions = row_positions(segments)
    given = query, key, value, positions, positions
    attend = functools.partial(attention, scale=0.4, softcap=softcap)
    out = np.asarray(jax.jit(functools.partial(attend, window=window))(*given))
    by_hand = functools.partial(attention_by_hand, query, key, value, may_look, scale=0.4)
    expected = by_hand(softcap=softcap or math.inf)
    np.testing.assert_allclose(out[segments > 0], expected[segments > 0], atol=1e-5)
    if window is not None:
        np.testing.assert_array_equal(out, jax.jit(attend)(*given, window=np.int32(window)))
    if softcap:
        assert np.max(np.abs(expected - by_hand())[1]) > 0.1 or window == 1
    # The first token of a segment sees itself alone: the value of its head, in every group.
    np.testing.assert_allclose(out[0, 3, 1], np.tile(value[0, 1, 3], (3, 1)), atol=1e-6)
    # Padding: the mean of the values, as told.
    mean = value[0, :, :, :].mean(axis=1)
    np.testing.assert_allclose(out[0, 7], np.repeat(mean[:, None], 3, axis=1), atol=1e-5)


# The whole model.


@functools.cache
def jitted_chunk(model: ModelConfig):
    return jax.jit(functools.partial(forward_chunk, model))


def decode(model, params, tokens, lengths, counts_of, full, tolerance):
    """Decodes rows of `lengths` tokens in chunks and compares each step with the full forward."""
    width = counts_of.width
    cache = empty_cache(model, ROWS, LENGTH + 3, page_size=4)
    capacity = cache.table.shape[2] * 4
    # Garbage in the pages must not be seen, whoever had them before; nor is their order any.
    table = np.random.default_rng(5).permutation(cache.num_pages).reshape(cache.table.shape)
    layers = jax.tree.map(lambda leaf: leaf + 7.0, cache.pools)
    cache = PagedCache(pools=layers, table=jnp.asarray(table, jnp.int32))
    cached = np.zeros(ROWS, np.int32)
    num_idle = 0
    while (cached < lengths).any():
        counts = np.minimum(counts_of(), lengths - cached).astype(np.int32)
        chunk = np.full((ROWS, width), VOCAB - 1, np.int32)
        for row in range(ROWS):
            chunk[row, : counts[row]] = tokens[row, cached[row] : cached[row] + counts[row]]
        logits, new = jitted_chunk(model)(params, cache, chunk, cached, counts)
        logits = np.asarray(logits)
        idle = counts == 0
        num_idle += idle.sum()
        for old_layer, new_layer in zip(rows_of(model, cache), rows_of(model, new), strict=True):
            for side in ("key", "value"):
                np.testing.assert_array_equal(new_layer[side][idle], old_layer[side][idle])
                behind = np.arange(capacity)[None, :] >= (cached + counts)[:, None]
                assert (new_layer[side].swapaxes(1, 2)[behind] == 7.0).all()
        cache, cached = new, cached + counts
        expected = full[np.arange(ROWS), cached - 1]
        np.testing.assert_allclose(logits[~idle], expected[~idle], atol=tolerance)
    assert num_idle > 0


class Counts:
    """Draws the number of tokens that each row gets next: at most `width`, sometimes none."""

    def __init__(self, width: int, seed: int):
        self.width, self._rng = width, np.random.default_rng(seed)

    def __call__(self) -> np.ndarray:
        return self._rng.integers(0, self.width + 1, ROWS)


LENGTHS = np.array([LENGTH, 1, 13, 7, 20])


@pytest.mark.parametrize(("width", "seed"), [(1, 0), (5, 1)])
def test_cached_decoding_equals_the_full_forward(full_logits, width, seed):
    tokens = make_tokens(seed)
    full = np.asarray(full_logits(make_params(), tokens, np.ones_like(tokens)))
    params = unstack_layers(jax.device_get(make_params()), MODEL.num_layers)
    decode(MODEL, params, tokens, LENGTHS, Counts(width, seed), full, 1e-5)


def test_bf16_is_near_fp32_and_decodes_like_it(full_logits):
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    tokens = make_tokens()
    exact = np.asarray(full_logits(make_params(), tokens, np.ones_like(tokens)))
    rough = np.asarray(make_logits(model)(make_params(), tokens, np.ones_like(tokens)))
    assert rough.dtype == jnp.float32
    assert np.isfinite(rough).all()
    # 8 bits of mantissa: about 1 % of logits of deviation 1.
    assert 1e-4 < np.abs(rough - exact).mean() < 2e-2
    assert np.abs(rough - exact).max() < 0.15
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), make_params())
    params = unstack_layers(params, MODEL.num_layers)
    decode(model, params, tokens, LENGTHS, Counts(5, 4), rough, 0.15)


def test_the_gradient_of_a_token_that_comes_thousands_of_times_is_their_sum_in_bf16():
    """It is rounded once: added up in bf16, most of them would be lost."""
    tokens = np.random.default_rng(0).choice([3, 4, 5], (64, 48), p=[0.8, 0.1, 0.1])
    one = dataclasses.replace(MODEL, num_layers=1)
    params, layout = make_params(0, one), make_layout(MeshShape(), jax.devices()[:1])

    def gradient(dtype: str):
        model = dataclasses.replace(one, compute_dtype=dtype)

        def total(embed):
            x_BTD = forward_rows(
                model, layout, params | {"embed": embed}, tokens, np.ones_like(tokens)
            )
            return jnp.sum(x_BTD.astype(jnp.float32)[..., 0])

        return np.asarray(jax.jit(jax.grad(total))(params["embed"]))

    exact = gradient("float32")
    error = np.linalg.norm(gradient("bfloat16") - exact)
    assert error < 0.03 * np.linalg.norm(exact)


def test_tied_embeddings_have_no_head_and_use_the_embedding():
    model = dataclasses.replace(MODEL, tie_embeddings=True)
    specs = parameter_specs(model, VOCAB)
    assert "head" not in specs and "head" in parameter_specs(MODEL, VOCAB)
    assert num_parameters(parameter_specs(MODEL, VOCAB)) - num_parameters(specs) == 32 * VOCAB
    tied = jax.device_get(make_params(0, model))
    np.testing.assert_array_equal(head_weights(tied), tied["embed"].T)


# One description of the parameters.


def test_initial_deviations_are_as_configured():
    model = dataclasses.replace(MODEL, width=64, ffn_size=96, init_scale=0.5)
    params = init_jitted(parameter_specs(model, 256), jax.random.key(3))
    params = jax.tree.map(np.asarray, params)
    residual = 0.5 / math.sqrt(2 * 2)
    deviations = {name: np.std(leaf) for name, leaf in params["layers"].items()}
    for name, expected in {
        "query": 1 / 8,
        "key": 1 / 8,
        "value": 1 / 8,
        "out": residual / math.sqrt(4 * 8),
        "gate": 1 / 8,
        "up": 1 / 8,
        "down": residual / math.sqrt(96),
    }.items():
        # At least 4096 numbers each: the deviation is known to about 1.1 %.
        assert deviations[name] == pytest.approx(expected, rel=0.05), name
    assert np.std(params["embed"]) == pytest.approx(1 / 8, rel=0.05)
    assert np.std(params["head"]) == pytest.approx(1 / 8, rel=0.05)
    for scale in (params["final_norm"], params["layers"]["ffn_norm"]):
        assert (scale == 1).all()
    # No two parameters, and no two layers, share their numbers.
    firsts = [np.ravel(params["layers"][n])[:4] / deviations[n] for n in ("key", "value", "gate")]
    firsts.append(np.ravel(params["layers"]["key"][1])[:4] / deviations["key"])
    for index, one in enumerate(firsts):
        assert all(np.abs(one - other).max() > 0.1 for other in firsts[:index])


def test_a_parameter_keeps_its_values_when_others_come_and_go():
    tied = dataclasses.replace(MODEL, tie_embeddings=True)
    with_head, without = (
        init_jitted(parameter_specs(model, VOCAB), jax.random.key(0)) for model in (MODEL, tied)
    )
    del with_head["head"]
    jax.tree.map(np.testing.assert_array_equal, with_head, without)


def test_initial_values_are_the_same_on_every_layout():
    specs = parameter_specs(MODEL, VOCAB)
    # One of each kind of cut: over both axes, over one, over none.
    few = {
        "embed": specs["embed"],
        "layers": {name: specs["layers"][name] for name in ("out", "ffn_norm")},
    }
    alone = init_jitted(few, jax.random.key(5))
    for shape in (MeshShape(data=2, fsdp=2, tensor=2), MeshShape(fsdp=4, context=2)):
        shardings = parameter_shardings(few, make_layout(shape))
        init = jax.jit(lambda key: init_parameters(few, key), out_shardings=shardings)
        jax.tree.map(np.testing.assert_array_equal, init(jax.random.key(5)), alone)
