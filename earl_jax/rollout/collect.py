# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plays episodes on the engine: environments on the host, everything else on the devices.

Round by round: answer the turns that ended, refill the slots that are free, send each slot its next
chunk, decode. An episode's ids are only ever appended to; nothing is prefilled twice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from earl_jax.envs.chat_template import Said, messages_of
from earl_jax.envs.conversation import Conversation, Heard
from earl_jax.envs.environment import (
    TURN_TOO_LONG,
    UNENCODABLE,
    Environment,
    Start,
    StepResult,
    check_start,
    check_step,
)
from earl_jax.envs.pool import EnvironmentPool, Failure
from earl_jax.models.parameters import Params
from earl_jax.rollout.config import RolloutConfig, Sampling
from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.sampling import sampling_rows
from earl_jax.rollout.scheduler import LaneScheduler
from earl_jax.rollout.slots import NO_ROW, DecodeState, Report, pack_orders
from earl_jax.trajectory import Experience, Trajectory, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One episode to play. `episode` seeds the sampling, `env_seed` the environment."""

    episode: int
    group: int
    env_seed: int
    player: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rollout runs: an engine, the policy on its layout, and the state of its slots."""

    engine: PolicyEngine
    policy: Policy
    state: DecodeState
    places: int


@dataclasses.dataclass(kw_only=True)
class RolloutStats:
    """Counts of one rollout. Tokens in flight are those of all live episodes at one moment."""

    rounds: int = 0
    rollout_tokens: int = 0
    prefill_tokens: int = 0
    tokens_in_flight_max: int = 0
    context_tokens_max: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a rollout leaves: host facts in the order of the tasks, and the seat with the rows."""

    trajectories: list[Trajectory]
    seat: Seat
    stats: RolloutStats

    @property
    def experience(self) -> Experience:
        """The device rows; row i is the episode of task i."""
        return self.seat.state.experience


@dataclasses.dataclass(kw_only=True)
class _Live:
    """An episode in a slot.

    `queue` holds ids that are still to be appended; `heads_pending`: its first is the token sampled
    last, which goes into the cache now. `fresh`: nothing was appended yet. `forks`: the queue is
    the prompt of a new sample. `length` counts the episode's tokens, the first `origin` of which
    belong to earlier samples.
    """

    task: Task
    row: int
    conversation: Conversation
    environment: Environment | None = None
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


class Collector:
    """Plays the tasks of one rollout. Single use; host-side state only."""

    def __init__(
        self,
        config: RolloutConfig,
        new_conversation: Callable[[], Conversation],
        pool: EnvironmentPool,
        make_environment: Callable[[Task], Environment],
        make_room: Callable[[Seat, int], Seat],
        *,
        num_lanes: int,
    ) -> None:
        """`make_room(seat, tokens)` gives a seat whose places hold so many tokens an episode."""
        self._config, self._new_conversation, self._pool = config, new_conversation, pool
        self._make_environment, self._make_room = make_environment, make_room
        self._num_lanes = num_lanes

    def collect(self, seat: Seat, tasks: Sequence[Task], *, sampling: Sampling) -> Rollout:
        """Plays every task to its end; row i of the experience is task i's.

        An environment that raises, hangs or answers garbage ends its own episode with a stop
        reason.
        """
        config = self._config
        scheduler = LaneScheduler(
            range(len(tasks)),
            num_rows=config.episodes_per_step,
            num_slots=config.num_slots,
            num_lanes=self._num_lanes,
        )
        slots: list[_Live | None] = [None] * config.num_slots
        ended: list[int] = []
        finished: dict[int, Trajectory] = {}
        stats = RolloutStats()
        while True:
            self._answer(slots, ended, finished)
            self._refill(slots, scheduler, tasks, finished)
            live = [episode for episode in slots if episode is not None]
            if not live:
                break
            longest = max(episode.length for episode in live)
            if longest + config.burst > seat.places:
                seat = self._make_room(seat, longest + config.burst)
            orders = self._orders(slots, stats, sampling, seat.policy.version)
            state, report = seat.engine.play(seat.policy.params, seat.state, orders)
            seat = dataclasses.replace(seat, state=state)
            ended = self._listen(slots, report, seat.policy.version, stats)
            stats.rounds += 1
        trajectories = [finished[row] for row in range(len(tasks))]
        return Rollout(trajectories=trajectories, seat=seat, stats=stats)

    def _answer(
        self, slots: list[_Live | None], ended: list[int], finished: dict[int, Trajectory]
    ) -> None:
        """Steps the environments of the slots whose turn ended."""
        calls, spoken = [], []
        for slot in ended:
            episode = slots[slot]
            assert episode is not None
            text, whole = episode.conversation.reply(episode.reply)
            episode.close_turn(text)
            if not whole:
                episode.rewards.append(self._config.unfinished_reward)
                detail = f"no end of turn within {self._config.max_turn_tokens} tokens"
                finished[episode.row] = episode.finish(TURN_TOO_LONG, detail)
                slots[slot] = None
                continue
            assert episode.environment is not None
            calls.append(lambda e=episode.environment, t=text: check_step(e.step(t)))
            spoken.append(slot)
        for slot, result in zip(spoken, self._pool.run(calls), strict=True):
            episode = slots[slot]
            assert episode is not None
            over = self._take(episode, result)
            if over is not None:
                finished[episode.row] = over
                slots[slot] = None

    def _take(self, episode: _Live, result: StepResult | Failure) -> Trajectory | None:
        """The environment's answer; the trajectory if the episode is over."""
        if isinstance(result, Failure):
            return episode.finish(result.stop_reason, result.detail)
        episode.rewards.append(float(result.reward))
        if result.done:
            return episode.finish(result.stop_reason, result.detail)
        said = result.messages or result.text
        try:
            heard = episode.conversation.answer(said)
        except ValueError as error:
            return episode.finish(UNENCODABLE, str(error))
        episode.hear(said, heard)
        return None

    def _refill(
        self,
        slots: list[_Live | None],
        scheduler: LaneScheduler,
        tasks: Sequence[Task],
        finished: dict[int, Trajectory],
    ) -> None:
        """Gives every free slot a waiting episode, until the slots are full or nobody waits."""
        while True:
            taken: list[tuple[int, int]] = []
            for slot, episode in enumerate(slots):
                if episode is None and (row := scheduler.next_row(slot)) is not None:
                    taken.append((slot, row))
            if not taken:
                return
            calls = [lambda task=tasks[row]: self._open(task) for _, row in taken]
            for (slot, row), opened in zip(taken, self._pool.run(calls), strict=True):
                slots[slot] = self._seated(tasks[row], row, opened, finished)

    def _open(self, task: Task) -> tuple[Environment, Start]:
        environment = self._make_environment(task)
        return environment, check_start(environment.start())

    def _seated(
        self,
        task: Task,
        row: int,
        opened: tuple[Environment, Start] | Failure,
        finished: dict[int, Trajectory],
    ) -> _Live | None:
        """The episode in its slot; None, and a trajectory of no turns, if it could not begin."""
        episode = _Live(task=task, row=row, conversation=self._new_conversation())
        if isinstance(opened, Failure):
            finished[row] = episode.finish(opened.stop_reason, opened.detail)
            return None
        episode.environment, start = opened
        episode.role = start.role
        said = start.messages or start.text
        try:
            episode.hear(said, episode.conversation.open(said, start.tools))
        except ValueError as error:
            finished[row] = episode.finish(UNENCODABLE, str(error))
            return None
        return episode

    def _orders(
        self, slots: list[_Live | None], stats: RolloutStats, sampling: Sampling, version: int
    ) -> np.ndarray:
        """The next chunk of every slot's queue, taken off the queue."""
        num_slots, chunk_size = len(slots), self._config.chunk_size
        columns: dict[str, Any] = {
            name: np.zeros(num_slots, np.int32)
            for name in ("count", "restart", "fork", "speak", "seed")
        }
        columns["row"] = np.full(num_slots, NO_ROW, np.int32)
        chunk = np.zeros((num_slots, chunk_size), np.int32)
        for slot, episode in enumerate(slots):
            if episode is None or not episode.queue:
                continue
            part, episode.queue = episode.queue[:chunk_size], episode.queue[chunk_size:]
            chunk[slot, : len(part)] = part
            columns["count"][slot] = len(part)
            columns["restart"][slot] = episode.fresh
            columns["fork"][slot] = episode.forks
            columns["speak"][slot] = not episode.queue
            columns["seed"][slot] = episode.task.episode
            columns["row"][slot] = episode.row
            stats.prefill_tokens += len(part) - episode.heads_pending
            episode.fresh = episode.heads_pending = episode.forks = False
        return pack_orders(
            chunk=chunk,
            sampling=sampling_rows(sampling, num_slots),
            version=version,
            **columns,
        )

    def _listen(
        self, slots: list[_Live | None], report: Report, version: int, stats: RolloutStats
    ) -> list[int]:
        """Takes down what was sampled. Returns the slots whose turn is over."""
        ended = []
        in_flight = 0
        for slot, episode in enumerate(slots):
            if episode is None:
                continue
            count = int(report.count[slot])
            if count:
                episode.reply += report.tokens[slot, :count].tolist()
                episode.logprobs += report.logprobs[slot, :count].tolist()
                episode.versions += [version] * count
                episode.length += count
                stats.rollout_tokens += count
                if not report.active[slot]:
                    ended.append(slot)
            in_flight += episode.length - episode.origin - len(episode.queue)
            stats.context_tokens_max = max(stats.context_tokens_max, episode.length)
        stats.tokens_in_flight_max = max(stats.tokens_in_flight_max, in_flight)
        return ended
