# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses a plan for each stage from a problem, a load and a throughput table. Pure."""
