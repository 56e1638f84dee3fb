# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Optional packages, each an extra of this one."""

import importlib
import warnings
from types import ModuleType

from earl_jax.settings.errors import InputError


def import_extra(module: str, extra: str) -> ModuleType:
    """Returns an optional module. Raises ValueError that names its extra where it is missing."""
    try:
        # Of packages that it imports.
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{module} is not installed ({error}); uv sync --extra {extra}, or pip install "
            f"'earl_jax[{extra}]'"
        ) from error
