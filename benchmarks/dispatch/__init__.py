# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher, measured: `python -m earl_jax.bench dispatch`."""
