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
from collections.abc import Callable
from typing import Any

PACKAGES = ("jax", "torch", "transformers", "google-tunix")


def answer_jobs(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers jobs until there are no more. Whatever libraries print goes to stderr.

    A job that is empty asks for versions.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(answer(job) if job else _versions()), file=out, flush=True)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
