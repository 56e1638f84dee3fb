# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One run: its parts, its position in a workdir, and the record of a step."""
