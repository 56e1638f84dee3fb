# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of experience between slots, and from the host: small programs.

A guest's row goes home from device to device in one all-reduce, to which every device but the
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

from earl_jax.engine.decode_state import DecodeState
from earl_jax.engine.round_inputs import NO_ID
from earl_jax.engine.scheduler import Rows
from earl_jax.sharding.layout import Layout
from earl_jax.trajectory import Experience


class RowMove(NamedTuple):
    """The first `tokens` places of a row go to another; places in the whole buffer."""

    source: int
    target: int
    tokens: int


class RowIds(NamedTuple):
    """These ids are to be in row `row` of the whole buffer from place `first` on."""

    row: int
    first: int
    ids: Sequence[int]


# Of a place in a call that has nothing to move, or to write.
_NOTHING = RowMove(-1, -1, 0)


class RowCopies:
    """The programs for one engine; each is compiled once for a room."""

    def __init__(self, layout: Layout, row_shardings: Experience, num_slots: int) -> None:
        """`row_shardings` as of `DecodeState.experience`; a call moves up to `num_slots` rows."""
        self._num_slots, self._everywhere = num_slots, layout.activations("")
        rows = P(layout.row_axes)

        def on_shard(experience: Experience, moves_K3: jax.Array) -> Experience:
            first = jax.lax.axis_index(layout.row_axes) * experience.tokens.shape[0]
            return _bring_home(experience, moves_K3, first, layout.row_axes)

        def write_on_shard(tokens: jax.Array, packed: jax.Array) -> jax.Array:
            first = jax.lax.axis_index(layout.row_axes) * tokens.shape[0]
            return _write_ids(tokens, packed, first)

        def over_rows(function: Any, out: Any) -> Any:
            mapped = jax.shard_map(
                function,
                mesh=layout.mesh,
                in_specs=(rows, P()),
                out_specs=rows,
                axis_names=set(layout.row_axes),
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=0, out_shardings=out)

        self._bring_home = over_rows(on_shard, row_shardings)
        self._write_ids = over_rows(write_on_shard, row_shardings.tokens)
        self._at_home = jax.jit(_at_home, static_argnums=1, out_shardings=row_shardings)

    def bring_home(self, state: DecodeState, moves: Sequence[RowMove]) -> DecodeState:
        """The state with rows where they are at home. Donates the experience of `state`.

        What a guest wrote down beside its tokens is cleared; these stay, for whoever takes a prompt
        over from its slot.
        """
        packed = np.array([*moves, *[_NOTHING] * (self._num_slots - len(moves))], np.int32)
        sent = jax.device_put(packed, self._everywhere)
        return dataclasses.replace(state, experience=self._bring_home(state.experience, sent))

    def write_ids(self, state: DecodeState, writes: Sequence[RowIds]) -> DecodeState:
        """The state with these ids in its rows. Donates the tokens of `state`."""
        tokens = state.experience.tokens
        packed = np.full((self._num_slots, 1 + tokens.shape[1]), NO_ID, np.int32)
        for line, (row, first, ids) in zip(packed, writes, strict=False):
            line[0], line[1 + first : 1 + first + len(ids)] = row, ids
        tokens = self._write_ids(tokens, jax.device_put(packed, self._everywhere))
        experience = dataclasses.replace(state.experience, tokens=tokens)
        return dataclasses.replace(state, experience=experience)

    def at_home(self, experience: Experience, rows: Rows) -> Experience:
        """The episodes' rows in their order, without those for guests. Moves nothing."""
        return self._at_home(experience, rows) if rows.guests else experience


def _bring_home(
    experience: Experience, moves_K3: jax.Array, first_row: jax.Array, row_axes: tuple[str, ...]
) -> Experience:
    """`RowCopies.bring_home` for the shard whose rows begin at `first_row`."""
    num_rows, max_tokens = experience.tokens.shape
    sources_K, targets_K, counts_K = moves_K3.T
    sources_K = _local(sources_K, first_row, num_rows)
    targets_K = _local(targets_K, first_row, num_rows)
    counts_KP = jnp.arange(max_tokens)[None, :] < counts_K[:, None]
    fields, structure = jax.tree.flatten(experience)
    # As bits, so that all fields are one array, and a sum with zeros changes none.
    read_FKP = jnp.stack(
        [
            jnp.where(counts_KP, _bits(field).at[sources_K].get(mode="fill", fill_value=0), 0)
            for field in fields
        ]
    )
    read_FKP = jax.lax.psum(read_FKP, row_axes)
    cleared = jax.tree.map(lambda field: field.at[sources_K].set(0, mode="drop"), experience)
    cleared = dataclasses.replace(cleared, tokens=experience.tokens)
    written = [
        field.at[targets_K].set(jax.lax.bitcast_convert_type(bits_KP, field.dtype), mode="drop")
        for field, bits_KP in zip(jax.tree.leaves(cleared), read_FKP, strict=True)
    ]
    return jax.tree.unflatten(structure, written)


def _write_ids(tokens: jax.Array, packed: jax.Array, first_row: jax.Array) -> jax.Array:
    """`RowCopies.write_ids` for the shard whose rows begin at `first_row`."""
    rows_K, ids_KP = _local(packed[:, 0], first_row, tokens.shape[0]), packed[:, 1:]
    before_KP = tokens.at[rows_K].get(mode="clip")
    return tokens.at[rows_K].set(jnp.where(ids_KP == NO_ID, before_KP, ids_KP), mode="drop")


def _local(rows_K: jax.Array, first_row: jax.Array, num_rows: int) -> jax.Array:
    """Numbers of rows in this shard; one past its end for rows of others."""
    here_K = (rows_K >= first_row) & (rows_K < first_row + num_rows)
    return jnp.where(here_K, rows_K - first_row, num_rows)


def _bits(field: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(field, jnp.int32)


def _at_home(experience: Experience, rows: Rows) -> Experience:
    def cut(field: jax.Array) -> jax.Array:
        apart = field.reshape(rows.data_shards, rows.homes + rows.guests, -1)
        return apart[:, : rows.homes].reshape(rows.data_shards * rows.homes, -1)

    return jax.tree.map(cut, experience)
