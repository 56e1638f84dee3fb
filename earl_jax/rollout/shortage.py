# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The end of a rollout by a lack of memory in one of several processes."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortage:
    """The end of a rollout in one process by a lack of memory, or of meshes for longer episodes.

    Where it `failed`, the devices ran out of memory at `placement` (`Placement.as_dict`), or on the
    plan of its last episodes (`tail`, `RolloutPlan.as_list`).
    `outgrown` is the context bucket that it had come to, 0 where it had not grown.
    """

    words: str
    failed: bool
    placement: dict[str, Any]
    outgrown: int
    tail: list[Any] | None = None


class RolloutShort(RuntimeError):
    """A rollout ended so in one of several processes. All raise it, with the same shortage."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.words)
        self.shortage = shortage
