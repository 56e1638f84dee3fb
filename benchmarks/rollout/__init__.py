# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts side by side: our engine, `transformers.generate`, and Tunix's sampler (rollout.md)."""
