# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The shapes of meshes that a stage can have on so many devices. Pure."""

from collections.abc import Callable, Sequence

from earl_jax.selector.plans import Stage
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape

# Returns why a shape cannot be used, in words; None where it can.
Check = Callable[[MeshShape], str | None]
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
        MeshShape(rows // fsdp // expert, fsdp, context, expert, number // rows)
        for rows in reversed(divisors(number))
        for expert in divisors(rows)
        if max(num_experts, 1) % expert == 0
        for fsdp in (divisors(rows // expert) if stage == "train" else (1,))
    ]
    if stage == "train":
        return shapes
    return sorted(shapes, key=lambda shape: (-shape.data, shape.expert))


def candidates(
    stage: Stage,
    num_devices: int,
    named: Sequence[str],
    check: Check,
    num_experts: int = 0,
    tokens: int = 0,
) -> list[MeshShape]:
    """Returns the shapes of a stage that can be used, or those of them that the user named.

    Rows of `tokens` tokens are cut over `context` too, where each shard has LEAST_SHARD_TOKENS.
    Those shapes are last, least cut first. One that is named may cut rows of any length.

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
            words = {"rollout": "rollouts of this model", "train": "training of this model"}[stage]
            raise InputError(
                f"no mesh of {num_devices} devices fits {words}: {why}. Change these numbers, or "
                "give the stage other devices (config.devices.num_rollout)"
            )
        for context in divisors(num_devices)[1:]:
            if context * LEAST_SHARD_TOKENS <= tokens:
                long = mesh_shapes(stage, num_devices, num_experts, context)
                usable += [shape for shape in long if check(shape) is None]
        return usable
    for shape in map(MeshShape.parse, named):
        reason = check(shape)
        if shape.num_devices != num_devices:
            reason = f"it has {shape.num_devices} devices, and this run {num_devices}"
        if reason is not None:
            raise InputError(
                f"config.selector.{field} has '{shape}', which is impossible: {reason}. "
                f"Possible here: {allowed}"
            )
    return list(map(MeshShape.parse, named))
