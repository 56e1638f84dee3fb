# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures, instruments and reference computations that several test files share."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment_without(*prefixes: str) -> dict[str, str]:
    """Returns the variables that begin otherwise, and conftest.py's own for compiled programs."""
    own = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
    return {k: v for k, v in os.environ.items() if k == own or not k.startswith(prefixes)}
