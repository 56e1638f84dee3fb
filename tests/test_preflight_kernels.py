# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""`main --check` compares attention kernels with the reference, and finds one that is wrong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from earl_jax.models.attention import kernels as attention_kernels
from earl_jax.models.attention import paged_triton
from earl_jax.models.attention.kernels import Choice, PagesChoice
from earl_jax.models.config import ModelConfig
from earl_jax.preflight import kernels
from earl_jax.preflight.kernels import misfits, pages_off, rows_off
from earl_jax.run.build import build_run
from earl_jax.run.saved_position import new_placement
from earl_jax.sharding.layout import ROLLOUT_ROWS, TRAINING_ROWS, MeshShape, make_layout
from tests.support.settings import make_config

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "width": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
}
BF16 = ModelConfig(**MODEL, compute_dtype="bfloat16")
WINDOWS = ModelConfig(
    **MODEL, compute_dtype="bfloat16", windows=(9, 0), attention_sinks=True, attention_softcap=8.0
)


def layout_of(mesh: str, row_axes):
    shape = MeshShape.parse(mesh)
    return make_layout(shape, jax.devices()[: shape.num_devices], row_axes=row_axes)


@pytest.mark.parametrize(
    ("mesh", "model", "kernel"),
    [
        ("data=2,tensor=2", WINDOWS, "triton"),
        pytest.param("context=2", BF16, "triton", marks=pytest.mark.slow),
        pytest.param("data=2,context=2", WINDOWS, "splash", marks=pytest.mark.slow),
        pytest.param("data=1,fsdp=2", BF16, "splash", marks=pytest.mark.slow),
    ],
)
def test_kernels_over_rows_are_off_by_the_rounding_of_their_type(mesh, model, kernel):
    """On each layout, forward and backward, in interpret mode."""
    off = rows_off(layout_of(mesh, TRAINING_ROWS), model, kernel, 150)
    assert 1e-4 < off < 0.01


@pytest.mark.parametrize("kernel", ["triton", "pallas_tpu"])
@pytest.mark.parametrize(
    ("model", "kv_dtype", "length"),
    [
        (WINDOWS, "int8", 1),
        pytest.param(BF16, "compute", 1, marks=pytest.mark.slow),
        pytest.param(WINDOWS, "compute", 16, marks=pytest.mark.slow),
    ],
)
def test_kernels_over_pages_are_off_by_rounding(monkeypatch, kernel, model, kv_dtype, length):
    monkeypatch.setattr(kernels, "_MOST_TOKENS", 64)
    layout = layout_of("data=1,context=2,tensor=2", ROLLOUT_ROWS)
    assert pages_off(layout, model, kernel, 32, kv_dtype, length) < 0.01


@pytest.mark.slow
def test_latents_are_compared_too(monkeypatch):
    """Their rows have smaller values than keys, their pages one row for all heads."""
    monkeypatch.setattr(kernels, "_MOST_TOKENS", 64)
    model = ModelConfig(
        num_layers=1,
        width=32,
        num_heads=4,
        num_kv_heads=4,
        head_size=24,
        latent_size=32,
        rope_size=8,
        value_size=16,
        compute_dtype="bfloat16",
    )
    layout = layout_of("data=2,tensor=2", TRAINING_ROWS)
    assert 1e-4 < rows_off(layout, model, "triton", 100) < 0.01
    assert pages_off(layout, model, "triton", 32, "compute", 1) < 0.01


def blind_to_documents(layout, query, key, value, segments, **settings):
    """Attention that reads other documents too."""
    one = jnp.minimum(segments, 1)
    return attention_kernels.attend_packed_rows(layout, query, key, value, one, **settings)


def without_gradient_of_keys(layout, query, key, value, segments, **settings):
    """Attention that is right forward."""
    key = jax.lax.stop_gradient(key)
    return attention_kernels.attend_packed_rows(layout, query, key, value, segments, **settings)


def does_not_start(*arrays, **settings):
    raise jax.errors.JaxRuntimeError("INTERNAL: shared memory\nof the device")


@pytest.mark.parametrize("wrong", [blind_to_documents, without_gradient_of_keys])
def test_a_kernel_over_rows_that_is_wrong_is_far_off(monkeypatch, wrong):
    monkeypatch.setitem(attention_kernels._ATTEND, "triton", wrong)
    assert rows_off(layout_of("data=2,tensor=2", TRAINING_ROWS), BF16, "triton", 150) > 0.2


def test_a_kernel_over_pages_that_reads_a_token_too_few_is_far_off(monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_TOKENS", 64)
    attend = paged_triton.attend

    def wrong(query, layer, table, cached, counts, **settings):
        return attend(query, layer, table, cached - 1, counts, **settings)

    monkeypatch.setattr(paged_triton, "attend", wrong)
    layout = layout_of("data=1", ROLLOUT_ROWS)
    assert pages_off(layout, BF16, "triton", 32, "compute", 1) > 0.1


def test_the_check_names_the_host_the_kernel_and_the_way_out(monkeypatch):
    """Platforms choose kernels: here the choice is given, and one of them does not start."""
    monkeypatch.setattr(kernels, "_MOST_TOKENS", 64)
    run = build_run(make_config({"model": MODEL | {"compute_dtype": "bfloat16"}}))
    placement = new_placement(run, print)
    placement.choose_step(24, None)
    assert misfits(placement) == ([], [])
    monkeypatch.setattr(
        kernels, "choose_pages_kernel", lambda *given: PagesChoice("triton", "it is a test")
    )
    problems, lines = misfits(placement)
    assert not problems and [line.split(":")[0] for line in lines] == ["attention of rollout"] * 2
    monkeypatch.setattr(kernels, "choose_kernel", lambda *given: Choice("triton", "it is a test"))
    found = functools.partial(misfits, placement)
    monkeypatch.setitem(attention_kernels._ATTEND, "triton", blind_to_documents)
    (problem,), lines = found()
    (host,) = run.cluster.hosts
    assert problem.startswith(f"attention of train on {host}: our Pallas kernels over rows")
    assert problem.endswith("% off the reference; set config.train.attention to 'blockwise'")
    assert len(lines) == 3
    monkeypatch.setitem(attention_kernels._ATTEND, "triton", does_not_start)
    (problem,), _ = found()
    assert ": does not run: INTERNAL: shared memory; set config.train.attention" in problem
