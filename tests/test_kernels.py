# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel is the reference, forward and backward; which one runs is chosen and said."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_topology import need_compiler

from earl_jax.config import make_config
from earl_jax.models.config import ModelConfig
from earl_jax.models.kernels import attend_rows, choose_kernel
from earl_jax.models.splash import splash_rows
from earl_jax.sharding.layout import MeshShape, make_abstract_layout, make_layout
from earl_jax.sharding.topology import make_topology
from earl_jax.train.config import TrainConfig
from earl_jax.train.step import batch_shapes, make_train_step, state_shapes, state_shardings

KV_HEADS, GROUPS, HEAD_SIZE = 2, 3, 16
SPLIT = MeshShape(data=2, tensor=2)


def make_rows(length: int):
    """Queries, keys, values, and segments: three in the first row, with padding, one in the other.

    The second segment of the first row goes over the kernel's first block of 128.
    """
    rng = np.random.default_rng(length)
    query = rng.normal(size=(2, length, KV_HEADS, GROUPS, HEAD_SIZE)) * 2
    sides = rng.normal(size=(2, 2, KV_HEADS, length, HEAD_SIZE))
    segments = np.ones((2, length), np.int32)
    cuts = (length // 4, 3 * length // 4, length - 3)
    for number, first in zip((2, 3, 0), cuts, strict=True):
        segments[0, first:] = number
    return [jnp.asarray(array, jnp.float32) for array in (query, *sides)], jnp.asarray(segments)


def out_and_gradients(attend, query, key, value, segments):
    """What is attended to, and gradients of a weighted sum of it; padding counts for nothing."""
    weights = jnp.asarray(np.random.default_rng(7).normal(size=query.shape), jnp.float32)
    real = (segments > 0)[:, :, None, None, None]

    def total(query, key, value):
        out = jnp.where(real, attend(query, key, value, segments), 0.0)
        return jnp.sum(out * weights), out

    grad = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
    gradients, out = grad(query, key, value)
    return [out, *gradients]


# Lengths: below a block, no multiple of one, two blocks of 512 with padding.
@pytest.mark.parametrize(
    ("length", "window", "softcap"),
    [
        (40, None, 0.0),
        (200, 5, 1.5),
        pytest.param(200, None, 0.0, marks=pytest.mark.slow),
        pytest.param(200, 1, 0.0, marks=pytest.mark.slow),
        pytest.param(256, 130, 1.5, marks=pytest.mark.slow),
        pytest.param(600, 300, 0.0, marks=pytest.mark.slow),
    ],
)
def test_splash_is_the_reference_forward_and_backward(length, window, softcap):
    """On a mesh that cuts rows and heads, against the reference on one device."""
    arrays, segments = make_rows(length)
    numbers = {"scale": HEAD_SIZE**-0.5, "softcap": softcap, "window": window}
    splash = functools.partial(splash_rows, make_layout(SPLIT), **numbers, interpret=True)
    reference = functools.partial(attend_rows, "blockwise", make_layout(MeshShape()), **numbers)
    ours = out_and_gradients(lambda q, k, v, s: splash(q, k, v, s), *arrays, segments)
    theirs = out_and_gradients(lambda q, k, v, s: reference(q, k, v, s), *arrays, segments)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # The comparison means something: without its window or its cap, or across segments, it fails.
    if window or softcap:
        plain = functools.partial(attend_rows, "blockwise", make_layout(MeshShape()), scale=0.25)
        without = plain(*arrays, segments)
        assert np.abs(np.asarray(without) - ours[0]).max() > 0.1
    across = reference(*arrays, jnp.ones_like(segments))
    assert window == 1 or np.abs(np.asarray(across) - ours[0])[:, :-3].max() > 0.1


def test_on_cpu_the_reference_is_chosen_and_the_reason_given():
    layout = make_layout(MeshShape(data=8))
    choice = choose_kernel("auto", layout)
    assert choice.kernel == "blockwise"
    assert str(choice) == (
        "our blockwise attention, because no other kernel is offered for cpu devices"
    )
    assert str(choose_kernel("blockwise", layout)).endswith("config.train.attention says so")


def test_a_kernel_that_cannot_run_here_is_an_error_that_says_what_can():
    with pytest.raises(ValueError, match="'splash', a kernel for TPUs; .* cpu devices: .*'auto'"):
        choose_kernel("splash", make_layout(MeshShape(data=8)))


def test_an_abstract_mesh_takes_what_it_is_told():
    layout = make_abstract_layout(MeshShape(data=8))
    assert choose_kernel("auto", layout).kernel == "blockwise"
    assert choose_kernel("splash", layout).kernel == "splash"


def test_an_unknown_kernel_is_an_error_that_lists_those_known():
    with pytest.raises(ValueError, match="train.attention .*'flash'.* 'auto', 'blockwise', 'spl"):
        make_config({"train": {"attention": "flash"}})


TINY = ModelConfig(
    num_layers=2,
    width=128,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    ffn_size=256,
    compute_dtype="bfloat16",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param("v5e:4x4", "splash", marks=need_compiler("v5e:4x4")),
        pytest.param("h100:2x8", "blockwise", marks=need_compiler("h100:2x8")),
    ],
)
def test_a_training_step_compiles_with_the_kernel_of_the_platform(name, kernel):
    layout = make_layout(MeshShape(data=2, fsdp=2, tensor=4), make_topology(name).devices())
    assert choose_kernel("auto", layout).kernel == kernel

    def program_text(attention: str) -> str:
        config = TrainConfig(attention=attention, remat=True)  # pyright: ignore[reportArgumentType]
        step = make_train_step(
            TINY, config, layout, vocab_size=256, temperature=1.0, objective="policy_gradient"
        )
        state = jax.tree.map(
            lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
            state_shapes(TINY, config, 256),
            state_shardings(TINY, config, 256, layout),
        )
        controls = jax.ShapeDtypeStruct((2,), jnp.float32)
        return step.lower(state, batch_shapes(8, 1000, layout), controls).compile().as_text()

    assert ("tpu_custom_call" in program_text("auto")) == (kernel == "splash")
    assert "tpu_custom_call" not in program_text("blockwise")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=need_compiler(n)) for n in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")]
)
# Head sizes of the families; lengths of one block, of many, and of a part.
@pytest.mark.parametrize(
    ("length", "head_size", "window", "softcap", "dtype"),
    [
        (4096, 128, None, 0.0, jnp.bfloat16),
        (4096, 64, None, 0.0, jnp.bfloat16),
        (2048, 256, 1024, 50.0, jnp.bfloat16),
        (40, 16, None, 0.0, jnp.float32),
    ],
)
def test_splash_compiles_for_every_tpu(name, length, head_size, window, softcap, dtype):
    layout = make_layout(SPLIT, make_topology(name).devices())

    def shape(letters: str, *sizes: int, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.activations(letters))

    side = shape("BKSH", 2, 2, length, head_size)
    arguments = (shape("BTKGH", 2, length, 2, 4, head_size), side, side)

    def total(query, key, value, segments):
        out = attend_rows(
            "splash",
            layout,
            query,
            key,
            value,
            segments,
            scale=head_size**-0.5,
            softcap=softcap,
            window=window,
        )
        return jnp.sum(out.astype(jnp.float32))

    grad = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    compiled = grad.lower(*arguments, shape("BT", 2, length, dtype=jnp.int32)).compile()
    # Temporaries are some arrays of the query's size, never the scores, 4 x length^2 bytes a head.
    query_bytes = length * 4 * head_size * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * query_bytes + 2**21
