# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints (orbax, asynchronous): all that a run needs to go on as if it had never stopped.

A checkpoint holds the TrainState, and as JSON the loop's position: the step, the load history, the
meshes, the measurements that the selector chose from. A frozen base is not in it: the run reads or
draws it again, and compares its fingerprint.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from earl_jax.telemetry.atomic import write_atomically
from earl_jax.train.step import TrainState


class DamagedCheckpoint(ValueError):
    """What lies on the disk cannot be what was saved."""


class Checkpoints:
    """The checkpoints of one workdir. Saving returns before the bytes are on disk."""

    def __init__(self, folder: Path, *, keep: int, by_hosts: bool = False) -> None:
        """Keeps the newest `keep`. `by_hosts`: processes wait for each other without a program."""
        self._folder = folder.absolute()
        everybody = None
        if by_hosts:
            # For processes by name orbax asks the coordination service, and makes no folder.
            everybody = set(range(jax.process_count()))
            self._folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=not by_hosts,
            enable_async_checkpointing=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=everybody),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """Begins to save. `state` may be donated once this returns."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_kept(state)), position=ocp.args.JsonSave(position)
            ),
        )

    def position(self, step: int) -> dict[str, Any]:
        """The loop's position at this step. Raises DamagedCheckpoint."""
        return self._read(step, position=ocp.args.JsonRestore())["position"]

    def state(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """The TrainState at this step, each device reading its part; without a base.

        Raises:
            DamagedCheckpoint: it cannot be what was saved.
        """
        placed = jax.tree.map(
            lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
            _kept(shapes),
            _kept(shardings),
        )
        return TrainState(**self._read(step, state=ocp.args.StandardRestore(placed))["state"])

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            # All that orbax was seen to raise for files that are cut short, gone, or full of
            # something else (0.12). Any other exception would be a defect of a program.
            words = (str(error).splitlines() or [""])[0][:200]
            raise DamagedCheckpoint(f"{type(error).__name__}: {words}") from error

    def discard(self, step: int) -> None:
        """Sets a damaged checkpoint aside, as `damaged_STEP`: its step can be saved again.

        Of several processes the first calls it before the others, which find it done.
        """
        target = self._folder.parent / f"damaged_{step}"
        if (self._folder / str(step)).exists():
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(self._folder / str(step), target)
        self._manager.reload()

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self._manager.wait_until_finished()
        self._manager.close()


def _kept(state: TrainState) -> dict[str, Any]:
    """The fields that a checkpoint holds: all that there are but the base."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if name != "base" and value is not None}


def open_workdir(workdir: Path, config: dict[str, Any]) -> None:
    """Makes the workdir this run's: writes config.json, or checks that it is the same.

    Raises:
        ValueError: the folder cannot be written, or belongs to a run of another config.
    """
    path = workdir / "config.json"
    text = json.dumps(config, indent=2)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomically(path, text)
            return
        saved = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"--workdir={workdir} cannot be used: {error.strerror or error}; name a folder "
            "that you may write"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); name another --workdir") from error
    different = differences(saved, json.loads(text), "config")
    if different:
        raise ValueError(
            f"--workdir={workdir} holds a run of another config: {'; '.join(different[:8])}. Name "
            "another --workdir, or run with the config of that one"
        )


_ABSENT = object()


def differences(
    there: Any, here: Any, path: str, sides: tuple[str, str] = ("there", "here")
) -> list[str]:
    """A line for each value that is not the same in two trees of settings: its path, and both."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(there.keys() | here.keys())
        return [
            line
            for name in names
            for line in differences(
                there.get(name, _ABSENT), here.get(name, _ABSENT), f"{path}.{name}", sides
            )
        ]
    words = ["absent" if value is _ABSENT else repr(value) for value in (there, here)]
    shown = ", ".join(f"{word} {place}" for word, place in zip(words, sides, strict=True))
    return [] if there == here else [f"{path} is {shown}"]
