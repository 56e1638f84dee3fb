# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rounds of a rollout: inputs for the live episodes, one call of the engine, its outputs."""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from earl_jax.engine.choices import set_turn
from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs, idle_inputs
from earl_jax.engine.sampling import set_row
from earl_jax.engine.session import Session
from earl_jax.rollout.block_manager import BlockManager
from earl_jax.rollout.episode import LiveEpisode, NewTokens
from earl_jax.rollout.row_pool import RowPool
from earl_jax.rollout.stats import RolloutStats

# on_tokens(ticket, tokens): called with what an episode sampled in a round.
OnTokens = Callable[[int, NewTokens], None]


class Rounds:
    """Plays rounds of the episodes in the slots, and counts them. Host-side state only."""

    def __init__(
        self,
        slots: Sequence[LiveEpisode | None],
        blocks: BlockManager,
        rows: RowPool,
        sampling: Sampling,
        stats: RolloutStats,
        on_tokens: OnTokens,
        wait: Callable[[Any], Any],
    ) -> None:
        """`slots` is the caller's list of the live episodes; `stats` are added to."""
        self._wait = wait
        self._slots, self._blocks, self._rows = slots, blocks, rows
        self._sampling, self._stats, self._on_tokens = sampling, stats, on_tokens
        # Slots whose turn a stop string ended, and how many tokens they sampled behind it.
        self._discards: dict[int, int] = {}
        # Programs that ran, and the engine that ran first.
        self._seen: set[Any] = set()
        self._first_engine: Engine | None = None

    def change_engine(self) -> None:
        """Notes that episodes go on with another plan, whose speed is counted from here on."""
        self._first_engine = None

    @property
    def discards(self) -> Collection[int]:
        """Slots of which the next round discards tokens, of episodes that may be over."""
        return self._discards.keys()

    def play(self, session: Session) -> tuple[Session, list[int]]:
        """Plays one round. Returns the session behind it, and the slots whose turn ended."""
        inputs = self._make_inputs(session)
        session = self._blocks.give(self._rows.settle(session))
        session, outputs = self._run(session, inputs)
        self._stats.rounds += 1
        return session, self._record(outputs, session.policy.version)

    def _make_inputs(self, session: Session) -> RoundInputs:
        """Takes the next chunk of every slot off its episode's queue."""
        config, blocks = session.engine.config, self._blocks
        inputs = idle_inputs(
            config.num_slots,
            config.chunk_size,
            config.rules.choice_branches,
            self._sampling,
            session.policy.version,
        )
        inputs.rewind[list(blocks.stopped)] = 1
        blocks.stopped.clear()
        for slot, number in self._discards.items():
            inputs.end_turn[slot], inputs.discarded[slot] = 1, number
            blocks.use_row(slot)
        self._discards.clear()
        for slot, episode in enumerate(self._slots):
            if episode is not None and episode.has_work:
                self._fill(inputs, slot, episode)
        blocks.end_inputs(inputs.count)
        return inputs

    def _fill(self, inputs: RoundInputs, slot: int, episode: LiveEpisode) -> None:
        """Writes the inputs of an episode that takes part, and gives it its pages."""
        blocks = self._blocks
        if not episode.queue:
            blocks.hold(slot)
            return
        restart, fork, rewind = episode.fresh, episode.forks, episode.rewinds
        if episode.begins:
            begins = blocks.begin(slot)
            if begins is None:
                # Until its sample is read again it must not go on over the old cache; nor may an
                # episode that was aborted here.
                inputs.rewind[slot] |= rewind
                return
            inputs.source[slot], inputs.shared[slot] = begins.source - slot, begins.shared
            inputs.copied[slot], inputs.written[slot] = begins.copied, begins.written
            _, new = episode.take(begins.shared)
            self._stats.shared_tokens += new
        inputs.seed[slot], inputs.row[slot] = episode.task.token_seed, episode.buffer_row
        inputs.stop_ids[slot, : len(episode.stops.token_ids)] = episode.stops.token_ids
        if episode.task.sampling is not None:
            set_row(inputs.sampling, slot, episode.task.sampling)
        inputs.restart[slot], inputs.fork[slot], inputs.rewind[slot] = restart, fork, rewind
        inputs.origin[slot] = episode.origin
        part, new = episode.take(inputs.chunk.shape[1])
        inputs.chunk[slot, : len(part)], inputs.count[slot] = part, len(part)
        blocks.hold(slot)
        self._stats.prefill_tokens += new
        if not episode.queue:
            inputs.resume_turn[slot] = episode.in_turn
            inputs.begin_turn[slot] = not (episode.in_turn or episode.waits)
            inputs.turn_limit[slot] = episode.turn_limit
            set_turn(inputs.choices, slot, episode.choices, episode.allowed)

    def _run(self, session: Session, inputs: RoundInputs) -> tuple[Session, RoundOutputs]:
        """Calls the engine, and counts the round by its time."""
        engine, stats = session.engine, self._stats
        scored = any(episode is not None and episode.scored for episode in self._slots)
        program = (str(engine.layout), session.max_tokens, session.pool, scored)
        start_s = time.perf_counter()
        state, outputs = engine.play(
            session.policy.params, session.state, inputs, model_logprobs=scored, wait=self._wait
        )
        seconds = time.perf_counter() - start_s
        # A speed is that of the plan that the rollout began with.
        self._first_engine = self._first_engine or engine
        if program in self._seen and engine is self._first_engine:
            stats.count_round(outputs, seconds)
        self._seen.add(program)
        stats.count_steps(outputs, engine.layout.num_row_shards)
        stats.count_drafts(outputs)
        return dataclasses.replace(session, state=state), outputs

    def _record(self, outputs: RoundOutputs, version: int) -> list[int]:
        """Adds the sampled tokens to their episodes. Returns the slots whose turn is over."""
        ended = []
        in_flight = 0
        stats = self._stats
        for slot, episode in enumerate(self._slots):
            if episode is None:
                continue
            if outputs.count[slot]:
                discarded = episode.append_sampled(outputs, slot, version)
                number = int(outputs.count[slot]) - discarded
                self._on_tokens(episode.ticket, episode.last_tokens(number))
                stats.rollout_tokens += number
                stats.discarded_tokens += discarded
                if not episode.in_turn:
                    ended.append(slot)
                    if discarded or outputs.active[slot]:
                        self._discards[slot] = discarded
            in_flight += episode.length - episode.origin - len(episode.queue)
            stats.context_tokens_max = max(stats.context_tokens_max, episode.length)
        stats.tokens_in_flight_max = max(stats.tokens_in_flight_max, in_flight)
        return ended
