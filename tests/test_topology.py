# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Chips that are not here have names, facts and, where their compiler is, devices."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.selector.hardware import hardware_of
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.sharding.topology import chip_of, make_topology
from tests.support.compilers import need_compiler


@pytest.mark.parametrize(
    ("name", "chip", "grid", "num_devices"),
    [
        ("v5e:4x4", "v5e", (4, 4), 16),
        ("v5p:4x4x8", "v5p", (4, 4, 8), 128),
        ("v6e:16x16", "v6e", (16, 16), 256),
        ("tpu7x:2x4x4", "tpu7x", (2, 4, 4), 64),
        ("h100:16x8", "h100", (16, 8), 128),
    ],
)
def test_a_name_gives_chip_and_grid(name, chip, grid, num_devices):
    topology = make_topology(name)
    assert (topology.chip.name, topology.grid, topology.num_devices) == (chip, grid, num_devices)
    assert str(topology) == name


def test_a_chip_may_be_written_in_capitals():
    assert str(make_topology("H100:1x8")) == "h100:1x8"


@pytest.mark.parametrize(
    ("name", "number", "part"),
    [
        ("v5e:8x8", 4, "v5e:2x2"),
        ("v5e:8x8", 8, "v5e:2x4"),
        ("v5p:4x4x8", 4, "v5p:2x2x1"),
        ("tpu7x:2x4x4", 8, "tpu7x:2x2x1"),
    ],
)
def test_the_chips_of_a_host_are_a_slice_of_their_own(name, number, part):
    assert str(make_topology(name).part(number)) == part


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "v9:4x4",
            "'v9:4x4' is not known; those known are like 'v4:4x4x4', 'v5e:4x4', 'v5p:4x4x8'",
        ),
        ("", "'' is not known"),
        ("v5e", "2 sizes behind the colon, .*'v5e:4x4'"),
        ("v5e:4x4x4", "2 sizes"),
        ("v5p:4x4", "3 sizes"),
        ("v5e:4x0", "of at least 1"),
        ("v5e:4xfour", "2 sizes"),
        ("v5e:4x²", "2 sizes"),
        ("h100:128", r"'h100:16x8' \(hosts x GPUs of a host\)"),
    ],
)
def test_a_name_that_cannot_be_read_is_answered_with_those_that_can(name, words):
    with pytest.raises(ValueError, match=words):
        make_topology(name)


@pytest.mark.parametrize(
    ("name", "extra"), [("v5e:2x2", "tpu-topology"), ("h100:1x8", "gpu-topology")]
)
def test_a_missing_compiler_names_its_extra(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match=f"{name} needs .* `uv sync --extra {extra}`"):
        make_topology(name).devices()


@need_compiler("v5e:4x4")
def test_a_grid_that_no_host_makes_is_the_users_mistake():
    with pytest.raises(ValueError, match="topology v5e:3x3: its compiler says: .*2x2x1"):
        make_topology("v5e:3x3").devices()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=need_compiler(name))
        for name in ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2", "a100:2x8")
        + ("h100:2x8", "h200:2x8", "b200:2x8", "b300:2x8", "gb200:4x4")
    ],
)
def test_a_program_compiles_for_devices_that_are_not_here(name):
    topology = make_topology(name)
    devices = topology.devices()
    assert len(devices) == topology.num_devices == 16
    assert {chip_of(device.device_kind) for device in devices} == {topology.chip}
    hosts = {device.process_index for device in devices}
    assert len(hosts) == hardware_of(topology).num_hosts
    layout = make_layout(MeshShape(data=4, tensor=4), devices)
    shape = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=layout.activations("B."))
    program = jax.jit(lambda x: 2 * x, out_shardings=layout.activations("BK"))
    analysis = program.lower(shape).compile().memory_analysis()
    # Rows are cut in 4 and whole over `tensor`; the result is cut in 4 x 4.
    assert analysis.argument_size_in_bytes == 512 * 256 * 4 // 4
    assert analysis.output_size_in_bytes - 512 * 256 * 4 // 16 in range(1024)
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x)(np.arange(3)), [0, 2, 4])
