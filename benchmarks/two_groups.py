# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The price of a token where rollouts and training have devices of different kinds: a model.

    uv run python -m benchmarks.two_groups [--write]

And the seconds of new weights on their way, where all devices are of one kind. Plans of the product
(`placement/group_planner.py`, `selector/choose.py`), from data sheets. Nothing runs.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from earl_jax.config.file import make_config
from earl_jax.placement.group_planner import plan_groups
from earl_jax.placement.problem import find_model, overrides_for_chips, planned_problem
from earl_jax.selector.choose import Decision
from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.problem import Problem
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape

PRESETS = ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b")
CONTEXTS = (8192, 16384, 32768)
HOSTS = 16
# Of a device-hour, relative to an H20's.
PRICES = {"h20": 1.0, "h800": 2.85}
LINK_GB = 10.0
# The longest answers of StreamRL's data sets are 5K, 10K and 20K tokens; half of 5K is for the
# price at half the context.
PAPER_CONTEXTS = (2560, 5120, 10240, 20480)
# PPO's trainer has a critic of the policy's size, and scores with it and with a reference.
PPO = ("algorithm=ppo", "algorithm_args.kl_coefficient=0.01")
# One kind of devices, of which some play and the others train, and the context. The state of 72B is
# too large for fewer H100s.
PUBLISHED = (
    ("qwen2.5-7b", "h100:4x8", 1024),
    ("qwen2.5-7b", "h100:4x8", 8192),
    ("qwen2.5-32b", "h100:4x8", 8192),
    ("qwen2.5-72b", "h100:8x8", 8192),
    ("qwen3-30b-a3b", "h100:4x8", 8192),
    ("qwen2.5-7b", "v5p:4x4x4", 1024),
    ("qwen2.5-7b", "v5p:4x4x4", 8192),
    ("qwen2.5-32b", "v5p:4x4x4", 8192),
    ("qwen2.5-72b", "v5p:4x4x4", 8192),
    ("qwen3-30b-a3b", "v5p:4x4x4", 8192),
)
EPISODES = 192


# The cheapest steps by context, of one kind of device and of two.
Steps = dict[int, Mapping[str, Any]]


def steps_of(
    preset: str, contexts: Sequence[int] = CONTEXTS, overrides: Sequence[str] = ()
) -> tuple[Steps, Steps]:
    """Returns the cheapest steps of H800s alone, and of H20s that play beside H800s that train."""
    given = [
        f"model.preset={preset}",
        "rollout.num_slots=1024",
        "rollout.episodes_per_step=1024",
        *overrides,
    ]
    buckets = ",".join(map(str, contexts))
    config = make_config({}, [*overrides_for_chips(given, buckets), *given])
    model, vocab_size = find_model(config, None)

    def cheapest(player: str, link_gb: float | None) -> Steps:
        values, _ = plan_groups(
            config,
            model,
            vocab_size,
            (f"{player}:{HOSTS}x8", f"h800:{HOSTS}x8"),
            contexts,
            link_gb=link_gb,
            prices=f"{PRICES[player]},{PRICES['h800']}",
        )
        return {step["context"]: step for step in values["cheapest"]}

    return cheapest("h800", None), cheapest("h20", LINK_GB)


def rows_of(preset: str, one: Steps, two: Steps) -> list[dict[str, object]]:
    """Returns a row for each context: the cheapest of one kind of device, and of two kinds."""
    return [
        {
            "model": preset,
            "tokens": f"{context:,}",
            "H800 + H800": "{} + {}".format(*one[context]["devices"]),
            "a step s": one[context]["step_s"],
            "a million": one[context]["price"],
            "H20 + H800": "{} + {}".format(*two[context]["devices"]),
            "a step s, two kinds": two[context]["step_s"],
            "link s": two[context]["link_s"],
            "each for itself s": two[context]["link_each_s"],
            "a million, two kinds": two[context]["price"],
            "tokens a price": one[context]["price"] / two[context]["price"],
        }
        for context in one
        if context in two
    ]


def shares_of(step: Mapping[str, Any], player: str) -> tuple[float, float, float]:
    """Returns the price of a million tokens of rollouts, of training, and of devices that wait."""
    devices, seconds = step["devices"], (step["rollout_s"], step["train_s"])
    prices = (PRICES[player], PRICES["h800"])
    rollouts, training = (
        number * price * stage_s / 3600 / step["tokens"] * 1e6
        for number, price, stage_s in zip(devices, prices, seconds, strict=True)
    )
    return rollouts, training, step["price"] - rollouts - training


def parts_of(preset: str, one: Steps, two: Steps) -> list[dict[str, object]]:
    """Returns a row for each context: the parts of both prices.

    The gain "at half the context" has the rollouts of episodes half as long, and nobody waits.
    """
    found = []
    for context in one:
        if context not in two:
            continue
        alone, beside = shares_of(one[context], "h800"), shares_of(two[context], "h20")
        half, gain = context // 2, None
        if half in one and half in two:
            rollouts = shares_of(one[half], "h800")[0], shares_of(two[half], "h20")[0]
            gain = (rollouts[0] + alone[1]) / (rollouts[1] + beside[1])
        found.append(
            {
                "model": preset,
                "tokens": f"{context:,}",
                "rollouts": alone[0],
                "training": alone[1],
                "waiting": alone[2],
                "share of rollouts": alone[0] / one[context]["price"],
                "rollouts, two kinds": beside[0],
                "training, two kinds": beside[1],
                "waiting, two kinds": beside[2],
                "rollouts cheaper by": alone[0] / beside[0],
                "tokens a price": one[context]["price"] / two[context]["price"],
                "at half the context": gain,
            }
        )
    return found


def lengths_of(preset: str) -> list[dict[str, object]]:
    """Returns a row for each of StreamRL's lengths: with one pass of training, and with PPO's."""
    passes = [parts_of(preset, *steps_of(preset, PAPER_CONTEXTS, more)) for more in ((), PPO)]
    names = ("rollouts cheaper by", "share of rollouts", "tokens a price", "at half the context")
    return [
        {
            "model": preset,
            "tokens": one["tokens"],
            **{name: one[name] for name in names},
            **{f"{name}, PPO": ppo[name] for name in names},
        }
        for one, ppo in zip(*passes, strict=True)
    ]


def fastest_split(preset: str, topology: str, context: int) -> tuple[Problem, Decision]:
    """Returns an asynchronous step, with the quarter, the half, or three quarters that play."""
    hardware, found = parse_topology(topology), list[tuple[Problem, Decision]]()
    given = [
        f"model.preset={preset}",
        f"rollout.num_slots={EPISODES}",
        f"rollout.episodes_per_step={EPISODES}",
        "asynchrony.max_staleness=2",
    ]
    for quarters in (1, 2, 3):
        split = f"devices.num_rollout={quarters * hardware.num_devices // 4}"
        changes = overrides_for_chips(given, str(context))
        config = make_config({}, [*changes, *given, split])
        model, vocab_size = find_model(config, None)
        # So many devices of a stage may cut the model unevenly in every way.
        with contextlib.suppress(InputError):
            problem = planned_problem(config, model, vocab_size, hardware, hardware.usable_bytes)
            (stop,) = make_schedule(problem, ThroughputTable(), [context])
            if stop.decision is not None:
                found.append((problem, stop.decision))
    return min(found, key=lambda each: each[1].seconds)


def published_row(preset: str, topology: str, context: int) -> dict[str, object]:
    """Returns the row of the seconds of new weights, and of their share of a step."""
    problem, decision = fastest_split(preset, topology, context)
    rollout, train = decision.choices
    mesh, publish_s = rollout.plan.mesh, decision.seconds - max(rollout.seconds, train.seconds)
    return {
        "model": preset,
        "devices": topology,
        "tokens": f"{context:,}",
        "play + train": f"{mesh.num_devices} + {train.plan.mesh.num_devices}",
        "rollout": str(mesh),
        "copies": mesh.data,
        "a copy GB": device_bytes(problem.sizes.engine, MeshShape()) / 1e9,
        "rollout s": rollout.seconds,
        "training s": train.seconds,
        "new weights s": publish_s,
        "a step s": decision.seconds,
        "share %": 100 * publish_s / decision.seconds,
    }


if __name__ == "__main__":
    flags = parser_of(__doc__).parse_args()
    steps = {preset: steps_of(preset) for preset in PRESETS}
    rows = [row for preset, both in steps.items() for row in rows_of(preset, *both)]
    parts = [row for preset, both in steps.items() for row in parts_of(preset, *both)]
    text = f"{table(rows)}\n\nParts of the price of a million tokens:\n\n{table(parts)}"
    page = Path(__file__).with_suffix(".md")
    show(text, page, write=flags.write)
    lengths = [row for preset in PRESETS for row in lengths_of(preset)]
    show(table(lengths), page, write=flags.write, name="table of StreamRL's conditions")
    published = [published_row(*each) for each in PUBLISHED]
    show(table(published), page, write=flags.write, name="published")
