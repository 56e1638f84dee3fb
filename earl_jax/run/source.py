# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Weights from elsewhere: those that a run begins with (config.init_from), and of a teacher.

A teacher is the reference policy of a run (config.reference_from): another run, or a checkpoint.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from earl_jax.config.config import Config, find_teacher, split_source
from earl_jax.config.file import SOURCES, read_sources, without_former
from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.launch.cluster import Cluster
from earl_jax.models.checkpoints.hf_read import (
    Checkpoint,
    check_weights,
    load_parameters,
    open_checkpoint,
)
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.fingerprint import fingerprint
from earl_jax.models.parameters import Params
from earl_jax.run.build import Run, build_run, check_prompts, with_conversations, with_held_out
from earl_jax.run.workdir import tokenizer_folder
from earl_jax.settings.differences import differences
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import absent_tree
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry.atomic import write_atomically
from earl_jax.train.checkpoint import Checkpoints, DamagedCheckpoint, Gather, of_one, shapes_by_name
from earl_jax.train.state import TrainState, with_first_average

_REFERENCE = "config.reference_from"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The run whose weights after `step` a new run takes; `config` is its config.json.

    They are the run's moving average, if it keeps one (config.train.ema_decay).
    `setting` is what names them.
    """

    workdir: Path
    step: int
    config: dict[str, Any]
    setting: str = "--init_from"

    def __str__(self) -> str:
        """Returns the source in words."""
        return f"{self.workdir} after step {self.step}"

    def check(self, run: Run) -> None:
        """Raises ValueError unless the run has the source's adapters, model and tokenizer."""
        theirs, ours = self.config, json.loads(json.dumps(run.config.as_dict()))
        lora, different = (theirs["train"]["lora"], ours["train"]["lora"]), []
        if bool(lora[0]["rank"]) != bool(lora[1]["rank"]):
            kinds = [f"config.train.lora.rank={each['rank']}" for each in lora]
            raise InputError(
                f"{self._flag} is a run with {kinds[0]}, and this one has {kinds[1]}: name a "
                "folder of its export as config.model.path (in WORKDIR/export, or written by that "
                "run with --config.checkpoint.export=True)"
            )
        if lora[0]["rank"]:
            different = differences(*lora, "config.train.lora")
        self._check_same(different + self._other_model(run, ours))
        self._check_shapes(shapes_by_name(run.learner.state_shapes().params))
        self._check_tokenizer(run.origin.tokenizer)

    def check_reference(self, run: Run) -> None:
        """Raises ValueError unless the run has the source's model and tokenizer, without adapters.

        The run may have adapters.
        """
        if self.config["train"]["lora"]["rank"]:
            raise InputError(
                f"{self._flag} is a run with adapters, which are no whole policy; name a folder of "
                "its export there"
            )
        self._check_same(self._other_model(run, json.loads(json.dumps(run.config.as_dict()))))
        self._check_shapes(shapes_by_name(run.learner.state_shapes().reference))
        self._check_tokenizer(run.origin.tokenizer)

    def _other_model(self, run: Run, ours: dict[str, Any]) -> list[str]:
        """Returns how the model differs from the run's, by settings or checkpoint, in words."""
        theirs, own = self.config, run.origin.checkpoint
        if theirs["model"]["path"] and own:
            if theirs["model"]["path"] == ours["model"]["path"]:
                return []
            # What shapes do not say: the base of rotary positions, the norms' epsilon.
            found = open_checkpoint(self._folder)
            return differences(
                dataclasses.asdict(found.model), dataclasses.asdict(own.model), "config.model"
            )
        models = [
            {name: value for name, value in each["model"].items() if name != "compute_dtype"}
            for each in (theirs, ours)
        ]
        return differences(models[0], models[1], "config.model")

    def _check_same(self, different: list[str]) -> None:
        if different:
            raise InputError(
                f"{self._flag} is a run of other parameters: {'; '.join(different[:8])}. Give the "
                "new run these settings"
            )

    @property
    def _field(self) -> str:
        """The field of its checkpoints that has the weights."""
        return "ema" if self.config["train"].get("ema_decay") else "params"

    def first_state(self, run: Run, mesh: MeshShape) -> TrainState:
        """Returns the state that the run begins with: of these weights, before the first update.

        Raises ValueError where adapters were trained on another base, and for damaged files.
        """
        learner, where = run.learner, run.stages.saved_shardings
        has_adapters = run.config.train.lora.rank > 0
        shapes, shardings = learner.state_shapes().params, learner.state_shardings(mesh).params
        with self._open(run.cluster.gather) as checkpoints:
            saved = checkpoints.position(self.step)
            params = self._read(checkpoints, shapes, shardings, where and where.params)
        if not has_adapters:
            return learner.state_of(params, mesh)
        state = learner.first_state(mesh)
        if run.cluster.trains and int(fingerprint(state.base)) != saved["base_fingerprint"]:
            raise InputError(
                f"{self._flag} has adapters of another base than config.model.path "
                f"({run.config.model.path!r}), or config.model.compute_dtype, gives this run"
            )
        state = dataclasses.replace(state, params=params)
        return with_first_average(run.config.train, state) if run.cluster.trains else state

    def reference(self, run: Run, mesh: MeshShape) -> Params:
        """Returns the weights as the run's reference policy, in its type.

        Raises ValueError for damaged files.
        """
        learner, where = run.learner, run.stages.saved_shardings
        shapes, shardings = (
            each.reference for each in (learner.state_shapes(), learner.state_shardings(mesh))
        )
        # Read as they were saved: a fingerprint is of fp32.
        saved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shapes)
        with self._open(run.cluster.gather) as checkpoints:
            read = self._read(checkpoints, saved, shardings, where and where.reference)
        if not run.cluster.trains:
            return absent_tree(shapes, shardings)
        dtype = jnp.dtype(learner.model.compute_dtype)
        cast = jax.jit(
            lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree),
            out_shardings=shardings,
        )
        return cast(read)

    def _read(self, checkpoints: Checkpoints, shapes: Any, shardings: Any, where: Any) -> Params:
        """Reads the weights to these shardings, by way of `where` unless it is None."""
        if where is None:
            return checkpoints.parameters(self.step, shapes, shardings, self._field)
        return reshard(
            checkpoints.parameters(self.step, shapes, where, self._field),
            shardings,
        )

    @property
    def _folder(self) -> Path:
        """The folder of the checkpoint that its model is of. Raises ValueError without one."""
        return find_folder(self.config["model"]["path"], f"config.model.path of {self.workdir}")

    @property
    def _flag(self) -> str:
        return f"{self.setting}={self.workdir}@{self.step}"

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
        has_path = bool(self.config["model"]["path"])
        theirs = load_tokenizer(self._folder if has_path else self.workdir / "tokenizer")
        if theirs.get_vocab() != ours.get_vocab():
            raise InputError(
                f"{self._flag} is a run of another tokenizer ({len(theirs)} entries, here "
                f"{len(ours)}); its weights know other token ids: name the same model in "
                "config.model.path"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A checkpoint of `transformers` whose weights are a run's reference policy."""

    checkpoint: Checkpoint

    def __str__(self) -> str:
        """Returns the teacher in words."""
        return str(self.checkpoint.folder)

    def check_reference(self, run: Run) -> None:
        """Raises ValueError unless it has the run's tokenizer, and can be read."""
        check_weights(self.checkpoint)
        theirs, ours = self.checkpoint.vocab_size, run.learner.vocab_size
        if theirs < ours:
            raise InputError(
                f"{_REFERENCE}={self} has {theirs} entries in its vocabulary, the policy {ours}; "
                "a teacher must know every token that the policy can write"
            )
        tokenizer = load_tokenizer(self.checkpoint.folder)
        if tokenizer.get_vocab() != run.origin.tokenizer.get_vocab():
            raise InputError(
                f"{_REFERENCE}={self} has another tokenizer ({len(tokenizer)} entries, here "
                f"{len(run.origin.tokenizer)}); its weights know other token ids"
            )

    def reference(self, run: Run, mesh: MeshShape) -> Params:
        """Returns the weights as the run's reference policy, in its type."""
        learner = run.learner
        if not learner.trains:
            shapes, shardings = learner.state_shapes(), learner.state_shardings(mesh)
            return absent_tree(shapes.reference, shardings.reference)
        dtype = learner.model.compute_dtype
        return load_parameters(self.checkpoint, learner.layout(mesh), dtype)


def build_from(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    stop: Callable[[], str],
    *,
    is_new: bool,
    replay: Path | None = None,
) -> Run:
    """Builds the run in this workdir; one that `is_new` fits the weights that its config names.

    A `replay` has the tokenizer of that run, which may have been made of other tasks.

    They are of the same steps in all processes, and where a run begins again that has no checkpoint
    yet, as far as they are there still. Raises ValueError where they do not fit, and for what
    `build_run` and `with_conversations` refuse.
    """
    source = teacher = None
    if is_new:
        pins = read_sources(workdir) if cluster.is_first else {}
        source = open_source(config.init_from, pin=pins.get(config.init_from))
        teacher = open_reference(config.reference_from, pin=pins.get(config.reference_from))
        source, teacher = (_of_first(each, cluster) for each in (source, teacher))
    # A run of its own model has the tokenizer of the run that it takes weights from.
    given = source or (teacher if isinstance(teacher, Source) else None)
    other = given.workdir if given else replay
    folder = other / "tokenizer" if other else tokenizer_folder(cluster, workdir)
    run = with_held_out(with_conversations(build_run(config, folder, stop)))
    if is_new:
        check_prompts(run)
    if source:
        source.check(run)
    if teacher:
        teacher.check_reference(run)
    return dataclasses.replace(run, source=source, teacher=teacher)


def _of_first(source: Any, cluster: Cluster) -> Any:
    """Returns the source of the step that the first process found: that run may go on meanwhile."""
    step = cluster.gather(getattr(source, "step", None), "the step of another run")[0]
    return dataclasses.replace(source, step=step) if isinstance(source, Source) else source


def keep_sources(run: Run, workdir: Path) -> None:
    """Writes down of which steps the weights are that a new run begins with."""
    given = {run.config.init_from: run.source, run.config.reference_from: run.teacher}
    steps = {text: each.step for text, each in given.items() if isinstance(each, Source)}
    if steps:
        write_atomically(workdir / SOURCES, json.dumps(steps))


def first_state(run: Run, mesh: MeshShape, say: Callable[[str], None]) -> TrainState:
    """Returns the state that a run begins with: new weights, or those that its config names."""
    source, learner = run.source, run.learner
    if source:
        say(f"begins with the weights of {source}")
    state = source.first_state(run, mesh) if source else learner.first_state(mesh)
    if teacher := run.teacher:
        say(f"the reference policy is that of {teacher}")
        # The copy of the first policy leaves its memory to the teacher.
        state = dataclasses.replace(state, reference=None)
        state = dataclasses.replace(state, reference=teacher.reference(run, mesh))
    return state


def open_reference(text: str, pin: int | None = None) -> Source | Teacher | None:
    """Returns the teacher that config.reference_from names, or None for ""; `pin` as `open_source`.

    Raises ValueError where there is no such run or checkpoint.
    """
    if not text:
        return None
    checkpoint = find_teacher(text)
    return Teacher(checkpoint=checkpoint) if checkpoint else open_source(text, _REFERENCE, pin)


def open_source(text: str, setting: str = "--init_from", pin: int | None = None) -> Source | None:
    """Returns the source that `setting` names, "WORKDIR" or "WORKDIR@STEP"; None for "".

    Without a step it is `pin`, if that is there, else the newest.

    Raises ValueError where there is no such run or checkpoint.
    """
    if not text:
        return None
    workdir, step = split_source(text)
    path = workdir / "config.json"
    if not path.is_file() or not (workdir / "checkpoints").is_dir():
        raise InputError(
            f"{setting}={text}: {workdir} holds no checkpoint of a run; name the workdir of a "
            "run, or give config.model.path a checkpoint of transformers"
        )
    checkpoints = Checkpoints(workdir / "checkpoints", keep=None)
    steps = checkpoints.steps()
    checkpoints.close()
    if not steps or (step is not None and step not in steps):
        found = ", ".join(map(str, reversed(steps))) or "none"
        raise InputError(
            f"{setting}={text}: there is no such checkpoint; the steps of {workdir} are {found}"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{setting}={text}: {path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not {"train", "model"} <= config.keys():
        raise InputError(f"{setting}={text}: {path} is damaged: it is no config of a run")
    return Source(
        workdir=workdir,
        step=step if step is not None else pin if pin in steps else steps[0],
        config=without_former(config),
        setting=setting,
    )
