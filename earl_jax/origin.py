# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Where the policy of a run comes from: a checkpoint of `transformers`, or the config alone."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from earl_jax.config import Config
from earl_jax.engine.round_inputs import NO_LIMIT
from earl_jax.envs.examples import corpus
from earl_jax.envs.tokenizer import keep_tokenizer, load_tokenizer
from earl_jax.launch.cluster import Cluster
from earl_jax.models.checkpoints.generation import read_generation_settings
from earl_jax.models.checkpoints.hf_read import Checkpoint
from earl_jax.models.config import ModelConfig

CORPUS_EPISODES = 300
MAX_VOCAB_SIZE = 4096
# The vocabulary is padded to a multiple of this, so that it divides over any usual tensor axis.
VOCAB_MULTIPLE = 64


class Origin(NamedTuple):
    """The model and its tokenizer, with room for `vocab_size` entries; what a user should know.

    `end_ids` end a turn beside the chat template's own.
    """

    model: ModelConfig
    tokenizer: Any
    vocab_size: int
    end_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def open_origin(
    config: Config, checkpoint: Checkpoint | None, folder: Path | None, cluster: Cluster
) -> Origin:
    """Of the checkpoint, or else of the config with a tokenizer that is kept in `folder`.

    Raises:
        ValueError: the checkpoint, or a setting, does not go with the other.
    """
    if checkpoint is None:
        origin = _from_config(config, folder, cluster)
    else:
        origin = _from_checkpoint(config, checkpoint)
    if config.train.balance_coefficient and not origin.model.num_experts:
        raise ValueError(
            f"config.train.balance_coefficient is {config.train.balance_coefficient}, but the "
            f"model of config.model.path ({config.model.path!r}) has no experts; remove it"
        )
    strange = [i for i in config.rollout.stop_token_ids if i >= origin.vocab_size]
    if strange:
        raise ValueError(
            f"config.rollout.stop_token_ids holds {strange[0]}; ids go from 0 to "
            f"{origin.vocab_size - 1}"
        )
    return origin


def _from_checkpoint(config: Config, checkpoint: Checkpoint) -> Origin:
    tokenizer = load_tokenizer(checkpoint.folder)
    if len(tokenizer) > checkpoint.vocab_size:
        raise ValueError(
            f"config.model.path is {config.model.path!r}, whose tokenizer has "
            f"{len(tokenizer)} entries, but whose model has {checkpoint.vocab_size}"
        )
    generation = read_generation_settings(checkpoint.folder)
    end_ids = generation.end_ids_of(tokenizer)
    return Origin(
        model=dataclasses.replace(checkpoint.model, compute_dtype=config.model.compute_dtype),
        tokenizer=tokenizer,
        vocab_size=checkpoint.vocab_size,
        end_ids=end_ids,
        notes=tuple(generation.unused(end_ids)),
    )


def _from_config(config: Config, folder: Path | None, cluster: Cluster) -> Origin:
    tokenizer = cluster.after_first(
        lambda: keep_tokenizer(folder, lambda: corpus_of(config), MAX_VOCAB_SIZE),
        "the tokenizer",
    )
    vocab_size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return Origin(model=config.model, tokenizer=tokenizer, vocab_size=vocab_size)


def corpus_of(config: Config) -> list[str]:
    """Returns the text that the tokenizer of a run without a checkpoint is trained on."""
    played = config.open_environment()
    return corpus(
        played.make,
        played.tasks,
        num_steps=config.num_steps,
        num_episodes=CORPUS_EPISODES,
        seed=0,
    )


def max_context(config: Config, checkpoint: Checkpoint | None) -> int:
    """Tokens that the model reads at once: those that its checkpoint says, or else any number.

    Raises ValueError for episodes that may be longer.
    """
    context, most = checkpoint and checkpoint.max_context, config.rollout.max_episode_tokens
    if context is None:
        return NO_LIMIT
    # An episode of several samples may come to more than the model reads at once.
    if most > context and config.chat.history == "append":
        raise ValueError(
            f"config.rollout.max_episode_tokens is {most}, and the model of config.model.path "
            f"({config.model.path!r}) is made for {context} (max_position_embeddings); lower it, "
            "or leave it at 0: episodes then end where the model does"
        )
    return context
