# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Turns restricted to certain replies or tokens: a tree of token ids, walked on the devices.

The host sends the tree of a turn's replies with the inputs that begin the turn; from then on the
devices know which tokens may come next, for as many bursts as the turn takes.

Example: the replies (5, 0), (5, 7, 0) and (6, 0), of which 0 ends a turn, are the branches

    0: from 0 by 5 to 1    1: from 1 by 0 to 2    2: from 1 by 7 to 3    3: from 3 by 0 to 4
    4: from 0 by 6 to 5    5: from 5 by 0 to 6

A turn of certain tokens only has branches that lead from the node ALWAYS to itself.

What is learnt from says for each token which ones it was chosen among (`Experience.allowed`), so
that the trainer scores it under the same distribution.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.settings.errors import InputError

# The node of an unrestricted turn; and the parent of an unused branch.
FREE = -1
_NO_BRANCH = -2
# The node of a turn of certain tokens only, which it never leaves.
ALWAYS = -3


class Choices(NamedTuple):
    """The allowed replies of B slots: trees of at most J branches, i32[B,J] and i32[B].

    Branch j leaves from node `parents[j]` by token `tokens[j]`, and leads to node j + 1; node 0 is
    the root. Branches that leave from one node are in the order of their tokens. `node` is the
    turn's own, FREE where it is unrestricted.
    """

    parents: Any
    tokens: Any
    node: Any


def no_choices(slots: int, branches: int) -> Choices:
    """Returns unrestricted choices for every slot, as numpy arrays."""
    return Choices(
        parents=np.full((slots, branches), _NO_BRANCH, np.int32),
        tokens=np.zeros((slots, branches), np.int32),
        node=np.full(slots, FREE, np.int32),
    )


@functools.lru_cache(maxsize=1024)
def choice_tree(replies: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the branches of the tree of these replies: `parents` and `tokens`, see `Choices`."""
    nodes: dict[tuple[int, int], int] = {}
    for reply in sorted(replies):
        node = 0
        for token in reply:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    branches = np.array(list(nodes), np.int32).reshape(-1, 2)
    return branches[:, 0], branches[:, 1]


def choice_width(replies: tuple[tuple[int, ...], ...]) -> int:
    """Returns how many tokens these replies have: a token of any turn of some is one of so many."""
    return len({token for reply in replies for token in reply})


def check_choices(replies: tuple[tuple[int, ...], ...], most: int, width: int = 0) -> None:
    """Raises ValueError unless the tree of these replies has at most `most` branches.

    And from each node at most `width`, if that is not 0.
    """
    parents, _ = choice_tree(replies)
    if len(parents) > most:
        raise InputError(
            f"the replies that the environment allows make a tree of {len(parents)} branches; the "
            f"engine takes {most} (SlotRules.choice_branches)"
        )
    widest = int(np.bincount(parents).max(initial=0))
    if width and widest > width:
        raise InputError(
            f"the replies that the environment allows go on with one of {widest} tokens; rows of "
            f"experience hold {width} (SlotRules.choice_width), those of its all_choices()"
        )


def check_allowed(token_ids: tuple[int, ...], most: int, vocab_size: int) -> None:
    """Raises ValueError unless these are ids, and at most so many of them."""
    strange = [token for token in token_ids if not 0 <= token < vocab_size]
    if strange:
        raise InputError(
            f"the environment's allowed_token_ids hold {strange[0]}; ids go from 0 to "
            f"{vocab_size - 1}"
        )
    if len(token_ids) > most:
        raise InputError(
            f"the environment's allowed_token_ids are {len(token_ids)} with the end of turn; the "
            f"engine takes {most} (SlotRules.choice_branches, choice_width)"
        )


def set_choices(choices: Choices, slot: int, replies: tuple[tuple[int, ...], ...]) -> None:
    """Writes the tree of one slot into rows on the host."""
    parents, tokens = choice_tree(replies)
    choices.parents[slot, : len(parents)], choices.tokens[slot, : len(tokens)] = parents, tokens
    choices.node[slot] = 0


def set_allowed(choices: Choices, slot: int, token_ids: Iterable[int]) -> None:
    """Writes the only allowed tokens of one slot into rows on the host."""
    tokens = sorted(set(token_ids))
    choices.parents[slot, : len(tokens)], choices.node[slot] = ALWAYS, ALWAYS
    choices.tokens[slot, : len(tokens)] = tokens


def set_turn(
    choices: Choices | None,
    slot: int,
    replies: tuple[tuple[int, ...], ...],
    token_ids: tuple[int, ...],
) -> None:
    """Calls `set_choices` or `set_allowed` for a turn that is restricted."""
    if choices is not None and replies:
        set_choices(choices, slot, replies)
    elif choices is not None and token_ids:
        set_allowed(choices, slot, token_ids)


def next_branches(choices: Choices) -> jax.Array:
    """Returns the branches by which each slot's reply may go on, bool[B,J]."""
    return choices.parents == choices.node[:, None]


def allowed_ids(choices: Choices, width: int) -> tuple[jax.Array, ...]:
    """Returns the tokens that each slot chooses among: 1 + id, `width` arrays i32[B].

    They are 0 behind the last one, and all 0 in unrestricted slots. There are at most `width`.
    """
    next_BJ = next_branches(choices)
    rank_BJ = jnp.cumsum(next_BJ, axis=1) - 1

    def at(rank: int) -> jax.Array:
        return jnp.sum(jnp.where(next_BJ & (rank_BJ == rank), choices.tokens + 1, 0), axis=1)

    return tuple(at(rank) for rank in range(width))


def allowed_table(
    reply: Sequence[int],
    replies: tuple[tuple[int, ...], ...],
    token_ids: tuple[int, ...],
    width: int,
) -> np.ndarray:
    """Returns what `allowed_ids` are for each token of a reply, i32[tokens, width], on the host.

    The turn was restricted to `replies`, or to `token_ids`, or not at all.
    """
    table = np.zeros((len(reply), width), np.int32)
    for place, row in enumerate(table):
        before = tuple(reply[:place])
        longer = (each for each in replies if len(each) > place and each[:place] == before)
        ids = sorted({each[place] for each in longer} | {*token_ids})
        row[: len(ids)] = [1 + token for token in ids]
    return table


def walk(choices: Choices, tokens_B: jax.Array, moving_B: jax.Array) -> Choices:
    """Moves the nodes of the `moving` slots along the tokens that they sampled."""
    taken_BJ = next_branches(choices) & (choices.tokens == tokens_B[:, None])
    node_B = jnp.argmax(taken_BJ, axis=1).astype(jnp.int32) + 1
    goes_on_B = jnp.any(choices.parents == node_B[:, None], axis=1)
    node_B = jnp.where(goes_on_B, node_B, FREE)
    return choices._replace(node=jnp.where(moving_B & (choices.node >= 0), node_B, choices.node))
