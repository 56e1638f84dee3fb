# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Steps in which nothing was learnt: every episode failed, or a signal stopped the rollout."""

from earl_jax.run.position import Position
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.episodes import Failures

# The longest wait behind a step in which every episode failed.
MOST_PAUSE_S = 300
# Reasons of failed episodes that end a run.
REASONS_SHOWN = 3


class EpisodesFailed(RunError):
    """Raised where environments have never worked; `position` is that before the step."""

    def __init__(self, failures: Failures, position: Position) -> None:
        shown = "\n".join(f"  {reason}" for reason in failures.reasons[:REASONS_SHOWN])
        super().__init__(
            f"every episode of step {position.step + 1} failed (config.env). The most frequent "
            f"reasons:\n{shown}"
        )
        self.position = position


def count_failed_steps(failures: Failures, before: Position, later_steps: int = 0) -> int:
    """Returns in how many steps in a row every episode failed, with the step behind `before`.

    Where steps take episodes as they finish, of `later_steps` more steps, the first ones may have
    all that failed at once, while others are played.

    Raises EpisodesFailed if that is each step of the run, and more than `later_steps`: somebody has
    to look at its settings, where a tool that has worked may be away.
    """
    if failures.share < 1:
        return 0
    if before.failed_steps == before.step >= later_steps:
        raise EpisodesFailed(failures, before)
    return before.failed_steps + 1


def pause_s(failed_steps: int, batches: int = 1) -> int:
    """Returns how many seconds the next step is waited with, behind so many that failed in a row.

    They double from 1 on, to at most MOST_PAUSE_S: an outage of an hour takes 20 steps of the run.
    Where the episodes of `batches` steps are open at once, these fail together, and there is one
    pause behind them.
    """
    number, others = divmod(failed_steps, batches)
    return 0 if others or not number else min(2 ** (number - 1), MOST_PAUSE_S)


class StepStopped(Exception):  # noqa: N818 - no error
    """A signal stopped a step in its rollout; `position` is that before it."""

    def __init__(self, signal_name: str, position: Position) -> None:
        super().__init__(signal_name)
        self.position = position
