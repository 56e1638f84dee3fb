# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The mesh shapes that a stage can use: arithmetic over divisors."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape

# Returns why a shape cannot be used, in words; None where it can.
Check = Callable[[MeshShape], str | None]
# Rows are not cut over `context` into fewer tokens a shard, unless the user names such a mesh.
LEAST_SHARD_TOKENS = 4096


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [part for part in range(1, number + 1) if number % part == 0]


def rollout_candidates(
    num_devices: int, named: Sequence[str], check: Check, num_experts: int = 0
) -> list[MeshShape]:
    """Returns the data x expert x tensor shapes over all devices, widest data axis first.

    A row shard of 4 devices may be tensor=4, expert=2 x tensor=2, or expert=4. A user may name
    shapes that cut contexts over `context` as well.

    Raises as `_checked`.
    """
    shapes = rollout_shapes(num_devices, num_experts)
    return _checked("rollout_meshes", shapes, named, num_devices, check)


def train_candidates(
    num_devices: int, named: Sequence[str], check: Check, num_experts: int = 0
) -> list[MeshShape]:
    """Returns the data x fsdp x expert x tensor shapes over all devices, least cut first.

    A user may name shapes that cut rows over `context` as well.

    Raises as `_checked`.
    """
    shapes = train_shapes(num_devices, num_experts)
    return _checked("train_meshes", shapes, named, num_devices, check)


def context_candidates(
    shapes_of: Callable[[int, int], list[MeshShape]],
    num_devices: int,
    check: Check,
    num_experts: int = 0,
) -> list[MeshShape]:
    """Returns the shapes over all devices that cut rows over `context` too, least cut first.

    They are for long rows (`for_rows`); there may be none.

    Args:
        shapes_of: `rollout_shapes` or `train_shapes`, of the devices of one part of a row.
        num_devices: all devices.
        check: returns why a shape cannot be used.
        num_experts: experts of a layer, 0 for a model without.
    """
    shapes = [
        dataclasses.replace(shape, context=context)
        for context in divisors(num_devices)[1:]
        for shape in shapes_of(num_devices // context, num_experts)
    ]
    return [shape for shape in shapes if check(shape) is None]


def for_rows(shapes: Iterable[MeshShape], length: int) -> list[MeshShape]:
    """Returns the shapes that leave each shard LEAST_SHARD_TOKENS of a row of so many tokens."""
    return [shape for shape in shapes if shape.context * LEAST_SHARD_TOKENS <= length]


def rollout_shapes(num_devices: int, num_experts: int) -> list[MeshShape]:
    """Returns all data x expert x tensor shapes."""
    return [
        MeshShape(data=num_devices // cut, expert=expert, tensor=cut // expert)
        for cut in divisors(num_devices)
        for expert in _expert_sizes(cut, num_experts)
    ]


def train_shapes(num_devices: int, num_experts: int) -> list[MeshShape]:
    """Returns all data x fsdp x expert x tensor shapes."""
    return [
        MeshShape(data=rows // fsdp // expert, fsdp=fsdp, expert=expert, tensor=num_devices // rows)
        for rows in reversed(divisors(num_devices))
        for expert in _expert_sizes(rows, num_experts)
        for fsdp in divisors(rows // expert)
    ]


def _expert_sizes(num_devices: int, num_experts: int) -> list[int]:
    """Returns the numbers of parts into which experts may be cut; [1] for a model without."""
    return [size for size in divisors(num_devices) if max(num_experts, 1) % size == 0]


def _checked(
    field: str, shapes: list[MeshShape], named: Sequence[str], num_devices: int, check: Check
) -> list[MeshShape]:
    """Returns the shapes that can be used.

    Raises:
        ValueError: a shape that the user named cannot, or none can.
    """
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
