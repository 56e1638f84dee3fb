# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A task: one episode to play."""

import dataclasses
import functools
import re
import zlib
from collections.abc import Mapping
from typing import Any

from earl_jax.engine.config import Sampling
from earl_jax.envs.text.conversation import Observation
from earl_jax.rollout.config import Limits, Stops
from earl_jax.rollout.open_episodes import OpenEpisode
from earl_jax.settings.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as ids, and the replies to which the turn behind it is restricted.

    Either to `choices`, each with its end, or to the tokens `allowed`; both are () where the turn
    may be anything. `message` has the same ids, and is made with the record (`Observation.array`).
    """

    token_ids: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()
    message: Observation = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes the message."""
        object.__setattr__(self, "message", Observation(self.token_ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One episode to play. Its environment is made with `args`, beside the config's.

    A task with a `prompt` has no environment: it is one turn behind these ids.

    Its tokens are drawn with `seed`; without one that is the number of the episode, so that no two
    of a run draw alike. `limits`, `sampling` and `stops` are this episode's own; None: those of the
    rollout. To train on episodes with a sampling of their own, set config.train.ratio to "model".
    With `model_logprobs` its turns have these (`Turn.model_logprobs`), also where the rollout does
    not record them for all. One that `resumes` goes on behind these turns, if its environment says
    the same as then. `length_before` are the tokens of an episode of this task in an earlier step,
    if they are known.
    """

    episode: int
    group: int
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompt: Prompt | None = None
    seed: int | None = None
    limits: Limits | None = None
    sampling: Sampling | None = None
    stops: Stops | None = None
    model_logprobs: bool = False
    resumes: OpenEpisode | None = None
    length_before: int | None = None

    def validate(self) -> None:
        """Raises ValueError naming the episode and the field that breaks a rule."""
        if not 0 <= self.token_seed < 2**31:
            raise InputError(
                f"episode {self.episode}: Task.seed is {self.token_seed}; it must lie between 0 "
                f"and {2**31 - 1}"
            )
        if self.prompt is not None and not self.prompt.token_ids:
            raise InputError(
                f"episode {self.episode}: Task.prompt has no token_ids; the policy needs a prompt "
                "to go on from"
            )
        if self.limits is not None:
            self.limits.validate(f"episode {self.episode}: Task.limits.")
        if self.sampling is not None:
            self.sampling.validate(f"episode {self.episode}: Task.sampling.")
        if self.stops is not None:
            self.stops.validate(f"episode {self.episode}: Task.stops.")

    @functools.cached_property
    def kind(self) -> int:
        """A digest of the `args`: the same for the same task in every step, process and run."""
        # A function, such as a dataset's reward, shows its address, which each process has anew.
        return zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", repr(self.args)).encode())

    @property
    def token_seed(self) -> int:
        """The seed that its tokens are drawn with."""
        return self.episode if self.seed is None else self.seed
