# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The tail of a rollout: few long episodes are left, and most slots are empty for good.

Episodes beside each other have nothing to gain there, so a mesh that cuts the model more may be
faster for the few, if there are rounds enough left to earn back the move of the weights and of
their KV caches.
"""

import dataclasses
from collections.abc import Sequence

from earl_jax.selector.choose import Decision, Settings
from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailOption:
    """A mesh for the rest of a rollout.

    Seconds of a round with every slot busy and with one alone, both measured; of a move there;
    bytes as in `Option`; `impossible` says why not, "" where it can be.
    """

    mesh: MeshShape
    full_round_s: float
    alone_round_s: float
    move_s: float
    bytes_per_device: int
    impossible: str = ""

    def round_s(self, live: int, num_slots: int) -> float:
        """Seconds of a round with so many slots busy: on the line between one and all."""
        share = (live - 1) / max(1, num_slots - 1)
        return self.alone_round_s + share * (self.full_round_s - self.alone_round_s)


def choose_tail(
    options: Sequence[TailOption],
    *,
    current: MeshShape,
    places: int,
    live: int,
    num_slots: int,
    rounds_left: int,
    settings: Settings,
) -> Decision:
    """The mesh for the last `live` episodes, which go on for about `rounds_left` rounds. Pure.

    The one in use stays unless another that fits is faster by more than the hysteresis with its
    move counted.
    """
    (here,) = (option for option in options if option.mesh == current)
    left = f"{live} of {num_slots} slots are busy, for about {rounds_left} rounds"

    def cost_s(option: TailOption) -> float:
        move_s = 0.0 if option is here else option.move_s
        return rounds_left * option.round_s(live, num_slots) + move_s

    def decide(option: TailOption, reason: str) -> Decision:
        return Decision(
            stage="tail",
            mesh=option.mesh,
            places=places,
            switched=option is not here,
            reason=reason,
            bytes_per_device=option.bytes_per_device,
            predicted_s=cost_s(option),
        )

    budget = settings.budget_bytes
    fitting = [
        option
        for option in options
        if not option.impossible and (budget is None or option.bytes_per_device <= budget)
    ]
    best = min([here, *fitting], key=cost_s)
    if cost_s(here) <= (1.0 + settings.hysteresis) * cost_s(best):
        return decide(here, f"stays on {current}: {left}")
    return decide(
        best,
        f"leaves {current} for {best.mesh}: {left} of {1e3 * best.round_s(live, num_slots):.1f} ms "
        f"instead of {1e3 * here.round_s(live, num_slots):.1f} ms, and a move of {best.move_s:.2f} "
        "s",
    )
