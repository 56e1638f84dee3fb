# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the parallelism selector."""

import dataclasses
from typing import Literal

from earl_jax.settings import check_choices
from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """What the selector may choose from, and when a change is worth it.

    `budget_bytes_per_device` is what a stage may take of each device; 0 takes the device's own
    limit where it reports one, and no limit where it does not (CPU). `rollout_meshes` and
    `train_meshes` name the candidates, as "data=4,tensor=2"; empty means every shape that the
    devices and the model allow, and for long rows and contexts those too that cut them over
    `context` (`candidates.for_rows`). Meshes that fit are left only for a pair whose step is
    shorter by more than the fraction `hysteresis`, with the switch spread over the steps that it
    will last (at most `horizon_steps`), and only when they have been in use for 8 steps. By the
    same fraction the last episodes of a rollout move to another mesh. Speeds are the best of
    `measure_rounds` rounds, or of more where these are short.

    `measure` "all" times every mesh that may fit, as the config says to use it, before the first
    step; then ways to train beside the fastest (remat, the next number of micro-batches), on from
    what is faster, up to 8 at a room. Others, and fewer slots, only where these are computed to be
    faster than what else fits. "likely" computes all of them (a roofline, corrected by what was
    measured) and times those that may be the fastest. "auto" is "likely" on chips with a known data
    sheet, else "all", but no more ways are tried than a tenth of the steps' time pays for.

    `order` "measured" goes by these speeds. "listed" measures none: a stage is on the first mesh of
    its list that fits, until that does not fit any more. Such a run does the same on every machine,
    and two of them can be compared bit for bit.

    `offload` "on" lets the optimizer's moments wait in the host's memory while episodes are played,
    where these need the room; "auto" does so on devices with a memory of their own. Of several
    hosts each keeps those of its own devices.

    `page_sizes` are tokens of a page of the KV cache that a rollout may have beside those of
    config.rollout.page_size: another size is another program, and reads at another speed.

    With `compile_ahead` "on" a thread compiles what longer contexts will need next while steps run;
    "auto" does so where the devices are not the processor that compiles.
    """

    budget_bytes_per_device: int = 0
    rollout_meshes: tuple[str, ...] = ()
    train_meshes: tuple[str, ...] = ()
    page_sizes: tuple[int, ...] = ()
    measure: Literal["auto", "all", "likely"] = "auto"
    order: Literal["measured", "listed"] = "measured"
    hysteresis: float = 0.15
    horizon_steps: int = 20
    measure_rounds: int = 5
    offload: Literal["auto", "on", "off"] = "auto"
    compile_ahead: Literal["auto", "on", "off"] = "auto"

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        check_choices(self, "config.selector")
        for field in ("rollout_meshes", "train_meshes"):
            shapes = []
            for text in getattr(self, field):
                try:
                    shape = MeshShape.parse(text)
                except ValueError as error:
                    raise ValueError(f"config.selector.{field}: {error}") from None
                if shape in shapes:
                    raise ValueError(f"config.selector.{field} names {shape} twice")
                shapes.append(shape)
                if field == "rollout_meshes" and shape.fsdp > 1:
                    raise ValueError(
                        f"config.selector.rollout_meshes has {text!r}; the engine keeps whole "
                        "layers on a device or cuts them over expert or tensor: use data, context "
                        "and those"
                    )
        sizes = self.page_sizes
        if len(set(sizes)) < len(sizes) or any(size < 1 for size in sizes):
            raise ValueError(
                f"config.selector.page_sizes is {sizes}; give different numbers of tokens, each at "
                "least 1, such as (64, 128)"
            )
        for field, least in (
            ("budget_bytes_per_device", 0),
            ("hysteresis", 0),
            ("horizon_steps", 1),
            ("measure_rounds", 1),
        ):
            if getattr(self, field) < least:
                raise ValueError(
                    f"config.selector.{field} is {getattr(self, field)}; it must be at "
                    f"least {least}"
                )
