# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics, episodes, progress and report of a run, and the load that it put on memory."""
