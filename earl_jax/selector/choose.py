# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice: pure arithmetic over what was measured, with its reason in words."""

import dataclasses
from collections.abc import Sequence

from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load


class BudgetTooSmall(ValueError):
    """No candidate fits the budget; the message says the smallest budget that would do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One candidate at one room per episode.

    `bytes_per_device` is all that the stage takes of a device: its program's arguments (weights,
    KV cache, buffers), temporaries and results, and what other stages leave there meanwhile.
    `tokens_per_s` was measured.
    """

    mesh: MeshShape
    bytes_per_device: int
    tokens_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """When a change is worth it; see `SelectorConfig`. `budget_bytes` None means no limit."""

    budget_bytes: int | None
    hysteresis: float
    horizon_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What was chosen, and why. `predicted_s` is for the tokens of one step."""

    stage: str
    mesh: MeshShape
    places: int
    switched: bool
    reason: str
    bytes_per_device: int
    predicted_s: float


def choose(
    stage: str,
    options: Sequence[Option],
    *,
    current: MeshShape | None,
    places: int,
    load: Load | None,
    step_tokens: int,
    switch_s: float,
    settings: Settings,
) -> Decision:
    """The mesh for the next step of `stage`, at `places` tokens of room per episode.

    Of the options within the budget the fastest; but the current mesh stays unless it does not fit
    or the fastest beats it by more than the hysteresis and earns `switch_s` back within the
    horizon. Ties go to the option that comes first. Pure: the same arguments give the same
    decision.

    Args:
        stage: "rollout" or "train", for the words.
        options: one per candidate, in the order of preference.
        current: the mesh in use, None at the start.
        places: tokens of room per episode that the options are for.
        load: what recent steps were like, for the words; None at the start.
        step_tokens: how many tokens a step of this stage works on.
        switch_s: what a change of mesh costs.
        settings: budget, hysteresis, horizon.

    Raises:
        BudgetTooSmall: no option fits.
    """
    fitting = [option for option in options if _fits(option, settings)]
    if not fitting:
        least = min(options, key=lambda option: option.bytes_per_device)
        raise BudgetTooSmall(
            f"config.selector.budget_bytes_per_device is {settings.budget_bytes}, and no mesh for "
            f"{stage} fits it with {places} tokens of room per episode; the smallest budget that "
            f"would do is {least.bytes_per_device} (mesh {least.mesh}). Raise the budget, use more "
            "devices, or lower config.rollout.num_slots or the model's size"
        )
    top = max(option.tokens_per_s for option in fitting)
    # Speeds within the hysteresis of each other are equal, and the first of equals is preferred:
    # a little noise in a measurement must not decide where a run starts.
    best = next(o for o in fitting if o.tokens_per_s * (1.0 + settings.hysteresis) >= top)
    here = next((option for option in options if option.mesh == current), None)

    def decide(option: Option, reason: str) -> Decision:
        return Decision(
            stage=stage,
            mesh=option.mesh,
            places=places,
            switched=current is not None and option.mesh != current,
            reason=reason,
            bytes_per_device=option.bytes_per_device,
            predicted_s=step_tokens / option.tokens_per_s,
        )

    why = f"{_context_words(places, load)}, {_option_words(best, settings)}"
    if here is None:
        return decide(best, f"starts on {best.mesh}: fastest that fits; {why}")
    if not _fits(here, settings):
        return decide(
            best,
            f"leaves {here.mesh}, which needs {_size(here.bytes_per_device)} of a budget of "
            f"{_size(settings.budget_bytes or 0)} per device, for {best.mesh}: {why}",
        )
    gain = best.tokens_per_s / here.tokens_per_s - 1.0
    saved_s = step_tokens / here.tokens_per_s - step_tokens / best.tokens_per_s
    if gain <= settings.hysteresis or saved_s * settings.horizon_steps <= switch_s:
        return decide(
            here,
            f"stays on {here.mesh}: {_context_words(places, load)}, "
            f"{_option_words(here, settings)}",
        )
    return decide(
        best,
        f"leaves {here.mesh} for {best.mesh}, {gain:.0%} faster, the switch of {switch_s:.2f} s "
        f"earned back in {switch_s / saved_s:.0f} steps: {why}",
    )


def _fits(option: Option, settings: Settings) -> bool:
    return settings.budget_bytes is None or option.bytes_per_device <= settings.budget_bytes


def _context_words(places: int, load: Load | None) -> str:
    room = f"room for {places} tokens an episode"
    if load is None:
        return room
    return (
        f"contexts up to {load.context_tokens_max} tokens, {load.tokens_in_flight_max} in flight, "
        f"{room}"
    )


def _option_words(option: Option, settings: Settings) -> str:
    of = "" if settings.budget_bytes is None else f" of {_size(settings.budget_bytes)}"
    return (
        f"{_size(option.bytes_per_device)}{of} per device, {option.tokens_per_s:,.0f} tokens/s "
        "measured"
    )


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"
