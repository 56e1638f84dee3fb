# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Ends of a step in which nothing was learnt: too many episodes failed, or a signal stopped it."""

from earl_jax.envs.registry import EnvConfig
from earl_jax.run.position import Position
from earl_jax.settings.errors import RunError
from earl_jax.telemetry.episodes import Failures

# A tool may be away for some steps; of episodes that go on failing nothing is learnt.
MAX_FAILED_STEPS = 10
# Reasons of failed episodes that end a run.
REASONS_SHOWN = 3


class EpisodesFailed(RunError):
    """Raised where too many episodes failed (`EnvConfig`); `position` is that before the step."""

    def __init__(self, env: EnvConfig, failures: Failures, position: Position) -> None:
        step, failed, number = position.step + 1, failures.num_failed, failures.num_episodes
        which = "every episode" if failed == number else f"{failed} of {number} episodes"
        words = f"{which} of step {step} failed (config.env)"
        if position.failed_steps or env.max_failed_share < 1:
            words += (
                f", the last of {position.failed_steps + 1} steps in a row in which at least "
                f"{env.max_failed_share:.0%} failed (config.env.max_failed_share)"
            )
        shown = "\n".join(f"  {reason}" for reason in failures.reasons[:REASONS_SHOWN])
        super().__init__(f"{words}. The most frequent reasons:\n{shown}")
        self.position = position


def count_failed_steps(env: EnvConfig, failures: Failures, before: Position) -> int:
    """Returns for how many steps in a row too many episodes failed, with the step behind `before`.

    Raises EpisodesFailed at MAX_FAILED_STEPS; at the first step if all of its episodes
    failed.
    """
    if not env.max_failed_share or failures.share < env.max_failed_share:
        return 0
    never_worked = failures.share == 1 and before.failed_steps == before.step
    if never_worked or before.failed_steps + 1 >= MAX_FAILED_STEPS:
        raise EpisodesFailed(env, failures, before)
    return before.failed_steps + 1


class StepStopped(Exception):  # noqa: N818 - no error
    """A signal stopped a step in its rollout; `position` is that before it."""

    def __init__(self, signal_name: str, position: Position) -> None:
        super().__init__(signal_name)
        self.position = position
