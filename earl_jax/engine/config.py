# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How episodes are played."""

import dataclasses
import math
from typing import Literal

from earl_jax.settings.choices import check_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn: tempered, then cut to `top_k`, then to `top_p`, then to `min_p`.

    `temperature` 0 takes the likeliest token. `top_k` keeps the k likeliest tokens (0: all),
    `top_p` the fewest of these whose share of their mass is at least so much (1: all; arXiv
    1904.09751), `min_p` those at least so likely as that fraction of the likeliest (0: all; arXiv
    2407.01082). Tokens as likely as the last that is kept are kept too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"{where}temperature is {self.temperature}; it must be finite and at least 0 "
                "(0 takes the likeliest token)"
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"{where}top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"{where}top_p is {self.top_p}; it must lie in (0, 1] (1: all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"{where}min_p is {self.min_p}; it must lie in [0, 1] (0: all tokens)")
        cuts = (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
        if self.temperature == 0 and cuts:
            raise ValueError(
                f"{where}temperature is 0, which takes the likeliest token: {where}top_k, "
                f"{where}top_p and {where}min_p have no effect beside it; remove them"
            )


# Contexts from which on large pages are worth what they waste.
LONG_CONTEXT = 1024
# Each slot holds so many on the devices.
MAX_STOP_IDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stops:
    """Where a turn ends beside its end of turn.

    At one of `token_ids`, or at the token that completes one of `strings` in the turn's text. That
    token, and all of the string's, belong to the turn: they were sampled, are learnt from, and stay
    in the context, followed by the chat template's end of turn. The environment is told the text in
    front of the stop. What a token says behind a string that it completes is in the ids alone.
    """

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if "" in self.strings:
            raise ValueError(f"{where}strings holds an empty string; remove it")
        if len(self.token_ids) > MAX_STOP_IDS or min(self.token_ids, default=0) < 0:
            raise ValueError(
                f"{where}token_ids is {self.token_ids}; give at most {MAX_STOP_IDS} ids, which "
                "begin at 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Most tokens of a turn of the policy, and of an episode, whoever writes them (0: no limit)."""

    max_turn_tokens: int
    max_episode_tokens: int = 0

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if self.max_turn_tokens < 1:
            raise ValueError(
                f"{where}max_turn_tokens is {self.max_turn_tokens}; it must be at least 1"
            )
        if self.max_episode_tokens < 0:
            raise ValueError(
                f"{where}max_episode_tokens is {self.max_episode_tokens}; it must be at least 0 "
                "(0: no limit)"
            )
        if 0 < self.max_episode_tokens <= self.max_turn_tokens:
            raise ValueError(
                f"{where}max_episode_tokens is {self.max_episode_tokens} and "
                f"{where}max_turn_tokens {self.max_turn_tokens}; an episode has a first message "
                "beside its turns, so no turn could be as long: lower max_turn_tokens, or raise "
                "max_episode_tokens"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Whether the engine guesses tokens, and how (speculative decoding by prompt lookup).

    A forward pass then says up to `draft` tokens beside its own: those that followed where the
    episode's last `ngram` ids stood before, as far as they are what the model samples anyway. So
    tokens, and what they are drawn from, are those without; log-probs differ in rounding, because a
    pass over more tokens adds up in another order.

    `mode` is "off"; "on"; or "auto": rounds are timed both ways, and go on in the faster. Runs with
    "off" and "on" are repeatable bit for bit; with "auto" the clock decides which rounding a round
    has.
    """

    mode: Literal["off", "on", "auto"] = "off"
    ngram: int = 3
    draft: int = 4

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        check_choices(self, where.removesuffix("."))
        if self.ngram < 1:
            raise ValueError(f"{where}ngram is {self.ngram}; it must be at least 1 id")
        if self.draft < 1:
            raise ValueError(
                f"{where}draft is {self.draft}; it must be at least 1 token; to guess none, set "
                f"{where}mode to 'off'"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of the rollout stage.

    `num_slots` episodes live at once, over all devices; a step plays `episodes_per_step`. Both
    divide by the data axis of the rollout's mesh, and need not by the number of devices: meshes
    whose data axis does not divide them are not used, and one slot is possible on data=1. The
    `group_size` episodes of a group play the same task. `chunk_size` tokens of a prompt or an
    answer are appended per slot and round, for `append_rows` slots of a data shard at a time. A
    decode step computes `step_rows` rows over all devices, 0: one for each slot (see below). With
    `share_prefixes` the common beginning of prompts is computed once and taken over from slot to
    slot: within a row shard (the slots of one place of the data axis) as it is, and from another
    shard's devices as `copy_prefixes` says: "on" copies whatever is a chunk or more, so that
    nothing is read twice; "off" has each shard read it; "auto" does what costs less by the chip's
    data sheet (rollout/preemption.py). `burst` tokens at most are sampled per slot and round; with
    `speculation` there are so many forward passes, which may say more (see `SpeculationConfig`).
    `context_buckets` are the rooms per episode, in tokens, that programs are compiled for; beyond
    the last the room doubles. The KV cache comes in pages of `page_size` tokens, of which an
    episode has as many as it needs: large ones are read faster, small ones waste less. 0 takes 128
    where the last of `context_buckets` is LONG_CONTEXT or more, else 16. A turn is cut, and its
    episode over, at `max_turn_tokens`; so it is where the episode, whoever wrote it, comes to
    `max_episode_tokens` (0: to what the checkpoint's model is made for, where there is one), and
    there is no answer that leaves a turn no room below that. The last turn of an episode that is
    cut earns `unfinished_reward`, beside what its answer gave for it.

    Where the budget holds no more pages, the shortest episodes are preempted. `preemption` says
    what becomes of what they have read: "recompute" reads it again, "host" copies the pages to host
    memory and back, as they are, and "auto" does what costs less by the chip's data sheet
    (preemption.py). Host memory takes at most `preemption_host_gib` GiB; what is beyond that is
    read again.

    `temperature`, `top_k`, `top_p` and `min_p` say how tokens are drawn (see `Sampling`), for
    episodes that do not say so themselves. A token's log-prob is under the distribution that it was
    drawn from; with `model_logprobs` that under the model itself, untempered and with nothing cut
    off, is written down beside it. Beware of the cuts in training: the kept tokens' log-probs are
    higher by the mass that was cut off, which the trainer, who scores under all tokens, cannot see
    and would take for a change of the policy. So they need config.train.ratio = "model".

    A turn ends at `stop_strings` and `stop_token_ids` too (see `Stops`), for episodes that do not
    say so themselves.

    `compute_dtype` is the type of the engine's matrix work and KV cache: "model" is the trainer's,
    config.model.compute_dtype. `weight_dtype` is that of its matrices: "compute" is the type they
    are multiplied in, "int8" a byte a number with a scale for each output channel
    (models/quantization.py). `kv_dtype` is that of the KV cache: "compute", or "int8" with a scale
    for each token and head. Evaluation games are played by the same engine. What another
    precision than the trainer's does to log-probs is logged, and see `TrainConfig.correction`.

    A round goes without the episodes whose environments take longer than `patience_s` seconds. Who
    takes part in which round then depends on their speed, an episode's tokens never do.

    Where they are slow, let there be more slots than rows, say `num_slots` 256 and `step_rows` 64:
    then an episode that waits holds pages but no row of the decode steps, which go to those that
    speak, in turns where these are more than there are rows; a round has more steps then. What a
    step costs follows `step_rows`, whoever waits. It is one program: a token's log-prob does not
    depend on how many others speak, to the last bit. Another number of rows rounds otherwise.
    """

    num_slots: int = 64
    episodes_per_step: int = 128
    group_size: int = 1
    chunk_size: int = 8
    append_rows: int = 8
    step_rows: int = 0
    share_prefixes: bool = True
    copy_prefixes: Literal["auto", "off", "on"] = "auto"
    burst: int = 4
    max_turn_tokens: int = 4
    max_episode_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    model_logprobs: bool = False
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    unfinished_reward: float = -1.0
    patience_s: float = 0.1
    context_buckets: tuple[int, ...] = (32, 48, 64, 128)
    page_size: int = 0
    preemption: Literal["auto", "recompute", "host"] = "auto"
    preemption_host_gib: float = 4.0
    compute_dtype: Literal["model", "float32", "bfloat16"] = "model"
    weight_dtype: Literal["compute", "int8"] = "compute"
    kv_dtype: Literal["compute", "int8"] = "compute"
    speculation: SpeculationConfig = SpeculationConfig()

    def part(self, num_players: int) -> "RolloutConfig":
        """Returns the settings of each of so many processes that play."""
        return dataclasses.replace(
            self,
            num_slots=self.num_slots // num_players,
            step_rows=-(-self.step_rows // num_players),
            episodes_per_step=self.episodes_per_step // num_players,
        )

    def computes_as(self, model_dtype: str) -> str:
        """The engine's compute type, for a model whose trainer computes in `model_dtype`."""
        return model_dtype if self.compute_dtype == "model" else self.compute_dtype

    def is_precise_as(self, model_dtype: str) -> bool:
        """Whether log-probs differ from those of such a trainer by the order of sums alone."""
        rounded = "int8" in (self.weight_dtype, self.kv_dtype)
        return not rounded and self.computes_as(model_dtype) == model_dtype

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.rollout")
        self._check_sizes()
        self.limits.validate("config.rollout.")
        self.stops.validate("config.rollout.stop_")
        self.speculation.validate("config.rollout.speculation.")
        if self.episodes_per_step % self.group_size:
            raise ValueError(
                f"config.rollout.episodes_per_step is {self.episodes_per_step}; it must be a "
                f"multiple of config.rollout.group_size ({self.group_size})"
            )
        if not math.isfinite(self.unfinished_reward):
            raise ValueError(
                f"config.rollout.unfinished_reward is {self.unfinished_reward}; it must be finite"
            )
        if not 0 <= self.patience_s < math.inf:
            raise ValueError(
                f"config.rollout.patience_s is {self.patience_s}; it must be a number of seconds, "
                "at least 0"
            )
        if not 0 < self.preemption_host_gib < math.inf:
            raise ValueError(
                f"config.rollout.preemption_host_gib is {self.preemption_host_gib}; it must be "
                "above 0 (for no host memory set config.rollout.preemption = 'recompute')"
            )
        if self.temperature == 0:
            raise ValueError(
                f"config.rollout.temperature is {self.temperature}; training needs log-probs of "
                "sampled tokens, so it must be finite and above 0"
            )
        self.sampling.validate("config.rollout.")
        buckets = self.context_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 2:
            raise ValueError(
                f"config.rollout.context_buckets is {buckets}; give rising numbers of tokens, "
                "such as (32, 64)"
            )

    def _check_sizes(self) -> None:
        """Raises ValueError unless slots, rows, chunks, bursts and pages can be so many."""
        for field in (
            "num_slots",
            "episodes_per_step",
            "group_size",
            "chunk_size",
            "append_rows",
            "burst",
        ):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"config.rollout.{field} is {getattr(self, field)}; it must be at least 1"
                )
        if not 0 <= self.step_rows < self.num_slots:
            raise ValueError(
                f"config.rollout.step_rows is {self.step_rows}; it must be at least 0, which is a "
                f"row for each slot, and below config.rollout.num_slots ({self.num_slots})"
            )
        if self.page_size < 0:
            raise ValueError(
                f"config.rollout.page_size is {self.page_size}; it must be at least 0 (0: by the "
                "lengths of contexts)"
            )

    @property
    def tokens_a_page(self) -> int:
        """`page_size`, or what 0 stands for."""
        return self.page_size or (128 if self.context_buckets[-1] >= LONG_CONTEXT else 16)

    @property
    def limits(self) -> Limits:
        """How long turns and episodes may be."""
        return Limits(
            max_turn_tokens=self.max_turn_tokens, max_episode_tokens=self.max_episode_tokens
        )

    @property
    def max_drafts(self) -> int:
        """The most tokens that are guessed for a slot in a forward pass."""
        return 0 if self.speculation.mode == "off" else self.speculation.draft

    @property
    def round_tokens(self) -> int:
        """The most tokens that a slot says in a round."""
        return self.burst * (1 + self.max_drafts)

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    @property
    def stops(self) -> Stops:
        """Where turns end beside their end of turn."""
        return Stops(strings=self.stop_strings, token_ids=self.stop_token_ids)

    def max_tokens_for(self, tokens: int) -> int:
        """The smallest room that holds so many tokens."""
        max_tokens = next(
            (b for b in self.context_buckets if b >= tokens), self.context_buckets[-1]
        )
        while max_tokens < tokens:
            max_tokens *= 2
        return max_tokens
