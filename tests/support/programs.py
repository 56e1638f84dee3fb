# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that several runs in one process share."""

import contextlib
import functools
from collections.abc import Iterator

import pytest

from earl_jax.rollout import engines
from earl_jax.train import learner

LEARNERS = ("make_train_step", "make_part_steps", "make_stream_step")
LEARNERS += ("make_scorer", "make_estimator", "make_loss_sums")


@contextlib.contextmanager
def sharing_programs() -> Iterator[None]:
    """Has runs of the same settings have the same engines and updates, which are traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "Engine", functools.cache(engines.Engine))
        for name in LEARNERS:
            patch.setattr(learner, name, functools.cache(getattr(learner, name)))
        yield
