# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP: a small server, and requests in OpenAI's form. No JAX."""
