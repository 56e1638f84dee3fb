# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The conversations of an agent, found again by the digest of all their messages."""

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from earl_jax.envs.agents.session import Asked, Paid, digest_of, message_key
from earl_jax.envs.environment import ASSISTANT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """A request that was taken: its conversation, and how many of its messages that has had.

    `rewards` are what the agent has paid before it, if the environment heard of these with it.
    """

    asked: Asked
    conversation: int
    num_before: int
    rewards: Sequence[Paid] = ()

    @property
    def name(self) -> str:
        """The request's digest, conversation and rewards, by which a replay knows it.

        Example: "0f3a.7 0.5 2.0", with a longer digest.
        """
        return " ".join([f"{self.asked.digest}.{self.conversation}", *map(str, self.rewards)])


class Conversations:
    """Conversations by number. The first one is 0; any thread may use them.

    `num_taken` requests were taken, of which `num_begun` began a conversation.
    """

    def __init__(self) -> None:
        """Begins without any."""
        self._lock = threading.Lock()
        self._numbers: set[int] = set()
        # By digest of all messages, the reply last: the conversations that may go on there.
        self._open: dict[bytes, list[int]] = {}
        # By conversation: how many replies it has.
        self._num_replies: collections.Counter[int] = collections.Counter()
        self.num_taken = self.num_begun = 0

    def take(self, asked: Asked, name: str) -> Taken:
        """Finds the conversation that a request goes on with, or begins one.

        That of `name` in a replay (`Taken.name`); "": of several that are alike the one that the
        policy spoke in last.
        """
        roles = [message["role"] for message in asked.messages]
        num_before = len(roles) - roles[::-1].index(ASSISTANT) if ASSISTANT in roles else 0
        with self._lock:
            alike = self._open.get(asked.digests[num_before], []) if num_before else []
            named = name.split()[:1]
            number = int(named[0].rpartition(".")[2]) if named else next(reversed(alike), None)
            if number in alike:
                alike.remove(number)
            else:
                num_before, number = 0, self._new_number(asked) if number is None else number
                self._numbers.add(number)
                self.num_begun += 1
            self.num_taken += 1
        return Taken(asked=asked, conversation=number, num_before=num_before)

    def _new_number(self, asked: Asked) -> int:
        # By what it begins with, so that it does not depend on the order of later requests.
        number = int.from_bytes(asked.digests[-1][:4], "big") >> 1 if self._numbers else 0
        while number in self._numbers:
            number = (number + 1) % 2**31
        return number

    def add(self, taken: Taken, reply: Mapping[str, Any]) -> str:
        """Adds the policy's reply, with which its conversation may go on. Returns its name."""
        digest = digest_of(message_key(reply).encode(), taken.asked.digests[-1])
        with self._lock:
            number = self._num_replies[taken.conversation]
            self._num_replies[taken.conversation] += 1
            self._open.setdefault(digest, []).append(taken.conversation)
        return f"{taken.conversation}.{number}"
