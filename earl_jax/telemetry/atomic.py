# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of files and folders."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, writer: str = "") -> Iterator[Path]:
    """Yields the path to write a file or a folder at, which is renamed to `path` at the end.

    A reader, and a machine that starts again after it lost its power, never sees a part of it:
    before the renaming all files are on the disk, and after it the name is. A file is replaced, a
    folder must not exist yet. If the block raises, nothing is left of it.

    The yielded path is `<name>.tmp` beside `path`, so `path` needs one writer at a time, or each a
    `writer` of its own: `<name><writer>.tmp`.
    """
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    _remove(temporary)
    try:
        yield temporary
        for each in (*temporary.rglob("*"), temporary):
            sync(each)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    sync(path.parent)


def write_atomically(path: Path, data: str | bytes, *, writer: str = "") -> None:
    """Replaces `path` by `data` (text as UTF-8) in one step, as `replacing` does.

    Code points that UTF-8 has no bytes for (lone surrogates of a reply cut in the middle) become
    "?".
    """
    if isinstance(data, str):
        data = data.encode("utf-8", errors="replace")
    with replacing(path, writer=writer) as temporary:
        temporary.write_bytes(data)


def remove_cut_line(path: Path) -> None:
    """Removes a last line without an end, which a SIGKILL has cut."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_atomically(path, whole)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError:
        # Some file systems of networks do not know it for folders.
        if not path.is_dir():
            raise
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
