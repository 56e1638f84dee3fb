# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A child's side: a job comes as a line of JSON, and so does what came of it.

Imports the standard library alone: engines of other environments use it.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

PACKAGES = ("jax", "torch", "transformers", "google-tunix")


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def answer_jobs(answer: Answer) -> None:
    """Answers jobs until there are no more. Whatever libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(answer_line(answer, line), file=out, flush=True)


def answer_line(answer: Answer, line: str) -> str:
    """A job that is empty asks for versions.

    To what came of another one `cpu_s` is added: the time that all threads of this process
    computed, which neighbours on the machine change little.
    """
    job, start_s = json.loads(line), time.process_time()
    found = {**answer(job), "cpu_s": time.process_time() - start_s} if job else _versions()
    return json.dumps(found)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
