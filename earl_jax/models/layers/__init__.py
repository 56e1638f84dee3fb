# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of the decoder: attention of three kinds, and the network behind it."""
