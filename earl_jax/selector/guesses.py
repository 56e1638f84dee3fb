# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and speeds of candidates that were not measured, from those that were. Pure arithmetic.

A roofline says what each candidate would take and how fast it would be; what was measured of the
same stage at the same room says by how much that is wrong: on the same mesh where there is such a
measurement, else of the meshes together (their median). What a roofline cannot know (how large a
core's cache is) is found by trying: ways to train that are beside the fastest.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from earl_jax.selector.choose import Option
from earl_jax.selector.ladder import TrainRung
from earl_jax.sharding.layout import MeshShape

# Of bytes that are corrected by another program on the same mesh so much less may be enough.
CORRECTED_SLACK = 0.1
# A candidate is measured before others are preferred where its computed speed, so many times, is
# that of the best: rooflines of chips have been up to a half wrong (benchmarks/plan.md).
DOUBT = 1.5
# A candidate is measured once more before it is out of the question where the best is not so many
# times as fast: a machine that others use too has been seen to be a fourth slower for 20 s.
NEAR = 1.3
# Ways to train are tried for at most a tenth of what the run's steps will take, and so many at a
# room.
TRIED_SHARE = 0.1
MOST_TRIED = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is known of an option, and what is computed of it.

    Where `option.is_computed` its bytes are the computed ones, of which `least_bytes` are needed
    however wrong they are; else they are a compiler's. Its speed is None where it was not measured.
    """

    option: Option
    computed_bytes: int
    least_bytes: int
    computed_tokens_per_s: float


def fill_in(candidates: Sequence[Candidate]) -> list[Option]:
    """The options, all with bytes and a speed; `is_computed` and `is_guess` say which are guesses.

    What surely takes more than the budget keeps its computed bytes, and what is impossible all that
    it has.
    """
    sizes = [(c.option, c.option.bytes_per_device, c.computed_bytes) for c in candidates]
    ratios = _ratios([one for one in sizes if not one[0].is_computed])
    speeds = [(c.option, c.option.tokens_per_s, c.computed_tokens_per_s) for c in candidates]
    factors = _ratios([(o, speed, computed) for o, speed, computed in speeds if speed])
    usual = statistics.median(factors.values()) if factors else 1.0
    filled = []
    for candidate in candidates:
        option = candidate.option
        if option.is_computed and not option.impossible:
            option = _sized(candidate, ratios.get(option.mesh))
        if not option.tokens_per_s:
            speed = candidate.computed_tokens_per_s * factors.get(option.mesh, usual)
            option = dataclasses.replace(option, tokens_per_s=speed, is_guess=True)
        filled.append(option)
    return filled


def _ratios(known: Sequence[tuple[Option, float, float]]) -> dict[MeshShape, float]:
    """Of each mesh: measured over computed, of the first of its options."""
    ratios: dict[MeshShape, float] = {}
    for option, measured, computed in known:
        if measured and computed:
            ratios.setdefault(option.mesh, measured / computed)
    return ratios


def _sized(candidate: Candidate, ratio: float | None) -> Option:
    """With computed bytes: as wrong as another program's on this mesh, where there is one."""
    total, least = candidate.computed_bytes, candidate.least_bytes
    if ratio is not None:
        total = max(least, round(ratio * total))
        least = max(least, round((1.0 - CORRECTED_SLACK) * total))
    return dataclasses.replace(
        candidate.option, bytes_per_device=total, slack_bytes=max(0, total - least)
    )


def worth_measuring(
    options: Sequence[Option],
    possible: Sequence[bool] | np.ndarray,
    chosen: int,
    *,
    doubts_all: bool,
) -> list[int]:
    """The guesses that have to be measured before a choice between these options is final.

    The chosen one; and of each mesh the fastest, if it may well be faster than what is chosen:
    were it `DOUBT` times as fast as computed, it would be. Without `doubts_all` only of meshes of
    which nothing was measured: of the others it is known by how much the roofline is wrong.
    """
    wanted = {chosen}
    known = {option.mesh for option in options if option.tokens_per_s and not option.is_guess}
    best: dict[MeshShape, int] = {}
    for number, option in enumerate(options):
        if possible[number]:
            fastest = best.setdefault(option.mesh, number)
            if _speed(option) > _speed(options[fastest]):
                best[option.mesh] = number
    for mesh, number in best.items():
        is_rival = _speed(options[number]) * DOUBT > _speed(options[chosen])
        if is_rival and (doubts_all or mesh not in known):
            wanted.add(number)
    return sorted(number for number in wanted if options[number].is_guess)


def rivals(options: Sequence[Option], possible: Sequence[bool] | np.ndarray) -> list[int]:
    """Those measured of which any may be the fastest in truth; none where there is only one."""
    known = [n for n, o in enumerate(options) if possible[n] and o.tokens_per_s and not o.is_guess]
    top = max((_speed(options[n]) for n in known), default=0.0)
    near = [n for n in known if _speed(options[n]) * NEAR >= top]
    return near if len(near) > 1 else []


def beside_fastest(options: Sequence[Option], possible: Sequence[bool] | np.ndarray) -> int | None:
    """The guess to try next: of those beside the fastest way to train that was measured, the first.

    On its mesh, in the next number of micro-batches up or down that is possible; or with remat
    instead of without, or the other way round. None where all of them are known: it is a top.
    """
    known = [n for n, o in enumerate(options) if possible[n] and o.tokens_per_s and not o.is_guess]
    if not known:
        return None
    fastest = options[max(known, key=lambda n: _speed(options[n]))]
    there = {
        option.rung: number
        for number, option in enumerate(options)
        if possible[number] and option.mesh == fastest.mesh
    }
    beside = (there.get(rung) for rung in _beside(fastest.rung, there))
    return next((n for n in beside if n is not None and options[n].is_guess), None)


def _beside(rung: object, ways: Iterable[object]) -> list[TrainRung]:
    """One step from this way: more micro-batches, fewer, the other remat."""
    assert isinstance(rung, TrainRung)
    numbers = [
        way.micro_batches for way in ways if isinstance(way, TrainRung) and way.remat == rung.remat
    ]
    more = [min((n for n in numbers if n > rung.micro_batches), default=0)]
    fewer = [max((n for n in numbers if n < rung.micro_batches), default=0)]
    return [
        *(rung._replace(micro_batches=n) for n in more + fewer if n),
        rung._replace(remat=not rung.remat),
    ]


def worth_trying(tries_s: float, step_s: float, num_steps: int) -> bool:
    """Whether a run of so many steps may try ways for so many seconds before it begins."""
    return tries_s <= TRIED_SHARE * num_steps * step_s


def tried_ways(options: Sequence[Option], first: TrainRung) -> list[Option]:
    """Options that were measured though the config does not say to train so."""
    return [o for o in options if o.rung != first and o.tokens_per_s and not o.is_guess]


def _speed(option: Option) -> float:
    return option.tokens_per_s or 0.0


def busy_slots(tokens: int, wanted: int, all_slots: int, slots: int) -> float:
    """How many of `slots` find pages in lanes that hold so many tokens, at least one.

    Of `wanted` tokens a lane all of `all_slots` find theirs.
    """
    share = tokens * all_slots / (wanted * slots)
    return max(1.0, min(1.0, share) * slots)


def busy_tokens_per_s(full: float, alone: float | None, slots: int, busy: float) -> float:
    """Tokens that `busy` of so many slots say in a second.

    All say `full`, and one alone says `alone`. The seconds of a round are on the line between
    those of the two; where `alone` is not known they are the same for any number.
    """
    full_s = slots / full
    alone_s = 1.0 / alone if alone else full_s
    share = (busy - 1) / max(1, slots - 1)
    return busy / (alone_s + share * (full_s - alone_s))
