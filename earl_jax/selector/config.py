# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the parallelism selector."""

import dataclasses
from typing import Literal

from earl_jax.settings.errors import InputError, check_choices
from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """Settings of the choice of meshes (docs/design/selector.md).

    `budget_bytes_per_device` is what a stage may take of each device; 0 takes the device's own
    limit where it reports one, and no limit where it does not (CPU). `rollout_meshes` and
    `train_meshes` name the candidates, as "data=4,tensor=2"; empty means every shape that the
    devices and the model allow.

    `table` selects the speeds by which plans are chosen. "auto": observed in the steps of this run
    and of earlier ones, kept in the user's cache folder; for a plan that never ran, by the speed
    model, corrected by the plans that did. "model": by the speed model alone, so that a run is the
    same on every machine. A path: by the throughput table in this file, which is not changed.

    `offload` "on" lets the optimizer's moments be in host memory during rollouts that need their
    bytes; "auto" does so on devices with a memory of their own.
    """

    budget_bytes_per_device: int = 0
    rollout_meshes: tuple[str, ...] = ()
    train_meshes: tuple[str, ...] = ()
    table: str = "auto"
    offload: Literal["auto", "on", "off"] = "auto"

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.selector")
        for field in ("rollout_meshes", "train_meshes"):
            shapes = []
            for text in getattr(self, field):
                try:
                    shape = MeshShape.parse(text)
                except ValueError as error:
                    raise InputError(f"config.selector.{field}: {error}") from None
                if shape in shapes:
                    raise InputError(f"config.selector.{field} names {shape} twice")
                shapes.append(shape)
                if field == "rollout_meshes" and shape.fsdp > 1:
                    raise InputError(
                        f"config.selector.rollout_meshes has {text!r}; the engine keeps whole "
                        "layers on a device or cuts them over expert or tensor: use data, context "
                        "and those"
                    )
        if (value := self.budget_bytes_per_device) < 0:
            raise InputError(
                f"config.selector.budget_bytes_per_device is {value}; it must be at least 0"
            )
        if not self.table:
            raise InputError(
                "config.selector.table is empty; give 'auto', 'model', or the path of a table"
            )
