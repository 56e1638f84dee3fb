# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel is the reference, forward and backward; which one runs is chosen and said."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.models.attention import rows_triton, splash
from earl_jax.models.attention.kernels import attend_rows, choose_kernel, choose_pages_kernel
from earl_jax.models.config import ModelConfig
from earl_jax.models.decoder import forward_rows
from earl_jax.models.parameters import init_parameters, parameter_specs
from earl_jax.placement.problem import workload
from earl_jax.run.build import build_run
from earl_jax.selector.hardware import parse_topology
from earl_jax.sharding.layout import TRAINING_ROWS, Layout, MeshShape, make_layout
from earl_jax.sharding.topology import make_topology
from earl_jax.train.config import TrainConfig
from earl_jax.train.scoring import score_batch
from earl_jax.train.state import state_shapes
from earl_jax.train.step import batch_shapes
from tests.support.compilers import has_tokamax, need_compiler, need_tokamax
from tests.support.rows import HEAD_SIZE, make_rows, out_and_gradients
from tests.support.settings import make_config
from tests.support.updates import lowered_update

SPLIT = MeshShape(data=2, tensor=2)
TINY = ModelConfig(
    num_layers=2,
    width=128,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    ffn_size=256,
    compute_dtype="bfloat16",
)

# More than a block.
LONG = 129


def default_device_of(layout: Layout):
    """For what is compiled for devices that are not here."""
    return jax.default_device(layout.mesh.devices.flat[0])  # pyright: ignore


# Lengths: below a block, no multiple of one, two blocks of 512 with padding.
CASES = [(40, None, 0.0), (200, 5, 1.5), (600, 300, 0.0)]
KERNELS = ["splash", "triton", pytest.param("tokamax", marks=need_tokamax)]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("length", "window", "softcap"), CASES)
def test_a_kernel_is_the_reference_forward_and_backward(
    kernel, length, window, softcap, monkeypatch
):
    """On a mesh that cuts rows and heads, against the reference on one device.

    In blocks of 128, of which some have no document in common.
    """
    monkeypatch.setattr(splash, "BLOCK", 128)
    arrays, segments = make_rows(length)
    settings = {"scale": HEAD_SIZE**-0.5, "softcap": softcap, "window": window}
    attend = functools.partial(attend_rows, kernel, make_layout(SPLIT), **settings)
    reference = functools.partial(attend_rows, "blockwise", make_layout(MeshShape()), **settings)
    # tokamax's reference counts on what conftest.py forbids.
    with jax.numpy_rank_promotion("allow" if kernel == "tokamax" else "raise"):
        ours = out_and_gradients(attend, *arrays, segments=segments)
    theirs = out_and_gradients(reference, *arrays, segments=segments)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # The comparison means something: without its window or its cap, or across segments, it fails.
    if window or softcap:
        plain = functools.partial(attend_rows, "blockwise", make_layout(MeshShape()), scale=0.25)
        without = plain(*arrays, segments)
        assert np.abs(np.asarray(without) - ours[0]).max() > 0.1
    across = reference(*arrays, jnp.ones_like(segments))
    assert np.abs(np.asarray(across) - ours[0])[:, :-3].max() > 0.1


def test_splash_visits_blocks_with_a_document_in_common():
    """Documents of 100, 256 and 60 tokens in four blocks of 128, and padding in a fifth."""
    segments = jnp.asarray(np.repeat([7, 2, 3, 0], [100, 256, 60, 224]), jnp.int32)
    causal = splash._kernel(2, 640, 128, 0.0, None, True)
    own = splash._leave_out_other_documents(causal, segments, 128)
    visited = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        # Of the third document and the padding; the fifth block is padding alone.
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    infos = own.fwd_mask_info, own.dq_mask_info, own.dkv_mask_info
    for info in infos:
        np.testing.assert_array_equal(info.block_mask[0] > 0, np.array(visited) > 0)
    # What is fetched is the next block that is visited, of keys, and backward also of queries.
    fetched = [[0, 0, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 2, 2, 2], [2, 2, 2, 3, 3], [4, 4, 4, 4, 4]]
    for info in infos[:2]:
        np.testing.assert_array_equal(info.data_next[0], fetched)
    fetched = [[0, 1, 2, 3, 4], [1, 1, 2, 3, 4], [2, 2, 2, 3, 4], [2, 2, 3, 3, 4], [2, 2, 3, 3, 4]]
    np.testing.assert_array_equal(infos[2].data_next[0], fetched)

    # With a window of 128 a block has at most one before it, and the grid is as narrow.
    windowed = splash._kernel(2, 640, 128, 0.0, 128, True)
    own = splash._leave_out_other_documents(windowed, jnp.ones(640, jnp.int32), 128)
    np.testing.assert_array_equal(own.fwd_mask_info.block_mask, windowed.fwd_mask_info.block_mask)
    assert own.fwd_mask_info.block_mask.shape == (1, 5, 2)
    own = splash._leave_out_other_documents(windowed, jnp.repeat(jnp.arange(1, 6), 128), 128)
    assert np.asarray(own.fwd_mask_info.block_mask > 0).sum() == 5
    assert np.asarray(own.dkv_mask_info.block_mask > 0).sum() == 5


def test_triton_reads_blocks_with_a_document_in_common():
    """The second of two documents is not a number, and touches none of the first."""
    ids = jnp.asarray(np.repeat([[4, 9]], [256, 384], axis=1), jnp.int32)
    is_second = ids > 4
    arrays, _ = make_rows(640)
    query, key, value = (array[:1] for array in arrays)
    query = jnp.where(is_second[:, :, None, None, None], jnp.nan, query)
    key, value = (jnp.where(is_second[:, None, :, None], jnp.nan, side) for side in (key, value))
    attend = functools.partial(rows_triton.triton_rows, make_layout(MeshShape()), scale=0.25)
    out, pullback = jax.vjp(lambda *rows: attend(*rows, ids), query, key, value)
    for array, axis in zip((out, *pullback(query)), (1, 1, 2, 2), strict=True):
        first, second = jnp.split(array, [256], axis=axis)
        assert np.all(np.isfinite(first)) and np.all(np.isnan(second))


# Some layers look over all, as in Gemma 3; scores are capped as in Gemma 2.
WINDOWED = ModelConfig(num_layers=2, windows=(5, 0), window_rope_theta=100.0, attention_softcap=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_model_whose_layers_differ_in_their_windows_is_the_same_by_every_kernel(kernel):
    layout = make_layout(SPLIT)
    specs = parameter_specs(WINDOWED, 64)
    params = init_parameters(specs, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 40), 0, 64)
    segments = jnp.asarray(np.repeat([[1, 2], [1, 0]], [25, 15], axis=1), jnp.int32)

    def loss(params, kernel):
        hidden = forward_rows(
            WINDOWED, layout, params, tokens, segments, remat="full", kernel=kernel
        )
        return jnp.sum(jnp.where(segments[..., None] > 0, jnp.sin(hidden), 0.0))

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    with jax.numpy_rank_promotion("allow" if kernel == "tokamax" else "raise"):
        ours, theirs = grad(params, kernel), grad(params, "blockwise")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), ours, theirs)


def test_on_cpu_the_reference_is_chosen_and_the_reason_given():
    layout = make_layout(MeshShape(data=8))
    choice = choose_kernel("auto", layout, TINY, LONG)
    assert choice.kernel == "blockwise"
    assert str(choice) == (
        "our blockwise attention, because there is no other kernel for cpu devices"
    )
    notes = str(choose_kernel("blockwise", layout, TINY, LONG))
    assert notes.endswith("config.train.attention says so")


@pytest.mark.parametrize(
    ("kernel", "chips"), [("splash", "TPUs"), ("tokamax", "GPUs"), ("triton", "GPUs")]
)
def test_a_kernel_that_cannot_run_here_is_an_error_that_says_what_can(kernel, chips):
    with pytest.raises(ValueError, match=f"'{kernel}', .* for {chips} .* cpu devices: .*'auto'"):
        choose_kernel(kernel, make_layout(MeshShape(data=8)), TINY, LONG)


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "splash"), ("gpu", "triton")])
def test_rows_that_are_cut_get_a_kernel_that_takes_parts_of_them(platform, kernel, monkeypatch):
    monkeypatch.setattr(Layout, "platform", platform)
    layout = make_layout(MeshShape(data=2, context=4))
    assert choose_kernel("auto", layout, TINY, LONG).kernel == kernel
    with pytest.raises(
        ValueError, match="'tokamax', but its kernel takes whole rows and context=4"
    ):
        choose_kernel("tokamax", layout, TINY, LONG)


@pytest.fixture
def on_tpus(monkeypatch):
    """Layouts say that their devices are TPUs: enough to choose by, and to trace."""
    monkeypatch.setattr(Layout, "platform", "tpu")


def test_short_rows_get_the_reference_unless_the_setting_says_otherwise(on_tpus):
    layout = make_layout(MeshShape(data=8))
    for length, kernel in ((1, "blockwise"), (128, "blockwise"), (129, "splash")):
        choice = choose_kernel("auto", layout, TINY, length)
        assert choice.kernel == kernel
        assert ("128 tokens are one block" in choice.reason) == (kernel == "blockwise")
        assert choose_kernel("splash", layout, TINY, length).kernel == "splash"
        assert choose_kernel("blockwise", layout, TINY, length).kernel == "blockwise"


@pytest.mark.parametrize("length", [128, 129])
def test_each_length_of_a_batch_is_traced_with_its_own_kernel(on_tpus, length):
    layout = make_layout(MeshShape(data=2), jax.devices()[:2])
    config = TrainConfig()
    score = functools.partial(score_batch, TINY, config, layout, 1.0)
    params = state_shapes(TINY, config, 64).params
    traced = str(jax.make_jaxpr(score)(params, batch_shapes(2, length, layout)))
    assert ("pallas_call" in traced) == (length > 128)


@pytest.mark.parametrize(
    ("given", "kernels"),
    [
        ({}, ["blockwise", "splash"]),
        ({"context_buckets": (256,)}, ["splash"]),
        ({"max_episode_tokens": 128}, ["blockwise"]),
    ],
)
def test_a_run_says_once_what_it_may_choose(on_tpus, given, kernels):
    """Rows outgrow the buckets, but no limit."""
    world = build_run(make_config({"rollout": given}))
    assert [choice.kernel for choice in world.attention] == kernels
    notes = [note for note in world.notes if note.startswith("attention in training: ")]
    assert notes == [f"attention in training: {choice}" for choice in world.attention]
    notes = [note for note in world.notes if note.startswith("attention in the rollout: ")]
    words = "our attention over pages, because .*; on tpu devices .* pages of all rows"
    assert len(notes) == 1 and re.search(words, notes[0])


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("cpu", "for each block of 128 rows, because its kernel is for GPUs .* cpu devices$"),
        ("gpu", "for each block of 128 rows, because tokamax .*; expect slow updates"),
        ("tpu", "jax.lax.ragged_dot, a kernel on TPUs$"),
    ],
)
def test_a_run_says_what_multiplies_the_rows_of_experts(monkeypatch, platform, words):
    monkeypatch.setattr(Layout, "platform", platform)
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32}
    for model, count in (({}, 0), (experts, 1)):
        notes = build_run(make_config({"model": model})).notes
        notes = [note for note in notes if note.startswith("products of experts: ")]
        assert len(notes) == count and all(re.search(words, note) for note in notes)


def test_gpus_read_pages_with_our_kernel_where_it_runs_and_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(Layout, "platform", "gpu")
    layout = make_layout(MeshShape(data=2, tensor=4))
    choose = functools.partial(choose_pages_kernel, "auto", layout, TINY)
    assert choose(16) == choose(128) == ("triton", "the devices are gpu devices")
    assert choose_pages_kernel("blockwise", layout, TINY, 16).kernel == "blockwise"
    odd = dataclasses.replace(TINY, head_size=80)
    cut = make_layout(MeshShape(data=4, context=2))
    assert choose_pages_kernel("auto", cut, TINY, 32).kernel == "triton"
    for setting in ("auto", "triton"):
        for place, model, page_size, words in (
            (layout, TINY, 8, "at least 16, and config.rollout.page_size is 8"),
            (layout, TINY, 48, "power of two .* config.rollout.page_size is 48"),
            (layout, odd, 16, "config.model.head_size is 80"),
            (cut, TINY, 16, "at least 32 with context=2, and config.rollout.page_size is 16"),
        ):
            if setting == "auto":
                choice = choose_pages_kernel(setting, place, model, page_size)
                assert choice.kernel == "blockwise" and re.search(words, choice.reason)
                continue
            with pytest.raises(ValueError, match=f"rollout.attention is 'triton', but .*{words}"):
                choose_pages_kernel(setting, place, model, page_size)


def test_tpus_read_pages_with_our_kernel_where_pages_and_heads_fill_tiles(on_tpus):
    layout = make_layout(MeshShape(data=2, tensor=2, context=2))
    model = dataclasses.replace(TINY, head_size=256)
    assert choose_pages_kernel("auto", layout, model, 256) == (
        "pallas_tpu",
        "the devices are tpu devices",
    )
    assert choose_pages_kernel("pallas_tpu", layout, model, 256).kernel == "pallas_tpu"
    for other, page_size, words in (
        (model, 128, "multiple of 256 with context=2, and config.rollout.page_size is 128"),
        (dataclasses.replace(TINY, head_size=64), 256, "128, and config.model.head_size is 64"),
    ):
        choice = choose_pages_kernel("auto", layout, other, page_size)
        assert choice.kernel == "blockwise" and re.search(words, choice.reason)
        with pytest.raises(ValueError, match=f"attention is 'pallas_tpu', but .*{words}"):
            choose_pages_kernel("pallas_tpu", layout, other, page_size)
    with pytest.raises(ValueError, match="is 'triton', but its kernel is for GPUs .* tpu devices"):
        choose_pages_kernel("triton", layout, model, 256)


def test_the_selector_knows_on_which_meshes_pages_are_read_in_place():
    """A kernel for GPUs reads parts of 16 tokens and more; that for TPUs of 128 and more."""
    model = dataclasses.replace(TINY, head_size=128)

    def contexts(topology: str, **rollout) -> tuple[int, ...]:
        config = make_config({"rollout": {"page_size": 512, **rollout}})
        return workload(config, model, parse_topology(topology)).in_place_contexts

    assert contexts("h100:1x8") == (1, 2, 4, 8) and contexts("v5e:2x4") == (1, 2, 4)
    assert contexts("h100:1x8", page_size=64) == (1, 2, 4)
    assert contexts("v5e:2x4", attention="blockwise") == contexts("cpu:8") == ()
    assert contexts("v5e:2x4", page_size=64) == ()


def test_cpus_read_pages_with_the_reference():
    layout = make_layout(MeshShape(data=8))
    choice = choose_pages_kernel("auto", layout, TINY, 16)
    assert choice == ("blockwise", "there is no other kernel for cpu devices")
    with pytest.raises(ValueError, match="'triton', but .* these are cpu devices"):
        choose_pages_kernel("triton", layout, TINY, 16)


@need_compiler("h100:1x8")
@pytest.mark.parametrize(
    ("found", "words"), [(None, "not installed .*--extra tokamax"), ("0.0.12", "tokamax 0.0.12 is")]
)
def test_gpus_without_the_known_tokamax_get_our_kernels(monkeypatch, found, words):
    layout = make_layout(MeshShape(data=8), make_topology("h100:1x8").devices())
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "tokamax" else find(name)
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    choice = choose_kernel("auto", layout, TINY, LONG)
    assert choice.kernel == "triton" and re.search(words, choice.reason)
    with pytest.raises(ValueError, match=f"attention is 'tokamax', but .*{words}"):
        choose_kernel("tokamax", layout, TINY, LONG)


@need_compiler("h100:1x8")
@need_tokamax
def test_gpus_with_tokamax_use_it_for_what_it_can_compute():
    layout = make_layout(MeshShape(data=8), make_topology("h100:1x8").devices())
    with default_device_of(layout):
        assert choose_kernel("auto", layout, TINY, LONG) == (
            "tokamax",
            "the devices are gpu devices",
        )
        choice = choose_kernel("auto", layout, WINDOWED, LONG)
    assert choice.kernel == "blockwise" and "compute_dtype is 'float32'" in choice.reason
    choice = choose_kernel("auto", layout, TINY, LONG)
    assert choice.kernel == "triton" and "JAX's default device, which is not" in choice.reason


@need_compiler("a100:1x8")
def test_our_kernels_over_rows_say_what_they_cannot_compute():
    layout = make_layout(MeshShape(data=8), make_topology("a100:1x8").devices())
    assert choose_kernel("triton", layout, TINY, LONG).kernel == "triton"
    wide = dataclasses.replace(TINY, head_size=320)
    for model, words in ((WINDOWED, "compute_dtype is 'float32'"), (wide, "head_size is more")):
        assert choose_kernel("auto", layout, model, LONG).kernel == "blockwise"
        with pytest.raises(ValueError, match=f"attention is 'triton', but .*{words}"):
            choose_kernel("triton", layout, model, LONG)


GPU_KERNEL = "tokamax" if has_tokamax else "triton"
CUSTOM_CALLS = {"splash": "tpu_custom_call", "tokamax": "mosaic_gpu", "triton": "xla.gpu.triton"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param("v5e:4x4", "splash", marks=need_compiler("v5e:4x4")),
        pytest.param("h100:2x8", GPU_KERNEL, marks=need_compiler("h100:2x8")),
    ],
)
def test_a_training_step_compiles_with_the_kernel_of_the_platform(name, kernel):
    """The layers are one with a window and one without."""
    layout = make_layout(MeshShape(data=2, fsdp=2, tensor=4), make_topology(name).devices())
    model = dataclasses.replace(TINY, windows=(100, 0))

    def program_text(attention: str) -> str:
        config = TrainConfig(attention=attention, remat="full")  # pyright: ignore[reportArgumentType]
        with default_device_of(layout):
            assert (
                attention != "auto" or choose_kernel("auto", layout, model, 1000).kernel == kernel
            )
        return lowered_update(model, config, layout, 256, (8, 1000)).compile().as_text()

    def calls(text: str) -> set[str]:
        return {kernel for kernel, target in CUSTOM_CALLS.items() if target in text}

    assert calls(program_text("auto")) == {kernel}
    assert not calls(program_text("blockwise"))


# Head sizes of the families; lengths of one block, of many, and of a part.
SIZES = [
    (4096, 128, None, 0.0),
    (4000, 64, None, 0.0),
    (2048, 256, 1024, 50.0),
    (40, 16, None, 0.0),
]
GPU_MARKS = [need_compiler("h100:1x4"), need_tokamax]
COMPILED = [
    *(pytest.param("v5e:2x2", "splash", s, marks=need_compiler("v5e:2x2")) for s in SIZES),
    *(
        pytest.param(n, "splash", SIZES[2], marks=need_compiler(n))
        for n in ("v5p:2x2x1", "v6e:2x2")
    ),
    # 64 x 64 blocks, whose tables XLA could give to a sparse core.
    pytest.param("v5p:2x2x1", "splash", (32768, 128, None, 0.0), marks=need_compiler("v5p:2x2x1")),
    *(pytest.param("h100:1x4", "tokamax", s, marks=GPU_MARKS) for s in SIZES),
    *(pytest.param("h100:1x4", "triton", s, marks=GPU_MARKS[:1]) for s in SIZES),
    pytest.param("a100:1x4", "triton", SIZES[2], marks=need_compiler("a100:1x4")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param("h100:1x8", "triton", marks=need_compiler("h100:1x8")),
        pytest.param("v5e:2x4", "splash", marks=need_compiler("v5e:2x4")),
        pytest.param("v5p:2x2x1", "splash", marks=need_compiler("v5p:2x2x1")),
    ],
)
def test_a_training_step_of_cut_rows_compiles_with_a_kernel(name, kernel):
    """Ours take less memory than arithmetic in jax, which makes the scores of blocks.

    Splash fills heads up to 128: of heads of 64 it takes more.
    """
    devices = make_topology(name).devices()
    mesh = MeshShape(fsdp=len(devices) // 4, context=4)
    layout = make_layout(mesh, devices, row_axes=TRAINING_ROWS)
    model = dataclasses.replace(TINY, windows=(1000, 0))
    programs = {}
    for attention in ("auto", "blockwise"):
        config = TrainConfig(attention=attention, remat="full")  # pyright: ignore[reportArgumentType]
        with default_device_of(layout):
            programs[attention] = lowered_update(model, config, layout, 256, (2, 16384)).compile()
    called = [CUSTOM_CALLS[kernel] in each.as_text() for each in programs.values()]
    assert called == [True, False]
    ours, plain = (each.memory_analysis().temp_size_in_bytes for each in programs.values())
    assert kernel == "splash" or ours < plain


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel", "sizes"), COMPILED)
def test_a_kernel_compiles_for_its_chips_and_makes_no_scores(name, kernel, sizes):
    """With attention sinks too, where a kernel has them."""
    length, head_size, window, softcap = sizes
    layout = make_layout(SPLIT, make_topology(name).devices())

    def shape(letters: str, *sizes: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.activations(letters))

    side = shape("BKSH", 2, 2, length, head_size)
    arguments = (shape("BTKGH", 2, length, 2, 4, head_size), side, side)

    def total(query, key, value, sinks, segments):
        out = attend_rows(
            kernel,
            layout,
            query,
            key,
            value,
            segments,
            scale=head_size**-0.5,
            softcap=softcap,
            window=window,
            sinks_KG=sinks,
        )
        return jnp.sum(out.astype(jnp.float32))

    has_sinks = kernel != "tokamax" and not softcap
    sinks = shape("KG", 2, 4, dtype=jnp.float32) if has_sinks else None
    grad = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3) if has_sinks else (0, 1, 2)))
    with default_device_of(layout):
        lowered = grad.lower(*arguments, sinks, shape("BT", 2, length, dtype=jnp.int32))
    compiled = lowered.compile()
    assert CUSTOM_CALLS[kernel] in compiled.as_text()
    # Temporaries are some arrays of the query's size, never the scores, 4 x length^2 bytes a head.
    query_bytes = length * 4 * head_size * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * query_bytes + 2**21
