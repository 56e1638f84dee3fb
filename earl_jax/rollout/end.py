# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Ends of a process's part of a rollout: it is done, a signal stopped it, or memory was short."""

import dataclasses
from typing import Any


class Stopped(Exception):  # noqa: N818 - no error
    """A rollout was abandoned for a signal, whose name it has: its episodes are to be played again.

    Of several processes all raise it where their rollouts are gathered, or in lockstep at once.
    """


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """The end of a process's part of a rollout, as the others receive it.

    The part had a `shortage`, or was `stopped` by a signal of this name, or neither.
    """

    shortage: Shortage | None = None
    stopped: str = ""
