# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How each published number was made. A package, because google-jetstream installs one so named."""
