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

    `predicted_s` is the step's time, None where speeds were not measured.
    """

    rollout: Decision
    train: Decision
    reason: str
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
    kept: Sequence[Kept] = (),
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
        kept: of each of these what stays there where its moments wait in host memory; needed where
            a rollout's rung says so.
        current: the meshes in use, None at the start.
        calm_steps: for how many steps they have been.
        work: the step to come.
        settings: budget, hysteresis, horizon.

    Raises:
        BudgetTooSmall: no pair fits.
    """
    residents = residents_of(resident_bytes, kept)
    table = tabulate(rollouts, trains, residents, current, work, settings)
    if not table.possible_RT.any():
        raise BudgetTooSmall(too_small(rollouts, trains, residents, work, settings))
    measured = are_measured(rollouts, table.possible_RT) and are_measured(
        trains, table.possible_RT.T
    )
    if measured:
        lasts = steps_until_outgrown(work, settings.horizon_steps)
        cost_RT = table.step_s_RT + table.switch_s_T / lasts
    else:
        lasts = settings.horizon_steps
        cost_RT = changes_of(rollouts, trains, current)
    chosen, second = first_two(cost_RT, table.possible_RT, settings)
    here = here_in(rollouts, trains, current, cost_RT, table.possible_RT, settings)
    gain = None
    if here is not None:
        gain = float(cost_RT[here] / cost_RT[chosen] - 1.0) if measured else 0.0
        if chosen != here and (gain <= settings.hysteresis or calm_steps < WINDOW):
            chosen, second = here, chosen
    words = Words(rollouts, trains, residents, table, work, settings, current, gain, measured)
    parts = (
        words.step(chosen, here, lasts),
        words.second(chosen, second, cost_RT),
        words.impossible(),
    )
    return StepDecision(
        rollout=words.decision("rollout", chosen),
        train=words.decision("train", chosen),
        reason="; ".join(filter(None, parts)),
        predicted_s=float(table.step_s_RT[chosen]) if measured else None,
    )


def steps_until_outgrown(work: Work, horizon_steps: int) -> int:
    """For how many steps a choice will last, at least 1: then all is chosen anew."""
    load = work.load
    if load is None or load.growth_tokens <= 0:
        return horizon_steps
    room = min(work.rollout_places, work.train_places) - load.context_tokens_max
    return max(1, min(horizon_steps, math.ceil(room / load.growth_tokens)))
