# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The policy that `python -m earl_jax.serve` serves: a run's, or a checkpoint of `transformers`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from earl_jax.launch.start import compute_exactly, start_jax
from earl_jax.serving.serve_flags import DRAWN, check_against_model
from earl_jax.settings.errors import InputError

if TYPE_CHECKING:
    from earl_jax.sharding.layout import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """A policy to serve. `max_context` is the model's, in tokens; None where its files have none.

    `version` is the training step of a run, 0 for a model; the chat template is given
    `template_arguments`.
    `load` returns the parameters, fp32 with layers stacked, on the layout given or elsewhere.
    `sampling` are the settings of sampling in the model's own files.
    """

    name: str
    model: Any
    vocab_size: int
    tokenizer: Any
    end_ids: tuple[int, ...]
    max_context: int | None
    weight_dtype: Literal["compute", "int8"]
    kv_dtype: Literal["compute", "int8"]
    load: Callable[[Any], Any]
    version: int = 0
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_draft_tokens: int = 0
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def without_weights(self) -> "ServedPolicy":
        """Returns the policy without a reference to its weights; `load` must not be called."""
        return dataclasses.replace(self, load=_loaded_already)


def _loaded_already(layout: Any) -> Any:
    raise AssertionError("the weights of this policy were loaded, and let go")


def model_policy(flags: argparse.Namespace, mesh: "MeshShape") -> ServedPolicy:
    """Returns a checkpoint of `transformers`, for this mesh on CPUs. Raises ValueError."""
    from earl_jax.envs.text.tokenizer import load_tokenizer
    from earl_jax.models.checkpoints.generation import read_generation_settings
    from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
    from earl_jax.models.checkpoints.hub import find_folder

    # Cheap first: a mistake shows before the devices start.
    folder = find_folder(flags.model, "--model")
    checkpoint = open_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > checkpoint.vocab_size:
        raise InputError(
            f"--model={flags.model} has a tokenizer of {len(tokenizer)} entries, but a model of "
            f"{checkpoint.vocab_size}"
        )
    generation = read_generation_settings(folder)
    sampling = _file_sampling(generation)
    check_against_model(
        flags, mesh, flags.model, checkpoint.model, checkpoint.vocab_size, checkpoint.max_context
    )
    start_jax(flags.platform or "auto", mesh.num_devices, setting="--platform")
    dtype = flags.compute_dtype or ("float32" if checkpoint.dtype == "float32" else "bfloat16")
    compute_exactly(dtype)
    return ServedPolicy(
        name=flags.model,
        model=dataclasses.replace(checkpoint.model, compute_dtype=dtype),
        vocab_size=checkpoint.vocab_size,
        tokenizer=tokenizer,
        end_ids=generation.end_ids_of(tokenizer),
        max_context=checkpoint.max_context,
        weight_dtype=flags.weight_dtype or "compute",
        kv_dtype=flags.kv_dtype or "compute",
        load=lambda layout: load_parameters(checkpoint, layout),
        sampling=sampling,
    )


def _file_sampling(generation: Any) -> dict[str, float]:
    """Returns the settings of sampling in the model's files, and prints which of them are used.

    Raises ValueError naming the file.
    """
    from earl_jax.engine.config import Sampling

    settings = generation.drawn_by()
    Sampling(**settings).validate(f"{generation.path}: ")
    unused = {name: v for name, v in generation.sampling.items() if name not in DRAWN}
    for word, fields in (
        ("taken for requests that say nothing", settings),
        ("not used", unused),
    ):
        if fields:
            named = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            print(f"{generation.path}: {named} {word}", file=sys.stderr)
    return settings
