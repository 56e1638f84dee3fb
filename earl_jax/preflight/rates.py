# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Times of device programs."""

import time
from collections.abc import Callable
from typing import Any

import jax

_TIMES = 4


def best_seconds(program: Callable[..., Any], *arguments: Any) -> float:
    """Returns the shortest of a few times that a program takes, after a call that compiles it."""
    jax.block_until_ready(program(*arguments))
    spans = []
    for _ in range(_TIMES):
        start_s = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        spans.append(time.perf_counter() - start_s)
    return min(spans)
