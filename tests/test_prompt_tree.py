# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The radix tree of prompts, by hand and against comparing every two of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_jax.engine.prompt_tree import PromptTree


def ids(*tokens):
    return np.array(tokens, np.int32)


def nodes(tree):
    """Returns the depths of all nodes but the root, sorted."""
    found, left = [], list(tree._root.children.values())
    while left:
        node = left.pop()
        found.append(node.depth)
        left += node.children.values()
    return sorted(found)


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), prompts), max_size=20))
def test_common_beginnings_are_those_of_comparing_every_two(history):
    """Slots have one prompt after the other. The tree has no node but ends and partings."""
    tree, held = PromptTree(5), {}
    for slot, prompt in history:
        if slot in held:
            before, _ = held.pop(slot)
            tree.put(slot, before, present=False)
            tree.remove(before)
        held[slot] = tree.add(ids(*prompt)), prompt
        tree.put(slot, held[slot][0], present=True)
        for node, one in held.values():
            expected = [0] * 5
            for other, (_, theirs) in held.items():
                same = [a == b for a, b in zip(one, theirs, strict=False)]
                expected[other] = (*same, False).index(False)
            assert tree.common(node).tolist() == expected
        texts = {tuple(one) for _, one in held.values()}
        partings = {
            text[:depth]
            for text in texts
            for depth in range(1, len(text))
            if any(
                o[:depth] == text[:depth] and o[depth:][:1] not in {(), text[depth:][:1]}
                for o in texts
            )
        }
        assert nodes(tree) == sorted(map(len, texts | partings))
    for slot, (node, _) in held.items():
        tree.put(slot, node, present=False)
        tree.remove(node)
    assert nodes(tree) == []
