# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Skips tests that need a compiler for devices that are not here, or tokamax."""

import importlib.util

import pytest

from earl_jax.sharding.topology import make_topology, missing_compiler

has_tokamax = importlib.util.find_spec("tokamax") is not None
need_tokamax = pytest.mark.skipif(not has_tokamax, reason="tokamax is an extra")


def need_compiler(name: str):
    missing = missing_compiler(make_topology(name))
    return pytest.mark.skipif(missing is not None, reason=str(missing))
