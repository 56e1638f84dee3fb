# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Small programs that copy rows of experience between row shards, and from the host.

A row is copied from device to device in one all-reduce, to which every device but the
writer's adds zeros. It is a program of its own, in which all devices take part alike, and not part
of a round, whose shards decode unequally long.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from earl_jax.engine.config import NO_ID
from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.rows import NO_ROW
from earl_jax.sharding.layout import Layout
from earl_jax.sharding.placing import place
from earl_jax.sharding.row_gather import as_bits, gather_rows, local_rows
from earl_jax.trajectory import Experience


class RowMove(NamedTuple):
    """A copy of the first `tokens` positions of buffer row `source` to buffer row `target`."""

    source: int
    target: int
    tokens: int


class RowIds(NamedTuple):
    """Token ids to write into buffer row `row` from position `first` on."""

    row: int
    first: int
    ids: Sequence[int] | np.ndarray


# Fills a call that moves fewer rows than it could.
_NOTHING = RowMove(-1, -1, 0)


class RowCopies:
    """The programs for one engine; each is compiled once for a number of max tokens."""

    def __init__(self, layout: Layout, row_shardings: Experience, num_slots: int) -> None:
        """Builds the programs; a call moves up to `num_slots` rows of these `row_shardings`."""
        self._num_slots, self._everywhere = num_slots, layout.activations("")
        self._num_shards = layout.num_row_shards
        rows = P(layout.row_axes)

        def move_on_shard(experience: Experience, moves_K3: jax.Array) -> Experience:
            first = jax.lax.axis_index(layout.row_axes) * experience.tokens.shape[0]
            return _move_rows(experience, moves_K3, first, layout.row_axes)

        def write_on_shard(tokens: jax.Array, packed: jax.Array) -> jax.Array:
            first = jax.lax.axis_index(layout.row_axes) * tokens.shape[0]
            return _write_ids(tokens, packed, first)

        def write_row_on_shard(experience: Experience, sent: Any) -> Experience:
            (row, fields), num_rows = sent, experience.tokens.shape[0]
            first = jax.lax.axis_index(layout.row_axes) * num_rows
            local = local_rows(row[None], first, num_rows)
            return jax.tree.map(
                lambda field, new: field.at[local].set(new[None], mode="drop"), experience, fields
            )

        def over_rows(function: Any, out: Any) -> Any:
            mapped = jax.shard_map(
                function,
                mesh=layout.mesh,
                in_specs=(rows, P()),
                out_specs=rows,
                axis_names=layout.by_hand(layout.row_axes),
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=0, out_shardings=out)

        self._move_rows = over_rows(move_on_shard, row_shardings)
        self._write_ids = over_rows(write_on_shard, row_shardings.tokens)
        self._write_row = over_rows(write_row_on_shard, row_shardings)
        gathered = jax.shard_map(
            lambda experience, rows_N: gather_rows(experience, rows_N, layout.row_axes),
            mesh=layout.mesh,
            in_specs=(rows, P()),
            out_specs=rows,
            axis_names=layout.by_hand(layout.row_axes),
            check_vma=False,
        )
        self._gather = jax.jit(gathered, out_shardings=row_shardings)

    def move_rows(self, state: DecodeState, moves: Sequence[RowMove]) -> DecodeState:
        """Returns the state with rows copied and their sources cleared.

        All rows are read before one is written; a move to NO_ROW only clears. Donates the
        experience of `state`.
        """
        packed = np.tile(np.array(_NOTHING, np.int32), (self._num_slots, 1))
        packed[: len(moves)] = np.array(moves, np.int32)
        sent = place(packed, self._everywhere)
        return dataclasses.replace(state, experience=self._move_rows(state.experience, sent))

    def write_ids(self, state: DecodeState, writes: Sequence[RowIds]) -> DecodeState:
        """Returns the state with these ids in its rows. Donates the tokens of `state`."""
        tokens = state.experience.tokens
        packed = np.full((self._num_slots, 1 + tokens.shape[1]), NO_ID, np.int32)
        for line, (row, first, ids) in zip(packed, writes, strict=False):
            line[0], line[1 + first : 1 + first + len(ids)] = row, ids
        tokens = self._write_ids(tokens, place(packed, self._everywhere))
        experience = dataclasses.replace(state.experience, tokens=tokens)
        return dataclasses.replace(state, experience=experience)

    def write_row(self, state: DecodeState, row: int, fields: Experience) -> DecodeState:
        """Returns the state with `fields`, numpy arrays of a row each, in this buffer row.

        Donates the experience of `state`.
        """
        sent = jax.tree.map(lambda part: place(part, self._everywhere), (np.int32(row), fields))
        return dataclasses.replace(state, experience=self._write_row(state.experience, sent))

    def gather(self, experience: Experience, rows: Sequence[int]) -> Experience:
        """Returns copies of these rows in this order, over the same row shards.

        Zeros follow where their number does not divide by that of the shards.
        """
        padding = [NO_ROW] * (-len(rows) % self._num_shards)
        sent = place(np.array([*rows, *padding], np.int32), self._everywhere)
        return self._gather(experience, sent)


def _move_rows(
    experience: Experience, moves_K3: jax.Array, first_row: jax.Array, row_axes: tuple[str, ...]
) -> Experience:
    """Runs `RowCopies.move_rows` for the shard whose rows begin at `first_row`."""
    num_rows, max_tokens = experience.tokens.shape
    sources_K, targets_K, counts_K = moves_K3.T
    sources_K = local_rows(sources_K, first_row, num_rows)
    targets_K = local_rows(targets_K, first_row, num_rows)
    counts_KP = jnp.arange(max_tokens)[None, :] < counts_K[:, None]
    fields, structure = jax.tree.flatten(experience)
    # As bits, so that all fields are one array, and a sum with zeros changes none.
    read_FKP = jnp.stack(
        [
            jnp.where(counts_KP, as_bits(field).at[sources_K].get(mode="fill", fill_value=0), 0)
            for field in fields
        ]
    )
    read_FKP = jax.lax.psum(read_FKP, row_axes)
    cleared = jax.tree.map(lambda field: field.at[sources_K].set(0, mode="drop"), experience)
    written = [
        field.at[targets_K].set(jax.lax.bitcast_convert_type(bits_KP, field.dtype), mode="drop")
        for field, bits_KP in zip(jax.tree.leaves(cleared), read_FKP, strict=True)
    ]
    return jax.tree.unflatten(structure, written)


def _write_ids(tokens: jax.Array, packed: jax.Array, first_row: jax.Array) -> jax.Array:
    """Runs `RowCopies.write_ids` for the shard whose rows begin at `first_row`."""
    rows_K, ids_KP = local_rows(packed[:, 0], first_row, tokens.shape[0]), packed[:, 1:]
    before_KP = tokens.at[rows_K].get(mode="clip")
    return tokens.at[rows_K].set(jnp.where(ids_KP == NO_ID, before_KP, ids_KP), mode="drop")
