# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Positions of a run, restored from the checkpoints in its workdir (saver.py)."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from earl_jax.config.config import Config
from earl_jax.models.fingerprint import fingerprint
from earl_jax.placement.placement import Placement
from earl_jax.rollout.load import expected_load, expected_tokens
from earl_jax.run.build import Run, build_run
from earl_jax.run.position import Position
from earl_jax.selector.plans import Plans
from earl_jax.selector.table import ThroughputTable
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.checkpoint import Checkpoints, DamagedCheckpoint
from earl_jax.train.export import set_exports_aside
from earl_jax.train.saved_state import from_checkpoint
from earl_jax.train.state import TrainState

# A checkpoint's JSON beside the TrainState; of adapters also the base's fingerprint.
_POSITION_KEYS = {"placement", "history", "throughput"}
_ADAPTERS_KEYS = {"base_fingerprint"}


def new_placement(run: Run, say: Callable[[str], None]) -> Placement:
    """Returns the placement of a run that begins; `say` reports a damaged table."""
    table, note = run.open_table()
    if note:
        say(note)
    return Placement(run.stages, table, say)


def read_newest(config: Config, workdir: Path) -> tuple[Run, Position, Placement]:
    """Returns a run's parts, and where its newest checkpoint that can be read stands.

    Nothing in the workdir is changed.

    Raises:
        ValueError: there is no such checkpoint.
    """
    folder = workdir / "checkpoints"
    # The folder comes with the run; one that is being saved has another name.
    if not any(path.name.isdigit() for path in folder.glob("*")):
        raise InputError(f"{workdir} holds no checkpoint yet: there is none in {folder}")
    run = build_run(config, workdir / "tokenizer")
    gather = run.cluster.gather
    with Checkpoints(folder, keep=None, gather=gather) as checkpoints:
        # Those that the first process sees: the run may go on meanwhile.
        for step in gather(checkpoints.steps(), "the checkpoints")[0]:
            restored, damage = _restored_in_all(run, checkpoints, step)
            if restored is not None:
                return run, *restored
            print(f"the checkpoint of step {step} is damaged ({damage})", file=sys.stderr)
    raise InputError(f"{folder} holds no checkpoint that can be read")


def resume(
    run: Run, checkpoints: Checkpoints, workdir: Path, say: Callable[[str], None]
) -> tuple[Position, Placement] | None:
    """Returns where the newest checkpoint that can be read stands; None if none was ever finished.

    Exports of later steps are set aside: the run takes these steps again.

    Raises:
        InputError: there were checkpoints, and all are damaged or gone.
    """
    checkpoints.wait()
    for step in checkpoints.steps():
        restored, damage = _restored_in_all(run, checkpoints, step, say)
        if restored is None:
            say(
                f"the checkpoint of step {step} is damaged ({damage}); it is set aside, and "
                "the one before is used"
            )
            run.cluster.after_first(
                lambda step=step: checkpoints.discard(step), "the damaged checkpoint"
            )
            continue
        run.tasks.restore(checkpoints.position(step))
        if run.cluster.is_first and (aside := set_exports_aside(workdir, step)):
            say(f"exports of steps after {step} are in {aside} now")
        last = run.config.num_steps
        of_all = f" of {last}" if step <= last else ""
        end = "" if step < last else f"; no step is left to take (config.num_steps={last})"
        say(f"resuming {workdir} after step {step}{of_all}{end}")
        return restored
    is_damaged = any(workdir.glob("damaged_*"))
    if run.cluster.gather(is_damaged or checkpoints.were_saved, "a mark of checkpoints")[0]:
        what = (
            f"no checkpoint in {workdir} can be read (they are set aside there as damaged_STEP)"
            if is_damaged
            else f"the checkpoints of the run in {workdir} are gone from {workdir / 'checkpoints'}"
        )
        raise InputError(
            f"{what}, and a run does not begin again by itself: put them back, give --restart to "
            f"begin from step 0 (what is there is kept beside it), or name another --workdir than "
            f"--workdir={workdir}"
        )
    if run.cluster.is_first and (aside := set_exports_aside(workdir, 0)):
        say(f"exports of a run without a checkpoint are in {aside} now")
    return None


def _restored_in_all(
    run: Run,
    checkpoints: Checkpoints,
    step: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[tuple[Position, Placement] | None, str]:
    """Returns what `_restore` does, or None and what is damaged, for some process, in all."""
    restored, damage = None, ""
    try:
        restored = _restore(run, checkpoints, step, say)
    except DamagedCheckpoint as found:
        damage = str(found)
    damages = list(filter(None, run.cluster.gather(damage, "the checkpoint")))
    return (None, damages[0]) if damages else (restored, "")


def _restore(
    run: Run,
    checkpoints: Checkpoints,
    step: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Position, Placement]:
    """Returns the position of a step; the speeds that the run chose by come with it.

    Raises:
        DamagedCheckpoint: it is not what was saved.
        InputError: another version saved it, or the base of its adapters is not there.
    """
    saved = checkpoints.position(step)
    kept, _ = run.open_table()
    needed = _POSITION_KEYS | (_ADAPTERS_KEYS if run.config.train.lora.rank else set())
    try:
        if absent := needed - saved.keys():
            raise InputError(f"its position is without {', '.join(sorted(absent))}")
        table = _table_of(ThroughputTable.from_dict(saved["throughput"]), kept, say)
        placement = Placement(run.stages, table, say)
        placement.restore(saved["placement"])
        placement.played.update(saved.get("played", ()))
    except InputError as error:
        raise InputError(
            f"the checkpoint of step {step} is whole, and this version of earl_jax does not know "
            f"it ({error}); use the version that saved it, or name another --workdir"
        ) from error
    history, is_warm = LoadHistory.from_list(saved["history"]), step < run.config.train.sft_steps
    if not is_warm:
        placement.end_warm_start()
    if not _is_possible(run, placement):
        placement.plans = Plans()
        load = expected_load(run.stages.rollout, history)
        placement.choose_step(expected_tokens(run.stages.rollout, load), load)
        say("the checkpoint's meshes are not possible here any more: they are chosen anew")
    shapes, where = run.learner.state_shapes(), run.stages.saved_shardings
    shardings = run.learner.state_shardings(placement.train.mesh)
    if not is_warm:
        shapes, shardings = shapes.without_sft(), shardings.without_sft()
    state = from_checkpoint(
        functools.partial(checkpoints.state, step, shapes), shardings, where and where.like(shapes)
    )
    state = _with_base(run, saved, state, placement)
    position = Position(
        step=step,
        state=state,
        history=history,
        failed_steps=int(saved.get("failed_steps", 0)),
        skipped_steps=int(saved.get("skipped_steps", 0)),
        open_groups=tuple(saved.get("open_groups", ())),
        oldest_step=saved.get("oldest_step"),
        averages=saved.get("averages", {}),
        lengths=dict(saved.get("lengths", ())),
    )
    return position, placement


def _is_possible(run: Run, placement: Placement) -> bool:
    """Returns True if the plans in use are of the devices and meshes of this run."""
    rollout, train = placement.plans
    assert train is not None
    problem = run.problem.of(train)
    can_play = rollout is None or rollout.mesh in problem.meshes("rollout", placement.max_tokens)
    return can_play and train.mesh in problem.meshes("train", placement.most_length)


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
