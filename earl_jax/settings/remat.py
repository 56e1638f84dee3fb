# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Policies of rematerialisation: the part of a layer that its backward pass computes again.

"none": nothing. "dots": everything but projections and attention, whose results are kept (tokamax's
attention is computed again: its kernel has no names for them). "full": everything; only a layer's
input is kept. "offload": everything; a layer's input is kept in the host's memory.
"""

from typing import Literal, get_args

Remat = Literal["none", "dots", "full", "offload"]
# The one that keeps most on the devices first.
REMATS: tuple[Remat, ...] = get_args(Remat)
