# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Replies that an agent asks for while others of its episode are sampled, in slots of their own.

A branch is one reply of a conversation (`envs.environment.Branches`). It plays in a free slot like
an episode of one turn, and writes no row. Its turn becomes one of the episode that it belongs to
before the agent gets the reply, so that no limit leaves out what an agent has had; the row of that
episode is written at its end. The slot of that episode plays on meanwhile; where it has nothing to
play, it waits for the next request. Without a free slot requests wait for that slot.
"""

import dataclasses
import functools
from collections.abc import Callable

from earl_jax.engine.config import EngineConfig
from earl_jax.engine.rows import NO_ROW
from earl_jax.envs.environment import (
    ENVIRONMENT_ERROR,
    ENVIRONMENT_TIMEOUT,
    NONFINITE_LOGITS,
    REPLIED,
    UNENCODABLE,
)
from earl_jax.rollout.answers import Answer, Answers, begin, branch_key, give, go_on, wait_for_agent
from earl_jax.rollout.block_manager import BlockManager
from earl_jax.rollout.episode import LiveEpisode

# Ends the episode of a slot, with a stop reason and details.
End = Callable[[int, str, str], None]
# `LiveEpisode.ends` of an episode that its limits end; and ends that a branch's episode shares.
_CUT = ("", "")
_FAILED = (ENVIRONMENT_ERROR, ENVIRONMENT_TIMEOUT, UNENCODABLE, NONFINITE_LOGITS)


class Branches:
    """The branches of a rollout's episodes. Host-side state only."""

    def __init__(
        self,
        slots: list[LiveEpisode | None],
        blocks: BlockManager,
        calls: Answers,
        unfinished_reward: float,
    ) -> None:
        """`slots` is the caller's list of the live episodes; `calls` are those of environments.

        An episode that is cut earns `unfinished_reward`. No method of the caller is kept: that
        would be a circle, which holds the caller's session until Python's collector comes.
        """
        self._slots, self._blocks, self._calls = slots, blocks, calls
        self._unfinished_reward = unfinished_reward

    def begin(self, config: EngineConfig, end: End) -> None:
        """Begins what agents ask for now: in free slots, or where their episode's slot is idle.

        One branch an episode and call, so that many agents share the slots that there are. Ends
        episodes that a branch has ended.
        """
        agents = self._agents(end)
        if not agents:
            return
        crowded = self._blocks.crowded
        free = [slot for slot, each in enumerate(self._slots) if each is None]
        free = self._blocks.by_age([slot for slot in free if slot not in crowded])
        opened: dict[int, Callable[[], Answer]] = {}
        polls: dict[int, Callable[[], str | None]] = {}
        for episode in agents:
            call = functools.partial(wait_for_agent, episode, config)
            if episode.is_idle and not episode.num_branches:
                self._wait(episode, call, opened)
            elif episode.is_idle:
                polls[episode.ticket] = functools.partial(
                    self._wait_if_claimed, episode, call, opened
                )
            elif free and _may_branch(episode):
                key = branch_key(episode.ticket, episode.num_begun)
                polls[key] = functools.partial(self._begin, episode, key, free, config, opened)
        if polls:
            self._calls.poll(polls)
        if opened:
            self._calls.submit(opened)

    def _agents(self, end: End) -> list[LiveEpisode]:
        """Returns the live episodes that may have branches, and ends those that one has ended."""
        found = []
        for slot, episode in enumerate(self._slots):
            if episode is not None and episode.is_idle and episode.ends is not None:
                self._end_by_branch(slot, episode, end)
            elif episode is not None and episode.branches:
                found.append(episode)
        return found

    def _wait(
        self, episode: LiveEpisode, call: Callable[[], Answer], opened: dict[int, Callable]
    ) -> None:
        episode.is_idle, opened[episode.ticket] = False, call

    def _wait_if_claimed(
        self, episode: LiveEpisode, call: Callable[[], Answer], opened: dict[int, Callable]
    ) -> str | None:
        if not episode.agent.claim():
            return None
        self._wait(episode, call, opened)
        # The answer names the request.
        return ""

    def _begin(
        self,
        parent: LiveEpisode,
        key: int,
        free: list[int],
        config: EngineConfig,
        opened: dict[int, Callable],
    ) -> str | None:
        """Begins a branch of an episode. Returns its request; None: there is none, or no slot."""
        environment = parent.agent.branch() if free else None
        if environment is None:
            return None
        most = parent.limits.max_episode_tokens
        branch = self._slots[free.pop(0)] = LiveEpisode(
            task=parent.task,
            ticket=key,
            buffer_row=NO_ROW,
            conversation=parent.dialogue.of_another_side(),
            limits=dataclasses.replace(
                parent.limits, max_turns=1, max_episode_tokens=most and most - parent.length
            ),
            stops=parent.stops,
            max_context=parent.max_context,
            scored=parent.scored,
            truncates=parent.truncates,
            # It may have had this conversation in a run before.
            resumes=parent.task.resumes,
            parent=parent,
            others=parent.others,
        )
        parent.num_branches, parent.num_begun = parent.num_branches + 1, parent.num_begun + 1
        parent.num_due += 1
        opened[key] = functools.partial(begin, lambda task: environment, branch, config)
        return environment.request

    def end_with_turn(self, slot: int, episode: LiveEpisode, end: End) -> None:
        """Ends an episode that a branch ends, or that has too many tokens with its branches'."""
        if episode.is_beyond(0):
            # With the newest message and reply it has too many tokens. The agent has had neither.
            place = len(episode.rewards)
            del episode.turns[2 * place :], episode.turn_roles[place:]
        else:
            episode.add_rewards(0.0, {}, {})
        self._end_by_branch(slot, episode, end)

    def _end_by_branch(self, slot: int, episode: LiveEpisode, end: End) -> None:
        ends = episode.ends or _CUT
        end(slot, *(episode.cut(self._unfinished_reward) if ends == _CUT else ends))

    def join(self, branch: LiveEpisode, *, whole: bool) -> bool:
        """Adds the turn of a branch to its episode, before those of its own turn.

        Returns whether the agent is given the reply: not where the episode ends, with a reply that
        a limit has cut (not `whole`), or that is one too many tokens.
        """
        parent = branch.parent
        assert parent is not None
        parent.num_due -= 1
        tokens = sum(len(turn.token_ids) for turn in branch.turns)
        if parent.ends is None and parent.is_beyond(tokens):
            parent.ends = _CUT
        if parent.ends is not None:
            return False
        if not whole:
            parent.ends = branch.cut(self._unfinished_reward)
        place = len(parent.rewards)
        parent.turns[2 * place : 2 * place] = branch.turns
        parent.turn_roles.insert(place, parent.side)
        parent.rewards += branch.rewards or [0.0]
        parent.length, parent.origin = parent.length + tokens, parent.origin + tokens
        parent.detached = True
        return whole

    def drop(self, episode: LiveEpisode) -> None:
        """Gives up the branches of an episode that is over."""
        for slot, each in enumerate(self._slots if episode.num_branches else ()):
            if each is not None and each.parent is episode:
                self._slots[slot] = None
                self._blocks.abort(slot)


def _may_branch(episode: LiveEpisode) -> bool:
    """Returns whether another reply of the episode may be sampled beside its own."""
    goes_on = not episode.waits and episode.ends is None and episode.resumes is None
    num_turns = len(episode.rewards) + 1 + episode.num_due
    return goes_on and num_turns < episode.limits.max_turns and not episode.is_beyond(2)


def reply_to(episode: LiveEpisode, text: str, config: EngineConfig) -> Callable[[], Answer]:
    """Returns the call that gives the policy's reply to the environment of an episode."""
    if episode.num_branches:
        return functools.partial(give, episode, text)
    if episode.parent is not None:
        # Before the agent has the reply, and goes on; `others` are the whole episode's.
        episode.leave(episode.number)
    return functools.partial(go_on, episode, text, config)


def leave(branch: LiveEpisode, stop_reason: str, detail: str) -> None:
    """Notes that a branch is over; its episode ends where it has failed, or has no reply."""
    parent = branch.parent
    assert parent is not None
    parent.num_branches -= 1
    parent.num_due -= not branch.turn_roles
    if stop_reason != REPLIED and parent.ends is None:
        parent.ends = (stop_reason, detail) if stop_reason in _FAILED else _CUT
