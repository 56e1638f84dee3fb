# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Processes of their own: a sandbox for a policy's programs, and libraries that score answers."""
