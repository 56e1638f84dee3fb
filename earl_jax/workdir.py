# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Position of a run, saved in its workdir and restored from there."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_jax.config import Config
from earl_jax.envs.tasks import KeepsState
from earl_jax.models.lora import fingerprint
from earl_jax.placement.placement import Placement
from earl_jax.run import Run, build_run
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.checkpoint import Checkpoints, DamagedCheckpoint, copy_to_save, from_checkpoint
from earl_jax.train.export import keep_exports
from earl_jax.train.state import TrainState

# A checkpoint's JSON beside the TrainState; of adapters also the base's fingerprint.
_POSITION_KEYS = {"placement", "history", "throughput"}
_ADAPTERS_KEYS = {"base_fingerprint"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The state of a run after `step` RL steps: its weights, and its history of the load."""

    step: int
    state: TrainState
    history: LoadHistory


def saved_in_words(workdir: Path) -> str:
    """Returns which checkpoint a run that ends now goes on from."""
    steps = [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]
    if not steps:
        return f"{workdir} holds no checkpoint yet"
    return f"the newest checkpoint in {workdir} is of step {max(steps)}"


def new_placement(run: Run, say: Callable[[str], None]) -> Placement:
    """Returns the placement of a run that begins; `say` reports a damaged table."""
    table, note = run.open_table()
    if note:
        say(note)
    return Placement(run.stages, table, say)


def save(run: Run, placement: Placement, checkpoints: Checkpoints, position: Position) -> None:
    """Saves all that a run needs to go on as if it had never stopped; every process calls it."""
    # A resumed run has no kept session either, and the copy of the weights needs its memory.
    placement.sessions.forget()
    base, tasks = position.state.base, run.tasks.played.tasks
    prints: list[int | None] = []
    if base is not None:
        own = int(fingerprint(base)) if run.cluster.trains else None
        prints = [each for each in run.cluster.gather(own, "the base") if each is not None]
    state, is_copy = copy_to_save(position.state, run.stages.saved_shardings)
    checkpoints.save(
        position.step,
        state,
        {
            "placement": placement.as_dict(),
            "history": position.history.as_list(),
            "throughput": placement.observations.table.as_dict(),
            **({"base_fingerprint": prints[0]} if prints else {}),
            **({"tasks": tasks.state()} if isinstance(tasks, KeepsState) else {}),
        },
    )
    if not is_copy:
        # The next step donates these arrays.
        checkpoints.wait()


def read_newest(config: Config, workdir: Path) -> tuple[Run, Position, Placement]:
    """Returns a run's parts, and where its newest checkpoint that can be read stands.

    Nothing in the workdir is changed.

    Raises:
        ValueError: there is no such checkpoint.
    """
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        raise InputError(f"{workdir} holds no checkpoint yet: there is no {folder}")
    run = build_run(config, workdir / "tokenizer")
    checkpoints = Checkpoints(folder, keep=config.checkpoint.keep)
    for step in checkpoints.steps():
        try:
            position, placement = _restore(run, checkpoints, step)
        except DamagedCheckpoint as damage:
            print(f"the checkpoint of step {step} is damaged ({damage})", file=sys.stderr)
            continue
        checkpoints.close()
        return run, position, placement
    raise InputError(f"{folder} holds no checkpoint that can be read")


def resume(
    run: Run, checkpoints: Checkpoints, workdir: Path, say: Callable[[str], None]
) -> tuple[Position, Placement] | None:
    """Returns where the newest checkpoint that can be read stands; None if there is none.

    Exports of later steps are dropped: the run takes these steps again.
    """
    checkpoints.wait()
    for step in checkpoints.steps():
        restored, damage = None, None
        try:
            restored = _restore(run, checkpoints, step, say)
        except DamagedCheckpoint as found:
            damage = str(found)
        damages = list(filter(None, run.cluster.gather(damage, "the checkpoint")))
        if damages or restored is None:
            say(
                f"the checkpoint of step {step} is damaged ({damages[0]}); it is set aside, and "
                "the one before is used"
            )
            run.cluster.after_first(
                lambda step=step: checkpoints.discard(step), "the damaged checkpoint"
            )
            continue
        tasks = run.tasks.played.tasks
        if isinstance(tasks, KeepsState):
            tasks.restore(checkpoints.position(step).get("tasks", {}))
        if run.cluster.is_first:
            keep_exports(workdir, until=step)
        say(f"resuming {workdir} after step {step} of {run.config.num_steps}")
        return restored
    return None


def _restore(
    run: Run,
    checkpoints: Checkpoints,
    step: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Position, Placement]:
    """Returns the position of a step; the speeds that the run chose by come with it.

    Raises:
        DamagedCheckpoint: it cannot be what was saved.
        ValueError: the base that its adapters were trained on is not there.
    """
    saved = checkpoints.position(step)
    kept, _ = run.open_table()
    needed = _POSITION_KEYS | (_ADAPTERS_KEYS if run.config.train.lora.rank else set())
    absent = needed - saved.keys() if isinstance(saved, dict) else needed
    if absent:
        raise DamagedCheckpoint(f"its position is without {', '.join(sorted(absent))}")
    try:
        table = _table_of(ThroughputTable.from_dict(saved["throughput"]), kept, say)
        placement = Placement(run.stages, table, say)
        placement.restore(saved["placement"])
    except ValueError as error:
        raise DamagedCheckpoint(f"its position is not one: {error}") from error
    mesh = placement.train.mesh
    state = from_checkpoint(
        functools.partial(checkpoints.state, step, run.learner.state_shapes()),
        run.learner.state_shardings(mesh),
        run.stages.saved_shardings,
    )
    state = _with_base(run, saved, state, placement)
    history = LoadHistory.from_list(saved["history"])
    return Position(step=step, state=state, history=history), placement


def _table_of(
    saved: ThroughputTable, kept: ThroughputTable, say: Callable[[str], None]
) -> ThroughputTable:
    """Returns the run's own speeds before those that others have measured since, unless stale."""
    if saved.facts and saved.facts != kept.facts:
        say("the checkpoint's speeds are of other devices, settings or versions: they are not used")
        return kept
    return saved.over(kept)


def _with_base(
    run: Run, saved: dict[str, Any], state: TrainState, placement: Placement
) -> TrainState:
    """Returns the state with the base that its adapters were trained on.

    Raises:
        ValueError: the base that is there now is another one.
    """
    base = run.learner.frozen_base(placement.train.mesh)
    if not run.cluster.trains:
        return dataclasses.replace(state, base=base)
    if base is not None and int(fingerprint(base)) != saved["base_fingerprint"]:
        path = run.config.model.path
        raise InputError(
            f"the weights in config.model.path ({path}) are not those that this run's adapters "
            "were trained on; put these back, or name another --workdir"
            if path
            else "this version of JAX draws other weights from config.seed than those that this "
            "run's adapters were trained on; use that version, or name another --workdir"
        )
    return dataclasses.replace(state, base=base)
