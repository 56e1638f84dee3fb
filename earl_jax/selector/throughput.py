# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What was measured: speed and bytes of each candidate at each room per episode, kept on disk.

And what failed: a candidate that ran out of memory on these devices is not tried again. One JSON
file per (model, programs, devices, versions), in the user's cache folder: the next run of the same
thing measures nothing and so chooses alike.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earl_jax.selector.ladder import Failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate at one room per episode; bytes as in `memory.program_bytes`.

    `tokens_per_s` is None where only the bytes were asked for; `switch_s` is 0 then. Of a rollout,
    `alone_tokens_per_s` is the speed of one busy slot, None where it was not measured.
    """

    tokens_per_s: float | None
    program_bytes: int
    switch_s: float
    alone_tokens_per_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputTable:
    """Measurements by key (see `entry`), and failures.

    `path` is its file, None for a table that is not kept.
    """

    path: Path | None
    measurements: Mapping[str, Measurement]
    failures: tuple[Failure, ...] = ()

    @staticmethod
    def entry(stage: str, mesh: object, places: int, rung: str = "") -> str:
        """The key of a measurement: "rollout data=4,tensor=2 48", and its rung if not the first."""
        return f"{stage} {mesh} {places}{rung and ' '}{rung}"

    def with_measurement(self, entry: str, measurement: Measurement) -> "ThroughputTable":
        """The table with one more measurement, on disk too. Written as a whole or not at all.

        Raises OSError where its folder cannot be written.
        """
        table = dataclasses.replace(self, measurements={**self.measurements, entry: measurement})
        table.write()
        return table

    def with_failure(self, failure: Failure) -> "ThroughputTable":
        """The table with one more failure, on disk too; raises as `with_measurement`."""
        table = dataclasses.replace(self, failures=(*self.failures, failure))
        table.write()
        return table

    def write(self) -> None:
        """To its file, if it has one. Raises OSError where that cannot be written."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.as_dict(), indent=1))
            os.replace(temporary, self.path)

    def as_dict(self) -> dict[str, Any]:
        """For the file and for the checkpoint."""
        return {
            "measurements": {
                entry: dataclasses.asdict(m) for entry, m in self.measurements.items()
            },
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
        }

    @staticmethod
    def from_dict(path: Path | None, values: Mapping[str, Any]) -> "ThroughputTable":
        """The inverse of `as_dict`. Raises ValueError for anything else."""
        try:
            entries, failed = values["measurements"], values["failures"]
            measurements = {entry: Measurement(**numbers) for entry, numbers in entries.items()}
            for entry, m in measurements.items():
                speeds = [m.tokens_per_s, m.alone_tokens_per_s]
                speed = min([speed for speed in speeds if speed is not None], default=1.0)
                if not (speed > 0 and m.program_bytes >= 0 and m.switch_s >= 0):
                    raise TypeError(f"{entry}: {m}")
            failures = tuple(Failure.from_dict(failure) for failure in failed)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"not a throughput table: {error}") from None
        return ThroughputTable(path=path, measurements=measurements, failures=failures)

    def over(self, kept: "ThroughputTable") -> "ThroughputTable":
        """This table's measurements before those of `kept`, the failures of both; in its file."""
        return ThroughputTable(
            path=kept.path,
            measurements={**kept.measurements, **self.measurements},
            failures=tuple(dict.fromkeys((*kept.failures, *self.failures))),
        )


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
