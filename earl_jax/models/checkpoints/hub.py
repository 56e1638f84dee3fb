# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint: a local one, or one downloaded from a model hub."""

import re
from pathlib import Path

from earl_jax.settings.errors import InputError, disk_in_words
from earl_jax.settings.folders import searched_from

# What is read of a checkpoint. Some repositories hold the weights again in other formats.
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors")
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_folder(path: str, setting: str = "config.model.path") -> Path:
    """Returns `path` if it exists; else "org/name" downloaded, or from the hub's cache.

    `setting` is what errors call it.

    Which hub, and where its cache is, `huggingface_hub` takes from HF_ENDPOINT, HF_HOME and
    HF_HUB_OFFLINE.

    Raises:
        ValueError: the folder is no checkpoint's; or there is none, and no hub that gives one of
            this name.
        OSError: the disk of the hub's cache is full.
    """
    folder = Path(path)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise InputError(
                f"{setting} is {path!r}, which holds no config.json; give the folder of a "
                "checkpoint of transformers"
            )
        return folder
    if not _NAME.fullmatch(path):
        raise InputError(
            f"{setting} is {path!r}, and there is no such folder{searched_from(path)}; give the "
            "folder of a checkpoint, or a hub's name for one, ORG/NAME"
        )
    # Here, because it takes a second to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(FILES)))
    except Exception as error:
        # The hub's client has errors of its own, of the network and of proxies.
        if disk_in_words(error):
            raise
        reason = (str(error).strip().splitlines() or ["without a word"])[0]
        raise InputError(
            f"{setting} is {path!r}; there is no such folder{searched_from(path)}, and no hub "
            f"gives a model of this name ({type(error).__name__}: {reason}). Give the folder of a "
            "checkpoint, or download it where there is a network"
        ) from error
