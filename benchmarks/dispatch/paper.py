# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""On paper: EARL's batch on 1,024 devices, by the planner that runs use.

EARL's table 1 (arXiv 2510.05943) has a batch of 15.6 GB at contexts of 1K tokens on 1K GPUs, and of
500 GB at 32K. Eight devices are a host. Nothing is moved here.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.sharding.layout import MeshShape, make_abstract_layout
from earl_jax.sharding.ranges import Ranges, shard_ranges
from earl_jax.sharding.topology import CHIPS
from earl_jax.sharding.transfer_plan import TransferPlan, plan_transfers

NUM_DEVICES, HOST_DEVICES = 1024, 8
# Tokens, turns, log-probs, versions: what the engine writes down, four bytes each.
FIELDS = ("tokens", "turn_ids", "logprobs", "versions")
EARL_GB = {1024: 15.6, 2048: 31.2, 4096: 62.5, 8192: 125.0, 16384: 250.0, 32768: 500.0}
GBIT_PER_S = (25, 200, 400)
# Trainers whose devices are those of the rollout in the same order, in an order that tears the
# replicas of rows apart (0, 128, 256, ..., 1, 129, ...), and others than those of the rollout.
PAIRS = (
    ("data=256,tensor=4", "data=128,tensor=8", "the same devices", "same"),
    ("data=256,tensor=4", "data=1024", "the same devices, other order", "torn"),
    ("data=256,tensor=4", "data=128,tensor=8", "the same devices, other order", "torn"),
    ("data=128,tensor=4", "data=64,tensor=8", "512 others", "others"),
)
COLUMNS = (
    "context",
    "batch GB",
    "rollout",
    "trainer",
    "devices",
    "plan s",
    "total GB",
    "busiest device GB",
    "busiest host GB",
    *(f"s at {rate} Gbit/s a host" for rate in GBIT_PER_S),
    "s at v5p ICI",
    "s at H100 NVLink",
    "s by one host at 400",
)


def plan_on_paper(
    rollout: str, trainer: str, order: str, context: int, num_bytes: float
) -> tuple[list[TransferPlan], float]:
    """Plans of all fields, and the seconds of CPU that they took."""
    unit = math.lcm(*(MeshShape.parse(text).data for text in (rollout, trainer)))
    rows = unit * max(1, round(num_bytes / (4 * len(FIELDS) * context * unit)))
    start_s = time.process_time()
    shape = (rows, context)
    leaf = jax.ShapeDtypeStruct(shape, jnp.int32)
    sides = []
    for text in (rollout, trainer):
        layout = make_abstract_layout(MeshShape.parse(text))
        sides.append(shard_ranges(layout.activations("NS"), leaf.shape))
    source, target = sides[0], _ordered(sides[1], order)
    hosts = {device: device // HOST_DEVICES for device in range(NUM_DEVICES)}
    plans = plan_transfers([(shape, 4, source, target)] * len(FIELDS), process_of=hosts)
    return list(plans), time.process_time() - start_s


def _ordered(ranges: Mapping[int, Ranges], order: str) -> dict[int, Ranges]:
    """The same ranges on the devices of this order."""
    num = len(ranges)
    ids = {
        "same": np.arange(num),
        "torn": np.arange(num).reshape(-1, num // HOST_DEVICES).T.reshape(-1),
        "others": np.arange(num) + num,
    }[order]
    return dict(zip(ids.tolist(), ranges.values(), strict=True))


def tables(contexts: tuple[int, ...] = (1024, 32768)) -> Iterator[dict[str, Any]]:
    """A row for each context and pair of layouts."""
    for context in contexts:
        for rollout, trainer, devices, order in PAIRS:
            num_bytes = EARL_GB[context] * 1e9
            plans, plan_s = plan_on_paper(rollout, trainer, order, context, num_bytes)
            batch = sum(4 * math.prod(plan.shape) for plan in plans)
            device, host = Counter(), Counter()
            total = 0
            for plan in plans:
                total += plan.moved_bytes
                for side, ends in (("out", plan.sent_bytes), ("in", plan.received_bytes)):
                    device.update({(side, end): size for end, size in ends.items()})
                for (sender, receiver), size in plan.network_bytes(plan.process_of).items():
                    host.update({("out", sender): size, ("in", receiver): size})
            busiest_device = max(device.values(), default=0)
            busiest_host = max(host.values(), default=0)
            copies = MeshShape.parse(trainer).num_devices // MeshShape.parse(trainer).data
            # All rows into one host, and from there a copy to every member of every group.
            by_one_host = batch * (1 + copies) / (400e9 / 8)
            yield dict(
                zip(
                    COLUMNS,
                    (
                        context,
                        batch / 1e9,
                        rollout,
                        trainer,
                        devices,
                        plan_s,
                        total / 1e9,
                        busiest_device / 1e9,
                        busiest_host / 1e9,
                        *(busiest_host / (rate * 1e9 / 8) for rate in GBIT_PER_S),
                        busiest_device / CHIPS["v5p"].link_bytes_per_s,
                        busiest_device / CHIPS["h100"].link_bytes_per_s,
                        by_one_host,
                    ),
                    strict=True,
                )
            )
