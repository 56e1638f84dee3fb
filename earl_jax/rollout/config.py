# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the rollout stage, and the engine settings that follow from them."""

import dataclasses
import math
from typing import Literal

from earl_jax.engine.config import MAX_STOP_IDS, NO_LIMIT, EngineConfig, Sampling, SlotRules
from earl_jax.engine.rows import make_rows
from earl_jax.engine.sampling import LEAST_TEMPERATURE
from earl_jax.envs.environment import LARGEST_REWARD
from earl_jax.models.config import ModelConfig
from earl_jax.rollout.scheduler import Order
from earl_jax.settings.errors import InputError, check_bounds, check_choices

# The most turns and tokens of an episode by default: one that never ends must not hold a run. The
# tokens are for a model without a checkpoint that says how many it reads.
MAX_TURNS = 1000
MAX_CONTEXT = 32768
# Contexts from which on large pages are worth what they waste.
LONG_CONTEXT = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stops:
    """The stops of a turn beside its end of turn.

    A turn ends at one of `token_ids`, or at the token that completes one of `strings` in its text.
    That token, and all of the string's, belong to the turn: they were sampled, are learnt from, and
    stay in the context, followed by the chat template's end of turn. The environment gets the text
    in front of the stop. Characters of a token behind a string that it completes are in the ids
    alone.
    """

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if "" in self.strings:
            raise InputError(f"{where}strings holds an empty string; remove it")
        if len(self.token_ids) > MAX_STOP_IDS or min(self.token_ids, default=0) < 0:
            raise InputError(
                f"{where}token_ids holds {len(self.token_ids)} ids, of which the least is "
                f"{min(self.token_ids)}; give at most {MAX_STOP_IDS} ids, which begin at 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The most tokens of a turn of the policy, and of an episode of both sides (0: no limit).

    `max_turns` are the policy's in an episode.
    """

    max_turn_tokens: int
    max_episode_tokens: int = 0
    max_turns: int = MAX_TURNS

    def validate(self, where: str) -> None:
        """Raises ValueError naming the field, after `where`, that breaks a rule."""
        if self.max_turn_tokens < 1:
            raise InputError(
                f"{where}max_turn_tokens is {self.max_turn_tokens}; it must be at least 1"
            )
        if self.max_turns < 1:
            raise InputError(f"{where}max_turns is {self.max_turns}; it must be at least 1")
        if self.max_episode_tokens < 0:
            raise InputError(
                f"{where}max_episode_tokens is {self.max_episode_tokens}; it must be at least 0 "
                "(0: no limit)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheRules:
    """Rules for the reuse of KV pages. A run has the defaults; tests and benchmarks force a branch.

    With `share_prefixes` the common beginning of prompts is computed once and taken over from slot
    to slot: within a row shard as it is, and from another shard's devices by `copy_prefixes`: "on"
    copies whatever is a chunk or more, so that nothing is read twice; "off" has each shard read it;
    "auto" takes what costs less by the chip's data sheet (rollout/preemption.py). `preemption`
    decides on the pages of preempted episodes: "recompute" reads their tokens again, "host" copies
    the pages to host memory and back, "auto" takes what costs less.

    With `keep_replies` an idle slot keeps all of its last episode for later prompts that go on with
    it, and not its prompt alone; what it gives up goes to host memory (host_sessions.py). Decode
    steps have computed it, which may round otherwise than the tiles that a prompt is read in:
    log-probs behind it are then those of one long episode, and depend, by rounding, on what was
    kept.
    """

    share_prefixes: bool = True
    keep_replies: bool = False
    copy_prefixes: Literal["auto", "off", "on"] = "auto"
    preemption: Literal["auto", "recompute", "host"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of the rollout stage.

    **Episodes.** `num_slots` episodes live at once, over all devices. `episodes_per_step` is the
    number of episodes that a step plays. Both divide by the data axis of the rollout's mesh: meshes
    whose data axis does not divide them are not used. The `group_size` episodes of a group play the
    same task. A turn is cut, and its episode over, at `max_turn_tokens`. `max_episode_tokens` is
    the limit of a whole episode (0: the context of the checkpoint's model; without a checkpoint
    32,768, or the last context bucket if that is more); a message that leaves no tokens for an
    answer ends it too. `max_turns` is the number of the policy's turns behind which a message ends
    it. The last turn of an episode that is cut earns `unfinished_reward`, beside its own reward.

    **Rounds.** `chunk_size` tokens of a prompt or a message are appended per slot and round.
    `burst` is the largest number of forward passes that decode in a round. With `num_draft_tokens`
    above 0 each of these also scores so many drafted tokens: those that followed the episode's last
    few ids before (speculative decoding by prompt lookup, drafts.py). Tokens and their distribution
    are those without drafts; log-probs differ in rounding, because a pass over more tokens adds up
    in another order. The effect is logged as `draft_acceptance` and `tokens_per_pass`.

    A round waits for the answers of environments, for each call once and up to `patience_s`
    seconds, and goes without the episodes whose environments take longer. "auto": it waits while
    the slots that have work lose less by that than the others would by missing the round
    (envs/round_wait.py), without a bound where no slot has work, and not for an environment whose
    last call took longer than a round. The speed of environments decides who takes part in which
    round, never an episode's tokens.

    **Order.** Where a step has more episodes than there are slots, `order` is that in which they
    begin. "fifo": in the order of their tasks. "longest": of a step's, first one of each group,
    then those whose group's episodes are the longest so far, or were when the same task was played
    before; so that the longest do not begin last. No token depends on it. Of several processes each
    plays a fixed part of the episodes, but with "queue": the order of "fifo", where those that have
    free slots take the groups that none has begun (share.py).

    **KV cache.** `context_buckets` are the max tokens per episode that programs are compiled for;
    beyond the last they double, up to the limit of an episode. The cache comes in pages of
    `page_size` tokens, of which an episode has as many as it needs: large ones are read faster,
    small ones waste less. 0 takes 128 where the last bucket is 1,024 or more, else 16. Where the
    budget holds no more pages, the shortest episodes are preempted: their pages are copied to
    host memory, of at most `preemption_host_gib` GiB, and back, or their tokens are read again,
    whichever costs less (preemption.py). With 0 GiB all are read again. `attention` is the kernel
    that reads pages: "auto" takes one kernel of ours, "triton" on GPUs and "pallas_tpu" on TPUs,
    where it runs, and "blockwise" elsewhere, which copies a few pages at a time and runs everywhere
    (kernels.py). The log says which and why.

    **Sampling.** The settings here hold for episodes that bring none of their own (see Sampling and
    Stops). `temperature` divides logits; 0 takes the likeliest token. `top_k` keeps the k likeliest
    tokens; 0: all. `top_p` keeps the fewest likeliest tokens whose share of the mass is at least so
    much; 1: all. `min_p` keeps tokens at least so likely as that fraction of the likeliest; 0: all.
    A turn ends where its text has one of `stop_strings`. A turn also ends at one of
    `stop_token_ids`.

    A token's log-prob is of the distribution that it was drawn from. Tokens that a cut keeps have
    higher log-probs by the mass that was cut off, which the trainer, who scores under all tokens,
    would take for a change of the policy. So cuts need config.train.ratio = "model", under which
    the log-prob of the model itself is recorded too.

    **Precision.** `compute_dtype` is the type of the engine's matrix work and KV cache: "model" is
    the trainer's, config.model.compute_dtype. `weight_dtype` is that of its matrices: "compute" is
    the type they are multiplied in, "int8" a byte a number with a scale for each output channel
    (models/quantization.py). `kv_dtype` is that of the KV cache: "compute", or "int8" with a scale
    for each token and head. The effect of another precision than the trainer's on log-probs is
    logged; see `TrainConfig.correction`.
    """

    num_slots: int = 128
    episodes_per_step: int = 128
    group_size: int = 8
    chunk_size: int = 128
    burst: int = 16
    num_draft_tokens: int = 0
    max_turn_tokens: int = 1024
    max_episode_tokens: int = 0
    max_turns: int = MAX_TURNS
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    unfinished_reward: float = -1.0
    patience_s: float | Literal["auto"] = "auto"
    order: Order = "fifo"
    context_buckets: tuple[int, ...] = (1024, 2048, 4096, 8192)
    page_size: int = 0
    attention: Literal["auto", "blockwise", "triton", "pallas_tpu"] = "auto"
    preemption_host_gib: float = 4.0
    compute_dtype: Literal["model", "float32", "bfloat16"] = "model"
    weight_dtype: Literal["compute", "int8"] = "compute"
    kv_dtype: Literal["compute", "int8"] = "compute"

    def part(self, num_players: int) -> "RolloutConfig":
        """Returns the settings of each of so many processes that play."""
        return dataclasses.replace(
            self,
            num_slots=self.num_slots // num_players,
            episodes_per_step=self.episodes_per_step // num_players,
        )

    def has_queue(self, num_players: int) -> bool:
        """Returns whether so many processes take a step's episodes off one queue (share.py).

        Each then has rows for twice its part of them.
        """
        waits, fits = self.num_slots < self.episodes_per_step, self.group_size * num_players
        return (
            num_players > 1 and waits and fits <= self.episodes_per_step and self.order == "queue"
        )

    def computes_as(self, model_dtype: str) -> str:
        """Returns the engine's compute type, for a trainer that computes in `model_dtype`."""
        return model_dtype if self.compute_dtype == "model" else self.compute_dtype

    def is_precise_as(self, model_dtype: str) -> bool:
        """Returns whether log-probs differ from such a trainer's by the order of sums alone."""
        rounded = "int8" in (self.weight_dtype, self.kv_dtype)
        return not rounded and self.computes_as(model_dtype) == model_dtype

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.rollout")
        self._check_sizes()
        self.limits.validate("config.rollout.")
        self.stops.validate("config.rollout.stop_")
        if not abs(self.unfinished_reward) <= LARGEST_REWARD:
            raise InputError(
                f"config.rollout.unfinished_reward is {self.unfinished_reward}; it must be finite "
                "in float32"
            )
        if self.patience_s != "auto" and not 0 <= self.patience_s < math.inf:
            raise InputError(
                f"config.rollout.patience_s is {self.patience_s}; it must be a number of seconds, "
                "at least 0, or 'auto'"
            )
        if not 0 <= self.preemption_host_gib < math.inf:
            raise InputError(
                f"config.rollout.preemption_host_gib is {self.preemption_host_gib}; it must be "
                "finite and at least 0 (0: preempted episodes are read again)"
            )
        if self.temperature < LEAST_TEMPERATURE:
            raise InputError(
                f"config.rollout.temperature is {self.temperature}; training needs log-probs of "
                f"sampled tokens, so it must be finite and at least {LEAST_TEMPERATURE}"
            )
        self.sampling.validate("config.rollout.")
        buckets = self.context_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 2:
            raise InputError(
                f"config.rollout.context_buckets is {buckets}; give rising numbers of tokens, "
                "such as (32, 64)"
            )

    def _check_sizes(self) -> None:
        """Raises ValueError unless slots, rows, chunks, bursts and pages can be so many."""
        sizes = ("num_slots", "episodes_per_step", "group_size", "chunk_size", "burst")
        check_bounds(self, "config.rollout", dict.fromkeys(sizes, (1, None)))
        if self.page_size < 0:
            raise InputError(
                f"config.rollout.page_size is {self.page_size}; it must be at least 0 (0: by the "
                "lengths of contexts)"
            )
        if self.num_draft_tokens < 0:
            raise InputError(
                f"config.rollout.num_draft_tokens is {self.num_draft_tokens}; it must be at least "
                "0 (0: no speculation)"
            )

    @property
    def tokens_a_page(self) -> int:
        """The value of `page_size`, or the one that 0 stands for."""
        return self.page_size or (128 if self.context_buckets[-1] >= LONG_CONTEXT else 16)

    @property
    def limits(self) -> Limits:
        """The limits of turns and episodes."""
        return Limits(
            max_turn_tokens=self.max_turn_tokens,
            max_episode_tokens=self.max_episode_tokens,
            max_turns=self.max_turns,
        )

    def max_context(self, of_checkpoint: int) -> int:
        """Returns the most tokens of a sample, where a checkpoint's model reads so many.

        NO_LIMIT: there is no checkpoint, or it does not say.
        """
        if of_checkpoint < NO_LIMIT:
            return of_checkpoint
        return self.max_episode_tokens or max(MAX_CONTEXT, self.context_buckets[-1])

    def with_limit(self, of_checkpoint: int, *, forks: bool) -> "RolloutConfig":
        """Returns the settings with a `max_episode_tokens` that is the model's too.

        An episode that `forks` is several samples, of which the model reads one at a time.
        """
        most = NO_LIMIT if forks else self.max_context(of_checkpoint)
        limit = min(self.max_episode_tokens or most, most)
        return dataclasses.replace(self, max_episode_tokens=limit)

    @property
    def round_tokens(self) -> int:
        """The most tokens that a slot generates in a round."""
        return self.burst * (1 + self.num_draft_tokens)

    @property
    def sampling(self) -> Sampling:
        """The sampling of episodes that bring none of their own."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    @property
    def stops(self) -> Stops:
        """The stops of episodes that bring none of their own."""
        return Stops(strings=self.stop_strings, token_ids=self.stop_token_ids)

    def max_tokens_for(self, tokens: int) -> int:
        """Returns the smallest context bucket that holds so many tokens.

        The last may double. None is above `max_episode_tokens`, unless so many are asked for.
        """
        max_tokens = next(
            (b for b in self.context_buckets if b >= tokens), self.context_buckets[-1]
        )
        while max_tokens < tokens:
            max_tokens *= 2
        limit = self.max_episode_tokens
        return limit if tokens <= limit < max_tokens else max_tokens


def make_engine_config(
    rollout: RolloutConfig,
    model: ModelConfig,
    vocab_size: int,
    *,
    num_devices: int,
    seed: int,
    model_logprobs: bool,
    batches: int = 1,
) -> EngineConfig:
    """Returns the engine's settings for one process, whose part of a rollout is given.

    There are rows for so many `batches` of a step's episodes.

    With `model_logprobs` log-probs under the model itself are recorded too. The rules end turns at
    id 0 and allow every reply; the caller replaces that.
    """
    rows = make_rows(
        num_rows=rollout.episodes_per_step,
        num_slots=rollout.num_slots,
        num_devices=num_devices,
        batches=batches,
    )
    dtype = rollout.computes_as(model.compute_dtype)
    return EngineConfig(
        model=dataclasses.replace(model, compute_dtype=dtype),
        vocab_size=vocab_size,
        weight_dtype=rollout.weight_dtype,
        kv_dtype=rollout.kv_dtype,
        num_slots=rollout.num_slots,
        num_rows=rows.total,
        chunk_size=rollout.chunk_size,
        rules=SlotRules(
            burst=rollout.burst,
            end_of_turn_ids=(0,),
            model_logprobs=model_logprobs,
            truncates=rollout.sampling.truncates,
            draft=rollout.num_draft_tokens,
            attention=rollout.attention,
        ),
        seed=seed,
        page_size=rollout.tokens_a_page,
    )
