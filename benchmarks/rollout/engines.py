# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Processes of the engines, which take turns."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OURS, TUNIX = "ours", "Tunix"

Found = dict[str, Any]


class Engine:
    """A process that answers jobs, one at a time."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self._stderr = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def ask(self, job: Mapping[str, Any]) -> Found:
        """Returns the answer to a job. Ends this process where the engine's own has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            sys.exit(f"{self.name} ended:\n{self._stderr.read()[-3000:]}")
        return json.loads(line)

    def versions(self) -> str:
        """Returns the versions of its packages."""
        return ", ".join(" ".join(version) for version in self.ask({}).items())

    def close(self) -> None:
        """Lets the process end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()


def start_engines(
    folder: Path, torch_python: str, torch_threads: Sequence[int], tunix_python: str
) -> tuple[Engine, list[Engine], list[Engine]]:
    """Ours, `transformers` once for each number of threads, and Tunix; "" as python: none."""
    ours = Engine(OURS, [sys.executable, "-m", "benchmarks.rollout.ours", str(folder)])
    # It writes the checkpoint that the others read.
    ours.versions()
    others = []
    if torch_python:
        script = str(HERE / "transformers_generate.py")
        for threads in torch_threads:
            name = f"transformers, {threads} thread{'s' * (threads > 1)}"
            others.append(Engine(name, [torch_python, script, str(folder), str(threads)]))
    tunix = []
    if tunix_python:
        command = [tunix_python, str(HERE / "tunix_sampler.py"), str(folder)]
        tunix.append(Engine(TUNIX, command))
    return ours, others, tunix


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An engine and its job; `warm_up` runs once before, so that all is compiled."""

    label: str
    engine: Engine
    job: Mapping[str, Any]
    warm_up: Mapping[str, Any]


def take_turns(contestants: Sequence[Contestant], repeats: int) -> dict[str, Found]:
    """Returns the fastest run of each, one run each in every round, all of the same work."""
    best: dict[str, Found] = {}
    for contestant in contestants:
        contestant.engine.ask(contestant.warm_up)
    for _ in range(repeats):
        for contestant in contestants:
            found = contestant.engine.ask(contestant.job)
            known = best.get(contestant.label)
            if known is None or found["seconds"] < known["seconds"]:
                best[contestant.label] = found
    tokens = {label: found["tokens"] for label, found in best.items()}
    if len(set(tokens.values())) > 1:
        sys.exit(f"not the same work: {tokens} new tokens")
    return best


def row(*cells: object) -> str:
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: str) -> str:
    """Returns the first two lines of a Markdown table."""
    return f"{row(*cells)}\n{'|---' * len(cells)}|"
