# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of files."""

import os
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replaces `path` by `data` (text as UTF-8) in one step; readers never see a partial file.

    The new file lies beside it as `<name>.tmp` until it is whole, so `path` needs one writer at a
    time. Code points that UTF-8 has no bytes for (lone surrogates of a reply cut in the middle)
    become "?".
    """
    if isinstance(data, str):
        data = data.encode("utf-8", errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
