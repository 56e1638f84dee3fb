# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times of the stages of a run on this machine, on each mesh of its config."""
