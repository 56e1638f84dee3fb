# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Carries the selector's decisions out: moves, recovery from a lack of memory, compile ahead."""
