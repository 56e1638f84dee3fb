# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints (orbax, asynchronous): all that a run needs to go on as if it had never stopped.

A checkpoint holds the TrainState, and as JSON the loop's position: the step, the load history, the
meshes, the measurements that the selector chose from. A frozen base of adapters is not in it: the
run reads or draws it again, and compares its fingerprint. A reference is: the run's first weights
may be of another run, whose checkpoints need not be kept.

The JSON also has the fingerprint of each array, computed on the devices, and a digest of itself.
Both are computed again where a checkpoint is read, so that a damaged one is never taken for what
was saved: not with a single bit changed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from earl_jax.models.fingerprint import FINGERPRINT_VERSION, fingerprint
from earl_jax.models.parameters import Params
from earl_jax.selector.memory import is_out_of_memory, unless_out_of_memory
from earl_jax.settings.differences import differences
from earl_jax.settings.errors import InputError
from earl_jax.sharding.placing import placed_shapes
from earl_jax.train.disk_errors import say_disk_errors_once
from earl_jax.train.state import TrainState

# Returns what each process gives: `Cluster.gather`.
Gather = Callable[[Any, str], list[Any]]


def of_one(item: Any, what: str) -> list[Any]:
    """Returns what the only process gives."""
    return [item]


# The rating of a checkpoint that has none.
_LOWEST = -1e30


def _rating(metrics: dict[str, float]) -> float:
    return metrics["rating"]


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint whose files are not those that were saved."""


class Checkpoints:
    """The checkpoints of one workdir. Saving returns before the bytes are on disk.

    As a context manager it finishes what is being written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None,
        keep_best: int = 0,
        keep_every_steps: int = 0,
        gather: Gather = of_one,
    ) -> None:
        """Opens the folder; the newest `keep` checkpoints are kept, or with None all: to read.

        Kept are the `keep_best` of the highest rating, too, and those of every
        `keep_every_steps`-th step; 0: none. Of several processes all read alike; `gather` is their
        `Cluster.gather`.
        """
        self._folder, self._reads_only = folder.absolute(), keep is None
        self._rates = keep_best > 0
        kept: list[managers.PreservationPolicy] = [managers.LatestN(n=keep)]
        if keep_every_steps:
            kept.append(managers.EveryNSteps(interval_steps=keep_every_steps))
        if keep_best:
            kept.append(
                managers.BestN(
                    get_metric_fn=_rating, n=keep_best, keep_checkpoints_without_metrics=False
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(kept),
            # Without it ratings are not read again.
            best_fn=_rating if keep_best else None,
            create=keep is not None,
            enable_async_checkpointing=keep is not None,
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._gather = gather
        self._is_closed = False
        say_disk_errors_once()

    def steps(self) -> list[int]:
        """Returns the steps with a finished checkpoint, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(
        self, step: int, state: TrainState, position: dict[str, Any], rating: float | None = None
    ) -> None:
        """Begins to save. `state` may be donated once this returns; `rating` None: the lowest."""
        kept = _kept(state)
        # As it will be read: keys of JSON are strings.
        values = json.loads(
            json.dumps(
                {
                    "position": position,
                    "arrays": _describe(kept),
                    "fingerprint_version": FINGERPRINT_VERSION,
                }
            )
        )
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(kept),
                position=ocp.args.JsonSave({**values, "digest": _digest(values)}),
            ),
            metrics={"rating": _LOWEST if rating is None else rating} if self._rates else None,
        )

    def position(self, step: int) -> dict[str, Any]:
        """Returns the loop's position at this step.

        Raises:
            DamagedCheckpoint: it is not what was saved.
            InputError: its fingerprints are those of another version.
        """
        return self._values(step)["position"]

    def _values(self, step: int) -> dict[str, Any]:
        """Returns the JSON of a checkpoint. Raises as `position`."""
        values = self._read(step, position=ocp.args.JsonRestore())["position"]
        if values.get("fingerprint_version") != FINGERPRINT_VERSION:
            raise InputError(
                f"the checkpoint of step {step} in {self._folder} is whole, but another version of "
                "earl_jax computed the fingerprints of its arrays; use the version that saved it, "
                "or name another --workdir"
            )
        return values

    def parameters(
        self, step: int, shapes: Params, shardings: Params, field: str = "params"
    ) -> Params:
        """Returns the parameters alone at this step, or their average; each device reads its part.

        `field` is "params", or "ema" of a run that has one.

        Raises:
            DamagedCheckpoint: they cannot be what was saved.
        """
        placed = {field: placed_shapes(shapes, shardings)}
        part = ocp.args.PyTreeRestore(
            placed,
            restore_args=ocp.checkpoint_utils.construct_restore_args(placed),
            partial_restore=True,
        )
        read = {field: self._read(step, state=part)["state"][field]}
        _check(self._values(step)["arrays"], read)
        return read[field]

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each parameter at this step, by its name. Raises as `position`."""
        try:
            path: Any = self._folder / str(step) / "state"
            return shapes_by_name(ocp.PyTreeCheckpointHandler().metadata(path).tree["params"])
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCheckpoint(f"its parameters cannot be read: {error}") from error

    def state(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """Returns the TrainState at this step without a base; each device reads its part.

        Raises:
            DamagedCheckpoint: it is not what was saved.
            InputError: it has other arrays than this run's state.
        """
        saved, wanted = self._values(step)["arrays"], _shapes_of(_kept(shapes))
        different = differences({name: each[:2] for name, each in saved.items()}, wanted, "state")
        if different:
            raise InputError(
                f"the checkpoint of step {step} in {self._folder} has other arrays than this run's "
                f"state: {'; '.join(different[:4])}. Use the versions of earl_jax and optax that "
                "saved it, or name another --workdir"
            )
        placed = placed_shapes(_kept(shapes), _kept(shardings))
        state = self._read(step, state=ocp.args.StandardRestore(placed))["state"]
        _check(saved, state)
        return TrainState(**state)

    def _read(self, step: int, **items: Any) -> Any:
        """Returns items of a checkpoint. Raises DamagedCheckpoint, in all processes or in none."""
        read, damage = None, ""
        try:
            with self._reader() as reader:
                read = reader.restore(step, args=ocp.args.Composite(**items))
            if "position" in items and not _is_whole(read["position"]):
                damage = "its position is not what was saved"
        except Exception as error:
            # Orbax and tensorstore raise errors of any kind for files that are cut short, gone, or
            # full of something else. The arrays were compared before: they are the state's.
            if isinstance(error, jax.errors.JaxRuntimeError) and is_out_of_memory(error):
                raise
            words = (str(error).splitlines() or [""])[0][:200]
            damage = f"{type(error).__name__}: {words}"
        # The next thing they do may be a program on the devices of all.
        if damages := list(filter(None, self._gather(damage, "a checkpoint that is read"))):
            raise DamagedCheckpoint(damages[0])
        return read

    def _reader(self) -> contextlib.AbstractContextManager[ocp.CheckpointManager]:
        """Returns what reads this process's part without waiting for the other processes.

        Orbax makes them wait for each other behind a read, forever where that of one has failed.
        """
        if jax.process_count() == 1:
            return contextlib.nullcontext(self._manager)
        own = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"reader_{own}"
        )
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                create=False, enable_async_checkpointing=False, multiprocessing_options=alone
            ),
        )

    def discard(self, step: int) -> None:
        """Sets a damaged checkpoint aside, as damaged_STEP: its step can be saved again.

        Of several processes the first calls it before the others, which find it done.
        """
        if (self._folder / str(step)).exists():
            parent, name = self._folder.parent, f"damaged_{step}"
            targets = (parent / f"{name}{f'_{n}' if n else ''}" for n in itertools.count())
            shutil.move(self._folder / str(step), next(t for t in targets if not t.exists()))
        self._manager.reload()

    @property
    def were_saved(self) -> bool:
        """True if a checkpoint was ever finished in this workdir, be it gone or damaged now."""
        return self._mark.exists()

    @property
    def _mark(self) -> Path:
        return self._folder.parent / ".saved"

    def look(self) -> None:
        """Raises what the checkpoint that is being written failed with, and waits for nothing."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when everything is on disk; raises what a checkpoint failed with."""
        self._manager.wait_until_finished()
        if self._reads_only or jax.process_index() or self.were_saved:
            return
        # Not by orbax's list alone: the workdir may have been removed.
        if any((self._folder / str(step)).is_dir() for step in self.steps()):
            self._mark.touch()

    def close(self) -> None:
        """Waits for pending saves and closes the folder. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.wait()
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Finishes the checkpoint that is being written, whatever ends the run.

        But not where one of several processes fails: the others do not help it to.
        """
        if error is None:
            self.close()
        elif jax.process_count() == 1:
            try:
                self.close()
            except (OSError, ValueError, RuntimeError) as second:
                # What ends the run is the first one, which may be why the second came.
                error.add_note(f"the checkpoint that was being written failed: {second}")


def _describe(kept: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns dtype, shape and fingerprint of each array by its path.

    Waits for the devices. The fingerprint is None, and the array is not checked, where they have no
    memory to compute it.
    """
    shapes, prints = _shapes_of(kept), {}

    def compute(leaf: jax.Array) -> jax.Array:
        return fingerprint(jax.device_put(leaf, leaf.sharding.with_memory_kind("device")))

    # One at a time: some compilers compute each array's from a copy of it.
    for name, leaf in zip(shapes, jax.tree.leaves(kept), strict=True):
        prints[name] = unless_out_of_memory(functools.partial(compute, leaf))
    found = jax.device_get(prints)
    return {
        name: [*shapes[name], None if found[name] is None else int(found[name])] for name in shapes
    }


def _check(saved: dict[str, list[Any]], arrays: dict[str, Any]) -> None:
    """Raises DamagedCheckpoint for an array that is not what `_describe` said when it was saved."""
    for name, (*_, found) in _describe(arrays).items():
        if None not in (found, saved[name][2]) and found != saved[name][2]:
            raise DamagedCheckpoint(f"its array {name} is not what was saved")


def _shapes_of(kept: dict[str, Any]) -> dict[str, list[Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(kept)[0]
    return {
        jax.tree_util.keystr(path): [str(leaf.dtype), list(leaf.shape)] for path, leaf in leaves
    }


def _is_whole(values: Any) -> bool:
    """Returns True if the digest of a checkpoint's JSON, which is taken out of it, is right."""
    digest = values.pop("digest", None) if isinstance(values, dict) else None
    return digest is not None and digest == _digest(values)


def _digest(values: dict[str, Any]) -> str:
    """Returns the SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def shapes_by_name(shapes: Params) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by its name, as `Checkpoints.shapes` does."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return {_name(path): tuple(leaf.shape) for path, leaf in leaves}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _kept(state: TrainState) -> dict[str, Any]:
    """Returns the state's fields that a checkpoint holds: all but the base."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if name != "base" and value is not None}
