# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two groups of hosts of different kinds: one plays, the other trains, a link between them. Pure.

Decoding needs memory bandwidth and training operations, so that the cheapest hardware of one is not
that of the other; and the two may be in different datacenters (StreamRL, arXiv 2504.15930, section
6). New weights cross the link once, and spread inside the group that plays.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earl_jax.selector.choose import full_step
from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.plan_candidates import Candidate, Candidates
from earl_jax.selector.plans import Stage
from earl_jax.selector.problem import Problem
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import bytes_text, table_lines

# Of a token in training data: id, log-prob, advantage, position, segment and version.
TOKEN_BYTES = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Hosts that do one stage of a problem; `price` is of a device-hour, in any currency."""

    problem: Problem
    stage: Stage
    price: float = 0.0

    @property
    def hour_price(self) -> float:
        """The price of an hour of all devices."""
        return self.price * self.problem.hardware.num_devices

    def best(self, context: int) -> Candidate | None:
        """Returns the fastest plan that fits with episodes of `context` tokens; None: none fits."""
        budget = self.problem.budget
        fitting = [each for each in self._candidates(context, budget) if each.fits(budget)]
        return max(fitting, key=lambda candidate: candidate.tokens_per_s, default=None)

    def lack(self, context: int) -> str:
        """Returns why no plan fits, in words; "" where one does."""
        if self.best(context) is not None:
            return ""
        sizes = [each.num_bytes for each in self._candidates(context, 0.0)]
        if not sizes:
            return f"no mesh for {self.stage} on {self.problem.hardware.name}"
        least = min(sizes)
        what = {"train": "training", "rollout": "a rollout"}[self.stage]
        budget = self.problem.budget
        return (
            f"{what} on {self.problem.hardware.name} needs about {bytes_text(least)} a device, "
            f"{bytes_text(math.ceil(least - budget))} more than the budget"
        )

    def _candidates(self, context: int, budget: float) -> Sequence[Candidate]:
        candidates = Candidates(self.problem)
        if self.stage == "train":
            return candidates.train(context)
        return candidates.rollouts(context, None if budget else 0, budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupsStep:
    """The seconds of a step of two groups whose episodes all have `context` tokens.

    `link_s` are those of the weights and the episodes on the link, `spread_s` those in which the
    weights spread inside the group that plays, `link_each_s` those of the link if each of its data
    shards got the weights for itself. `hour_price` is that of both groups.

    Example: 8 s, 10 s, 2 s on the link and 1 s of spreading are a step of 10 s, or one of 21 s if
    the stages take turns; at 36 an hour and 1,000 tokens a step a million tokens cost 100 or 210.
    """

    context: int
    devices: tuple[int, int]
    meshes: tuple[MeshShape, MeshShape]
    rollout_s: float
    train_s: float
    link_s: float
    spread_s: float
    link_each_s: float
    tokens: int
    hour_price: float

    @property
    def step_s(self) -> float:
        """The seconds of an asynchronous step: rollout, training and link work at the same time."""
        return max(self.rollout_s + self.spread_s, self.train_s, self.link_s)

    @property
    def turns_s(self) -> float:
        """The seconds of a synchronous step: rollout, training and link take turns."""
        return self.rollout_s + self.train_s + self.link_s + self.spread_s

    @property
    def price(self) -> float:
        """The price of a million tokens, asynchronous; 0 where no prices are known."""
        return self.hour_price * self.step_s / 3600 / self.tokens * 1e6

    def values(self) -> dict[str, Any]:
        """Returns all of it as JSON values."""
        fields = dataclasses.asdict(self) | {"meshes": [str(mesh) for mesh in self.meshes]}
        return fields | {"step_s": self.step_s, "turns_s": self.turns_s, "price": self.price}


def groups_step(
    rollout: Group, train: Group, context: int, link_bytes_per_s: float
) -> GroupsStep | None:
    """Returns the step of these groups; None where a stage does not fit."""
    player, trainer = rollout.best(context), train.best(context)
    if player is None or trainer is None:
        return None
    problem, mesh, work = rollout.problem, player.plan.mesh, train.problem.work
    tokens = problem.work.num_rows * context
    weights = device_bytes(problem.sizes.engine, MeshShape())
    return GroupsStep(
        context=context,
        devices=(problem.hardware.num_devices, train.problem.hardware.num_devices),
        meshes=(mesh, trainer.plan.mesh),
        rollout_s=full_step(problem, context).rollout_tokens / player.tokens_per_s,
        train_s=tokens * work.num_batches * work.epochs / trainer.tokens_per_s,
        link_s=(weights + tokens * TOKEN_BYTES) / link_bytes_per_s,
        spread_s=problem.publish_s(mesh),
        link_each_s=(mesh.data * weights + tokens * TOKEN_BYTES) / link_bytes_per_s,
        tokens=tokens,
        hour_price=rollout.hour_price + train.hour_price,
    )


def cheapest(
    rollouts: Sequence[Group], trains: Sequence[Group], context: int, link_bytes_per_s: float
) -> GroupsStep | None:
    """Returns the step whose tokens cost the least, of all pairs of groups; of these the fastest.

    None where no pair fits.
    """
    pairs = itertools.product(rollouts, trains)
    steps = [groups_step(*pair, context, link_bytes_per_s) for pair in pairs]
    return min(filter(None, steps), key=lambda step: (step.price, step.step_s), default=None)


def groups_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the plans of two groups for people, as a table of all contexts."""
    has_prices = any(values["prices"])
    words = [
        f"{verb} on {name}" + (f", {price:g} a device-hour" if has_prices else "")
        for verb, name, price in zip(
            ("rollouts", "training"), values["topologies"], values["prices"], strict=True
        )
    ]
    yield f"{'; '.join(words)}; {values['link_bytes_per_s'] / 1e9:g} GB/s between the two groups"
    header = ["context", "devices", "rollout", "s", "training", "s", "link s", "spread s"]
    header += ["a step s", "taking turns s"] + ["a million tokens"] * has_prices
    for title, key in (("all devices", "all"), ("the cheapest tokens", "cheapest")):
        rows = [_row(step, has_prices) for step in values[key]]
        if rows:
            yield f"\n{title}"
            yield from table_lines(header, rows)
    for context, lacks in values["unfit"].items():
        yield f"  {context:,} tokens do not fit: {'; '.join(lacks)}"


def _row(step: Mapping[str, Any], has_prices: bool) -> list[str]:
    seconds = (step[f"{name}_s"] for name in ("link", "spread", "step", "turns"))
    return [
        f"{step['context']:,}",
        "{} + {}".format(*step["devices"]),
        step["meshes"][0],
        f"{step['rollout_s']:,.2f}",
        step["meshes"][1],
        f"{step['train_s']:,.2f}",
        *(f"{value:,.2f}" for value in seconds),
        *([f"{step['price']:,.3g}"] * has_prices),
    ]
