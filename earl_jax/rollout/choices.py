# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Turns that must be one of some replies: a tree of token ids, walked on the devices.

The host sends the tree of a turn's replies with the order to speak; from then on the devices know
which tokens may come next, for as many bursts as the turn takes.

Example: the replies (5, 0), (5, 7, 0) and (6, 0), of which 0 ends a turn, are the branches

    0: from 0 by 5 to 1    1: from 1 by 0 to 2    2: from 1 by 7 to 3    3: from 3 by 0 to 4
    4: from 0 by 6 to 5    5: from 5 by 0 to 6

Or of certain tokens only: their branches lead from the node ALWAYS to itself.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A turn that may be anything is at no node; places of a row without a branch leave from no node.
FREE = -1
_NO_BRANCH = -2
# Where a turn stands, and stays, that may have certain tokens only.
ALWAYS = -3


class Choices(NamedTuple):
    """What each of B slots may say: trees of at most J branches, i32[B,J] and i32[B].

    Branch j leaves from node `parents[j]` by token `tokens[j]`, and leads to node j + 1; node 0 is
    the root. `node` is where the turn stands, FREE where it may be anything.
    """

    parents: Any
    tokens: Any
    node: Any


def no_choices(slots: int, branches: int) -> Choices:
    """Every slot may say anything, as numpy arrays."""
    return Choices(
        parents=np.full((slots, branches), _NO_BRANCH, np.int32),
        tokens=np.zeros((slots, branches), np.int32),
        node=np.full(slots, FREE, np.int32),
    )


@functools.lru_cache(maxsize=4096)
def choice_tree(replies: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """The branches of the tree of these replies: `parents` and `tokens`, see `Choices`."""
    nodes: dict[tuple[int, int], int] = {}
    for reply in replies:
        node = 0
        for token in reply:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    branches = np.array(list(nodes), np.int32).reshape(-1, 2)
    return branches[:, 0], branches[:, 1]


def check_choices(replies: tuple[tuple[int, ...], ...], room: int) -> None:
    """Raises ValueError unless the tree of these replies has at most `room` branches."""
    branches = len(choice_tree(replies)[0])
    if branches > room:
        raise ValueError(
            f"the replies that the environment allows make a tree of {branches} branches; the "
            f"engine has room for {room} (SlotRules.choice_branches)"
        )


def set_choices(choices: Choices, slot: int, replies: tuple[tuple[int, ...], ...]) -> None:
    """Writes the tree of one slot, for which there is room, into rows on the host."""
    parents, tokens = choice_tree(replies)
    choices.parents[slot, : len(parents)], choices.tokens[slot, : len(tokens)] = parents, tokens
    choices.node[slot] = 0


def set_allowed(choices: Choices, slot: int, token_ids: Sequence[int]) -> None:
    """Writes the only tokens of one slot, for which there is room, into rows on the host."""
    choices.parents[slot, : len(token_ids)], choices.node[slot] = ALWAYS, ALWAYS
    choices.tokens[slot, : len(token_ids)] = token_ids


def allowed_logits(logits_BV: jax.Array, choices: Choices) -> jax.Array:
    """The logits with -inf at each token that may not come next."""
    rows, vocab = logits_BV.shape
    next_BJ = choices.parents == choices.node[:, None]
    tokens_BJ = jnp.where(next_BJ, choices.tokens, vocab)
    allowed_BV = jnp.zeros((rows, vocab), bool)
    allowed_BV = allowed_BV.at[jnp.arange(rows)[:, None], tokens_BJ].set(True, mode="drop")
    return jnp.where(allowed_BV | (choices.node == FREE)[:, None], logits_BV, -jnp.inf)


def walk(choices: Choices, tokens_B: jax.Array, moving_B: jax.Array) -> Choices:
    """The `moving` slots have said these tokens, which were allowed.

    Behind the end of a reply anything may come: nothing does, but where a server decodes on until
    it has seen the end.
    """
    taken_BJ = (choices.parents == choices.node[:, None]) & (choices.tokens == tokens_B[:, None])
    node_B = jnp.argmax(taken_BJ, axis=1).astype(jnp.int32) + 1
    goes_on_B = jnp.any(choices.parents == node_B[:, None], axis=1)
    node_B = jnp.where(goes_on_B, node_B, FREE)
    return choices._replace(node=jnp.where(moving_B & (choices.node >= 0), node_B, choices.node))
