# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A radix tree of the prompts that slots have read or are about to read.

Prompts that begin alike share a path from the root, and part at a node. A prompt is compared once,
when it is added, token by token along its path: O(prompt). What it has in common with the prompts
of all slots is read off the nodes of its path later, without its tokens. (SGLang keeps its pages in
such a tree, arXiv 2312.07104; a chain of page hashes, as in vLLM, would match whole pages only, and
would have to rule out collisions.)
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(kw_only=True, eq=False)
class Node:
    """The end of a prompt, or the place where prompts part: the first `depth` tokens of `ids`.

    `children` are by the token that follows. `slots` bool[num_slots] has the slots whose prompts
    begin with these tokens, `changes` counts what happened to these slots, and `uses` the prompts
    that end here.
    """

    ids: np.ndarray
    depth: int
    parent: "Node | None"
    slots: np.ndarray
    children: dict[int, "Node"] = dataclasses.field(default_factory=dict)
    changes: int = 0
    uses: int = 0


class PromptTree:
    """Prompts of so many slots, each at most once in the tree. Host-side state only.

    Example: with the prompts 1 2 3 of slot 0 and 1 2 4 of slot 1 the root has one child, 1 2, whose
    children are 3 and 4. The prompt of slot 0 has 3 tokens in common with itself, and 2 with that
    of slot 1.
    """

    def __init__(self, num_slots: int) -> None:
        """Begins empty."""
        self._num_slots = num_slots
        self._root = self._new(np.zeros(0, np.int32), 0, None)

    def _new(self, ids: np.ndarray, depth: int, parent: Node | None) -> Node:
        return Node(ids=ids, depth=depth, parent=parent, slots=np.zeros(self._num_slots, bool))

    def add(self, ids: np.ndarray) -> Node:
        """Adds a prompt i32[tokens], which is not changed from then on. Returns its end."""
        node = self._root
        while node.depth < len(ids):
            child = node.children.get(int(ids[node.depth]))
            if child is None:
                child = self._new(ids, len(ids), node)
                node.children[int(ids[node.depth])] = child
            else:
                depth = node.depth + _common(child.ids[node.depth : child.depth], ids[node.depth :])
                if depth < child.depth:
                    child = self._split(child, node, depth)
            node = child
        node.uses += 1
        return node

    def _split(self, child: Node, parent: Node, depth: int) -> Node:
        """Returns a new node between two, behind the first `depth` tokens."""
        between = self._new(child.ids, depth, parent)
        between.slots[:] = child.slots
        between.children[int(child.ids[depth])] = child
        parent.children[int(child.ids[parent.depth])] = between
        child.parent = between
        return between

    def remove(self, node: Node) -> None:
        """Removes a prompt that was added. One that was added twice is there until it is again.

        A node that goes has changed: what happens to its slots later, others count.
        """
        node.uses -= 1
        while node.parent is not None and not node.uses and len(node.children) < 2:
            node.changes += 1
            parent, first = node.parent, int(node.ids[node.parent.depth])
            if node.children:
                (parent.children[first],) = node.children.values()
                parent.children[first].parent = parent
                return
            del parent.children[first]
            node = parent

    def put(self, slot: int, node: Node, *, present: bool) -> None:
        """Notes whether the slot's prompt is the one that ends at this node. Counts as a change."""
        on_path: Node | None = node
        while on_path is not None:
            on_path.slots[slot] = present
            on_path.changes += 1
            on_path = on_path.parent

    def common(self, node: Node) -> np.ndarray:
        """Returns i32[num_slots]: the tokens that this prompt has in common with every slot's."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        common = np.zeros(self._num_slots, np.int32)
        for on_path in reversed(path):
            common[on_path.slots] = on_path.depth
        return common


def _common(ids: np.ndarray, others: np.ndarray) -> int:
    """Returns the number of tokens i32 that two sequences begin alike with."""
    length = min(len(ids), len(others))
    ids, others = ids[:length], others[:length]
    # Of 15,360 equal ids 6 us; to compare them number by number takes 9.
    if ids.tobytes() == others.tobytes():
        return length
    return int((ids != others).argmax())
