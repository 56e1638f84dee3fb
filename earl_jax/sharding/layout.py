# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A Layout places every array of a stage: a mesh, and a rule per letter."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from earl_jax.settings.errors import InputError
from earl_jax.sharding.axes import LETTERS, MESH_AXES

# Over which axes a stage cuts its rows (B, N). Between experts, training cuts rows too: attention
# would else be computed alike on every device of the `expert` axis. The rollout keeps them whole
# there, because its row shards decode unequally long, and experts talk at every token.
ROLLOUT_ROWS = ("data", "fsdp")
TRAINING_ROWS = ("data", "fsdp", "expert")
# Tokens of a row, of a chunk of it, and of a page are split over context; heads, feed-forward and
# vocabulary over tensor. Whole rows of the host's numbers, and keys that all queries look at: "S".
ACTIVATION_RULES: Mapping[str, tuple[str, ...]] = {
    "T": ("context",),
    "C": ("context",),
    "K": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
}
# Parameters have no rows. Their width is cut over `fsdp`: gathered at use, gradients scattered. And
# over `context` alike: where contexts are long there are few rows, and nothing else is left to cut
# the optimiser's state over (torchtitan does so too: its mesh axis "dp_shard_cp").
PARAMETER_RULES: Mapping[str, tuple[str, ...]] = {
    "D": ("fsdp", "context"),
    "E": ("expert",),
    "K": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
}
# In a rollout every device of the `context` axis has them: it would need them for each token.
ROLLOUT_PARAMETER_RULES: Mapping[str, tuple[str, ...]] = {**PARAMETER_RULES, "D": ("fsdp",)}


class MeshShape(NamedTuple):
    """Sizes of the mesh axes. `str(MeshShape(data=4, tensor=2))` is "data=4,tensor=2"."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self)

    def __str__(self) -> str:
        """Returns the axes that split something; `data` is always named."""
        named = zip(MESH_AXES, self, strict=True)
        return ",".join(f"{axis}={size}" for axis, size in named if size > 1 or axis == "data")

    @staticmethod
    def parse(text: str) -> "MeshShape":
        """Returns the inverse of str(). Raises ValueError for an unknown axis or a size below 1."""
        sizes = {}
        for part in text.replace(" ", "").split(","):
            axis, _, size = part.partition("=")
            known = axis in MESH_AXES and axis not in sizes
            if not known or not (size.isascii() and size.isdigit()) or int(size) < 1:
                raise InputError(
                    f"mesh shape {text!r}: cannot read {part!r}; write each axis once, as in "
                    f"'data=4,tensor=2'; the axes are {', '.join(MESH_AXES)}"
                )
            sizes[axis] = int(size)
        return MeshShape(**sizes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the rules that place arrays on it. Passed in, never looked up.

    `mesh` may be abstract: then shardings can be made and programs traced, but nothing placed.
    `row_axes` are those that rows are cut over: ROLLOUT_ROWS or TRAINING_ROWS.
    """

    mesh: Mesh | AbstractMesh
    row_axes: tuple[str, ...] = ROLLOUT_ROWS
    parameter_rules: tuple[tuple[str, tuple[str, ...]], ...] = tuple(PARAMETER_RULES.items())

    @property
    def shape(self) -> MeshShape:
        """Sizes of the mesh axes."""
        return MeshShape(**{str(axis): size for axis, size in self.mesh.shape.items()})

    def __str__(self) -> str:
        return str(self.shape)

    @property
    def num_row_shards(self) -> int:
        """The number of pieces that rows are split into."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    def by_hand(self, axes: Iterable[str]) -> set[str]:
        """Returns the manual axes of a program over `axes`: all, where the others have size 1.

        Of a program that is manual over some axes JAX constrains the result of every operation, and
        XLA takes a quarter longer to compile it (jax 0.10.2).
        """
        rest = set(self.mesh.axis_names).difference(axes)
        is_whole = all(self.mesh.shape[axis] == 1 for axis in rest)
        return set(self.mesh.axis_names) if is_whole else set(axes)

    @property
    def platform(self) -> str | None:
        """The devices' platform: "cpu", "gpu" or "tpu"; None for an abstract mesh."""
        if isinstance(self.mesh, AbstractMesh):
            return None
        return self.mesh.devices.flat[0].platform

    @property
    def spans_processes(self) -> bool:
        """True if devices of several processes belong to the mesh."""
        if isinstance(self.mesh, AbstractMesh):
            return False
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def activation_spec(self, letters: str) -> P:
        """Placement of an activation with these axes; a dot is an axis that stays whole."""
        return _spec(letters, {**ACTIVATION_RULES, **dict.fromkeys("BNZ", self.row_axes)})

    def parameter_spec(self, letters: str) -> P:
        """Returns the placement of a parameter whose axes are `letters`."""
        return _spec(letters, dict(self.parameter_rules))

    def activations(self, letters: str) -> NamedSharding:
        """Returns `activation_spec` on this mesh."""
        return NamedSharding(self.mesh, self.activation_spec(letters))

    def parameters(self, letters: str) -> NamedSharding:
        """Returns `parameter_spec` on this mesh."""
        return NamedSharding(self.mesh, self.parameter_spec(letters))

    def on_each_shard(
        self, function: Callable[..., jax.Array], letters: Sequence[str]
    ) -> Callable[..., jax.Array]:
        """Runs a function on each device's part of its arguments, without a collective.

        The arguments have these axes, of which the last may be left out; the result is cut as the
        first of them.
        """
        specs = tuple(self.activation_spec(axes) for axes in letters)

        def run(*inputs: jax.Array) -> jax.Array:
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=specs[: len(inputs)],
                out_specs=specs[0],
                check_vma=False,
            )(*inputs)

        return run

    def constrain(self, array: jax.Array, letters: str) -> jax.Array:
        """Fixes the placement of an activation inside a jitted function."""
        return jax.lax.with_sharding_constraint(array, self.activations(letters))


def _spec(letters: str, rules: Mapping[str, tuple[str, ...]]) -> P:
    assert all(letter in LETTERS + "." for letter in letters), letters
    entries = [rules.get(letter, ()) for letter in letters]
    return P(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in entries))


def make_layout(
    shape: MeshShape,
    devices: Sequence[Any] | None = None,
    *,
    row_axes: tuple[str, ...] = ROLLOUT_ROWS,
) -> Layout:
    """Returns a layout of this shape over the first of the devices (default: all of this run).

    Raises:
        ValueError: the shape needs more devices than there are.
    """
    devices = jax.devices() if devices is None else devices
    if shape.num_devices > len(devices):
        raise InputError(
            f"mesh {shape} needs {shape.num_devices} devices, this run has {len(devices)}; "
            "choose a smaller mesh or raise config.devices.num_cpu_devices"
        )
    grid = np.asarray(devices[: shape.num_devices], dtype=object).reshape(shape)
    mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return Layout(mesh, row_axes, _parameter_rules(row_axes))


def make_abstract_layout(shape: MeshShape, *, row_axes: tuple[str, ...] = ROLLOUT_ROWS) -> Layout:
    """Returns a layout of this shape over devices that need not exist: for tracing and planning."""
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return Layout(mesh, row_axes, _parameter_rules(row_axes))


def _parameter_rules(row_axes: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the rules of the stage that splits rows over these axes."""
    rules = PARAMETER_RULES if row_axes == TRAINING_ROWS else ROLLOUT_PARAMETER_RULES
    return tuple(rules.items())
