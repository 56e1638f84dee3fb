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

from earl_jax.engine.choices import check_allowed, check_choices, no_choices, set_turn
from earl_jax.engine.config import MAX_STOP_IDS, RolloutConfig, Sampling
from earl_jax.engine.drafting import Drafting
from earl_jax.engine.round_inputs import NO_ID, NO_LIMIT, NO_PAGE, NO_ROW, Report, pack_inputs
from earl_jax.engine.sampling import sampling_rows, set_row
from earl_jax.engine.scheduler import Rows, SlotScheduler, make_rows
from earl_jax.engine.session import Session
from earl_jax.envs.conversation import Conversation
from earl_jax.envs.environment import (
    ABORTED,
    UNENCODABLE,
    Environment,
    Start,
    StepResult,
    check_start,
    check_step,
)
from earl_jax.envs.pool import Calls, EnvironmentPool, Failure
from earl_jax.rollout.block_manager import BlockManager, MakeRoom
from earl_jax.rollout.control import Requests, RolloutControl
from earl_jax.rollout.episode import LiveEpisode, Task
from earl_jax.rollout.guests import Guests
from earl_jax.rollout.stats import RolloutStats
from earl_jax.trajectory import Experience, Trajectory

# thin_out(session, live, longest): where the last `live` episodes go on, the longest of which has
# so many tokens.
ThinOut = Callable[[Session, int, int], Session]
# What an environment says when its call comes back: how it begins, or what a step led to.
Answer = tuple[Environment, Start] | StepResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Results of a rollout: host facts in the order of the tasks, the session with the rows."""

    trajectories: list[Trajectory]
    session: Session
    stats: RolloutStats
    rows: Rows

    @property
    def experience(self) -> Experience:
        """The device rows; row i is the episode of task i. Where there are guests, a copy."""
        session = self.session
        return session.engine.row_copies.at_home(session.state.experience, self.rows)


class Collector:
    """Plays the tasks of one rollout. Single use; host-side state only."""

    def __init__(
        self,
        config: RolloutConfig,
        new_conversation: Callable[[], Conversation],
        pool: EnvironmentPool,
        make_environment: Callable[[Task], Environment],
        make_room: MakeRoom,
        *,
        num_devices: int,
        max_context: int = NO_LIMIT,
        drafting: Drafting | None = None,
        thin_out: ThinOut | None = None,
    ) -> None:
        """`make_room` is asked where the session has too little room for the next round.

        `thin_out` is asked where most slots are empty for good: when a quarter is busy, and each
        time that half as many are as when it was asked before.
        Rows of experience are cut for `num_devices`, on all meshes alike (`make_rows`).
        The model reads at most `max_context` tokens: an episode that comes to more is cut there.
        `drafting` says which rounds guess tokens, and learns from them; None: as `config` says.
        """
        self._config, self._new_conversation = config, new_conversation
        self._make_environment, self._make_room = make_environment, make_room
        self._num_devices, self._max_context = num_devices, max_context
        self._thin_out, self._thin_at = thin_out, config.num_slots // 4
        self._drafting = drafting or Drafting(config.speculation.mode)
        # By row, not by slot: an answer may come when its episode was aborted and its slot is
        # another's.
        self._calls: Calls[int, Answer] = pool.calls()
        self._slots: list[LiveEpisode | None] = [None] * config.num_slots
        self._stopped: set[int] = set()
        # Slots whose turn a stop string ended, and how many tokens they sampled behind it.
        self._given_up: dict[int, int] = {}
        self._choice_branches, self._vocab_size, self._scores_all = 0, 0, False
        self._aborted: dict[int, str] = {}
        self._finished: dict[int, Trajectory] = {}
        self._stats = RolloutStats()
        # Programs that ran, and the engine that ran first.
        self._seen: set[Any] = set()
        self._first_engine: Any = None

    def collect(
        self,
        session: Session,
        tasks: Sequence[Task],
        *,
        sampling: Sampling,
        control: RolloutControl | None = None,
    ) -> Rollout:
        """Plays every task to its end; row i of the experience is task i's.

        An environment that raises, hangs or answers garbage ends its own episode with a stop
        reason. What `control` asks for is done between two rounds.

        Raises:
            ValueError: a task asks for what cannot be.
        """
        config = self._config
        rules = session.engine.config.rules
        self._choice_branches, self._scores_all = rules.choice_branches, rules.model_logprobs
        self._vocab_size = session.engine.config.vocab_size
        for task in tasks:
            task.validate()
        rows = make_rows(
            num_rows=config.episodes_per_step,
            num_slots=config.num_slots,
            num_devices=self._num_devices,
            guests=session.engine.config.num_rows > config.episodes_per_step,
        )
        groups = [task.group for task in tasks]
        scheduler = SlotScheduler(groups, rows=rows, num_slots=config.num_slots)
        self._guests = Guests(rows, config.num_slots)
        self._room = BlockManager(config, session, self._slots, self._make_room)
        while True:
            if control is not None:
                session = self._obey(control.take(), session)
            self._refill(scheduler, tasks)
            self._hear(scheduler, tasks)
            # What was sampled behind a last stop is given up in a round of its own.
            if not any(self._slots) and not self._given_up:
                break
            session = self._room.fit(self._move_the_last(scheduler, session))
            inputs = self._inputs(sampling, session.policy.version)
            session = self._room.give(self._guests.settle(session))
            session, report = self._play(session, inputs)
            self._answer(self._listen(report, session.policy.version))
            self._stats.rounds += 1
        session = self._guests.settle(session, at_last=True)
        self._stats.guest_episodes = self._guests.count
        self._stats.copied_tokens = self._room.copied_tokens
        self._stats.preempted_episodes = self._room.num_preempted
        self._stats.recomputed_tokens += self._room.recomputed_tokens
        self._stats.preempted_host_bytes = self._room.host_bytes
        self._stats.preemption = self._room.preemption
        session = dataclasses.replace(session, kept=self._room.keep(session.policy.version))
        trajectories = [self._finished[row] for row in range(len(tasks))]
        return Rollout(trajectories=trajectories, session=session, stats=self._stats, rows=rows)

    def _move_the_last(self, scheduler: SlotScheduler, session: Session) -> Session:
        """Asks whether the last episodes go on elsewhere, if there are so few now."""
        live = [episode for episode in self._slots if episode is not None]
        if self._thin_out is None or scheduler.num_waiting or len(live) > self._thin_at:
            return session
        self._thin_at = len(live) // 2
        longest = max((episode.length for episode in live), default=0)
        return self._thin_out(session, len(live), longest) if live else session

    def _play(self, session: Session, inputs: np.ndarray) -> tuple[Session, Report]:
        """One round, timed."""
        scored = any(episode is not None and episode.scored for episode in self._slots)
        program = (str(session.engine.layout), session.max_tokens, session.pool, scored)
        drafts = self._drafting.choose(program)
        start_s = time.perf_counter()
        state, report = session.engine.play(
            session.policy.params, session.state, inputs, drafts=drafts, model_logprobs=scored
        )
        seconds = time.perf_counter() - start_s
        self._drafting.note(program, drafts, tokens=int(report.count.sum()), seconds=seconds)
        engine = session.engine
        # A speed is that of the plan that the rollout began with.
        self._first_engine = self._first_engine or engine
        if program in self._seen and engine is self._first_engine:
            self._stats.count_round(report, seconds)
        self._seen.add(program)
        self._stats.count_steps(report, self._begun, engine.layout.num_row_shards, engine.step_rows)
        if report.passes is not None and report.drafted is not None:
            self._stats.drafting_rounds += drafts
            self._stats.drafted_tokens += int(report.drafted.sum())
            self._stats.accepted_tokens += int((report.count - report.passes).sum())
        return dataclasses.replace(session, state=state), report

    def _end(self, slot: int, stop_reason: str, detail: str = "") -> None:
        """The episode in this slot is over; the slot is free."""
        episode = self._slots[slot]
        assert episode is not None
        trajectory = episode.finish(stop_reason, detail)
        self._finished[episode.row] = trajectory
        self._guests.end(slot, episode.row, episode.place, trajectory.num_tokens)
        self._slots[slot] = None
        self._room.end(slot)

    def _obey(self, requests: Requests, session: Session) -> Session:
        """Ends what is to be aborted, and changes weights."""
        self._aborted |= requests.aborted
        for slot, episode in enumerate(self._slots):
            if episode is not None and episode.task.episode in self._aborted:
                episode.abort()
                self._end(slot, ABORTED, self._aborted[episode.task.episode])
                self._stopped.add(slot)
        if requests.swap is None:
            return session
        self._room.new_weights(recompute=requests.swap.cache == "recompute")
        if requests.swap.cache == "recompute":
            for episode in filter(None, self._slots):
                self._stats.recomputed_tokens += episode.rewind()
        return dataclasses.replace(session, policy=requests.swap.publish(session.engine))

    def _refill(self, scheduler: SlotScheduler, tasks: Sequence[Task]) -> bool:
        """Gives free slots waiting episodes, whose environments begin. False if none came."""
        opened = {}
        while taken := scheduler.assign(self._free_slots(), self._room.crowded):
            for slot, row in taken.items():
                task = tasks[row]
                self._slots[slot] = LiveEpisode(
                    task=task,
                    row=row,
                    place=self._guests.begin(slot, row),
                    conversation=self._new_conversation(),
                    limits=task.limits or self._config.limits,
                    stops=task.stops or self._config.stops,
                    max_context=self._max_context,
                    scored=self._scores_all or task.model_logprobs,
                )
                if task.episode in self._aborted:
                    self._end(slot, ABORTED, self._aborted[task.episode])
                else:
                    opened[row] = lambda task=task: self._open(task)
        self._calls.submit(opened)
        return bool(opened)

    def _free_slots(self) -> list[int]:
        return [slot for slot, episode in enumerate(self._slots) if episode is None]

    def _open(self, task: Task) -> tuple[Environment, Start]:
        environment = self._make_environment(task)
        return environment, check_start(environment.start())

    def _answer(self, ended: Sequence[int]) -> None:
        """Lets the environments of the slots whose turn ended think about it."""
        steps = {}
        for slot in ended:
            episode = self._slots[slot]
            assert episode is not None
            text, whole = episode.end_turn()
            if whole:
                assert episode.environment is not None
                steps[episode.row] = lambda e=episode.environment, t=text: check_step(e.step(t))
                episode.waits = True
                continue
            self._end(slot, *episode.cut(self._config.unfinished_reward))
        self._calls.submit(steps)

    def _hear(self, scheduler: SlotScheduler, tasks: Sequence[Task]) -> None:
        """Takes what environments say within the patience; waits on while no slot has work."""
        start_s = time.perf_counter()
        waits_on = True
        while waits_on:
            left_s = max(0.0, self._config.patience_s - (time.perf_counter() - start_s))
            answers = self._calls.take(left_s, at_least_one=self._is_idle())
            for slot, episode in enumerate(self._slots):
                if episode is not None and episode.row in answers:
                    self._take(slot, episode, answers[episode.row])
            refilled = self._refill(scheduler, tasks)
            # Those that ended may have left pages, and none but preempted ones.
            self._room.resume()
            waits_on = refilled or (any(self._slots) and self._is_idle())
        self._stats.env_wait_s += time.perf_counter() - start_s

    def _is_idle(self) -> bool:
        """Whether a round would have nothing to do."""
        return not any(episode is not None and episode.has_work for episode in self._slots)

    def _take(self, slot: int, episode: LiveEpisode, sampled: "Answer | Failure") -> None:
        """The environment's start or step."""
        if isinstance(sampled, Failure):
            return self._end(slot, sampled.stop_reason, sampled.detail)
        conversation = episode.conversation
        asks = sampled if isinstance(sampled, StepResult) else sampled[1]
        episode.metrics |= asks.metrics
        if isinstance(sampled, StepResult):
            episode.rewards.append(float(sampled.reward))
            if sampled.done:
                return self._end(slot, sampled.stop_reason, sampled.detail)
            message = sampled.messages or sampled.text
            render = conversation.answer
        else:
            episode.environment, start = sampled
            episode.role = start.role
            message = start.messages or start.text
            render = functools.partial(conversation.open, tools=start.tools)
        try:
            heard = render(message)
            episode.choices = conversation.choices(asks.choices)
            check_choices(episode.choices, self._choice_branches)
            episode.allowed = conversation.allowed(asks.allowed_token_ids)
            check_allowed(episode.allowed, self._choice_branches, self._vocab_size)
        except ValueError as error:
            return self._end(slot, UNENCODABLE, str(error))
        if not episode.leaves_room(heard):
            return self._end(slot, *episode.cut(self._config.unfinished_reward))
        episode.hear(message, heard)

    def _inputs(self, sampling: Sampling, version: int) -> np.ndarray:
        """The next chunk of every slot's queue, taken off the queue."""
        num_slots, chunk_size = len(self._slots), self._config.chunk_size
        columns = self._columns()
        chunk = np.zeros((num_slots, chunk_size), np.int32)
        drawn = sampling_rows(sampling, num_slots)
        for slot, episode in enumerate(self._slots):
            if episode is None or not episode.has_work:
                continue
            if not episode.queue:
                self._room.hold(slot)
                continue
            flags = {"restart": episode.fresh, "fork": episode.forks, "rewind": episode.rewinds}
            if episode.begins:
                begins = self._room.begin(slot)
                if begins is None:
                    # Until its sample is read again it must not go on over what was in its cache.
                    columns["rewind"][slot] = episode.rewinds
                    continue
                columns["source"][slot] = begins.source - slot
                columns["shared"][slot], columns["copied"][slot] = begins.shared, begins.copied
                columns["written"][slot] = begins.written
                _, news = episode.take(begins.shared)
                self._stats.shared_tokens += news
            columns["seed"][slot], columns["row"][slot] = episode.task.token_seed, episode.place
            columns["stop_ids"][slot, : len(episode.stops.token_ids)] = episode.stops.token_ids
            if episode.task.sampling is not None:
                set_row(drawn, slot, episode.task.sampling)
            for flag, is_set in flags.items():
                columns[flag][slot] = is_set
            part, news = episode.take(chunk_size)
            chunk[slot, : len(part)] = part
            columns["count"][slot] = len(part)
            self._room.hold(slot)
            self._stats.prefill_tokens += news
            if not episode.queue:
                columns["resume"][slot] = episode.speaking
                columns["speak"][slot] = not (episode.speaking or episode.waits)
                columns["turn_limit"][slot] = episode.turn_limit
                set_turn(columns["choices"], slot, episode.choices, episode.allowed)
        self._room.end_inputs(columns["count"])
        # Slots whose first token of the round comes from their chunk.
        self._begun = (columns["count"] > 0) & (columns["speak"] + columns["resume"] > 0)
        return pack_inputs(chunk=chunk, sampling=drawn, version=version, **columns)

    def _columns(self) -> dict[str, Any]:
        """Orders that only end what is not to go on."""
        num_slots = len(self._slots)
        names = ("count", "seed", "source", "shared", "turn_limit", "given_up")
        flags = ("restart", "fork", "rewind", "speak", "resume", "halt", "written")
        columns: dict[str, Any] = {name: np.zeros(num_slots, np.int32) for name in names + flags}
        columns["row"] = np.full(num_slots, NO_ROW, np.int32)
        columns["copied"] = np.full(num_slots, NO_PAGE, np.int32)
        branches = self._choice_branches
        columns["choices"] = no_choices(num_slots, branches) if branches else None
        columns["stop_ids"] = np.full((num_slots, MAX_STOP_IDS), NO_ID, np.int32)
        for slot in self._stopped | self._room.stopped:
            columns["rewind"][slot] = 1
        self._stopped.clear()
        self._room.stopped.clear()
        for slot, number in self._given_up.items():
            columns["halt"][slot], columns["given_up"][slot] = 1, number
            self._room.use_row(slot)
        self._given_up.clear()
        return columns

    def _listen(self, report: Report, version: int) -> list[int]:
        """Takes down what was sampled. Returns the slots whose turn is over."""
        ended = []
        in_flight = 0
        stats = self._stats
        for slot, episode in enumerate(self._slots):
            if episode is None:
                continue
            if report.count[slot]:
                given_up = episode.speak(report, slot, version)
                stats.rollout_tokens += int(report.count[slot]) - given_up
                stats.given_up_tokens += given_up
                if not episode.speaking:
                    ended.append(slot)
                    if given_up or report.active[slot]:
                        self._given_up[slot] = given_up
            in_flight += episode.length - episode.origin - len(episode.queue)
            stats.context_tokens_max = max(stats.context_tokens_max, episode.length)
        stats.tokens_in_flight_max = max(stats.tokens_in_flight_max, in_flight)
        return ended
