# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Waiting for arrays that other processes send, for no longer than is said."""

import time
from typing import Any

import jax

_POLL_S = 0.002


class PeerLost(RuntimeError):
    """Another process of this run ended, or does not answer. Nothing can be sent any more.

    Whoever catches it should say so and end the process with `os._exit`: JAX's own way out waits
    for all processes, and programs that wait for the lost one never end.
    """


def wait_for(tree: Any, *, what: str, timeout_s: float) -> None:
    """Returns when this process's part of all arrays is there.

    Args:
        tree: arrays, as `reshard` returned them.
        what: what is waited for, for the error.
        timeout_s: after so many seconds a process that does not answer counts as lost.

    Raises:
        PeerLost: the transfer failed, or took longer.
        JaxRuntimeError: this process's devices ran out of memory.
    """
    # Part by part: where a collective fails on one device, others may wait for that one for ever.
    parts = [shard.data for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    deadline_s = time.monotonic() + timeout_s
    try:
        while parts:
            waiting = []
            for part in parts:
                if part.is_ready():
                    part.block_until_ready()
                else:
                    waiting.append(part)
            parts = waiting
            if parts and time.monotonic() > deadline_s:
                raise nothing_came(what, timeout_s)
            if parts:
                time.sleep(_POLL_S)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            # Of this process's devices; no fellow is to blame.
            raise
        raise failed(what, error) from error


def nothing_came(what: str, timeout_s: float) -> PeerLost:
    """The error of a process that has waited so long."""
    return PeerLost(
        f"{what}: nothing came for {timeout_s:g} s in process {jax.process_index()} of "
        f"{jax.process_count()}; a process or the network between hangs. End all processes and "
        "start the run again: it goes on from its newest checkpoint"
    )


def failed(what: str, error: Exception) -> PeerLost:
    """The error of a process whose transfer ended with this one of JAX."""
    return PeerLost(
        f"{what}: failed in process {jax.process_index()} of {jax.process_count()}, because "
        f"another process ended or cannot be reached ({str(error).splitlines()[0]}). Start the "
        "run again: it goes on from its newest checkpoint"
    )
