# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The rounds of a rollout: inputs for the live episodes, one call of the engine, its outputs."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from earl_jax.engine.choices import set_turn
from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine, Session
from earl_jax.engine.round_inputs import RoundInputs, RoundOutputs, idle_inputs
from earl_jax.engine.sampling import set_row
from earl_jax.rollout.block_manager import BlockManager
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.reply import NewTokens, Sampled
from earl_jax.rollout.row_pool import RowPool
from earl_jax.rollout.stats import RolloutStats
from earl_jax.settings.errors import RunError

_GUESSED_ROUND_S = 0.03
# on_tokens(ticket, tokens): called with what an episode sampled in a round.
OnTokens = Callable[[int, NewTokens], None]


def choose_readers(tokens: Mapping[int, int], budget: int, slots_a_shard: int) -> list[int]:
    """Returns the slots that append a chunk in a round of at most `budget` tokens a row shard.

    `tokens` are those of each slot's chunk, in the order in which slots have their turn. A chunk
    that does not fit lets smaller ones go first. The first one with tokens always goes on, so that
    a slot waits for no more rounds than there are slots before it.

    Example: chunks of 48, 32, 0 and 16 tokens of the slots 3, 0, 2 and 1, and a budget of 64: 3, 2
    and 1. With two slots a shard also 0, because 2 and 3 are another shard's.
    """
    chosen, left = [], {}
    for slot, number in tokens.items():
        shard = slot // slots_a_shard
        rest = left.get(shard, budget)
        if number <= rest or rest == budget:
            chosen.append(slot)
            left[shard] = max(0, rest - number)
    return chosen


class Rounds:
    """Plays rounds of the episodes in the slots, and counts them. Host-side state only."""

    def __init__(
        self,
        slots: Sequence[LiveEpisode | None],
        blocks: BlockManager,
        rows: RowPool,
        sampling: Sampling,
        stats: RolloutStats,
        on_tokens: OnTokens | None,
        wait: Callable[[Any], Any],
    ) -> None:
        """`slots` is the caller's list of the live episodes; `stats` are added to.

        With `on_tokens` somebody reads along. Then prompts hold up those who sample by no more than
        `Engine.append_budget`. Without, all are read as fast as they can be: that takes fewer
        rounds, and more slots sample in each of them.
        """
        self._wait = wait
        self._slots, self._blocks, self._rows = slots, blocks, rows
        self._sampling, self._stats, self._on_tokens = sampling, stats, on_tokens
        # Slots whose turn a stop string ended, and how many tokens they sampled behind it.
        self._discards: dict[int, int] = {}
        # Slots whose turn ended in the last round because their logits were not finite.
        self.faulty: set[int] = set()
        # The weights by which some token was sampled from logits that are finite.
        self._sound_version: int | None = None
        # All slots, the one in front that appended a chunk the longest ago.
        self._turns = list(range(len(slots)))
        # Programs that ran, and the engine that ran first.
        self._seen: set[Any] = set()
        # About the seconds of a round without a compilation: a mean in which the last one counts a
        # half, and the guess of the beginning soon nothing.
        self.round_s = _GUESSED_ROUND_S
        self._first_engine: Engine | None = None

    def change_engine(self) -> None:
        """Notes that episodes go on with another plan, whose speed is counted from here on."""
        self._first_engine = None

    @property
    def discards(self) -> Collection[int]:
        """Slots of which the next round discards tokens, of episodes that may be over."""
        return self._discards.keys()

    def num_discarded(self, slot: int) -> int:
        """Returns how many tokens of the slot the next round discards."""
        return self._discards.get(slot, 0)

    def play(self, session: Session) -> tuple[Session, list[int]]:
        """Plays one round. Returns the session behind it, and the slots whose turn ended."""
        inputs = self._make_inputs(session)
        session = self._blocks.give(self._rows.settle(session))
        session, outputs = self._run(session, inputs)
        self._stats.rounds += 1
        return session, self._record(outputs, session.policy.version)

    def _make_inputs(self, session: Session) -> RoundInputs:
        """Takes the next chunks off the episodes' queues."""
        config, blocks = session.engine.config, self._blocks
        inputs = idle_inputs(
            config.num_slots,
            config.chunk_size,
            config.rules.choice_branches,
            self._sampling,
            session.policy.version,
            config.page_rule.num_groups,
        )
        inputs.rewind[list(blocks.stopped)] = 1
        blocks.stopped.clear()
        for slot, number in self._discards.items():
            inputs.end_turn[slot], inputs.discarded[slot] = 1, number
            blocks.use_row(slot)
        self._discards.clear()
        growing = blocks.growing()
        reading = [
            slot
            for slot, episode in enumerate(self._slots)
            # Most slots go on with a turn, in pages that they have.
            if episode is not None
            and (len(episode.queue) or slot in growing)
            and episode.has_work
            and self._begin(inputs, slot, episode)
        ]
        for slot in self._choose(session.engine, reading):
            self._read(inputs, slot)
            if slot in growing:
                blocks.hold(slot)
        blocks.end_inputs(inputs.count)
        return inputs

    def _begin(self, inputs: RoundInputs, slot: int, episode: LiveEpisode) -> bool:
        """Begins the slot of an episode that takes part, if it has to. True if a chunk may follow.

        In the order of slots, in which the devices read what others take over.
        """
        blocks = self._blocks
        if not len(episode.queue):
            blocks.hold(slot)
            return False
        if not episode.begins:
            return True
        fork, rewind = episode.forks, episode.rewinds
        # A slot that writes its row no longer begins like a fresh one.
        restart = episode.fresh or (fork and episode.detached)
        begins = blocks.begin(slot)
        if begins is None:
            # Until its sample is read again it must not go on over the old cache; nor may an
            # episode that was aborted here.
            inputs.rewind[slot] |= rewind
            return False
        inputs.source[slot], inputs.shared[slot] = begins.source - slot, begins.shared
        inputs.copied[slot], inputs.written[slot] = begins.copied, begins.written
        self._stats.shared_tokens += episode.begin(begins.shared)
        inputs.seed[slot], inputs.row[slot] = episode.token_seed, episode.row
        inputs.stop_ids[slot, : len(episode.stops.token_ids)] = episode.stops.token_ids
        if episode.task.sampling is not None:
            set_row(inputs.sampling, slot, episode.task.sampling)
        inputs.restart[slot], inputs.fork[slot], inputs.rewind[slot] = restart, fork, rewind
        inputs.origin[slot], inputs.turns[slot] = episode.origin, episode.num_turns
        inputs.turn_tokens[slot] = len(episode.reply)
        return True

    def _choose(self, engine: Engine, reading: Sequence[int]) -> Sequence[int]:
        """Returns the slots of these that append a chunk in this round; the others wait."""
        if self._on_tokens is None or not reading:
            return reading
        waiting = set(reading)
        chosen = [slot for slot in self._turns if slot in waiting]
        if any(e is not None and e.has_work and not len(e.queue) for e in self._slots):
            width, chunk_size = engine.tile_width, engine.config.chunk_size
            # A tile costs what a full one does.
            tokens = {
                slot: -(-self._episode(slot).num_appended(chunk_size) // width) * width
                for slot in chosen
            }
            slots_a_shard = engine.config.num_slots // engine.layout.num_row_shards
            chosen = choose_readers(tokens, engine.append_budget, slots_a_shard)
        self._turns = sorted(self._turns, key=set(chosen).__contains__)
        return chosen

    def _read(self, inputs: RoundInputs, slot: int) -> None:
        """Takes the slot's next chunk off its episode's queue."""
        episode = self._episode(slot)
        part, new = episode.take(inputs.chunk.shape[1])
        inputs.chunk[slot, : len(part)], inputs.count[slot] = part, len(part)
        self._stats.prefill_tokens += new
        if not len(episode.queue):
            inputs.resume_turn[slot] = episode.in_turn
            inputs.begin_turn[slot] = not (episode.in_turn or episode.waits)
            inputs.turn_limit[slot] = episode.turn_limit
            set_turn(inputs.choices, slot, episode.choices, episode.allowed)

    def _episode(self, slot: int) -> LiveEpisode:
        episode = self._slots[slot]
        assert episode is not None
        return episode

    def _run(self, session: Session, inputs: RoundInputs) -> tuple[Session, RoundOutputs]:
        """Calls the engine, and counts the round by its time."""
        engine, stats = session.engine, self._stats
        live = [episode for episode in self._slots if episode is not None]
        scored = any([episode.scored for episode in live])
        truncates = any([episode.truncates for episode in live])
        program = (str(engine.layout), session.max_tokens, session.pool, scored, truncates)
        start_s = time.perf_counter()
        state, outputs = engine.play(
            session.policy.params,
            session.state,
            inputs,
            model_logprobs=scored,
            truncates=truncates,
            wait=self._wait,
        )
        seconds = time.perf_counter() - start_s
        # A speed is that of the plan that the rollout began with.
        self._first_engine = self._first_engine or engine
        if program in self._seen:
            self.round_s = (self.round_s + seconds) / 2
            if engine is self._first_engine:
                stats.count_round(outputs, seconds)
        self._seen.add(program)
        stats.count_steps(outputs, engine.layout.num_row_shards)
        stats.count_drafts(outputs)
        return dataclasses.replace(session, state=state), outputs

    def _record(self, outputs: RoundOutputs, version: int) -> list[int]:
        """Adds the sampled tokens to their episodes. Returns the slots whose turn is over.

        Raises RunError where these weights have given no finite logits at all.
        """
        ended, sampled = [], Sampled.of(outputs, version)
        faults = self._cut_faults(sampled)
        number = in_flight = longest = 0
        stats = self._stats
        for slot, episode in enumerate(self._slots):
            if episode is None:
                continue
            if sampled.count[slot] or slot in faults:
                discarded = episode.append_sampled(sampled, slot) + faults.get(slot, 0)
                if self._on_tokens is not None:
                    new = sampled.new_tokens(slot, scored=episode.scored)
                    self._on_tokens(episode.ticket, new)
                number += sampled.count[slot]
                stats.discarded_tokens += discarded
                if not episode.in_turn:
                    ended.append(slot)
                    if slot in faults and not episode.found_stop:
                        self.faulty.add(slot)
                    if discarded or sampled.active[slot]:
                        self._discards[slot] = discarded
            in_flight += episode.length - episode.origin - len(episode.queue)
            longest = max(longest, episode.length)
        stats.rollout_tokens += number
        stats.context_tokens_max = max(stats.context_tokens_max, longest)
        stats.tokens_in_flight_max = max(stats.tokens_in_flight_max, in_flight)
        return ended

    def _cut_faults(self, sampled: Sampled) -> dict[int, int]:
        """Ends turns before the first token whose logits are not finite. Raises RunError.

        Returns how many tokens that leaves out, by slot.
        """
        faults, version = sampled.outputs.faults, sampled.version
        left_out = {slot: sampled.count[slot] - number for slot, number in faults.items()}
        for slot, number in faults.items():
            sampled.count[slot], sampled.active[slot] = number, False
        self.faulty = set()
        if any(sampled.count):
            self._sound_version = version
        elif faults and self._sound_version != version:
            raise RunError(
                "the policy's logits are not finite, so that no token can be sampled from them; "
                "look for NaN or huge weights in the checkpoint, or for an overflow of "
                "config.rollout's types (weight_dtype, kv_dtype)"
            )
        return left_out
