# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors in the files of a checkpoint, by name: listed at once, read by slice."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from earl_jax.models.checkpoints import fp8, mxfp4
from earl_jax.settings.errors import InputError

# By quant_method, how the names of a tensor's numbers and of their scales end.
_ENDINGS: Mapping[str, tuple[str, str]] = {
    "mxfp4": (mxfp4.BLOCKS, mxfp4.SCALES),
    "fp8": ("", fp8.SCALES),
}
# Bytes read of a mapped file count as this process's memory until the file is closed.
MAX_MAPPED_BYTES = 32 * 2**20
# The longest list that safetensors reads; a file that claims more is not of its format.
MAX_LIST_BYTES = 100_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointTensors:
    """The tensors of a folder: one file, or those that an index names. Opened on first use."""

    def __init__(
        self, folder: Path, *, embedding: str, has_images: bool, quantized: Mapping[str, Any]
    ) -> None:
        """Lists them. Raises ValueError for a folder without a list that can be read.

        `embedding` is the name of that tensor. Of a model that `has_images` only the tensors of the
        text part are there; `quantized` is the quantization_config, {} for none.
        """
        self._stack = contextlib.ExitStack()
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0
        index = folder / INDEX
        if index.is_file():
            try:
                names = json.loads(index.read_bytes())["weight_map"]
                self.files = {name: folder / file for name, file in names.items()}
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise InputError(f"{index} is damaged: {error!r}") from error
            for name, file in names.items():
                if Path(file).name != file:
                    raise InputError(
                        f"{index} says that {name} is in {file!r}; only the name of a file beside "
                        "it can stand there"
                    )
        elif (folder / SINGLE).is_file():
            # Every model has an embedding: where no list can be read, it is what is missed first.
            keys = self._handle(embedding, folder / SINGLE).keys()
            self.files = dict.fromkeys(keys, folder / SINGLE)
        else:
            raise InputError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        # By the names of the text part alone, those in the files.
        self._stored_names: dict[str, str] = {}
        if has_images:
            text = {name: _text_name(name) for name in self.files}
            self._stored_names = {new: name for name, new in text.items() if new}
            self.files = {new: self.files[name] for new, name in self._stored_names.items()}
        # A quantised tensor is two in the files, and read as one.
        self._scales: dict[str, Path] = {}
        self._quantized = quantized
        if quantized:
            numbers, scales = _ENDINGS[quantized["quant_method"]]
            names = [name.removesuffix(numbers) for name in self.files if name.endswith(numbers)]
            for name in names:
                if name + scales in self.files:
                    self.files[name] = self.files.pop(name + numbers)
                    self._scales[name] = self.files.pop(name + scales)

    def __enter__(self) -> "CheckpointTensors":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _handle(self, name: str, file: Path) -> Any:
        if file not in self._open:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="np"))
            except (SafetensorError, OSError) as error:
                name, words = _where_cut(file, name)
                raise InputError(f"{name} cannot be read from {file}: {error}{words}") from error
            self._open[file] = handle
        return self._open[file]

    def read(self, name: str, cuts: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of the tensor, in the type that it is stored in."""
        try:
            values = self.slice_of(name)[cuts]
        except (SafetensorError, OSError) as error:
            raise InputError(f"{name} cannot be read from {self.files[name]}: {error}") from error
        self._mapped_bytes += values.nbytes
        if self._mapped_bytes > MAX_MAPPED_BYTES:
            self._stack.close()
            self._open.clear()
            self._mapped_bytes = 0
        return values

    def slice_of(self, name: str) -> Any:
        """Returns the tensor, lazily: nothing is read before it is indexed."""
        file = self.files[name]
        if name not in self._scales:
            return self._stored(name, file)
        method = self._quantized["quant_method"]
        numbers, scales = (
            self._stored(name + ending, place)
            for ending, place in zip(_ENDINGS[method], (file, self._scales[name]), strict=True)
        )
        if method == "fp8":
            block = self._quantized["weight_block_size"]
            return fp8.ScaledTensor(name, file, numbers, scales, block)
        return mxfp4.PackedTensor(name, numbers, scales)

    def _stored(self, name: str, file: Path) -> Any:
        try:
            return self._handle(name, file).get_slice(self._stored_names.get(name, name))
        except SafetensorError as error:
            raise InputError(f"{name} cannot be read from {file}: {error}") from error


def _text_name(name: str) -> str:
    """Returns the name that a tensor has in a model of text alone; "": it is not part of one."""
    if name.startswith("model.visual."):
        return ""
    return name.replace("model.language_model.", "model.", 1)


def _where_cut(file: Path, name: str) -> tuple[str, str]:
    """Returns the first tensor that a cut file lacks, and this in words; else `name` and "".

    A file is eight bytes, the length of its list; the list, in JSON; and the tensors.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            behind = file.stat().st_size - 8 - length
            if -MAX_LIST_BYTES < behind < 0:
                return name, "; the file ends within its list of tensors"
            listed = json.loads(opened.read(length)) if behind >= 0 else {}
        ends = {key: at["data_offsets"][1] for key, at in listed.items() if key != "__metadata__"}
        ends = {key: end for key, end in ends.items() if end > behind}
        first = min(ends, key=ends.__getitem__)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return name, ""
    return first, f"; the file ends {ends[first] - behind:,} bytes before this tensor does"
