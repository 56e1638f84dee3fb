# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of parameters for tests of optimizers."""

from earl_jax.models.parameters import ParameterSpec


def specs_of(sizes: dict[str, int] | None = None, **axes: str) -> dict[str, ParameterSpec]:
    """Returns specs of parameters with these axes, each letter of a size, by default 1."""
    sizes = sizes or {}
    return {
        name: ParameterSpec(
            shape=tuple(sizes.get(letter, 1) for letter in letters), axes=letters, deviation=1.0
        )
        for name, letters in axes.items()
    }
