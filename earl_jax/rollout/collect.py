# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plays episodes on an engine: environments on the host, everything else on the devices.

The collector goes round by round: it refills free slots, takes the answers of environments, plays a
round (rounds.py), and gives the turns that ended to their environments. An episode whose
environment is still at work takes no part in a round; the others go on. An episode's ids are only
ever appended to; nothing is prefilled twice.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from earl_jax.engine.config import EngineConfig, Sampling
from earl_jax.engine.round_inputs import NO_LIMIT
from earl_jax.engine.rows import Rows, make_rows
from earl_jax.engine.session import Session
from earl_jax.envs.conversation import Conversation
from earl_jax.envs.environment import Environment, Start
from earl_jax.envs.pool import Calls, EnvironmentPool, Failure
from earl_jax.rollout.answers import Answer, begin, go_on
from earl_jax.rollout.block_manager import BlockManager, Grow
from earl_jax.rollout.config import CacheRules, RolloutConfig
from earl_jax.rollout.episode import LiveEpisode, Task
from earl_jax.rollout.rounds import Rounds
from earl_jax.rollout.scheduler import SlotScheduler
from earl_jax.rollout.spare_rows import SpareRows
from earl_jax.rollout.stats import RolloutStats
from earl_jax.trajectory import Experience, Trajectory

# thin_out(session, live, longest): the session in which the last `live` episodes go on, the longest
# of which has so many tokens.
ThinOut = Callable[[Session, int, int], Session]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Results of a rollout: host facts in the order of the tasks, the session with the rows."""

    trajectories: list[Trajectory]
    session: Session
    stats: RolloutStats
    rows: Rows

    @property
    def experience(self) -> Experience:
        """The device rows; row i is the episode of task i. A copy where there are spare rows."""
        session = self.session
        return session.engine.row_copies.in_order(session.state.experience, self.rows)


class Collector:
    """Plays the tasks of one rollout. Single use; host-side state only."""

    def __init__(
        self,
        config: RolloutConfig,
        new_conversation: Callable[[], Conversation],
        pool: EnvironmentPool,
        make_environment: Callable[[Task], Environment],
        grow: Grow,
        *,
        num_devices: int,
        max_context: int = NO_LIMIT,
        thin_out: ThinOut | None = None,
        cache_rules: CacheRules | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares a rollout; `collect` plays it.

        Args:
            config: of the rollout.
            new_conversation: makes the conversation of an episode.
            pool: runs the environments.
            make_environment: makes the environment of a task.
            grow: called where the session has too few tokens or pages for the next round.
            num_devices: for which rows of experience are cut, on all meshes alike (`make_rows`).
            max_context: tokens that the model reads at most; a longer episode is cut there.
            thin_out: called where most slots are empty for good: when a quarter is busy, and each
                time that half as many are as when it was called before.
            cache_rules: of the reuse of KV pages; None: the defaults.
            look: called before each round, and every second while environments are waited for; what
                it raises ends the rollout.
        """
        self._config, self._cache_rules = config, cache_rules or CacheRules()
        self._new_conversation = new_conversation
        self._make_environment, self._grow = make_environment, grow
        self._num_devices, self._max_context = num_devices, max_context
        self._thin_out, self._thin_at = thin_out, config.num_slots // 4
        # By row, not by slot: slots are used again.
        self._look = look
        self._calls: Calls[int, Answer] = pool.calls(look)
        self._slots: list[LiveEpisode | None] = [None] * config.num_slots
        self._finished: dict[int, Trajectory] = {}
        self._stats = RolloutStats()

    def collect(self, session: Session, tasks: Sequence[Task], *, sampling: Sampling) -> Rollout:
        """Plays every task to its end; row i of the experience is task i's.

        An environment that raises, hangs or answers garbage ends its own episode with a stop
        reason.

        Raises:
            ValueError: a task with impossible settings.
        """
        config = self._config
        self._engine_config: EngineConfig = session.engine.config
        for task in tasks:
            task.validate()
        rows = make_rows(
            num_rows=config.episodes_per_step,
            num_slots=config.num_slots,
            num_devices=self._num_devices,
            spare=session.engine.config.num_rows > config.episodes_per_step,
        )
        groups = [task.group for task in tasks]
        scheduler = SlotScheduler(groups, rows=rows, num_slots=config.num_slots)
        self._spare_rows = SpareRows(rows, config.num_slots)
        self._blocks = BlockManager(config, self._cache_rules, session, self._slots, self._grow)
        rounds = Rounds(self._slots, self._blocks, self._spare_rows, sampling, self._stats)
        while True:
            self._look()
            self._refill(scheduler, tasks)
            self._take_answers(scheduler, tasks)
            # Tokens behind the last stop string are discarded in a round of their own.
            if not any(self._slots) and not rounds.has_discards:
                break
            session = self._blocks.fit(self._move_the_last(scheduler, session))
            session, ended = rounds.play(session)
            self._send_turns(ended)
        session = self._spare_rows.settle(session, at_last=True)
        self._stats.borrowed_slots = self._spare_rows.num_borrowed
        self._blocks.count(self._stats)
        session = dataclasses.replace(session, kept=self._blocks.keep(session.policy.version))
        trajectories = [self._finished[row] for row in range(len(tasks))]
        return Rollout(trajectories=trajectories, session=session, stats=self._stats, rows=rows)

    def _move_the_last(self, scheduler: SlotScheduler, session: Session) -> Session:
        """Calls `thin_out` for the last episodes, if there are so few now."""
        live = [episode for episode in self._slots if episode is not None]
        if self._thin_out is None or scheduler.num_waiting or len(live) > self._thin_at:
            return session
        self._thin_at = len(live) // 2
        longest = max((episode.length for episode in live), default=0)
        return self._thin_out(session, len(live), longest) if live else session

    def _end(self, slot: int, stop_reason: str, detail: str = "") -> None:
        """Ends the episode in this slot, and frees the slot."""
        episode = self._slots[slot]
        assert episode is not None
        trajectory = episode.finish(stop_reason, detail)
        self._finished[episode.row] = trajectory
        self._spare_rows.end(slot, episode.row, episode.buffer_row, trajectory.num_tokens)
        self._slots[slot] = None
        self._blocks.end(slot)

    def _refill(self, scheduler: SlotScheduler, tasks: Sequence[Task]) -> bool:
        """Gives free slots waiting episodes, whose environments begin. False if none came."""
        free = [slot for slot, episode in enumerate(self._slots) if episode is None]
        opened = {}
        for slot, row in scheduler.assign(free, self._blocks.crowded).items():
            task = tasks[row]
            episode = self._slots[slot] = LiveEpisode(
                task=task,
                row=row,
                buffer_row=self._spare_rows.begin(slot, row),
                conversation=self._new_conversation(),
                limits=task.limits or self._config.limits,
                stops=task.stops or self._config.stops,
                max_context=self._max_context,
                scored=self._engine_config.rules.model_logprobs or task.model_logprobs,
            )
            opened[row] = functools.partial(
                begin, self._make_environment, episode, self._engine_config
            )
        self._calls.submit(opened)
        return bool(opened)

    def _send_turns(self, ended: Sequence[int]) -> None:
        """Gives the turns of these slots to their environments."""
        steps = {}
        for slot in ended:
            episode = self._slots[slot]
            assert episode is not None
            text, whole = episode.end_turn()
            if whole:
                steps[episode.row] = functools.partial(go_on, episode, text, self._engine_config)
                episode.waits = True
                continue
            self._end(slot, *episode.cut(self._config.unfinished_reward))
        self._calls.submit(steps)

    def _take_answers(self, scheduler: SlotScheduler, tasks: Sequence[Task]) -> None:
        """Takes environments' answers within the patience; waits on while no slot has work."""
        start_s = time.perf_counter()
        waits_on = True
        while waits_on:
            left_s = max(0.0, self._config.patience_s - (time.perf_counter() - start_s))
            answers = self._calls.take(left_s, at_least_one=self._is_idle())
            for slot, episode in enumerate(self._slots):
                if episode is not None and episode.row in answers:
                    self._take_answer(slot, episode, answers[episode.row])
            refilled = self._refill(scheduler, tasks)
            # Episodes that ended may have left pages, and only preempted ones.
            self._blocks.resume()
            waits_on = refilled or (any(self._slots) and self._is_idle())
        self._stats.env_wait_s += time.perf_counter() - start_s

    def _is_idle(self) -> bool:
        """Returns whether a round would have nothing to do."""
        return not any(episode is not None and episode.has_work for episode in self._slots)

    def _take_answer(self, slot: int, episode: LiveEpisode, answer: Answer | Failure) -> None:
        """Takes the environment's start or step: its message is appended."""
        if isinstance(answer, Failure):
            return self._end(slot, answer.stop_reason, answer.detail)
        result = answer.result
        episode.environment = answer.environment
        episode.metrics |= result.metrics
        if isinstance(result, Start):
            episode.role = result.role
        else:
            episode.rewards.append(float(result.reward))
            if result.done:
                return self._end(slot, result.stop_reason, result.detail)
        if answer.failure is not None:
            return self._end(slot, answer.failure.stop_reason, answer.failure.detail)
        if answer.heard is None or not episode.fits(answer.heard):
            return self._end(slot, *episode.cut(self._config.unfinished_reward))
        episode.choices, episode.allowed = answer.choices, answer.allowed
        episode.append_message(answer.content, answer.heard)
