# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How much slower than the best meshes are those that the selector chooses.

    python -m benchmarks.selector_regret [--config=FILE] [--config.key=value] [--json]

At each room per episode that the config names, and for each kind of load, the step is measured on
every candidate mesh of each stage: publishing and playing real episodes, and one step's updates.
A pair of meshes takes what its stages take. Then the selector chooses from its own measurements
(of synthetic rounds, as at the start of a run) and from the load of such a step. Episodes are as
long as the load says because their turns are limited; a policy of random weights seldom ends one.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earl_jax.main import DEFAULT_CONFIG, exit_status, start_jax

# Of each kind of load: lengths of the episodes' turns, as a part of the room.
LOADS = ("even", "half", "tail")


def turn_tokens(kind: str, number: int, room: int) -> list[int]:
    """How long each of so many episodes' one turn may be.

    Of "even" all fill the room, of "half" half of it; of "tail" every eighth fills it, and the
    others an eighth of it.
    """
    if kind == "tail":
        return [room if n % 8 == 0 else max(1, room // 8) for n in range(number)]
    return [max(1, room if kind == "even" else room // 2)] * number


def regret(
    rollout_s: Sequence[float], train_s: Sequence[float], chosen: tuple[int, int]
) -> tuple[float, tuple[int, int]]:
    """By what fraction the chosen pair's step is longer than the best one's, and which that is."""
    pairs = itertools.product(range(len(rollout_s)), range(len(train_s)))
    best = min(pairs, key=lambda pair: rollout_s[pair[0]] + train_s[pair[1]])
    took, least = (rollout_s[r] + train_s[t] for r, t in (chosen, best))
    return took / least - 1.0, best


def measure(config: Any, repeats: int, rooms: Sequence[int], kinds: Sequence[str]) -> Iterator:
    """A row for each room and kind of load."""
    from earl_jax.calibrate import Calibration, open_table
    from earl_jax.placement import Placement
    from earl_jax.world import World

    world = World(config)
    table, _ = open_table(world)
    calibration = Calibration(world, table, lambda text: print(text, file=sys.stderr))
    calibration.measure_all()
    for room, kind in itertools.product(rooms, kinds):
        tasks = _tasks(world, kind, room)
        played = [
            _rollout_s(world, calibration, mesh, room, tasks, repeats)
            for mesh in world.rollout_candidates
        ]
        trained = [_train_s(world, mesh, room, repeats) for mesh in world.train_candidates]
        load = played[0][1]
        placement = Placement(world, calibration)
        decision = placement.choose_step(room, load)
        chosen = (
            world.rollout_candidates.index(decision.rollout.mesh),
            world.train_candidates.index(decision.train.mesh),
        )
        lost, best = regret([seconds for seconds, _ in played], trained, chosen)
        yield {
            "room": room,
            "load": kind,
            "chosen": str(decision.pair),
            "best": f"rollout on {world.rollout_candidates[best[0]]} with training on "
            f"{world.train_candidates[best[1]]}",
            "chosen s": played[chosen[0]][0] + trained[chosen[1]],
            "best s": played[best[0]][0] + trained[best[1]],
            "slower by": lost,
        }


def _tasks(world: Any, kind: str, room: int) -> list[Any]:
    from earl_jax.rollout.config import Limits

    tasks = world.training_tasks(0)
    said = world.make_environment(tasks[0]).start().text
    prompt = len(world.new_conversation().open(said).ids)
    spare = room - prompt - world.config.rollout.round_tokens
    if spare < 1:
        raise ValueError(f"a room of {room} tokens does not hold a prompt of {prompt} and a turn")
    return [
        dataclasses.replace(task, limits=Limits(max_turn_tokens=limit))
        for task, limit in zip(tasks, turn_tokens(kind, len(tasks), spare), strict=True)
    ]


def _best_of(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The shortest of so many runs, behind one that compiles: what disturbs a run slows it."""
    result, seconds = run(), []
    for _ in range(repeats):
        start_s = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds), result


def _rollout_s(
    world: Any, calibration: Any, mesh: Any, room: int, tasks: Sequence[Any], repeats: int
) -> tuple[float, Any]:
    from earl_jax.loop import measure_load, play_all
    from earl_jax.placement import Placement

    placement = Placement(world, calibration)
    placement.rollout_mesh, placement.train_mesh = mesh, world.train_candidates[0]
    placement.places, placement.pages = room, world.pool_for(room).pages
    state = world.init_train_state(world.train_candidates[0])

    def run() -> Any:
        seat, _ = placement.open_seat(world.policy(state), version=0)
        return measure_load(play_all(world, placement, seat, tasks, None)[1])

    return _best_of(run, repeats)


def _train_s(world: Any, mesh: Any, room: int, repeats: int) -> float:
    import jax

    from earl_jax.train.step import batch_shapes, read_metrics

    rows, layout = world.config.rollout.episodes_per_step, world.train_layout(mesh)
    shapes = batch_shapes(rows, room, layout, with_proximal=world.needs_proximal)
    batch = jax.tree.map(
        lambda shape: jax.device_put(np.ones(shape.shape, shape.dtype), shape.sharding), shapes
    )
    program, state = world.train_step(mesh, "policy_gradient"), world.init_train_state(mesh)

    def run() -> None:
        nonlocal state
        for _ in range(world.config.train.epochs):
            state, metrics = program(state, batch, np.zeros(2, np.float32))
            read_metrics(metrics)

    return _best_of(run, repeats)[0]


def regret_command(arguments: Sequence[str]) -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rooms", default="", help="tokens, by commas (the config's buckets)")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags = parser.parse_args([a for a in arguments if not a.startswith("--config.")])
    from earl_jax.bench import write_table
    from earl_jax.config_file import load_config_file, make_config

    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    config = make_config(load_config_file(flags.config), overrides)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    rooms = [int(room) for room in flags.rooms.split(",") if room]
    rows = measure(
        config, flags.repeats, rooms or config.rollout.context_buckets, flags.loads.split(",")
    )
    lost: list[float] = []

    def kept() -> Iterator[dict[str, Any]]:
        for row in rows:
            lost.append(row["slower by"])
            yield row

    if flags.json:
        for row in kept():
            print(json.dumps(row), flush=True)
    else:
        write_table(kept())
    shares = [np.mean([one <= most for one in lost]) for most in (0.05, 0.10)]
    print(
        f"{len(lost)} points: {shares[0]:.0%} at most 5 % slower than the best, {shares[1]:.0%} "
        f"at most 10 %, the worst {max(lost):.1%}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(exit_status(lambda: regret_command(sys.argv[1:])))
