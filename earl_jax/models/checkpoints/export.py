# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The policy for others: `WORKDIR/export/step_NNNNNN`, which `transformers` loads.

With adapters that is the merged model, and `step_NNNNNN_adapter` beside it is what PEFT loads on
the base. A base that was drawn from the seed exists nowhere else: it is written once, as `base`.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from earl_jax.models.checkpoints.hf_write import parameters_of, save_checkpoint
from earl_jax.models.checkpoints.peft_adapter import save_adapter
from earl_jax.models.parameters import Params
from earl_jax.sharding.reshard import reshard
from earl_jax.train.step import TrainState
from earl_jax.world import World

# A partial one is of a run that was killed while it wrote.
_FOLDER = re.compile(r"step_(\d{6,})(_adapter)?(\.partial)?")


def export_policy(world: World, state: TrainState, step: int, workdir: Path) -> list[Path]:
    """Writes what is not there yet, and returns it.

    Every process calls it, and the first writes: one parameter after the other is brought there.
    """
    folder, first = workdir / "export", [d for d in world.processes.devices if not d.process_index]
    where = world.spread_shardings(first)
    policies = world.policy(state), world.policy(where)
    written = [_save_model(world, *policies, folder / f"step_{step:06d}")]
    if state.base is not None:
        base = world.config.model.path
        if not base:
            written.append(_save_model(world, state.base, where.base, folder / "base"))
            base = folder / "base"
        adapters = _to_first(world, state.params, where.params)
        written.append(
            _save_adapter(world, adapters, folder / f"step_{step:06d}_adapter", str(base))
        )
    return [path for path in written if path]


def keep_exports(workdir: Path, *, newest: int | None = None, until: int | None = None) -> None:
    """Deletes the exports behind step `until`, and all but the newest so many steps'."""
    exports = [
        (int(match[1]), path)
        for path in (workdir / "export").glob("step_*")
        if (match := _FOLDER.fullmatch(path.name))
    ]
    steps = sorted({step for step, _ in exports if until is None or step <= until})
    kept = steps if newest is None else steps[-newest:]
    for step, path in exports:
        if step not in kept:
            shutil.rmtree(path)


def _save_model(world: World, params: Params, where: Params, folder: Path) -> Path | None:
    processes, shardings = world.processes, parameters_of(where)
    if processes.gather(folder.exists(), "an export")[0]:
        return None

    def bring(key: str, leaf: Any) -> Any:
        return _to_first(world, leaf, shardings[key])

    if not processes.is_first:
        for key, leaf in parameters_of(params).items():
            bring(key, leaf)
        return None
    save_checkpoint(
        folder,
        params,
        model=world.model,
        vocab_size=world.vocab_size,
        tokenizer=world.tokenizer,
        dtype=world.checkpoint.dtype if world.checkpoint else "float32",
        max_positions=world.config.rollout.context_buckets[-1],
        source=world.checkpoint,
        bring=bring,
    )
    return folder


def _to_first(world: World, part: Any, where: Any) -> Any:
    """Moves arrays to devices of the first process, which writes them; every process calls it.

    In a run of one process they stay where they are.
    """
    return part if world.processes.count == 1 else reshard(part, where)


def _save_adapter(world: World, adapters: Params, folder: Path, base: str) -> Path | None:
    if not world.processes.is_first or folder.exists():
        return None
    # A name on a hub stays as it is; a folder must be found from anywhere.
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    save_adapter(folder, adapters, model=world.model, lora=world.config.train.lora, base=base)
    return folder
