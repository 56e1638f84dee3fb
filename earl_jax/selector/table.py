# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The throughput table: speeds and bytes of plans that ran, and plans that ran out of memory.

It is kept in the user's cache folder, a JSON file for each set of facts (placement/facts.py).
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import socket
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earl_jax.selector.plans import Failure, Plan, RolloutPlan, TrainPlan
from earl_jax.settings.errors import InputError
from earl_jax.settings.folders import cache_folder
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.atomic import write_atomically

# Raised whenever the values of a table mean something else: older ones are not read then.
METHOD = 4
# A plan's newest KEPT speeds are kept; fewer than TRUSTED may be noise.
KEPT, TRUSTED = 5, 3


@dataclasses.dataclass(frozen=True)
class ThroughputTable:
    """Speeds and bytes of plans at context buckets, by `key_of`, and failures.

    `speeds` are tokens/s, newest last; `program_bytes` XLA's of a program, per device. `compile_s`
    are the seconds that a step waits for new programs. `path` is the table's file, None for one
    that is not kept. `facts` say which model, devices and versions were observed, as plain JSON
    values.
    """

    path: Path | None = None
    speeds: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    program_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    compile_s: float = 0.0
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_speed(self, key: str, tokens_per_s: float) -> "ThroughputTable":
        """Returns the table with one more speed of a plan."""
        newest = (*self.speeds.get(key, ()), tokens_per_s)[-KEPT:]
        return dataclasses.replace(self, speeds={**self.speeds, key: newest})

    def with_bytes(self, key: str, num_bytes: int) -> "ThroughputTable":
        """Returns the table with the bytes of a plan's program."""
        return dataclasses.replace(self, program_bytes={**self.program_bytes, key: num_bytes})

    def with_failure(self, failure: Failure) -> "ThroughputTable":
        """Returns the table with one more failure."""
        return dataclasses.replace(self, failures=(*self.failures, failure))

    def after_rollout(self) -> "ThroughputTable":
        """Returns the table without the failures of a rollout that has ended."""
        failures = tuple(failure for failure in self.failures if failure.lasts != "rollout")
        return dataclasses.replace(self, failures=failures)

    def with_wait(self, compile_s: float) -> "ThroughputTable":
        """Returns the table after a step that waited for programs: the longest wait so far.

        A shorter one takes a tenth off, so that one that was too long does not stay.
        """
        return dataclasses.replace(self, compile_s=max(compile_s, 0.9 * self.compile_s))

    def failure_of(self, plan: Failure) -> str:
        """Returns how a plan (`Problem.failure`) fails, by what failed before; "" if it may run."""
        return next((str(failure) for failure in self.failures if failure.covers(plan)), "")

    def as_prior(self) -> "ThroughputTable":
        """Returns the table as another run begins with it: one speed a plan, the median."""
        medians = {key: (statistics.median(each),) for key, each in self.speeds.items()}
        return dataclasses.replace(self, speeds=medians)

    def over(self, kept: "ThroughputTable") -> "ThroughputTable":
        """Returns these speeds and bytes before those of `kept`, and the failures of both."""
        return dataclasses.replace(
            kept,
            speeds={**kept.speeds, **self.speeds},
            program_bytes={**kept.program_bytes, **self.program_bytes},
            compile_s=self.compile_s or kept.compile_s,
            failures=tuple(dict.fromkeys((*kept.failures, *self.failures))),
        )

    def write(self) -> None:
        """Writes the file, as a whole or not at all. Raises OSError where it cannot."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.as_dict(), indent=1)
            write_atomically(self.path, text, writer=f".{socket.gethostname()}.{os.getpid()}")

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for the file and for the checkpoint."""
        speeds, num_bytes = self.speeds, self.program_bytes
        return {
            "facts": dict(self.facts),
            "entries": {
                key: {"speeds": speeds.get(key, ()), "program_bytes": num_bytes.get(key, 0)}
                for key in {**speeds, **num_bytes}
            },
            "failures": [dataclasses.asdict(f) for f in self.failures if f.lasts == "always"],
            "compile_s": self.compile_s,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any], path: Path | None = None) -> "ThroughputTable":
        """Returns the inverse of `as_dict`. Raises ValueError for anything else."""
        try:
            speeds, program_bytes = dict[str, tuple[float, ...]](), dict[str, int]()
            for key, entry in values["entries"].items():
                # By hand a mesh may be written otherwise, as "tensor=8".
                key = key_of(*parse_key(key))
                each, num_bytes = tuple(map(float, entry["speeds"])), int(entry["program_bytes"])
                if not all(0 < speed < math.inf for speed in each) or num_bytes < 0:
                    raise TypeError(f"{key}: {entry}")
                speeds |= {key: each} if each else {}
                program_bytes |= {key: num_bytes} if num_bytes else {}
            # One by hand need not say it.
            if not 0 <= (compile_s := float(values.get("compile_s", 0.0))) < math.inf:
                raise TypeError(f"compile_s: {compile_s}")
            failures = tuple(Failure.from_dict(failure) for failure in values["failures"])
            facts = dict(values.get("facts", {}).items())
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise InputError(f"not a throughput table: {error}") from None
        return ThroughputTable(path, speeds, program_bytes, failures, compile_s, facts)


@functools.cache
def key_of(plan: Plan, tokens: int) -> str:
    """Returns the key of a plan at a context bucket; pages and offload are no part of it.

    As "rollout data=4,tensor=2 48 slots=32" or "train data=8 48 micro_batches=2,remat=full".
    """
    if isinstance(plan, RolloutPlan):
        return f"rollout {plan.mesh} {tokens} slots={plan.num_slots}"
    return f"train {plan.mesh} {tokens} micro_batches={plan.micro_batches},remat={plan.remat}"


_ROLLOUT = re.compile(r"rollout (\S+) ([0-9]+) slots=([1-9][0-9]*)")
_TRAIN = re.compile(r"train (\S+) ([0-9]+) micro_batches=([1-9][0-9]*),remat=(\w+)")


@functools.cache
def parse_key(text: str) -> tuple[Plan, int]:
    """Returns the plan, without pages, and the context bucket. Raises ValueError for no key."""
    if found := _ROLLOUT.fullmatch(text):
        mesh, tokens, slots = found.groups()
        return RolloutPlan(MeshShape.parse(mesh), int(slots), 0), int(tokens)
    if found := _TRAIN.fullmatch(text):
        mesh, tokens, number, remat = found.groups()
        return TrainPlan.from_list((mesh, number, remat)), int(tokens)
    raise InputError(f"{text!r} is no key; one is like 'rollout data=4,tensor=2 48 slots=32'")


def load_table(facts: Mapping[str, Any]) -> tuple[ThroughputTable, str | None]:
    """Returns the table kept for these facts, as a prior, and a sentence if it was damaged."""
    text = json.dumps(facts, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = cache_folder() / "throughput" / f"{name}.json"
    empty = ThroughputTable(path=path, facts=json.loads(text))
    try:
        found = ThroughputTable.from_dict(json.loads(path.read_text()), path)
        return dataclasses.replace(found, facts=empty.facts).as_prior(), None
    except FileNotFoundError:
        return empty, None
    except (ValueError, OSError) as error:
        return empty, f"the throughput table {path} cannot be read ({error}); it begins anew"
