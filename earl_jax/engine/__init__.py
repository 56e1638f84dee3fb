# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One policy on one layout: decode slots, a paged KV cache, sampling, prefix sharing."""
