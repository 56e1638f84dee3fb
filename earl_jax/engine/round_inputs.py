# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The inputs and outputs of a round: the records on both sides, and the one array each way."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.engine.choices import Choices, no_choices
from earl_jax.engine.config import MAX_STOP_IDS, NO_ID, NO_LIMIT, Sampling
from earl_jax.engine.pages import NO_PAGE
from earl_jax.engine.rows import NO_ROW
from earl_jax.engine.sampling import SamplingRows, sampling_rows


class RoundInputs(NamedTuple):
    """The host's inputs to one round: B slots, chunks of C tokens. All i32 but `sampling`.

    On the host a field may be a number that holds for all slots. `pack_inputs` makes one array of
    the record, `unpack_inputs` the record again on the devices.

    - `chunk` [B,C], `count` [B]: the first `count` tokens of the chunk are appended.
    - `restart`: the slot is emptied first, and takes over `seed`, `row`, `sampling`, `stop_ids` and
      `origin`. Its episode may have had `turns` before, and `turn_tokens` tokens of the last one,
      if that goes on.
    - `fork`: only the cache is emptied. The episode goes on in its row with a sample that begins
      with the chunk, at `origin`, behind the pending token.
    - `rewind`: the cache of a sample is emptied that is to be read again, because its pages were
      given up.
    - `source`, `shared`, `copied`: behind any of these three, with `shared` above 0, the slot
      begins with the first `shared` tokens in the cache of the slot `source` numbers further on (of
      the same data shard; 0 is the slot itself), and the chunk follows. Its table has their whole
      pages already; `copied` is the page of the whole pool to copy the tokens behind these from,
      NO_PAGE if there are none. Sources are read slot by slot, in their order: a slot that took
      tokens over has them for the slots behind it. `copied` is [B,G], one of each group of layers.
    - `written`: the ids of the shared tokens are in the slot's row already, so none are copied.
    - `begin_turn`: a turn of at most `turn_limit` tokens begins behind the chunk. `resume_turn`: it
      goes on that the sample was in when it was rewound, or its run was interrupted. A slot without
      a chunk goes on with its turn where it is in one.
    - `end_turn`: before all else, the turn of the last round ends as if its last `discarded` tokens
      had not been sampled.
    - `version`: of the weights. `choices`: the replies to which the turn that begins is restricted;
      present exactly if the engine was built for them (`SlotRules.choice_branches`).
    """

    chunk: Any
    count: Any
    restart: Any
    begin_turn: Any
    seed: Any
    row: Any
    sampling: SamplingRows
    version: Any
    fork: Any = 0
    origin: Any = 0
    turns: Any = 0
    turn_tokens: Any = 0
    rewind: Any = 0
    resume_turn: Any = 0
    end_turn: Any = 0
    discarded: Any = 0
    written: Any = 0
    source: Any = 0
    shared: Any = 0
    copied: Any = NO_PAGE
    turn_limit: Any = NO_LIMIT
    stop_ids: Any = NO_ID
    choices: Choices | None = None


def idle_inputs(
    num_slots: int,
    chunk_size: int,
    choice_branches: int,
    sampling: Sampling,
    version: int,
    num_groups: int = 1,
) -> RoundInputs:
    """Returns inputs that append nothing, as numpy arrays to write into."""

    def full(value: int, *shape: int) -> np.ndarray:
        return np.full((num_slots, *shape), value, np.int32)

    zeros = {
        name: full(0) for name in ("count", "seed", "discarded", "source", "shared", *_EPISODE)
    }
    flags = {name: full(0) for name in _FLAGS}
    return RoundInputs(
        chunk=full(0, chunk_size),
        row=full(NO_ROW),
        copied=full(NO_PAGE, num_groups),
        turn_limit=full(NO_LIMIT),
        stop_ids=full(NO_ID, MAX_STOP_IDS),
        sampling=sampling_rows(sampling, num_slots),
        version=version,
        choices=no_choices(num_slots, choice_branches) if choice_branches else None,
        **zeros,
        **flags,
    )


# The fields of one bit, packed into one column in this order.
_FLAGS = ("restart", "begin_turn", "fork", "rewind", "resume_turn", "end_turn", "written")


def pack_inputs(inputs: RoundInputs, num_groups: int = 1) -> np.ndarray:
    """Returns i32[B, inputs_width]: one array a round, because an array costs more than its bytes.

    The first columns are `_COLUMNS`. There are so many groups of layers.
    """
    num_slots = len(inputs.count)
    flags = sum(np.asarray(getattr(inputs, name)) << bit for bit, name in enumerate(_FLAGS))
    numbers = [flags, *(getattr(inputs, name) for name in _COLUMNS)]
    columns = [np.broadcast_to(number, num_slots) for number in numbers]
    columns += [np.asarray(column).view(np.int32) for column in inputs.sampling]
    stops = np.broadcast_to(inputs.stop_ids, (num_slots, MAX_STOP_IDS))
    copied = np.broadcast_to(inputs.copied, (num_slots, num_groups))
    trees = inputs.choices
    trees = () if trees is None else (trees.parents, trees.tokens, trees.node[:, None])
    packed = [np.stack(columns, axis=1), stops, copied, inputs.chunk, *trees]
    return np.concatenate(packed, axis=1).astype(np.int32)


# Where a slot's episode stands that begins in it.
_EPISODE = ("origin", "turns", "turn_tokens")
_COLUMNS = ("count", "seed", "row", "version", "source", "shared")
_COLUMNS += ("turn_limit", "discarded", *_EPISODE)
# In front of a packed chunk and what it copies: the flags, the columns, the fields of
# SamplingRows, the stop ids.
INPUT_COLUMNS = 1 + len(_COLUMNS) + len(SamplingRows._fields) + MAX_STOP_IDS


def inputs_width(chunk_size: int, num_groups: int = 1, choice_branches: int = 0) -> int:
    """Returns the number of columns of packed inputs, for so many groups of layers."""
    chooses = 2 * choice_branches + 1 if choice_branches else 0
    return INPUT_COLUMNS + num_groups + chunk_size + chooses


def unpack_inputs(packed: jax.Array, num_groups: int = 1, choice_branches: int = 0) -> RoundInputs:
    """Returns the inverse of `pack_inputs`, on the devices."""
    choices = None
    if choice_branches:
        packed, parents, tokens, node = jnp.split(
            packed, packed.shape[1] - np.array([2 * choice_branches + 1, choice_branches + 1, 1]), 1
        )
        choices = Choices(parents=parents, tokens=tokens, node=node[:, 0])
    first_stop = INPUT_COLUMNS - MAX_STOP_IDS
    flags, *columns = packed[:, :first_stop].T
    numbers = dict(zip(_COLUMNS, columns, strict=False))
    bits = SamplingRows(*columns[len(_COLUMNS) :])
    return RoundInputs(
        chunk=packed[:, INPUT_COLUMNS + num_groups :],
        copied=packed[:, INPUT_COLUMNS : INPUT_COLUMNS + num_groups],
        **{name: (flags >> bit) & 1 > 0 for bit, name in enumerate(_FLAGS)},
        **numbers,
        stop_ids=packed[:, first_stop:INPUT_COLUMNS],
        sampling=SamplingRows(
            temperature=jax.lax.bitcast_convert_type(bits.temperature, jnp.float32),
            top_k=bits.top_k,
            top_p=jax.lax.bitcast_convert_type(bits.top_p, jnp.float32),
            min_p=jax.lax.bitcast_convert_type(bits.min_p, jnp.float32),
        ),
        choices=choices,
    )


class RoundOutputs(NamedTuple):
    """The tokens that a round sampled: `tokens` [B,K], `logprobs` f32[B,K], `count` of each row.

    `active` [B]: the turn goes on. `model_logprobs` f32[B,K] as in `Experience`, where the engine
    records them. Where it drafts tokens: the `passes` [B] of the model that a slot took, each of
    which samples one token of its own, and the `drafted` [B] tokens that they scored beside it.
    `faults`: by slot, how many tokens it sampled before the first whose logits are not finite; that
    one, and those behind it, are no samples of the policy.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    count: np.ndarray
    active: np.ndarray
    model_logprobs: np.ndarray | None = None
    passes: np.ndarray | None = None
    drafted: np.ndarray | None = None
    faults: Mapping[int, int] = MappingProxyType({})


def pack_outputs(
    tokens: jax.Array,
    logprobs: jax.Array,
    count: jax.Array,
    active: jax.Array,
    model_logprobs: jax.Array | None = None,
    drafts: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns one i32 array for the host: [B, 2K + 2], or [B, 3K + 2] with `model_logprobs`.

    With `drafts`, which are the `passes` and the `drafted` of RoundOutputs, there are two columns
    more.
    """
    floats = [logprobs] if model_logprobs is None else [logprobs, model_logprobs]
    bits = [jax.lax.bitcast_convert_type(values, jnp.int32) for values in floats]
    columns = [*(drafts or ()), count, active.astype(jnp.int32)]
    return jnp.concatenate([tokens, *bits, jnp.stack(columns, axis=1)], 1)


def unpack_outputs(
    packed: np.ndarray,
    *,
    model_logprobs: bool = False,
    drafts: bool = False,
) -> RoundOutputs:
    """Returns the inverse of `pack_outputs`, on the host."""
    # A copy: on a CPU it is the devices' memory, and replies keep what a round sampled.
    packed, columns = np.array(packed), 2 + 2 * drafts
    width = (packed.shape[1] - columns) // (3 if model_logprobs else 2)
    floats = packed.view(np.float32)
    logprobs, count = floats[:, width : 2 * width], packed[:, -2]
    is_fault = ~np.isfinite(logprobs) & (np.arange(width) < count[:, None])
    faulty = np.flatnonzero(is_fault.any(axis=1)).tolist()
    return RoundOutputs(
        tokens=packed[:, :width],
        logprobs=logprobs,
        count=count,
        active=packed[:, -1].astype(bool),
        model_logprobs=floats[:, 2 * width : 3 * width] if model_logprobs else None,
        passes=packed[:, -4] if drafts else None,
        drafted=packed[:, -3] if drafts else None,
        faults={slot: int(is_fault[slot].argmax()) for slot in faulty},
    )
