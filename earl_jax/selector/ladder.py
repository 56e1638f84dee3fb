# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The ladder of survival: with how much less a stage can do, and what ran out of memory before.

A rung is gone down where no mesh fits on the one above, and up again where one does. What failed on
the devices is remembered as a size: it is impossible from then on, and so is whatever is no smaller
in any respect.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from earl_jax.sharding.layout import MeshShape


class RolloutRung(NamedTuple):
    """How many episodes live at once, and the pages of a lane that they share.

    With `offload` the optimizer's moments wait in the host's memory meanwhile. `page_size` are the
    tokens of a page; 0 stands for what the config says.
    """

    num_slots: int
    pages: int
    offload: bool = False
    page_size: int = 0


class TrainRung(NamedTuple):
    """In how many parts a batch is learnt from, and whether activations are computed again."""

    micro_batches: int
    remat: bool


def rollout_rungs(
    num_slots: int, num_lanes: int, wanted: Sequence[int], least: int, can_offload: bool = False
) -> list[RolloutRung]:
    """From all slots with the pages wanted down to a slot a lane with those of one episode.

    Fewer pages first, because episodes that wait for some lose little: half as many each time.
    `wanted` may name several numbers of pages, in the order of preference. With `can_offload`
    everything below these is with the moments out of the way: to bring them back takes less time
    than a rollout with fewer episodes at once.
    """
    if can_offload:
        down = rollout_rungs(num_slots, num_lanes, wanted, least)
        whole = [RolloutRung(num_slots, max(number, least)) for number in wanted]
        return list(dict.fromkeys([*whole, *(rung._replace(offload=True) for rung in down)]))
    rungs: list[RolloutRung] = []
    slots = num_slots
    while True:
        pages = [max(number, least) for number in wanted]
        while pages[-1] > least:
            pages.append(max(pages[-1] // 2, least))
        rungs += [RolloutRung(slots, number) for number in pages]
        if slots % (2 * num_lanes):
            return list(dict.fromkeys(rungs))
        slots //= 2


def with_page_sizes(
    rungs: Sequence[RolloutRung], page_size: int, others: Sequence[int], places: int
) -> list[RolloutRung]:
    """Each rung, and then the same with as many tokens in pages of other sizes.

    A rung's own are of `page_size` tokens, and a lane has pages for an episode of `places`.
    """
    ways: list[RolloutRung] = []
    for rung in rungs:
        ways.append(rung)
        for size in others:
            pages = -(-max(places, rung.pages * page_size) // size)
            ways.append(rung._replace(pages=pages, page_size=size))
    return list(dict.fromkeys(ways))


def train_rungs(rows: int, micro_batches: int, remat: bool) -> list[TrainRung]:
    """From what the config says, over activations computed again, to a row at a time."""
    rungs = [TrainRung(micro_batches, remat), TrainRung(micro_batches, True)]
    while rows % (2 * rungs[-1].micro_batches) == 0:
        rungs.append(TrainRung(2 * rungs[-1].micro_batches, True))
    return list(dict.fromkeys(rungs))


def train_ways(rows: int, micro_batches: int, remat: bool) -> list[TrainRung]:
    """All ways to learn from a batch: those of the ladder, and the same without remat.

    In the order of preference where none is faster. Without remat more micro-batches may take less
    time than fewer with it, and more memory than these or less: no ladder has them in order.
    """
    numbers = dict.fromkeys(rung.micro_batches for rung in train_rungs(rows, micro_batches, remat))
    remats = dict.fromkeys((remat, True))
    return [TrainRung(number, again) for number in numbers for again in remats]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A candidate of a stage that ran out of memory on the devices, at this size.

    `size` is (places, tokens that a lane's pages hold, slots, 1 beside the moments) of a rollout,
    (places, rows at a time, 1 without remat) of training.
    """

    stage: str
    mesh: str
    size: tuple[int, ...]

    def covers(self, stage: str, mesh: MeshShape, size: Sequence[int]) -> bool:
        """Whether a candidate is no smaller than this one in any respect."""
        same = (self.stage, self.mesh) == (stage, str(mesh))
        return same and all(is_ >= was for is_, was in zip(size, self.size, strict=True))

    def __str__(self) -> str:
        """As the end of a sentence."""
        if self.stage == "rollout":
            places, tokens, slots, whole = self.size
            return (
                f"ran out of memory with {slots} slots, pages for {tokens} tokens a lane and room "
                f"for {places} an episode{'' if whole else ', the moments in host memory'}"
            )
        places, rows, plain = self.size
        return (
            f"ran out of memory with rows of {places} tokens, {rows} at a time"
            f"{'' if plain else ' and with remat'}"
        )

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Failure":
        """From JSON. Raises TypeError for what is no failure."""
        failure = Failure(**{**values, "size": tuple(values["size"])})
        if len(failure.size) != {"rollout": 4, "train": 3}.get(failure.stage):
            raise TypeError(f"not a failure: {values}")
        return failure


def rollout_size(places: int, rung: RolloutRung, page_size: int) -> tuple[int, ...]:
    """The size of a rollout with pages of so many tokens, as in `Failure`."""
    return (places, rung.pages * page_size, rung.num_slots, int(not rung.offload))


def train_size(places: int, rows: int, rung: TrainRung) -> tuple[int, ...]:
    """The size of an update on `rows` rows, as in `Failure`."""
    return (places, rows // rung.micro_batches, int(not rung.remat))


def train_words(rung: TrainRung, first: TrainRung) -> str:
    """How a batch is learnt from, in words; "" for the first way."""
    if rung == first:
        return ""
    batches = "micro-batch" if rung.micro_batches == 1 else "micro-batches"
    return f"in {rung.micro_batches} {batches}{' with remat' if rung.remat else ''}"


def failure_of(
    failures: Sequence[Failure], stage: str, mesh: MeshShape, size: Sequence[int]
) -> str:
    """Why a candidate cannot be, from what failed before; "" where nothing says so."""
    return next((str(f) for f in failures if f.covers(stage, mesh, size)), "")
