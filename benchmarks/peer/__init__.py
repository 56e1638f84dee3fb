# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on one task from one checkpoint: ours beside TRL's, see __main__.py."""
