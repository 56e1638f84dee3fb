# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder: parameters, forward passes, KV cache, log-probs."""
