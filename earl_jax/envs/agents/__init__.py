# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Agents: programs of their own whose requests of chat completions the policy answers."""
