# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of layers with one window, and the pages that a row has of each group.

A layer with a window reads the last tokens only. So that an episode gives up the pages behind a
window and keeps those of full attention, layers are grouped by window, and a row has a list of
pages for each group. All groups have as many layers, and a page holds the tokens of any one of
them: so there is one pool, and memory moves between groups as contexts grow (as vLLM's hybrid KV
cache manager does it). Pure arithmetic, for the engine and for the selector.

Example: of six layers with the windows 8 8 0 8 8 0 groups have two layers: 0 1, 3 4 and 2 5. With
pages of 4 tokens an episode of 1,000 tokens has 250 pages for the last group, and 2 or 3 for each
of the others.
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

# Longer contexts do not count.
MOST_TOKENS = 2**31


class LayerGroups(NamedTuple):
    """The layers of each group, in their order, and the window of each group (0: none)."""

    layers: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...]

    @property
    def size(self) -> int:
        """Layers of a group: arrays of the pool. The last group of a window may have fewer."""
        return max(map(len, self.layers))

    def place(self, layer: int) -> tuple[int, int]:
        """Returns the group of a layer, and which of the group's layers it is."""
        [group] = [number for number, layers in enumerate(self.layers) if layer in layers]
        return group, self.layers[group].index(layer)


def group_layers(windows: Sequence[int]) -> LayerGroups:
    """Returns the groups of layers with these windows, 0 for full attention.

    A group has as many layers as have full attention, where no window has fewer: the arrays of a
    page that a group leaves empty are then those of windows. Else as many as divide all numbers.
    """
    kinds: dict[int, tuple[int, ...]] = {window: () for window in windows}
    for layer, window in enumerate(windows):
        kinds[window] = (*kinds[window], layer)
    numbers = [len(layers) for layers in kinds.values()]
    full = len(kinds.get(0, ()))
    size = full if full and full == min(numbers) else math.gcd(*numbers)
    groups = [
        (layers[first : first + size], window)
        for window, layers in sorted(kinds.items())
        for first in range(0, len(layers), size)
    ]
    return LayerGroups(*zip(*groups, strict=True))


def pages_for(tokens: int, page_size: int) -> int:
    """Returns the number of pages that hold so many tokens."""
    return -(-tokens // page_size)


class PageRule(NamedTuple):
    """The pages of an episode, each of `page_size` tokens of one group of layers.

    Groups have these `windows` (0: none), and beside them keep the `round_tokens` that a round may
    add: so the pages that are needed at its end hold all that is read from its begin on.
    """

    page_size: int
    windows: tuple[int, ...] = (0,)
    round_tokens: int = 0

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """True if not all groups keep all tokens."""
        return self.windows != (0,)

    def num_gone(self, tokens: int) -> list[int]:
        """Returns how many of its first pages an episode of so many tokens needs no more."""
        behind = tokens - self.round_tokens
        return [
            max(0, behind - window) // self.page_size if window else 0 for window in self.windows
        ]

    def most_pages(self, tokens: int) -> int:
        """Returns the most pages, of all groups, that an episode needs while it grows so long."""
        return int(self._sum_of(pages_for(tokens, self.page_size), 1))

    def most_tokens(self, pages: int) -> int:
        """Returns how long an episode may become with so many pages; at most MOST_TOKENS."""
        numbers = range(MOST_TOKENS // self.page_size)
        most = bisect.bisect_right(
            numbers, pages, key=lambda number: self.most_pages(number * self.page_size)
        )
        return (most - 1) * self.page_size

    def pages_of(self, tokens: float, episodes: float) -> float:
        """Returns the pages of so many equally long episodes that have so many tokens together.

        Half of each episode's last page is empty.
        """
        return self._sum_of(tokens / self.page_size + episodes / 2, episodes)

    def _sum_of(self, whole: float, episodes: float) -> float:
        """Returns the pages of all groups, of `whole` a group but for what windows need no more."""
        if not self.has_windows:
            return whole
        kept = (pages_for(w + self.round_tokens, self.page_size) + 1 for w in self.windows)
        numbers = zip(self.windows, kept, strict=True)
        return sum(min(whole, episodes * most) if window else whole for window, most in numbers)

    def tokens_in(self, pages: int, episodes: int) -> int:
        """Returns the most tokens that so many episodes have together in so many pages."""
        numbers = range(episodes * MOST_TOKENS)
        most = bisect.bisect_right(numbers, pages, key=lambda n: self.pages_of(n, episodes))
        return max(0, most - 1)


def make_page_rule(
    windows: Sequence[int], page_size: int, chunk_size: int, sampled_tokens: int
) -> PageRule:
    """Returns the rule for layers with these windows, by what a round appends and samples.

    Behind a turn's last token, which counts but is read only when the next one comes.
    """
    return PageRule(page_size, group_layers(windows).windows, chunk_size + sampled_tokens + 1)
