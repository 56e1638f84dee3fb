# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures, instruments and reference computations that several test files share."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Programs that tests have compiled, for all workers, their processes, and later runs.
PROGRAMS = ROOT / ".pytest_cache" / "programs"


def environment_without(*prefixes: str) -> dict[str, str]:
    """Returns the variables that begin otherwise, and conftest.py's own for compiled programs."""
    own = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
    return {k: v for k, v in os.environ.items() if k == own or not k.startswith(prefixes)}


def run_python(
    *line: str, cwd: Path = ROOT, timeout: float = 280.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments and `variables`, and returns its output."""
    return subprocess.run(
        [sys.executable, *line],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def python_path(*folders: Path) -> str:
    """Returns $PYTHONPATH of a process that keeps its compiled programs as tests need it."""
    return os.pathsep.join(map(str, (*folders, ROOT / "tests/support/children")))


def link_programs(cache: Path) -> None:
    """Has runs with this cache folder ($XDG_CACHE_HOME) use and add to PROGRAMS."""
    (cache / "earl_jax").mkdir(parents=True)
    (cache / "earl_jax/xla").symlink_to(PROGRAMS)


def wait_until(happened: Callable[[], bool]) -> bool:
    """Waits until it has happened, but no longer than half a minute. Returns whether it has."""
    deadline_s = time.monotonic() + 30
    while not happened() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return happened()
