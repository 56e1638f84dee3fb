# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The mesh shapes that a stage can use: arithmetic over divisors."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape

# Returns why a shape cannot be used, in words; None where it can.
Check = Callable[[MeshShape], str | None]
Stage = Literal["rollout", "train"]
# Rows are not cut over `context` into fewer tokens a shard, unless the user names such a mesh.
LEAST_SHARD_TOKENS = 4096


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [part for part in range(1, number + 1) if number % part == 0]


def mesh_shapes(
    stage: Stage, num_devices: int, num_experts: int = 0, context: int = 1
) -> list[MeshShape]:
    """Returns all shapes of a stage over all devices, with rows cut in `context` parts.

    A rollout's have the widest data axis first, and no fsdp: a row shard of 4 devices may be
    tensor=4, expert=2 x tensor=2, or expert=4. Those of training are least cut first.
    """
    number = num_devices // context
    shapes = [
        MeshShape(
            data=rows // fsdp // expert,
            fsdp=fsdp,
            context=context,
            expert=expert,
            tensor=number // rows,
        )
        for rows in reversed(divisors(number))
        for expert in _expert_sizes(rows, num_experts)
        for fsdp in (divisors(rows // expert) if stage == "train" else (1,))
    ]
    if stage == "train":
        return shapes
    return sorted(shapes, key=lambda shape: (-shape.data, shape.expert))


def context_candidates(
    stage: Stage, num_devices: int, check: Check, num_experts: int = 0
) -> list[MeshShape]:
    """Returns the shapes that cut rows over `context` too and can be used, least cut first.

    They are for long rows (`for_rows`); there may be none.
    """
    return [
        shape
        for context in divisors(num_devices)[1:]
        for shape in mesh_shapes(stage, num_devices, num_experts, context)
        if check(shape) is None
    ]


def for_rows(shapes: Iterable[MeshShape], length: int) -> list[MeshShape]:
    """Returns the shapes that leave each shard LEAST_SHARD_TOKENS of a row of so many tokens."""
    return [shape for shape in shapes if shape.context * LEAST_SHARD_TOKENS <= length]


def _expert_sizes(num_devices: int, num_experts: int) -> list[int]:
    """Returns the numbers of parts into which experts may be cut; [1] for a model without."""
    return [size for size in divisors(num_devices) if max(num_experts, 1) % size == 0]


def candidates(
    stage: Stage, num_devices: int, named: Sequence[str], check: Check, num_experts: int = 0
) -> list[MeshShape]:
    """Returns the shapes of a stage that can be used, or those of them that the user named.

    Only a shape that is named cuts rows over `context`.

    Raises:
        ValueError: a shape that the user named cannot be used, or none can.
    """
    field, shapes = f"{stage}_meshes", mesh_shapes(stage, num_devices, num_experts)
    reasons = {shape: check(shape) for shape in shapes}
    usable = [shape for shape, reason in reasons.items() if reason is None]
    allowed = "; ".join(f"'{shape}'" for shape in usable) or "none"
    if not named:
        if not usable:
            why = "; ".join(f"{shape}: {reason}" for shape, reason in reasons.items())
            raise InputError(f"no mesh of {num_devices} devices fits this model: {why}")
        return usable
    chosen = []
    for text in named:
        shape = MeshShape.parse(text)
        if shape.num_devices != num_devices:
            raise InputError(
                f"config.selector.{field} has '{text}', a mesh of {shape.num_devices} devices; "
                f"this run has {num_devices}. Possible here: {allowed}"
            )
        if (reason := check(shape)) is not None:
            raise InputError(
                f"config.selector.{field} has '{text}', which is impossible: {reason}. "
                f"Possible here: {allowed}"
            )
        chosen.append(shape)
    return chosen


rollout_candidates = functools.partial(candidates, "rollout")
train_candidates = functools.partial(candidates, "train")
