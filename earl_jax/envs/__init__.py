# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments: the protocol, the games, the pool, and chat text as token ids."""

import logging

# Only tokenizers are used of transformers; its advice at import that models need PyTorch is noise
# for every run. The filter drops that one sentence and nothing else.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)
