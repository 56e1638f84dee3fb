# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Agentic reinforcement learning for language models in JAX."""

__version__ = "0.1.0"
