# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How much slower than the best meshes are those that the selector chooses.

    python -m benchmarks.selector_regret [--config=FILE] [--config.key=value] [--rooms=24,40,72]
        [--minutes=20] [--to=FILE]

At each room per episode, and for each kind of load, the step is measured for every candidate of
each stage: publishing and playing real episodes, and one step's updates, by turns. A candidate is a
mesh, with --ways in every way to be used: with fewer slots and other page sizes
(config.selector.page_sizes), in more micro-batches and with remat. A pair of candidates takes what
its stages take; pairs that the budget does not hold are no rivals. Pairs that are far behind after
a round or two get no more of them; the best and the chosen one have all. Updates are of full rows
whatever the load, so that those of a length are measured once. Compilations are not counted.

The selector chooses from its own measurements (of synthetic rounds, as at the start of a run) and
guesses, and from the load of such a step. Beside it stands what a rule without measurements loses:
the first pair of the list that fits. Episodes are as long as the load says because their turns are
limited; a policy of random weights seldom ends one.

Prints each point as soon as it is known; behind --minutes no more are begun. With --to they are
appended to a file, as JSON with the seconds of every candidate, and the selector's measurements
are kept beside it: the same command then goes on where it was stopped.
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

from benchmarks.regret_points import (
    Kept,
    Pair,
    Timed,
    pairs_within,
    regret,
    summary,
    time_pairs,
)
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


class Bench:
    """The points of one config."""

    def __init__(self, config: Any, repeats: int, ways: bool, table: Any = None) -> None:
        """With the selector's measurements so far, if there are any."""
        from earl_jax.calibrate import Calibration
        from earl_jax.selector.throughput import ThroughputTable
        from earl_jax.survival import Ladder
        from earl_jax.world import World

        self.config, self.repeats, self.ways = config, repeats, ways
        self.world = World(config)
        empty = ThroughputTable(path=None, measurements={})
        self.calibration = Calibration(self.world, table or empty, _say)
        # What is measured for the comparison, the choice must not know.
        self.everything = Calibration(self.world, empty, lambda _: None)
        self.ladder = Ladder(self.world)
        # Updates by mesh, rung and length: they are the same for all loads.
        self._updates: dict[Any, Timed] = {}

    def measure_ahead(self) -> None:
        """What a run measures before its first step."""
        from earl_jax.placement import Placement

        self.calibration.measure_all()
        Placement(self.world, self.calibration).measure_ahead()

    def point(self, room: int, kind: str) -> dict[str, Any]:
        """A row: what was chosen and what is best at this room, for this kind of load."""
        world, tasks = self.world, _tasks(self.world, kind, room)
        load = self._player(world.rollout_candidates[0], self._whole(room), room, tasks)()
        length = world.config.rollout.places_for(load.context_tokens_max)
        decision = self._choose(room, load)
        if decision is None:
            return {"room": room, "load": kind, "chosen": "no pair fits without a lower rung"}
        rollouts = self._rollouts(room, decision.rollout.rung)
        trains = self._trains(length, decision.train.rung)
        pairs = pairs_within(
            [option.bytes_per_device for option in rollouts],
            [option.bytes_per_device for option in trains],
            [self.ladder.trainer_bytes(option.mesh) for option in trains],
            world.budget_bytes,
        )
        chosen = Pair(_find(rollouts, decision.rollout), _find(trains, decision.train))
        row: dict[str, Any] = {"room": room, "load": kind, "pairs": len(pairs)}
        row["left out"] = len(rollouts) * len(trains) - len(pairs)
        if chosen not in pairs:
            return row | {"chosen": "what fits with fewer pages than there are slots for"}
        playing = {
            n: Timed(self._player(rollouts[n].mesh, rollouts[n].rung, room, tasks))
            for n in sorted({pair.rollout for pair in pairs})
        }
        training = {n: self._update(trains[n], length) for n in sorted({p.train for p in pairs})}
        step_s = time_pairs(playing, training, pairs, chosen, self.repeats)
        lost, best = regret(step_s, chosen)

        def words(pair: Pair) -> str:
            return f"{rollouts[pair.rollout].words} + {trains[pair.train].words}"

        return row | {
            "chosen": words(chosen),
            "best": words(best),
            "chosen s": step_s[chosen],
            "best s": step_s[best],
            "slower by": lost,
            "the first by": regret(step_s, pairs[0])[0],
            "rollout_s": {rollouts[n].words: timed.least_s for n, timed in playing.items()},
            "train_s": {trains[n].words: timed.least_s for n, timed in training.items()},
        }

    def _choose(self, room: int, load: Any) -> Any:
        """The selector's decision; None where nothing fits."""
        from earl_jax.placement import Placement
        from earl_jax.selector.choose import BudgetTooSmall

        placement = Placement(self.world, self.calibration)
        placement.pages = self.world.device_pages(room)
        try:
            return placement.choose_step(room, load)
        except BudgetTooSmall:
            return None

    def _update(self, option: Any, length: int) -> Timed:
        key = (option.mesh, option.rung, length)
        if key not in self._updates:
            self._updates[key] = Timed(self._trainer(option.mesh, option.rung, length))
        return self._updates[key]

    def _whole(self, room: int) -> Any:
        """The rung of a rollout that has pages for all slots."""
        from earl_jax.selector.ladder import RolloutRung

        world = self.world
        return RolloutRung(world.own_rollout.num_slots, world.device_pages(room))

    def _rollouts(self, room: int, chosen: Any) -> list[Any]:
        """Each mesh as the config says and as is chosen, with --ways in all ways.

        With pages for all slots.
        """
        whole, world = self._whole(room), self.world
        rungs = [whole]
        for rung in (chosen, *(self.ladder.rollout_ways(room, whole.pages) if self.ways else ())):
            dense = world.device_pages(room, rung.num_slots, rung.page_size)
            rungs.append(rung._replace(pages=dense, offload=False))
        return [
            dataclasses.replace(option, rung=rung)
            for rung in dict.fromkeys(rungs)
            for option in self.everything.rollout_options(
                room, 0, rung.pages, rung.num_slots, page_size=rung.page_size
            )
        ]

    def _trains(self, length: int, chosen: Any) -> list[Any]:
        """Each mesh as the config says and as is chosen, with --ways in all ways to learn."""
        ways = [self.world.first_train_rung, chosen]
        ways += self.ladder.train_ways(length) if self.ways else []
        return [
            option
            for way in dict.fromkeys(ways)
            for option in self.everything.train_options(length, way)
        ]

    def _player(self, mesh: Any, rung: Any, room: int, tasks: Sequence[Any]) -> Callable[[], Any]:
        """Publishes to this mesh and plays there; returns the load."""
        from earl_jax.loop import measure_load, play_all
        from earl_jax.placement import Placement

        world, trainer = self.world, self.world.train_candidates[0]
        placement = Placement(world, self.everything)
        placement.rollout_mesh, placement.train_mesh, placement.places = mesh, trainer, room
        placement.num_slots, placement.pages, _, placement.page_size = rung
        state = world.init_train_state(trainer)

        def run() -> Any:
            seat, _ = placement.open_seat(world.policy(state), version=0)
            return measure_load(play_all(world, placement, seat, tasks, None)[1])

        return run

    def _trainer(self, mesh: Any, rung: Any, length: int) -> Callable[[], Any]:
        """A step's updates on rows of so many tokens."""
        import jax

        from earl_jax.train.step import batch_shapes, read_metrics

        world, rows = self.world, self.world.config.rollout.episodes_per_step
        layout = world.train_layout(mesh)
        shapes = batch_shapes(rows, length, layout, with_proximal=world.needs_proximal)
        batch = jax.tree.map(
            lambda shape: jax.device_put(np.ones(shape.shape, shape.dtype), shape.sharding), shapes
        )
        program = world.train_step(mesh, "policy_gradient", rung)
        state = world.init_train_state(mesh)

        def run() -> None:
            nonlocal state
            for _ in range(world.config.train.epochs):
                state, metrics = program(state, batch, np.zeros(2, np.float32))
                read_metrics(metrics)

        return run


def _find(options: Sequence[Any], decision: Any) -> int:
    """The number of what was chosen; its rollout may have fewer pages than there are slots for."""
    for number, option in enumerate(options):
        if (option.mesh, _but_pages(option.rung)) == (decision.mesh, _but_pages(decision.rung)):
            return number
    raise ValueError(f"{decision.mesh} on {decision.rung} is none of the candidates measured")


def _but_pages(rung: Any) -> Any:
    return rung._replace(pages=0) if hasattr(rung, "pages") else rung


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


def measure(
    bench: Bench, points: Sequence[tuple[str, int]], minutes: float
) -> Iterator[dict[str, Any]]:
    """A row for each kind of load and room, until the time is over."""
    start_s = time.monotonic()
    _say(f"{len(points)} points")
    if points:
        bench.measure_ahead()
    took_s: list[float] = []
    for number, (kind, room) in enumerate(points, start=1):
        begun_s = time.monotonic()
        if took_s and begun_s - start_s + max(took_s) > 60 * minutes:
            _say(f"the {minutes:g} minutes are over; {len(points) - number + 1} points are left")
            return
        yield bench.point(room, kind)
        took_s.append(time.monotonic() - begun_s)
        left_s = (len(points) - number) * sum(took_s) / len(took_s)
        _say(f"point {number} of {len(points)} took {took_s[-1]:.0f} s; {left_s / 60:.1f} min left")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def regret_command(arguments: Sequence[str]) -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rooms", default="", help="tokens, by commas (the config's buckets)")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--ways", action="store_true", help="not only meshes, but all ways")
    parser.add_argument("--minutes", type=float, default=20, help="no point is begun behind these")
    parser.add_argument("--to", type=Path, help="a file of points as JSON, to append to; goes on")
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags = parser.parse_args([a for a in arguments if not a.startswith("--config.")])
    from earl_jax.bench import write_table
    from earl_jax.config_file import load_config_file, make_config

    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    if flags.rooms:
        overrides.append(f"rollout.context_buckets=({flags.rooms},)")
    config = make_config(load_config_file(flags.config), overrides)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    kept = Kept(flags.to, config, repeats=flags.repeats, ways=flags.ways)
    rooms = config.rollout.context_buckets
    points = [
        (kind, room)
        for room, kind in itertools.product(rooms, flags.loads.split(","))
        if not kept.has(kind, room)
    ]
    bench = Bench(config, flags.repeats, flags.ways, kept.table())

    def rows() -> Iterator[dict[str, Any]]:
        for row in measure(bench, points, flags.minutes):
            kept.append({"config": flags.config.name, "arguments": overrides, **row})
            yield row

    if flags.json:
        for row in rows():
            print(json.dumps(row), flush=True)
    else:
        names = ("room", "load", "pairs", "left out", "chosen", "best", "chosen s", "best s")
        shown = (*names, "slower by", "the first by")
        write_table({name: row.get(name) for name in shown} for row in rows())
    for same in dict.fromkeys(row.get("same") for row in kept.rows):
        of_this = [row for row in kept.rows if row.get("same") == same]
        words = " ".join(of_this[0].get("arguments", ()))
        _say(f"{summary([r['slower by'] for r in of_this if 'slower by' in r])}: {words}")
    _say(f"all: {summary([row['slower by'] for row in kept.rows if 'slower by' in row])}")


if __name__ == "__main__":
    sys.exit(exit_status(lambda: regret_command(sys.argv[1:])))
