# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the format of `transformers`, read by slice onto the devices.

A device gets its slice of each tensor and nothing else, block by block (blocks.py). The
families map tensors to parameters; hf_write.py writes checkpoints.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from earl_jax.models.blocks import BLOCK_BYTES, Region, block_shape, fill
from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.table import family_named, text_settings
from earl_jax.models.checkpoints.families.weights import Weight
from earl_jax.models.checkpoints.hf_settings import read_settings
from earl_jax.models.checkpoints.hf_tensors import CheckpointTensors
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import (
    ParameterSpec,
    Params,
    is_spec,
    layers_with,
    parameter_specs,
)
from earl_jax.settings.errors import InputError
from earl_jax.sharding.layout import Layout

# Types of tensors, by safetensors' name and by that of config.json.
_READABLE = ("F32", "F16", "BF16")
DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder and the contents of its config.json. `dtype` is the type of its weights.

    Of a model that `has_images` the settings are those of its text part.
    """

    folder: Path
    settings: Mapping[str, Any]
    model: ModelConfig
    vocab_size: int
    family: Family
    dtype: str
    has_images: bool = False

    @property
    def max_context(self) -> int | None:
        """The longest context of the model in tokens; None where config.json has none."""
        context = self.settings.get("max_position_embeddings")
        if not isinstance(context, int) or context <= 0:
            return None
        scaling = self.model.rope_scaling
        # YaRN is written into files that keep the length of before.
        stretched = scaling.factor * scaling.original_max_position * (scaling.kind == "yarn")
        return max(context, int(stretched))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads config.json; weights are not looked at.

    Raises:
        ValueError: no such folder, or a model that cannot be computed here.
    """
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path} is no JSON object")
    try:
        text = text_settings(settings)
        settings = settings if text is None else text
        dtype = settings.get("dtype", settings.get("torch_dtype")) or "float32"
        model, vocab_size = read_settings(settings)
        if dtype not in DTYPES:
            raise InputError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    family = family_named(settings)
    if text is not None:
        weights = {**family.weights, **family.fused_weights}
        family = dataclasses.replace(family, weights=weights)
    return Checkpoint(
        folder=folder,
        settings=settings,
        model=model,
        vocab_size=vocab_size,
        family=family,
        dtype=dtype,
        has_images=text is not None,
    )


def load_parameters(checkpoint: Checkpoint, layout: Layout, dtype: str = "float32") -> Params:
    """Loads the weights as parameters of this type, layers stacked, each onto its devices.

    Master weights are fp32; weights that are never trained may be "bfloat16".

    Raises:
        ValueError: a file that cannot be read, a tensor that is missing, superfluous, or of
            another shape or type; the tensor and the file are named.
    """
    specs = parameter_specs(checkpoint.model, checkpoint.vocab_size)
    weights, num_layers = weights_of(specs, checkpoint.family), checkpoint.model.num_layers
    with _tensors(checkpoint) as tensors:
        _check(tensors, specs, checkpoint)

        def load(path: Any, spec: ParameterSpec) -> jax.Array:
            weight, sharding = weights[key_of(path)], layout.parameters(spec.axes)
            block = tensor_blocks(weight, spec.axes, sharding.shard_shape(spec.shape))
            names = {index: name for name, index in tensor_names(path, spec, weight, num_layers)}

            def read(region: Region) -> np.ndarray:
                return _read(tensors, names, weight, spec, region, dtype)

            return fill(spec.shape, DTYPES[dtype], sharding, block, read)

        return jax.tree_util.tree_map_with_path(load, specs, is_leaf=is_spec)


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises the errors of `load_parameters` that can be found without reading the weights."""
    specs = parameter_specs(checkpoint.model, checkpoint.vocab_size)
    with _tensors(checkpoint) as tensors:
        _check(tensors, specs, checkpoint)


def _tensors(checkpoint: Checkpoint) -> CheckpointTensors:
    return CheckpointTensors(
        checkpoint.folder,
        embedding=checkpoint.family.weights["embed"].name,
        has_images=checkpoint.has_images,
        quantized=checkpoint.settings.get("quantization_config") or {},
    )


def key_of(path: Any) -> str:
    """Returns a leaf's path in the form of the keys of a table of weights: "layers.query"."""
    return ".".join(entry.key for entry in path)


def weights_of(specs: Any, family: Family) -> dict[str, Weight]:
    """Returns the family's table for the parameters of this model.

    Where parameters share a tensor, with the places of each.
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    by_key = {key_of(path): spec for path, spec in leaves}
    totals: dict[str, int] = {}
    found: dict[str, Weight] = {}
    for key, weight in family.weights.items():
        if key in by_key and weight.is_shared:
            sizes = dict(zip(by_key[key].axes, by_key[key].shape, strict=True))
            first = totals.get(weight.name, 0)
            number = math.prod(sizes[letter] for letter in weight.shared_letters)
            totals[weight.name] = first + number
            found[key] = dataclasses.replace(weight, first=first)
    for key, weight in found.items():
        found[key] = dataclasses.replace(weight, total=totals[weight.name])
    return {key: found.get(key, family.weights[key]) for key in by_key}


def tensor_sizes(spec: ParameterSpec, weight: Weight) -> tuple[dict[str, int], tuple[int, ...]]:
    """Returns the size of each letter, and the shape that the tensor has in its file."""
    sizes = dict(zip(spec.axes, spec.shape, strict=True)) | {".": 1}

    def length(group: str) -> int:
        whole, cut, _ = group.partition("|")
        return math.prod(sizes[letter] for letter in whole) * (weight.total if cut else 1)

    return sizes, tuple(
        length(group) if "|" in group else math.prod(sizes[letter] for letter in group)
        for group in weight.axes.split()
    )


def tensor_names(
    path: Any, spec: ParameterSpec, weight: Weight, num_layers: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields a parameter's tensors and their indices: (), (2,), with an expert (2, 5).

    The first number is that of the layer among those which have the parameter.
    """
    layers, experts = [(None, None)], [None]
    if "{layer}" in weight.name:
        layers = list(enumerate(layers_with(path[-1].key, spec.shape[0], num_layers)))
    if "{expert}" in weight.name:
        experts = list(range(spec.shape[spec.axes.index("E")]))
    for (place, layer), expert in itertools.product(layers, experts):
        index = tuple(number for number in (place, expert) if number is not None)
        yield weight.name.format(layer=layer, expert=expert), index


def tensor_blocks(weight: Weight, axes: str, local_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the blocks of a device's part: of one tensor each, cut along axes of its file."""
    num_stacked = len(axes) - len(weight.letters)
    # Of letters that are one axis of the tensor, the first can be cut.
    outer = "".join(group.strip("|")[0] for group in weight.axes.split() if group != ".")
    return block_shape(axes, local_shape, num_stacked, outer)


def axes_order(weight: Weight, axes: str) -> list[int]:
    """Returns the position of each of our axes in the tensor; stacked axes are not in it."""
    return [weight.letters.index(letter) for letter in axes if letter in weight.letters]


def _check(tensors: CheckpointTensors, specs: Any, checkpoint: Checkpoint) -> None:
    """Raises ValueError for a missing or extra tensor, a wrong shape, or an unreadable type."""
    model, family = checkpoint.model, checkpoint.family
    weights = weights_of(specs, family)
    embedding, head = (family.weights[key].name for key in ("embed", "head"))
    expected: dict[str, tuple[int, ...]] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        weight = weights[key_of(path)]
        shape = tensor_sizes(spec, weight)[1]
        names = tensor_names(path, spec, weight, model.num_layers)
        expected |= {name: shape for name, _ in names}
    for name, shape in expected.items():
        if name not in tensors.files:
            where = ", ".join(sorted({file.name for file in tensors.files.values()}))
            raise InputError(f"{name} is missing; it is not in {where}")
        found = tensors.slice_of(name)
        if tuple(found.get_shape()) != shape:
            raise InputError(
                f"{name} in {tensors.files[name]} has the shape {tuple(found.get_shape())}; "
                f"config.json gives {shape}"
            )
        if found.get_dtype() not in _READABLE:
            raise InputError(
                f"{name} in {tensors.files[name]} is of type {found.get_dtype()}; only "
                f"{', '.join(_READABLE)} can be read"
            )
    if model.tie_embeddings:
        _check_copy(tensors, embedding, head)
    extra = checkpoint.settings.get("num_nextn_predict_layers") or 0
    # Layers for multi-token prediction stand behind the others; `transformers` leaves them out too.
    unread = tuple(f"model.layers.{model.num_layers + number}." for number in range(extra))
    unread = ("mtp.", *unread) if family.has_states else unread
    for name, file in tensors.files.items():
        if name.startswith(unread):
            continue
        # Old files hold the rotary frequencies, which are computed here, and a copy of a tied head.
        copied = model.tie_embeddings and name == head
        if name not in expected and not copied and not name.endswith("rotary_emb.inv_freq"):
            raise InputError(f"{name} in {file} is not part of the model that config.json gives")


def _check_copy(tensors: CheckpointTensors, embedding: str, head: str) -> None:
    """Raises ValueError if the head beside a tied embedding differs from it."""
    if head not in tensors.files:
        return
    one, other = (tensors.slice_of(name) for name in (embedding, head))
    shape = tuple(one.get_shape())
    rows = max(1, BLOCK_BYTES // (4 * shape[1]))
    same = tuple(other.get_shape()) == shape and other.get_dtype() == one.get_dtype()
    for start in range(0, shape[0], rows) if same else ():
        part = (slice(start, min(start + rows, shape[0])),)
        left, right = (tensors.read(name, part) for name in (embedding, head))
        same = same and left.tobytes() == right.tobytes()
    if not same:
        raise InputError(
            f"{head} in {tensors.files[head]} is not the same as {embedding}, but config.json "
            "ties them (tie_word_embeddings): set it to false there, or remove the tensor"
        )


def _read(
    tensors: CheckpointTensors,
    names: Mapping[tuple[int, ...], str],
    weight: Weight,
    spec: ParameterSpec,
    region: Region,
    dtype: str,
) -> np.ndarray:
    """Reads a region of the parameter, of one tensor only, in this type and our order of axes."""
    sizes, _ = tensor_sizes(spec, weight)
    ranges = dict(zip(spec.axes, region, strict=True))
    cuts, lengths, inner = [], [], []
    # By the number of an axis that is shared: the parts of it that are this parameter's.
    parts: dict[int, list[slice]] = {}
    for axis, group in enumerate(weight.axes.split()):
        if group == ".":
            cuts.append(slice(0, 1))
            continue
        # The first letter of a group is cut in the file; the others are beside it, whole.
        whole, _, shared = group.partition("|")
        first, others = (whole + shared)[0], (whole + shared)[1:]
        step = math.prod(sizes[letter] for letter in others)
        start, stop = ranges[first]
        cuts.append(slice(start * step, stop * step))
        if "|" in group:
            parts[axis] = _shared_parts(weight, whole, sizes, cuts[-1])
        lengths += [stop - start, *(sizes[letter] for letter in others)]
        inner += [slice(None), *(slice(*ranges[letter]) for letter in others)]
    num_stacked = len(spec.axes) - len(lengths)
    name = names[tuple(start for start, _ in region[:num_stacked])]
    values = _read_parts(tensors, name, cuts, parts)
    values = values.reshape(lengths)[tuple(inner)].transpose(axes_order(weight, spec.axes))
    shape = [stop - start for start, stop in region]
    return np.ascontiguousarray(values, dtype=DTYPES[dtype]).reshape(shape)


def _shared_parts(weight: Weight, whole: str, sizes: Mapping[str, int], cut: slice) -> list[slice]:
    """Returns the parts of a shared axis with the numbers `cut` of this parameter's own."""
    if not whole:
        return [slice(weight.first + cut.start, weight.first + cut.stop)]
    number = math.prod(sizes[letter] for letter in weight.shared_letters)
    begin, end = cut.start // number, cut.stop // number
    if number == 1:
        return [slice(begin * weight.total + weight.first, end * weight.total, weight.total)]
    firsts = (place * weight.total + weight.first for place in range(begin, end))
    return [slice(first, first + number) for first in firsts]


def _read_parts(
    tensors: CheckpointTensors, name: str, cuts: list[slice], parts: Mapping[int, list[slice]]
) -> np.ndarray:
    """Reads a part of a tensor; of an axis among `parts` these, one after the other."""
    for axis, own in parts.items():
        read = [tensors.read(name, (*cuts[:axis], part, *cuts[axis + 1 :])) for part in own]
        return read[0] if len(read) == 1 else np.concatenate(read, axis)
    return tensors.read(name, tuple(cuts))
