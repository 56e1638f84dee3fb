# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a run's newest weights: tasks that are played, and held-out conversations."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from earl_jax.placement.held_out import held_out_loss
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import plans_kept, play_batches
from earl_jax.rollout.evaluation import summarize
from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.trajectory import Trajectory


def evaluate(
    run: Run,
    placement: Placement,
    position: Position,
    *,
    games: int,
    beside_live: bool = False,
    keep: Callable[[Sequence[Trajectory]], None] | None = None,
) -> dict[str, Any]:
    """Plays the first `games` evaluation tasks with the newest weights; nothing is learnt.

    Each is played config.eval.samples times, by the weights' moving average with
    config.eval.averaged. With 0 games nothing is played. With `beside_live` the plans of a rollout
    that stays on the devices are in use again afterwards; `keep` is given its own episodes
    in every process (`play_batches`).

    Returns:
        The summary of their outcomes, for metrics.jsonl (`summarize`), with the loss on the
        conversations of config.eval.sft_path (`held_out_loss`).
    """
    state, held_out = run.judged_state(position.state), run.tasks.held_out
    samples = run.config.eval.samples
    scored = held_out_loss(placement, state, held_out) if held_out else {}
    if not games:
        return {"name": Path(run.config.eval.sft_path).name, **scored}
    with plans_kept(placement) if beside_live else contextlib.nullcontext():
        outcomes = play_batches(
            run.actor,
            placement,
            run.learner.policy(state),
            run.tasks.evaluation(games, samples),
            version=position.step,
            load=position.history.recent(),
            sampling=run.config.eval.sampling,
            beside_live=beside_live,
            keep=keep,
        )
    found = summarize(outcomes, run.config.env.title, run.config.env.plural, samples)
    # First, because a line shows a few only; an environment's metric of that name gives way.
    return {**scored, **found, **scored}
