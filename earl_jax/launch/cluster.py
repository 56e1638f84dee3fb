# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: who they are, which of all devices play and which train.

Every process runs the same program and takes the same decisions. What only one of them knows (its
episodes, a signal, a measurement) it tells the others, by `gather`, before anybody acts on it; so
all of them call it alike, and in the same order.
"""

import dataclasses
import functools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from earl_jax.sharding.device_path import (
    all_devices,
    missing_device_path,
    one_device_each,
    one_row_each,
    to_all,
)
from earl_jax.sharding.host_channel import open_channel
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.waiting import wait_for

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """This process, number `index` of `count`, and the groups of devices.

    `rollout_devices` and `train_devices` are those of all processes, process by process; they are
    the same, or have none in common. Of the rollout's each process that has some has as many. What
    others are waited for may take `timeout_s` seconds.

    Example: two processes of four devices with `num_rollout` 4: the first plays and the second
    trains. With `num_rollout` 0 both play half of the episodes, and train together.
    """

    index: int
    count: int
    rollout_devices: tuple[Any, ...]
    train_devices: tuple[Any, ...]
    timeout_s: float

    def __str__(self) -> str:
        """In words, for the start of a run."""
        playing, training = len(self.rollout_devices), len(self.train_devices)
        groups = f"{playing} play, {training} train" if self.disjoint else "all play and train"
        return f"{self.count} processes with {len(self.devices)} devices: {groups}"

    @functools.cached_property
    def players(self) -> tuple[int, ...]:
        """The processes that play episodes."""
        return tuple(sorted({device.process_index for device in self.rollout_devices}))

    @functools.cached_property
    def trainers(self) -> tuple[int, ...]:
        """The processes that train."""
        return tuple(sorted({device.process_index for device in self.train_devices}))

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """All devices of the run, process by process."""
        return tuple(dict.fromkeys((*self.rollout_devices, *self.train_devices)))

    @property
    def all_train(self) -> bool:
        """Whether every process trains."""
        return len(self.trainers) == self.count

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes down what happens."""
        return self.index == 0

    @property
    def plays(self) -> bool:
        """Whether this process plays episodes."""
        return self.index in self.players

    @property
    def trains(self) -> bool:
        """Whether this process trains."""
        return self.index in self.trainers

    @property
    def disjoint(self) -> bool:
        """Whether no device both plays and trains."""
        return self.rollout_devices != self.train_devices

    @property
    def by_hosts(self) -> bool:
        """Whether what goes from process to process goes by their hosts, for lack of another way.

        The first time every process asks alike.
        """
        return bool(missing_device_path())

    def check_kinds(self) -> None:
        """Raises ValueError where not all devices that play, or that train, are of one kind."""
        for what, devices in (("play", self.rollout_devices), ("train", self.train_devices)):
            kinds = Counter(device.device_kind for device in devices)
            if len(kinds) == 1:
                continue
            found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
            raise ValueError(
                f"the devices that {what} are of different kinds: {found}. All of them run one "
                "program, so that the fast would wait for the slow, and the large be filled as "
                "the small: start the run on those of one kind (CUDA_VISIBLE_DEVICES, or hosts "
                "that are alike), or give each kind a stage by config.devices.num_rollout"
            )

    # Who plays what.

    @functools.cached_property
    def own_devices(self) -> tuple[Any, ...]:
        """The devices that this process plays on; those of the first that plays where it does not.

        So every process can say how large the programs of those that play are.
        """
        player = self.index if self.plays else self.players[0]
        return tuple(d for d in self.rollout_devices if d.process_index == player)

    def own_mesh(self, shape: MeshShape) -> MeshShape:
        """The part of a rollout's mesh that is one process's: of its data axis."""
        return dataclasses.replace(shape, data=shape.data // len(self.players))

    def own(self, items: Any) -> Any:
        """This process's part, maybe none, of a sequence in the order of the episodes of all."""
        if not self.plays:
            return items[:0]
        place, num = self.players.index(self.index), len(self.players)
        return items[len(items) * place // num : len(items) * (place + 1) // num]

    # What they tell each other.

    def wait(self, tree: Any, what: str) -> None:
        """Returns when this process's part of the arrays is there.

        Raises:
            PeerLost: another process ended, or nothing came for `timeout_s` seconds.
        """
        if self.count == 1:
            jax.block_until_ready(tree)
        else:
            wait_for(tree, what=what, timeout_s=self.timeout_s)

    def gather(self, value: Any, what: str) -> list[Any]:
        """What each process gives here, process by process. For small facts: pickled, on the host.

        Raises:
            PeerLost: as `wait`.
        """
        if self.count == 1:
            return [value]
        if self.by_hosts:
            told = open_channel().gather(pickle.dumps(value), what)
            return [pickle.loads(each) for each in told]
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._gather(np.array([len(data)], np.int32), what)[:, 0]
        # Room for a power of two, so that few programs are compiled for it.
        room = 1 << int(sizes.max() - 1).bit_length()
        rows = self._gather(np.pad(data, (0, room - len(data))), what)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def least(self, value: int | None) -> int | None:
        """The smallest that a process gives here; None where none gives one."""
        told = [one for one in self.gather(value, "the devices' limits") if one is not None]
        return min(told, default=None)

    def after_first(self, make: Callable[[], Item], what: str) -> Item:
        """What every process makes, the first before the others: they find what it leaves."""
        if not self.is_first:
            self.gather(None, what)
        made = make()
        if self.is_first:
            self.gather(None, what)
        return made

    def _gather(self, row: np.ndarray, what: str) -> np.ndarray:
        every = to_all(one_device_each())(one_row_each(row))
        wait_for(every, what=what, timeout_s=self.timeout_s)
        return np.asarray(every.addressable_data(0))


def find_processes(num_rollout: int, timeout_s: float) -> Processes:
    """The processes that JAX knows; the first `num_rollout` devices play, or with 0 all of them.

    Raises:
        ValueError: the devices do not divide so.
    """
    devices = all_devices()
    if jax.process_count() > 1:
        open_channel().timeout_s = timeout_s
    if num_rollout >= len(devices):
        raise ValueError(
            f"config.devices.num_rollout is {num_rollout}, and this run has {len(devices)} devices "
            "in all; leave at least one to train, or set 0 to play and train on all"
        )
    playing = devices[:num_rollout] if num_rollout else devices
    processes = Processes(
        index=jax.process_index(),
        count=jax.process_count(),
        rollout_devices=tuple(playing),
        train_devices=tuple(devices[num_rollout:]),
        timeout_s=timeout_s,
    )
    own = [
        sum(device.process_index == player for device in playing) for player in processes.players
    ]
    if len(set(own)) > 1:
        raise ValueError(
            f"the processes would play on {own} devices, and must play on the same number each; "
            + (
                f"set config.devices.num_rollout ({num_rollout}) to that of whole processes"
                if num_rollout
                else "start each process with as many"
            )
        )
    return processes
