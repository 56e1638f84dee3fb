# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Another run whose weights a new run begins with (config.init_from)."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earl_jax.envs.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.lora import fingerprint
from earl_jax.run.build import Run
from earl_jax.settings.differences import differences
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.reshard import reshard
from earl_jax.train.checkpoint import Checkpoints, DamagedCheckpoint, Gather, of_one, shapes_by_name
from earl_jax.train.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The run whose weights after `step` a new run begins with; `config` is its config.json."""

    workdir: Path
    step: int
    config: dict[str, Any]

    def __str__(self) -> str:
        """Returns the source in words."""
        return f"{self.workdir} after step {self.step}"

    def check(self, run: Run) -> None:
        """Raises ValueError unless the run has the source's adapters, model and tokenizer."""
        theirs, ours = self.config, json.loads(json.dumps(run.config.as_dict()))
        different = []
        if theirs["train"]["lora"]["rank"] or ours["train"]["lora"]["rank"]:
            lora = theirs["train"]["lora"], ours["train"]["lora"]
            different = differences(*lora, "config.train.lora")
        if not theirs["model"]["path"] or not ours["model"]["path"]:
            models = [
                {name: value for name, value in each["model"].items() if name != "compute_dtype"}
                for each in (theirs, ours)
            ]
            different += differences(models[0], models[1], "config.model")
        if different:
            raise InputError(
                f"{self._flag} is a run of other parameters: {'; '.join(different[:8])}. Give the "
                "new run these settings"
            )
        self._check_shapes(shapes_by_name(run.learner.state_shapes().params))
        self._check_tokenizer(run.origin.tokenizer)

    def first_state(self, run: Run, mesh: MeshShape) -> TrainState:
        """Returns the state that the run begins with: of these weights, before the first update.

        Raises ValueError where adapters were trained on another base, and for damaged files.
        """
        learner, where = run.learner, run.stages.saved_shardings
        has_adapters = run.config.train.lora.rank > 0
        shapes, shardings = learner.state_shapes().params, learner.state_shardings(mesh).params
        with self._open(run.cluster.gather) as checkpoints:
            saved = checkpoints.position(self.step)
            if where is None:
                params = checkpoints.parameters(self.step, shapes, shardings)
            else:
                read = checkpoints.parameters(self.step, shapes, where.params)
                params = reshard(read, shardings)
        if not has_adapters:
            return learner.state_of(params, mesh)
        state = learner.first_state(mesh)
        if run.cluster.trains and int(fingerprint(state.base)) != saved["base_fingerprint"]:
            raise InputError(
                f"{self._flag} has adapters of another base than config.model.path "
                f"({run.config.model.path!r}), or config.train.lora.base_dtype, gives this run"
            )
        return dataclasses.replace(state, params=params)

    @property
    def _flag(self) -> str:
        return f"--init_from={self.workdir}@{self.step}"

    @contextlib.contextmanager
    def _open(self, gather: Gather = of_one) -> Iterator[Checkpoints]:
        checkpoints = Checkpoints(self.workdir / "checkpoints", keep=None, gather=gather)
        try:
            yield checkpoints
        except DamagedCheckpoint as damage:
            raise InputError(
                f"{self._flag}: that checkpoint is damaged ({damage}); name another step"
            ) from damage
        finally:
            checkpoints.close()

    def _check_shapes(self, ours: dict[str, tuple[int, ...]]) -> None:
        with self._open() as checkpoints:
            theirs = checkpoints.shapes(self.step)
        different = [name for name in theirs | ours if theirs.get(name) != ours.get(name)]
        if different:
            name = different[0]
            raise InputError(
                f"{self._flag} is a run of another model: its {name} is of shape "
                f"{theirs.get(name)}, here {ours.get(name)}; name the same model in config.model"
            )

    def _check_tokenizer(self, ours: Any) -> None:
        path = self.config["model"]["path"]
        theirs = load_tokenizer(find_folder(path) if path else self.workdir / "tokenizer")
        if theirs.get_vocab() != ours.get_vocab():
            raise InputError(
                f"{self._flag} is a run of another tokenizer ({len(theirs)} entries, here "
                f"{len(ours)}); its weights know other token ids: name the same model in "
                "config.model.path"
            )


def open_source(text: str) -> Source | None:
    """Returns the source that config.init_from names, "WORKDIR" or "WORKDIR@STEP"; None for "".

    Raises ValueError where there is no such run or checkpoint.
    """
    if not text:
        return None
    name, at, number = text.rpartition("@")
    has_step = bool(at) and number.isdigit() and not Path(text).is_dir()
    workdir = Path(name if has_step else text)
    path = workdir / "config.json"
    if not path.is_file() or not (workdir / "checkpoints").is_dir():
        raise InputError(
            f"--init_from={text}: {workdir} holds no checkpoint of a run; name the workdir of a "
            "run, or give config.model.path a checkpoint of transformers"
        )
    checkpoints = Checkpoints(workdir / "checkpoints", keep=None)
    steps = checkpoints.steps()
    checkpoints.close()
    if not steps or (has_step and int(number) not in steps):
        found = ", ".join(map(str, reversed(steps))) or "none"
        raise InputError(
            f"--init_from={text}: there is no such checkpoint; the steps of {workdir} are {found}"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"--init_from={text}: {path} cannot be read: {error}") from error
    return Source(workdir=workdir, step=int(number) if has_step else steps[0], config=config)
