# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per device: of compiled programs, of placed arrays, and what a device may hold."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from earl_jax.launch.start import host_memory_bytes
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.memory import (
    device_budget,
    is_out_of_memory,
    program_bytes,
    unless_out_of_memory,
)
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.shardings import resident_bytes


def test_program_bytes_are_arguments_and_results_with_a_donated_argument_once():
    # Per device, f32: a [128/8, 32] = 2048, b [32, 32] whole = 4096, a row [32] = 128.
    layout = make_layout(MeshShape(data=8))
    rows, whole = layout.activations("B."), layout.activations("..")
    a = jax.ShapeDtypeStruct((128, 32), jnp.float32, sharding=rows)
    b = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=whole)
    c = jax.ShapeDtypeStruct((1, 32), jnp.float32, sharding=whole)

    def needed(function, *arguments, **options):
        return program_bytes(
            jax.jit(function, out_shardings=rows, **options).lower(*arguments).compile()
        )

    assert needed(jnp.matmul, a, b) == 2048 + 4096 + 2048
    assert needed(jnp.add, a, c) == 2048 + 128 + 2048
    assert needed(jnp.add, a, c, donate_argnums=0) == 2048 + 128


def test_program_bytes_counts_temporaries():
    def through_a_big_square(x):
        square = jnp.sin(x[:, None] * x[None, :])
        return jnp.sort(square, axis=1) @ x

    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    needed = program_bytes(jax.jit(through_a_big_square).lower(x).compile())
    # The sorted square has to be somewhere: 512 * 512 * 4 bytes.
    assert 2**20 + 2 * 512 * 4 <= needed <= 4 * 2**20


def test_resident_bytes_by_hand_and_as_the_devices_report():
    layout = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
    tree = {
        "rows": jnp.zeros((8, 6), jnp.int32),  # over data and fsdp: 2 * 6 * 4 = 48
        "weight": jnp.zeros(
            (4, 2, 8), jnp.bfloat16
        ),  # D over fsdp, K over tensor: 2 * 1 * 8 * 2 = 32
        "count": jnp.zeros((), jnp.float32),  # everywhere: 4
        "bits": jnp.zeros((3,), bool),  # everywhere: 3
    }
    shardings = {
        "rows": layout.activations("BT"),
        "weight": layout.parameters("DKH"),
        "count": layout.parameters(""),
        "bits": layout.parameters("."),
    }
    assert resident_bytes(tree, shardings) == 48 + 32 + 4 + 3
    shapes = jax.eval_shape(lambda: tree)
    assert resident_bytes(shapes, shardings) == 48 + 32 + 4 + 3
    placed = jax.device_put(tree, shardings)
    on_first = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(placed)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert on_first == 87


def test_device_budget_is_the_setting_else_the_devices_limit_else_none():
    assert device_budget(12345) == 12345
    assert jax.local_devices()[0].memory_stats() is None, "the CPU reports no limit"
    assert device_budget(0) is None


def raises(message: str):
    def attempt():
        raise jax.errors.JaxRuntimeError(message)

    return attempt


def test_out_of_memory_is_recognised_by_the_status_code_alone():
    short = "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"
    assert is_out_of_memory(jax.errors.JaxRuntimeError(short))
    assert not is_out_of_memory(RuntimeError(short))
    assert unless_out_of_memory(raises(short)) is None
    assert unless_out_of_memory(lambda: jnp.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        unless_out_of_memory(raises("INTERNAL: a cable"))


@pytest.mark.parametrize(
    ("words", "is_short"),
    [
        ("Shared memory size limit exceeded: requested 1179648, available: 232448", False),
        ("XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 32", False),
        ("Ran out of memory in memory space smem. Used 1.01M of 1.00M smem.", False),
        ("XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 33", True),
        ("Out of memory while trying to allocate 2306867200 bytes.", True),
    ],
)
def test_a_kernel_that_takes_too_much_of_a_core_is_an_error(words, is_short):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {words}")
    assert is_out_of_memory(error) is is_short


def test_host_memory_is_limited_by_the_groups_of_the_process(tmp_path):
    """The least of the process's own group and those around it, by both versions of cgroups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory_bytes(tmp_path / "without") == physical

    def host(line: str, limits: dict[str, str]) -> int:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for path, text in {"proc/self/cgroup": line + "\n", **limits}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return host_memory_bytes(root)

    job, group = "0::/slurm/job_1/step_0", "sys/fs/cgroup"
    none, own = {f"{group}/slurm/job_1/step_0/memory.max": "max\n"}, f"{group}/memory.max"
    assert host(job, none) == physical
    assert host(job, none | {f"{group}/slurm/job_1/memory.max": "7000\n"}) == 7000
    # In a container its own group is the outermost one that is seen.
    assert host("0::/", {own: "6000\n"}) == 6000 == host("0::/docker/1", {own: "6000\n"})
    old = f"{group}/memory/docker/1/memory.limit_in_bytes"
    assert host("9:cpu:/x\n8:memory:/docker/1", {old: "5000\n"}) == 5000
    assert host("8:memory:/docker/1", {old: f"{2**63 - 4096}\n"}) == physical


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, {"XLA_CLIENT_MEM_FRACTION": ".5"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}),
    ],
)
def test_a_run_takes_the_share_of_a_gpu_that_the_planner_counts(given, expected):
    script = (
        "from earl_jax.launch.start import start_jax; start_jax('cpu', 1); import os; "
        "print({name: os.environ[name] for name in os.environ if 'CLIENT_MEM_FRACTION' in name})"
    )
    rest = {name: value for name, value in os.environ.items() if "MEM_FRACTION" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script], env=rest | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected)
    hardware = parse_topology("h100:1x8")
    assert hardware.usable_bytes == int(0.92 * hardware.memory_bytes)
