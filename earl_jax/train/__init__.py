# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The learner: state, one jitted update, optimiser, checkpoints."""
