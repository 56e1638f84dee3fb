# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint's tokenizer, so that `AutoTokenizer` gives the ids of the run.

For some model types `transformers` 5 goes by the type alone: of a qwen2, whatever its
tokenizer_config.json says, it takes the vocabulary and puts Qwen's way of cutting text in the place
of the file's. Only where the tokenizer names code of its own (`auto_map`) does it go by
`tokenizer_class` again, and then the file counts. So where the two differ the folder gets such
code, a class that reads the file, which is run where `trust_remote_code` is asked for.
"""

import json
from pathlib import Path
from typing import Any, Protocol

CODE = "tokenizer_of_file.py"
_CLASS = "TokenizerOfFile"
_TEXT = f'''"""The tokenizer of tokenizer.json, for AutoTokenizer with trust_remote_code.

Without trust_remote_code it gives the same, because tokenizer_config.json names this class; else it
would take the tokenizer of the model_type.
"""

from transformers import PreTrainedTokenizerFast


class {_CLASS}(PreTrainedTokenizerFast):
    """Reads tokenizer.json as it is."""
'''


class Tokenizer(Protocol):
    """A tokenizer that can write its own files, as every one of `transformers` does."""

    def save_pretrained(self, folder: str, /) -> Any:
        """Writes the tokenizer's files."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes its files and its chat template beside config.json, which must be there.

    `AutoTokenizer.from_pretrained(folder)` then gives the ids that tokenizer.json gives.
    """
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes())
    # Of the folder that it was read from, whose code is not here.
    settings.pop("auto_map", None)
    path.write_text(_as_json(settings))
    if not _is_read_as_it_is(folder):
        path.write_text(_as_json(settings | {"auto_map": {"AutoTokenizer": [None, _name()]}}))
        (folder / CODE).write_text(_TEXT)


def _name() -> str:
    return f"{CODE.removesuffix('.py')}.{_CLASS}"


def _as_json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _is_read_as_it_is(folder: Path) -> bool:
    """Returns True if `AutoTokenizer` encodes by the file alone."""
    # Here, because only who writes a checkpoint should wait for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    automatic, plain = (
        _ids_come_of(kind.from_pretrained(str(folder), local_files_only=True))
        for kind in (AutoTokenizer, PreTrainedTokenizerFast)
    )
    return automatic == plain


def _ids_come_of(tokenizer: Any) -> dict[str, Any]:
    """Returns the parts of a tokenizer.json that decide on ids."""

    def that_count(part: dict[str, Any]) -> dict[str, Any]:
        # Offsets change no id, and what is empty is as if it were not there.
        kept = ((key, value) for key, value in part.items() if key != "trim_offsets")
        return {key: value for key, value in kept if value is not None and value != ""}

    text = tokenizer.backend_tokenizer.to_str()
    settings = json.loads(text, object_hook=that_count)
    names = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")
    parts = {name: settings[name] for name in names if name in settings}
    # Behind a byte-level vocabulary it is about offsets alone.
    if parts.get("post_processor", {}).get("type") == "ByteLevel":
        del parts["post_processor"]
    return parts
