# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The records that travel between the stages.

`Trajectory` is the host's view of one finished episode: text, small facts and a copy of the ids for
people to read. `Experience` and `TrajectoryBatch` are the devices' view of many: what the engine
wrote, and what the trainer learns from. They never pass through the host.
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from flax import struct

Author = Literal["environment", "policy"]

# Stop reasons that are not the policy's doing: nothing is learnt from such an episode.
FAILURES = frozenset(
    {
        "environment_error",
        "environment_timeout",
        "prompt_too_long",
        "unencodable",
        "nonfinite_logits",
    }
)
# The detail of a failure can be as long as an exception's text; processes exchange it.
_DETAIL_SHOWN = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of an episode, as ids that were appended in this order and never rendered again.

    `logprobs` and `versions` hold one value per token of a policy turn (log-prob under the
    distribution that it was drawn from, policy version that sampled it) and are empty for the
    environment's turns; `model_logprobs` are those under the model itself, untempered and with
    nothing cut off, where the engine records them (config.train.ratio "model"). `text`
    is for people: the environment's message, or the decoded reply of the policy. `messages` are
    (role, text) of the environment's messages where they are not one message of a user. A turn of
    the environment that `forks` begins a new sample: its ids are a prompt with the whole
    conversation rendered again, and later tokens do not attend to anything before it. Of an episode
    with several conversations, `conversation` is the number of the one that it belongs to. A turn
    of the policy that was restricted has its `choices`, ids of the replies that it could be, or its
    only `allowed` ids.
    """

    author: Author
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    forks: bool = False
    model_logprobs: tuple[float, ...] = ()
    conversation: int = 0
    choices: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()


class TurnState(NamedTuple):
    """Digests of what a turn of the policy answers: the newest message, and all that its side saw.

    Equal texts have equal digests, of 32 bits; others hardly ever have.
    """

    message: int
    history: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode.

    `episode` numbers the episodes of a run and seeds the sampling. `group` names the episodes that
    share one task. `role` is the side that the policy played ("x", "o"), of several the first, and
    `turn_roles` has the side of each policy turn where it played several, else nothing.
    `turn_rewards` holds one reward per policy turn that was answered (a turn whose environment
    failed has none), `reward` is their sum. `row` is the row of the device buffers that holds
    its tokens. `metrics` are what the environment reported (`StepResult.metrics`). Episodes of the
    same task have one `kind` in all steps.

    Example: prompt ids (9, 8), reply (4, 2), answer (9, 5, 8), reply (6, 2) is four turns of nine
    tokens; the policy wrote tokens 2, 3, 7 and 8.
    """

    episode: int
    group: int
    role: str
    turns: tuple[Turn, ...]
    turn_rewards: tuple[float, ...]
    stop_reason: str
    row: int
    detail: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    turn_roles: tuple[str, ...] = ()
    kind: int = 0

    @property
    def reward(self) -> float:
        """The outcome: the sum of the turns' rewards."""
        return float(sum(self.turn_rewards))

    @property
    def num_turns(self) -> int:
        """The number of the policy's turns."""
        return sum(turn.author == "policy" for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """The length of the episode in tokens of both sides."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def sample_starts(self) -> tuple[int, ...]:
        """The first token of each sample: 0, and the token at every fork."""
        starts, length = [0], 0
        for turn in self.turns:
            if turn.forks:
                starts.append(length)
            length += len(turn.token_ids)
        return tuple(starts)

    @property
    def num_policy_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.author == "policy")

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled a token; None: none was sampled."""
        return min((turn.versions[0] for turn in self.turns if turn.versions), default=None)

    @functools.cached_property
    def turn_states(self) -> tuple[TurnState, ...]:
        """The state that each of the policy's turns answers."""
        states, message = list[TurnState](), b""
        histories: dict[str, Any] = collections.defaultdict(hashlib.blake2b)
        for turn in self.turns:
            if turn.author == "environment":
                message = _as_bytes(turn)
                continue
            role = self.turn_roles[len(states)] if self.turn_roles else self.role
            history = histories[role]
            history.update(message)
            states.append(TurnState(_digest(hashlib.blake2b(message)), _digest(history)))
            history.update(_as_bytes(turn))
        return tuple(states)

    @property
    def outcome(self) -> "Outcome":
        """The facts of the episode without its tokens."""
        versions = collections.Counter(v for turn in self.turns for v in turn.versions)
        return Outcome(
            episode=self.episode,
            group=self.group,
            role=self.role,
            turn_rewards=self.turn_rewards,
            stop_reason=self.stop_reason,
            num_turns=self.num_turns,
            num_tokens=self.num_tokens,
            num_policy_tokens=self.num_policy_tokens,
            sample_starts=self.sample_starts,
            versions=tuple(sorted(versions.items())),
            detail=self.detail[:_DETAIL_SHOWN] if self.stop_reason in FAILURES else "",
            metrics=self.metrics,
            turn_roles=self.turn_roles,
            turn_states=self.turn_states,
            kind=self.kind,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The small facts of a Trajectory, under the same names, which processes exchange.

    `versions` are the policies that sampled its tokens, oldest first, each with their number.
    `detail` is there for FAILURES only, and cut.
    """

    episode: int
    group: int
    role: str
    turn_rewards: tuple[float, ...]
    stop_reason: str
    num_turns: int
    num_tokens: int
    num_policy_tokens: int
    sample_starts: tuple[int, ...]
    versions: tuple[tuple[int, int], ...]
    detail: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    turn_roles: tuple[str, ...] = ()
    turn_states: tuple[TurnState, ...] = ()
    kind: int = 0

    @property
    def reward(self) -> float:
        """The outcome: the sum of the turns' rewards."""
        return float(sum(self.turn_rewards))


@struct.dataclass(frozen=True, kw_only=True)
class Experience:
    """Tokens and log-probs as the engine recorded them on the device: N rows of S tokens.

    `tokens` i32[N,S]; `turn_ids` i32[N,S], 0 where the environment wrote (or nothing is), t where
    the policy wrote in its t-th turn; `logprobs` f32[N,S] under the distribution that a token was
    drawn from, `versions` i32[N,S] of the policy, and `model_logprobs` f32[N,S] under the model
    itself, untempered and with nothing cut off (None: not written down), mean something only where
    `turn_ids` > 0. `allowed` are A arrays i32[N,S], present where turns may be restricted to some
    replies: those that are above 0 are 1 + the ids that the token was chosen among, all are 0 where
    it could be any (`engine.choices`).
    """

    tokens: jax.Array
    turn_ids: jax.Array
    logprobs: jax.Array
    versions: jax.Array
    model_logprobs: jax.Array | None = None
    allowed: tuple[jax.Array, ...] = ()


@struct.dataclass(frozen=True, kw_only=True)
class TrajectoryBatch:
    """Episodes as the trainer reads them: N rows of T tokens, on the training layout.

    A row holds one episode, or several where they are packed (dispatch/packing.py). `tokens`
    i32[N,T]; `segment_ids` i32[N,T], 0 where the row is padding and s in the s-th sample of the row
    (an episode is one, unless it forks), which sees nothing of the others; `turn_ids` i32[N,T], 0
    where the environment wrote and t where the policy wrote in its t-th turn; `logprobs` f32[N,T]
    of the policy that the update is measured against (config.train.ratio), `versions` i32[N,T] of
    the policy that sampled, `advantages` f32[N,T]. `proximal` f32[N,T] are log-probs of the policy
    that learning from this batch begins with, as the trainer scores it, and `reference` those of
    the frozen reference policy; None where the loss needs none (`train.scoring.make_scorer`). With
    a critic, `advantages` are the rewards of the tokens' turns until the batch is scored, `values`
    f32[N,T] the critic's of the state before each token, and `returns` what they are to predict.
    `groups` i32[N,T] numbers the groups that share a task from 1, through all rows, until the batch
    is scored; None unless the algorithm needs it. `allowed` i32[N,T] are those of `Experience`.
    All but `tokens` and `segment_ids` mean something only where `turn_ids` > 0. An episode that
    does not count (its environment failed, or the algorithm does not keep its group) is no row, or
    one of padding.

    Example: prompt p0 p1, reply a0 a1, answer q0, reply b0 b1, one place of padding:
    segment_ids 1 1 1 1 1 1 1 0, turn_ids 0 0 1 1 0 2 2 0.
    """

    tokens: jax.Array
    segment_ids: jax.Array
    turn_ids: jax.Array
    logprobs: jax.Array
    versions: jax.Array
    advantages: jax.Array
    proximal: jax.Array | None = None
    reference: jax.Array | None = None
    values: jax.Array | None = None
    returns: jax.Array | None = None
    groups: jax.Array | None = None
    allowed: tuple[jax.Array, ...] = ()

    def validate(self) -> None:
        """Raises ValueError unless every field has the shape of `tokens`."""
        for path, values in jax.tree_util.tree_leaves_with_path(self):
            if values.shape != self.tokens.shape or len(values.shape) != 2:
                raise ValueError(
                    f"TrajectoryBatch{jax.tree_util.keystr(path)} has shape {values.shape}; every "
                    f"field must be [rows, tokens] like tokens {self.tokens.shape}"
                )


def _as_bytes(turn: Turn) -> bytes:
    """Returns a turn's messages, each behind its length: so "a", "bc" are not "ab", "c"."""
    marked = (f"{role} {len(text)} {text}" for role, text in turn.messages or (("", turn.text),))
    return "".join(marked).encode(errors="surrogatepass")


def _digest(hasher: Any) -> int:
    return int.from_bytes(hasher.digest()[:4], "big")


def mean_metrics(episodes: Iterable[Trajectory | Outcome]) -> dict[str, float]:
    """Returns the mean of each metric over the episodes that have it and did not fail."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        reported = {} if episode.stop_reason in FAILURES else episode.metrics
        for name, value in reported.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
