# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice for a whole step: a rollout mesh and a training mesh together, with its reasons.

They are one choice because a device holds both: what the trainer keeps there while episodes are
played leaves the less room for the KV cache, the less it is cut.
"""

import dataclasses
import math
from collections.abc import Sequence

from earl_jax.selector.choose import BudgetTooSmall, Decision, Option, Settings
from earl_jax.selector.pairs import (
    Kept,
    Pair,
    Work,
    are_measured,
    changes_of,
    first_two,
    here_in,
    residents_of,
    tabulate,
)
from earl_jax.selector.step_words import Words, too_small
from earl_jax.telemetry.load import WINDOW


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDecision:
    """What was chosen for both stages; `reason` compares it with the others, in words.

    `second` is the part of it that says what comes next. `predicted_s` is the step's time, None
    where speeds were not measured.
    """

    rollout: Decision
    train: Decision
    reason: str
    second: str
    predicted_s: float | None

    @property
    def pair(self) -> Pair:
        """The meshes."""
        return Pair(self.rollout.mesh, self.train.mesh)


def choose_step(
    rollouts: Sequence[Option],
    trains: Sequence[Option],
    *,
    resident_bytes: Sequence[int],
    kept: Sequence[Kept | None] = (),
    current: Pair | None,
    calm_steps: int,
    work: Work,
    settings: Settings,
) -> StepDecision:
    """The meshes of the next step. Pure: the same arguments give the same decision.

    A step takes what its tokens take on each mesh, the way of the new weights to the rollout's, and
    what no mesh changes. Of the pairs that fit, the one of the shortest step; but the current pair
    stays unless it does not fit, or the step is shorter by more than the hysteresis when the
    trainer's move is spread over the steps that the choice will last: until contexts that grow have
    outgrown the room, and at most the horizon. A rollout's move between steps costs nothing more:
    its weights are new anyway. And a pair that fits is left only when it has been there for a
    window of steps: until then the load is in part another pair's. So whoever comes back to a pair
    has been away for a window.

    Ties go to the pair that comes first. Where speeds were not measured, the first pair that fits,
    of those that change the fewest meshes. Several options may be of one mesh, on different rungs:
    from one to another of these nothing moves, so that the pair of meshes in use is on the best.

    Args:
        rollouts: the rollout's options, without what the trainer leaves on a device meanwhile.
        trains: the trainer's options.
        resident_bytes: what the trainer leaves on a device, in the order of `trains`.
        kept: of each of these what stays there where its moments wait in host memory, None where
            they cannot; needed where a rollout's rung says so.
        current: the meshes in use, None at the start.
        calm_steps: for how many steps they have been.
        work: the step to come.
        settings: budget, hysteresis, horizon.

    Raises:
        BudgetTooSmall: no pair fits.
    """
    residents = residents_of(resident_bytes, kept)
    table = tabulate(rollouts, trains, residents, current, work, settings)
    room = table.room
    if not room.possible_R.any():
        raise BudgetTooSmall(too_small(rollouts, trains, residents, work, settings))
    measured = are_measured(rollouts, room.possible_R) and are_measured(trains, room.possible_T)
    if measured:
        lasts = steps_until_outgrown(work, settings.horizon_steps)
        cost = table.step_and_switch_s(lasts)
    else:
        lasts = settings.horizon_steps
        cost = changes_of(rollouts, trains, current)
    chosen, second = first_two(cost, room, settings)
    here = here_in(rollouts, trains, current, cost, room, settings)
    gain = None
    if here is not None:
        gain = cost.of(here, room) / cost.of(chosen, room) - 1.0 if measured else 0.0
        if chosen != here and (gain <= settings.hysteresis or calm_steps < WINDOW):
            chosen, second = here, chosen
    words = Words(rollouts, trains, residents, table, work, settings, current, gain, measured)
    next_best = words.second(chosen, second, cost)
    parts = (words.step(chosen, here, lasts), next_best, words.impossible())
    return StepDecision(
        rollout=words.decision("rollout", chosen),
        train=words.decision("train", chosen),
        reason="; ".join(filter(None, parts)),
        second=next_best,
        predicted_s=table.step_s.of(chosen, room) if measured else None,
    )


def steps_until_outgrown(work: Work, horizon_steps: int) -> int:
    """For how many steps a choice will last, at least 1: then all is chosen anew."""
    load = work.load
    if load is None or load.growth_tokens <= 0:
        return horizon_steps
    room = min(work.rollout_places, work.train_places) - load.context_tokens_max
    return max(1, min(horizon_steps, math.ceil(room / load.growth_tokens)))
