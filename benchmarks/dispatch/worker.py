# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One process of the benchmark between processes: it holds a part of a batch, and wants another.

Called by `benchmarks.dispatch` with its settings as JSON; prints its measurements as JSON.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.dispatch.gather import Controller
from benchmarks.dispatch.network import interface_bytes
from earl_jax.sharding.ranges import process_of, shard_ranges
from earl_jax.sharding.reshard import reshard
from earl_jax.sharding.transfer_plan import plan_transfer

TIMEOUT_S = 300.0


def main() -> None:
    """Takes part in all runs."""
    settings = json.loads(sys.argv[1])
    rank, num = settings["rank"], settings["num"]
    os.environ["PJRT_NPROC"] = "8"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"{settings['address']}:{settings['port']}", num_processes=num, process_id=rank
    )
    controller = Controller(rank, num, settings["address"], settings["port"] + 1)
    measured = []
    for num_bytes in settings["worker_bytes"]:
        measured.append(_measure(settings, controller, num_bytes))
    sys.stdout.write(f"\nmeasured: {json.dumps(measured)}\n")
    sys.stdout.flush()


def _measure(settings: dict[str, Any], controller: Controller, num_bytes: int) -> dict[str, Any]:
    """Runs both ways of moving `num_bytes` a worker, and what they took here."""
    num, context = settings["num"], settings["context"]
    before, after = layouts(num, settings["tensor"])
    rows = max(1, num_bytes // (4 * context))
    shape = (rows * num, context)
    plan = plan_transfer(
        shape,
        4,
        *(shard_ranges(sharding, shape) for sharding in (before, after)),
        process_of=process_of(before, after),
    )
    ours = jax.make_array_from_callback(shape, before, lambda index: _values(shape)[index])
    jax.block_until_ready(ours)
    wanted = shard_ranges(after, shape)
    parts = [slice(*wanted[device.id][0]) for device in sorted_by_process(jax.devices())]

    def dispatch() -> np.ndarray:
        moved = jax.block_until_ready(reshard(ours, after))
        return moved.addressable_shards[0].data

    def gather() -> np.ndarray:
        own = np.asarray(ours.addressable_shards[0].data)
        part = controller.gather_and_scatter(own, parts)
        return jax.device_put(part, jax.local_devices()[0]).block_until_ready()

    runs = {}
    for name, way in (("dispatch", dispatch), ("gather", gather)):
        expected = _values(shape)[parts[controller.rank]]
        np.testing.assert_array_equal(way(), expected)
        del expected
        runs[name] = [_timed(way, f"{name} {n}", settings) for n in range(settings["repeats"])]
    sent, received = plan.sent_bytes, plan.received_bytes
    return {
        "worker_bytes": 4 * rows * context,
        "busiest_bytes": max(*sent.values(), *received.values()),
        "moved_bytes": plan.moved_bytes,
        "rank_0_bytes": sum(side.get(jax.devices()[0].id, 0) for side in (sent, received)),
        "runs": runs,
    }


def layouts(num: int, tensor: int) -> tuple[NamedSharding, NamedSharding]:
    """Returns the layouts: workers that each made their rows, and groups of `tensor` that share.

    The members of a group are as far apart as they can be (0, num / tensor, ...), so that hardly a
    row is wanted where it was made.
    """
    devices = np.array(sorted_by_process(jax.devices()), dtype=object)
    source = Mesh(devices, ("data",))
    target = Mesh(devices.reshape(tensor, num // tensor).T, ("data", "tensor"))
    rows = PartitionSpec("data")
    return NamedSharding(source, rows), NamedSharding(target, rows)


def sorted_by_process(devices: list[Any]) -> list[Any]:
    """One device a process, in the order of the processes."""
    return sorted(devices, key=lambda device: device.process_index)


def _values(shape: tuple[int, int]) -> np.ndarray:
    return np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)


def _timed(way: Callable[[], Any], name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Starts when all are there. The clock is the machine's, so that times can be compared."""
    multihost_utils.sync_global_devices(name)
    link = interface_bytes() if settings["limited"] else None
    start_s = time.monotonic()
    way()
    end_s = time.monotonic()
    multihost_utils.sync_global_devices(name + " end")
    sent = None if link is None else sum(interface_bytes()) - sum(link)
    return {"start_s": start_s, "end_s": end_s, "link_bytes": sent}


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - whatever it was, the others must not be waited for
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
