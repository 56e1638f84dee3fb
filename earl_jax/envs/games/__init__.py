# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Games: of OpenSpiel, of TextArena, and a trail of stones."""
