# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions in host memory: caches of conversations that are idle, found again by their ids.

When a slot whose last episode is over is used for something else, its pages come here. Where a
prompt goes on with what is kept here, the pages go back into its slot before it begins, as if the
slot had kept them. The sessions that were used the longest ago are dropped first.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from earl_jax.engine.host_pages import HostPages, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdleSession:
    """The ids in a session's cache, and its pages."""

    ids: np.ndarray
    parts: list[Part]


class HostSessions:
    """Idle sessions of one policy version. Host-side state only."""

    def __init__(self, host: HostPages, least_tokens: int) -> None:
        """Pages are in `host`; sessions that have fewer tokens in common do not count."""
        self._host, self._least = host, least_tokens
        # By number, the one that came first in front; and the numbers by their first tokens.
        self._sessions: dict[int, IdleSession] = {}
        self._begin: dict[bytes, dict[int, None]] = collections.defaultdict(dict)
        self._next = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Returns the session with the most tokens in common with a prompt, and their number.

        The last token of a prompt does not count. Without such a session: (-1, 0).
        """
        best, most = -1, 0
        if not self._sessions or len(prompt) <= self._least:
            return best, most
        ids = np.fromiter(prompt, np.int32, len(prompt))[:-1]
        for number in self._begin.get(self._key(ids), ()):
            theirs = self._sessions[number].ids
            length = min(len(ids), len(theirs))
            equal = ids[:length] == theirs[:length]
            common = length if equal.all() else int(equal.argmin())
            if common > most:
                best, most = number, common
        return best, most

    def holds(self, ids: np.ndarray) -> bool:
        """Returns whether a session's cache begins with these ids."""
        return any(
            np.array_equal(self._sessions[number].ids[: len(ids)], ids)
            for number in self._begin.get(self._key(ids), ())
        )

    def add(self, session: IdleSession) -> None:
        """Adds a session, as the one that is dropped last."""
        self._sessions[self._next] = session
        self._begin[self._key(session.ids)][self._next] = None
        self._next += 1

    def remove(self, number: int) -> IdleSession:
        """Removes a session, whose pages stay in the host's memory."""
        session = self._sessions.pop(number)
        key = self._key(session.ids)
        del self._begin[key][number]
        if not self._begin[key]:
            del self._begin[key]
        return session

    def make_room(self, block_bytes: int, pages_a_block: int, num_pages: Sequence[int]) -> bool:
        """Drops sessions until slots with so many pages each fit too. Returns whether they do."""
        while not self._host.has_room(block_bytes, pages_a_block, num_pages):
            if not self._sessions:
                return False
            self._host.release(self.remove(next(iter(self._sessions))).parts)
        return True

    def clear(self) -> None:
        """Drops all sessions: the weights have changed."""
        for number in list(self._sessions):
            self._host.release(self.remove(number).parts)

    def _key(self, ids: np.ndarray) -> bytes:
        return ids[: self._least].tobytes()
