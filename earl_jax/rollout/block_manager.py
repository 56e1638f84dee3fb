# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The block manager of a rollout: pages of the KV cache for its episodes, and preemption.

Every round each episode that takes part gets the pages that it may need. Where a row shard has too
few, slots without an episode give up the prompts that they keep; then episodes give up their
pages behind the windows of layers that have one; then the cache grows; and where
the budget does not let it grow, episodes are preempted: they give up all their pages, and go on
when there are some. The tokens that they had read are in host memory until then, or are read again
(preemption.py).

Priority decides which episodes go on: one that has begun comes before one that has not; of those
that have begun the longer comes first, of the others the one that was submitted first. The lowest
of a row shard is preempted, the highest of the preempted goes on first, and none overtakes it. So
the highest of a shard is never preempted: a shard always has an episode that goes on, which ends,
and so all of them do. And none is preempted again and again: it goes on only where there are pages
for all that it has to read and two rounds more, and these are there again only when another of its
shard ends or begins anew, the cache grows, or the mesh changes. Between two such times an episode
is preempted at most once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from earl_jax.engine.engine import Session
from earl_jax.engine.host_pages import HostPages
from earl_jax.engine.pages import NO_PAGE
from earl_jax.engine.prefixes import PrefixIndex, Shared
from earl_jax.models.layer_groups import pages_for
from earl_jax.rollout.config import CacheRules, RolloutConfig
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.host_sessions import IdleSessions
from earl_jax.rollout.preemption import (
    Work,
    choose_preemption,
    is_worth_sending,
    rates_of,
    work_of,
)
from earl_jax.rollout.shared_prompts import Beginning, SharedPrompts
from earl_jax.rollout.stats import RolloutStats

# grow(session, tokens, pages): a session for episodes of so many tokens (`relocate`), with so many
# pages in each row shard of the session's pool, or as many in all, if the budget allows. It has
# pages for one whole episode a row shard, and for the live ones' tokens (`PageTable.least_pages`).
Grow = Callable[[Session, int, int], Session]


class BlockManager:
    """The pages of one rollout's slots. Host-side state only."""

    def __init__(
        self,
        config: RolloutConfig,
        rules: CacheRules,
        session: Session,
        slots: Sequence[LiveEpisode | None],
        grow: Grow,
    ) -> None:
        """`slots` is the caller's list of the live episodes."""
        self._has_states = session.engine.config.model.has_states
        if self._has_states:
            # A state is that of all tokens read so far, and none is kept of a beginning: prompts
            # and replies cannot be gone on from, and pages alone are no cache to come back to.
            # Each slot reads all of its own sample.
            rules = dataclasses.replace(
                rules, share_prefixes=False, keep_replies=False, preemption="recompute"
            )
        self._config, self._rules, self._slots, self._grow = config, rules, slots, grow
        self._rule, self._round_tokens = session.engine.config.page_rule, config.round_tokens
        self._pages, self._layout = session.pages, session.engine.layout
        self._given: np.ndarray | None = None
        # Pages of each row shard that no episode needs in this round.
        self._spare: list[int] = []
        # Slots that give up their pages, which the next round has to rewind.
        self.stopped: set[int] = set()
        # Free slots, the one in front whose episode ended first.
        self._ended: dict[int, None] = {}
        self._host = HostPages(int(config.preemption_host_gib * 2**30), len(slots))
        # Pages of slots that are copied to the host before the next round.
        self._leaving: dict[int, list[int]] = {}
        # By slot whose episode is in host memory: its pages that were gone before, by group.
        self._gone: dict[int, list[int]] = {}
        self._least_tokens = min(config.chunk_size, session.engine.tile_width)
        self._idle = IdleSessions(self._host, self._leaving, self._least_tokens)
        self._num_preempted, self._recomputed_tokens, self._preemption = 0, 0, ""
        self._prefixes = self._open_prefixes(session)
        self._prompts = SharedPrompts(self._prefixes, slots)

    def _open_prefixes(self, session: Session) -> PrefixIndex:
        """Returns an index of no prompts."""
        return PrefixIndex(
            num_slots=len(self._slots),
            num_shards=self._pages.pool.shards,
            least_tokens=self._least_tokens,
            least_shared=self._pages.least_shared,
            is_worth_sending=functools.partial(
                is_worth_sending,
                setting=self._rules.copy_prefixes,
                work=self._work(session),
                rates=rates_of(session.engine.layout),
            ),
        )

    def count(self, stats: RolloutStats) -> None:
        """Writes the counts of the rollout."""
        stats.copied_tokens = self._prompts.copied_tokens
        stats.preempted_episodes = self._num_preempted
        stats.recomputed_tokens = self._recomputed_tokens
        stats.preempted_host_bytes = self._host.moved_bytes
        stats.preemption = self._preemption

    @property
    def crowded(self) -> set[int]:
        """Slots of the row shards whose episodes wait for pages."""
        shards = {
            self._pages.shard(slot)
            for slot, episode in enumerate(self._slots)
            if episode is not None and episode.preempted
        }
        return {slot for shard in shards for slot in self._pages.slots_of(shard)}

    # Before a round.

    def resume(self) -> None:
        """Lets preempted episodes go on where there are pages for all that they have to read."""
        waiting = [slot for slot, e in enumerate(self._slots) if e is not None and e.preempted]
        for shard in sorted({self._pages.shard(slot) for slot in waiting}):
            slots = [slot for slot in self._pages.slots_of(shard) if self._slots[slot] is not None]
            for slot in slots:
                # It has nothing to lose, and lines up.
                self._episode(slot).preempted |= self._is_new(slot) and self._episode(slot).has_work
            preempted = [slot for slot in slots if self._episode(slot).preempted]
            for slot in sorted(preempted, key=self._priority, reverse=True):
                alone = all(self._episode(other).preempted for other in slots)
                if not alone and self._short(shard, self._in_full(slot)) > 0:
                    break
                self._episode(slot).preempted = False

    def fit(self, session: Session) -> Session:
        """Returns a session with pages for the next round of episodes that are not preempted."""
        self._host.settle()
        self.adopt(session)
        if self._rules.keep_replies:
            new = {
                slot: episode.queue
                for slot, episode in enumerate(self._slots)
                if episode is not None and episode.fresh and episode.has_work
            }
            block = _block(session)
            self._idle.plan(new, block, self._pages, self._prefixes, self._give_up, self._free_kept)
        near = session.max_tokens - self._round_tokens
        long = [episode for episode in self._slots if episode is not None and episode.length > near]
        tokens = max((self._tokens_after_round(episode) for episode in long), default=0)
        short = [self._short(shard) for shard in range(session.pool.shards)]
        if tokens > session.max_tokens or max(short) > 0:
            pages = session.pool.pages + max(0, *short)
            session = self._grow(session, max(tokens, session.max_tokens), pages)
            self.adopt(session)
            short = [self._short(shard) for shard in range(session.pool.shards)]
        for shard in range(session.pool.shards):
            while short[shard] > 0:
                self._preempt(session, shard)
                short[shard] = self._short(shard)
        self._spare = [-number for number in short]
        return self._copy(session)

    def widen(self, session: Session, tokens: int) -> Session:
        """Returns a session whose rows have at least so many tokens."""
        if tokens > session.max_tokens:
            session = self._grow(session, tokens, session.pool.pages)
            self.adopt(session)
        return session

    def adopt(self, session: Session) -> None:
        """Goes on with the pages of a session that the live episodes have moved to."""
        if session.pages is self._pages:
            return
        before, self._pages, self._given = self._pages, session.pages, None
        same = before.pool.shards == session.pool.shards
        assert same or not self._leaving, "pages that leave are numbered within their row shard"
        self._prompts.move(before, session.pages)
        layout, self._layout = self._layout, session.engine.layout
        if layout.spans_processes and self._layout != layout:
            # Each process has its devices' pieces, which another mesh cuts otherwise.
            self._lose_host_pages()

    def _lose_host_pages(self) -> None:
        """Lets episodes read again what is in host memory."""
        self._idle.store.clear()
        for slot in self._host.slots:
            self._host.drop(slot)
            self._recomputed_tokens += self._episode(slot).rewind()
            self.stopped.add(slot)

    def _copy(self, session: Session) -> Session:
        """Copies pages to the host and back, as was decided."""
        copies = session.engine.page_copies
        state = self._host.copy_out(copies, session.state, self._leaving)
        self._leaving.clear()
        coming = self._idle.carry_out(self._pages, self._prefixes)
        awake = dict.fromkeys(coming, False)
        for slot in [slot for slot in self._host.slots if slot not in coming]:
            episode = self._episode(slot)
            if episode.begins:
                # A new sample needs nothing of the old cache.
                self._host.drop(slot)
            elif not episode.preempted:
                coming[slot] = self._hold_again(slot, episode)
                awake[slot] = episode.in_turn and not len(episode.queue)
        state = self._host.copy_back(copies, state, coming, awake)
        return dataclasses.replace(session, state=state)

    def _hold_again(self, slot: int, episode: LiveEpisode) -> list[int]:
        """Gives an episode from the host pages for the next round. Returns those to write back."""
        pages, tokens, before = self._pages, episode.num_written, self._gone.pop(slot)
        gone = self._rule.num_gone(self._tokens_wanted(slot, episode))
        pages.skip(slot, [max(each) for each in zip(before, gone, strict=True)])
        pages.hold(slot, tokens)
        return pages.pages_again(slot, tokens, before)

    def _tokens_after_round(self, episode: LiveEpisode) -> int:
        return min(episode.length + self._most_sampled(episode), episode.most_tokens)

    def _most_sampled(self, episode: LiveEpisode) -> int:
        """Returns the most tokens that the episode may generate in a round."""
        left = episode.limits.max_turn_tokens - len(episode.reply)
        return min(self._round_tokens, left)

    def _tokens_wanted(self, slot: int, episode: LiveEpisode) -> int:
        """Returns the most tokens that the episode may have in its cache behind the next round."""
        own = self._idle.own(slot)
        there = own or episode.num_cached
        tokens = there + min(len(episode.queue) - own, self._config.chunk_size)
        # Behind a sample that is read again while its environment is at work.
        tokens += episode.rewinds and episode.waits
        return min(tokens + self._most_sampled(episode), episode.most_tokens)

    def _may_lack(self, slots: Sequence[int]) -> list[int]:
        """Returns the slots of these whose episodes begin, or may lack pages for a round.

        Those are few in most rounds. The others need not be asked one by one, which takes longer.
        """
        episodes, capacity, more = self._slots, self._pages.capacity, self._round_tokens
        return [
            slot
            for slot in slots
            if (e := episodes[slot]) is not None
            and (e.fresh or e.forks or e.rewinds or e.length - e.origin + more > capacity[slot])
        ]

    def _wanted(self, slot: int, episode: LiveEpisode) -> int:
        """Returns how many pages the episode may need for a round beyond those that it has."""
        tokens = self._tokens_wanted(slot, episode)
        if episode.begins and not self._idle.own(slot):
            return self._rule.most_pages(tokens)
        return self._pages.needed(slot, tokens)

    def _to_peak(self, slot: int, tokens: int) -> int:
        """Returns how many pages the slot lacks of the most that so many tokens may need.

        Behind a window it may have one page less a group now than in another round.
        """
        peak = self._rule.most_pages(tokens) - self._pages.num_held(slot)
        return max(peak, self._pages.needed(slot, tokens))

    def _in_full(self, slot: int) -> int:
        """Returns how many pages the episode lacks for all it has to read, and for two rounds."""
        episode = self._episode(slot)
        tokens = episode.num_cached + len(episode.queue) + 2 * self._most_sampled(episode)
        tokens = min(tokens, episode.most_tokens)
        return self._rule.most_pages(tokens) if episode.begins else self._to_peak(slot, tokens)

    def _short(self, shard: int, resuming: int | None = None) -> int:
        """Returns how many pages the row shard lacks for the next round, idle slots' included.

        For an episode that is to go on with `resuming` pages, the pages count as taken that others
        of the shard still need to read again what they had read.
        """
        slots = self._pages.slots_of(shard)
        asked = slots if resuming is not None else self._may_lack(slots)
        asked = [slot for slot in asked if self._slots[slot]]
        playing = [(slot, self._episode(slot)) for slot in asked if self._needs_pages(slot)]

        def total() -> int:
            if resuming is None:
                return sum(self._wanted(slot, episode) for slot, episode in playing)
            return resuming + sum(self._at_most(slot, episode) for slot, episode in playing)

        wanted = total()
        if wanted > self._pages.num_free(shard):
            self._free_kept(shard, wanted)
        if self._rule.has_windows and wanted > self._pages.num_free(shard):
            for slot in slots:
                self._trim(slot)
            wanted = total()
        return wanted - self._pages.num_free(shard)

    def _at_most(self, slot: int, episode: LiveEpisode) -> int:
        """Returns how many more pages the episode may need before another goes on beside it."""
        wanted = self._wanted(slot, episode)
        if not episode.begins:
            wanted = max(wanted, self._to_peak(slot, self._tokens_wanted(slot, episode)))
        if episode.again or slot in self._host:
            wanted = max(wanted, self._in_full(slot))
        return wanted

    def _trim(self, slot: int) -> None:
        """Frees the slot's pages behind windows; from now on fewer others can begin with them."""
        episode = self._slots[slot]
        # One that is to begin anew, but not from what it has, has pages of an episode before.
        if episode is not None and not (episode.begins and not self._idle.own(slot)):
            self._pages.trim(slot, self._tokens_wanted(slot, episode))

    def _free_kept(self, shard: int, wanted: int) -> None:
        """Gives up what slots without an episode keep until so many pages are free, if it can."""
        for slot in self.by_age(self._pages.slots_of(shard)):
            if wanted <= self._pages.num_free(shard):
                return
            episode = self._slots[slot]
            idle = episode is None or episode.begins and not self._idle.own(slot)
            if self._pages.num_held(slot) and idle:
                if self._rules.keep_replies:
                    self._idle.move_aside(slot, 0, self._pages, self._prefixes)
                self._give_up(slot)

    def by_age(self, slots: Sequence[int]) -> list[int]:
        """Returns these slots in the order in which what they keep is given up.

        Those that keep nothing come first, then the one whose episode ended the longest ago.
        """
        ages = {slot: age for age, slot in enumerate(self._ended)}
        return sorted(slots, key=lambda slot: (self._pages.num_held(slot) > 0, ages.get(slot, -1)))

    def _needs_pages(self, slot: int) -> bool:
        """Returns whether the slot's episode plays the next round, or comes back from the host.

        It comes back while its environment is still at work, too.
        """
        episode = self._episode(slot)
        return episode.has_work or slot in self._host and not (episode.preempted or episode.begins)

    def _give_up(self, slot: int) -> None:
        self._idle.cancel(slot)
        self._pages.keep(slot, 0)
        self._prompts.forget(slot)

    def _preempt(self, session: Session, shard: int) -> None:
        """Preempts the episode of the shard with the lowest priority."""
        slots = self._pages.slots_of(shard)
        playing = [
            slot
            for slot in slots
            if (e := self._slots[slot]) and not e.preempted
            if self._needs_pages(slot) or self._pages.num_held(slot)
        ]
        assert len(playing) > 1, "a pool holds at least one episode a row shard"
        slot = min(playing, key=self._priority)
        episode = self._episode(slot)
        episode.preempted = True
        if slot in self._host:
            # It was about to come back.
            return
        self._num_preempted += not self._is_new(slot)
        self._trim(slot)
        if not self._goes_to_host(session, slot):
            self._recomputed_tokens += episode.rewind()
            self.stopped.add(slot)
            self._give_up(slot)
            return
        self._leaving[slot] = self._pages.pages_of(slot, episode.num_written)
        self._gone[slot] = self._pages.num_gone(slot)
        self._give_up(slot)
        # It comes back without those that are gone.
        self._pages.skip(slot, self._gone[slot])

    def _priority(self, slot: int) -> tuple[bool, int, int]:
        """Returns the priority of the slot's episode in its row shard."""
        episode, is_new = self._episode(slot), self._is_new(slot)
        # New ones by age: in an open queue others with longer prompts may come without end.
        return not is_new, 0 if is_new else episode.length, -episode.ticket

    def _is_new(self, slot: int) -> bool:
        """Returns whether the episode has read nothing yet."""
        return self._episode(slot).fresh

    def _goes_to_host(self, session: Session, slot: int) -> bool:
        """Returns whether its pages are copied to the host, and not read again."""
        tokens = self._episode(slot).num_written
        if self._rules.preemption == "recompute" or not tokens:
            return False
        pages = [*map(len, self._leaving.values()), len(self._pages.pages_of(slot, tokens))]
        if not self._idle.store.make_space(*_block(session), pages):
            return False
        if self._rules.preemption == "host":
            return True
        rates = rates_of(session.engine.layout)
        choice = choose_preemption(tokens, self._work(session), rates)
        self._preemption = choice.reason
        return choice.where == "host"

    def _work(self, session: Session) -> Work:
        block_bytes, block_pages = _block(session)
        block_tokens = block_pages * self._rule.page_size // self._rule.num_groups
        engine = session.engine
        return work_of(engine.config, engine.layout, block_bytes, block_tokens)

    def _episode(self, slot: int) -> LiveEpisode:
        episode = self._slots[slot]
        assert episode is not None
        return episode

    # While a round's inputs are made.

    def begin(self, slot: int) -> Beginning | None:
        """Begins the slot anew with its episode's queue. None: it waits for another slot."""
        self._ended.pop(slot, None)
        if self._rules.share_prefixes:
            queue, own = self._episode(slot).queue, self._idle.own(slot)
            begins = self._prompts.begin(slot, self._pages, queue, self._fits, own)
            if begins is not None:
                self._supersede(begins.source, begins.shared)
            return begins
        self._pages.begin(slot, slot, 0)
        return Beginning(slot, 0, [NO_PAGE] * self._rule.num_groups, written=False)

    def _supersede(self, source: int, shared: int) -> None:
        """Lets a free slot be used next if another slot has taken over all that it keeps."""
        # One token of a prompt is always left to append.
        if source in self._ended and self._prompts.num_kept(source) <= shared + 1:
            self._ended = {source: None, **self._ended}

    def _fits(self, slot: int, shared: Shared) -> bool:
        """Returns whether there are pages to share: copying one may need more than reading anew.

        A slot that was to go on from its own pages is given no others in place of those that it
        leaves: another slot may have taken them over in this round.
        """
        config, shard, episode = self._config, self._pages.shard(slot), self._episode(slot)
        length, is_far = shared.length, self._pages.shard(slot) != self._pages.shard(shared.source)
        if shared.source == slot and self._pages.has_alone(slot, length):
            # Nothing is copied, and the slot's other pages serve it too.
            return True
        page_size, groups = self._rule.page_size, self._rule.num_groups
        is_whole = not length % page_size
        if is_whole and not is_far and not self._idle.own(slot):
            return True
        part = min(len(episode.queue) - length, config.chunk_size)
        tokens = min(length + part + self._most_sampled(episode), episode.most_tokens)
        needed = groups * pages_for(tokens, page_size)
        if is_far:
            needed -= sum(self._pages.num_gone(shared.source))
        else:
            # The pages that are copied stay for the round, even if their slot gives them up.
            needed += groups * ((not is_whole) - length // page_size)
        more = needed - self._wanted(slot, episode)
        if more > self._spare[shard]:
            return False
        self._spare[shard] -= max(0, more)
        return True

    def use_row(self, slot: int) -> None:
        """Notes that the slot's row is still read or written in this round."""
        self._prompts.use_row(slot)

    def growing(self) -> set[int]:
        """Returns the slots that may get pages in this round (`hold`), or give some up."""
        slots = range(len(self._slots))
        return set(slots if self._rule.has_windows else self._may_lack(slots))

    def hold(self, slot: int) -> None:
        """Gives the slot pages for the tokens that its episode adds in this round."""
        episode = self._episode(slot)
        tokens = min(episode.num_cached + self._most_sampled(episode), episode.most_tokens)
        self._pages.hold(slot, tokens)

    def end_inputs(self, counts: np.ndarray) -> None:
        """Notes that so many tokens are appended to the slots in this round."""
        self._prompts.end_inputs(counts)
        self._idle.end_inputs()
        self._pages.end_round()

    def give(self, session: Session) -> Session:
        """Returns the session in which slots have their pages, and the ids of shared prompts."""
        engine = session.engine
        state = self._prompts.carry_out(engine.page_copies, engine.row_copies, session.state)
        table = self._pages.as_array(pages_for(session.max_tokens, self._rule.page_size))
        if self._given is None or not np.array_equal(table, self._given):
            self._given, state = table, engine.give_pages(state, table)
        return dataclasses.replace(session, state=state)

    def change_weights(self, *, recompute: bool) -> None:
        """Lets no episode take over what the weights before have read.

        With `recompute` live episodes read all of their samples again.
        """
        self._idle.store.clear()
        for slot, episode in enumerate(self._slots):
            if recompute and episode is not None:
                self._host.drop(slot)
                self._recomputed_tokens += episode.rewind()
                self.stopped.add(slot)
            if recompute or episode is None:
                self._pages.keep(slot, 0)
            self._prompts.forget(slot)

    def discard(self, slot: int) -> None:
        """Notes that the last tokens in the slot's cache count no more, of which its turn goes on.

        Pages are written anew from there. A state cannot go back: all of the sample is read again.
        """
        if self._has_states:
            self._recomputed_tokens += self._episode(slot).rewind()
            self.stopped.add(slot)
            self._give_up(slot)

    def lose_row(self, row: int) -> None:
        """Notes that the row is written for another episode."""
        self._prompts.lose_row(row)

    # When an episode is over.

    def abort(self, slot: int) -> None:
        """Ends the slot's episode, which may be in the middle of its turn."""
        self.stopped.add(slot)
        self.end(slot)

    def end(self, slot: int, episode: LiveEpisode | None = None) -> None:
        """Ends the slot's episode: its prompt is kept for others, its other pages are free.

        With the rule `keep_replies` all that is in its cache is kept; None: the prompt alone.
        """
        self._host.drop(slot)
        self._idle.cancel(slot)
        replies = episode.cached_ids if episode is not None and self._rules.keep_replies else ()
        self._pages.end(slot, self._prompts.end(slot, replies))
        self._ended.pop(slot, None)
        self._ended[slot] = None

    def forget(self, slot: int) -> None:
        """Gives up what a slot keeps whose episode is over: no other takes it over."""
        self._give_up(slot)


def _block(session: Session) -> tuple[int, int]:
    """Returns the bytes of a block of one row shard, and how many pages of it a block has."""
    copies = session.engine.page_copies
    return copies.block_bytes(session.state), copies.pages_a_call
