# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""RL mathematics: advantages, losses, corrections, and the algorithms made of them."""
