# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What the programs of one engine are compiled for."""

import dataclasses
from typing import Literal

from earl_jax.engine.config import RolloutConfig, Sampling
from earl_jax.engine.scheduler import make_rows
from earl_jax.engine.slots import SlotRules
from earl_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What JetStream's calls are compiled for.

    Prompts of up to `max_prefill_length` tokens (a power of two, from 16; JetStream's own Driver
    takes none above 32,768); `places` for a prompt and its reply; how tokens are drawn for who does
    not say. Slots have room for `first_room` places at first (0: for all), which doubles as
    requests come to more. The KV cache begins with `cache_tokens` in all, and `first_room` a row
    shard at least; 0: `places` for every slot. Where that is not enough requests wait for others,
    and where it is not enough for one alone the cache grows.

    `speculation` says which steps guess tokens where `SlotRules.ngram` lets them: "on", all; "auto"
    those of the faster kind, by the clock.
    """

    max_prefill_length: int = 64
    context_tokens: int = 128
    first_room: int = 0
    cache_tokens: int = 0
    sampling: Sampling = Sampling()
    speculation: Literal["on", "auto"] = "on"

    @property
    def first_context_tokens(self) -> int:
        """Places that slots have room for at first."""
        return min(self.first_room or self.context_tokens, self.context_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine's programs are compiled for.

    `num_slots` episodes live at once over all devices, and write `num_rows` rows of experience,
    those for guests among them (scheduler.Rows). A decode step of a rollout has `step_rows` rows
    over all devices, 0: one for each slot; `rules` leaves it to this. `chunk_size` tokens of a
    prompt or an answer are appended per slot and round. The KV cache comes in pages of `page_size`
    tokens. `weight_dtype` is "compute", the model's compute type, or "int8"
    (models/quantization.py). `serving` is for JetStream's calls alone.
    """

    model: ModelConfig
    vocab_size: int
    num_slots: int
    num_rows: int
    chunk_size: int
    rules: SlotRules
    seed: int
    step_rows: int = 0
    page_size: int = 64
    weight_dtype: Literal["compute", "int8"] = "compute"
    kv_dtype: Literal["compute", "int8"] = "compute"
    serving: Serving = Serving()


def make_engine_config(
    rollout: RolloutConfig, model: ModelConfig, vocab_size: int, *, num_devices: int, seed: int
) -> EngineConfig:
    """Returns what the engine of one process is compiled for, whose part of a rollout is given.

    Its rules end turns at id 0 and allow every reply, until they are told otherwise.
    """
    rows = make_rows(
        num_rows=rollout.episodes_per_step, num_slots=rollout.num_slots, num_devices=num_devices
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
            append_rows=rollout.append_rows,
            model_logprobs=rollout.model_logprobs,
            ngram=rollout.speculation.ngram if rollout.max_drafts else 0,
            draft=rollout.max_drafts,
        ),
        seed=seed,
        step_rows=rollout.step_rows,
        page_size=rollout.tokens_a_page,
    )
