# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures, instruments and reference computations that several test files share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
