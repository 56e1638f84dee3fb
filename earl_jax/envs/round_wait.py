# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The wait for answers of environments before a round, bounded by what it costs.

While answers are waited for, slots that have work lose time. Without the wait, a slot whose answer
comes a moment later loses a whole round. The wait ends when the first loss has reached the second
(ski rental). Whenever the answers come, both losses together are at most twice those of the best
wait that knows when they come: if that one ends before this one does, it loses a round of at
least as many slots; if it ends later, it has lost at least as much time. (Karlin, Manasse, Rudolph,
Sleator: Competitive snoopy caching, Algorithmica 3, 1988; with several who wait, Dooly, Goldman,
Scott: On-line analysis of the TCP acknowledgment delay problem, JACM 48, 2001.)
"""

import math


class RoundWait:
    """One wait before a round that takes about `round_s`, in which `num_working` slots have work.

    Each answer that comes adds a slot with work.

    Example: a round takes 0.3 s, 4 slots have work, and 2 answers are awaited: 0.6 slot-seconds
    are at stake, so that the wait ends after 0.15 s. Where one answer comes after 0.02 s, 5 slots
    have lost 0.08 together, and 0.3 are at stake: the wait ends after 0.044 s more.
    """

    def __init__(self, round_s: float, num_working: int) -> None:
        self.round_s, self._num_working = round_s, num_working
        self._num_answered, self._lost_slot_s, self._last_s = 0, 0.0, math.inf

    def left_s(self, now_s: float, num_awaited: int, num_answered: int) -> float:
        """Returns the seconds left at `now_s`; inf while no slot has work, 0 or less at the end.

        `num_answered` have come since the wait began, at the first call or later; `num_awaited` are
        still to come.
        """
        since_s = max(0.0, now_s - self._last_s)
        self._lost_slot_s += (self._num_working + self._num_answered) * since_s
        self._num_answered, self._last_s = num_answered, now_s
        working = self._num_working + num_answered
        at_stake = self.round_s * num_awaited - self._lost_slot_s
        if not num_awaited:
            return 0.0
        return at_stake / working if working else math.inf
