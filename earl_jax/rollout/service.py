# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""RolloutService: plays tasks on an engine as they come, and hands episodes out as they end.

Environments are on the host, everything else on the devices. A task may be a prompt alone, without
an environment, which is how policies are served. The service goes round by round: it
refills free slots, takes the answers of environments, plays a round (rounds.py), and gives the
turns that ended to their environments. An episode whose environment is still at work takes no part
in a round; the others go on. An episode's ids are only ever appended to; nothing is prefilled
twice, unless its pages are given up (block_manager.py) or the weights change.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import jax

from earl_jax.engine.config import NO_LIMIT, Sampling
from earl_jax.engine.engine import Policy, Session
from earl_jax.engine.rows import make_rows
from earl_jax.envs.environment import NONFINITE_LOGITS, REPLIED, Environment
from earl_jax.envs.pool import EnvironmentPool, Failure
from earl_jax.envs.round_wait import RoundWait
from earl_jax.envs.text.conversation import Completion, Conversation
from earl_jax.rollout.answers import Answer, NoCalls, begin, take_answer
from earl_jax.rollout.block_manager import BlockManager, Grow
from earl_jax.rollout.branches import Branches, leave, reply_to
from earl_jax.rollout.config import CacheRules, RolloutConfig
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.events import Events
from earl_jax.rollout.host_rows import HostRows
from earl_jax.rollout.lockstep import Lockstep
from earl_jax.rollout.open_episodes import OpenEpisode, open_episode
from earl_jax.rollout.resumption import record, replay_turn
from earl_jax.rollout.rounds import OnTokens, Rounds
from earl_jax.rollout.row_pool import Finished, RowPool
from earl_jax.rollout.scheduler import SlotScheduler
from earl_jax.rollout.stats import RolloutStats
from earl_jax.rollout.task import Task
from earl_jax.settings.errors import InputError

# shrink(session, live, longest): the session in which the last `live` episodes go on, the longest
# of which has so many tokens.
Shrink = Callable[[Session, int, int], Session]


class RolloutService:
    """An open queue of tasks over one session. For one caller; host-side state only.

    `session` is where the episodes are: its `state.experience` has the rows of finished ones.
    `rows` is the layout of these. Between two steps nothing changes but the environments: a client
    that makes none has paused the service.
    """

    def __init__(
        self,
        session: Session,
        config: RolloutConfig,
        new_conversation: Callable[[], Conversation | Completion],
        pool: EnvironmentPool | Lockstep | None,
        make_environment: Callable[[Task], Environment] | None,
        grow: Grow,
        *,
        num_devices: int,
        sampling: Sampling,
        batches: int = 1,
        max_context: int = NO_LIMIT,
        shrink: Shrink | None = None,
        cache_rules: CacheRules | None = None,
        look: Callable[[], None] = lambda: None,
        events: Events | None = None,
        on_tokens: OnTokens | None = None,
        more: Callable[[int], Sequence[Task]] = lambda num_free: (),
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ) -> None:
        """Opens the service; `submit` gives it tasks, and `step` plays them.

        Args:
            session: a fresh one, for so many slots as `config` says. It is void then.
            config: of the rollout.
            new_conversation: makes the conversation of an episode.
            pool: runs the environments; None: all tasks are prompts alone.
            make_environment: makes the environment of a task; None beside no pool.
            grow: called where the session has too few tokens or pages for the next round.
            num_devices: for which rows of experience are cut, on all meshes alike (`make_rows`).
            sampling: of tasks without one of their own.
            batches: how often `config.episodes_per_step` episodes have rows at once.
            max_context: tokens that the model reads at most; a longer episode is cut there.
            shrink: called while the service `is_draining`, as in `drain`, and most slots are empty
                for good: when a quarter is busy, and each time that half as many are as when it was
                called before.
            cache_rules: of the reuse of KV pages; None: the defaults.
            look: called before each round, and every second while environments are waited for; what
                it raises ends the service.
            events: notes what depends on time, or has it come as in the run that is replayed; None:
                it is noted nowhere.
            on_tokens: called with the tokens that an episode sampled, ticket by ticket, behind each
                round. With it, prompts hold up those who sample by a bounded time (`Rounds`).
            more: called with the number of slots that are free while no task waits for them;
                returns further tasks, () for none now.
            wait: waits for the outputs of a round.
        """
        self.session, self._config = session, config
        self._new_conversation = new_conversation
        self._make_environment, self._max_context = make_environment, max_context
        self._sampling = sampling
        self._shrink, self._shrink_at = shrink, config.num_slots // 4
        # By ticket, not by slot: slots are used again.
        self._look, self._more = look, more
        self._events = events or Events()
        calls = NoCalls() if pool is None else pool.calls(look)
        self._calls = self._events.record_calls(calls)
        self._slots: list[LiveEpisode | None] = [None] * config.num_slots
        self._num_submitted = 0
        # Set by a client whose tasks are all here: the last of them may move (`shrink`).
        self.is_draining = False
        # Set by a client between two rounds: tasks that wait begin when it is False again.
        self.holds_tasks = False
        self._tasks: dict[int, Task] = {}
        # Slots and episodes that are over, and whether the host writes the row.
        self._ended: list[tuple[int, Finished, bool]] = []
        # Rows of aborted ones, which the next round leaves.
        self._left_rows: list[int] = []
        self._stats = RolloutStats()
        self.rows = make_rows(
            num_rows=config.episodes_per_step,
            num_slots=config.num_slots,
            num_devices=num_devices,
            batches=batches,
        )
        total = session.engine.config.num_rows
        assert total == self.rows.total or self.rows.data_shards == 1, f"{total}, {self.rows}"
        self._scheduler = SlotScheduler(self.rows, config.num_slots, config.order)
        rules = cache_rules or CacheRules()
        self._blocks = BlockManager(config, rules, session, self._slots, grow)
        self._branches = Branches(self._slots, self._blocks, self._calls, config.unfinished_reward)
        self._row_pool = RowPool(self.rows, config.num_slots, self._blocks.lose_row)
        self._host_rows = HostRows(self._row_pool, self._blocks)
        self._rounds = Rounds(
            self._slots, self._blocks, self._row_pool, sampling, self._stats, on_tokens, wait
        )

    # What a client does between two rounds.

    @property
    def is_busy(self) -> bool:
        """True while a task waits or plays, or a finished episode was not handed out yet."""
        return bool(self._has_round or self._scheduler.num_waiting or self._ended)

    @property
    def num_live(self) -> int:
        """The number of episodes in slots."""
        return sum(episode is not None for episode in self._slots)

    @property
    def stats(self) -> RolloutStats:
        """The counts since the service was opened."""
        self._stats.other_shard_episodes = self._row_pool.num_of_other_shards
        self._blocks.count(self._stats)
        return self._stats

    def oldest_versions(self) -> dict[int, int]:
        """Returns the oldest version that sampled a token, by ticket, of episodes with one.

        Of those that play, or are over and have not been handed out, or that `resume`.
        """
        found: list[tuple[int, int | None]] = [
            (ticket, task.resumes.oldest_version)
            for ticket, task in self._tasks.items()
            if task.resumes is not None
        ]
        found += [(e.ticket, e.oldest_version) for e in self._episodes()]
        found += [(done.ticket, done.trajectory.oldest_version) for _, done, _ in self._ended]
        return {ticket: version for ticket, version in found if version is not None}

    def open_episodes(self) -> dict[int, OpenEpisode]:
        """Returns what episodes have sampled, by `Task.episode`, for a run that goes on.

        Those that wait with something, play, or are over and have not been handed out.
        """
        found = {task.episode: task.resumes for task in self._tasks.values()}
        found |= {e.task.episode: record(e) for e in self._episodes()}
        ended = [done.trajectory for _, done, _ in self._ended]
        found |= {each.episode: open_episode(each.turns) for each in ended}
        return {number: each for number, each in found.items() if each is not None}

    def submit(self, tasks: Sequence[Task]) -> list[int]:
        """Queues tasks. Returns their tickets, which number the tasks of this service.

        They begin in the order of config.rollout.order in each data shard, and before any task with
        a ticket that is greater by `rows.batch_size` or more.

        Raises:
            ValueError: a task with impossible settings.
        """
        for task in tasks:
            task.validate()
        tickets = list(range(self._num_submitted, self._num_submitted + len(tasks)))
        self._num_submitted += len(tasks)
        self._tasks.update(zip(tickets, tasks, strict=True))
        for ticket, task in zip(tickets, tasks, strict=True):
            self._scheduler.submit(ticket, task.group, task.kind, task.length_before)
        self.is_draining, self._shrink_at = False, self._config.num_slots // 4
        return tickets

    def step(self) -> list[Finished]:
        """Plays one round, and returns the episodes that are finished behind it.

        Each holds its row until `release`. An environment that raises, hangs or answers garbage
        ends its own episode with a stop reason. Without tasks it returns at once.

        Raises:
            RuntimeError: tasks wait, and the client holds all rows.
        """
        self._look()
        self._branches.begin(self.session.engine.config, self._end)
        self._refill()
        self._take_answers()
        self.session = self._host_rows.write(self.session)
        num_ended = len(self._ended)
        if self._has_round:
            self.session = self._blocks.fit(self._move_the_last(self.session))
            self.session, turns = self._rounds.play(self.session)
            for row in self._left_rows:
                self._row_pool.release(row)
            self._left_rows = []
            self._send_turns(turns, self._rounds.faulty)
        elif self._scheduler.num_waiting and not self._ended:
            raise RuntimeError(
                f"{self._scheduler.num_waiting} tasks wait, and all {self.rows.total} rows are "
                "held; release those that were read"
            )
        # Rows that moved for episodes that are over without a round.
        self.session = self._row_pool.settle(self.session)
        return self._hand_out(num_ended)

    def drain(self) -> Iterator[list[Finished]]:
        """Plays all tasks to their end, and `more` of them. Yields the finished ones of a round."""
        while self.is_busy or self._submit_more():
            self.is_draining = True
            yield self.step()

    def release(self, row: int) -> None:
        """Gives back the row of a finished episode; a later one writes it.

        Raises:
            ValueError: the row holds no finished episode.
        """
        if not self._row_pool.is_held(row):
            raise InputError(
                f"row {row} holds no finished episode; release Finished.row once, between two steps"
            )
        self._row_pool.release(row)

    def abort(self, tickets: Collection[int] | None = None) -> list[Task]:
        """Gives up these tasks, None: all, and returns them. Those that are over are left out.

        Slots and pages are free at once, rows behind the next round. What an environment still does
        is dropped.
        """
        chosen = sorted(self._tasks if tickets is None else self._tasks.keys() & set(tickets))
        live = {e.ticket: slot for slot, e in enumerate(self._slots) if e is not None}
        for ticket in chosen:
            if ticket not in live:
                self._scheduler.remove(ticket)
                continue
            self._scheduler.end(ticket)
            slot = live[ticket]
            self._left_rows.append(self._episode(slot).buffer_row)
            self._branches.drop(self._episode(slot))
            self._slots[slot] = None
            self._blocks.abort(slot)
        return [self._tasks.pop(ticket) for ticket in chosen]

    def move(self, session: Session) -> None:
        """Lets live and later episodes go on in a session that they have moved to (`relocate`).

        Between two rounds.
        """
        self.session = session
        self._blocks.adopt(session)
        self._rounds.change_engine()

    def release_weights(self) -> None:
        """Lets the weights go, between two rounds: `update_weights` must come before the next.

        So devices need not hold two policies while the next one arrives.
        """
        policy = dataclasses.replace(self.session.policy, params=None)
        self.session = dataclasses.replace(self.session, policy=policy)

    def update_weights(self, policy: Policy, kv: Literal["keep", "recompute"]) -> None:
        """Lets live and later episodes go on with these weights, on any layout.

        With "keep" live episodes attend to what the weights before have written. With "recompute"
        they read all of their samples again first, as preempted ones do. Each token has the version
        that sampled it, in `Turn.versions` and in its row. Prompts in the caches are given up.

        Raises:
            ValueError: another word for `kv`.
        """
        if kv not in ("keep", "recompute"):
            raise InputError(f'kv is {kv!r}; it must be "keep" or "recompute"')
        params = self.session.engine.load_params(policy.params)
        policy = dataclasses.replace(policy, params=params)
        self.session = dataclasses.replace(self.session, policy=policy)
        self._blocks.change_weights(recompute=kv == "recompute")

    def close(self) -> Session:
        """Aborts what plays. Returns the session; the service is void then."""
        self.abort()
        return self.session

    # A step.

    @property
    def _has_round(self) -> bool:
        """True if there are episodes, or slots that the next round has to stop.

        Tokens behind the last stop string are discarded in a round of their own.
        """
        return bool(any(self._slots) or self._rounds.discards or self._blocks.stopped)

    def _episodes(self) -> list[LiveEpisode]:
        """Returns the live episodes, without their branches."""
        return [e for e in self._slots if e is not None and e.parent is None]

    def _episode(self, slot: int) -> LiveEpisode:
        episode = self._slots[slot]
        assert episode is not None
        return episode

    def _move_the_last(self, session: Session) -> Session:
        """Calls `shrink` for the last episodes, if there are so few now."""
        live = [episode for episode in self._slots if episode is not None]
        if self._shrink is None or not self.is_draining:
            return session
        if self._scheduler.num_waiting or len(live) > self._shrink_at:
            return session
        self._shrink_at = len(live) // 2
        longest = max((episode.length for episode in live), default=0)
        return self._shrink(session, len(live), longest) if live else session

    def _end(self, slot: int, stop_reason: str, detail: str = "") -> None:
        """Ends the episode in this slot, and frees the slot."""
        episode = self._episode(slot)
        if episode.parent is not None:
            leave(episode, stop_reason, detail)
            self._slots[slot] = None
            return self._blocks.end(slot, episode)
        self._branches.drop(episode)
        done = Finished(ticket=episode.ticket, trajectory=episode.finish(stop_reason, detail))
        self._ended.append((slot, done, episode.resumes is not None or episode.detached))
        del self._tasks[episode.ticket]
        self._scheduler.end(episode.ticket, episode.length)
        self._slots[slot] = None
        self._blocks.end(slot, episode)

    def _hand_out(self, num_before: int) -> list[Finished]:
        """Returns the episodes that are over whose rows the next round leaves as they are.

        The first `num_before` had ended before this round: what their slots discard now is of
        other episodes.
        """
        before, ended = self._ended[:num_before], self._ended[num_before:]
        discards = self._rounds.discards
        ready = before + [each for each in ended if each[0] not in discards]
        self._ended = [each for each in ended if each[0] in discards]
        for _, finished, is_unwritten in ready:
            self._row_pool.hold(finished)
            if is_unwritten:
                # Not before: the round before this one may have changed the row.
                self._host_rows.add(finished.row, finished.trajectory.turns)
        self.session = self._host_rows.write(self.session)
        return [finished for _, finished, _ in ready]

    def _submit_more(self) -> bool:
        """Submits tasks that come from elsewhere where slots are free. False if none came."""
        num_free = len(self._slots) - self.num_live - self._scheduler.num_waiting
        tasks = self._more(num_free) if num_free > 0 else ()
        return bool(tasks) and bool(self.submit(tasks))

    def _refill(self) -> bool:
        """Gives free slots waiting tasks, whose environments begin. False if none came."""
        free = [slot for slot, episode in enumerate(self._slots) if episode is None]
        if self.holds_tasks or not free:
            return False
        self._submit_more()
        if not self._scheduler.num_waiting:
            return False
        opened = {}
        offered = self._row_pool.offer(self._blocks.by_age(free))
        if self._scheduler.needs_lengths:
            self._scheduler.play({e.ticket: e.length for e in self._episodes()})
        for slot, ticket in self._scheduler.assign(offered, self._blocks.crowded).items():
            task, row = self._tasks[ticket], self._row_pool.take(slot, ticket)
            if (call := self._begin(slot, ticket, task, row)) is not None:
                opened[ticket] = call
        self._calls.submit(opened)
        return bool(opened)

    def _begin(self, slot: int, ticket: int, task: Task, row: int) -> Callable[[], Answer] | None:
        """Begins an episode. Returns the call of its environment; None: its prompt is there."""
        config = self.session.engine.config
        episode = self._slots[slot] = LiveEpisode(
            task=task,
            ticket=ticket,
            buffer_row=row,
            conversation=self._new_conversation(),
            limits=task.limits or self._config.limits,
            stops=task.stops or self._config.stops,
            max_context=self._max_context,
            scored=config.rules.model_logprobs or task.model_logprobs,
            truncates=(task.sampling or self._sampling).truncates,
            resumes=task.resumes,
        )
        if task.prompt is not None:
            episode.choices, episode.allowed = task.prompt.choices, task.prompt.allowed
            ends = episode.take_message("", task.prompt.message, self._config.unfinished_reward)
            return None if ends is None else self._end(slot, *ends)
        assert self._make_environment is not None, "a task without a prompt has an environment"
        requests = self._events.requests_of(ticket)
        return functools.partial(begin, self._make_environment, episode, config, requests)

    def _send_turns(self, ended: Sequence[int], faulty: Collection[int] = ()) -> None:
        """Gives the turns of these slots to their environments; those of `faulty` ones fail."""
        steps = {}
        for slot in ended:
            episode = self._slots[slot]
            if episode is None:
                # A branch of an episode that is over.
                continue
            if slot in faulty:
                self._fail(slot, episode)
                continue
            text, whole = episode.end_turn()
            if episode.task.prompt is not None:
                self._end(slot, *episode.end_of_prompt(whole=whole))
                continue
            if episode.parent is not None:
                if not self._branches.join(episode, whole=whole):
                    self._end(slot, REPLIED)
                    continue
            elif episode.ends is not None or episode.is_beyond(0):
                self._branches.end_with_turn(slot, episode, self._end)
                continue
            if whole:
                steps[episode.ticket] = reply_to(episode, text, self.session.engine.config)
                episode.waits = True
                if self._rounds.num_discarded(slot):
                    self._blocks.discard(slot)
                continue
            self._end(slot, *episode.cut(self._config.unfinished_reward))
        self._calls.submit(steps)

    def _fail(self, slot: int, episode: LiveEpisode) -> None:
        """Ends an episode for which the model gave no finite logits; others go on."""
        place = len(episode.sample) + len(episode.reply)
        if episode.parent is None and episode.reply:
            episode.end_turn()
        self._end(
            slot,
            NONFINITE_LOGITS,
            f"the model's logits behind token {place} of this context are not finite: a weight or "
            "an activation overflows (config.rollout.compute_dtype, weight_dtype, kv_dtype)",
        )
        # The cache may hold the fault.
        self._blocks.forget(slot)

    def _take_answers(self) -> None:
        """Takes environments' answers within the patience; waits on while no slot has work."""
        start_s = time.perf_counter()
        waits_on = any(self._slots)
        while waits_on:
            answers = self._calls.take(self._patience(), at_least_one=self._is_idle())
            for slot, episode in enumerate(self._slots if answers else ()):
                if episode is not None and episode.ticket in answers:
                    self._take_answer(slot, episode, answers[episode.ticket])
            self._branches.begin(self.session.engine.config, self._end)
            refilled = self._refill()
            # Episodes that ended may have left pages, and only preempted ones.
            self._blocks.resume()
            waits_on = refilled or (any(self._slots) and self._is_idle())
        self._stats.env_wait_s += time.perf_counter() - start_s

    def _patience(self) -> float | RoundWait:
        """Returns the wait for answers before the next round."""
        patience_s = self._config.patience_s
        if patience_s != "auto":
            return patience_s
        num_working = sum([e is not None and e.has_work for e in self._slots])
        return RoundWait(self._rounds.round_s, num_working)

    def _is_idle(self) -> bool:
        """Returns whether a round would have nothing to do."""
        return not any(episode is not None and episode.has_work for episode in self._slots)

    def _take_answer(self, slot: int, episode: LiveEpisode, answer: Answer | Failure) -> None:
        """Takes the environment's start or step: its message is appended."""
        if (ends := take_answer(episode, answer, self._config)) is not None:
            self._end(slot, *ends)
        elif episode.resumes is not None and not episode.waits:
            self._replay(slot, episode)

    # Episodes of a run that goes on.

    def _replay(self, slot: int, episode: LiveEpisode) -> None:
        """Gives the environment the next reply that the episode had; behind the last it goes on.

        Where the environment has not said the same as then, it is played from its beginning.
        """
        ticket, is_same = episode.ticket, replay_turn(episode)
        if is_same and not episode.in_turn:
            return self._send_turns([slot])
        if episode.parent is None:
            task = self._tasks[ticket] = dataclasses.replace(episode.task, resumes=None)
            if is_same is False:
                call = self._begin(slot, ticket, task, episode.buffer_row)
                return self._calls.submit({} if call is None else {ticket: call})
            turns = [*episode.turns, *([episode.reply.as_turn()] if episode.reply else [])]
            self._host_rows.add(episode.buffer_row, turns)
        episode.resumes = None
        return episode.read_all()
