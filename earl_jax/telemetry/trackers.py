# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Trackers: other places that a run's metrics go to, such as TensorBoard."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from earl_jax.settings.arguments import accepted
from earl_jax.settings.errors import InputError, in_words
from earl_jax.settings.extras import import_extra
from earl_jax.settings.named import find_named
from earl_jax.telemetry.atomic import write_atomically
from earl_jax.telemetry.metrics import scalars

_SETTING = "config.log.trackers"


class Tracker(Protocol):
    """Takes a run's metrics. Its constructor gets those of `workdir` and `config` that it names."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a line of metrics.jsonl; nested names are joined by "/".

        A step may come twice: with its metrics, and with those of its evaluation ("eval/...").
        Steps go back where a run takes some again, as behind its last checkpoint.
        """
        ...

    def close(self) -> None:
        """Writes out what is not written yet."""
        ...


class TensorBoard:
    """Writes TensorBoard events to the folder "tensorboard" of the workdir.

    Raises ValueError where tensorboardX is not installed.
    """

    def __init__(self, *, workdir: Path):
        tensorboardX = import_extra("tensorboardX", "tensorboard")
        self._open, self._folder = tensorboardX.SummaryWriter, workdir / "tensorboard"
        self._writer, self._step = None, 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values as scalars of this step."""
        if step < self._step:
            self.close()
        self._step = step
        if self._writer is None:
            # purge_step hides the events of steps that a run takes again. Without the suffix a file
            # of the same second is written over.
            suffix = f".{step}"
            self._writer = self._open(str(self._folder), purge_step=step, filename_suffix=suffix)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Closes the file of events."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Sends a run to Weights & Biases, named by its workdir; one that goes on is one run there.

    Its id is in the workdir's file wandb_id. Settings of `wandb` come from the environment, as
    WANDB_PROJECT ("earl_jax" without it) and WANDB_MODE do. Raises ValueError where it is not
    installed.
    """

    def __init__(self, *, workdir: Path, config: Mapping[str, Any]):
        wandb = import_extra("wandb", "wandb")
        if not (path := workdir / "wandb_id").exists():
            write_atomically(path, uuid.uuid4().hex)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "earl_jax"),
            id=path.read_text(),
            name=workdir.resolve().name,
            dir=str(workdir),
            resume="allow",
            config=dict(config),
        )
        # W&B's own steps never go back, and those of a run may.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the values of this step."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """The trackers of a run. What goes wrong in one is noted once, and ends nothing."""

    def __init__(
        self,
        names: Sequence[str],
        workdir: Path,
        config: Mapping[str, Any],
        note: Callable[[str], None],
    ):
        """Opens the trackers. Raises ValueError for an unknown name and where one cannot open."""
        self._note, self._failed = note, set[str]()
        self._trackers = {name: _opened(name, workdir, config) for name in names}

    def log(self, line: Mapping[str, Any]) -> None:
        """Gives a line of metrics to all."""
        values = {name: value for name, value in scalars(line) if name != "step"}
        for name, tracker in self._trackers.items():
            self._try(name, lambda tracker=tracker: tracker.log(line["step"], values))

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        """Closes all."""
        for name, tracker in self._trackers.items():
            self._try(name, tracker.close)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a user's own class, or a service that is away
            if name not in self._failed:
                self._failed.add(name)
                self._note(f"{_SETTING} {name!r}: {in_words(error)}; metrics.jsonl has all")


def _opened(name: str, workdir: Path, config: Mapping[str, Any]) -> Tracker:
    made_by = find_named(name, TRACKERS, type, _SETTING)
    try:
        return made_by(**accepted(made_by, {"workdir": workdir, "config": config}))
    except Exception as error:
        raise InputError(
            f"{_SETTING} has {name!r}, which cannot be opened: {in_words(error)}"
        ) from error
