# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Counts and speeds of a rollout."""

import dataclasses
from typing import Any

import numpy as np

from earl_jax.engine.round_inputs import RoundOutputs

# In a full round at least so large a share of the slots generates tokens.
FULL = 0.75


@dataclasses.dataclass(kw_only=True)
class RolloutStats:
    """Counts of one rollout. Tokens in flight are those of all live episodes at one moment.

    `shared_tokens` of prompts were taken over from other episodes instead of prefilled;
    `copied_tokens` of these came from the pages of another row shard. `recomputed_tokens` were read
    again, by new weights and behind the `preempted_episodes`, which are counted each time one gave
    up its pages.
    `preempted_host_bytes` of such pages were copied to host memory and back; `preemption` is the
    last choice between the two in words, "" where there was none. `other_shard_episodes`
    played in a slot of another data shard. `discarded_tokens` were sampled in the same round
    behind a stop string, and are no part of `rollout_tokens`. With speculation, slots took
    `drafting_passes` forward passes, in which `drafted_tokens` were scored beside the token of the
    pass, and `accepted_tokens` of them accepted. Decode steps computed `decode_rows` rows,
    `idle_rows` of them for slots that generated nothing: free ones, and
    episodes that wait for their environment or had ended their turn. `env_wait_s`: seconds in which
    no round ran because environments were waited for. `hung_calls` of environments were given up,
    in this rollout or before, and had not returned in the end. In rounds in which at least FULL of
    the slots generated tokens, but for the first of each program, which may be compiled in it,
    `full_tokens` were generated in `full_s` seconds.
    """

    rounds: int = 0
    rollout_tokens: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    copied_tokens: int = 0
    recomputed_tokens: int = 0
    preempted_episodes: int = 0
    other_shard_episodes: int = 0
    preempted_host_bytes: int = 0
    preemption: str = ""
    discarded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafting_passes: int = 0
    decode_rows: int = 0
    idle_rows: int = 0
    tokens_in_flight_max: int = 0
    context_tokens_max: int = 0
    env_wait_s: float = 0.0
    hung_calls: int = 0
    full_tokens: int = 0
    full_s: float = 0.0

    def since(self, before: "RolloutStats") -> "RolloutStats":
        """Returns the counts since `before`, of the same rollout; maxima and words as they are."""
        kept = ("preemption", "tokens_in_flight_max", "context_tokens_max", "hung_calls")
        names = [field.name for field in dataclasses.fields(self) if field.name not in kept]
        return dataclasses.replace(
            self, **{name: getattr(self, name) - getattr(before, name) for name in names}
        )

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of rounds with nearly all slots at work; None where there were none."""
        return self.full_tokens / self.full_s if self.full_s else None

    @property
    def draft_acceptance(self) -> float | None:
        """The fraction of drafted tokens that were accepted; None where there were none."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that a slot generated a forward pass; None without speculation."""
        passes = self.drafting_passes
        return (passes + self.accepted_tokens) / passes if passes else None

    def metrics(self) -> dict[str, Any]:
        """Returns its part of a line of metrics; None where a count that is rare is 0."""
        often = ("rollout_tokens", "prefill_tokens", "shared_tokens", "decode_rows", "idle_rows")
        rare = (
            "copied_tokens",
            "recomputed_tokens",
            "preempted_episodes",
            "other_shard_episodes",
            "preempted_host_bytes",
            "preemption",
            "discarded_tokens",
            "drafted_tokens",
            "hung_calls",
        )
        return {
            **{name: getattr(self, name) for name in often},
            **{name: getattr(self, name) or None for name in rare},
            "draft_acceptance": self.draft_acceptance,
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_in_flight_max": self.tokens_in_flight_max,
            "env_wait_s": self.env_wait_s,
        }

    def count_round(self, outputs: RoundOutputs, seconds: float) -> None:
        """Adds a round's tokens and seconds, if it is a full one."""
        if np.count_nonzero(outputs.count) >= FULL * len(outputs.count):
            self.full_tokens += int(outputs.count.sum())
            self.full_s += seconds

    def count_drafts(self, outputs: RoundOutputs) -> None:
        """Adds a round's passes and drafts, where the engine drafts tokens."""
        if outputs.passes is not None and outputs.drafted is not None:
            self.drafting_passes += int(outputs.passes.sum())
            self.drafted_tokens += int(outputs.drafted.sum())
            self.accepted_tokens += int((outputs.count - outputs.passes).sum())

    def count_steps(self, outputs: RoundOutputs, num_shards: int) -> None:
        """Adds the rows of a round's decode steps, of a row for each slot of a shard.

        A shard, which has its equal part of the slots, decodes until all of these have ended.

        Example: two shards of two slots; outputs of 3 0 and 1 1 passes: 3 steps of two rows, 3 of
        them idle, and one of two.
        """
        passes_B = outputs.count if outputs.passes is None else outputs.passes
        sampled_SB = passes_B.reshape(num_shards, -1)
        rows = int(sampled_SB.max(axis=1).sum()) * sampled_SB.shape[1]
        self.decode_rows += rows
        self.idle_rows += rows - int(sampled_SB.sum())
