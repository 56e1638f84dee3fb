# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An episode while it is played: what was said, and what of it still has to be appended."""

import dataclasses

from earl_jax.envs.chat_template import Said, messages_of
from earl_jax.envs.conversation import Conversation, Heard
from earl_jax.envs.environment import Environment
from earl_jax.trajectory import Trajectory, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One episode to play. `episode` seeds the sampling, `env_seed` the environment."""

    episode: int
    group: int
    env_seed: int
    player: int


@dataclasses.dataclass(kw_only=True)
class LiveEpisode:
    """An episode in a slot.

    `waits`: its environment is at work, and it has nothing to do until that answers. `queue` holds
    ids that are still to be appended; `heads_pending`: its first is the token sampled last, which
    goes into the cache now. `fresh`: nothing was appended yet. `forks`: the queue is the prompt of
    a new sample. `length` counts the episode's tokens, the first `origin` of which belong to
    earlier samples.
    """

    task: Task
    row: int
    conversation: Conversation
    environment: Environment | None = None
    waits: bool = True
    role: str = ""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    queue: list[int] = dataclasses.field(default_factory=list)
    heads_pending: bool = False
    fresh: bool = True
    forks: bool = False
    origin: int = 0
    length: int = 0
    reply: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    def hear(self, said: Said, heard: Heard) -> None:
        """The environment said something: to be appended, behind the pending token.

        Or to begin a new sample, which knows of no pending token.
        """
        self.heads_pending = not self.fresh and not heard.forks
        self.forks = heard.forks
        pending = [self.turns[-1].token_ids[-1]] if self.heads_pending else []
        self.queue = [*pending, *heard.ids]
        messages = tuple((message.role, message.text) for message in messages_of(said))
        self.turns.append(
            Turn(
                author="environment",
                text="\n".join(text for _, text in messages),
                token_ids=heard.ids,
                messages=() if isinstance(said, str) else messages,
                forks=heard.forks,
            )
        )
        if heard.forks:
            self.origin = self.length
        self.length += len(heard.ids)

    def close_turn(self, text: str) -> None:
        """The policy's turn is over."""
        self.turns.append(
            Turn(
                author="policy",
                text=text,
                token_ids=tuple(self.reply),
                logprobs=tuple(self.logprobs),
                versions=tuple(self.versions),
            )
        )
        self.reply, self.logprobs, self.versions = [], [], []

    def finish(self, stop_reason: str, detail: str = "") -> Trajectory:
        """The episode is over."""
        return Trajectory(
            episode=self.task.episode,
            group=self.task.group,
            role=self.role,
            turns=tuple(self.turns),
            turn_rewards=tuple(self.rewards),
            stop_reason=stop_reason,
            row=self.row,
            detail=detail,
        )
