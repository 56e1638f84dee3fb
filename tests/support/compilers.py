# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Skips tests that need a compiler for devices that are not here."""

import pytest

from earl_jax.sharding.topology import make_topology, missing_compiler


def need_compiler(name: str):
    missing = missing_compiler(make_topology(name))
    return pytest.mark.skipif(missing is not None, reason=str(missing))
