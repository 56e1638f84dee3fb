# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: the devices that play and train, and communication between processes.

Every process runs the same program and takes the same decisions. What only one of them knows (its
episodes, a signal, a measurement) is gathered before any of them acts on it, so all processes call
`gather`, `any` and `barrier` alike, and in the same order.
"""

import contextlib
import dataclasses
import functools
import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from earl_jax.launch.distributed import address_among, end_as_lost, end_process
from earl_jax.launch.messages import ProcessesFailed, exchange
from earl_jax.launch.presence import Place, be_present, presence, waits
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """This process, number `index` of `count`, and the groups of devices.

    `rollout_devices` and `train_devices` are those of all processes, host by host; the two groups
    are equal or disjoint. But where the selector chooses among `splits`, numbers of devices that
    play, both are all devices: a rollout's mesh is over the first of each process, a trainer's over
    the last, as many of each process, and both together over all devices once. Every process that
    plays has the same number of rollout devices. `hosts` are the names of the processes' hosts,
    process by process. A process that waits for the others for `timeout_s` seconds ends with
    status 1.

    Example: two processes of four devices with `num_rollout` 4: the first plays and the second
    trains. With `num_rollout` 0 both play, and train together.
    """

    index: int
    count: int
    rollout_devices: tuple[Any, ...]
    train_devices: tuple[Any, ...]
    timeout_s: float
    hosts: tuple[str, ...] = ()
    splits: tuple[int, ...] = ()

    def split_by(self, splits: tuple[int, ...]) -> "Cluster":
        """Returns the cluster, in which all do both, so that as many devices as one of these play.

        The others train. Every process has a part of each: they are multiples of `count`.
        """
        return dataclasses.replace(self, splits=splits)

    def playing(self, number: int) -> tuple[Any, ...]:
        """Returns the devices that play where so many of the run do."""
        return self._of_each(slice(number // self.count)) if self.splits else self.rollout_devices

    def training(self, number: int) -> tuple[Any, ...]:
        """Returns the devices that train where so many of the run do."""
        part = slice(-number // self.count, None)
        return self._of_each(part) if self.splits else self.train_devices

    def _of_each(self, part: slice) -> tuple[Any, ...]:
        each = ([d for d in self.devices if d.process_index == n] for n in self.players)
        return tuple(device for own in each for device in own[part])

    def __str__(self) -> str:
        """Returns the cluster in words, for the start of a run."""
        playing, training = len(self.rollout_devices), len(self.train_devices)
        groups = f"{playing} play, {training} train" if self.disjoint else "all play and train"
        if self.splits:
            groups = f"{' or '.join(map(str, self.splits))} play, as is fastest, the others train"
        processes = "1 process" if self.count == 1 else f"{self.count} processes"
        return f"{processes} with {len(self.devices)} devices: {groups}"

    @functools.cached_property
    def players(self) -> tuple[int, ...]:
        """The processes that play episodes, in the order of their devices."""
        return tuple(dict.fromkeys(device.process_index for device in self.rollout_devices))

    @functools.cached_property
    def trainers(self) -> tuple[int, ...]:
        """The processes that train, in the order of their devices."""
        return tuple(dict.fromkeys(device.process_index for device in self.train_devices))

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices of the run, host by host."""
        return tuple(dict.fromkeys((*self.rollout_devices, *self.train_devices)))

    @property
    def num_hosts(self) -> int:
        """The number of hosts, each with one or several processes."""
        return len(set(self.hosts)) or self.count

    def order_in_words(self) -> str:
        """Returns the order of the devices, which the axes of every mesh are laid over."""
        numbers: dict[str, list[int]] = {}
        for device in self.devices:
            numbers.setdefault(self.hosts[device.process_index], []).append(device.process_index)
        each = [f"{host} ({_counted(processes)})" for host, processes in numbers.items()]
        return "meshes go over the hosts in this order: " + ", ".join(each)

    @property
    def all_train(self) -> bool:
        """True if every process trains."""
        return len(self.trainers) == self.count

    @property
    def is_first(self) -> bool:
        """True in the process that writes metrics, episodes and the report."""
        return self.index == 0

    @property
    def plays(self) -> bool:
        """True if this process plays episodes."""
        return self.index in self.players

    @property
    def trains(self) -> bool:
        """True if this process trains."""
        return self.index in self.trainers

    @property
    def disjoint(self) -> bool:
        """True if no device both plays and trains at a time."""
        return bool(self.splits) or self.rollout_devices != self.train_devices

    def check_kinds(self) -> None:
        """Raises ValueError where not all devices that play, or that train, are of one kind."""
        for what, devices in (("play", self.rollout_devices), ("train", self.train_devices)):
            kinds = Counter(device.device_kind for device in devices)
            if len(kinds) == 1:
                continue
            found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
            raise InputError(
                f"the devices that {what} are of different kinds: {found}. All of them run one "
                "program, so that the fast would wait for the slow, and the large be filled as "
                "the small: start the run on those of one kind (CUDA_VISIBLE_DEVICES, or hosts "
                "that are alike), or give each kind a stage by config.devices.num_rollout"
            )

    @property
    def who(self) -> str:
        """This process and its host, in words."""
        return f"process {self.index} of {self.count} on {socket.gethostname()}"

    # Parts of a rollout.

    @functools.cached_property
    def own_devices(self) -> tuple[Any, ...]:
        """The devices that this process plays on, or those of the first player if it only trains.

        So every process knows the sizes of the players' programs.
        """
        player = self.index if self.plays else self.players[0]
        return tuple(d for d in self.rollout_devices if d.process_index == player)

    def num_row_devices(self, num_parts: int) -> int:
        """Returns for how many devices an engine's rows of experience are cut, of so many engines.

        Those that play, in any split. Example: with 2, 4 or 6 devices that play 12, which each of
        these divides; 6 where they are those of two processes.
        """
        number = math.lcm(*self.splits) if self.splits else len(self.rollout_devices)
        return number // num_parts

    def num_parts(self, shape: MeshShape) -> int:
        """Returns the number of engines of a rollout's mesh, as `Problem.num_parts`."""
        return len(self.players) if shape.data % len(self.players) == 0 else 1

    def spans(self, shape: MeshShape) -> bool:
        """Returns True if a rollout's mesh is one engine, which the processes play together."""
        return self.num_parts(shape) < len(self.players)

    def devices_of(self, shape: MeshShape) -> tuple[Any, ...]:
        """Returns the devices of this process's engine on a rollout's mesh (`own_devices`)."""
        return self.rollout_devices if self.spans(shape) else self.own_devices

    def own_mesh(self, shape: MeshShape) -> MeshShape:
        """Returns an engine's part of a rollout's mesh, which is cut over its data axis."""
        return shape._replace(data=shape.data // self.num_parts(shape))

    def own(self, items: Any) -> Any:
        """Returns this process's part, maybe none, of a sequence that has an item per episode."""
        return self.parts(items)[self.players.index(self.index)] if self.plays else items[:0]

    def parts(self, items: Any) -> list[Any]:
        """Returns each player's part of a sequence that has an item per episode, or per group."""
        num, total = len(self.players), len(items)
        return [items[total * n // num : total * (n + 1) // num] for n in range(num)]

    @property
    def part(self) -> tuple[int, int]:
        """The index of the player whose part of a rollout is this process's, and their number.

        A process that only trains has the first player's part.
        """
        return self.players.index(self.index) if self.plays else 0, len(self.players)

    def of_players(self, each: Sequence[Item]) -> list[Item]:
        """Returns the players' items of one for each process, in the order of the episodes."""
        return [each[player] for player in self.players]

    # Communication.

    def gather(self, value: Any, what: str, *, in_first: bool = False) -> list[Any]:
        """Returns the value of each process, process by process, as decoded from JSON.

        For small facts on the host: `value` is None, a bool, a number, a string, or lists and dicts
        of these; tuples become lists. `what` names it in the error of a process that timed out.
        With `in_first` the first process alone gets the values, and the others None for each: for
        long ones, which are then not sent to all.
        """
        if self.count == 1:
            return [json.loads(json.dumps(value))]
        messages = self._exchange({"value": value}, what, in_first=in_first)
        errors = {n: message["error"] for n, message in enumerate(messages) if "error" in message}
        if errors:
            raise ProcessesFailed(errors)
        return [message.get("value") for message in messages]

    def tell(self, words: str, *, is_mistake: bool) -> ProcessesFailed:
        """Tells the others, at what they gather next, that this process ends; returns why all do.

        Processes that fail at the same place tell each other. If the others do not listen within
        `timeout_s`, this process ends.
        """
        error = {"who": self.who, "words": words, "is_mistake": is_mistake}
        ends = functools.partial(end_process, f"{self.who}: {words}", status=2 if is_mistake else 1)
        messages = self._exchange({"error": error}, "the others to receive an error", ends)
        return ProcessesFailed(
            {n: each["error"] for n, each in enumerate(messages) if "error" in each}
        )

    def _exchange(
        self,
        message: dict[str, Any],
        what: str,
        ends: Callable[[], NoReturn] | None = None,
        *,
        in_first: bool = False,
    ) -> list[dict[str, Any]]:
        """Returns the messages of all; `ends` this process where that takes too long, or fails."""
        with self.limited(what, ends):
            try:
                return exchange(message, in_first=in_first)
            except OSError as error:
                (ends or functools.partial(end_as_lost, self.who, f"{what}: {error}"))()

    def any(self, flag: bool, what: str) -> bool:
        """Returns True, in every process, where the flag of at least one is set."""
        return any(self.gather(bool(flag), what))

    def barrier(self, what: str) -> None:
        """Returns when every process has called it."""
        self.gather(None, what)

    def new_counter(self) -> int:
        """Returns the number of a new counter, at 0. Every process calls it, in the same order."""
        return presence().new_counter()

    def add_to(self, counter: int, number: int, what: str) -> int:
        """Adds `number` to the newest counter. Returns the value before, another to each call.

        It asks process 0, and waits for nobody else. `what` is as for `gather`.
        """
        with self.limited(what):
            try:
                return presence().count(counter, number)
            except OSError as error:
                end_as_lost(self.who, f"{what}: process 0 does not answer ({error})")

    def wait(self, tree: Any, what: str) -> None:
        """Returns when this process's part of the arrays is there."""
        with self.limited(what):
            jax.block_until_ready(tree)

    def after_first(self, make: Callable[[], Item], what: str) -> Item:
        """Returns `make()` of each process, called in the first before the others."""
        if not self.is_first:
            self.barrier(what)
        made = make()
        if self.is_first:
            self.barrier(what)
        return made

    @contextlib.contextmanager
    def limited(self, what: str, too_late: Callable[[], NoReturn] | None = None) -> Iterator[None]:
        """Calls `too_late` if the block takes longer than `timeout_s`; None: ends this process.

        For blocks that wait for other processes, as moves do that wait on their way. JAX's
        heartbeats see processes that are gone, and not those that live and hang.
        """
        if self.count == 1:
            yield
            return
        why = (
            f"{what}: nothing came for {self.timeout_s:g} s (config.distributed.timeout_s); "
            "another process or the network hangs"
        )
        ends = too_late or functools.partial(end_as_lost, self.who, why)
        timer = threading.Timer(self.timeout_s, ends)
        timer.daemon = True
        timer.start()
        waits(what)
        try:
            yield
        finally:
            timer.cancel()
            waits("")


def _counted(processes: Sequence[int]) -> str:
    """Returns the processes of these devices in words, such as "8 devices of processes 0, 1"."""
    names = ", ".join(map(str, dict.fromkeys(processes)))
    several = "es" if len(set(processes)) > 1 else ""
    return f"{len(processes)} devices of process{several} {names}"


def host_by_host(devices: Iterable[Any], hosts: Sequence[str]) -> list[Any]:
    """Returns the devices in the order that meshes are laid over.

    Those of a slice follow each other, within it those of a host, and there those of a process: the
    inner axes of a mesh (tensor, expert, context) then stay inside a host as far as its devices go,
    and data and fsdp cross hosts. Launchers may number processes otherwise, such as round the hosts
    (`srun --distribution=cyclic`). Where `hosts` has a name for each process, by its number.
    """

    def place(device: Any) -> tuple[int, int, int]:
        process = device.process_index
        return getattr(device, "slice_index", None) or 0, hosts.index(hosts[process]), process

    return sorted(devices, key=place)


@functools.lru_cache(maxsize=1)
def _hosts(timeout_s: float) -> tuple[str, ...]:
    """Returns the name of each process's host; every process calls it, and answers from then on."""
    processes = processes_only(timeout_s)
    hosts = tuple(processes.gather(socket.gethostname(), "the names of the hosts"))
    if processes.count > 1:
        here = be_present(address_among(hosts))
        each = processes.gather([here.address, here.port], "where the processes answer")
        places = [
            Place(n, host, address or host, port)
            for n, (host, (address, port)) in enumerate(zip(hosts, each, strict=True))
        ]
        here.meet([place for place in places if place.index != processes.index])
    return hosts


def processes_only(timeout_s: float) -> Cluster:
    """Returns the processes without devices: to communicate before, or without, groups of them."""
    return Cluster(
        index=jax.process_index(),
        count=jax.process_count(),
        rollout_devices=(),
        train_devices=(),
        timeout_s=timeout_s,
    )


def find_cluster(num_rollout: int, timeout_s: float) -> Cluster:
    """Returns JAX's processes; the first `num_rollout` devices play, or with 0 all of them.

    Raises:
        ValueError: the devices do not divide so.
    """
    hosts = _hosts(timeout_s)
    devices = host_by_host(jax.devices(), hosts)
    if num_rollout >= len(devices):
        raise InputError(
            f"config.devices.num_rollout is {num_rollout}, and this run has {len(devices)} devices "
            "in all; leave at least one to train, or set 0 to play and train on all"
        )
    playing = devices[:num_rollout] if num_rollout else devices
    cluster = Cluster(
        index=jax.process_index(),
        count=jax.process_count(),
        rollout_devices=tuple(playing),
        train_devices=tuple(devices[num_rollout:]),
        timeout_s=timeout_s,
        hosts=hosts,
    )
    own = [sum(device.process_index == player for device in playing) for player in cluster.players]
    if len(set(own)) > 1:
        raise InputError(
            f"the processes would play on {own} devices, and must play on the same number each; "
            + (
                f"set config.devices.num_rollout ({num_rollout}) to that of whole processes"
                if num_rollout
                else "start each process with as many"
            )
        )
    return cluster
