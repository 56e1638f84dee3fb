# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Room in the KV cache for the episodes of a rollout: pages, prompts taken over, and preemption.

Every round each episode that takes part gets the pages that it may need. Where a row shard has too
few, slots that nobody plays in give up what they keep for others; then the cache grows; and where
the budget does not let it grow, episodes are preempted: they give up their pages, and go on when
there are some. What they had read is in host memory until then, or is read again (preemption.py).

Who goes on is a matter of rank: whoever has begun comes before whoever has not, then the longer
before the shorter. The lowest in a row shard is preempted, the highest of the preempted goes on
first, and none overtakes it. So the highest of a shard is never preempted: a shard always has an
episode that goes on, which ends, and so all of them do. And none is preempted again and again: it
goes on only where there is room for all that it has to read and two rounds more, and that room is
there again only when another of its shard ends or begins anew, the cache grows, or the mesh
changes. Between two such times an episode is preempted at most once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.engine.config import RolloutConfig
from earl_jax.engine.host_pages import HostPages
from earl_jax.engine.pages import pages_for
from earl_jax.engine.prefixes import PrefixIndex, Shared
from earl_jax.engine.round_inputs import NO_PAGE
from earl_jax.engine.row_copies import RowIds
from earl_jax.engine.session import Kept, Session
from earl_jax.engine.shard_copies import ShardCopies
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.preemption import (
    Work,
    choose_preemption,
    is_worth_sending,
    rates_of,
    work_of,
)

# make_room(session, tokens, pages): a session whose rows hold so many tokens (`relocate`), with so
# many pages in each row shard of the session's pool, or as many in all, if the budget allows. It
# has pages for one whole episode a row shard, and for what the live ones hold
# (`PageTable.least_pages`).
MakeRoom = Callable[[Session, int, int], Session]


class Beginning(NamedTuple):
    """What a slot begins with: `shared` tokens of slot `source`, page `copied` among them.

    Where it is the slot itself, what is shared may have come from elsewhere. The ids of it may be
    `written` in the slot's row already.
    """

    source: int
    shared: int
    copied: int
    written: bool


class BlockManager:
    """The pages of one rollout's slots. Host-side state only."""

    def __init__(
        self,
        config: RolloutConfig,
        session: Session,
        slots: Sequence[LiveEpisode | None],
        make_room: MakeRoom,
    ) -> None:
        """`slots` is the caller's list, which says who plays where."""
        self._config, self._slots, self._make_room = config, slots, make_room
        self._page_size = session.engine.config.page_size
        # What other weights have read is worth nothing.
        kept = (
            session.kept
            if session.kept and session.kept.version == session.policy.version
            else None
        )
        self._pages = session.pages
        if not kept:
            for slot in range(len(slots)):
                self._pages.keep(slot, 0)
        self._given: np.ndarray | None = None
        # Pages of each row shard that nobody wants in this round.
        self._spare: list[int] = []
        # Slots that give up their pages, and must be told before the next round.
        self.stopped: set[int] = set()
        self._host = HostPages(int(config.preemption_host_gib * 2**30))
        # What is copied to the host before the next round: the pages of slots that were preempted.
        self._leaving: dict[int, list[int]] = {}
        self.num_preempted, self.recomputed_tokens, self.preemption = 0, 0, ""
        self._shard_copies = ShardCopies()
        self._is_worth_sending = functools.partial(
            is_worth_sending,
            setting=config.copy_prefixes,
            work=self._work(session),
            rates=rates_of(session.engine),
        )
        if kept:
            self._prefixes = kept.prefixes
        else:
            self._forget_prompts()
        # Ids that the host writes down for slots that begin in this round; and slots whose rows are
        # in use in this round for what was there before.
        self._ids: dict[int, list[int]] = {}
        self._rows_in_use: set[int] = set()

    @property
    def host_bytes(self) -> int:
        """Bytes of preempted pages that were copied to host memory, and back."""
        return self._host.moved_bytes

    @property
    def copied_tokens(self) -> int:
        """Tokens that came from other row shards' pages."""
        return self._shard_copies.tokens

    @property
    def crowded(self) -> set[int]:
        """Slots of the row shards whose episodes wait for pages."""
        shards = {
            self._pages.shard(slot)
            for slot, episode in enumerate(self._slots)
            if episode is not None and episode.preempted
        }
        return {slot for shard in shards for slot in self._pages.slots_of(shard)}

    def new_weights(self, *, recompute: bool) -> None:
        """What old weights have read is not for episodes that begin under new ones.

        With `recompute` it is for nobody, who is preempted among them.
        """
        self._forget_prompts()
        if recompute:
            for slot in self._host.slots:
                self._host.drop(slot)

    def _forget_prompts(self) -> None:
        self._prefixes = PrefixIndex(
            num_slots=len(self._slots),
            num_shards=self._pages.pool.shards,
            chunk_size=self._config.chunk_size,
            is_worth_sending=self._is_worth_sending,
        )

    # Before a round.

    def resume(self) -> None:
        """Preempted episodes go on where there are pages for all that they have to read."""
        for shard in range(self._pages.pool.shards):
            slots = [slot for slot in self._pages.slots_of(shard) if self._slots[slot] is not None]
            if not any(self._episode(slot).preempted for slot in slots):
                continue
            for slot in slots:
                # It has nothing to lose, and lines up.
                self._episode(slot).preempted |= self._is_new(slot) and self._episode(slot).has_work
            preempted = [slot for slot in slots if self._episode(slot).preempted]
            for slot in sorted(preempted, key=self._rank, reverse=True):
                alone = all(self._episode(other).preempted for other in slots)
                if not alone and self._short(shard, self._in_full(slot)) > 0:
                    break
                self._episode(slot).preempted = False

    def fit(self, session: Session) -> Session:
        """A session with room for the next round of every episode that is not preempted."""
        self._host.settle()
        self._adopt(session)
        live = [episode for episode in self._slots if episode is not None]
        tokens = max((self._room_for(episode) for episode in live), default=0)
        short = max(self._short(shard) for shard in range(session.pool.shards))
        if tokens > session.max_tokens or short > 0:
            pages = session.pool.pages + max(0, short)
            session = self._make_room(session, max(tokens, session.max_tokens), pages)
            self._adopt(session)
        self._spare = []
        for shard in range(session.pool.shards):
            while (short := self._short(shard)) > 0:
                self._preempt(session, shard)
            self._spare.append(-short)
        return self._copy(session)

    def _adopt(self, session: Session) -> None:
        """Goes on with the pages of a session that the live episodes have moved to."""
        if session.pages is self._pages:
            return
        before, self._pages, self._given = self._pages, session.pages, None
        self._prefixes.regroup(session.pool.shards)
        for slot in range(len(self._slots)):
            if before.num_held(slot) and not self._pages.num_held(slot):
                self._prefixes.forget(slot)

    def _copy(self, session: Session) -> Session:
        """Carries out what was decided: pages leave for the host, and come back from there."""
        session = self._host.copy_out(session, self._leaving)
        self._leaving = {}
        coming, awake = {}, {}
        for slot in self._host.slots:
            episode = self._episode(slot)
            if episode.begins:
                # A new sample knows nothing of what was read.
                self._host.drop(slot)
            elif not episode.preempted:
                self._pages.hold(slot, episode.num_written)
                coming[slot] = self._pages.pages_of(slot, episode.num_written)
                awake[slot] = episode.speaking and not episode.queue
        return self._host.copy_back(session, coming, awake)

    def _room_for(self, episode: LiveEpisode) -> int:
        return min(episode.length + self._most_sampled(episode), episode.most_tokens)

    def _most_sampled(self, episode: LiveEpisode) -> int:
        """Tokens that the episode may say in a round."""
        return min(self._config.round_tokens, episode.limits.max_turn_tokens)

    def _wanted(self, slot: int, episode: LiveEpisode) -> int:
        """Pages that the episode may need for a round, beyond those that it has."""
        tokens = episode.num_cached + min(len(episode.queue), self._config.chunk_size)
        tokens = min(tokens + self._most_sampled(episode), episode.most_tokens)
        if episode.begins:
            return pages_for(tokens, self._page_size)
        return self._pages.missing(slot, tokens)

    def _in_full(self, slot: int) -> int:
        """Pages that the episode lacks for all that it has to read, and for two rounds."""
        episode = self._episode(slot)
        tokens = episode.num_cached + len(episode.queue) + 2 * self._most_sampled(episode)
        tokens = min(tokens, episode.most_tokens)
        if episode.begins:
            return pages_for(tokens, self._page_size)
        return self._pages.missing(slot, tokens)

    def _short(self, shard: int, resuming: int | None = None) -> int:
        """Pages that the row shard lacks for the next round; idle slots give up theirs before.

        For an episode that is to go on with `resuming` pages nothing is counted upon that others
        of the shard still need to have read what they read before.
        """
        slots = self._pages.slots_of(shard)
        playing = [
            (slot, e) for slot in slots if (e := self._slots[slot]) and self._needs_pages(slot)
        ]
        wanted = sum(self._wanted(slot, episode) for slot, episode in playing)
        if resuming is not None:
            wanted += resuming + sum(
                max(0, self._in_full(slot) - self._wanted(slot, episode))
                for slot, episode in playing
                if episode.again or slot in self._host
            )
        for slot in slots:
            if wanted <= self._pages.num_free(shard):
                break
            episode = self._slots[slot]
            if self._pages.num_held(slot) and (episode is None or episode.begins):
                self._give_up(slot)
        return wanted - self._pages.num_free(shard)

    def _needs_pages(self, slot: int) -> bool:
        """Whether the slot's episode plays the next round, or comes back from the host before it.

        It comes back while its environment is still at work, too.
        """
        episode = self._episode(slot)
        return episode.has_work or slot in self._host and not (episode.preempted or episode.begins)

    def _give_up(self, slot: int) -> None:
        self._pages.keep(slot, 0)
        self._prefixes.forget(slot)

    def _preempt(self, session: Session, shard: int) -> None:
        """The lowest in rank of the shard's episodes gives up its pages, or its wish for some."""
        slots = self._pages.slots_of(shard)
        playing = [
            slot
            for slot in slots
            if (e := self._slots[slot]) and not e.preempted
            if self._needs_pages(slot) or self._pages.num_held(slot)
        ]
        assert len(playing) > 1, "a pool holds at least one episode a row shard"
        slot = min(playing, key=self._rank)
        episode = self._episode(slot)
        episode.preempted = True
        if slot in self._host:
            # It was about to come back.
            return
        self.num_preempted += not self._is_new(slot)
        if self._goes_to_host(session, slot):
            self._leaving[slot] = self._pages.pages_of(slot, episode.num_written)
        else:
            self.recomputed_tokens += episode.rewind()
            self.stopped.add(slot)
        self._give_up(slot)

    def _rank(self, slot: int) -> tuple[bool, int, int]:
        """Who goes on rather than others of the row shard is higher."""
        return not self._is_new(slot), self._episode(slot).length, -slot

    def _is_new(self, slot: int) -> bool:
        """Whether the episode has nothing to lose."""
        return self._episode(slot).fresh

    def _goes_to_host(self, session: Session, slot: int) -> bool:
        """Whether its pages are copied to the host, and not read again."""
        config, tokens = self._config, self._episode(slot).num_written
        if config.preemption == "recompute" or not tokens:
            return False
        pages = [*map(len, self._leaving.values()), pages_for(tokens, self._page_size)]
        if not self._host.has_room(session, pages):
            return False
        if config.preemption == "host":
            return True
        choice = choose_preemption(tokens, self._work(session), rates_of(session.engine))
        self.preemption = choice.reason
        return choice.where == "host"

    def _work(self, session: Session) -> Work:
        block_tokens = session.engine.page_copies.pages_a_call * self._page_size
        return work_of(session.engine, self._host.block_bytes(session), block_tokens)

    def _episode(self, slot: int) -> LiveEpisode:
        episode = self._slots[slot]
        assert episode is not None
        return episode

    # While a round's orders are made.

    def begin(self, slot: int) -> Beginning | None:
        """The slot begins anew with its episode's queue. None: it waits for who reads the same."""
        source, length, prompt = slot, 0, self._episode(slot).queue
        if self._config.share_prefixes:
            shared = self._prefixes.find(slot, prompt)
            if shared is None:
                return None
            if self._can_share(slot, shared):
                source, length = shared.source, shared.length
            if length and (self._is_far(slot, source) or not self._prefixes.has_row(source)):
                if slot in self._rows_in_use:
                    return None
                self._ids[slot] = prompt[:length]
            self.use_row(source)
            self._prefixes.begin(slot, prompt, Shared(source=source, length=length))
        written = slot in self._ids
        if self._is_far(slot, source):
            self._bring(slot, source, length)
            return Beginning(slot, length, NO_PAGE, written)
        copy = self._pages.begin(slot, source, length)
        return Beginning(source, length, NO_PAGE if copy is None else copy.source, written)

    def _is_far(self, slot: int, source: int) -> bool:
        return self._pages.shard(slot) != self._pages.shard(source)

    def _bring(self, slot: int, source: int, tokens: int) -> None:
        """The slot begins anew with so many tokens of a slot of another row shard."""
        self._pages.begin(slot, slot, 0)
        self._pages.hold(slot, tokens)
        pages = self._pages.pages_of(slot, tokens)
        self._shard_copies.plan(source, self._pages.pin(source, tokens), slot, pages, tokens)

    def use_row(self, slot: int) -> None:
        """In this round the row is still read, or written, for what the slot played before."""
        self._rows_in_use.add(slot)

    def _can_share(self, slot: int, shared: Shared) -> bool:
        """Whether there are pages for it: copying a part of one may need more than reading anew."""
        config, shard, episode = self._config, self._pages.shard(slot), self._episode(slot)
        length, is_far = shared.length, self._is_far(slot, shared.source)
        if not length % self._page_size and not is_far:
            return True
        if shared.source == slot and self._pages.has_alone(slot, length):
            # Nothing is copied.
            return True
        part = min(len(episode.queue) - length, config.chunk_size)
        tokens = min(length + part + self._most_sampled(episode), episode.most_tokens)
        own = pages_for(tokens, self._page_size)
        if not is_far:
            # The page that is copied stays for the round, whoever lets it go.
            own += 1 - length // self._page_size
        more = own - self._wanted(slot, episode)
        if more > self._spare[shard]:
            return False
        self._spare[shard] -= max(0, more)
        return True

    def hold(self, slot: int) -> None:
        """The slot has pages for what its episode appends and says in this round."""
        episode = self._episode(slot)
        tokens = min(episode.num_cached + self._most_sampled(episode), episode.most_tokens)
        self._pages.hold(slot, tokens)

    def end_inputs(self, counts: Sequence[int]) -> None:
        """So many tokens are appended to the slots in this round."""
        # Only now: no slot takes over what is appended in the same round.
        for slot, number in enumerate(counts):
            self._prefixes.append(slot, number)
        self._pages.end_round()
        self._prefixes.end_inputs()
        self._rows_in_use.clear()

    def give(self, session: Session) -> Session:
        """The session in which slots have their pages, and rows the ids that the host writes."""
        session = self._shard_copies.carry_out(session)
        if self._ids:
            writes = [
                RowIds(self._episode(slot).place, self._episode(slot).origin, ids)
                for slot, ids in sorted(self._ids.items())
            ]
            self._ids = {}
            state = session.engine.row_copies.write_ids(session.state, writes)
            session = dataclasses.replace(session, state=state)
        table = self._pages.as_array(pages_for(session.max_tokens, self._page_size))
        if self._given is not None and np.array_equal(table, self._given):
            return session
        self._given = table
        return dataclasses.replace(session, state=session.engine.give_pages(session.state, table))

    # When an episode is over.

    def end(self, slot: int) -> None:
        """The slot keeps its prompt for who begins alike, and gives up the rest."""
        self._host.drop(slot)
        self._prefixes.stop(slot)
        self._pages.end(slot, self._prefixes.num_kept(slot))

    def keep(self, version: int) -> Kept:
        """The rollout is over: what its caches hold for the next under the same weights."""
        self._prefixes.lose_rows()
        return Kept(prefixes=self._prefixes, version=version)
