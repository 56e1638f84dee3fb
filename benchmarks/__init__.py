# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts of the published numbers. A package, because google-jetstream installs one so named."""
