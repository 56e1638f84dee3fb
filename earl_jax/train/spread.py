# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Variances of values that come in parts, in fp32. Pure functions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spread(NamedTuple):
    """The number of some values, their mean, and the sum of their squared distances from it.

    Unlike sums of squares these keep their digits where the mean is large.
    """

    number: jax.Array
    mean: jax.Array
    squares: jax.Array


def spread_of(values: jax.Array, mask: jax.Array) -> Spread:
    """Returns the spread of the values where the mask is True; zeros where it is nowhere."""
    number = jnp.sum(mask).astype(jnp.float32)
    mean = jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(number, 1.0)
    distance = jnp.where(mask, values - mean, 0.0)
    # The sum of many values is not exact, and so `mean` is not.
    total = jnp.sum(distance)
    correction = total / jnp.maximum(number, 1.0)
    return Spread(number, mean + correction, jnp.sum(distance**2) - total * correction)


def joined(one: Spread, other: Spread) -> Spread:
    """Returns the spread of the values of both (Chan, Golub and LeVeque 1983)."""
    number = one.number + other.number
    gap, share = other.mean - one.mean, other.number / jnp.maximum(number, 1.0)
    between = gap**2 * one.number * share
    return Spread(number, one.mean + gap * share, one.squares + other.squares + between)


def explained_variance(values: Spread, errors: Spread) -> jax.Array:
    """Returns 1 - Var[error] / Var[value]; 0 where all values are equal, up to rounding."""
    differ = values.squares > values.number * (1e-6 * values.mean) ** 2
    return jnp.where(differ, 1.0 - errors.squares / jnp.where(differ, values.squares, 1.0), 0.0)
