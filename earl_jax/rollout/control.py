# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What others may ask of a rollout under way: to stand still, to drop episodes, to change weights.

Asked from any thread, carried out by the rollout between two rounds, that is after at most
`config.rollout.burst` forward passes of every slot (interruptible generation, AReaL, arXiv
2505.24298).
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Literal

from earl_jax.engine.engine import PolicyEngine
from earl_jax.engine.session import Policy

Cache = Literal["keep", "recompute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swap:
    """New weights: `publish(engine)` gives them on the engine that the rollout is on by then.

    With `cache="keep"` episodes go on over keys and values of the old weights, and every token says
    which version sampled it; new episodes take nothing over from them. With "recompute" live
    episodes are read again first: what follows is as if the new weights had read everything.
    """

    publish: Callable[[PolicyEngine], Policy]
    cache: Cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """What was asked for since the last round. `aborted`: episodes, and why."""

    swap: Swap | None
    aborted: dict[int, str]


class RolloutControl:
    """Asks things of one rollout; see the module. All methods return at once, but `take`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._swap: Swap | None = None
        self._aborted: dict[int, str] = {}

    def pause(self) -> None:
        """No round begins until `resume`; caches and environments stay as they are."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """The rollout goes on."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self, episode: int, detail: str = "") -> None:
        """This episode (`Task.episode`) ends as "aborted", with what it has; the others go on.

        One that has not begun does not begin. One that is over, or of another rollout, is ignored.
        """
        with self._changed:
            self._aborted[episode] = detail

    def swap(self, publish: Callable[[PolicyEngine], Policy], *, cache: Cache) -> None:
        """New weights before the next round; of several only the newest.

        Raises:
            ValueError: `cache` is neither "keep" nor "recompute".
        """
        if cache not in ("keep", "recompute"):
            raise ValueError(f"cache is {cache!r}; it must be 'keep' or 'recompute'")
        with self._changed:
            self._swap = Swap(publish=publish, cache=cache)

    def take(self) -> Requests:
        """For the rollout: waits while paused, then hands out what was asked for, once."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            requests = Requests(swap=self._swap, aborted=self._aborted)
            self._swap, self._aborted = None, {}
        return requests
