# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What a rollout came to, in numbers."""

import dataclasses
from typing import Any

import numpy as np

from earl_jax.engine.round_inputs import Report

# In a full round so large a share of the slots says something.
FULL = 0.75


@dataclasses.dataclass(kw_only=True)
class RolloutStats:
    """Counts of one rollout. Tokens in flight are those of all live episodes at one moment.

    `shared_tokens` of prompts were taken over from other episodes instead of prefilled;
    `copied_tokens` of what was taken over came from the pages of another row shard.
    `recomputed_tokens` were read again: by newer weights, or behind the `preempted_episodes`,
    counted each time one gave up its pages. `preempted_host_bytes` of such pages were copied to
    host memory and back; `preemption` is the last choice between the two in words, "" where there
    was none. `guest_episodes` played in another data shard than that of their row, where a slot was
    free. `given_up_tokens` were sampled in the same round behind a stop string, and are no part of
    `rollout_tokens`. `drafted_tokens` were guessed, `accepted_tokens` of them were what was
    sampled, in `drafting_rounds` of the `rounds`. Decode steps computed `decode_rows` rows, as many
    as `RolloutConfig.step_rows` says or one for each slot, `idle_rows` of them for slots that said
    nothing in it: free ones, and episodes that wait for their environment or had ended their turn.
    `env_wait_s`: seconds in which no round ran because environments were waited for. Of rounds in
    which at least FULL of the slots said something, but for the first of each program, which may be
    compiled in it, `full_tokens` were said in `full_s` seconds.
    """

    rounds: int = 0
    rollout_tokens: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    copied_tokens: int = 0
    recomputed_tokens: int = 0
    preempted_episodes: int = 0
    guest_episodes: int = 0
    preempted_host_bytes: int = 0
    preemption: str = ""
    given_up_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafting_rounds: int = 0
    decode_rows: int = 0
    idle_rows: int = 0
    tokens_in_flight_max: int = 0
    context_tokens_max: int = 0
    env_wait_s: float = 0.0
    full_tokens: int = 0
    full_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of rounds with nearly all slots at work; None where there were none."""
        return self.full_tokens / self.full_s if self.full_s else None

    @property
    def draft_acceptance(self) -> float | None:
        """The fraction of guesses that were right; None where there were none."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    def metrics(self) -> dict[str, Any]:
        """Returns its part of a line of metrics; None where a count that is rare is 0."""
        often = ("rollout_tokens", "prefill_tokens", "shared_tokens", "decode_rows", "idle_rows")
        rare = (
            "copied_tokens",
            "recomputed_tokens",
            "preempted_episodes",
            "guest_episodes",
            "preempted_host_bytes",
            "preemption",
            "given_up_tokens",
            "drafted_tokens",
            "drafting_rounds",
        )
        return {
            **{name: getattr(self, name) for name in often},
            **{name: getattr(self, name) or None for name in rare},
            "draft_acceptance": self.draft_acceptance,
            "tokens_in_flight_max": self.tokens_in_flight_max,
            "env_wait_s": self.env_wait_s,
        }

    def count_round(self, report: Report, seconds: float) -> None:
        """Adds a round's tokens and seconds, if it is a full one."""
        if np.count_nonzero(report.count) >= FULL * len(report.count):
            self.full_tokens += int(report.count.sum())
            self.full_s += seconds

    def count_steps(
        self, report: Report, begun_B: np.ndarray, num_shards: int, step_rows: int
    ) -> None:
        """Adds the rows of a round's decode steps, of `step_rows` each.

        A shard, which has its equal part of the slots, decodes until none of these says more. Slots
        that have `begun` said their first token behind a chunk, which is no decode step.

        Example: of two shards of two slots, and two rows, reports of 3 0 and 1 1 passes, of which
        the last two slots have begun: 3 steps of two rows, 3 of them idle, and none.
        """
        passes_B = report.count if report.passes is None else report.passes
        sampled_SB = (passes_B - begun_B.astype(np.int32)).reshape(num_shards, -1)
        steps_SB = sampled_SB if report.steps is None else report.steps.reshape(num_shards, -1)
        rows = int(steps_SB.max(axis=1).sum()) * step_rows
        self.decode_rows += rows
        self.idle_rows += rows - int(sampled_SB.sum())
