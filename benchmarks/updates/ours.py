# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Our updates in a process of its own: the learner of a run, on one CPU device.

Argument: the checkpoint's folder, which is written where it is not there.
"""

import collections
import functools
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.rollout.answering import answer_jobs
from benchmarks.rollout.ours import write_checkpoint
from benchmarks.updates import work
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.launch.start import start_jax
from earl_jax.models.checkpoints.hf_read import open_checkpoint
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.train.state import TrainState
from earl_jax.trajectory import TrajectoryBatch

PLAN = TrainPlan(MeshShape(), 1, "none")


def make_learner(folder: Path) -> Learner:
    """Returns the learner of the checkpoint's weights, by PPO's clipped loss."""
    checkpoint = open_checkpoint(folder)
    config = TrainConfig(
        adam_b1=work.BETAS[0],
        adam_b2=work.BETAS[1],
        adam_eps=work.EPS,
        max_grad_norm=work.MAX_GRAD_NORM,
        weight_decay=0.0,
    )
    return Learner(
        checkpoint.model,
        config,
        ALGORITHMS["grpo"],
        vocab_size=checkpoint.vocab_size,
        temperature=1.0,
        importance_cap=0.0,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
        checkpoint=checkpoint,
    )


def batch_of(rows: int, length: int) -> TrajectoryBatch:
    """Returns the batch of `work`, on the devices."""
    made = work.make_batch(rows, length)
    ones = np.ones((rows, length), np.int32)
    turn_ids = ones.copy()
    turn_ids[:, 0] = 0
    batch = TrajectoryBatch(
        tokens=made["tokens"],
        segment_ids=ones,  # pyright: ignore[reportArgumentType]
        turn_ids=turn_ids,  # pyright: ignore[reportArgumentType]
        logprobs=made["behaviour"],
        versions=np.zeros_like(ones),  # pyright: ignore[reportArgumentType]
        advantages=made["advantages"],
    )
    return jax.device_put(batch, make_layout(MeshShape(), row_axes=TRAINING_ROWS).activations("NS"))


def answer(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """Makes `updates` from the checkpoint's weights on, of which all but one are timed.

    Or a `profile` of one.
    """
    state, batch = learner.first_state(PLAN.mesh), batch_of(job["rows"], job["length"])
    controls = np.array([work.LEARNING_RATE, 0.0], np.float32)
    if job.get("profile"):
        return profile(learner, state, batch, controls)
    losses, seconds = [], []
    for _ in range(job["updates"]):
        start_s = time.perf_counter()
        state, metrics = learner.update(PLAN, state, batch, controls)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start_s)
    return {"losses": losses, "seconds": min(seconds[1:]), "tokens": job["rows"] * job["length"]}


def profile(
    learner: Learner, state: TrainState, batch: TrajectoryBatch, controls: np.ndarray
) -> dict[str, Any]:
    """Returns the seconds of one update and of its operations, added up over threads.

    An operation goes by the last part of its name in JAX, a fusion by that of its root; one that
    XLA added by its own name.
    """
    text = learner.program(PLAN).lower(state, batch, controls).compile().as_text()
    names = dict[str, str]()
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = ", line)
        # Loops have the time of what is in them.
        if found and " while(" not in line:
            path = re.search(r'op_name="([^"]+)"', line)
            name = path[1].rpartition("/")[2] if path else found[1].rstrip(".0123456789")
            names[found[1]] = "dot_general" if " dot(" in line else name
    state, _ = learner.update(PLAN, state, batch, controls)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start_s = time.perf_counter()
            jax.block_until_ready(learner.update(PLAN, state, batch, controls))
            seconds = time.perf_counter() - start_s
        [path] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    spent = collections.Counter[str]()
    events = (event for plane in data.planes for line in plane.lines for event in line.events)
    for event in events:
        if event.name in names:
            spent[names[event.name]] += event.duration_ns / 1e9
    return {"seconds": seconds, "operations": spent}


def main() -> None:
    """Answers jobs."""
    folder = Path(sys.argv[1])
    start_jax("cpu", 1)
    if not folder.exists():
        write_checkpoint(folder)
    answer_jobs(functools.partial(answer, make_learner(folder)))


if __name__ == "__main__":
    main()
