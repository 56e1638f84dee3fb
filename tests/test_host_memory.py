# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What lies in a host's memory, by hand arithmetic."""

import pytest

from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.host_memory import host_bytes, host_obstacle, waiting_bytes
from earl_jax.sharding.topology import CHIPS

GB = 10**9
POD = parse_topology("h100:16x8")


def test_rows_that_do_not_run_wait_with_all_of_their_cache():
    assert waiting_bytes(16, 14, 10) == 20
    assert waiting_bytes(14, 14, 10) == waiting_bytes(3, 14, 10) == 0
    assert waiting_bytes(16, 0, 10) == 160


def test_every_device_of_a_host_leaves_its_bytes_there():
    assert host_bytes(POD, 3 * GB) == 8 * 3 * GB
    assert host_bytes(POD, 3 * GB, parked_bytes=5 * GB) == 29 * GB
    # Four GPUs are four on one host, and twelve are eight on the fuller of two.
    assert host_bytes(POD.with_devices(4), 3 * GB) == 12 * GB
    assert host_bytes(POD.with_devices(12), 3 * GB) == 24 * GB


def test_a_host_holds_what_it_has_and_not_a_byte_more():
    """An eighth of 2 TB for each of eight GPUs."""
    assert host_obstacle(POD, 250 * GB) == ""
    words = "needs 1862.65 GiB of its hosts' memory, of which each has 1862.65 GiB"
    assert host_obstacle(POD, 250 * GB + 1) == words
    assert host_obstacle(POD, 250 * GB, parked_bytes=1) == words
    assert host_obstacle(POD, 0, parked_bytes=2000 * GB) == ""
    assert host_obstacle(POD, 0, parked_bytes=2000 * GB + 1) == words
    # Four alone on a host have twice as much each.
    assert host_obstacle(POD.with_devices(4), 500 * GB) == ""
    assert host_obstacle(POD.with_devices(4), 500 * GB + 1) != ""


@pytest.mark.parametrize(
    ("topology", "gigabytes"),
    [
        ("v5e:16x16", 192),
        ("v5e:1x1", 48),
        ("v5p:4x4x8", 448),
        ("v6e:4x4", 720),
        ("v6e:1x2", 360),
        ("h100:16x8", 2000),
        ("h200:1x4", 1000),
        ("b200:1x8", 2000),
    ],
)
def test_a_host_has_memory_by_its_number_of_devices(topology, gigabytes):
    assert parse_topology(topology).host_memory_bytes == gigabytes * GB


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_what_a_chip_holds_its_host_holds_too(chip):
    """So the optimizer's moments may leave any chip, unless much else is on its host."""
    hardware = parse_topology(chip.example)
    assert host_obstacle(hardware, hardware.memory_bytes) == ""
    rest = hardware.host_memory_bytes - host_bytes(hardware, hardware.usable_bytes)
    assert host_obstacle(hardware, hardware.usable_bytes, parked_bytes=rest) == ""
    assert host_obstacle(hardware, hardware.usable_bytes, parked_bytes=rest + 1) != ""
