# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What happened: metrics, episodes, progress and the report of a run; the load it put on memory."""
