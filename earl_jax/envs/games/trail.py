# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A trail of stones: each says where the next one lies, and the policy goes there.

The smallest task with one call after the other whose transcripts lengthen because the policy gets
better: the first wrong step ends the walk, so a policy that knows nothing walks one or two stones,
and one that has learnt the way walks them all. A trail of 3 steps:

    environment: a trail of 8 stones, 0 to 7. go to 5
    policy:      5
    environment: 0
    policy:      0
    environment: 3
    policy:      3
"""

import random

from earl_jax.envs.environment import Start, StepResult, illegal_reply
from earl_jax.envs.games.board_game import check_illegal_reward
from earl_jax.settings.errors import InputError


class Trail:
    """One walk over a trail of `num_steps` steps, each to one of `num_stones` stones.

    The trail depends on `seed` alone. The reward is the share of the trail that was walked, paid
    when the walk is over: 1 at the end of the trail ("win"), less for a step to another stone
    ("loss"). A walk that a limit cuts is paid nothing. A reply that is no stone's number ends it
    with `illegal_reward`; with `mask_illegal` the policy can sample the stones' numbers only. It
    reports win and illegal.

    With `longer_every` above 0 a run's first trails have `first_steps` steps, and one more for each
    `longer_every` trails before (`index`): contexts lengthen then whatever the policy does.
    Example: with 4 `first_steps`, and longer every 10, trail 19 has 5.

    Raises ValueError for arguments that cannot be, RuntimeError for calls out of order.
    """

    def __init__(
        self,
        *,
        num_stones: int = 8,
        num_steps: int = 60,
        first_steps: int = 1,
        longer_every: int = 0,
        illegal_reward: float = -1.0,
        mask_illegal: bool = False,
        seed: int = 0,
        index: int = 0,
    ):
        fields = (
            ("num_stones", num_stones, 2),
            ("num_steps", num_steps, 1),
            ("first_steps", first_steps, 1),
            ("longer_every", longer_every, 0),
        )
        for field, value, least in fields:
            if value < least:
                raise InputError(f"{field} is {value}; it must be at least {least}")
        if not longer_every and first_steps != 1:
            raise InputError(
                f"first_steps is {first_steps}, and without longer_every it has no effect; set "
                "that above 0, or remove it"
            )
        if first_steps > num_steps:
            raise InputError(
                f"first_steps is {first_steps}; it must be at most num_steps ({num_steps})"
            )
        check_illegal_reward(illegal_reward, mask_illegal)
        if longer_every:
            num_steps = min(first_steps + index // longer_every, num_steps)
        self.num_steps = num_steps
        self._num_stones, self._illegal_reward = num_stones, illegal_reward
        self._mask_illegal = mask_illegal
        # The word keeps the stones apart from a policy that draws its steps from Random(seed).
        self._rng = random.Random(f"trail {seed}")
        self._next = self._draw()
        self._walked = 0
        self._started = False
        self._done = False

    def start(self) -> Start:
        """Returns the message with the first stone."""
        if self._started:
            raise RuntimeError("start() was called twice; an environment plays one episode")
        self._started = True
        number = self._num_stones
        text = f"a trail of {number} stones, 0 to {number - 1}. go to {self._next}"
        metrics = {"win": 0.0, "illegal": 0.0}
        return Start(text=text, choices=self._choices(), metrics=metrics)

    def step(self, reply: str) -> StepResult:
        """Goes to the stone of the reply; the text names the next one."""
        if not self._started:
            raise RuntimeError("step() was called before start()")
        if self._done:
            raise RuntimeError("step() was called after the end; an environment plays one episode")
        if reply not in self.all_replies():
            self._done = True
            return illegal_reply(reply, self._illegal_reward, "a stone")
        num_steps, is_right = self.num_steps, reply == self._next
        self._walked += is_right
        if is_right and self._walked < num_steps:
            self._next = self._draw()
            return StepResult(text=self._next, reward=0.0, done=False, choices=self._choices())
        self._done = True
        return StepResult(
            reward=self._walked / num_steps,
            done=True,
            stop_reason="win" if is_right else "loss",
            detail="" if is_right else f"went to {reply} and not to {self._next}",
            metrics={"win": float(is_right)},
        )

    def example_reply(self, rng: random.Random) -> str:
        """Returns the right step half the time, else one to any stone."""
        stones = self.legal_replies()
        return self._next if rng.random() < 0.5 else rng.choice(stones)

    def legal_replies(self) -> list[str]:
        """Returns the numbers of all stones; none before `start` and after the end."""
        return self.all_replies() if self._started and not self._done else []

    def all_replies(self) -> list[str]:
        """Returns every reply that is a stone."""
        return [str(stone) for stone in range(self._num_stones)]

    def all_choices(self) -> list[str]:
        """Returns every reply that the policy may be limited to; none unless `mask_illegal`."""
        return self.all_replies() if self._mask_illegal else []

    def _choices(self) -> tuple[str, ...]:
        return tuple(self.all_choices())

    def _draw(self) -> str:
        return str(self._rng.randrange(self._num_stones))
