# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters are trained alone, beside a base that stays as it is; the engine gets them merged."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from earl_jax.dispatch.weights import publish
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_chunk
from earl_jax.models.fingerprint import fingerprint
from earl_jax.models.lora import adapter_specs
from earl_jax.models.lora_config import PROJECTIONS, LoraConfig
from earl_jax.models.parameters import (
    num_parameters,
    parameter_shapes,
    parameter_shardings,
    parameter_specs,
    unstacked_specs,
)
from earl_jax.models.projection import Adapted, is_adapted, merged, project
from earl_jax.run.build import build_run
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.train import checkpoint
from earl_jax.train.checkpoint import Checkpoints
from earl_jax.train.config import TrainConfig
from earl_jax.train.state import (
    TrainState,
    init_state,
    policy_parameters,
    state_shapes,
    state_shardings,
)
from earl_jax.train.step import read_metrics
from earl_jax.trajectory import TrajectoryBatch
from tests.support.caches import empty_cache
from tests.support.forward import row_logits
from tests.support.runs import bits
from tests.support.settings import make_config
from tests.support.shardings import resident_bytes
from tests.support.updates import lowered_update

REFERENCE = Path(__file__).parent / "reference"
VOCAB, ROWS, LENGTH = 64, 16, 12
# Eight key/value heads, so that every mesh of eight devices is allowed.
MODEL = ModelConfig(
    num_layers=2, width=32, num_heads=16, num_kv_heads=8, head_size=4, ffn_size=32, init_scale=4.0
)

SPECS = parameter_specs(MODEL, VOCAB)
LORA = LoraConfig(rank=4, alpha=12.0)
TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
CONFIG = TrainConfig(lora=LORA, max_grad_norm=1e9)
CONTROLS = np.array([1e-2, 0.05], np.float32)
ONE_DEVICE = MeshShape()
MIXED = MeshShape(data=2, fsdp=2, tensor=2)


@functools.cache
def on_host(config: TrainConfig = CONFIG) -> TrainState:
    """A state in which B is no longer zero, so that A has gradients too."""
    state = init_state(MODEL, config, VOCAB, make_layout(ONE_DEVICE), 0)
    rng = np.random.default_rng(1)

    def stir(path: Any, leaf: Any) -> Any:
        noise = 0.1 * rng.normal(size=leaf.shape).astype(np.float32)
        return np.asarray(leaf) + noise if path[-1].key == "b" else np.asarray(leaf)

    params = jax.tree_util.tree_map_with_path(stir, state.params)
    return dataclasses.replace(jax.tree.map(np.asarray, state), params=params)


def placed(shape: MeshShape, config: TrainConfig = CONFIG) -> TrainState:
    shardings = state_shardings(MODEL, config, VOCAB, make_layout(shape))
    # Copies, because a state is donated and the host's arrays are needed again.
    return jax.device_put(jax.tree.map(np.array, on_host(config)), shardings)


def make_batch() -> TrajectoryBatch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    turn_ids = np.zeros_like(tokens)
    turn_ids[:, 3:] = 1
    return TrajectoryBatch(
        tokens=tokens,
        segment_ids=np.ones_like(tokens),
        turn_ids=turn_ids,
        logprobs=np.full(tokens.shape, -np.log(VOCAB), np.float32),
        versions=np.zeros_like(tokens),
        advantages=rng.normal(size=tokens.shape).astype(np.float32),
    )


@functools.cache
def compiled_step(shape: MeshShape, config: TrainConfig = CONFIG):
    return lowered_update(MODEL, config, make_layout(shape), VOCAB, (ROWS, LENGTH)).compile()


def logits_of(params: Any, shape: MeshShape = ONE_DEVICE) -> np.ndarray:
    """f32[ROWS, LENGTH, V], as the trainer computes them."""
    return np.asarray(logits_program(shape)(params))


@functools.cache
def logits_program(shape: MeshShape):
    layout, batch = make_layout(shape), make_batch()
    return jax.jit(
        lambda params: row_logits(MODEL, params, batch.tokens, batch.segment_ids, layout)
    )


def policy(state: TrainState, config: TrainConfig = CONFIG) -> Any:
    return policy_parameters(config, state.params, state.base)


# One projection.

BY_HAND = Adapted(
    weight=np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
    a=np.array([[2.0], [1.0]], np.float32),
    b=np.array([[3.0, 5.0]], np.float32),
    inputs="D",
    outputs="F",
    scale=4.0,
)


def test_a_rank_1_adapter_by_hand():
    x, whole = np.array([[[1.0, -1.0]]], np.float32), np.asarray(jax.jit(merged)(BY_HAND))
    # x W = (-2, -2); x A = 1; 4 * 1 * (3, 5) is added.
    y = jax.jit(functools.partial(project, "BTD,DF->BTF"))(x, BY_HAND)
    np.testing.assert_array_equal(y, [[[10.0, 18.0]]])
    np.testing.assert_array_equal(whole, [[25.0, 42.0], [15.0, 24.0]])
    np.testing.assert_array_equal(x @ whole, y)

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(a, b):
        return jnp.sum(project("BTD,DF->BTF", x, dataclasses.replace(BY_HAND, a=a, b=b)))

    grad_a, grad_b = jax.jit(gradients)(BY_HAND.a, BY_HAND.b)
    np.testing.assert_array_equal(grad_a, [[32.0], [-32.0]])  # 4 x (3 + 5)
    np.testing.assert_array_equal(grad_b, [[4.0, 4.0]])  # 4 (x A)


# The state.


def test_only_adapters_have_optimiser_state_and_the_base_is_that_of_the_seed():
    layout = make_layout(MIXED)
    state = init_state(MODEL, CONFIG, VOCAB, layout, 5)
    full = init_state(MODEL, TrainConfig(), VOCAB, layout, 5)
    assert bits(state.base) == bits(full.params) and full.base is None
    for part in state.params["layers"].values():
        assert not np.any(part["b"])
    a = np.asarray(state.params["layers"]["down"]["a"])
    assert np.std(a) == pytest.approx((1 / 96) ** 0.5, rel=0.2)
    # Fan-in and fan-out of each projection, times the rank, in two layers.
    sides = [32 + 64, 32 + 32, 32 + 32, 64 + 32, 32 + 32, 32 + 32, 32 + 32]
    numbers = 2 * 4 * sum(sides)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == numbers
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer)) == 2 * 4 * numbers + 4
    # What a device keeps: the selector's figure.
    alone = make_layout(ONE_DEVICE)
    expected = 4 * num_parameters(SPECS) + 3 * 4 * numbers + 4 + 4
    for compute_dtype, size in (("float32", 4), ("bfloat16", 2)):
        model = dataclasses.replace(MODEL, compute_dtype=compute_dtype)
        shapes = state_shapes(model, CONFIG, VOCAB)
        kept = resident_bytes(shapes, state_shardings(model, CONFIG, VOCAB, alone))
        assert kept == expected - (4 - size) * num_parameters(SPECS)


# An update.


def gradients(state: TrainState) -> Any:
    """After the first update, Adam's first moment is (1 - b1) times the gradient."""
    return jax.tree.map(lambda m: np.asarray(m) / (1 - CONFIG.adam_b1), state.optimizer[1].mu)


@functools.cache
def alone() -> tuple[Any, Any, Any]:
    """The update on one device: adapters, gradients, metrics."""
    state, metrics = compiled_step(ONE_DEVICE)(placed(ONE_DEVICE), make_batch(), CONTROLS)
    return jax.tree.map(np.asarray, state.params), gradients(state), read_metrics(metrics)


def test_sharded_equals_unsharded():
    batch = jax.device_put(make_batch(), make_layout(MIXED).activations("NS"))
    state, metrics = compiled_step(MIXED)(placed(MIXED), batch, CONTROLS)
    assert_as_alone(state, metrics)
    shardings = state_shardings(MODEL, CONFIG, VOCAB, make_layout(MIXED))
    assert all(
        leaf.sharding.is_equivalent_to(where, leaf.ndim)
        for leaf, where in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    )
    assert bits(state.base) == bits(on_host().base)


def test_remat_changes_nothing():
    step = compiled_step(ONE_DEVICE, dataclasses.replace(CONFIG, remat="dots"))
    assert_as_alone(*step(placed(ONE_DEVICE), make_batch(), CONTROLS))


def assert_as_alone(state: TrainState, metrics: Any) -> None:
    """Compares gradients and metrics of an update with those on one device without remat."""
    _, expected, numbers = alone()

    def check(path, grad, other):
        np.testing.assert_allclose(grad, other, rtol=1e-4, atol=2e-6, err_msg=str(path))
        assert np.abs(other).max() > 2e-4, path

    jax.tree_util.tree_map_with_path(check, gradients(state), expected)
    assert read_metrics(metrics) == pytest.approx(numbers, rel=2e-5, abs=1e-6)


def test_gradients_are_those_of_the_merged_model():
    """dL/dA and dL/dB follow from dL/dW of the merged model, which is trained without adapters.

    None is 0 (`assert_as_alone`): every target is in the forward pass.
    """
    full = TrainConfig(max_grad_norm=1e9)
    merge = functools.partial(jax.tree.map, merged, is_leaf=is_adapted)
    whole = jax.jit(merge)(policy(on_host()))
    optimizer = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), state_shapes(MODEL, full, VOCAB).optimizer
    )
    state = TrainState(updates=np.int32(0), params=whole, optimizer=optimizer)
    state = jax.device_put(state, state_shardings(MODEL, full, VOCAB, make_layout(ONE_DEVICE)))
    state, _ = compiled_step(ONE_DEVICE, full)(state, make_batch(), CONTROLS)
    by_weight, (_, by_adapter, _) = gradients(state), alone()
    for name in TARGETS:
        inputs, outputs = PROJECTIONS[name]
        pair, grad = on_host().params["layers"][name], by_weight["layers"][name]
        grad_a = 3.0 * np.einsum(f"L{inputs}{outputs},LR{outputs}->L{inputs}R", grad, pair["b"])
        grad_b = 3.0 * np.einsum(f"L{inputs}{outputs},L{inputs}R->LR{outputs}", grad, pair["a"])
        found = by_adapter["layers"][name]
        np.testing.assert_allclose(found["a"], grad_a, rtol=1e-3, atol=5e-6)
        np.testing.assert_allclose(found["b"], grad_b, rtol=1e-3, atol=5e-6)


def addresses(tree: Any) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def test_the_base_stays_where_it_is():
    """An update hands the base's own buffers on: no copy, and none of it in the outputs' bytes."""
    # Made on the devices: memory of numpy's is copied before it is donated.
    state = jax.tree.map(jnp.copy, placed(MIXED))
    before = addresses(state.base)
    batch = jax.device_put(make_batch(), make_layout(MIXED).activations("NS"))
    for _ in range(3):
        state, _ = compiled_step(MIXED)(state, batch, CONTROLS)
    assert addresses(state.base) == before
    assert bits(state.base) == bits(on_host().base)
    assert bits(state.params) != bits(on_host().params)


# To the engine.


def published(state: TrainState, target: MeshShape, dtype=jnp.float32, config=CONFIG) -> Any:
    layout, specs = make_layout(target), unstacked_specs(SPECS, MODEL.num_layers)
    with HostByteCounter() as counter, jax.transfer_guard_device_to_host("disallow_explicit"):
        result = publish(
            policy(state, config),
            parameter_shapes(specs, dtype),
            parameter_shardings(specs, layout),
        )
        jax.block_until_ready(result.params)
    assert counter.num_bytes == 0
    for leaf, where in zip(
        jax.tree.leaves(result.params),
        jax.tree.leaves(parameter_shardings(specs, layout)),
        strict=True,
    ):
        assert leaf.dtype == dtype and leaf.sharding.is_equivalent_to(where, leaf.ndim)
    return result


def test_the_engine_samples_from_what_the_trainer_scores():
    """On fewer devices, to which parameters are sent piece by piece."""
    result = published(placed(MIXED), MeshShape(data=2, tensor=2))
    cache, tokens = empty_cache(MODEL, ROWS, LENGTH), make_batch().tokens
    chunk = jax.jit(functools.partial(forward_chunk, MODEL))
    counts = np.full(ROWS, LENGTH, np.int32)
    logits, _ = chunk(result.params, cache, tokens, counts * 0, counts)
    expected = logits_of(policy(placed(MIXED)), MIXED)[:, -1]
    base = logits_of(on_host().base)[:, -1]
    found, trained, base = (
        np.asarray(jax.nn.log_softmax(np.asarray(part))) for part in (logits, expected, base)
    )
    assert np.abs(found - trained).max() <= 1e-4
    assert np.abs(found - base).max() > 1


@pytest.mark.slow
def test_fresh_adapters_publish_the_base_bit_for_bit():
    target, dtype = MeshShape(data=2, tensor=4), jnp.bfloat16
    state = init_state(MODEL, CONFIG, VOCAB, make_layout(MIXED), 0)
    result = published(state, target, dtype)
    base = jax.tree.map(np.asarray, state.base)
    for index, layer in enumerate(result.params["layers"]):
        expected = jax.tree.map(lambda leaf, i=index: leaf[i].astype(dtype), base["layers"])
        assert bits(layer) == bits(expected)
    assert bits(result.params["embed"]) == bits(base["embed"].astype(dtype))
    # As many bytes change device as for a model that is trained whole.
    full = TrainConfig()
    whole = init_state(MODEL, full, VOCAB, make_layout(MIXED), 0)
    assert result.moved_bytes == published(whole, target, dtype, full).moved_bytes


def test_merging_is_in_fp32_whatever_the_base_is_kept_in():
    state = dataclasses.replace(
        placed(MIXED), base=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), placed(MIXED).base)
    )
    result = published(state, MeshShape(data=4, tensor=2), jnp.bfloat16)
    base, pair = on_host().base["layers"]["gate"], on_host().params["layers"]["gate"]
    for index, layer in enumerate(result.params["layers"]):
        weight = base[index].astype(jnp.bfloat16).astype(np.float32)
        expected = weight + np.float32(3.0) * (pair["a"][index] @ pair["b"][index])
        found = np.asarray(layer["gate"]).astype(np.float32)
        # Half a unit of bf16's last place, of which there are 8 bits.
        np.testing.assert_allclose(found, expected, rtol=2**-8)
        # Rounded once: sums of rounded parts would be off by more, in many places.
        assert np.mean(np.asarray(layer["gate"]) == expected.astype(jnp.bfloat16)) > 0.99


# Kept.


def test_a_checkpoint_holds_the_adapters_and_not_the_base(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, placed(MeshShape(data=8)), {})
    checkpoints.wait()
    layout = make_layout(MIXED)
    back = checkpoints.state(
        1, state_shapes(MODEL, CONFIG, VOCAB), state_shardings(MODEL, CONFIG, VOCAB, layout)
    )
    checkpoints.close()
    assert back.base is None
    assert bits(back) == bits(dataclasses.replace(on_host(), base=None))
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        kept = manager.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    # Adapters and two moments of each; the number of updates, Adam's count.
    numbers = sum(leaf.size for leaf in jax.tree.leaves(on_host().params))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept["state"])) == 3 * 4 * numbers + 4 + 4


@pytest.mark.slow
def test_the_fingerprint_is_of_the_bits_and_not_of_the_layout():
    first = int(fingerprint(placed(MIXED).base))
    assert (
        first
        == int(fingerprint(placed(MeshShape(data=8)).base))
        == int(fingerprint(on_host().base))
    )
    assert first != int(fingerprint(init_state(MODEL, CONFIG, VOCAB, make_layout(MIXED), 1).base))
    values = np.arange(6, dtype=np.float32)
    marks = {
        int(fingerprint(values)),
        int(fingerprint(values[::-1].copy())),
        int(fingerprint(values.astype(jnp.bfloat16))),
        int(fingerprint(np.nextafter(values, np.float32(9)))),
        int(fingerprint([values, values])),
    }
    assert len(marks) == 5
    # 1.0 and 2.0 at the positions 0 and 1, with integers of Python.
    expected = (mixed(0x3F800000 ^ mixed(0)) + mixed(0x40000000 ^ mixed(1))) % 2**32
    assert int(fingerprint(np.array([1.0, 2.0], np.float32))) == expected


def mixed(number: int) -> int:
    """MurmurHash3's finalizer."""
    number = (number ^ number >> 16) * 0x85EBCA6B % 2**32
    number = (number ^ number >> 13) * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


@jax.jit
@jax.vmap
def prints(bits: jax.Array) -> jax.Array:
    """Fingerprints of half and of full width: the same bit counted from the top."""
    half = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    whole = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.stack([fingerprint(half), fingerprint(whole)])


@pytest.mark.parametrize("bit", [15, 14, 0])
@pytest.mark.parametrize("are_zeros", [False, True])
def test_two_flips_of_one_bit_are_found_at_any_places(bit, are_zeros):
    """Signs are among them, which a sum of the bits times odd factors does not see."""
    drawn = np.random.default_rng(bit).integers(0, 2**16, 48, np.uint16)
    bits_N = drawn * np.uint16(not are_zeros)
    flips_PN = np.zeros((48 * 47 // 2, 48), np.uint16)
    for row, places in zip(flips_PN, itertools.combinations(range(48), 2), strict=True):
        row[list(places)] = 1 << bit

    found_P2 = np.asarray(prints(np.concatenate([bits_N[None], bits_N[None] ^ flips_PN])))
    assert found_P2.shape == (1 + 1128, 2)
    assert not np.any(found_P2[1:] == found_P2[:1])


def test_a_checkpoint_with_fingerprints_of_another_version_is_no_damage(tmp_path, monkeypatch):
    """It is an error that names the way out, and is not set aside."""
    state = TrainState(updates=jnp.zeros((), jnp.int32), params={"a": jnp.ones(4)}, optimizer={})
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        monkeypatch.setattr(checkpoint, "FINGERPRINT_VERSION", 1)
        checkpoints.save(1, state, {"step": 1})
        checkpoints.wait()
        assert checkpoints.position(1) == {"step": 1}
        monkeypatch.undo()
        with pytest.raises(InputError, match="step 1 .* is whole, .* name another --workdir"):
            checkpoints.position(1)


# Settings.


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": -1}, "config.train.lora.rank is -1; it must be at least 0"),
        ({"rank": 4, "alpha": 0}, "config.train.lora.alpha is 0.0; it must be a positive"),
        ({"rank": 4, "alpha": float("inf")}, "config.train.lora.alpha is inf"),
        ({"rank": 4, "targets": ("query", "q_proj")}, "query, key, value, .*, each once, or 'all'"),
        ({"rank": 4, "targets": ("all", "query")}, "name at least one of query"),
        ({"rank": 4, "targets": ()}, "name at least one of query"),
        ({"rank": 4, "targets": ("up", "up")}, "each once"),
        ({"rank": 4, "base_dtype": "bfloat16"}, "kept in config.model.compute_dtype"),
        ({"alpha": 8.0}, "config.train.lora.alpha = 8.0 has no effect .*lora.rank is 0"),
        ({"targets": ("query",)}, "config.train.lora.targets = .* has no effect"),
        ({"ranks": 8}, "config.train.lora.ranks is not a field of LoraConfig; did you mean 'rank'"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_an_error(lora, words):
    with pytest.raises(ValueError, match=words):
        make_config({"train": {"lora": lora}})


def test_the_model_decides_which_targets_and_ranks_there_can_be():
    given = {"train": {"lora": {"rank": 33, "targets": ("query", "key")}}}
    words = r"rank is 33, but 'key' is a matrix of 64 x 32, whose rank is at most 32; .*'key' out"
    with pytest.raises(ValueError, match=words):
        build_run(make_config(given))
    # One with other axes, as experts have them, and one that is not there.
    layers = dict(SPECS["layers"])
    layers["gate"] = dataclasses.replace(layers["gate"], shape=(2, 4, 32, 32), axes="LNDF")
    del layers["up"]
    for name in ("gate", "up"):
        lora = dataclasses.replace(LORA, targets=("query", name))
        with pytest.raises(
            ValueError, match=f"has '{name}', which .* query, key, value, out, down"
        ):
            adapter_specs({**SPECS, "layers": layers}, lora)
    found = adapter_specs({**SPECS, "layers": layers}, LORA)
    assert set(found["layers"]) == {"query", "key", "value", "out", "down"}


def test_each_target_has_the_axes_of_its_parameter():
    """In a model of linear attention with a shared network beside experts, and in one of latents.

    Not adapted: experts, routers, and the rates and decays of states.
    """
    mixture = {"num_layers": 4, "num_experts": 4, "shared_ffn_size": 16}
    models = [
        ModelConfig(**mixture, attention_every=2, attention_gate=True, shared_ffn_gate=True),
        ModelConfig(
            **mixture,
            num_dense_layers=1,
            num_kv_heads=4,
            latent_size=8,
            query_latent_size=8,
            rope_size=4,
            value_size=8,
        ),
    ]
    seen = set()
    for model in models:
        model.validate()
        layers = parameter_specs(model, VOCAB)["layers"]
        found = adapter_specs({"layers": layers}, LORA)["layers"]
        matrices = {name for name, spec in layers.items() if spec.deviation and len(spec.axes) > 2}
        left = {name for name in matrices - set(found) if not name.endswith("taps")}
        names = {"router", "shared_router", "linear_rate", "linear_decay"} & set(layers)
        assert left == names | {f"expert_{each}" for each in ("gate", "up", "down")}
        for name, pair in found.items():
            assert {spec.shape[0] for spec in pair.values()} == {layers[name].shape[0]}
        seen |= set(found)
    assert seen == set(PROJECTIONS)


@pytest.mark.slow
def test_a_world_keeps_the_base_of_the_path_frozen():
    given = {
        "model": {"path": str(REFERENCE / "qwen2_tied"), "compute_dtype": "bfloat16"},
        "train": {"lora": {"rank": 2}},
    }
    world = build_run(make_config(given))
    mesh = world.problem.meshes("train")[-1]
    state = world.learner.first_state(mesh)
    assert bits(state.base) == bits(world.learner.frozen_base(mesh))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.base)} == {jnp.dtype(jnp.bfloat16)}
    assert is_adapted(world.learner.policy(state)["layers"]["query"])


@pytest.mark.slow
def test_a_base_from_the_seed_is_drawn_again_on_any_mesh():
    world = build_run(make_config({"model": {"num_layers": 1}, "train": {"lora": {"rank": 2}}}))
    first = world.learner.first_state(MeshShape(data=8)).base
    again = world.learner.frozen_base(MeshShape(data=2, fsdp=4))
    assert bits(again) == bits(first) and int(fingerprint(again)) == int(fingerprint(first))
    plain = build_run(make_config({"model": {"num_layers": 1}}))
    assert plain.learner.frozen_base(MeshShape(data=8)) is None
