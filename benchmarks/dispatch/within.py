# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Within one process: every rollout mesh to every training mesh, beside a plain copy.

The copy is of the same bytes, spread evenly: each device sends its share to the next one, as
`jax.device_put` does from one device to one other. Where there is one device, it is a copy on it.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from earl_jax.selector.candidates import rollout_candidates, train_candidates
from earl_jax.sharding.layout import TRAINING_ROWS, make_layout
from earl_jax.sharding.ranges import shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfer

COLUMNS = (
    "rollout",
    "trainer",
    "MiB",
    "route",
    "moved MiB",
    "reshard ms",
    "GB/s",
    "copy ms",
    "of a copy's speed",
    "device_put ms",
)
PLACES = 1024


def measure(mebibytes: tuple[float, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each pair of meshes and size of array."""
    devices = jax.devices()
    for before in rollout_candidates(len(devices), (), lambda shape: None):
        for after in train_candidates(len(devices), (), lambda shape: None):
            source = make_layout(before, devices).activations("NS")
            target = make_layout(after, devices, row_axes=TRAINING_ROWS).activations("NS")
            for size in mebibytes:
                rows = max(len(devices), round(size * 2**20 / (4 * PLACES)))
                rows -= rows % len(devices)
                array = jax.device_put(jnp.ones((rows, PLACES), jnp.float32), source)
                sides = [shard_ranges(side, array.shape) for side in (source, target)]
                plan = plan_transfer(array.shape, 4, *sides)
                if not plan.moved_bytes:
                    continue
                ours_s, copy_s, put_s = seconds(
                    functools.partial(reshard, array, target),
                    copy_of(plan.moved_bytes),
                    functools.partial(_put_fresh, array, target),
                    repeats=repeats,
                )
                cells = (
                    str(before),
                    str(after),
                    array.nbytes / 2**20,
                    plan.route,
                    plan.moved_bytes / 2**20,
                    1e3 * ours_s,
                    plan.moved_bytes / ours_s / 1e9,
                    1e3 * copy_s,
                    copy_s / ours_s,
                    1e3 * put_s,
                )
                yield dict(zip(COLUMNS, cells, strict=True))


def _put_fresh(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A host value that is kept would be read only once."""
    return jax.device_put(array + 0, target)


def copy_of(num_bytes: int) -> Callable[[], Any]:
    """A copy of so many bytes, spread evenly: each device sends its share to the next one."""
    devices = jax.devices()
    share = max(1, num_bytes // len(devices))
    parts = [jnp.ones(share, jnp.uint8, device=SingleDeviceSharding(d)) for d in devices]
    if len(devices) == 1:
        return lambda: jnp.copy(parts[0])
    there = [SingleDeviceSharding(device) for device in (*devices[1:], devices[0])]
    return lambda: jax.device_put(parts, there)


def seconds(*runs: Callable[[], Any], repeats: int) -> list[float]:
    """The median of so many times of each, behind one that compiles.

    They take turns, so that what else the machine does falls on all of them.
    """
    for run in runs:
        jax.block_until_ready(run())
    spans: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, own in zip(runs, spans, strict=True):
            start_s = time.perf_counter()
            jax.block_until_ready(run())
            own.append(time.perf_counter() - start_s)
    return list(map(statistics.median, spans))
