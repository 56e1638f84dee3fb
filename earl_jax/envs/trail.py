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

from earl_jax.envs.environment import ILLEGAL, LOSS, WIN, EnvConfig, Start, StepResult

ROLE = "walker"


class Trail:
    """One walk over a trail that depends on `seed` alone, of `config.trail.num_steps` stones.

    The reward is the share of the trail that was walked, paid when the walk is over: 1 at the end
    of the trail ("win"), less for a step to another stone ("loss"). A walk that somebody else cuts
    is paid nothing. A reply that is no stone's number ends it with `config.illegal_reward`.

    Raises RuntimeError for calls out of order.
    """

    def __init__(self, config: EnvConfig, *, seed: int):
        self._config = config
        # The word keeps the stones apart from a policy that draws its steps from Random(seed).
        self._rng = random.Random(f"trail {seed}")
        self._next = self._draw()
        self._walked = 0
        self._started = False
        self._done = False

    def start(self) -> Start:
        """Says where the first stone lies."""
        if self._started:
            raise RuntimeError("start() was called twice; an environment plays one episode")
        self._started = True
        number = self._config.trail.num_stones
        text = f"a trail of {number} stones, 0 to {number - 1}. go to {self._next}"
        return Start(text=text, role=ROLE, choices=self._choices())

    def step(self, reply: str) -> StepResult:
        """Goes to the stone of the reply; the text is where the next one lies."""
        if not self._started:
            raise RuntimeError("step() was called before start()")
        if self._done:
            raise RuntimeError("step() was called after the end; an environment plays one episode")
        if reply not in all_stones(self._config):
            self._done = True
            return StepResult(
                reward=self._config.illegal_reward,
                done=True,
                stop_reason=ILLEGAL,
                detail=f"{reply!r:.80} is no stone",
            )
        num_steps, is_right = self._config.trail.num_steps, reply == self._next
        self._walked += is_right
        if is_right and self._walked < num_steps:
            self._next = self._draw()
            return StepResult(text=self._next, reward=0.0, done=False, choices=self._choices())
        self._done = True
        return StepResult(
            reward=self._walked / num_steps,
            done=True,
            stop_reason=WIN if is_right else LOSS,
            detail="" if is_right else f"went to {reply} and not to {self._next}",
        )

    def random_reply(self, rng: random.Random) -> str:
        """Half the time the right step, else one to any stone."""
        stones = self.legal_replies()
        return self._next if rng.random() < 0.5 else rng.choice(stones)

    def legal_replies(self) -> list[str]:
        """The numbers of all stones; none before `start` and after the end."""
        return all_stones(self._config) if self._started and not self._done else []

    def _choices(self) -> tuple[str, ...]:
        return tuple(all_stones(self._config)) if self._config.mask_illegal else ()

    def _draw(self) -> str:
        return str(self._rng.randrange(self._config.trail.num_stones))


def all_stones(config: EnvConfig) -> list[str]:
    """Every reply that is a stone."""
    return [str(stone) for stone in range(config.trail.num_stones)]
