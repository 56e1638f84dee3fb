# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Staleness: which groups of episodes an asynchronous step trains on. Pure Python.

The policy of version v has had v steps. A step that begins with version v is to train on no token
that a policy before v - `max_staleness` sampled. Groups are whole, so that their episodes can be
compared. A group is open from when its tasks are submitted until it is trained on or dropped;
with `reuse` it is kept then, until it was trained on so often or would be beyond the bound. At
most `max_staleness` + 1 steps' groups are open, which is what AReaL admits (arXiv 2505.24298,
eq. 3): N groups by version v, with floor((N - 1) / groups a step) <= v + max_staleness.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from earl_jax.settings.errors import check_bounds, check_choices

Rule = Literal["in_order", "wait", "drop", "mask", "admission"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsynchronyConfig:
    """Settings of asynchronous and streaming training: episodes are played while it is trained.

    `max_staleness` bounds how many versions the policy may be ahead of the one that sampled a token
    that it is trained on; 0 plays and trains in turn. A version is a step of the trainer, of one or
    more updates.

    `rule` says which groups of episodes a step takes. "in_order": those of its own tasks, as a
    synchronous run does; nothing is dropped and no token is beyond the bound. The others take
    finished groups, the oldest first. "wait" waits for groups that would be beyond the bound later.
    "drop" gives up groups beyond the bound. "mask" leaves the loss of tokens beyond the bound out.
    "admission" trains on them too, as AReaL does. What "drop" gave up, and how many tokens
    "admission" trained on beyond the bound, is printed at the end of a run.

    `kv` is what live episodes do when the weights change. "recompute": they read all of their
    tokens again, so that log-probs are those of the new weights. "keep": they attend to what the
    weights before have written, which costs nothing. "finish": they are played to their end first,
    and no other one begins meanwhile, so that each episode is of one policy; slots are empty while
    the longest of them is played. AReaL compares this with its interruptible generation.

    `parts` is the number of parts in which a step's groups go to the trainer's devices: each as
    soon as as many groups are finished as it has, while the others are played (streaming,
    arXiv 2504.15930). 1 waits for all. The update is that of the whole batch, but for rounding.

    `refill` n plays further groups in place of those that the algorithm does not keep, such as
    DAPO's of equal rewards (dynamic sampling, arXiv 2503.14476, eq. 11), until the step has all of
    its groups or has given up n times as many; then it takes what is there. It goes with the rule
    "drop", and with max_staleness 0 too. 0 leaves their place in the step empty.

    `reuse` n trains on a group up to n times, with the rule "drop" (experience replay): where too
    few groups are finished, a step takes some again that earlier steps trained on, instead of
    waiting for the others. At least an n-th of its groups are new, and none is beyond the bound. Up
    to a step's groups are kept for it, on the devices: those that were trained on last.

    `checksums` is for debugging: the events have a checksum of each policy that was published, so
    that a replay compares the weights. It is an error where a policy that is played is not that of
    the trainer, because it was not published whole, or is overwritten while it is played. It waits
    for the weights in each step.
    """

    max_staleness: int = 0
    rule: Rule = "in_order"
    kv: Literal["recompute", "keep", "finish"] = "recompute"
    parts: int = 1
    refill: int = 0
    reuse: int = 1
    checksums: bool = False

    @property
    def is_on(self) -> bool:
        """True if a step's episodes are not only those of its own tasks, played in turn."""
        return self.max_staleness > 0 or self.parts > 1 or self.refill > 0

    @property
    def interrupts(self) -> bool:
        """True if new weights come while episodes are played."""
        return self.kv != "finish"

    @property
    def batches(self) -> int:
        """The most steps' episodes that are open at once."""
        return self.max_staleness + 1

    @property
    def row_batches(self) -> int:
        """The most steps' episodes that have rows at once: open ones, and those to be reused."""
        return self.batches + (self.reuse > 1)

    @property
    def later_steps(self) -> int:
        """The most further steps whose episodes a step may take instead of its own."""
        return 0 if self.rule == "in_order" else self.max_staleness

    @property
    def episode_rules(self) -> list[str | int]:
        """The rules by which open episodes may go on."""
        return [self.rule, self.max_staleness, *([] if self.interrupts else ["finish"])]

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.asynchrony")
        least = {"max_staleness": 0, "parts": 1, "refill": 0, "reuse": 1}
        check_bounds(self, "config.asynchrony", {name: (n, None) for name, n in least.items()})


class Group(NamedTuple):
    """An open group: its number, the oldest version in it, and when it was finished.

    `oldest` is None where no token was sampled yet. `finished` numbers the groups in the order in
    which their last episode ended; None where one is not over.
    """

    number: int
    oldest: int | None = None
    finished: int | None = None


def choose_part(groups: Sequence[Group], left: int, part: int) -> list[Group] | None:
    """Returns the next `part` groups of a step with the rule "in_order", by number.

    The step trains on the `left` open groups of the lowest numbers still. It takes those of them
    that finished first; None as long as fewer than `part` are finished.

    Example: of groups 4, 5, 6, 7, which finished as third, first, not, second, with left 3 and
    part 2 it takes 4 and 5: 7 is of a later step.
    """
    due = [group for group in sorted(groups)[:left] if group.finished is not None]
    return sorted(sorted(due, key=_finish)[:part]) if len(due) >= part else None


def choose_groups(
    rule: Rule, groups: Sequence[Group], version: int, max_staleness: int, size: int
) -> list[Group] | None:
    """Returns the `size` groups that the step of this version trains on, by number.

    Args:
        rule: config.asynchrony.rule.
        groups: the open ones, at most `size` * (`max_staleness` + 1); those that are `overdue` are
            dropped before, with the rule "drop".
        version: of the policy that the step begins with.
        max_staleness: the bound.
        size: groups a step.

    Returns:
        None as long as some of the groups that are due are not finished, or too few are.
    """
    chosen = sorted(groups)[:size]
    if rule != "in_order":
        chosen = _due(groups, version, max_staleness, size) if rule == "wait" else []
        taken = {group.number for group in chosen}
        rest = [g for g in groups if g.finished is not None and g.number not in taken]
        chosen += sorted(rest, key=_age)[: size - len(chosen)]
    if len(chosen) < size or any(group.finished is None for group in chosen):
        return None
    return sorted(chosen)


def choose_with_reuse(
    groups: Sequence[Group], kept: Sequence[Group], uses: Mapping[int, int], size: int, reuse: int
) -> list[Group] | None:
    """Returns the `size` groups that a step trains on with the rule "drop" and reuse, by number.

    The oldest finished ones, and as far as too few are finished, `kept` ones: those that were used
    the least, of these the ones that finished last. None where the finished ones are less than a
    `reuse`-th of the step, or all together are too few.

    Example: size 3, reuse 2: it takes two new ones and one again, but not one and two.
    """
    finished = [group for group in groups if group.finished is not None]
    chosen = sorted(finished, key=_age)[:size]
    if len(chosen) * reuse < size:
        return None
    again = sorted(kept, key=lambda group: (uses[group.number], -(group.finished or 0)))
    chosen += again[: size - len(chosen)]
    return sorted(chosen) if len(chosen) == size else None


def overdue(groups: Sequence[Group], version: int, max_staleness: int) -> list[Group]:
    """Returns the groups of which a step of this version would train on a token beyond the bound.

    Example: with version 5 and bound 2, groups whose oldest version is 2 or less.
    """
    return [g for g in groups if g.oldest is not None and g.oldest < version - max_staleness]


def _due(groups: Sequence[Group], version: int, max_staleness: int, size: int) -> list[Group]:
    """Returns the groups that this step must take so that none is ever beyond the bound.

    A group must be trained on by the step of version `oldest` + `max_staleness`. Where more are due
    by a step than the steps until it can take, the difference is taken now: finished ones first.

    Example: size 1, bound 1, version 3: of two groups that are due by version 4 one is taken now.
    """
    chosen: list[Group] = []
    begun = [(g.oldest + max_staleness, g) for g in groups if g.oldest is not None]
    for last in sorted({last for last, _ in begun}):
        due = [group for by, group in begun if by <= last]
        now = len(due) - max(0, last - version) * size - len(chosen)
        left = sorted((g for g in due if g not in chosen), key=_age)
        chosen += left[: max(0, now)]
    return chosen


def _finish(group: Group) -> tuple[bool, int, int]:
    """Returns a key by which finished groups come first, in the order in which they finished."""
    return group.finished is None, group.finished or 0, group.number


def _age(group: Group) -> tuple[bool, int, int, int]:
    """Returns a key by which finished groups come first, those with the oldest tokens before all.

    Of these the ones that finished first. A group without tokens, whose episodes all failed, is as
    old as can be.
    """
    is_open, finished, number = _finish(group)
    return is_open, -1 if group.oldest is None else group.oldest, finished, number
