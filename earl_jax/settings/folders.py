# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of the user."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder of what may be lost: $XDG_CACHE_HOME/earl_jax, or ~/.cache/earl_jax."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "earl_jax"


def searched_from(path: str) -> str:
    """Returns where a path that was not found begins, for a message; "" for an absolute one."""
    return "" if Path(path).is_absolute() else f" (the current folder is {Path.cwd()})"
