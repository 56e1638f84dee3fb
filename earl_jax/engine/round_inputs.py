# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What travels between host and devices in a round: the host's orders, and what came of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.choices import Choices
from earl_jax.engine.config import MAX_STOP_IDS
from earl_jax.engine.sampling import SamplingRows

NO_ROW = NO_PAGE = NO_ID = -1
NO_LIMIT = 2**31 - 1
ORDER_COLUMNS = 14 + MAX_STOP_IDS


class RoundInputs(NamedTuple):
    """The host's orders for one round, packed as i32[B, order_width] by `pack_orders`.

    `chunk` i32[B,C] and `count` (how many of them) are appended; `restart` empties the slot first
    and takes `seed`, `row`, `sampling` and `stop_ids` over; `fork` empties its cache alone: the
    episode goes on in its row, behind the pending token, with a sample that begins with the chunk.
    Behind either, with `shared` above 0, the slot begins with the first `shared` tokens in the
    cache of the slot `source` places further on (of the same data shard; 0 is the slot itself), and
    the chunk comes behind these. Its table has their whole pages already; `copied` is the page,
    numbered in the whole pool, to copy the tokens behind these from, NO_PAGE if none is. Where the
    ids of what is taken over are `written` in the slot's row already, none are copied. So it goes
    behind `rewind`, which empties the cache of a sample that is to be read again, by other weights
    or because its pages were given up. `speak` lets the policy begin a turn of at most `turn_limit`
    tokens behind the chunk, `resume` go on with the one it was in when its sample was rewound. A
    slot with nothing to append goes on with its turn where it is in one. `halt` comes before all
    else: it ends the turn of the last round, as if its last `given_up` tokens had not been sampled.
    With `choices` (where the engine has room for them) the turn that begins must be one of these.

    Sources' ids are read slot by slot, in their order: a slot that took something over has it for
    those behind it.
    """

    chunk: jax.Array
    count: jax.Array
    restart: jax.Array
    fork: jax.Array
    rewind: jax.Array
    speak: jax.Array
    resume: jax.Array
    halt: jax.Array
    written: jax.Array
    given_up: jax.Array
    seed: jax.Array
    row: jax.Array
    source: jax.Array
    shared: jax.Array
    copied: jax.Array
    turn_limit: jax.Array
    stop_ids: jax.Array
    sampling: SamplingRows
    version: jax.Array
    choices: Choices | None


_RESTART, _SPEAK, _FORK, _REWIND, _RESUME, _HALT, _WRITTEN = 1, 2, 4, 8, 16, 32, 64


def pack_inputs(
    *,
    chunk: np.ndarray,
    count: np.ndarray,
    restart: np.ndarray,
    speak: np.ndarray,
    seed: np.ndarray,
    row: np.ndarray,
    sampling: SamplingRows,
    version: int,
    fork: np.ndarray | int = 0,
    rewind: np.ndarray | int = 0,
    resume: np.ndarray | int = 0,
    source: np.ndarray | int = 0,
    shared: np.ndarray | int = 0,
    copied: np.ndarray | int = NO_PAGE,
    turn_limit: np.ndarray | int = NO_LIMIT,
    stop_ids: np.ndarray | int = NO_ID,
    halt: np.ndarray | int = 0,
    written: np.ndarray | int = 0,
    given_up: np.ndarray | int = 0,
    choices: Choices | None = None,
) -> np.ndarray:
    """One i32 array per round, because each array sent costs more than its bytes.

    `choices` are there exactly if the engine has room for them (`SlotRules.choice_branches`).
    """
    flags = restart * _RESTART + speak * _SPEAK + fork * _FORK + rewind * _REWIND
    flags = flags + resume * _RESUME + halt * _HALT + written * _WRITTEN
    numbers = (version, source, shared, copied, turn_limit, given_up)
    same = [np.broadcast_to(number, count.shape) for number in numbers]
    drawn = [np.asarray(column).view(np.int32) for column in sampling]
    columns = np.stack([count, flags, seed, row, *same, *drawn], axis=1)
    stops = np.broadcast_to(stop_ids, (len(count), MAX_STOP_IDS))
    trees = () if choices is None else (choices.parents, choices.tokens, choices.node[:, None])
    return np.concatenate([columns, stops, chunk, *trees], axis=1).astype(np.int32)


def order_width(chunk_size: int, choice_branches: int = 0) -> int:
    """Columns of packed orders."""
    return ORDER_COLUMNS + chunk_size + (2 * choice_branches + 1 if choice_branches else 0)


def unpack_inputs(packed: jax.Array, choice_branches: int = 0) -> RoundInputs:
    """The inverse of `pack_orders`, on the devices."""
    choices = None
    if choice_branches:
        packed, parents, tokens, node = jnp.split(
            packed, packed.shape[1] - np.array([2 * choice_branches + 1, choice_branches + 1, 1]), 1
        )
        choices = Choices(parents=parents, tokens=tokens, node=node[:, 0])
    first_stop = ORDER_COLUMNS - MAX_STOP_IDS
    columns = packed[:, :first_stop].T
    count, flags, seed, row, version, source, shared, copied, *others = columns
    turn_limit, given_up, *drawn = others
    bits = SamplingRows(*drawn)
    return RoundInputs(
        chunk=packed[:, ORDER_COLUMNS:],
        count=count,
        restart=flags & _RESTART > 0,
        fork=flags & _FORK > 0,
        rewind=flags & _REWIND > 0,
        speak=flags & _SPEAK > 0,
        resume=flags & _RESUME > 0,
        halt=flags & _HALT > 0,
        written=flags & _WRITTEN > 0,
        given_up=given_up,
        seed=seed,
        row=row,
        source=source,
        shared=shared,
        copied=copied,
        turn_limit=turn_limit,
        stop_ids=packed[:, first_stop:ORDER_COLUMNS],
        sampling=SamplingRows(
            temperature=jax.lax.bitcast_convert_type(bits.temperature, jnp.float32),
            top_k=bits.top_k,
            top_p=jax.lax.bitcast_convert_type(bits.top_p, jnp.float32),
            min_p=jax.lax.bitcast_convert_type(bits.min_p, jnp.float32),
        ),
        version=version,
        choices=choices,
    )


class Report(NamedTuple):
    """What a round sampled: `tokens` [B,K], `logprobs` f32[B,K], the first `count` of each row.

    `model_logprobs` f32[B,K] as in `Experience`, where the engine writes them down. Where it may
    guess tokens: `passes` [B] of the model that these took, and the `drafted` [B] guesses in them;
    each pass says one token of its own, and the others were guessed. Where slots take turns in
    decode steps: the `steps` [B] of the slot's data shard.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    count: np.ndarray
    active: np.ndarray
    model_logprobs: np.ndarray | None = None
    passes: np.ndarray | None = None
    drafted: np.ndarray | None = None
    steps: np.ndarray | None = None


def pack_report(
    tokens: jax.Array,
    logprobs: jax.Array,
    count: jax.Array,
    active: jax.Array,
    model_logprobs: jax.Array | None = None,
    drafts: tuple[jax.Array, jax.Array] | None = None,
    steps: jax.Array | None = None,
) -> jax.Array:
    """One i32 array for the host: [B, 2K + 2], or [B, 3K + 2] with `model_logprobs`.

    With `steps` there is one column more, with `drafts`, which are the `passes` and the `drafted`
    of a Report, two.
    """
    floats = [logprobs] if model_logprobs is None else [logprobs, model_logprobs]
    bits = [jax.lax.bitcast_convert_type(values, jnp.int32) for values in floats]
    columns = [*(drafts or ()), count, active.astype(jnp.int32)]
    columns = columns if steps is None else [steps, *columns]
    return jnp.concatenate([tokens, *bits, jnp.stack(columns, axis=1)], 1)


def unpack_report(
    packed: np.ndarray,
    *,
    model_logprobs: bool = False,
    drafts: bool = False,
    steps: bool = False,
) -> Report:
    """The inverse of `pack_report`, on the host."""
    columns = 2 + 2 * drafts + steps
    width = (packed.shape[1] - columns) // (3 if model_logprobs else 2)

    def floats(first: int) -> np.ndarray:
        return np.ascontiguousarray(packed[:, first : first + width]).view(np.float32)

    return Report(
        tokens=packed[:, :width],
        logprobs=floats(width),
        count=packed[:, -2],
        active=packed[:, -1].astype(bool),
        model_logprobs=floats(2 * width) if model_logprobs else None,
        passes=packed[:, -4] if drafts else None,
        drafted=packed[:, -3] if drafts else None,
        steps=packed[:, -columns] if steps else None,
    )
