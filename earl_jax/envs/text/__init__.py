# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Text and tokens: tokenizers, chat templates, conversations and files of them."""
