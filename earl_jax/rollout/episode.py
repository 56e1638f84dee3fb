# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An episode while it is played: its turns, and the tokens that still have to be appended."""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from earl_jax.engine.config import NO_LIMIT
from earl_jax.engine.rows import NO_ROW
from earl_jax.envs.environment import (
    EPISODE_TOO_LONG,
    PROMPT_TOO_LONG,
    REPLIED,
    TOO_MANY_TURNS,
    TURN_TOO_LONG,
    Branches,
    Environment,
)
from earl_jax.envs.text.chat_template import Content, messages_of
from earl_jax.envs.text.conversation import Completion, Conversation, Observation
from earl_jax.envs.text.stream import StopWatch
from earl_jax.rollout.config import Limits, Stops
from earl_jax.rollout.conversations import Side, by_conversation
from earl_jax.rollout.open_episodes import OpenEpisode
from earl_jax.rollout.reply import Reply, Sampled
from earl_jax.rollout.task import Task
from earl_jax.trajectory import Trajectory, Turn

# The queue of an episode that has nothing to read.
_NO_IDS = np.zeros(0, np.int32)


# With slots, because every round reads all episodes, and a dict of so many fields takes longer.
@dataclasses.dataclass(kw_only=True, slots=True)
class LiveEpisode:
    """An episode in a slot.

    `ticket` numbers its task among those of the rollout; it is recorded in `buffer_row`.

    - `waits`: its environment is at work; the policy has nothing to answer until that does.
    - `queue`: ids i32[tokens] that are still to be appended. The first `again` of them are not new:
      the token sampled last, which goes into the cache now, or ids that are read again.
    - `fresh`: its slot has not begun yet. `forks`: the queue is the prompt of a new sample.
      `rewinds`: the queue begins with all of this sample again.
    - `preempted`: it takes no part, because there are too few pages; the cache may be in host
      memory.
    - `in_turn`: the policy is in the middle of a turn; `reply` is what it has of this turn.
    - `length`: the episode's tokens, the first `origin` of which belong to earlier samples. A
      sample holds `max_context` tokens at most.
    - `choices`: ids of the replies to which the next turn is restricted, or `allowed`: its possible
      ids; both are () where the turn may be anything.
    - `scored`: log-probs under the model itself are recorded. `truncates`: its sampling cuts off
      tokens.
    - `resumes`: what it had before its run was interrupted, while its environment is given that.
    - `side`: the role of the side on the move, `role` that of the first one; `turn_roles` has the
      side of each of the policy's turns. `number`: that of the conversation on the move. `others`
      are other sides by their roles, and other conversations by their numbers.
    - `sample`: ids of its sample, those of the reply under way left out.
    - `counts`: the tokens of the sample before the newest reply, and those of the reply.
    - `detached`: its tokens are not in its row in the order of the row, which is written when it is
      over.
    - `parent`: the episode that it is a branch of (branches.py). `branches`: it may have some;
      `num_branches` play now, of `num_begun`, of which `num_due` have no reply yet. `is_idle`: it
      waits, and no call is under way. `ends`: the stop reason and detail by which a branch ends it;
      no words where they are its own.
    """

    task: Task
    ticket: int
    buffer_row: int
    conversation: Conversation | Completion
    limits: Limits
    stops: Stops
    max_context: int = NO_LIMIT
    scored: bool = False
    truncates: bool = False
    environment: Environment | None = None
    resumes: OpenEpisode | None = None
    waits: bool = True
    role: str = ""
    side: str = ""
    turn_roles: list[str] = dataclasses.field(default_factory=list)
    number: int = 0
    others: dict[int | str, Side] = dataclasses.field(default_factory=dict)
    sample: list[int] = dataclasses.field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    detached: bool = False
    parent: "LiveEpisode | None" = None
    branches: bool = False
    num_branches: int = 0
    num_begun: int = 0
    num_due: int = 0
    is_idle: bool = False
    ends: tuple[str, str] | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    queue: np.ndarray = dataclasses.field(default_factory=lambda: _NO_IDS)
    again: int = 0
    fresh: bool = True
    forks: bool = False
    rewinds: bool = False
    preempted: bool = False
    in_turn: bool = False
    origin: int = 0
    length: int = 0
    reply: Reply = dataclasses.field(init=False)
    stop_watch: StopWatch | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Begins without a reply."""
        self.reply = Reply(scored=self.scored)

    @property
    def oldest_version(self) -> int | None:
        """The version that sampled its first token, which is the oldest; None: none was sampled."""
        if self.resumes is not None:
            return self.resumes.oldest_version
        first = next((turn.versions[0] for turn in self.turns if turn.versions), None)
        return self.reply.first_version if first is None else first

    @property
    def num_turns(self) -> int:
        """The number of the policy's turns, the one that it is in included."""
        return len(self.turn_roles) + self.in_turn

    @property
    def turn_limit(self) -> int:
        """The most tokens of the turn that it is in, or that begins now."""
        before = self.length - len(self.reply)
        # Branches may have had all that was left; `Branches.end_with_turn` ends it then.
        return max(1, min(self.limits.max_turn_tokens, self.most_tokens - before))

    @property
    def most_tokens(self) -> int:
        """The most tokens of the episode, of both sides, if no other sample begins."""
        return self._most_tokens(self.origin)

    def _most_tokens(self, origin: int) -> int:
        return min(self.limits.max_episode_tokens or NO_LIMIT, origin + self.max_context)

    @property
    def most_message_tokens(self) -> int:
        """The tokens of a message that is too long whatever came before it."""
        return self._most_tokens(0)

    def _fits(self, message: Observation) -> bool:
        """Returns whether the policy could answer anything to this message within the limits.

        Its turns so far were answered, each with a reward.
        """
        most = self._most_tokens(self.length if message.forks else self.origin)
        most_turns = self.limits.max_turns - self.num_due
        return self.length + len(message.ids) < most and len(self.rewards) < most_turns

    def take_message(
        self, content: Content, message: Observation | None, unfinished_reward: float
    ) -> tuple[str, str] | None:
        """Appends a message. Or ends where it leaves no tokens for an answer; returns how (`cut`).

        None: it was too long to be rendered.
        """
        if message is None or not self._fits(message):
            return self.cut(unfinished_reward)
        self.append_message(content, message)
        return None

    def append_message(self, content: Content, message: Observation) -> None:
        """Appends an environment's message behind the pending token.

        Or begins a new sample with it, which knows of no pending token.
        """
        self.waits = False
        if message.forks:
            # What was to be read again is left behind with the sample before.
            self.queue, self.again, self.rewinds, self.forks = message.array, 0, False, True
            self.sample = []
        elif self.forks:
            # Behind all of a conversation that it goes back to.
            self.queue = np.concatenate((self.queue, message.array))
        elif self.turns:
            pending = _array(self.sample[-1:])
            self.queue = np.concatenate((self.queue, pending, message.array))
            self.again += 1
        else:
            self.queue = message.array
        is_text = isinstance(content, str)
        messages = () if is_text else tuple((m.role, m.text) for m in messages_of(content))
        self.turns.append(
            Turn(
                author="environment",
                text=content if is_text else "\n".join(text for _, text in messages),
                token_ids=message.ids,
                messages=messages,
                forks=message.forks,
                conversation=self.number,
            )
        )
        self.sample += message.ids
        if message.forks:
            self.origin = self.length
        self.length += len(message.ids)

    @property
    def dialogue(self) -> Conversation:
        """The conversation, of an episode that has an environment."""
        assert isinstance(self.conversation, Conversation), "an environment speaks in messages"
        return self.conversation

    def side_of(self, role: str) -> Side:
        """Returns a side that is not on the move; without ids, one that has seen nothing yet."""
        return self.others.get(role) or Side(self.dialogue.of_another_side(), ())

    def change_sides(self, role: str, conversation: Conversation) -> None:
        """Gives the move to another side, whose next message begins a new sample."""
        self.leave(self.side)
        self.side, self.conversation = role, conversation

    def change_conversation(self, number: int, conversation: Conversation) -> None:
        """Goes on with another conversation: one that begins with its next message, or an old one.

        The sample of an old one is read again, and goes on. Then no slot can write the row.
        """
        self.leave(self.number)
        self.take_up(number, conversation)

    def leave(self, name: int | str) -> None:
        """Adds its conversation to those that may be gone on with, by this number or role."""
        self.others[name] = Side(self.dialogue, tuple(self.sample))

    def take_up(self, number: int, conversation: Conversation) -> None:
        """Begins with a conversation, or goes on with an old one."""
        self.number, self.conversation = number, conversation
        if (old := self.others.pop(number, None)) is not None:
            num_ids = len(old.ids)
            if self.parent is not None:
                # A branch has this sample alone, whose tokens its episode has counted.
                most = self.limits.max_episode_tokens
                most = most and most + num_ids
                self.limits = dataclasses.replace(self.limits, max_episode_tokens=most)
                self.length += num_ids
                # Only the first turn of a conversation is compared with that of a run before.
                self.resumes = None
            self.sample, self.origin = list(old.ids), self.length - num_ids
            self.queue, self.again = _array(old.ids), num_ids
            self.rewinds, self.forks, self.detached = False, True, True

    def add_rewards(
        self, reward: float, of_sides: Mapping[str, float], of_replies: Mapping[str, float]
    ) -> None:
        """Adds the reward of the newest turn, and those of other sides' newest and earlier ones."""
        if len(self.turns) == 2 * len(self.rewards):
            # It has one, for an agent that was given the reply without waiting.
            self.rewards[-1] += float(reward)
        else:
            self.rewards.append(float(reward))
        for role, more in of_sides.items():
            turns = [turn for turn, side in enumerate(self.turn_roles) if side == role]
            if turns:
                self.rewards[turns[-1]] += float(more)
        for name, more in of_replies.items():
            conversation, place = map(int, name.split("."))
            replies = enumerate(turn.conversation for turn in self.turns[1::2])
            turns = [turn for turn, number in replies if number == conversation]
            if place < len(turns):
                self.rewards[turns[place]] += float(more)

    # Branches.

    @property
    def agent(self) -> Branches:
        """The environment, of an episode that has branches."""
        environment: Any = self.environment
        return environment

    def is_beyond(self, more: int) -> bool:
        """Returns whether it would have too many tokens with so many more."""
        return 0 < self.limits.max_episode_tokens < self.length + more

    @property
    def token_seed(self) -> int:
        """The seed that its tokens are drawn with; a branch has one of its own."""
        seed = self.task.token_seed
        words = f"{seed} {self.number} {len(self.sample)}"
        return seed if self.parent is None else zlib.crc32(words.encode()) >> 1

    @property
    def row(self) -> int:
        """The row that its slot writes; NO_ROW where that is written when it is over."""
        return NO_ROW if self.detached else self.buffer_row

    @property
    def has_work(self) -> bool:
        """Returns whether it takes part in the next round."""
        return not self.preempted and (self.in_turn or len(self.queue) > 0)

    @property
    def begins(self) -> bool:
        """Returns whether its slot is to begin anew with the queue."""
        return self.fresh or self.forks or self.rewinds

    @property
    def num_cached(self) -> int:
        """Tokens in its slot's cache; the one that was sampled last counts, though it is not."""
        return 0 if self.begins else self.length - self.origin - len(self.queue)

    @property
    def num_written(self) -> int:
        """Tokens in its slot's cache: without the one that was sampled last, where it waits."""
        pending = self.waits or not len(self.queue)
        return 0 if self.begins else self.num_cached - pending

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The ids of this sample that are in its slot's cache."""
        return (*self.sample, *self.reply.ids)[: self.num_written]

    def append_sampled(self, sampled: Sampled, slot: int) -> int:
        """Appends the tokens that its slot sampled in a round, those behind a stop string left out.

        Returns how many are left out.
        """
        number = count = sampled.count[slot]
        if self.stops.strings:
            ids = sampled.outputs.tokens[slot, :number].tolist()
            count = sampled.count[slot] = self._count_until_stop(ids)
        self.in_turn = sampled.active[slot] and not self.found_stop
        self.reply.add(sampled, slot)
        self.length += count
        return number - count

    @property
    def found_stop(self) -> bool:
        """True if the reply has a stop string."""
        return self.stop_watch is not None and self.stop_watch.found

    def _count_until_stop(self, sampled: list[int]) -> int:
        """Returns how many of these tokens come until a stop string is complete."""
        if not self.stops.strings:
            return len(sampled)
        if self.stop_watch is None:
            self.stop_watch = self.conversation.watch_for(self.stops.strings)
        return self.stop_watch.push(sampled)

    def end_turn(self) -> tuple[str, bool]:
        """Ends the policy's turn. Returns its text, and whether it is whole, not cut by a limit."""
        before_stop, turn = None, self.reply.as_turn()
        if self.stop_watch is not None and self.found_stop:
            before_stop = self.stop_watch.text
        elif turn.token_ids[-1] in self.stops.token_ids:
            before_stop = self.conversation.text_of(turn.token_ids[:-1])
        text, whole = self.conversation.reply(turn.token_ids, before_stop)
        self.counts = (self.length - self.origin - len(turn.token_ids), len(turn.token_ids))
        self.in_turn, self.stop_watch, self.reply = False, None, Reply(scored=self.scored)
        self.turn_roles.append(self.side)
        restricted = {"choices": self.choices, "allowed": self.allowed}
        turn = dataclasses.replace(turn, text=text, conversation=self.number, **restricted)
        self.turns.append(turn)
        self.sample += turn.token_ids
        return text, whole

    def begin(self, number: int) -> int:
        """Notes that its slot has begun, with the queue's first so many ids in its cache.

        Returns how many of these are new.
        """
        self.fresh = self.forks = self.rewinds = False
        return self.take(number)[1]

    # The queue.

    def read_all(self) -> None:
        """Queues all of the sample that it is in, to be read by the slot as a prompt is."""
        self.queue, self.again = _array([*self.sample, *self.reply.ids]), 0
        self.fresh, self.forks, self.rewinds = True, False, False

    def take_reply(self, turn: Turn, *, in_turn: bool) -> None:
        """Takes a reply that was sampled before, which goes on with `in_turn`."""
        self.queue = _NO_IDS
        self.reply.take_over(turn)
        self._count_until_stop(list(turn.token_ids))
        self.length += len(self.reply)
        self.in_turn = in_turn

    def take(self, number: int) -> tuple[np.ndarray, int]:
        """Takes the next so many ids off the queue. Returns them, and how many of them are new."""
        part, self.queue = self.queue[:number], self.queue[number:]
        if not len(self.queue):
            # The same array for all that have read theirs: it is at hand, and prompts are let go.
            self.queue = _NO_IDS
        again = min(self.again, len(part))
        self.again -= again
        return part, len(part) - again

    def num_appended(self, number: int) -> int:
        """Returns how many of the next so many ids are appended: the last of a prompt is not."""
        part = min(number, len(self.queue))
        return part - (part == len(self.queue) and (self.in_turn or not self.waits))

    def rewind(self) -> int:
        """Queues all of this sample to be read again, because its cache is gone.

        Returns how many ids that are.
        """
        if self.fresh or self.forks:
            return 0
        # The end of the queue is new; the ids before it were read, or were to be read again.
        num_new = len(self.queue) - self.again
        ids = [*self.sample, *self.reply.ids]
        # An answer brings the token before it along, when it comes.
        self.queue = _array(ids[:-1] if self.waits else ids)
        self.again = len(self.queue) - num_new
        self.rewinds = True
        return self.again

    def cut(self, unfinished_reward: float) -> tuple[str, str]:
        """Ends it by its limits: the last turn has no end, or its answer leaves no tokens for more.

        Returns the stop reason, and a sentence.
        """
        if all(turn.author != "policy" for turn in self.turns):
            return PROMPT_TOO_LONG, (
                f"the first message leaves no token of {self.most_tokens} for a reply "
                "(config.rollout.max_episode_tokens, or the model's or the longest context)"
            )
        answered = len(self.rewards) == sum(turn.author == "policy" for turn in self.turns)
        if not answered:
            self.rewards.append(0.0)
        if self.rewards:
            self.rewards[-1] += unfinished_reward
        if not answered and len(self.turns[-1].token_ids) == self.limits.max_turn_tokens:
            return TURN_TOO_LONG, f"no end of turn within {self.limits.max_turn_tokens} tokens"
        if answered and len(self.rewards) + self.num_due >= self.limits.max_turns:
            return TOO_MANY_TURNS, f"no end of the episode within {self.limits.max_turns} turns"
        return EPISODE_TOO_LONG, f"no end of the episode within {self.most_tokens} tokens"

    def end_of_prompt(self, *, whole: bool) -> tuple[str, str]:
        """Ends the turn behind a prompt. Returns the stop reason, and a sentence if it was cut."""
        if whole:
            self.rewards.append(0.0)
            return REPLIED, ""
        return self.cut(0.0)

    def finish(self, stop_reason: str, detail: str = "") -> Trajectory:
        """Returns the trajectory of the episode, which is over."""
        turns, rewards = self.turns, self.rewards
        if self.detached:
            turns, rewards = by_conversation(turns, rewards)
        return Trajectory(
            episode=self.task.episode,
            group=self.task.group,
            role=self.role,
            turns=tuple(turns),
            turn_rewards=tuple(rewards),
            stop_reason=stop_reason,
            row=self.buffer_row,
            detail=detail,
            metrics={name: float(value) for name, value in self.metrics.items()},
            turn_roles=tuple(self.turn_roles) if {*self.turn_roles} - {self.role} else (),
            kind=self.task.kind,
        )


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, np.int32)
