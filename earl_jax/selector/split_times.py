# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The split of the devices between rollout and training, by the time of a step. Pure.

Stages on devices apart work at the same time, so that a step takes as long as the slower one
(StreamRL, arXiv 2504.15930, section 4.3).
"""

from collections.abc import Sequence
from typing import NamedTuple


class SplitTime(NamedTuple):
    """The seconds of both stages of a step, with `num_rollout` devices for rollouts.

    `move_s` are those of the move there from the split in use, spread over the steps that it lasts.

    Example: SplitTime(6, 2.0, 3.0, 0.5) has steps of 3 s, and costs 3.5 s.
    """

    num_rollout: int
    rollout_s: float
    train_s: float
    move_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The seconds of a step: those of the slower stage."""
        return max(self.rollout_s, self.train_s)

    @property
    def cost_s(self) -> float:
        """The seconds of a step, with its part of the move."""
        return self.step_s + self.move_s

    def __str__(self) -> str:
        """Returns "6 play (rollout 2.00 s, training 3.00 s)"."""
        seconds = f"rollout {self.rollout_s:.3g} s, training {self.train_s:.3g} s"
        return f"{self.num_rollout} play ({seconds})"


def choose_split(
    times: Sequence[SplitTime], current: int | None, hysteresis: float, *, may_leave: bool = True
) -> SplitTime:
    """Returns the split of least cost; of equal ones that whose faster stage is the faster.

    The `current` one, where it is among them, is left only if it `may_leave`, and for steps that
    are shorter by more than the fraction `hysteresis` with the move paid for.
    """
    best = min(times, key=lambda time: (time.cost_s, min(time.rollout_s, time.train_s)))
    here = next((time for time in times if time.num_rollout == current), None)
    if here is None:
        return best
    stays = not may_leave or here.cost_s <= (1.0 + hysteresis) * best.cost_s
    return here if stays else best
