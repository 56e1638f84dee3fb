# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Simulates synchronous, streaming and asynchronous training on any number of devices.

    uv run python -m benchmarks.simulate [--write]

Arithmetic only: an event heap over the slots, driven by the product's decisions. `SlotScheduler`
says which task begins in which slot, `OpenGroups` which groups a step begins and takes. Half of the
devices play and half train. `python -m benchmarks.asynchrony` runs the product and this simulation
of it side by side, with the lengths and the measured stage times of the run (`Setup`).
"""

import dataclasses
import heapq
import math
import random
import statistics
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import parser_of, show, table
from earl_jax.engine.rows import Rows
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.scheduler import Order, SlotScheduler
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.rollout.tasks import Tasks

PAGE = Path(__file__).with_suffix(".md")
PAPER = {"synchronous": 1.0, "longest first": 1.08, "streaming": 1.23, "asynchronous": 1.48}
# Steps at the start that are not counted.
WARM_UP = 2
PERCENTS = (20, 10, 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Work and hardware of a run; times are in decode steps of an empty instance.

    An instance is the devices that hold the weights once, and decodes for `slots` episodes. A step
    of decoding takes 1 + live / `saturation`. Episodes are log-normal with this median and sigma,
    cut at `longest`, `groups` times `group_size` a step; the share `by_task` of the variance of
    their logarithm is that of the task, which a group has in common. `seed` draws other lengths.
    Weights are published in `publish`. Live episodes then read their tokens again, `read` of them a
    round; 0: their KV is kept. `lengths` are those of the first episodes, where they are known.
    Rounds beside an update take `beside` times as long as others.
    """

    devices: int = 64
    devices_per_instance: int = 8
    slots: int = 32
    groups: int = 64
    group_size: int = 8
    median: float = 2000.0
    sigma: float = 1.0
    longest: int = 20_000
    by_task: float = 0.5
    saturation: float = 32.0
    burst: int = 32
    publish: float = 200.0
    read: int = 0
    beside: float = 1.0
    lengths: tuple[int, ...] = ()
    num_steps: int = 6
    seed: int = 0

    @property
    def instances(self) -> int:
        """Instances that play: on half of the devices."""
        return max(1, self.devices // 2 // self.devices_per_instance)

    @property
    def episodes_per_step(self) -> int:
        """Episodes of a step."""
        return self.groups * self.group_size

    def length(self, episode: int) -> int:
        """Returns the tokens of an episode, the same in every run."""
        if episode < len(self.lengths):
            return self.lengths[episode]
        of_task = random.Random(f"task {self.seed} {episode // self.group_size}").gauss()
        own = random.Random(f"episode {self.seed} {episode}").gauss()
        noise = math.sqrt(self.by_task) * of_task + math.sqrt(1 - self.by_task) * own
        tokens = self.median * math.exp(self.sigma * noise)
        return max(16, min(self.longest, round(tokens)))


class SimulatedService:
    """Episodes of given lengths in slots; all play in rounds of `burst` tokens, as in the engine.

    Rounds in which no episode ends are played at once, up to the time `until`.
    """

    def __init__(self, setup: Setup, order: Order, instances: int, slots: int) -> None:
        self._setup, self._instances = setup, instances
        rows = Rows(data_shards=1, own=setup.episodes_per_step, spare=0)
        self._scheduler = SlotScheduler(rows, instances * slots, order)
        self._free = list(range(instances * slots))
        self._tasks: list[Any] = []
        # Ends by round: (round, ticket, slot); rounds of tickets' beginnings, later by those in
        # which their tokens are read again; the last of these; oldest versions.
        self._ends: list[tuple[int, int, int]] = []
        self._began: dict[int, int] = {}
        self._reads_until: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        self.num_rounds = self._version = 0
        self.now, self.until = 0.0, math.inf

    @property
    def is_busy(self) -> bool:
        """True while a task waits or plays."""
        return bool(self._ends or self._scheduler.num_waiting)

    def submit(self, tasks: Sequence[Any]) -> list[int]:
        """Queues tasks. Returns their tickets."""
        tickets = list(range(len(self._tasks), len(self._tasks) + len(tasks)))
        self._tasks += tasks
        for ticket, task in zip(tickets, tasks, strict=True):
            self._scheduler.submit(ticket, task.group)
        return tickets

    def oldest_versions(self) -> dict[int, int]:
        """Returns the oldest version in each episode that plays."""
        return self._oldest

    def release(self, row: int) -> None:
        """Does nothing: there are as many rows as are wanted."""

    def publish(self, version: int) -> None:
        """Lets episodes go on with other weights, under which they read their tokens again."""
        self._version, setup, now = version, self._setup, self.num_rounds
        if not setup.read:
            return
        ends = []
        for end, ticket, slot in self._ends:
            # What is still to be read under the weights before is not read any more.
            unread = max(0, self._reads_until.get(ticket, 0) - now)
            played = now - self._began[ticket] + unread
            reads = math.ceil(played * setup.burst / setup.read)
            self._began[ticket] += reads - unread
            self._reads_until[ticket] = now + reads
            ends.append((end + reads - unread, ticket, slot))
        self._ends = ends
        heapq.heapify(ends)

    def step(self) -> list[Finished]:
        """Plays rounds until an episode ends, or until `until`."""
        self._refill()
        burst = self._setup.burst
        live = math.ceil(len(self._ends) / self._instances)
        seconds = burst * (1 + live / self._setup.saturation)
        seconds *= 1.0 if math.isinf(self.until) else self._setup.beside
        left = (self.until - self.now) / seconds
        rounds = max(1, math.ceil(min(self._ends[0][0] - self.num_rounds, left)))
        self.num_rounds, self.now = self.num_rounds + rounds, self.now + rounds * seconds
        finished = []
        while self._ends and self._ends[0][0] <= self.num_rounds:
            _, ticket, slot = heapq.heappop(self._ends)
            self._free.append(slot)
            length = self._setup.length(self._tasks[ticket].episode)
            self._scheduler.end(ticket, length)
            del self._began[ticket]
            self._reads_until.pop(ticket, None)
            trajectory: Any = types.SimpleNamespace(
                group=self._tasks[ticket].group,
                num_tokens=length,
                oldest_version=self._oldest.pop(ticket),
                row=0,
            )
            finished.append(Finished(ticket=ticket, trajectory=trajectory))
        return finished

    def _refill(self) -> None:
        if not (self._free and self._scheduler.num_waiting):
            return
        burst = self._setup.burst
        now = self.num_rounds
        self._scheduler.play({t: max(0, now - r) * burst for t, r in self._began.items()})
        for slot, ticket in self._scheduler.assign(sorted(self._free)).items():
            rounds = math.ceil(self._setup.length(self._tasks[ticket].episode) / burst)
            heapq.heappush(self._ends, (now + rounds, ticket, slot))
            self._began[ticket], self._oldest[ticket] = now, self._version
            self._free.remove(slot)


OpenService = Callable[[Setup, Order, int, int], SimulatedService]


def tasks_of(setup: Setup) -> Tasks:
    """Returns the tasks of a run, whose episodes are numbers only."""
    size = setup.group_size
    number = setup.episodes_per_step // size
    batch: Callable[[int], list[dict[str, Any]]] = lambda step: [{}] * number  # noqa: E731
    parts: Any = types.SimpleNamespace(
        tasks=types.SimpleNamespace(batch=batch),
        rollout=types.SimpleNamespace(episodes_per_step=setup.episodes_per_step, group_size=size),
    )
    return Tasks(
        played=parts, rollout=parts.rollout, renderer=parts, seed=0, num_steps=setup.num_steps
    )


def run(
    setup: Setup,
    settings: AsynchronyConfig,
    order: Order,
    train_s: float,
    warm_up: int = WARM_UP,
    open_service: OpenService = SimulatedService,
) -> dict[str, Any]:
    """Simulates a run whose updates take `train_s` for a token.

    Returns:
        Trained tokens per time, the time and the rounds of a step, and the greatest age of a
        trained token, without the first `warm_up` steps.
    """
    service = open_service(setup, order, setup.instances, setup.slots)
    groups = OpenGroups(tasks_of(setup), settings)
    begun_at, rounds, tokens, most = [], [], [], 0
    for version in range(setup.num_steps):
        begun_at.append(service.now)
        rounds.append(service.num_rounds)
        service.now, service.until = service.now + setup.publish, math.inf
        service.publish(version)
        if version:
            groups.publish(version)
        else:
            groups.open(service, version)
        left, trained_at, num_tokens = groups.size, service.now, 0
        while left:
            episodes = [each.trajectory for each in groups.next_episodes(left)]
            left -= len(episodes) // setup.group_size
            part = sum(each.num_tokens for each in episodes)
            trained_at, num_tokens = (
                max(trained_at, service.now) + part * train_s,
                num_tokens + part,
            )
            most = max(most, *(version - each.oldest_version for each in episodes))
        if settings.max_staleness:
            service.until = trained_at
            groups.play_beside(lambda: service.now >= trained_at)  # noqa: B023
        service.now = max(service.now, trained_at)
        groups.end_step(version + 1, groups.oldest_step)
        tokens.append(num_tokens)
    seconds, counted = service.now - begun_at[warm_up], tokens[warm_up:]
    return {
        "speed": sum(counted) / seconds,
        "step": seconds / len(counted),
        "rounds": (service.num_rounds - rounds[warm_up]) / len(counted),
        "most": most,
    }


LADDER: dict[str, tuple[AsynchronyConfig, Order]] = {
    "synchronous": (AsynchronyConfig(), "fifo"),
    "longest first": (AsynchronyConfig(), "longest"),
    "streaming": (AsynchronyConfig(parts=8), "longest"),
    "asynchronous": (AsynchronyConfig(max_staleness=1, parts=8), "longest"),
    "staleness 4": (AsynchronyConfig(max_staleness=4, parts=8), "fifo"),
}


def ladder(devices: Sequence[int], train_share: float, **changes: Any) -> list[dict[str, Any]]:
    """Returns the speeds of each line of LADDER relative to the first.

    Updates take `train_share` of the time of a synchronous rollout.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {"": name, "StreamRL, measured": PAPER.get(name)} for name in LADDER
    }
    for number in devices:
        setup = Setup(devices=number, **changes)
        only_played = run(setup, *LADDER["synchronous"], train_s=0.0)
        train_s = train_share / only_played["speed"]
        speeds = {
            name: run(setup, *line, train_s=train_s)["speed"] for name, line in LADDER.items()
        }
        for name, speed in speeds.items():
            rows[name][f"{number} devices"] = round(speed / speeds["synchronous"], 3)
    return list(rows.values())


# Orders of one synchronous rollout.


def makespan(
    setup: Setup,
    episodes: Sequence[int],
    order: Order,
    instances: int,
    slots: int,
    open_service: OpenService = SimulatedService,
) -> float:
    """Returns the time in which these episodes are played, in this order where it is "fifo"."""
    service = open_service(setup, order, instances, slots)
    size = setup.group_size
    service.submit([types.SimpleNamespace(episode=e, group=e // size) for e in episodes])
    while service.is_busy:
        service.step()
    return service.now


def isolated(setup: Setup, ranked: Sequence[int]) -> float:
    """Returns the time of the best split of StreamRL's kind: the longest on instances of their own.

    The first of the `ranked` episodes go to some of the instances, with fewer slots each; both
    parts begin with their longest.
    """
    best = math.inf
    for share in (0.05, 0.1, 0.2):
        cut = round(len(ranked) * share)
        for number in range(1, setup.instances):
            rest = makespan(setup, ranked[cut:], "fifo", setup.instances - number, setup.slots)
            if rest >= best:
                break
            for slots in (4, 8, 16, setup.slots):
                long = makespan(setup, ranked[:cut], "fifo", number, slots)
                best = min(best, max(long, rest))
    return best


def orders(by_task: float, seeds: int = 3) -> dict[str, Any]:
    """Returns the gain over first in, first out of longest first by what it costs to know."""
    gains: dict[str, list[float]] = {}
    for seed in range(seeds):
        setup = Setup(by_task=by_task, seed=seed)
        todo = list(range(setup.episodes_per_step))
        ranked = sorted(todo, key=lambda episode: -setup.length(episode))
        sizes = (setup.instances, setup.slots)
        fifo = makespan(setup, todo, "fifo", *sizes)
        times = {
            "free signals": makespan(setup, todo, "longest", *sizes),
            "lengths known": makespan(setup, ranked, "fifo", *sizes),
            "known, long ones isolated": isolated(setup, ranked),
        }
        for name, each in times.items():
            gains.setdefault(name, []).append(fifo / each)
    means = {name: round(statistics.fmean(each), 3) for name, each in gains.items()}
    return {"share of the task": by_task, **means, **recalls_by_one(by_task)}


def recalls(expected: Sequence[float], lengths: Sequence[int]) -> dict[int, float]:
    """Returns which share of the longest 20, 10 and 5 % is among as many expected to be longest.

    At least of one episode. Example: of lengths 4 9 1 1 1 the longest 20 % are the second; with 9 8
    1 2 1 expected the first would be taken for it.
    """
    found = {}
    for percent in PERCENTS:
        number = max(1, len(lengths) * percent // 100)
        longest, chosen = (
            set(sorted(range(len(lengths)), key=lambda i: (-by[i], i))[:number])
            for by in (lengths, expected)
        )
        found[percent] = len(longest & chosen) / number
    return found


def recalls_by_one(by_task: float) -> dict[str, float]:
    """Returns the recalls where one of each group, which is not counted, says how long it is."""
    setup, size = Setup(groups=1024, by_task=by_task), Setup.group_size
    lengths = [setup.length(episode) for episode in range(setup.episodes_per_step)]
    first = [float(lengths[i - i % size]) for i in range(len(lengths)) if i % size]
    rest = [length for i, length in enumerate(lengths) if i % size]
    return {f"recall {percent} %": share for percent, share in recalls(first, rest).items()}


def main() -> None:
    """Prints the tables."""
    flags, parts = parser_of(__doc__).parse_args(), []
    for share in (0.5, 1.0):
        parts += [f"Updates take {share:g} of the time of a synchronous rollout:"]
        parts += [table(ladder((16, 64, 256, 1024), share))]
    parts += ["One synchronous rollout on 64 devices, by how much of an episode's length its task"]
    parts[-1] += " decides; time of first in, first out divided by that of:"
    parts += [table([orders(by_task) for by_task in (0.3, 0.5, 0.7, 0.9)])]
    show("\n\n".join(parts), PAGE, write=flags.write)


if __name__ == "__main__":
    main()
