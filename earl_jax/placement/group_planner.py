# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of two groups of hosts of different kinds: `python -m earl_jax.plan --train_topology=...`.

The stages are planned apart, each by the candidates, bytes and speeds of any other plan
(selector/groups.py).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from earl_jax.config import Config
from earl_jax.models.config import ModelConfig
from earl_jax.placement.problem import make_problem
from earl_jax.selector.groups import Group, cheapest, groups_lines, groups_step
from earl_jax.selector.hardware import Hardware, parse_topology
from earl_jax.selector.plans import Stage
from earl_jax.settings.errors import InputError


def plan_groups(
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    topologies: tuple[str, str],
    contexts: Sequence[int],
    *,
    link_gb: float | None = None,
    prices: str = "",
) -> tuple[dict[str, Any], list[str]]:
    """Returns the plans of rollouts on the first topology and training on the second.

    `link_gb` GB/s are those between the two groups; None: all network cards of the smaller group.
    `prices` of a device-hour are those of both topologies, "1,2.5".

    Raises:
        ValueError: a number that cannot be, or a group that no mesh cuts evenly.
    """
    played, trained = map(parse_topology, topologies)
    if not config.plays:
        raise InputError(
            "--train_topology with config.algorithm 'sft', which plays nothing: give --topology "
            "alone, the devices that train"
        )
    if config.devices.num_rollout:
        raise InputError(
            f"config.devices.num_rollout is {config.devices.num_rollout} beside --train_topology, "
            "which gives training devices of its own; remove one of the two"
        )
    if link_gb is not None and not 0 < link_gb < math.inf:
        raise InputError(f"--link_gb={link_gb}; give GB/s between the groups, above 0")
    link = 1e9 * link_gb if link_gb else min(map(_network, (played, trained)))
    both = _prices(prices)
    rollouts = _groups(config, model, vocab_size, played, "rollout", both[0])
    trains = _groups(config, model, vocab_size, trained, "train", both[1])
    steps = [groups_step(rollouts[-1], trains[-1], context, link) for context in contexts]
    least = [cheapest(rollouts, trains, c, link) for c in contexts] if any(both) else []
    values = {
        "topologies": topologies,
        "prices": both,
        "link_bytes_per_s": link,
        "all": [step.values() for step in steps if step],
        "cheapest": [step.values() for step in least if step],
        "unfit": {
            context: list(filter(None, (rollouts[-1].lack(context), trains[-1].lack(context))))
            for context, step in zip(contexts, steps, strict=True)
            if step is None
        },
    }
    return values, list(groups_lines(values))


def _network(hardware: Hardware) -> float:
    return hardware.network_bytes_per_s * hardware.num_devices


def _prices(text: str) -> tuple[float, float]:
    """Returns the numbers of --prices, (0, 0) for none. Raises ValueError for other words."""
    try:
        first, second = map(float, text.split(",")) if text else (0.0, 0.0)
    except ValueError:
        first = second = math.nan
    if not all(0 <= price < math.inf for price in (first, second)):
        raise InputError(
            f"--prices={text}: give the prices of a device-hour of --topology and of "
            "--train_topology, as in --prices=1,2.5"
        )
    return first, second


def _groups(
    config: Config,
    model: ModelConfig,
    vocab_size: int,
    hardware: Hardware,
    stage: Stage,
    price: float,
) -> list[Group]:
    """Returns groups of 1, 2, 4 ... and all of the hosts, as far as a mesh cuts them evenly."""
    hosts = hardware.num_hosts
    a_host, found, obstacle = hardware.num_devices // hosts, list[Group](), None
    for number in sorted({*(2**power for power in range(hosts.bit_length())), hosts}):
        problem = make_problem(
            config,
            model,
            vocab_size,
            hardware.with_devices(number * a_host),
            budget_bytes=config.selector.budget_bytes_per_device or hardware.usable_bytes,
            num_processes=number,
        )
        apart = number * a_host if stage == "rollout" else 0
        problem = dataclasses.replace(problem, num_rollout=apart, rollout_stays=False)
        try:
            assert problem.meshes(stage)
            found.append(Group(problem=problem, stage=stage, price=price))
        except ValueError as error:
            obstacle = error
    if not found:
        raise InputError(f"{hardware.name} for {stage}: {obstacle}")
    return found
