# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.chip on a CPU, with a tiny model: kernels near their reference, times."""

import dataclasses

import pytest

from benchmarks import chip
from benchmarks.chip import Point
from earl_jax.models.presets import PRESETS

SIZES = {"num_layers": 2, "width": 64, "num_heads": 4, "num_kv_heads": 2, "head_size": 16}
TINY = dataclasses.replace(PRESETS["qwen2.5-7b"], **SIZES, ffn_size=128)
LATENT = {"num_kv_heads": 4, "head_size": 24, "latent_size": 32, "rope_size": 16, "value_size": 16}
TINY_LATENT = dataclasses.replace(TINY, **LATENT, attention_bias=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "near"),
    [
        (Point("paged attention", "tiny-1", 3, 256, "int8, half idle"), ["distance"]),
        (Point("paged attention", "tiny-2", 3, 256), ["distance"]),
        (
            Point("attention of rows", "tiny-1", 1, 2048, "documents of 1,024"),
            ["distance", "gradient"],
        ),
        (Point("decode round", "tiny-1", 4, 256, "int8 weights and cache"), []),
        (Point("append round", "tiny-1", 4, 256, "chunks of 20"), []),
        (Point("update", "tiny-1", 2, 256, "offload"), []),
        (Point("kernels of an update", "tiny-1", 2, 256, "dots"), []),
    ],
    ids=str,
)
def test_a_point_is_measured_and_its_kernel_is_near_fp32(point, near, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny-1", TINY)
    monkeypatch.setitem(PRESETS, "tiny-2", TINY_LATENT)
    monkeypatch.setitem(chip.VOCAB_SIZES, "tiny", 512)
    # JAX has started; the limits of the chip take seconds to measure on a CPU.
    monkeypatch.setattr(chip, "start_jax", lambda *_: None)
    monkeypatch.setattr(chip, "copy_bytes_per_s", lambda: 1e10)
    monkeypatch.setattr(chip, "product_flops_per_s", lambda: 1e11)
    found = chip.measure(point)
    assert found["s"] > 0
    # Of bf16 numbers; those of other pages or documents would be off by about 1.
    assert all(0 < found[name] < 1e-2 for name in near)
    assert set(near) == {"distance", "gradient"} & set(found)
