# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of low-rank adapters, with every rule that they must keep."""

import dataclasses
import math

from earl_jax.settings.errors import InputError

# The projections that adapters can stand beside, by the names that parameters.py gives them: of
# attention, of latent attention, of linear attention, of networks, and of those beside experts. And
# the letters that each reads and writes; one with other axes cannot be adapted here.
PROJECTIONS = {
    "query": ("D", "KGH"),
    "key": ("D", "KH"),
    "value": ("D", "KH"),
    "attention_gate": ("D", "KGH"),
    "out": ("KGH", "D"),
    "query_down": ("D", "A"),
    "query_up": ("A", "KGH"),
    "latent": ("D", "A"),
    "latent_up": ("A", "KH"),
    "linear_query": ("D", "KH"),
    "linear_key": ("D", "KH"),
    "linear_value": ("D", "KGH"),
    "linear_gate": ("D", "KGH"),
    "linear_out": ("KGH", "D"),
    "gate": ("D", "F"),
    "up": ("D", "F"),
    "down": ("F", "D"),
    "shared_gate": ("D", "F"),
    "shared_up": ("D", "F"),
    "shared_down": ("F", "D"),
}
ALL_TARGETS = ("all",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (see models/lora.py): they alone are trained, the base stays as it is.

    `rank` is the rank of the adapters; 0 trains the whole model. The product of an adapter is
    scaled by `alpha` divided by the rank. Each projection in `targets` gets an adapter. ("all",)
    are all that the model has; experts, routers, and the rates and decays of linear attention are
    none. The frozen weights are kept in config.model.compute_dtype; adapters and their moments are
    fp32 always. The base is in no checkpoint of the run: it comes from config.model.path again, or
    from the seed.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ALL_TARGETS

    def validate(self) -> None:
        """Raises ValueError naming the field that breaks a rule."""
        path = "config.train.lora"
        if self.rank < 0:
            raise InputError(f"{path}.rank is {self.rank}; it must be at least 0 (0: no adapters)")
        if not 0 < self.alpha < math.inf:
            raise InputError(f"{path}.alpha is {self.alpha}; it must be a positive number")
        unknown = set(self.targets).difference(PROJECTIONS) and self.targets != ALL_TARGETS
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(
                f"{path}.targets is {self.targets!r}; name at least one of "
                f"{', '.join(PROJECTIONS)}, each once, or 'all' alone"
            )
