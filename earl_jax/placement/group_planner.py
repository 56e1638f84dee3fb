# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of two groups of hosts of different kinds: `python -m earl_jax.plan --train_topology=...`.

One plays, the other trains, with a link between them (StreamRL, arXiv 2504.15930, section 6). New
weights cross the link once, and spread inside the group that plays.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earl_jax.config.config import Config
from earl_jax.models.config import ModelConfig
from earl_jax.placement.problem import make_problem
from earl_jax.selector.candidates import Candidate, Candidates
from earl_jax.selector.choose import BudgetTooSmall, choose_plans, full_step
from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.hardware import Hardware, parse_topology
from earl_jax.selector.plans import Plans, Stage
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import unfit_words
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import table_lines

# Of a token in training data: id, log-prob, advantage, position, segment and version.
TOKEN_BYTES = 24
Values = Mapping[str, Any]


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
    `prices` of a device-hour are those of both topologies, "1,2.5": then also the step of the
    cheapest tokens, with 1, 2, 4 ... or all of the hosts of each.

    Raises:
        ValueError: a number that cannot be, or a group that no mesh cuts evenly.
    """
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
    both, each = [parse_topology(topology) for topology in topologies], _prices(prices)
    link = 1e9 * link_gb if link_gb else min(h.network_bytes_per_s * h.num_devices for h in both)
    rollouts = _groups(config, model, vocab_size, both[0], "rollout")
    trains = _groups(config, model, vocab_size, both[1], "train")
    values: dict[str, Any] = {"topologies": topologies, "prices": each, "link_bytes_per_s": link}
    values |= {"all": [], "cheapest": [], "unfit": {}}
    for context in contexts:
        try:
            values["all"].append(groups_step(rollouts[-1], trains[-1], each, context, link))
        except BudgetTooSmall as error:
            values["unfit"][context] = str(error)
        if any(each) and (step := cheapest(rollouts, trains, each, context, link)):
            values["cheapest"].append(step)
    return values, list(_lines(values))


def _prices(text: str) -> tuple[float, ...]:
    """Returns the numbers of --prices, (0, 0) for none. Raises ValueError for other words."""
    with contextlib.suppress(ValueError):
        prices = tuple(map(float, (text or "0,0").split(",")))
        if len(prices) == 2 and all(0 <= price < math.inf for price in prices):
            return prices
    raise InputError(
        f"--prices={text}: give the prices of a device-hour of --topology and of "
        "--train_topology, as in --prices=1,2.5"
    )


def _groups(
    config: Config, model: ModelConfig, vocab_size: int, hardware: Hardware, stage: Stage
) -> list[Problem]:
    """Returns groups of 1, 2, 4 ... and all of the hosts, as far as a mesh cuts them evenly."""
    hosts = hardware.num_hosts
    a_host, found, obstacle = hardware.num_devices // hosts, list[Problem](), None
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
            found.append(problem)
        except ValueError as error:
            obstacle = error
    if not found:
        raise InputError(f"{hardware.name} for {stage}: {obstacle}")
    return found


def groups_step(
    played: Problem, trained: Problem, prices: Sequence[float], context: int, link: float
) -> dict[str, Any]:
    """Returns the step of two groups whose episodes all have `context` tokens, as JSON values.

    `link_s` are the seconds of the weights and the episodes on the link of `link` bytes/s,
    `spread_s` those in which the weights spread inside the group that plays, `link_each_s` those of
    the link if each of its data shards got the weights for itself. Asynchronous steps take
    `step_s`, synchronous ones `turns_s`. `price` is that of a million tokens of the former.

    Example: 8 s, 10 s, 2 s on the link and 1 s of spreading are a step of 13 s, or one of 21 s if
    the stages take turns; at 36 an hour and 1,000 tokens a step a million tokens cost 130.

    Raises:
        BudgetTooSmall: a stage does not fit.
    """
    plays, trains = _choice(played, "rollout", context), _choice(trained, "train", context)
    mesh, tokens = plays.plan.mesh, played.work.num_rows * context
    weights = device_bytes(played.sizes.engine, MeshShape())
    devices = [problem.hardware.num_devices for problem in (played, trained)]
    rollout_s, train_s = plays.seconds, trains.seconds
    link_s, spread_s = (weights + tokens * TOKEN_BYTES) / link, played.publish_s(mesh)
    step_s = max(rollout_s, train_s) + link_s + spread_s
    hour_price = devices[0] * prices[0] + devices[1] * prices[1]
    return {
        "context": context,
        "devices": devices,
        "meshes": [str(mesh), str(trains.plan.mesh)],
        "rollout_s": rollout_s,
        "train_s": train_s,
        "link_s": link_s,
        "spread_s": spread_s,
        "link_each_s": (mesh.data * weights + tokens * TOKEN_BYTES) / link,
        "tokens": tokens,
        "hour_price": hour_price,
        "step_s": step_s,
        "turns_s": rollout_s + train_s + link_s + spread_s,
        "price": hour_price * step_s / 3600 / tokens * 1e6,
    }


@functools.lru_cache(maxsize=128)
def _choice(problem: Problem, stage: Stage, context: int) -> Candidate[Any]:
    """Returns the choice of a group for its stage, the same beside any other group."""
    sizes = full_step(problem, context), Plans()
    decision = choose_plans(Candidates(problem), *sizes, only=stage)
    choice = decision.rollout if stage == "rollout" else decision.train
    assert choice is not None
    return choice


def cheapest(
    rollouts: Sequence[Problem],
    trains: Sequence[Problem],
    prices: Sequence[float],
    context: int,
    link: float,
) -> dict[str, Any] | None:
    """Returns the fastest step of those with the cheapest tokens; None where no pair fits."""
    steps = []
    for played, trained in itertools.product(rollouts, trains):
        with contextlib.suppress(BudgetTooSmall):
            steps.append(groups_step(played, trained, prices, context, link))
    return min(steps, key=lambda step: (step["price"], step["step_s"]), default=None)


def _lines(values: Values) -> Iterator[str]:
    """Yields the plans of two groups for people, as a table of all contexts."""
    has_prices = any(values["prices"])
    words = [
        f"{verb} on {name}" + (f", {price:g} a device-hour" if has_prices else "")
        for verb, name, price in zip(
            ("rollouts", "training"), values["topologies"], values["prices"], strict=True
        )
    ]
    yield f"{'; '.join(words)}; {values['link_bytes_per_s'] / 1e9:g} GB/s between the two groups"
    columns = {
        "context": "{context:,}",
        "devices": "{devices[0]} + {devices[1]}",
        "rollout": "{meshes[0]}",
        "rollout s": "{rollout_s:,.2f}",
        "training": "{meshes[1]}",
        "training s": "{train_s:,.2f}",
        "link s": "{link_s:,.2f}",
        "spread s": "{spread_s:,.2f}",
        "a step s": "{step_s:,.2f}",
        "taking turns s": "{turns_s:,.2f}",
        **({"a million tokens": "{price:,.3g}"} if has_prices else {}),
    }
    for title, key in (("all devices", "all"), ("the cheapest tokens", "cheapest")):
        if steps := values[key]:
            yield f"\n{title}"
            rows = [[form.format_map(step) for form in columns.values()] for step in steps]
            yield from table_lines([*columns], rows)
    unfit = values["unfit"]
    contexts = sorted({*unfit, *(step["context"] for step in values["all"])})
    for is_unfit, found in itertools.groupby(contexts, unfit.__contains__):
        if is_unfit:
            run = list(found)
            yield unfit_words(run, unfit[run[0]])
