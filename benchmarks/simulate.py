# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Simulates synchronous, streaming and asynchronous training on any number of devices.

    uv run python -m benchmarks.simulate [--write]

Arithmetic only: an event heap over the slots, driven by the product's decisions. `SlotScheduler`
says which task begins in which slot, `OpenGroups` which groups a step begins and takes. Half of the
devices play and half train. `python -m benchmarks.asynchrony` runs the product and this simulation
of it side by side, with the rounds of its episodes and its stage times (`Setup`).
"""

import dataclasses
import functools
import heapq
import math
import random
import statistics
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks.pages import parser_of, read_table, show, table
from earl_jax.engine.rows import Rows
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.row_pool import Finished
from earl_jax.rollout.scheduler import Order, SlotScheduler
from earl_jax.rollout.staleness import AsynchronyConfig, Rule
from earl_jax.rollout.tasks import Tasks

PAGE = Path(__file__).with_suffix(".md")
MEASURED = PAGE.with_name("asynchrony.md")
PAPER = {"synchronous": 1.0, "longest first": 1.08, "streaming": 1.23, "asynchronous": 1.48}
# Steps at the start that are not counted, and those of the tables of runs.
WARM_UP, BEHIND = 2, 8
PERCENTS = (20, 10, 5)
DEVICES = (8, 16, 64, 256, 1024)
# With this deviation of the logarithm of a predicted length from that of the length, the recall of
# the longest 20 % is that of StreamRL's ranker, 0.87.
ERROR = 0.24
# Tokens of an episode in a round of benchmarks/asynchrony.md, and those that it reads again in one.
TOKENS_A_ROUND, CHUNK = 6, 64
# An instance of twice as many devices: its step of decoding without episodes by that of others, and
# its saturation. By the selector's speed model a step of Qwen2.5-72B at 16,384 tokens takes 12.2 ms
# and 0.26 for each episode on 8 H100s, 18.3 ms and 0.49 on 4.
WIDE_STEP, WIDE_SATURATION = 0.665, 47.0
# A round there of so many live episodes takes twice as long as one of none: synchronous steps of
# its ladder take 3.2 ms a round and 0.35 ms for each episode in it, within 2 %.
SATURATION = 9.4


@functools.cache
def _gauss(name: str) -> float:
    """Returns a normal number of this name."""
    return random.Random(name).gauss()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Work and hardware of a run; times are in decode steps of an empty instance.

    An instance is the devices that hold the weights once, and decodes for `slots` episodes. A step
    of decoding takes 1 + live / `saturation`. Episodes are log-normal with this median and sigma,
    cut at `longest`, `groups` times `group_size` a step; the share `by_task` of the variance of
    their logarithm is that of the task, which a group has in common. `seed` draws other lengths.
    Weights are published in `publish`. Live episodes then read their tokens again, `read` of them a
    round, and go on in the last of these; 0: their KV is kept. `lengths` are those of the first
    episodes, where they are known. Rounds beside gradients or an update take `beside` times as long
    as others. With parts each takes `part`, and `part_token` for each of its tokens (0: as long as
    in a whole update), and nothing is played for `hand`; with `queued`, as where processes send
    each other rows, they are sent when the gradients of the parts before are computed. Of tasks
    that were `seen` the mean length of as many episodes of another time is known. With an `error`,
    the tasks of a step begin in the order of their lengths as `predicted` with it, the longest
    first. Tasks and slots are in `data_shards` equal parts, whose tasks begin there if a slot is
    free (`Rows`).
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
    read: float = 0.0
    beside: float = 1.0
    part: float = 0.0
    part_token: float = 0.0
    hand: float = 0.0
    queued: bool = False
    data_shards: int = 1
    lengths: tuple[int, ...] = ()
    seen: bool = False
    error: float | None = None
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
        return self._drawn(episode, f"episode {self.seed} {episode}")

    def before(self, episode: int) -> int | None:
        """Returns the mean length that the episodes of its task had at another time, if `seen`."""
        if not self.seen:
            return None
        task = episode // self.group_size
        names = (f"before {self.seed} {task} {index}" for index in range(self.group_size))
        return round(statistics.fmean(self._drawn(episode, name) for name in names))

    def _drawn(self, episode: int, name: str) -> int:
        noise = self._of_task(episode) + math.sqrt(1 - self.by_task) * _gauss(name)
        tokens = self.median * math.exp(self.sigma * noise)
        return max(16, min(self.longest, round(tokens)))

    def by_prompt(self, episode: int) -> float:
        """Returns the median length of the episodes of its task: all that a prompt can say."""
        return self.median * math.exp(self.sigma * self._of_task(episode))

    def predicted(self, episode: int, error: float) -> float:
        """Returns the length with a log-normal error of this deviation."""
        noise = _gauss(f"error {self.seed} {episode}")
        return self.length(episode) * math.exp(error * noise)

    def _of_task(self, episode: int) -> float:
        of_task = _gauss(f"task {self.seed} {episode // self.group_size}")
        return math.sqrt(self.by_task) * of_task


def tokens_until(had: Sequence[tuple[int, int]], version: int) -> int:
    """Returns how many of an episode's tokens are of this version or an older one.

    `had` are the tokens that it had when each version, or the episode, was over.
    """
    return max((tokens for of, tokens in had if of <= version), default=0)


class SimulatedService:
    """Episodes of given lengths in slots; all play in rounds of `burst` tokens, as in the engine.

    Rounds in which no episode ends are played at once, up to the time `until`. Those that begin
    before `trains_until` are beside the trainer's work. Where it `holds_tasks`, none begins.
    """

    def __init__(self, setup: Setup, order: Order, instances: int, slots: int) -> None:
        self._setup, self._order = setup, order
        self._instances = instances
        shards = setup.data_shards
        rows = Rows(data_shards=shards, own=setup.episodes_per_step // shards, spare=0)
        self._scheduler = SlotScheduler(rows, instances * slots, order)
        self._free = list(range(instances * slots))
        self._tasks: list[Any] = []
        # Those that wait for their turn by predicted lengths: (step, -length, ticket, group).
        self._ranked: list[tuple[int, float, int, int]] = []
        # Tasks of each group that have not ended.
        self._left: dict[int, int] = {}
        # Ends by round: (round, ticket, slot); rounds of tickets' beginnings, later by those in
        # which their tokens are read again; the last of these; oldest versions.
        self._ends: list[tuple[int, int, int]] = []
        self._began: dict[int, int] = {}
        self._reads_until: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        # Tokens that live episodes had when a version was over: (version, tokens).
        self._had: dict[int, list[tuple[int, int]]] = {}
        self.num_rounds = self._version = 0
        self.holds_tasks = False
        self.now, self.until, self.trains_until = 0.0, math.inf, 0.0

    @property
    def num_live(self) -> int:
        """The number of episodes that play."""
        return len(self._ends)

    @property
    def is_busy(self) -> bool:
        """True while a task waits or plays."""
        return bool(self._ends or self._ranked or self._scheduler.num_waiting)

    def submit(self, tasks: Sequence[Any]) -> list[int]:
        """Queues tasks. Returns their tickets."""
        tickets = list(range(len(self._tasks), len(self._tasks) + len(tasks)))
        self._tasks += tasks
        for ticket, task in zip(tickets, tasks, strict=True):
            if self._setup.error is None:
                before = self._setup.before(task.episode)
                self._scheduler.submit(ticket, task.group, before=before)
            else:
                predicted = self._setup.predicted(task.episode, self._setup.error)
                step = task.episode // self._setup.episodes_per_step
                heapq.heappush(self._ranked, (step, -predicted, ticket, task.group))
            self._left[task.group] = self._left.get(task.group, 0) + 1
        return tickets

    def oldest_versions(self) -> dict[int, int]:
        """Returns the oldest version in each episode that plays."""
        return self._oldest

    def release(self, row: int) -> None:
        """Does nothing: there are as many rows as are wanted."""

    def publish(self, version: int) -> None:
        """Lets episodes go on with other weights, under which they read their tokens again."""
        setup, now, ends = self._setup, self.num_rounds, []
        for end, ticket, slot in self._ends:
            # What is still to be read under the weights before is not read any more.
            unread = max(0, self._reads_until.get(ticket, 0) - now)
            played = now - self._began[ticket] + unread
            self._had.setdefault(ticket, []).append((self._version, played * setup.burst))
            if not setup.read:
                ends.append((end, ticket, slot))
                continue
            # An episode goes on in the round in which it reads the last of them.
            reads = max(0, math.ceil(played * setup.burst / setup.read) - 1)
            self._began[ticket] += reads - unread
            self._reads_until[ticket] = now + reads
            ends.append((end + reads - unread, ticket, slot))
        self._ends, self._version = ends, version
        heapq.heapify(ends)

    def step(self) -> list[Finished]:
        """Plays rounds until all episodes of a group have ended, or until `until`.

        No decision depends on a part of a group.
        """
        finished: list[Finished] = []
        is_over = False
        while not is_over:
            self._refill()
            if not self._ends:
                break
            self._advance()
            while self._ends and self._ends[0][0] <= self.num_rounds:
                each = self._end(*heapq.heappop(self._ends)[1:])
                finished.append(each)
                is_over |= not self._left[each.trajectory.group]
            is_over |= self.now >= self.until
        return finished

    def _advance(self) -> None:
        """Plays rounds until an episode, or the trainer's work, ends, or until `until`."""
        burst, until = self._setup.burst, self.until
        live = math.ceil(len(self._ends) / self._instances)
        seconds = burst * (1 + live / self._setup.saturation)
        if self.now < self.trains_until:
            seconds, until = seconds * self._setup.beside, min(until, self.trains_until)
        left = (until - self.now) / seconds
        rounds = max(1, math.ceil(min(self._ends[0][0] - self.num_rounds, left)))
        self.num_rounds, self.now = self.num_rounds + rounds, self.now + rounds * seconds

    def _end(self, ticket: int, slot: int) -> Finished:
        """Ends an episode, whose slot is free then."""
        task = self._tasks[ticket]
        self._free.append(slot)
        self._left[task.group] -= 1
        length = self._setup.length(task.episode)
        self._scheduler.end(ticket, length)
        del self._began[ticket]
        self._reads_until.pop(ticket, None)
        trajectory: Any = types.SimpleNamespace(
            group=task.group,
            num_tokens=length,
            oldest_version=self._oldest.pop(ticket),
            had=[*self._had.pop(ticket, ()), (self._version, length)],
            row=0,
        )
        trajectory.outcome = trajectory
        return Finished(ticket=ticket, trajectory=trajectory)

    def _refill(self) -> None:
        if self.holds_tasks:
            return
        while self._ranked and self._scheduler.num_waiting < len(self._free):
            _, _, ticket, group = heapq.heappop(self._ranked)
            self._scheduler.submit(ticket, group)
        if not (self._free and self._scheduler.num_waiting):
            return
        burst = self._setup.burst
        now = self.num_rounds
        if self._order == "longest":
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


class Step(NamedTuple):
    """A step: the time of its begin, the number of rounds before it, and its episodes."""

    begun_at: float
    round: int
    trained: list[Any]
    dropped: list[Any]


def run(
    setup: Setup,
    settings: AsynchronyConfig,
    order: Order,
    train_s: float,
    warm_up: int = WARM_UP,
    cool_down: int = 0,
    open_service: OpenService = SimulatedService,
) -> dict[str, Any]:
    """Simulates a run whose gradients take `train_s` for a token. Returns the result (`summary`).

    A part begins when it is finished and the gradients of those before it are computed. The first
    `warm_up` and the last `cool_down` steps do not count: in the last ones of an asynchronous run
    there is less and less to play.
    """
    service = open_service(setup, order, setup.instances, setup.slots)
    groups = OpenGroups(tasks_of(setup), settings)
    steps, trained_at = list[Step](), 0.0

    def is_ready() -> bool:
        """Returns whether the trainer waits for the next part; if not, rounds go on until then."""
        ready = not setup.queued or service.now >= trained_at
        service.until = math.inf if ready else trained_at
        return ready

    for version in range(setup.num_steps):
        step = Step(service.now, service.num_rounds, [], [])
        steps.append(step)
        service.until = math.inf
        # All groups of a step that are there already are one part.
        whole = settings.parts == 1 or (version > 0 and groups.has_next_step)
        if version and not settings.interrupts:
            groups.finish_live()
        service.now += setup.publish
        service.publish(version)
        if version:
            groups.publish(version)
        else:
            groups.open(service, version)
        left, trained_at = groups.size, service.now
        while left:
            found = groups.next_episodes(left, whole=whole, is_ready=is_ready)
            episodes = [each.trajectory for each in found]
            left -= len(episodes) // setup.group_size
            part = sum(each.num_tokens for each in episodes)
            step.trained.extend(episodes)
            part_s = part * (train_s if whole else setup.part_token or train_s)
            part_s += 0.0 if whole else setup.part
            begun_s = max(trained_at, service.now)
            trained_at = service.trains_until = begun_s + part_s
            if not whole:
                service.now = (begun_s if setup.queued else service.now) + setup.hand
        if settings.max_staleness:
            service.until = trained_at
            groups.play_beside(lambda: service.now >= trained_at)  # noqa: B023
        service.now = max(service.now, trained_at)
        groups.end_step(version + 1, groups.oldest_step)
        step.dropped.extend(groups.dropped)
        groups.count_from_here()
    steps.append(Step(service.now, service.num_rounds, [], []))
    return summary(steps, warm_up, setup.num_steps - cool_down, settings.max_staleness)


def summary(steps: Sequence[Step], first: int, last: int, bound: int) -> dict[str, Any]:
    """Returns the means of steps `first` to `last` - 1, of which one more has begun.

    Trained tokens per time ("speed"), the time and the rounds of a "step", and the "length" of a
    trained episode, also by that of trained and dropped ones ("trained"). The share of trained
    tokens "beyond" the bound, and of tokens that were "dropped". The most versions that a trained
    token was old, of all steps.
    """
    counted, number = steps[first:last], last - first
    trained = [each for step in counted for each in step.trained]
    dropped = [each for step in counted for each in step.dropped]
    tokens, lost = (sum(each.num_tokens for each in episodes) for episodes in (trained, dropped))
    beyond = (
        tokens_until(each.had, version - bound - 1)
        for version, step in enumerate(counted, first)
        for each in step.trained
    )
    seconds, length = steps[last].begun_at - steps[first].begun_at, tokens / len(trained)
    return {
        "speed": tokens / seconds,
        "step": seconds / number,
        "rounds": (steps[last].round - steps[first].round) / number,
        "length": length,
        "trained": length / ((tokens + lost) / (len(trained) + len(dropped))),
        "beyond": sum(beyond) / tokens,
        "dropped": lost / (tokens + lost),
        "most": max(
            version - each.oldest_version
            for version, step in enumerate(steps)
            for each in step.trained
        ),
    }


# Tables of whole runs.


class Line(NamedTuple):
    """A run of a table; `read`, `seen` and `error` are those of its `Setup`."""

    settings: AsynchronyConfig
    order: Order = "fifo"
    read: float = 0.0
    seen: bool = False
    error: float | None = None


LINES = {
    "synchronous": Line(AsynchronyConfig()),
    "longest first": Line(AsynchronyConfig(), "longest"),
    "the same, tasks seen before": Line(AsynchronyConfig(), "longest", seen=True),
    "the same, by a ranker": Line(AsynchronyConfig(), error=ERROR),
    "the same, lengths known": Line(AsynchronyConfig(), error=0.0),
    "streaming": Line(AsynchronyConfig(parts=8), "longest"),
    "asynchronous": Line(AsynchronyConfig(max_staleness=1, parts=8), "longest"),
    "the same, not interrupted": Line(
        AsynchronyConfig(max_staleness=1, parts=8, kv="finish"), "longest"
    ),
    "staleness 4": Line(AsynchronyConfig(max_staleness=4, parts=8)),
    "staleness 4, not interrupted": Line(AsynchronyConfig(max_staleness=4, parts=8, kv="finish")),
}


def speed_of(setup: Setup, line: Line, train_s: float) -> float:
    """Returns the speed of a line's run, as of `result_of`."""
    return result_of(setup, line, train_s)["speed"]


def result_of(setup: Setup, line: Line, train_s: float) -> dict[str, Any]:
    """Returns the result of a line's run in the steps of `setup` behind the first BEHIND.

    Each line counts the same steps: more follow, so that there is always as much to play.
    """
    ahead = line.settings.max_staleness
    setup = dataclasses.replace(
        setup,
        read=line.read,
        seen=line.seen,
        error=line.error,
        num_steps=BEHIND + setup.num_steps + ahead,
    )
    return run(setup, line.settings, line.order, train_s, BEHIND, ahead)


def relative_speeds(
    devices: Sequence[int], train_share: float, **changes: Any
) -> list[dict[str, Any]]:
    """Returns the speeds of each line of LINES relative to the first.

    Updates take `train_share` of the time of a synchronous rollout. An instance has 4 devices.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {"": name, "StreamRL, measured": PAPER.get(name)} for name in LINES
    }
    for number in devices:
        setup = Setup(devices=number, devices_per_instance=4, **changes)
        train_s = train_share / speed_of(setup, LINES["synchronous"], train_s=0.0)
        speeds = {name: speed_of(setup, line, train_s) for name, line in LINES.items()}
        for name, speed in speeds.items():
            rows[name][f"{number} devices"] = round(speed / speeds["synchronous"], 3)
    return list(rows.values())


def rules(devices: Sequence[int]) -> list[dict[str, Any]]:
    """Returns what the rules of config.asynchrony.rule do with a bound of one version.

    Updates take half of the time of a synchronous rollout, and KV is kept.
    """
    rows = []
    for number in devices:
        setup = Setup(devices=number, devices_per_instance=4)
        train_s = 0.5 / speed_of(setup, LINES["synchronous"], train_s=0.0)
        base = speed_of(setup, LINES["synchronous"], train_s)
        for rule in get_args(Rule):
            line = Line(AsynchronyConfig(max_staleness=1, rule=rule))
            found = result_of(setup, line, train_s)
            row = {"devices": number, "rule": rule, "tokens/s": found["speed"] / base}
            names = {"most": "oldest token, versions", "beyond": "taken beyond the bound"}
            names |= {"dropped": "tokens dropped", "trained": "length trained by played"}
            rows.append({**row, **{words: found[name] for name, words in names.items()}})
    return rows


# Runs with the times of real ones.


class Times(NamedTuple):
    """Means of a run's steps, in seconds.

    A round alone, of `live` episodes, one beside gradients or an update, an update of a step that
    was there as a whole, and all else of a step. All parts of other steps, `fixed_s` of which does
    not depend on their tokens, and `hand_s`, for which nothing is played at each of them.
    """

    round_s: float
    live: float
    beside_s: float
    update_s: float
    rest_s: float
    parts_s: float = 0.0
    fixed_s: float = 0.0
    hand_s: float = 0.0


# Columns of benchmarks/asynchrony.md with them.
COLUMNS = {
    "round_s": "s a round",
    "live": "live in it",
    "beside_s": "s beside an update",
    "update_s": "s an update",
    "rest_s": "s of the rest",
    "parts_s": "s of parts",
    "fixed_s": "of it fixed",
    "hand_s": "s to send one",
}


class Timed(NamedTuple):
    """A setup with times of a run, of which a unit of time is `unit_s`; a token's is `train_s`."""

    setup: Setup
    unit_s: float
    train_s: float


def timed(setup: Setup, times: Times, tokens_a_step: float, num_parts: int) -> Timed:
    """Returns the setup with these times, whose steps have so many tokens of its lengths."""
    unit_s = times.round_s / setup.burst / (1 + times.live / setup.saturation)
    token_s = 1 / unit_s / tokens_a_step
    timed = dataclasses.replace(
        setup,
        publish=times.rest_s / unit_s,
        beside=times.beside_s / times.round_s,
        part=times.fixed_s / unit_s / num_parts,
        part_token=(times.parts_s - times.fixed_s) * token_s,
        hand=times.hand_s / unit_s,
    )
    return Timed(timed, unit_s, times.update_s * token_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Lines of a table of benchmarks/asynchrony.md, of two processes.

    A step has `groups` of `group_size` episodes.
    """

    table: str
    lines: Mapping[str, Line]
    groups: int
    group_size: int

    def only(self, wanted: Callable[[str], bool]) -> "Measured":
        """Returns the table with those lines whose names are wanted."""
        lines = {name: line for name, line in self.lines.items() if wanted(name)}
        return dataclasses.replace(self, lines=lines)

    def rows(self) -> dict[str, dict[str, str]]:
        """Returns the rows of the lines by their names."""
        rows = {row[""]: row for row in read_table(MEASURED, self.table)}
        return {name: rows[name] for name in self.lines}

    def setup(self, devices: int) -> Setup:
        """Returns the work on so many devices, half of which play, each in 16 slots.

        Each has `groups` a step, so that an update takes as long on any number of them.
        """
        pairs = devices // 2
        return Setup(
            devices=devices,
            devices_per_instance=1,
            slots=16,
            groups=self.groups * pairs,
            group_size=self.group_size,
            median=31.0,
            longest=264,
            by_task=1.0,
            saturation=SATURATION,
            burst=TOKENS_A_ROUND,
            data_shards=pairs,
            queued=True,
            # As many episodes on few devices as on some.
            num_steps=max(6, 48 // pairs),
        )


TWO_PROCESSES = Measured(
    table="table of processes",
    lines={
        "synchronous, devices apart": Line(AsynchronyConfig()),
        "two processes, staleness 1": Line(AsynchronyConfig(max_staleness=1), read=CHUNK),
        "two processes, staleness 4": Line(AsynchronyConfig(max_staleness=4), read=CHUNK),
        "two processes, staleness 4, kv kept": Line(AsynchronyConfig(max_staleness=4)),
        "two processes, staleness 4, not interrupted": Line(
            AsynchronyConfig(max_staleness=4, kv="finish")
        ),
        "two processes, staleness 12": Line(AsynchronyConfig(max_staleness=12), read=CHUNK),
    },
    groups=8,
    group_size=2,
)
LADDER = Measured(
    table="table of the ladder",
    lines={
        "synchronous": Line(AsynchronyConfig()),
        "longest first": Line(AsynchronyConfig(), "longest"),
        "streaming in 4 parts": Line(AsynchronyConfig(parts=4), "longest"),
        "staleness 1": Line(AsynchronyConfig(max_staleness=1, parts=4), "longest", CHUNK),
        "staleness 4": Line(AsynchronyConfig(max_staleness=4, parts=4), "longest", CHUNK),
        "staleness 4, first in, first out, whole": Line(
            AsynchronyConfig(max_staleness=4), read=CHUNK
        ),
    },
    groups=16,
    group_size=4,
)


# Lines of the same kind, and the one whose times all of them are simulated with.
HELD_OUT = (
    # A process for each stage.
    (TWO_PROCESSES.only(lambda name: "two" in name), "two processes, staleness 4"),
    # All groups of a step at once.
    (
        LADDER.only(lambda name: name in ("synchronous", "longest first") or "whole" in name),
        "synchronous",
    ),
)


def measured_times(measured: Measured, devices: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the speeds of the lines relative to the first, and of the real runs.

    Lengths have about the mean of the benchmark's, 50 tokens, and its maximum. More devices change
    nothing from where each step has an episode of the greatest length.
    """
    runs, rows = measured.rows(), dict[str, dict[str, Any]]()
    for name, run in runs.items():
        rows[name] = {"": name, "2 devices, real": float(run["ratio"])}
    for number in devices:
        setup = measured.setup(number)
        speeds = {
            name: _speed_with(setup, line, runs[name]) for name, line in measured.lines.items()
        }
        base = next(iter(speeds.values()))
        for name, speed in speeds.items():
            rows[name][f"{number} devices"] = round(speed / base, 3)
    return list(rows.values())


def held_out(measured: Measured, known: str) -> list[dict[str, Any]]:
    """Returns the speeds of the other lines relative to that of `known`, real and simulated.

    All are simulated with the times of the run `known`.
    """
    runs, setup = measured.rows(), measured.setup(2)
    speeds = {name: _speed_with(setup, line, runs[known]) for name, line in measured.lines.items()}
    return [
        {
            "": name,
            "real": round(float(run["ratio"]) / float(runs[known]["ratio"]), 3),
            "simulated": round(speeds[name] / speeds[known], 3),
        }
        for name, run in runs.items()
        if name != known
    ]


def _speed_with(setup: Setup, line: Line, run: Mapping[str, str]) -> float:
    """Returns the tokens/s of a line with the times of a real run, a row of its table."""
    size = setup.episodes_per_step
    counted = range(BEHIND * size, (BEHIND + setup.num_steps) * size)
    tokens_a_step = sum(map(setup.length, counted)) / setup.num_steps
    times = Times(**{field: float(run[column]) for field, column in COLUMNS.items()})
    of_run = timed(setup, times, tokens_a_step, line.settings.parts)
    return speed_of(of_run.setup, line, of_run.train_s) / of_run.unit_s


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


def isolated(setup: Setup, ranked: Sequence[int], *, wide: bool = False) -> float:
    """Returns the time of the best split of StreamRL's kind: the longest on instances of their own.

    The first of the `ranked` episodes go to some of the instances, with fewer slots each; both
    parts begin with their longest. Those instances are half as many and `wide`, of twice as many
    devices each, or they are as the others.
    """
    best, width, step_s, saturation = math.inf, 1, 1.0, setup.saturation
    if wide:
        width, step_s, saturation = 2, WIDE_STEP, WIDE_SATURATION
    for_long = dataclasses.replace(setup, saturation=saturation)
    for share in (0.05, 0.1, 0.2):
        cut = round(len(ranked) * share)
        for number in range(width, setup.instances, width):
            rest = makespan(setup, ranked[cut:], "fifo", setup.instances - number, setup.slots)
            if rest >= best:
                break
            for slots in (4, 8, 16, setup.slots):
                long = step_s * makespan(for_long, ranked[:cut], "fifo", number // width, slots)
                best = min(best, max(long, rest))
    return best


def orders(by_task: float, seeds: int = 3) -> dict[str, Any]:
    """Returns the gain over first in, first out of longest first, by what is known of lengths.

    Where they are predicted before the rollout, also those of the best splits (`isolated`).
    """
    gains: dict[str, list[float]] = {}
    for seed in range(seeds):
        setup = Setup(by_task=by_task, seed=seed)
        todo = list(range(setup.episodes_per_step))
        sizes = (setup.instances, setup.slots)
        fifo = makespan(setup, todo, "fifo", *sizes)
        times = {"free signals": makespan(setup, todo, "longest", *sizes)}
        predictions: dict[str, Callable[[int], float]] = {
            "prompt": setup.by_prompt,
            "ranker": lambda episode, setup=setup: setup.predicted(episode, ERROR),
            "lengths": setup.length,
        }
        for name, predicted in predictions.items():
            ranked = sorted(todo, key=lambda episode: -predicted(episode))  # noqa: B023
            times[name] = makespan(setup, ranked, "fifo", *sizes)
            times[f"{name}, isolated"] = isolated(setup, ranked)
            times[f"{name}, wide"] = isolated(setup, ranked, wide=True)
        for name, each in times.items():
            gains.setdefault(name, []).append(fifo / each)
    means = {name: round(statistics.fmean(each), 3) for name, each in gains.items()}
    return {"share of the task": by_task, **means}


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


def recalls_of(by_task: float) -> list[dict[str, Any]]:
    """Returns the recalls of the predictions of `orders`.

    Free signals are one of each group, which is not counted: it says how long the others are.
    """
    setup, size = Setup(groups=1024, by_task=by_task), Setup.group_size
    todo = [episode for episode in range(setup.episodes_per_step) if episode % size]
    lengths = [setup.length(episode) for episode in todo]
    expected = {
        "free signals": [float(setup.length(episode - episode % size)) for episode in todo],
        "prompt": [setup.by_prompt(episode) for episode in todo],
        "ranker": [setup.predicted(episode, ERROR) for episode in todo],
    }
    rows = []
    for name, each in expected.items():
        found = {f"recall {p} %": share for p, share in recalls(each, lengths).items()}
        rows.append({"share of the task": by_task, "prediction": name, **found})
    return rows


def main() -> None:
    """Prints the tables."""
    flags, parts = parser_of(__doc__).parse_args(), []
    for share in (0.5, 1.0):
        parts += [f"Updates take {share:g} of the time of a synchronous rollout:"]
        parts += [table(relative_speeds(DEVICES, share))]
    devices = (2, 8, 64, 256, 1024)
    parts += ["With the times of real runs:", table(measured_times(TWO_PROCESSES, devices))]
    for measured, known in HELD_OUT:
        parts += [f'With the times of the run "{known}" alone, and relative to it:']
        parts += [table(held_out(measured, known))]
    parts += ["With the times of the ladder:", table(measured_times(LADDER, devices[:-1]))]
    parts += ["The rules, with a bound of one version:", table(rules((16, 64)))]
    parts += ["One synchronous rollout on 4 instances, by how much of an episode's length its task"]
    parts[-1] += " decides; time of first in, first out divided by that of:"
    shares = (0.3, 0.5, 0.7, 0.9)
    parts += [table([orders(by_task) for by_task in shares])]
    parts += ["Which share of the longest episodes these predictions find:"]
    parts += [table([row for by_task in shares for row in recalls_of(by_task)])]
    show("\n\n".join(parts), PAGE, write=flags.write)


if __name__ == "__main__":
    main()
