# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher between processes against a single controller (dispatch.md)."""
