# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The workdir of a run: whether it may go on there, its config.json and its tokenizer."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earl_jax.config.config import Config
from earl_jax.config.file import without_former
from earl_jax.config.resume import changes
from earl_jax.envs.text.tokenizer import save_tokenizer
from earl_jax.launch.cluster import Cluster
from earl_jax.settings.errors import InputError, RunError, is_mistake
from earl_jax.telemetry.atomic import replacing, write_atomically


def open_workdir(workdir: Path, config: dict[str, Any]) -> list[str]:
    """Checks that the workdir can be written, and is new or holds a run that may go on like this.

    `keep_config` writes config.json, when all that was given has been found right.

    Returns:
        A line for each setting that changes from here on.

    Raises:
        InputError: the folder may not be written, or belongs to a run of another config.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        return changed_settings(workdir, config)
    except OSError as error:
        if not is_mistake(error):
            raise
        raise InputError(
            f"--workdir={workdir} cannot be used: {error.strerror or error}; name a folder "
            "that you may write"
        ) from error


def changed_settings(workdir: Path, config: dict[str, Any]) -> list[str]:
    """Returns a line for each setting in which a run there would change; writes nothing.

    Raises InputError where the workdir holds a run of another config.
    """
    path = workdir / "config.json"
    if not path.exists():
        return []
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); name another --workdir") from error
    if isinstance(saved, dict):
        saved = without_former(saved)
    changed, different = changes(saved, json.loads(json.dumps(config)))
    if different:
        begins = ""
        if _saved_steps(workdir):
            begins = f"; a new run with its weights begins by --init_from={workdir}"
        raise InputError(
            f"--workdir={workdir} holds a run of another config: {'; '.join(different[:8])}. Name "
            "another --workdir, run with the config of that one, or give --restart, which begins "
            f"anew there and keeps what it holds{begins} (docs/howto/resume.md: what may change)"
        )
    return changed


def keep_config(config: Config, tokenizer: Any, workdir: Path) -> None:
    """Makes the workdir this run's: writes config.json, and its tokenizer if it made one."""
    path, text = workdir / "config.json", json.dumps(config.as_dict(), indent=2)
    folder = workdir / "tokenizer"
    if not config.model.path and not (path.exists() and folder.exists()):
        # One that is there is of a command that ended before it had written config.json.
        shutil.rmtree(folder, ignore_errors=True)
        with replacing(folder) as temporary:
            save_tokenizer(tokenizer, temporary)
    if not path.exists() or path.read_text() != text:
        write_atomically(path, text)


@contextlib.contextmanager
def named_where_removed(workdir: Path) -> Iterator[None]:
    """Turns errors about files into one message where a locked workdir was removed meanwhile.

    Raises:
        RunError: it was.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if (workdir / ".lock").exists():
            raise
        raise RunError(
            f"--workdir={workdir} was removed, or moved, while the run wrote to it: what it holds "
            "there goes on from its newest checkpoint, when it is put back"
        ) from error


def tokenizer_folder(cluster: Cluster, workdir: Path) -> Path | None:
    """Returns the folder of the tokenizer of the run in the workdir; None where none has begun.

    The run has begun when there is a config.json, which is written last.
    """
    has_begun = cluster.gather((workdir / "config.json").exists(), "a config.json")[0]
    return workdir / "tokenizer" if has_begun else None


def saved_in_words(workdir: Path) -> str:
    """Returns which checkpoint a run that ends now goes on from."""
    steps = _saved_steps(workdir)
    if not steps:
        return f"{workdir} holds no checkpoint yet"
    return f"the newest checkpoint in {workdir} is of step {max(steps)}"


def _saved_steps(workdir: Path) -> list[int]:
    """Returns the steps of the workdir's checkpoints."""
    found = (workdir / "checkpoints").glob("*")
    return [int(path.name) for path in found if path.name.isdigit()]
