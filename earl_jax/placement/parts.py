# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a step's batch: packed rows on the training layout, with what the host knows of them."""

import dataclasses
from collections.abc import Sequence

from earl_jax.trajectory import TrajectoryBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Episodes of a step on the training layout, packed; all of them, or those that came together.

    `length` is their context bucket, `num_tokens` what they have in all, `moved_bytes` those that
    changed device. If it `is_scored`, it has what a first pass gives it (`Learner.score`).
    """

    batch: TrajectoryBatch
    length: int
    num_tokens: int
    moved_bytes: int = 0
    is_scored: bool = False


def fill_of(parts: Sequence[Part]) -> float:
    """Returns the fraction of the parts' positions that hold a token."""
    return sum(part.num_tokens for part in parts) / sum(part.batch.tokens.size for part in parts)
