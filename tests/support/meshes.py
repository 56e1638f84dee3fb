# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The possible meshes of each stage, as functions of devices, names and a check."""

import functools

from earl_jax.selector.problem import mesh_candidates as candidates

rollout_candidates = functools.partial(candidates, "rollout")
train_candidates = functools.partial(candidates, "train")
