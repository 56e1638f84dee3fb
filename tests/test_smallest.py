# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest hardware that would do for a model at a context length."""

import dataclasses
import functools

import pytest

from earl_jax.placement.problem import make_problem
from earl_jax.selector.hardware import hardware_of, parse_topology
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import (
    MOST_DEVICES,
    fits,
    make_schedule,
    smallest_hardware,
    smallest_words,
)
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.topology import CHIPS, Topology
from tests.support.settings import make_config

LENGTHS = (1024, 65_536)


@functools.cache
def qwen(topology: str = "h100:1x8") -> Problem:
    """Qwen2.5-7B's training in the usual way on these chips."""
    config = make_config(
        {
            "model": {"preset": "qwen2.5-7b", "compute_dtype": "bfloat16"},
            "rollout": {"num_slots": 64, "episodes_per_step": 64},
            "devices": {"platform": "gpu"},
        }
    )
    hardware = parse_topology(topology)
    return make_problem(config, config.model, 152_064, hardware, budget_bytes=hardware.usable_bytes)


@functools.cache
def smallest(length: int) -> list[tuple[str, int]]:
    return smallest_hardware(qwen(), length)


def with_chips(problem: Problem, chip: str, number: int) -> Problem:
    """The problem on so many chips of this kind."""
    kind = problem.hardware
    if chip != kind.chip:
        kind = hardware_of(Topology(chip=CHIPS[chip], grid=(1,) * CHIPS[chip].axes))
    hardware = kind.with_devices(number * CHIPS[chip].devices)
    return dataclasses.replace(problem, hardware=hardware, budget_bytes=kind.usable_bytes)


@pytest.mark.parametrize("length", LENGTHS)
def test_smallest_hardware_holds_the_run_and_half_of_it_does_not(length):
    """By hand: 7.6 billion parameters of 16 bytes each in fp32."""
    found = smallest(length)
    assert [chip for chip, _ in found][0] == "h100"
    for chip, number in found:
        problem = with_chips(qwen(), chip, number)
        assert problem.hardware.num_devices * problem.budget_bytes > 16 * 7.6e9
        assert fits(problem, length)
        assert number == 1 or not fits(with_chips(qwen(), chip, number // 2), length)
    assert make_schedule(with_chips(qwen(), *found[0]), ThroughputTable(), [length])[0].decision


def test_no_smaller_number_holds_it_either():
    (chip, number), *_ = smallest(1024)
    assert number > 2
    assert not any(fits(with_chips(qwen(), chip, fewer), 1024) for fewer in range(1, number))


def test_longer_contexts_and_smaller_chips_need_no_less():
    each = [dict(smallest(length)) for length in LENGTHS]
    for shorter, longer in zip(each, each[1:], strict=False):
        # A kind of chip that is not in the list would not do in any number.
        assert longer.keys() <= shorter.keys()
        assert all(longer[chip] >= shorter[chip] for chip in longer)
    assert each[0]["v5e"] >= each[0]["v5p"]
    assert each[0]["h100"] >= each[0]["h200"] >= each[0]["b200"]
    assert all(number <= MOST_DEVICES for found in each for number in found.values())


def test_meshes_that_the_config_names_do_not_count():
    named = dataclasses.replace(qwen(), train_meshes_named=("data=8",), rollout_meshes_named=())
    assert smallest_hardware(named, 1024) == smallest(1024)


def test_words_name_the_chips_or_say_nothing():
    (chip, number), *_ = smallest(1024)
    assert smallest_words(smallest(1024), 1024).startswith(
        "By computed bytes, at a context of 1024 tokens, the smallest hardware that would do "
        f"(powers of two): {number} {chip}, "
    )
    assert smallest_words([], 1024) == ""
