# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What was measured: speed and bytes of each candidate at each room per episode, kept on disk.

One JSON file per (model, programs, devices, versions), in the user's cache folder: the next run of
the same thing measures nothing and so chooses alike.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate at one room per episode; bytes as in `memory.program_bytes`.

    `tokens_per_s` is None where only the bytes were asked for; `switch_s` is 0 then.
    """

    tokens_per_s: float | None
    program_bytes: int
    switch_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputTable:
    """Measurements by key (see `entry`). `path` is its file, None for a table that is not kept."""

    path: Path | None
    measurements: Mapping[str, Measurement]

    @staticmethod
    def entry(stage: str, mesh: object, places: int) -> str:
        """The key of a measurement: "rollout data=4,tensor=2 48"."""
        return f"{stage} {mesh} {places}"

    def with_measurement(self, entry: str, measurement: Measurement) -> "ThroughputTable":
        """The table with one more measurement, on disk too. Written as a whole or not at all.

        Raises OSError where its folder cannot be written.
        """
        table = dataclasses.replace(self, measurements={**self.measurements, entry: measurement})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(table.as_dict(), indent=1))
            os.replace(temporary, self.path)
        return table

    def as_dict(self) -> dict[str, Any]:
        """For the file and for the checkpoint."""
        return {entry: dataclasses.asdict(m) for entry, m in self.measurements.items()}

    @staticmethod
    def from_dict(path: Path | None, entries: Mapping[str, Any]) -> "ThroughputTable":
        """The inverse of `as_dict`. Raises ValueError for anything else."""
        try:
            measurements = {entry: Measurement(**values) for entry, values in entries.items()}
            for entry, m in measurements.items():
                speed = 1.0 if m.tokens_per_s is None else m.tokens_per_s
                if not (speed > 0 and m.program_bytes >= 0 and m.switch_s >= 0):
                    raise TypeError(f"{entry}: {m}")
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a throughput table: {error}") from None
        return ThroughputTable(path=path, measurements=measurements)


def cache_folder() -> Path:
    """Where to keep what may be lost: $XDG_CACHE_HOME/earl_jax, else ~/.cache/earl_jax."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "earl_jax"


def load_table(facts: Mapping[str, Any]) -> tuple[ThroughputTable, str | None]:
    """The table kept for these facts (model, programs, devices, versions), empty if there is none.

    Returns:
        The table, and a sentence for the user if its file was damaged and is set aside.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_folder() / "throughput" / f"{digest}.json"
    try:
        return ThroughputTable.from_dict(path, json.loads(path.read_text())), None
    except FileNotFoundError:
        return ThroughputTable(path=path, measurements={}), None
    except (ValueError, OSError) as error:
        note = f"the throughput table {path} cannot be read ({error}); measuring again"
        return ThroughputTable(path=path, measurements={}), note
