# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How much slower than the best meshes are those that the selector chooses.

    python -m benchmarks.selector_regret [--config=FILE] [--config.key=value] [--rooms=24,40,72]
        [--minutes=20] [--to=FILE]

At each room per episode, and for each kind of load, the step is measured for every candidate of
each stage: publishing and playing real episodes, and one step's updates, by turns. A candidate is a
mesh, with --ways in every way to be used: with fewer slots and other page sizes
(config.selector.page_sizes), in more micro-batches and with remat. A pair of candidates takes what
its stages take; pairs that the budget does not hold are no rivals. Then the selector chooses from
its own measurements (of synthetic rounds, as at the start of a run) and guesses, and from the load
of such a step. Beside it stands what a rule without measurements loses: the first pair of the list
that fits. Episodes are as long as the load says because their turns are limited; a policy of random
weights seldom ends one.

Prints each point as soon as it is known, and with --to appends it to a file, as JSON with the
seconds of every candidate; behind --minutes no more are begun.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Pair(NamedTuple):
    """The numbers of a rollout mesh and of a training mesh, in the order of the candidates."""

    rollout: int
    train: int


def regret(step_s: Mapping[Pair, float], chosen: Pair) -> tuple[float, Pair]:
    """By what fraction the chosen pair's step is longer than the best one's, and which that is."""
    best = min(step_s, key=lambda pair: step_s[pair])
    return step_s[chosen] / step_s[best] - 1.0, best


def pairs_within(
    rollout_bytes: Sequence[int],
    train_bytes: Sequence[int],
    resident_bytes: Sequence[int],
    budget: int | None,
) -> list[Pair]:
    """The pairs that the budget holds: the rollout beside what its trainer leaves on a device."""
    most = float("inf") if budget is None else budget
    pairs = itertools.product(range(len(rollout_bytes)), range(len(train_bytes)))
    return [
        Pair(r, t)
        for r, t in pairs
        if train_bytes[t] <= most and rollout_bytes[r] + resident_bytes[t] <= most
    ]


class Bench:
    """The points of one config."""

    def __init__(self, config: Any, repeats: int, ways: bool) -> None:
        """Measures the candidates as the start of a run does."""
        from earl_jax.calibrate import Calibration
        from earl_jax.selector.throughput import ThroughputTable
        from earl_jax.survival import Ladder
        from earl_jax.world import World

        self.config, self.repeats, self.ways = config, repeats, ways
        self.world = World(config)
        table = ThroughputTable(path=None, measurements={})
        self.calibration = Calibration(self.world, table, _say)
        # What is measured for the comparison, the choice must not know.
        self.everything = Calibration(self.world, table, lambda _: None)
        self.ladder = Ladder(self.world)

    def point(self, room: int, kind: str) -> dict[str, Any]:
        """A row: what was chosen and what is best at this room, for this kind of load."""
        from earl_jax.placement import Placement

        world, tasks = self.world, _tasks(self.world, kind, room)
        pages = world.pool_for(room).pages
        load = self._player(world.rollout_candidates[0], self._whole(room), room, tasks)()
        length = world.config.rollout.places_for(load.context_tokens_max)
        rollouts, trains = self._rollouts(room), self._trains(length)
        pairs = pairs_within(
            [option.bytes_per_device for option in rollouts],
            [option.bytes_per_device for option in trains],
            [self.ladder.trainer_bytes(option.mesh) for option in trains],
            world.budget_bytes,
        )
        row: dict[str, Any] = {"room": room, "load": kind, "pairs": len(pairs)}
        row["left out"] = len(rollouts) * len(trains) - len(pairs)
        if not pairs:
            return row | {"chosen": "no pair fits without a lower rung"}
        placement = Placement(world, self.calibration)
        placement.pages = pages
        decision = placement.choose_step(room, load)
        chosen = Pair(_find(rollouts, decision.rollout), _find(trains, decision.train))
        some_r, some_t = (sorted({pair[n] for pair in pairs}) for n in (0, 1))
        runs = [self._player(rollouts[r].mesh, rollouts[r].rung, room, tasks) for r in some_r]
        runs += [self._trainer(trains[t].mesh, trains[t].rung, length) for t in some_t]
        seconds = least_s(runs, self.repeats)
        rollout_s = dict(zip(some_r, seconds, strict=False))
        train_s = dict(zip(some_t, seconds[len(some_r) :], strict=True))
        step_s = {p: rollout_s[p.rollout] + train_s[p.train] for p in pairs}
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
            "rollout_s": {rollouts[r].words: s for r, s in rollout_s.items()},
            "train_s": {trains[t].words: s for t, s in train_s.items()},
        }

    def _whole(self, room: int) -> Any:
        """The rung of a rollout that has pages for all slots."""
        from earl_jax.selector.ladder import RolloutRung

        world = self.world
        return RolloutRung(world.own_rollout.num_slots, world.pool_for(room).pages)

    def _rollouts(self, room: int) -> list[Any]:
        """Each mesh, with --ways on all rungs that have pages for all of their slots."""
        whole, world = self._whole(room), self.world
        rungs = [whole]
        for rung in self.ladder.rollout_ways(room, whole.pages) if self.ways else ():
            dense = world.pool_for(room, rung.num_slots, rung.page_size).pages
            if rung.pages >= dense and not rung.offload:
                rungs.append(rung)
        return [
            dataclasses.replace(option, rung=rung)
            for rung in dict.fromkeys(rungs)
            for option in self.everything.rollout_options(
                room, 0, rung.pages, rung.num_slots, page_size=rung.page_size
            )
        ]

    def _trains(self, length: int) -> list[Any]:
        """Each mesh, with --ways in all ways to learn."""
        ways = self.ladder.train_ways(length) if self.ways else [self.world.first_train_rung]
        return [o for way in ways for o in self.everything.train_options(length, way)]

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


def least_s(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """The shortest of so many times of each, behind one that compiles: disturbance only adds to it.

    They take turns, so that what else the machine does falls on all of them.
    """
    for run in runs:
        run()
    least = [float("inf")] * len(runs)
    for _ in range(repeats):
        for n, run in enumerate(runs):
            start_s = time.perf_counter()
            run()
            least[n] = min(least[n], time.perf_counter() - start_s)
    return least


def measure(
    config: Any, repeats: int, kinds: Sequence[str], minutes: float, ways: bool = False
) -> Iterator[dict[str, Any]]:
    """A row for each kind of load and room, until the time is over."""
    start_s = time.monotonic()
    bench, rooms = Bench(config, repeats, ways), config.rollout.context_buckets
    points = list(itertools.product(kinds, rooms))
    _say(f"{len(points)} points")
    bench.calibration.measure_all()
    took_s: list[float] = []
    for number, (kind, room) in enumerate(points, start=1):
        begun_s = time.monotonic()
        if took_s and begun_s - start_s + max(took_s[-len(rooms) :]) > 60 * minutes:
            _say(f"the {minutes:g} minutes are over; {len(points) - number + 1} points are left")
            return
        yield bench.point(room, kind)
        took_s.append(time.monotonic() - begun_s)
        left_s = (len(points) - number) * sum(took_s) / len(took_s)
        _say(f"point {number} of {len(points)} took {took_s[-1]:.0f} s; {left_s / 60:.1f} min left")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def summary(lost: Sequence[float]) -> str:
    """How many points are within 5 and 10 % of the best, in words."""
    if not lost:
        return "no point was measured"
    shares = [np.mean([one <= most for one in lost]) for most in (0.05, 0.10)]
    return (
        f"{len(lost)} points: {shares[0]:.0%} at most 5 % slower than the best, {shares[1]:.0%} "
        f"at most 10 %, the worst {max(lost):.1%}"
    )


def regret_command(arguments: Sequence[str]) -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rooms", default="", help="tokens, by commas (the config's buckets)")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--ways", action="store_true", help="not only meshes, but all ways")
    parser.add_argument("--minutes", type=float, default=20, help="no point is begun behind these")
    parser.add_argument("--to", type=Path, help="a file that points are appended to, as JSON")
    parser.add_argument("--json", action="store_true", help="an object a line")
    flags = parser.parse_args([a for a in arguments if not a.startswith("--config.")])
    from earl_jax.bench import write_table
    from earl_jax.config_file import load_config_file, make_config

    overrides = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    if flags.rooms:
        overrides.append(f"rollout.context_buckets=({flags.rooms},)")
    config = make_config(load_config_file(flags.config), overrides)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    lost: list[float] = []

    def kept() -> Iterator[dict[str, Any]]:
        kinds = flags.loads.split(",")
        for row in measure(config, flags.repeats, kinds, flags.minutes, flags.ways):
            if "slower by" in row:
                lost.append(row["slower by"])
            if flags.to:
                with flags.to.open("a") as file:
                    file.write(json.dumps({"config": flags.config.name, **row}) + "\n")
            yield row

    if flags.json:
        for row in kept():
            print(json.dumps(row), flush=True)
    else:
        names = ("room", "load", "pairs", "left out", "chosen", "best", "chosen s", "best s")
        shown = (*names, "slower by", "the first by")
        write_table({name: row.get(name) for name in shown} for row in kept())
    _say(summary(lost))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: regret_command(sys.argv[1:])))
