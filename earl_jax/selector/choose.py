# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice for one stage: pure arithmetic over what was measured, with its reason in words.

For a whole step, with both stages, see step_choice.py.
"""

import dataclasses
from collections.abc import Sequence

from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load

# Speeds so near to each other are equal: a little noise in a measurement must not decide where a
# run starts.
NOISE = 0.02


class BudgetTooSmall(ValueError):
    """No candidate fits the budget; the message says the smallest budget that would do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One candidate at one room per episode: a mesh, and on which rung the stage is there.

    `bytes_per_device` is all that the stage takes of a device: its program's arguments (weights,
    KV cache, buffers), temporaries and results, and what other stages leave there meanwhile.
    `tokens_per_s` is None where the run goes by the order of its list of meshes. `move_s` is what
    going there takes: the policy's weights to a rollout mesh, all that the trainer holds to a
    training mesh. `impossible` says why it is no candidate whatever the budget, "" where it is one.

    With `is_computed` nothing was compiled: it may take `slack_bytes` less than these bytes, or
    more. With `is_guess` its speed was not measured but computed. `way` is the rung in words, ""
    for that of the config.
    """

    mesh: MeshShape
    bytes_per_device: int
    tokens_per_s: float | None
    move_s: float = 0.0
    impossible: str = ""
    is_computed: bool = False
    is_guess: bool = False
    slack_bytes: int = 0
    rung: RolloutRung | TrainRung | None = None
    way: str = ""

    @property
    def words(self) -> str:
        """The mesh, and the way if it is not the config's."""
        return f"{self.mesh} {self.way}" if self.way else str(self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """When a change is worth it; see `SelectorConfig`. `budget_bytes` None means no limit."""

    budget_bytes: int | None
    hysteresis: float
    horizon_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What was chosen, and why. `predicted_s` is for a step's tokens, None if not measured.

    `rung` is that of the option; `switched` says that the mesh is another than before.
    """

    stage: str
    mesh: MeshShape
    places: int
    switched: bool
    reason: str
    bytes_per_device: int
    predicted_s: float | None
    rung: RolloutRung | TrainRung | None = None


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
    horizon. Ties go to the option that comes first. Where speeds were not measured, the first
    option that fits, and the current mesh stays as long as it fits. Pure: the same arguments give
    the same decision.

    Args:
        stage: "rollout" or "train", for the words.
        options: the candidates, in the order of preference.
        current: the mesh in use, None at the start.
        places: tokens of room per episode that the options are for.
        load: what recent steps were like, for the words; None at the start.
        step_tokens: how many tokens a step of this stage works on.
        switch_s: what a change of mesh costs; infinite where it is left only if it must be.
        settings: budget, hysteresis, horizon.

    Raises:
        BudgetTooSmall: no option fits.
    """
    fitting = [option for option in options if not obstacle(option, settings)]
    if not fitting:
        raise BudgetTooSmall(_too_small(stage, options, places, settings))
    best = _best(fitting, settings)
    here = _best_on(current, options, settings)

    def decide(option: Option, reason: str) -> Decision:
        return Decision(
            stage=stage,
            mesh=option.mesh,
            places=places,
            switched=current is not None and option.mesh != current,
            reason=reason,
            bytes_per_device=option.bytes_per_device,
            predicted_s=step_tokens / option.tokens_per_s if option.tokens_per_s else None,
            rung=option.rung,
        )

    why = f"{context_words(places, load)}, {option_words(best, settings)}"
    if here is None:
        merit = "fastest" if best.tokens_per_s else "first of the list"
        return decide(best, f"starts on {best.words}: {merit} that fits; {why}")
    if problem := obstacle(here, settings):
        return decide(best, f"leaves {here.mesh}, which {problem}, for {best.words}: {why}")
    gain = saved_s = 0.0
    if best.tokens_per_s and here.tokens_per_s:
        gain = best.tokens_per_s / here.tokens_per_s - 1.0
        saved_s = step_tokens / here.tokens_per_s - step_tokens / best.tokens_per_s
    if gain <= settings.hysteresis or saved_s * settings.horizon_steps <= switch_s:
        return decide(
            here,
            f"stays on {here.words}: {context_words(places, load)}, {option_words(here, settings)}",
        )
    return decide(
        best,
        f"leaves {here.mesh} for {best.words}, {gain:.0%} faster, the switch of {switch_s:.2f} s "
        f"earned back in {switch_s / saved_s:.0f} steps: {why}",
    )


def _best(fitting: Sequence[Option], settings: Settings) -> Option:
    """The first option that no other beats by more than noise, or than the hysteresis if less.

    Where no speed was measured, the first.
    """
    top = max(option.tokens_per_s or 0.0 for option in fitting)
    slack = 1.0 + min(NOISE, settings.hysteresis)
    return next(o for o in fitting if (o.tokens_per_s or 0.0) * slack >= top)


def _best_on(
    mesh: MeshShape | None, options: Sequence[Option], settings: Settings
) -> Option | None:
    """The best option of this mesh; where none fits, the one that takes the least."""
    there = [option for option in options if option.mesh == mesh]
    fitting = [option for option in there if not obstacle(option, settings)]
    if fitting:
        return _best(fitting, settings)
    return min(there, key=lambda option: option.bytes_per_device, default=None)


def obstacle(option: Option, settings: Settings) -> str:
    """Why the option cannot be used, as the end of a sentence; "" where it can."""
    if option.impossible:
        return option.impossible
    budget = settings.budget_bytes
    if budget is None or option.bytes_per_device - option.slack_bytes <= budget:
        return ""
    needs, has = size_words(option.bytes_per_device), size_words(budget)
    about = "about " if option.is_computed else ""
    return f"needs {about}{needs} of a budget of {has} per device"


def _too_small(stage: str, options: Sequence[Option], places: int, settings: Settings) -> str:
    """The message where nothing fits: the smallest budget that would do, if any would."""
    possible = [option for option in options if not option.impossible]
    what = f"{stage} fits it with {places} tokens of room per episode"
    if not possible:
        tried = "; ".join(f"{option.words} {option.impossible}" for option in options)
        return (
            f"no mesh for {what}: {tried}. Use devices with "
            f"{more_than([option.bytes_per_device for option in options])} memory each, or more "
            "devices, or lower config.rollout.num_slots or the model's size"
        )
    least = min(possible, key=lambda option: option.bytes_per_device)
    about = "about " if least.is_computed else ""
    return (
        f"config.selector.budget_bytes_per_device is {settings.budget_bytes}, and no mesh for "
        f"{what}; the smallest budget that would do is {about}{least.bytes_per_device} (mesh "
        f"{least.words}), {more_words(least.bytes_per_device, settings)}. Raise the budget, use "
        "more devices, or lower config.rollout.num_slots or the model's size"
    )


def more_words(need: int, settings: Settings) -> str:
    """By how much a budget is too small, in words: "1.50 GiB more"."""
    return f"{size_words(need - (settings.budget_bytes or 0))} more"


def more_than(needs: Sequence[int]) -> str:
    """The least that was not enough, in words. 0 stands for what is not known."""
    known = [need for need in needs if need]
    return f"more than {size_words(min(known))} of" if known else "more"


def context_words(places: int, load: Load | None) -> str:
    """The load in words."""
    room = f"room for {places} tokens an episode"
    if load is None:
        return room
    return (
        f"contexts up to {load.context_tokens_max} tokens, {load.tokens_in_flight_max} in flight, "
        f"{room}"
    )


def option_words(option: Option, settings: Settings) -> str:
    """What an option takes and gives, in words."""
    budget = settings.budget_bytes
    of = "" if budget is None else f" of {size_words(budget)}"
    known = "computed" if option.is_guess else "measured"
    speed = f", {option.tokens_per_s:,.0f} tokens/s {known}" if option.tokens_per_s else ""
    return f"{size_words(option.bytes_per_device)}{of} per device{speed}"


def size_words(num_bytes: int) -> str:
    """Bytes for people: "1.50 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"
