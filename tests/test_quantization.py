# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""int8 matrices: by hand, published from any layout to any other, and played with.

Whatever is compared with a model is compared with the dequantised one, and so must agree to the
rounding of sums; the error against the full precision has bounds of its own.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.dispatch.weights import program_of, publish
from earl_jax.engine.config import EngineConfig
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.engine_parameters import INPUTS, engine_shapes, engine_specs
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.moe.experts import experts_of_shard
from earl_jax.models.parameters import (
    init_parameters,
    is_spec,
    parameter_shardings,
    parameter_specs,
)
from earl_jax.models.projection import merged, project
from earl_jax.models.quantization import dequantize, is_quantized, quantize
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.telemetry.host_bytes import HostByteCounter
from tests.support.engines import CANDIDATES, CONFIG, NUM_SLOTS, UNSHARDED, engine_on, scripts
from tests.support.experts import BIASED, one_biased_layer, one_layer, tokens_TD
from tests.support.experts import MODEL as EXPERT_MODEL
from tests.support.experts import by_hand as layer_by_hand
from tests.support.forward import next_scores
from tests.support.hlo import COLLECTIVE
from tests.support.shardings import resident_bytes
from tests.support.slots import (
    MAX_TOKENS,
    MODEL,
    VOCAB,
    assert_same,
    check_rows,
    converse,
    stacked_params,
)

# One matrix.


def test_two_columns_by_hand():
    """127 steps to the largest of each column; half a step at most is lost."""
    found = quantize(jnp.array([[1.0, 0.5], [-2.0, 0.0]]), "DF", "D")
    np.testing.assert_allclose(found.scale, [2 / 127, 0.5 / 127], rtol=1e-6)
    np.testing.assert_array_equal(found.values, [[64, 127], [-127, 0]])  # 1 is 63.5 steps: 64
    assert found.values.dtype == jnp.int8 and found.scale.dtype == jnp.float32
    np.testing.assert_allclose(dequantize(found), [[128 / 127, 0.5], [-2, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "inputs", "scale"),
    [("DKGH", "D", "KGH"), ("KGHD", "KGH", "D"), ("FD", "F", "D"), ("EDF", "D", "EF")],
)
def test_each_output_has_a_scale_and_loses_half_a_step_at_most(axes, inputs, scale):
    sizes = dict(zip("DKGHFE", (5, 3, 2, 4, 7, 6), strict=True))
    shape = tuple(sizes[letter] for letter in axes)
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = quantize(jnp.asarray(weight), axes, inputs)
    assert found.values.shape == shape
    assert found.scale.shape == tuple(sizes[letter] for letter in scale)
    over = tuple(axes.index(letter) for letter in inputs)
    steps = np.expand_dims(np.asarray(found.scale), over)
    np.testing.assert_allclose(127 * steps, np.abs(weight).max(axis=over, keepdims=True), rtol=1e-6)
    errors = np.abs(np.asarray(dequantize(found)) - weight) / steps
    assert 0.4 < errors.max() < 0.5001


@pytest.mark.parametrize("equation", ["BTD,DKGH->BTKGH", "BTKGH,KGHD->BTD", "BTF,FD->BTD"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_projection_is_that_of_the_dequantised_matrix(equation, dtype):
    sizes = dict(zip("BTDKGHF", (2, 3, 16, 2, 2, 4, 24), strict=True))
    given, axes = equation.split("->")[0].split(",")
    inputs = "".join(letter for letter in axes if letter in given)
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=[sizes[letter] for letter in part]) for part in (given, axes))
    x, matrix = jnp.asarray(x, dtype), quantize(jnp.asarray(weight), axes, inputs)
    found = project(equation, x, matrix)
    exact = np.einsum(equation, np.asarray(x, np.float64), np.asarray(dequantize(matrix)))
    assert found.dtype == dtype
    # Two roundings to bf16, of 2^-8 at most each.
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7 * np.abs(exact).max()
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=tolerance)


EXPERTS = [name for name in INPUTS if name.startswith("expert")]


@pytest.mark.slow_except("*-shape1")
@pytest.mark.parametrize("shape", [None, MeshShape(expert=4, tensor=2)])
@pytest.mark.parametrize(
    ("model", "layer"),
    [(EXPERT_MODEL, one_layer), (BIASED, one_biased_layer)],
    ids=["plain", "biased"],
)
def test_a_mixture_of_experts_is_that_of_the_dequantised_experts(model, layer, shape):
    """Whole on one device, and with experts and their outputs cut."""
    layer = dict(layer())
    layer |= {name: quantize(layer[name], "E" + _axes(name), INPUTS[name]) for name in EXPERTS}
    exact = layer_by_hand(
        model, {n: dequantize(w) if is_quantized(w) else w for n, w in layer.items()}, TOKENS_TD
    )
    layout = shape and make_layout(shape, jax.devices()[: shape.num_devices])
    mix = functools.partial(experts_of_shard, model, layout)
    if layout is not None:
        mix = functools.partial(_over_rows, layout, mix)
    found = jax.jit(mix)(layer, TOKENS_TD[None])[0]
    np.testing.assert_allclose(found, exact, atol=1e-5 * max(1, np.abs(exact).max()))
    assert np.abs(exact).max() > 0.1


TOKENS_TD = tokens_TD(20)


def _axes(name: str) -> str:
    return "FD" if name == "expert_down" else "DF"


def _over_rows(layout: Layout, mix: Any, layer: Any, x_BTD: jax.Array) -> jax.Array:
    """As the engine calls it: manual over rows, of which there is one shard here."""
    rows = jax.sharding.PartitionSpec()
    wrapped = jax.shard_map(
        mix,
        mesh=layout.mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(layout.row_axes),
        check_vma=False,
    )
    return wrapped(layer, x_BTD)


# From the trainer to the engine.


def engine_tree(model: ModelConfig, shape: MeshShape, compute_dtype="float32") -> tuple[Any, Any]:
    """Shapes and shardings of the int8 engine's parameters."""
    specs = engine_specs(model, VOCAB, "int8")
    layout = make_layout(shape, jax.devices()[: shape.num_devices])
    return engine_shapes(specs, compute_dtype), parameter_shardings(specs, layout)


def trainer_tree(params: Any, model: ModelConfig, shape: MeshShape) -> Any:
    """Copies, because a trainer's arrays may be deleted and these are needed again."""
    layout = make_layout(shape, jax.devices()[: shape.num_devices])
    params = jax.tree.map(np.array, params)
    return jax.device_put(params, parameter_shardings(parameter_specs(model, VOCAB), layout))


def by_hand(params: Any, num_layers: int, dtype: Any) -> Any:
    """Returns the expected result of `publish`, in numpy."""
    specs = engine_specs(MODEL, VOCAB, "int8")

    def make(spec: Any, weight: np.ndarray) -> Any:
        if not is_quantized(spec):
            return weight.astype(dtype)
        over = tuple(spec.axes.index(letter) for letter in spec.inputs)
        scale = np.abs(weight).max(axis=over, keepdims=True) / np.float32(127)
        values = np.rint(weight / scale).astype(np.int8)
        return dataclasses.replace(spec, values=values, scale=scale.squeeze(over))

    params = jax.tree.map(np.asarray, params)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(num_layers)]
    return jax.tree.map(make, specs, {**params, "layers": layers}, is_leaf=is_quantized)


@pytest.mark.slow_except("*-bfloat16")
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        (MeshShape(data=4, tensor=2), "bfloat16"),
        (MeshShape(data=2, tensor=2), "float32"),  # fewer devices
    ],
    ids=str,
)
def test_publishing_rounds_on_any_layout_to_the_same_bytes(target, dtype):
    source = MeshShape(data=2, fsdp=2, tensor=2)
    params = trainer_tree(stacked_params(), MODEL, source)
    shapes, shardings = engine_tree(MODEL, target, dtype)
    with HostByteCounter() as counter, jax.transfer_guard_device_to_host("disallow_explicit"):
        published = jax.block_until_ready(publish(params, shapes, shardings).params)
    assert counter.num_bytes == 0
    # The train step donates its state: the engine's weights must not go with it.
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert jax.tree.structure(published) == jax.tree.structure(shapes)
    expected = by_hand(stacked_params(), MODEL.num_layers, dtype)

    def check(leaf, shape, where, value):
        assert leaf.dtype == shape.dtype and leaf.sharding.is_equivalent_to(where, leaf.ndim)
        if leaf.dtype == jnp.int8:
            # A quotient just beside a half may go either way.
            assert np.abs(np.int32(leaf) - np.int32(value)).max() <= 1
            assert np.mean(np.asarray(leaf) != value) < 1e-3
        else:
            np.testing.assert_allclose(np.float32(leaf), np.float32(value), rtol=1e-6)

    jax.tree.map(check, published, shapes, shardings, expected)
    alone = publish(
        trainer_tree(stacked_params(), MODEL, UNSHARDED), *engine_tree(MODEL, UNSHARDED, dtype)
    ).params
    jax.tree.map(np.testing.assert_array_equal, published, alone)


def test_publishing_int8_moves_one_byte_per_number():
    """Each of eight devices has an eighth and wants all of it."""
    source, target = MeshShape(fsdp=8), MeshShape(data=8)
    params = trainer_tree(stacked_params(), MODEL, source)
    shapes, shardings = engine_tree(MODEL, target)
    size_of = {
        dtype: sum(leaf.size for leaf in jax.tree.leaves(shapes) if leaf.dtype == dtype)
        for dtype in (jnp.int8, jnp.float32)
    }
    # Scales over what is not cut (D) lie on every device already.
    whole = sum(node.scale.size for node in quantized_nodes(shapes) if "D" in node.inputs)
    moved = publish(params, shapes, shardings).moved_bytes
    assert moved == 7 * (size_of[jnp.int8] + 4 * (size_of[jnp.float32] - whole))
    # Rounded where the numbers lie: between devices goes the largest of a channel, before that.
    here = jax.tree.map(
        lambda axes: make_layout(source).parameters(axes), engine_axes(), is_leaf=is_text
    )
    text = program_of(params, shapes, here).lower(params).compile().as_text()
    lines = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    assert lines and all("all-reduce" in line and "f32" in line for line in lines)
    largest = max(node.scale.size for node in quantized_nodes(shapes))
    for line in lines:
        sizes = re.findall(r"f32\[([\d,]+)\]", line.split("all-reduce")[0])
        assert all(np.prod([int(n) for n in size.split(",")]) <= largest for size in sizes)


def quantized_nodes(tree: Any) -> list[Any]:
    return [node for node in jax.tree.leaves(tree, is_leaf=is_quantized) if is_quantized(node)]


def is_text(node: Any) -> bool:
    return isinstance(node, str)


def engine_axes() -> Any:
    return jax.tree.map(lambda spec: spec.axes, engine_specs(MODEL, VOCAB, "int8"), is_leaf=is_spec)


def test_adapters_are_merged_before_they_are_rounded():
    lora = LoraConfig(rank=2, targets=("query", "down"), alpha=6.0)
    specs = adapter_specs(parameter_specs(MODEL, VOCAB), lora)
    adapters = init_parameters(specs, jax.random.key(1))
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapters)  # b begins at zero
    adapted = adapt(stacked_params(), adapters, lora)
    whole = {
        **stacked_params(),
        "layers": {name: merged(leaf) for name, leaf in adapted["layers"].items()},
    }
    shape, engine = MeshShape(fsdp=2, tensor=2), engine_tree(MODEL, MeshShape(data=2, tensor=2))
    layout = make_layout(shape, jax.devices()[:4])
    base = jax.device_put(
        stacked_params(), parameter_shardings(parameter_specs(MODEL, VOCAB), layout)
    )
    adapters = jax.device_put(adapters, parameter_shardings(specs, layout))
    found = publish(adapt(base, adapters, lora), *engine).params
    expected = publish(trainer_tree(whole, MODEL, shape), *engine).params
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=1e-5, atol=1e-6)
    bare = publish(base, *engine).params
    assert np.any(bare["layers"][0]["query"].values != found["layers"][0]["query"].values)
    assert np.all(bare["layers"][0]["key"].values == found["layers"][0]["key"].values)


# The engine.

INT8 = dataclasses.replace(CONFIG, weight_dtype="int8")
CUT = CANDIDATES[2]


@functools.cache
def converse_on(shape: MeshShape, config: EngineConfig = INT8):
    """A conversation with the published weights; the trainer's lie on another layout."""
    engine = engine_on(shape, config)
    source = MeshShape(fsdp=2, tensor=2) if shape.num_devices == 8 else shape
    params = trainer_tree(stacked_params(), MODEL, source)
    weights = publish(params, engine.parameter_shapes, engine.parameter_shardings).params
    play = functools.partial(engine.play, weights)
    return converse(play, engine.empty_state(MAX_TOKENS), scripts(), num_slots=NUM_SLOTS)


@functools.cache
def dequantised_params() -> Any:
    """The trainer's tree with every matrix as the engine has it."""

    def rounded(name: str, stacked: jax.Array) -> jax.Array:
        if name not in INPUTS:
            return stacked
        axes = parameter_specs(MODEL, VOCAB)["layers"][name].axes[1:]
        return jnp.stack([dequantize(quantize(leaf, axes, INPUTS[name])) for leaf in stacked])

    params = stacked_params()
    return params | {"layers": {n: rounded(n, leaf) for n, leaf in params["layers"].items()}}


def score(params: Any, transcripts: Any) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's log-probs and the engine's, of every token that the policy sampled."""
    tokens, segments = (np.zeros((len(transcripts), MAX_TOKENS), np.int32) for _ in range(2))
    for row, t in enumerate(transcripts.values()):
        tokens[row, : len(t.ids)], segments[row, : len(t.ids)] = t.ids, 1
    layout = make_layout(UNSHARDED)

    @jax.jit
    def scored(params):
        hidden = forward_rows(MODEL, layout, params, tokens, segments)
        return next_scores(layout, params, hidden, tokens).logprobs

    logprobs = np.asarray(scored(params))
    pairs = [
        (logprobs[row, place - 1], t.logprobs[place])
        for row, t in enumerate(transcripts.values())
        for place in np.flatnonzero(t.turn_ids)
    ]
    ours, engines = np.array(pairs).T
    return ours, engines


@pytest.mark.slow
def test_every_mesh_plays_the_dequantised_policy():
    """Records the log-probs of the policy that sampled, the rounded one."""
    state, transcripts = converse_on(CUT)
    assert_same(transcripts, converse_on(UNSHARDED)[1])
    check_rows(state.experience, transcripts, scripts())
    ours, engines = score(dequantised_params(), transcripts)
    np.testing.assert_allclose(engines, ours, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "weights", "mean", "largest"),
    [
        # Twice what was seen on this model, whose distributions have two bits: 6e-7 and 3e-6,
        # 2.5e-2 and 0.13, 2.5e-2 and 0.15. Not below a tenth of that either: else nothing was
        # rounded.
        ("float32", "compute", 1.2e-6, 7e-6),
        ("float32", "int8", 5e-2, 0.26),
        ("bfloat16", "int8", 5e-2, 0.3),
    ],
)
def test_the_error_of_log_probs_has_bounds(compute, weights, mean, largest):
    model = dataclasses.replace(MODEL, compute_dtype=compute)
    config = dataclasses.replace(CONFIG, model=model, weight_dtype=weights)
    ours, engines = score(stacked_params(), converse_on(UNSHARDED, config)[1])
    gap = np.abs(engines - ours)
    assert mean / 10 < gap.mean() < mean
    assert largest / 10 < gap.max() < largest
    # Over the engine's own samples, trainer / engine is 1 on average; 170 tokens are few.
    assert np.mean(np.exp(ours - engines)) == pytest.approx(1, abs=gap.mean() + 1e-6)


@pytest.mark.slow
def test_a_round_talks_as_much_as_one_without_int8_and_holds_less():
    """The same collectives; arguments shrink by what the matrices do, byte for byte."""
    found = {}
    for config in (CONFIG, INT8):
        compiled = engine_on(CUT, config).lower_play(MAX_TOKENS).compile()
        lines = [line for line in compiled.as_text().splitlines() if COLLECTIVE.search(line)]
        kinds = [re.search(r"\b(all-[a-z]+|collective-[a-z]+)", line)[1] for line in lines]
        found[config.weight_dtype] = (collections.Counter(kinds), compiled.memory_analysis())
    assert found["int8"][0] == found["compute"][0]
    saved = [
        resident_bytes(engine.parameter_shapes, engine.parameter_shardings)
        for engine in (engine_on(CUT, CONFIG), engine_on(CUT, INT8))
    ]
    arguments = [found[w][1].argument_size_in_bytes for w in ("compute", "int8")]
    assert arguments[0] - arguments[1] == saved[0] - saved[1] > 0


# The KV cache.

INT8_CACHE = dataclasses.replace(CONFIG, kv_dtype="int8")


@pytest.mark.slow
def test_an_int8_cache_plays_the_same_episodes_on_a_mesh():
    shape = MeshShape(data=2, tensor=4)
    engine = engine_on(shape, INT8_CACHE)
    state, transcripts = converse_on(shape, INT8_CACHE)
    assert_same(transcripts, converse_on(UNSHARDED, INT8_CACHE)[1], atol=2e-2)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == engine.state_shardings
    assert {leaf.dtype for leaf in jax.tree.leaves(state.cache.pools)} == {
        jnp.dtype(jnp.int8),
        jnp.dtype(jnp.float32),
    }


@pytest.mark.slow
def test_an_int8_cache_is_near_and_not_the_same_and_takes_the_bytes_it_says():
    """Sampled tokens' log-probs against the trainer's; 4 numbers a head, so scales weigh much."""
    state, transcripts = converse_on(UNSHARDED, INT8_CACHE)
    expected, got = score(stacked_params(), transcripts)
    far = np.abs(expected - got)
    assert 1e-4 < far.mean() < 2e-2 and far.max() < 0.2
    exact = converse_on(UNSHARDED, CONFIG)[0]
    pages = [sum(leaf.nbytes for leaf in jax.tree.leaves(s.cache.pools)) for s in (state, exact)]
    # A head of 4 numbers: 4 bytes and a scale of 4, against 16.
    assert pages[0] * 2 == pages[1]
