# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of hosts, links, storage and first programs, before hours are spent (main --check)."""
