# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The log of what a placement has changed, for a line of metrics."""

import dataclasses
from typing import Any

from earl_jax.selector.choose import Choice


@dataclasses.dataclass(kw_only=True)
class SwitchLog:
    """Changes since the last step was logged; `failures` say which plans ran out of memory."""

    choices: list[Choice] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    switch_s: float = 0.0
    bytes_per_device: int = 0
    expected_s: float | None = None

    def metrics(self) -> dict[str, Any]:
        """Returns its part of a line of metrics."""
        newest = {choice.stage: choice for choice in self.choices}
        return {
            "switched": [choice.stage for choice in self.choices if choice.switched],
            "switch_notes": [str(choice) for choice in self.choices if choice.switched],
            "switch_s": self.switch_s,
            "decision": "; ".join(map(str, newest.values())),
            "expected_step_s": self.expected_s,
            "out_of_memory": self.failures or None,
            "peak_bytes_per_device": self.bytes_per_device,
        }
