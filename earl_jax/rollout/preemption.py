# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Costs of preemption and of copied prompts: copying against computing again. Pure.

A preempted episode's pages are copied to host memory, or read again; a prompt that another row
shard has read is copied from its devices, or read here too. All are priced by a roofline of the
chip's data sheet, and the cheaper is taken. Nothing is measured: two runs of one config choose
alike, and log-probs of tokens that are read again differ by rounding from those that were kept.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax

from earl_jax.engine.config import EngineConfig
from earl_jax.models.engine_parameters import engine_specs
from earl_jax.models.parameters import ParameterSpec, is_spec
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.topology import CHIPS, Chip, chip_of

Where = Literal["host", "recompute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device, per second; and the seconds that a call takes to start."""

    flops: float
    memory_bytes: float
    host_bytes: float
    link_bytes: float
    call_s: float


# One of eight virtual devices on two cores, by the order of magnitude. There "host memory" is the
# same as the device's own.
ON_CPU = Rates(flops=1e10, memory_bytes=5e9, host_bytes=2e9, link_bytes=2e9, call_s=5e-4)
# An all-reduce sends a block's bytes twice, in fp32 (`PageCopies.send`): of bf16 twice as many.
SENT_TIMES = 4
# What starting a program and its transfers costs on a chip.
CHIP_CALL_S = 1e-4
# A chip without a data sheet here is taken for one of its platform: what counts is the ratio of its
# rates, which changes little from one generation to the next.
_LIKE = {"gpu": "h100", "tpu": "v5e"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of an engine's device, for one row shard.

    A token is multiplied with `weights` numbers, a chunk reads `weight_bytes`, a query and a key
    take `pair_flops` over all layers and heads; one copy of `block_tokens` tokens has
    `block_bytes`.
    """

    weights: float
    weight_bytes: float
    pair_flops: float
    chunk_tokens: int
    block_bytes: float
    block_tokens: int


class Choice(NamedTuple):
    """The destination of preempted pages, and the reason in words."""

    where: Where
    reason: str


def choose_preemption(tokens: int, work: Work, rates: Rates) -> Choice:
    """Returns the cheaper way to have the cache of so many tokens again.

    Example: 1000 tokens in 4 blocks of 32 MB over a link of 64 GB/s are 4 ms, out and back; by
    chunks of 100 with weights of 2 GB at 2 TB/s they are 10 ms.
    """
    copied, read = copying_s(tokens, work, rates), reading_s(tokens, work, rates)
    words = (
        f"{tokens:,} tokens: {1e3 * copied:,.1f} ms to host memory and back, {1e3 * read:,.1f} ms "
        "to be read again"
    )
    return Choice("host" if copied < read else "recompute", words)


def copying_s(tokens: int, work: Work, rates: Rates) -> float:
    """Returns the seconds of a device's link for copies to the host and back."""
    blocks = math.ceil(tokens / work.block_tokens)
    return 2 * blocks * (work.block_bytes / rates.host_bytes + rates.call_s)


def reading_s(tokens: int, work: Work, rates: Rates) -> float:
    """Returns the seconds of a device for prefilling so many tokens, chunk by chunk."""
    chunks = math.ceil(tokens / work.chunk_tokens)
    matrices = 2 * work.weights * work.chunk_tokens / rates.flops
    attention = work.pair_flops * tokens**2 / 2 / rates.flops
    return chunks * max(matrices, work.weight_bytes / rates.memory_bytes) + attention


def is_worth_sending(
    tokens: int, setting: Literal["auto", "off", "on"], work: Work, rates: Rates
) -> bool:
    """Returns whether so many tokens are copied from another row shard, and not read.

    "on" copies a chunk and more, "auto" copies where that is sooner done than reading.

    Example: 1000 tokens in 4 blocks of 32 MB, which are twice as much in fp32 and go over a link of
    450 GB/s and back in an all-reduce, are 1.1 ms; by chunks of 100 with weights of 2 GB at 2 TB/s
    they are 10 ms.
    """
    if setting != "auto":
        return setting == "on" and tokens >= work.chunk_tokens
    blocks = math.ceil(tokens / work.block_tokens)
    sent = blocks * (SENT_TIMES * work.block_bytes / rates.link_bytes + rates.call_s)
    return tokens > 0 and sent < reading_s(tokens, work, rates)


def rates_of(layout: Layout) -> Rates:
    """Returns the rates of the devices of an engine's layout."""
    device = next(iter(layout.activations("").device_set))
    if device.platform not in _LIKE:
        return ON_CPU
    chip: Chip = chip_of(device.device_kind) or CHIPS[_LIKE[device.platform]]
    return Rates(
        flops=chip.bf16_flops_per_s,
        memory_bytes=chip.hbm_bytes_per_s,
        host_bytes=chip.host_bytes_per_s,
        link_bytes=chip.link_bytes_per_s,
        call_s=CHIP_CALL_S,
    )


def work_of(config: EngineConfig, layout: Layout, block_bytes: int, block_tokens: int) -> Work:
    """Returns an engine's work; `block_bytes` is over all devices of a row shard."""
    model, shape = config.model, layout.shape
    specs = jax.tree.leaves(
        engine_specs(model, config.vocab_size, "compute")["layers"], is_leaf=is_spec
    )
    share = model.experts_per_token / model.num_experts if model.num_experts else 1.0

    def numbers(spec: ParameterSpec) -> float:
        cut = shape.tensor * (shape.expert if "E" in spec.axes else 1)
        return math.prod(spec.shape) / cut

    itemsize = 1 if config.weight_dtype == "int8" else jax.numpy.dtype(model.compute_dtype).itemsize
    used = sum(numbers(spec) * (share if "E" in spec.axes else 1.0) for spec in specs)
    # Latents are whole on each device of the `tensor` axis.
    cut = shape.context * (1 if model.latent_size else shape.tensor)
    read = 2 * model.head_size
    if model.latent_size:
        read = model.cached_size + model.latent_size
    return Work(
        # A chunk's tokens, and each page, are cut over `context`.
        weights=used / shape.context,
        weight_bytes=itemsize * sum(map(numbers, specs)),
        pair_flops=2.0 * model.num_layers * model.num_heads * read / (shape.tensor * shape.context),
        chunk_tokens=config.chunk_size,
        block_bytes=block_bytes / cut,
        block_tokens=block_tokens,
    )
