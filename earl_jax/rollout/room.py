# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Room in the KV cache for the episodes of a rollout: pages, prompts taken over, and parking.

Every round each episode that takes part gets the pages that it may need. Where a lane has too few,
slots that nobody plays in give up what they keep for others; then the cache grows; and where the
budget does not let it grow, episodes are parked: they give up their pages, and are read again when
there are some. The longest go on, so that what is read again is little.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from earl_jax.rollout.config import RolloutConfig
from earl_jax.rollout.episode import LiveEpisode
from earl_jax.rollout.orders import NO_PAGE
from earl_jax.rollout.pages import PageTable, pages_for
from earl_jax.rollout.prefixes import PrefixIndex, Shared
from earl_jax.rollout.seat import Seat

# make_room(seat, tokens, pages): a seat whose rows hold so many tokens, with so many pages a lane
# if the budget allows, and never fewer than it had.
MakeRoom = Callable[[Seat, int, int], Seat]


class Beginning(NamedTuple):
    """What a slot begins with: `shared` tokens of slot `source`, page `copied` among them."""

    source: int
    shared: int
    copied: int


class CacheRoom:
    """The pages of one rollout's slots. Host-side state only."""

    def __init__(
        self,
        config: RolloutConfig,
        seat: Seat,
        slots: Sequence[LiveEpisode | None],
        make_room: MakeRoom,
    ) -> None:
        """`slots` is the caller's list, which says who plays where."""
        self._config, self._slots, self._make_room = config, slots, make_room
        self._page_size = seat.engine.config.page_size
        self._pages = PageTable(seat.pool, num_slots=len(slots), page_size=self._page_size)
        self._given: np.ndarray | None = None
        # Pages of each lane that nobody wants in this round.
        self._spare = [0] * seat.pool.lanes
        # Slots that give up their pages, and must be told before the next round.
        self.stopped: set[int] = set()
        self.num_parked, self.recomputed_tokens = 0, 0
        self.new_weights()

    def new_weights(self) -> None:
        """What old weights have read is not for episodes that begin under new ones."""
        self._prefixes = PrefixIndex(
            num_slots=len(self._slots),
            num_lanes=self._pages.pool.lanes,
            chunk_size=self._config.chunk_size,
        )

    # Before a round.

    def resume(self) -> None:
        """Parked episodes go on where there are pages for all that they have to read."""
        for lane in range(self._pages.pool.lanes):
            slots = [slot for slot in self._pages.slots_of(lane) if self._slots[slot] is not None]
            parked = [slot for slot in slots if self._episode(slot).parked]
            for slot in sorted(parked, key=lambda slot: -self._episode(slot).length):
                alone = all(self._episode(other).parked for other in slots)
                needed = len(self._episode(slot).queue) + 2 * self._most_said(self._episode(slot))
                spare = -self._short(lane) - pages_for(needed, self._page_size)
                if alone or spare >= 0:
                    self._episode(slot).parked = False

    def fit(self, seat: Seat) -> Seat:
        """A seat with room for the next round of every episode that is not parked."""
        live = [episode for episode in self._slots if episode is not None]
        tokens = max((self._room_for(episode) for episode in live), default=0)
        short = max(self._short(lane) for lane in range(seat.pool.lanes))
        if tokens > seat.places or short > 0:
            pages = seat.pool.pages + max(0, short)
            seat = self._make_room(seat, max(tokens, seat.places), pages)
            self._pages.grow(seat.pool)
            # The engine made its own table.
            self._given = None
        for lane in range(seat.pool.lanes):
            while (short := self._short(lane)) > 0:
                self._park(lane)
            self._spare[lane] = -short
        return seat

    def _room_for(self, episode: LiveEpisode) -> int:
        return min(episode.length + self._most_said(episode), episode.most_tokens)

    def _most_said(self, episode: LiveEpisode) -> int:
        """Tokens that the episode may say in a round."""
        return min(self._config.round_tokens, episode.limits.max_turn_tokens)

    def _wanted(self, slot: int, episode: LiveEpisode) -> int:
        """Pages that the episode may need for a round, beyond those that it has."""
        tokens = episode.num_cached + min(len(episode.queue), self._config.chunk_size)
        tokens = min(tokens + self._most_said(episode), episode.most_tokens)
        if episode.begins:
            return pages_for(tokens, self._page_size)
        return self._pages.missing(slot, tokens)

    def _short(self, lane: int) -> int:
        """Pages that the lane lacks for the next round; idle slots give up theirs before."""
        slots = self._pages.slots_of(lane)
        playing = [(slot, e) for slot in slots if (e := self._slots[slot]) and e.has_work]
        wanted = sum(self._wanted(slot, episode) for slot, episode in playing)
        for slot in slots:
            if wanted <= self._pages.num_free(lane):
                break
            episode = self._slots[slot]
            if self._pages.num_held(slot) and (episode is None or episode.begins):
                self._give_up(slot)
        return wanted - self._pages.num_free(lane)

    def _give_up(self, slot: int) -> None:
        self._pages.keep(slot, 0)
        self._prefixes.forget(slot)

    def _park(self, lane: int) -> None:
        """The shortest of the lane's episodes gives up its pages."""
        slots = self._pages.slots_of(lane)
        playing = [slot for slot in slots if (e := self._slots[slot]) and not e.parked]
        assert len(playing) > 1, "a pool holds at least one episode a lane"
        slot = min(playing, key=lambda slot: (self._episode(slot).length, -slot))
        episode = self._episode(slot)
        self.recomputed_tokens += episode.rewind()
        self.num_parked += 1
        episode.parked = True
        self.stopped.add(slot)
        self._give_up(slot)

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
            if self._can_share(slot, shared.length):
                source, length = shared.source, shared.length
            self._prefixes.begin(slot, prompt, Shared(source=source, length=length))
        copy = self._pages.begin(slot, source, length)
        return Beginning(source, length, NO_PAGE if copy is None else copy.source)

    def _can_share(self, slot: int, length: int) -> bool:
        """Whether there are pages for it: copying a part of one may need more than reading anew."""
        config, lane, episode = self._config, self._pages.lane(slot), self._episode(slot)
        if not length % self._page_size:
            return True
        part = min(len(episode.queue) - length, config.chunk_size)
        tokens = min(length + part + self._most_said(episode), episode.most_tokens)
        own = pages_for(tokens, self._page_size) - length // self._page_size
        # The page that is copied stays for the round, whoever lets it go.
        more = own + 1 - self._wanted(slot, episode)
        if more > self._spare[lane]:
            return False
        self._spare[lane] -= max(0, more)
        return True

    def hold(self, slot: int) -> None:
        """The slot has pages for what its episode appends and says in this round."""
        episode = self._episode(slot)
        tokens = min(episode.num_cached + self._most_said(episode), episode.most_tokens)
        self._pages.hold(slot, tokens)

    def end_orders(self, counts: Sequence[int]) -> None:
        """So many tokens are appended to the slots in this round."""
        # Only now: no slot takes over what is appended in the same round.
        for slot, number in enumerate(counts):
            self._prefixes.append(slot, number)
        self._pages.end_round()

    def give(self, seat: Seat) -> Seat:
        """The seat in which slots have their pages."""
        table = self._pages.as_array(pages_for(seat.places, self._page_size))
        if self._given is not None and np.array_equal(table, self._given):
            return seat
        self._given = table
        return dataclasses.replace(seat, state=seat.engine.give_pages(seat.state, table))

    # When an episode is over.

    def end(self, slot: int) -> None:
        """The slot keeps its prompt for who begins alike, and gives up the rest."""
        self._prefixes.stop(slot)
        self._pages.keep(slot, self._prefixes.num_kept(slot))
