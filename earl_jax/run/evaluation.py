# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a run's newest weights: tasks that are played, and held-out conversations."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from earl_jax.launch.cluster import Cluster
from earl_jax.placement.held_out import held_out_loss
from earl_jax.placement.placement import Placement
from earl_jax.placement.rollouts import plans_kept, play_batches
from earl_jax.rollout.end import Stopped
from earl_jax.rollout.evaluation import summarize, why_no_means
from earl_jax.run.build import Run
from earl_jax.run.position import Position
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.telemetry.episodes import trajectory_lines
from earl_jax.telemetry.recorder import Recorder
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
    config.train.ema_decay. With 0 games nothing is played. With `beside_live` the plans of a
    rollout that stays on the devices are in use again afterwards; `keep` is given its own episodes
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


def add_lines(lines: list[str], cluster: Cluster, own: Sequence[Trajectory]) -> None:
    """Adds the episodes that all processes have of a batch, in their order, to the first's lines.

    Every process calls it, with its own.
    """
    keys = [(each.episode, each.role) for each in own]
    given = list(zip(keys, trajectory_lines(own), strict=True))
    parts = cluster.gather(given, "the episodes to write down", in_first=True)
    if cluster.is_first:
        # Processes that share an engine have the same ones.
        found = {tuple(key): line for part in parts for key, line in part}
        lines += [found[key] for key in sorted(found)]


class LivePlayer(Protocol):
    """Episodes that may be open while a run is evaluated."""

    @property
    def is_live(self) -> bool:
        """True while episodes are open."""
        ...

    def give_up(self) -> None:
        """Lets them leave the devices; they are played again."""
        ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Evaluator:
    """Evaluates positions of a run where that is due, and writes it down. Every process has one.

    It `was_stopped` by a signal in the evaluation behind the last step: a resumed run begins with
    it. `player` is what plays ahead of the steps in an asynchronous run.
    """

    run: Run
    placement: Placement
    recorder: Recorder
    player: LivePlayer | None = None
    was_stopped: bool = False

    def evaluate_if_due(self, position: Position) -> None:
        """Evaluates behind the last step, and behind one every so many."""
        config = self.run.config.eval
        last = position.step == self.run.config.num_steps
        if last or position.step % config.every_steps == 0:
            self.evaluate(position, config.final_games if last and config.games else config.games)

    def evaluate(self, position: Position, games: int) -> None:
        """Writes an evaluation down, unless a signal stops it, or there is nothing to evaluate."""
        games = games if self.run.config.plays else 0
        if not games and self.run.tasks.held_out is None:
            return
        try:
            evaluation = self._evaluation(position, games)
        except Stopped:
            self.was_stopped = True
            return
        if why := why_no_means(evaluation):
            self.recorder.note(f"evaluation after step {position.step}: {why}")
        self.recorder.write({"step": position.step, "eval": evaluation})

    def _evaluation(self, position: Position, games: int) -> dict[str, Any]:
        """Returns an evaluation; open episodes make way where memory is too short beside them."""
        played = functools.partial(evaluate, self.run, self.placement, position, games=games)
        if self.player is not None and self.player.is_live:
            with contextlib.suppress(BudgetTooSmall):
                return played(beside_live=True)
            self.player.give_up()
            self.recorder.note(
                "memory is too short for an evaluation beside the open episodes: they are played "
                "again behind it"
            )
        return played()
