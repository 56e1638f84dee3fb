# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plays episodes on the engine: environments on the host, everything else on the devices.

Round by round: refill the slots that are free, take what environments said, send each slot its next
chunk, decode, let environments answer the turns that ended. An episode whose environment is still
at work takes no part in a round; the others go on. An episode's ids are only ever appended to;
nothing is prefilled twice.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from earl_jax.envs.conversation import Conversation
from earl_jax.envs.environment import (
    TURN_TOO_LONG,
    UNENCODABLE,
    Environment,
    Start,
    StepResult,
    check_start,
    check_step,
)
from earl_jax.envs.pool import Calls, EnvironmentPool, Failure
from earl_jax.models.parameters import Params
from earl_jax.rollout.config import RolloutConfig, Sampling
from earl_jax.rollout.engine import PolicyEngine
from earl_jax.rollout.episode import LiveEpisode, Task
from earl_jax.rollout.prefixes import PrefixIndex
from earl_jax.rollout.sampling import sampling_rows
from earl_jax.rollout.scheduler import LaneScheduler
from earl_jax.rollout.slots import NO_ROW, DecodeState, Report, pack_orders
from earl_jax.trajectory import Experience, Trajectory

# What an environment says when its call comes back: how it begins, or what a step led to.
Answer = tuple[Environment, Start] | StepResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights on a rollout layout, and their version: the number of RL steps that made them."""

    params: Params
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rollout runs: an engine, the policy on its layout, and the state of its slots."""

    engine: PolicyEngine
    policy: Policy
    state: DecodeState
    places: int


@dataclasses.dataclass(kw_only=True)
class RolloutStats:
    """Counts of one rollout. Tokens in flight are those of all live episodes at one moment.

    `shared_tokens` of prompts were taken over from other episodes instead of prefilled.
    `env_wait_s`: seconds in which no round ran because environments were waited for.
    """

    rounds: int = 0
    rollout_tokens: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    tokens_in_flight_max: int = 0
    context_tokens_max: int = 0
    env_wait_s: float = 0.0


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
        slots: list[LiveEpisode | None] = [None] * config.num_slots
        prefixes = PrefixIndex(
            num_slots=config.num_slots, num_lanes=self._num_lanes, chunk_size=config.chunk_size
        )
        calls: Calls[int, Answer] = self._pool.calls()
        finished: dict[int, Trajectory] = {}
        stats = RolloutStats()
        while True:
            self._refill(slots, scheduler, tasks, calls)
            self._hear(slots, scheduler, tasks, calls, finished, stats)
            live = [episode for episode in slots if episode is not None]
            if not live:
                break
            longest = max(episode.length for episode in live)
            if longest + config.burst > seat.places:
                seat = self._make_room(seat, longest + config.burst)
            orders = self._orders(slots, prefixes, stats, sampling, seat.policy.version)
            state, report = seat.engine.play(seat.policy.params, seat.state, orders)
            seat = dataclasses.replace(seat, state=state)
            ended = self._listen(slots, report, seat.policy.version, stats)
            self._answer(slots, ended, calls, finished)
            stats.rounds += 1
        trajectories = [finished[row] for row in range(len(tasks))]
        return Rollout(trajectories=trajectories, seat=seat, stats=stats)

    def _refill(
        self,
        slots: list[LiveEpisode | None],
        scheduler: LaneScheduler,
        tasks: Sequence[Task],
        calls: "Calls[int, Answer]",
    ) -> bool:
        """Gives every free slot a waiting episode, whose environment begins. False if none came."""
        opened = {}
        for slot, episode in enumerate(slots):
            if episode is None and (row := scheduler.next_row(slot)) is not None:
                slots[slot] = LiveEpisode(
                    task=tasks[row], row=row, conversation=self._new_conversation()
                )
                opened[slot] = lambda task=tasks[row]: self._open(task)
        calls.submit(opened)
        return bool(opened)

    def _open(self, task: Task) -> tuple[Environment, Start]:
        environment = self._make_environment(task)
        return environment, check_start(environment.start())

    def _answer(
        self,
        slots: list[LiveEpisode | None],
        ended: Sequence[int],
        calls: "Calls[int, Answer]",
        finished: dict[int, Trajectory],
    ) -> None:
        """Lets the environments of the slots whose turn ended think about it."""
        steps = {}
        for slot in ended:
            episode = slots[slot]
            assert episode is not None
            text, whole = episode.conversation.reply(episode.reply)
            episode.close_turn(text)
            if whole:
                assert episode.environment is not None
                steps[slot] = lambda e=episode.environment, t=text: check_step(e.step(t))
                episode.waits = True
                continue
            episode.rewards.append(self._config.unfinished_reward)
            detail = f"no end of turn within {self._config.max_turn_tokens} tokens"
            finished[episode.row] = episode.finish(TURN_TOO_LONG, detail)
            slots[slot] = None
        calls.submit(steps)

    def _hear(
        self,
        slots: list[LiveEpisode | None],
        scheduler: LaneScheduler,
        tasks: Sequence[Task],
        calls: "Calls[int, Answer]",
        finished: dict[int, Trajectory],
        stats: RolloutStats,
    ) -> None:
        """Takes what environments say within the patience; waits on while no slot has work."""
        start_s = time.perf_counter()
        idle = True
        while idle:
            left_s = max(0.0, self._config.patience_s - (time.perf_counter() - start_s))
            for slot, said in calls.take(left_s, at_least_one=_is_idle(slots)).items():
                episode = slots[slot]
                assert episode is not None
                over = self._take(episode, said)
                if over is not None:
                    finished[episode.row] = over
                    slots[slot] = None
            refilled = self._refill(slots, scheduler, tasks, calls)
            idle = refilled or (any(slots) and _is_idle(slots))
        stats.env_wait_s += time.perf_counter() - start_s

    def _take(self, episode: LiveEpisode, said: "Answer | Failure") -> Trajectory | None:
        """The environment's start or step; the trajectory if the episode is over."""
        if isinstance(said, Failure):
            return episode.finish(said.stop_reason, said.detail)
        episode.waits = False
        conversation = episode.conversation
        if isinstance(said, StepResult):
            episode.rewards.append(float(said.reward))
            if said.done:
                return episode.finish(said.stop_reason, said.detail)
            message = said.messages or said.text
            render = conversation.answer
        else:
            episode.environment, start = said
            episode.role = start.role
            message = start.messages or start.text
            render = functools.partial(conversation.open, tools=start.tools)
        try:
            episode.hear(message, render(message))
        except ValueError as error:
            return episode.finish(UNENCODABLE, str(error))
        return None

    def _orders(
        self,
        slots: list[LiveEpisode | None],
        prefixes: PrefixIndex,
        stats: RolloutStats,
        sampling: Sampling,
        version: int,
    ) -> np.ndarray:
        """The next chunk of every slot's queue, taken off the queue."""
        num_slots, chunk_size = len(slots), self._config.chunk_size
        names = ("count", "restart", "fork", "speak", "seed", "source", "shared")
        columns: dict[str, Any] = {name: np.zeros(num_slots, np.int32) for name in names}
        columns["row"] = np.full(num_slots, NO_ROW, np.int32)
        chunk = np.zeros((num_slots, chunk_size), np.int32)
        for slot, episode in enumerate(slots):
            if episode is None or not episode.queue:
                continue
            if self._config.share_prefixes and (episode.fresh or episode.forks):
                shared = prefixes.find(slot, episode.queue)
                if shared is None:
                    continue
                prefixes.begin(slot, episode.queue, shared)
                episode.queue = episode.queue[shared.length :]
                columns["source"][slot] = shared.source - slot
                columns["shared"][slot] = shared.length
                stats.shared_tokens += shared.length
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
        # Only now: no slot takes over what is appended in the same round.
        for slot, number in enumerate(columns["count"]):
            prefixes.append(slot, number)
        return pack_orders(
            chunk=chunk,
            sampling=sampling_rows(sampling, num_slots),
            version=version,
            **columns,
        )

    def _listen(
        self, slots: list[LiveEpisode | None], report: Report, version: int, stats: RolloutStats
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


def _is_idle(slots: Sequence[LiveEpisode | None]) -> bool:
    """Whether a round would have nothing to do."""
    return all(episode is None or episode.waits for episode in slots)
