# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A batch on disk, for a person to look at: what an update was skipped for."""

from pathlib import Path

import jax
import numpy as np

from earl_jax.telemetry.atomic import replacing
from earl_jax.trajectory import TrajectoryBatch


def write_batch(path: Path, batch: TrajectoryBatch) -> None:
    """Writes this process's part of a batch as .npz: each field, [rows, tokens], "allowed.0" too.

    A field that is spread over several processes is written as its parts, FIELD_0, FIELD_1, ...,
    each with the index of its first row and token in FIELD_0_at, ...
    """
    arrays: dict[str, np.ndarray] = {}
    for path_of, values in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path_of, simple=True, separator=".")
        if values.is_fully_addressable:
            arrays[name] = np.asarray(values)
            continue
        first = [shard for shard in values.addressable_shards if shard.replica_id == 0]
        for number, shard in enumerate(first):
            arrays[f"{name}_{number}"] = np.asarray(shard.data)
            at = [part.start or 0 for part in shard.index]
            arrays[f"{name}_{number}_at"] = np.array(at)
    with replacing(path) as temporary:
        # A file, not its name, to which numpy would add one more ending.
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
