# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine gets the trainer's weights from any layout on any other, and the host sees none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.dispatch.weights import publish
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import (
    check_tensor_axis,
    is_spec,
    num_parameters,
    parameter_shardings,
    parameter_specs,
    unstacked_specs,
)
from earl_jax.sharding.layout import Layout, MeshShape, make_layout
from earl_jax.telemetry.host_bytes import HostByteCounter
from tests.support.meshes import rollout_candidates, train_candidates

# The count below every door of Python, of the test that any array gets anywhere.
from tests.support.shardings import count_host_bytes

VOCAB = 16
# Eight key/value heads, so that every mesh of eight devices is allowed.
MODEL = ModelConfig(num_layers=2, width=16, num_heads=16, num_kv_heads=8, head_size=2, ffn_size=8)
SPECS = parameter_specs(MODEL, VOCAB)


def some(specs: Any) -> Any:
    """One parameter of each kind of cut, because programs of 40 pairs have to be compiled."""
    layers = {name: specs["layers"][name] for name in ("attention_norm", "query", "out", "down")}
    return {**specs, "layers": layers}


def can_cut(shape: MeshShape) -> str | None:
    return check_tensor_axis(MODEL, VOCAB, shape.tensor, shape.fsdp)


def make_values(specs: Any) -> Any:
    """A trainer's tree on the host, every number a different one."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32), specs, is_leaf=is_spec
    )


def on(layout: Layout, specs: Any) -> Any:
    return jax.device_put(make_values(specs), parameter_shardings(specs, layout))


def engine_side(specs: Any, layout: Layout, dtype=jnp.float32) -> tuple[Any, Any]:
    """Shapes and shardings of the engine's tree."""
    specs = unstacked_specs(specs, MODEL.num_layers)
    shapes = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs, is_leaf=is_spec
    )
    return shapes, parameter_shardings(specs, layout)


def moved_bytes_by_hand(specs: Any, source: Layout, target: Layout, itemsize: int) -> int:
    """Numbers that a device of the target needs and does not hold: masks, number by number."""
    total = 0
    sources, targets = (engine_side(specs, layout)[1] for layout in (source, target))
    specs = jax.tree.leaves(unstacked_specs(specs, MODEL.num_layers), is_leaf=is_spec)
    for spec, here, there in zip(
        specs, jax.tree.leaves(sources), jax.tree.leaves(targets), strict=True
    ):
        held = here.devices_indices_map(spec.shape)
        for device, wanted in there.devices_indices_map(spec.shape).items():
            missing = np.zeros(spec.shape, bool)
            missing[wanted] = True
            if device in held:
                missing[held[device]] = False
            total += int(missing.sum()) * itemsize
    return total


def check_publish(source: Layout, target: Layout, dtype, specs: Any) -> None:
    """Values, types, shardings, bytes on the way, and that the trainer may go on."""
    params = on(source, specs)
    shapes, shardings = engine_side(specs, target, dtype)
    with (
        HostByteCounter() as counter,
        count_host_bytes() as reads,
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        result = publish(params, shapes, shardings)
        published = jax.block_until_ready(result.params)
    assert (counter.num_bytes, reads) == (0, [])
    itemsize = np.dtype(dtype).itemsize
    assert result.moved_bytes == moved_bytes_by_hand(specs, source, target, itemsize)
    assert isinstance(published["layers"], list) and len(published["layers"]) == MODEL.num_layers
    # The train step donates its state: the engine's weights must not go with it.
    jax.tree.map(lambda leaf: leaf.delete(), params)

    def check(leaf, value, sharding):
        assert leaf.dtype == dtype
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        np.testing.assert_array_equal(np.asarray(leaf), value.astype(dtype))

    values = make_values(specs)
    for index, layer in enumerate(published["layers"]):
        for name, leaf in layer.items():
            check(leaf, values["layers"][name][index], shardings["layers"][index][name])
    for name in ("embed", "final_norm", "head"):
        check(published[name], values[name], shardings[name])


@pytest.mark.parametrize("target", rollout_candidates(8, (), can_cut), ids=str)
@pytest.mark.parametrize("source", train_candidates(8, (), can_cut), ids=str)
def test_every_training_layout_publishes_to_every_rollout_layout(source, target):
    check_publish(make_layout(source), make_layout(target), jnp.float32, some(SPECS))


def half(text: str, ids: range) -> Layout:
    return make_layout(MeshShape.parse(text), [jax.devices()[n] for n in ids])


@pytest.mark.parametrize(
    ("source", "target", "dtype"),
    [
        (("data=4", range(4)), ("data=4", range(4, 8)), jnp.float32),
        (("data=1,fsdp=4", range(4)), ("data=2,tensor=2", range(4, 8)), jnp.bfloat16),
        (("data=1,fsdp=2,tensor=2", range(4, 8)), ("data=1,tensor=4", range(4)), jnp.float32),
        (("data=2,fsdp=2", range(4)), ("data=1", range(7, 8)), jnp.float32),
        (("data=2,fsdp=2,tensor=2", range(8)), ("data=2,tensor=2", range(4, 8)), jnp.float32),
        (("data=4", range(4)), ("data=8", range(8)), jnp.float32),
        (("data=8", range(8)), ("data=8", range(7, -1, -1)), jnp.float32),
    ],
)
def test_other_devices_get_the_same_weights(source, target, dtype):
    check_publish(half(*source), half(*target), dtype, some(SPECS))


@pytest.mark.parametrize(
    ("source", "target"), [("data=8", "data=8"), ("data=2,fsdp=2,tensor=2", "data=4,tensor=2")]
)
def test_the_whole_model_is_cast_to_the_compute_type(source, target):
    layouts = (make_layout(MeshShape.parse(text)) for text in (source, target))
    check_publish(*layouts, jnp.bfloat16, SPECS)


SOME = some(SPECS)
NORMS = 2 * 16 + 16  # one of width 16 in each of two layers, and the last
MATRICES = num_parameters(SOME) - NORMS


@pytest.mark.parametrize(
    ("source", "target", "numbers"),
    [
        # Everyone has everything.
        ("data=8", "data=8", 0),
        ("data=8", "data=1,tensor=8", 0),
        # Everyone has an eighth of everything and wants all of it: 8 x 7/8.
        ("data=1,fsdp=8", "data=8", 7 * (MATRICES + NORMS)),
        # Matrices are cut over tensor only, norms not at all: everyone lacks 7/8 of the matrices.
        ("data=1,tensor=8", "data=8", 7 * MATRICES),
        # Wanted an eighth of each matrix, of which an eighth is there: 8 x (1/8 - 1/64).
        ("data=1,fsdp=8", "data=1,tensor=8", MATRICES * 7 // 8 + 7 * NORMS),
        # Halves of the width on the devices of each pair: 8 x 1/2 of everything.
        ("data=4,fsdp=2", "data=8", 4 * (MATRICES + NORMS)),
    ],
)
def test_the_bytes_that_change_device_by_hand(source, target, numbers):
    source, target = (make_layout(MeshShape.parse(text)) for text in (source, target))
    published = publish(on(source, SOME), *engine_side(SOME, target))
    assert published.moved_bytes == numbers * 4


def test_every_weight_goes_once_to_each_device_of_another_set():
    source, target = half("data=1,fsdp=4", range(4)), half("data=4", range(4, 8))
    published = publish(on(source, SOME), *engine_side(SOME, target, jnp.bfloat16))
    assert published.moved_bytes == 4 * num_parameters(SOME) * 2
