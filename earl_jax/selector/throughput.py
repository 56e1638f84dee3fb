# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What was measured: speed and bytes of each candidate at each room per episode, kept on disk.

And what failed: a candidate that ran out of memory on these devices is not tried again. One JSON
file per (model, programs, devices, versions), in the user's cache folder: the next run of the same
thing measures nothing and so chooses alike. The file says what it is of, so that nobody takes the
speeds of other devices for their own (see earl_jax/measurements.py).
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from earl_jax.selector.ladder import Failure
from earl_jax.sharding.layout import MeshShape

# The facts that make two tables ones of the same thing, measured under other circumstances.
SUBJECT = ("model", "vocab_size", "devices")
# Raised whenever speeds are measured in another way (measuring.py): older ones are not taken then.
METHOD = 2
# Of the facts that differ, so many are named.
NAMED = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate at one room per episode; bytes as in `memory.program_bytes`.

    `tokens_per_s` is None where only the bytes were asked for; `switch_s` is 0 then. Of a rollout,
    `alone_tokens_per_s` is the speed of one busy slot, None where it was not measured. It took
    `took_s` to measure all this, a compiler's time with it; 0 where that is not known. Of speeds
    that were measured so many `times` it is the best.
    """

    tokens_per_s: float | None
    program_bytes: int
    switch_s: float
    alone_tokens_per_s: float | None = None
    took_s: float = 0.0
    times: int = 1

    def or_faster(self, again: "Measurement") -> "Measurement":
        """The same candidate, measured once more: what disturbs a machine only makes it slower."""
        return dataclasses.replace(
            self,
            tokens_per_s=_faster(self.tokens_per_s, again.tokens_per_s),
            alone_tokens_per_s=_faster(self.alone_tokens_per_s, again.alone_tokens_per_s),
            times=self.times + again.times,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputTable:
    """Measurements by key (see `entry`), and failures.

    `path` is its file, None for a table that is not kept. `facts` say what was measured, on what
    and with what, as plain JSON values; {} where nobody knows.
    """

    path: Path | None
    measurements: Mapping[str, Measurement]
    failures: tuple[Failure, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def entry(stage: str, mesh: object, places: int, rung: str = "") -> str:
        """The key of a measurement: "rollout data=4,tensor=2 48", and its rung if not the first."""
        return f"{stage} {mesh} {places}{rung and ' '}{rung}"

    @staticmethod
    def check_entry(entry: str) -> None:
        """Raises ValueError for what is no key of a measurement."""
        parts = entry.split(" ")
        known = len(parts) >= 3 and parts[0] in ("rollout", "train")
        if not (known and parts[2].isascii() and parts[2].isdigit()):
            raise ValueError(f"{entry!r} is no key; they are like 'rollout data=4,tensor=2 48'")
        MeshShape.parse(parts[1])

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
            "facts": dict(self.facts),
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
            facts = dict(values.get("facts", {}).items())
            measurements = {entry: Measurement(**numbers) for entry, numbers in entries.items()}
            for entry, m in measurements.items():
                ThroughputTable.check_entry(entry)
                speeds = [m.tokens_per_s, m.alone_tokens_per_s]
                speed = min([speed for speed in speeds if speed is not None], default=1.0)
                if not (
                    speed > 0 and min(m.program_bytes, m.switch_s, m.took_s) >= 0 and m.times > 0
                ):
                    raise TypeError(f"{entry}: {m}")
            failures = tuple(Failure.from_dict(failure) for failure in failed)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ValueError(f"not a throughput table: {error}") from None
        return ThroughputTable(path=path, measurements=measurements, failures=failures, facts=facts)

    def over(self, kept: "ThroughputTable") -> "ThroughputTable":
        """This table's measurements before those of `kept`, the failures of both; in its file."""
        return ThroughputTable(
            path=kept.path,
            measurements={**kept.measurements, **self.measurements},
            failures=tuple(dict.fromkeys((*kept.failures, *self.failures))),
            facts=kept.facts,
        )


def _faster(one: float | None, other: float | None) -> float | None:
    return max(filter(None, (one, other)), default=None)


class Difference(NamedTuple):
    """A fact that is another one there than here, by its dotted name; None: not known there."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_value_words(self.there)} (here {_value_words(self.here)})"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """What facts of a table differ from those here: {"versions": {"jax": "1"}} is versions.jax."""
    theirs, ours = _leaves(there), _leaves(here)
    return [
        Difference(name, theirs.get(name), ours.get(name))
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]


def difference_words(found: Sequence[Difference]) -> str:
    """The first of them in words: "versions.jax 0.10.1 (here 0.10.2) and 3 more"."""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(map(str, found[:NAMED])) + more


def _value_words(value: Any) -> str:
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


def _leaves(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in facts.items():
        inside = isinstance(value, Mapping)
        found |= _leaves(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return found


def cache_folder() -> Path:
    """Where to keep what may be lost: $XDG_CACHE_HOME/earl_jax, else ~/.cache/earl_jax."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "earl_jax"


def load_table(facts: Mapping[str, Any]) -> tuple[ThroughputTable, str | None]:
    """The table kept for these facts (model, programs, devices, versions), empty if there is none.

    Its file is named by what was measured (SUBJECT) and by all facts.

    Returns:
        The table, and a sentence for the user if its file was damaged and is set aside, or if the
        same model was measured on the same devices under other circumstances.
    """
    facts = json.loads(json.dumps(facts, sort_keys=True, default=str))
    subject = _digest({name: facts.get(name) for name in SUBJECT})
    path = cache_folder() / "throughput" / f"{subject}-{_digest(facts)}.json"
    empty = ThroughputTable(path=path, measurements={}, facts=facts)
    try:
        found = ThroughputTable.from_dict(path, json.loads(path.read_text()))
        return dataclasses.replace(found, facts=facts), None
    except FileNotFoundError:
        return empty, _stale_words(path.parent.glob(f"{subject}-*.json"), facts)
    except (ValueError, OSError) as error:
        return empty, f"the throughput table {path} cannot be read ({error}); measuring again"


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stale_words(paths: Iterable[Path], facts: Mapping[str, Any]) -> str | None:
    """What is different from the table of the same subject that is nearest; None without one."""
    found = []
    for path in sorted(paths):
        try:
            table = ThroughputTable.from_dict(path, json.loads(path.read_text()))
        except (ValueError, OSError):
            continue
        if table.facts and table.measurements:
            found.append(differences(table.facts, facts))
    return stale_words(min(found, key=len)) if found else None


def stale_words(found: Sequence[Difference]) -> str:
    """Why speeds that are known are not taken."""
    return (
        f"this model was measured on such devices before, with {difference_words(found)}; "
        "measuring again"
    )
