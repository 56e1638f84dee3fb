# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Config of a run: the stages' frozen settings together, read strictly from files and flags."""
