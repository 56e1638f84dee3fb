# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The throughput table: speeds and bytes of plans that ran, by stage, mesh and context bucket.

Every real step adds a speed. A plan's speed is the median of its last speeds, so that one noisy
step decides nothing. A plan that ran out of memory is in the table too, and is not tried again.

The table is kept in the user's cache folder, one JSON file per (model, programs, devices,
versions), so that the next run begins with what this one has seen. Of such a kept entry only the
median counts, as one speed: the next run's own steps soon outweigh it.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from earl_jax.selector.plans import Failure
from earl_jax.sharding.layout import MeshShape

# Facts that make two tables ones of the same model on the same devices. `table` is "model" where no
# speeds are taken.
SUBJECT = ("model", "vocab_size", "devices", "table")
# Raised whenever speeds mean something else: older tables are not taken then.
METHOD = 3
# An entry keeps so many speeds, and with fewer than TRUSTED it may still be noise.
KEPT, TRUSTED = 5, 3
# So many facts that differ are named in a message.
NAMED = 4


class Entry(NamedTuple):
    """Speeds of one plan at one context bucket, tokens/s, newest last; bytes of its program.

    `program_bytes` is XLA's memory analysis, per device; 0 where the program was not compiled.
    """

    speeds: tuple[float, ...] = ()
    program_bytes: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the speeds."""
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def is_trusted(self) -> bool:
        """Whether there are enough speeds that the median is no noise."""
        return len(self.speeds) >= TRUSTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputTable:
    """Entries by key (`key_of`), and failures.

    `path` is its file, None for a table that is not kept. `facts` say what it is of, as plain JSON
    values.
    """

    path: Path | None = None
    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_speed(self, key: str, tokens_per_s: float) -> "ThroughputTable":
        """Returns the table with one more speed of an entry."""
        entry = self.entries.get(key, Entry())
        speeds = (*entry.speeds, tokens_per_s)[-KEPT:]
        return self._with(key, entry._replace(speeds=speeds))

    def with_bytes(self, key: str, program_bytes: int) -> "ThroughputTable":
        """Returns the table with the bytes of an entry's program."""
        return self._with(key, self.entries.get(key, Entry())._replace(program_bytes=program_bytes))

    def _with(self, key: str, entry: Entry) -> "ThroughputTable":
        return dataclasses.replace(self, entries={**self.entries, key: entry})

    def with_failure(self, failure: Failure) -> "ThroughputTable":
        """Returns the table with one more failure."""
        return dataclasses.replace(self, failures=(*self.failures, failure))

    def failure_of(self, stage: str, mesh: MeshShape, size: Sequence[int]) -> str:
        """Returns why a plan of this size fails, by what failed before; "" where it may run."""
        return next((str(f) for f in self.failures if f.covers(stage, mesh, size)), "")

    def as_prior(self) -> "ThroughputTable":
        """Returns the table as another run begins with it: one speed an entry, its median."""
        entries = {
            key: entry._replace(speeds=() if not entry.speeds else (entry.tokens_per_s,))
            for key, entry in self.entries.items()
        }
        return dataclasses.replace(self, entries=entries)

    def write(self) -> None:
        """Writes the file, as a whole or not at all. Raises OSError where it cannot."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.as_dict(), indent=1))
            os.replace(temporary, self.path)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for the file and for the checkpoint."""
        return {
            "facts": dict(self.facts),
            "entries": {key: entry._asdict() for key, entry in self.entries.items()},
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any], path: Path | None = None) -> "ThroughputTable":
        """The inverse of `as_dict`. Raises ValueError for anything else."""
        try:
            entries = {}
            for key, entry in values["entries"].items():
                parse_key(key)
                speeds, num_bytes = tuple(map(float, entry["speeds"])), int(entry["program_bytes"])
                if not all(0 < speed < math.inf for speed in speeds) or num_bytes < 0:
                    raise TypeError(f"{key}: {entry}")
                entries[key] = Entry(speeds, num_bytes)
            failures = tuple(Failure.from_dict(failure) for failure in values["failures"])
            facts = dict(values.get("facts", {}).items())
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ValueError(f"not a throughput table: {error}") from None
        return ThroughputTable(path=path, entries=entries, failures=failures, facts=facts)

    def over(self, kept: "ThroughputTable") -> "ThroughputTable":
        """Returns these entries before those of `kept`, and the failures of both."""
        return dataclasses.replace(
            kept,
            entries={**kept.entries, **self.entries},
            failures=tuple(dict.fromkeys((*kept.failures, *self.failures))),
        )


_WAYS = {
    "rollout": re.compile(r"slots=[1-9][0-9]*"),
    "train": re.compile(r"micro_batches=[1-9][0-9]*,remat=(True|False)"),
}


class Key(NamedTuple):
    """What an entry is of; `way` is "slots=32" or "micro_batches=2,remat=True"."""

    stage: str
    mesh: MeshShape
    tokens: int
    way: str

    def __str__(self) -> str:
        return f"{self.stage} {self.mesh} {self.tokens} {self.way}"


@functools.cache
def rollout_key(mesh: MeshShape, max_tokens: int, num_slots: int) -> str:
    """Returns the key of a rollout, "rollout data=4,tensor=2 48 slots=32"."""
    return str(Key("rollout", mesh, max_tokens, f"slots={num_slots}"))


@functools.cache
def train_key(mesh: MeshShape, length: int, micro_batches: int, remat: bool) -> str:
    """Returns the key of an update, "train data=8 48 micro_batches=2,remat=True"."""
    return str(Key("train", mesh, length, f"micro_batches={micro_batches},remat={remat}"))


def parse_key(text: str) -> Key:
    """The inverse of str(). Raises ValueError for anything else."""
    parts = text.split(" ")
    known = len(parts) == 4 and parts[0] in _WAYS and _WAYS[parts[0]].fullmatch(parts[3])
    if not (known and parts[2].isascii() and parts[2].isdigit()):
        raise ValueError(f"{text!r} is no key; one is like 'rollout data=4,tensor=2 48 slots=32'")
    return Key(parts[0], MeshShape.parse(parts[1]), int(parts[2]), parts[3])


# Files.


class Difference(NamedTuple):
    """A fact with another value there than here, by its dotted name; None: not known there."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_value_words(self.there)} (here {_value_words(self.here)})"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """Returns what differs: {"versions": {"jax": "1"}} has the fact versions.jax."""
    theirs, ours = _leaves(there), _leaves(here)
    return [
        Difference(name, theirs.get(name), ours.get(name))
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]


def difference_words(found: Sequence[Difference]) -> str:
    """Returns the first differences in words: "versions.jax 0.10.1 (here 0.10.2) and 3 more"."""
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
    """Returns where to keep what may be lost: $XDG_CACHE_HOME/earl_jax, or ~/.cache/earl_jax."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "earl_jax"


def load_table(facts: Mapping[str, Any]) -> tuple[ThroughputTable, str | None]:
    """Returns the table kept for these facts, as a prior; an empty one if there is none.

    With a sentence for the user if its file was damaged, or if the same model was timed on the same
    devices under other circumstances.
    """
    facts = json.loads(json.dumps(facts, sort_keys=True, default=str))
    subject = _digest({name: facts.get(name) for name in SUBJECT})
    path = cache_folder() / "throughput" / f"{subject}-{_digest(facts)}.json"
    empty = ThroughputTable(path=path, facts=facts)
    try:
        found = ThroughputTable.from_dict(json.loads(path.read_text()), path)
        return dataclasses.replace(found, facts=facts).as_prior(), None
    except FileNotFoundError:
        return empty, _stale_words(path.parent.glob(f"{subject}-*.json"), facts)
    except (ValueError, OSError) as error:
        return empty, f"the throughput table {path} cannot be read ({error}); it begins anew"


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stale_words(paths: Iterable[Path], facts: Mapping[str, Any]) -> str | None:
    """Returns what differs from the nearest table of the same subject; None without one."""
    found = []
    for path in sorted(paths):
        try:
            table = ThroughputTable.from_dict(json.loads(path.read_text()))
        except (ValueError, OSError):
            continue
        if table.facts and any(entry.speeds for entry in table.entries.values()):
            found.append(differences(table.facts, facts))
    return stale_words(min(found, key=len)) if found else None


def stale_words(found: Sequence[Difference]) -> str:
    """Returns why known speeds are not taken."""
    return (
        f"this model was timed on such devices before, with {difference_words(found)}; its speeds "
        "are not taken"
    )
