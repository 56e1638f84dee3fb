# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exports of the policy: `WORKDIR/export/step_NNNNNN`, which `transformers` loads.

With adapters that is the merged model, and `step_NNNNNN_adapter` beside it is what PEFT loads on
the base. A base that was drawn from the seed exists nowhere else: it is written once, as `base`.
"""

import dataclasses
import itertools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from earl_jax.launch.cluster import Cluster
from earl_jax.models.checkpoints.hf_write import parameters_of, save_checkpoint
from earl_jax.models.checkpoints.peft_adapter import save_adapter
from earl_jax.models.parameters import Params
from earl_jax.sharding.reshard import reshard
from earl_jax.train.learner import Learner
from earl_jax.train.state import TrainState

# A partial one is of a run that was killed while it wrote.
_FOLDER = re.compile(r"step_(\d{6,})(_adapter)?(\.tmp)?")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exporter:
    """Writes policies. `spread(devices)` returns shardings of a TrainState cut over devices.

    `path` is config.model.path; the models can be used for `max_positions` tokens.
    """

    cluster: Cluster
    learner: Learner
    tokenizer: Any
    spread: Callable[[Sequence[Any]], TrainState]
    path: str
    max_positions: int

    def export(self, state: TrainState, folder: Path, step: int) -> list[Path]:
        """Writes the exports that are not in `folder` yet, and returns them.

        Every process calls it; one parameter after the other goes to the first, which writes.
        """
        where = self.spread([d for d in self.cluster.devices if not d.process_index])
        policies = self.learner.policy(state), self.learner.policy(where)
        written = [self._save_model(*policies, folder / f"step_{step:06d}")]
        if state.base is not None:
            base = self.path
            if not base:
                written.append(self._save_model(state.base, where.base, folder / "base"))
                base = folder / "base"
            adapters = self._to_first(state.params, where.params)
            written.append(
                self._save_adapter(adapters, folder / f"step_{step:06d}_adapter", str(base))
            )
        return [path for path in written if path]

    def _save_model(self, params: Params, where: Params, folder: Path) -> Path | None:
        shardings = parameters_of(where)
        if self.cluster.gather(folder.exists(), "an export")[0]:
            return None

        def bring(key: str, leaf: Any) -> Any:
            return self._to_first(leaf, shardings[key])

        if not self.cluster.is_first:
            for key, leaf in parameters_of(params).items():
                bring(key, leaf)
            return None
        checkpoint = self.learner.checkpoint
        save_checkpoint(
            folder,
            params,
            model=self.learner.model,
            vocab_size=self.learner.vocab_size,
            tokenizer=self.tokenizer,
            dtype=checkpoint.dtype if checkpoint else "float32",
            max_positions=self.max_positions,
            source=checkpoint,
            bring=bring,
        )
        return folder

    def _to_first(self, part: Any, where: Any) -> Any:
        """Moves arrays to devices of the first process, which writes them; all processes call it.

        In a run of one process they stay where they are.
        """
        return part if self.cluster.count == 1 else reshard(part, where)

    def _save_adapter(self, adapters: Params, folder: Path, base: str) -> Path | None:
        if not self.cluster.is_first or folder.exists():
            return None
        # A name on a hub stays as it is; a folder must be found from anywhere.
        base = str(Path(base).resolve()) if Path(base).is_dir() else base
        save_adapter(
            folder,
            adapters,
            model=self.learner.model,
            lora=self.learner.config.lora,
            base=base,
            source=self.learner.checkpoint,
        )
        return folder


def keep_exports(workdir: Path, *, newest: int) -> None:
    """Deletes all exports but those of the newest so many steps."""
    exports = _exports(workdir)
    kept = sorted({step for step, _ in exports})[-newest:]
    for step, path in exports:
        if step not in kept:
            shutil.rmtree(path)


def set_exports_aside(workdir: Path, step: int) -> Path | None:
    """Moves the exports of steps greater than `step` away; deletes those that are not whole.

    Returns the folder that they are in, WORKDIR/export.dropped; None where there are none.
    """
    folder = None
    for number, path in _exports(workdir):
        if number <= step:
            continue
        if path.suffix == ".tmp":
            shutil.rmtree(path)
            continue
        folder = workdir / "export.dropped"
        folder.mkdir(exist_ok=True)
        names = (path.name + (f".{n}" if n else "") for n in itertools.count())
        path.rename(next(folder / name for name in names if not (folder / name).exists()))
    return folder


def _exports(workdir: Path) -> list[tuple[int, Path]]:
    """Returns the exports, and partial ones, each with its step."""
    return [
        (int(match[1]), path)
        for path in (workdir / "export").glob("step_*")
        if (match := _FOLDER.fullmatch(path.name))
    ]
