# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Config of a run: the stages' frozen settings together, read strictly from files and flags."""

from earl_jax.config.config import Config
from earl_jax.config.sections import (
    CheckpointConfig,
    DevicesConfig,
    DispatchConfig,
    EvalConfig,
    LogConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DevicesConfig",
    "DispatchConfig",
    "EvalConfig",
    "LogConfig",
]
