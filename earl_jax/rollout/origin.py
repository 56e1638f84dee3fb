# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Origin of a run's policy: a checkpoint of `transformers`, or the settings alone."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from earl_jax.engine.config import NO_LIMIT
from earl_jax.envs.text.tokenizer import build_tokenizer, load_tokenizer, tokenizer_from
from earl_jax.launch.cluster import Cluster
from earl_jax.models.checkpoints.generation import read_generation_settings
from earl_jax.models.checkpoints.hf_read import Checkpoint, open_checkpoint
from earl_jax.models.checkpoints.hub import find_folder
from earl_jax.models.config import ModelConfig
from earl_jax.settings.errors import InputError

MAX_VOCAB_SIZE = 4096
# The vocabulary is padded to a multiple of this, so that it divides over any usual tensor axis.
VOCAB_MULTIPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The model and its tokenizer; the vocabulary is padded to `vocab_size` entries.

    `end_ids` end a turn beside the chat template's own; the model reads at most `max_context`
    tokens; `notes` are for the user. `checkpoint` is None where the settings give the model.
    """

    model: ModelConfig
    tokenizer: Any
    vocab_size: int
    checkpoint: Checkpoint | None = None
    end_ids: tuple[int, ...] = ()
    max_context: int = NO_LIMIT
    notes: tuple[str, ...] = ()


def open_origin(
    model: ModelConfig,
    folder: Path | None,
    cluster: Cluster,
    corpus: Callable[[], Iterable[str]],
    *,
    plays: bool,
) -> Origin:
    """Returns the origin that config.model names, for a run that `plays` or only learns.

    Without config.model.path the tokenizer is read from `folder` if it is there, else trained on
    the `corpus()` of the first process.

    Raises:
        ValueError: the checkpoint cannot be read, or its parts do not fit each other.
    """
    if model.path:
        return _from_checkpoint(model, open_checkpoint(find_folder(model.path)), plays=plays)
    tokenizer = _own_tokenizer(folder, cluster, corpus)
    vocab_size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return Origin(model=model, tokenizer=tokenizer, vocab_size=vocab_size)


def _own_tokenizer(
    folder: Path | None, cluster: Cluster, corpus: Callable[[], Iterable[str]]
) -> Any:
    is_there = cluster.gather(folder is not None and folder.exists(), "the tokenizer's folder")[0]
    if folder is not None and is_there:
        return load_tokenizer(folder)
    built = build_tokenizer(corpus(), MAX_VOCAB_SIZE) if cluster.is_first else None
    text = cluster.gather(built and built.backend_tokenizer.to_str(), "the tokenizer")[0]
    return built or tokenizer_from(text)


def _from_checkpoint(model: ModelConfig, checkpoint: Checkpoint, *, plays: bool) -> Origin:
    tokenizer = load_tokenizer(checkpoint.folder)
    if len(tokenizer) > checkpoint.vocab_size:
        raise InputError(
            f"config.model.path is {model.path!r}, whose tokenizer has {len(tokenizer)} entries, "
            f"but whose model has {checkpoint.vocab_size}"
        )
    generation = read_generation_settings(checkpoint.folder)
    end_ids = generation.end_ids_of(tokenizer)
    return Origin(
        model=dataclasses.replace(checkpoint.model, compute_dtype=model.compute_dtype),
        tokenizer=tokenizer,
        vocab_size=checkpoint.vocab_size,
        checkpoint=checkpoint,
        end_ids=end_ids,
        max_context=NO_LIMIT if checkpoint.max_context is None else checkpoint.max_context,
        notes=tuple(generation.unused(end_ids, plays=plays)),
    )
