# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Episodes of a run that goes on: what they have, and how they come to what they had."""

import dataclasses

from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.open_episodes import OpenEpisode, open_episode


def record(episode: LiveEpisode) -> OpenEpisode | None:
    """Returns what an episode has, to go on from there; None: nothing was sampled.

    A reply that is restricted to some choices is sampled again, and is none yet.
    """
    if episode.resumes is not None:
        return episode.resumes
    is_free = not episode.choices and not episode.allowed
    if not (episode.in_turn and episode.reply and is_free):
        return open_episode(episode.turns)
    reply = dataclasses.replace(episode.reply.as_turn(), conversation=episode.number)
    return open_episode(episode.turns, reply)


def replay_turn(episode: LiveEpisode) -> bool | None:
    """Has an episode take the reply that it `resumes` with behind the newest message.

    None: there is none, and it goes on. False: the message is not what it was then, or does not
    allow the reply, or the reply lacks log-probs.
    """
    assert episode.resumes is not None, "it has turns to play again"
    # Those of the conversation on the move; in the row these follow each other.
    turns = [turn for turn in episode.resumes.turns if turn.conversation == episode.number]
    number = sum(turn.conversation == episode.number for turn in episode.turns)
    if number >= len(turns):
        return None
    before, newest, turn = turns[number - 1], episode.turns[-1], turns[number]
    in_turn = episode.resumes.in_turn and turn is episode.resumes.turns[-1]
    is_same = before.token_ids == newest.token_ids
    is_same &= number == 1 or before.forks == newest.forks
    is_same &= _allows(episode, turn.token_ids, in_turn=in_turn)
    if not is_same or (episode.scored and not turn.model_logprobs):
        return False
    episode.take_reply(turn, in_turn=in_turn)
    return True


def _allows(episode: LiveEpisode, reply: tuple[int, ...], *, in_turn: bool) -> bool:
    """Returns whether the newest message can have had this reply; one under way was free."""
    if in_turn:
        return not episode.choices and not episode.allowed
    if episode.choices:
        return any(choice[: len(reply)] == reply for choice in episode.choices)
    return not episode.allowed or {*reply} <= {*episode.allowed}
