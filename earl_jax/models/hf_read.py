# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the format of `transformers`, read by slice onto the devices.

A device gets its slice of each tensor and nothing else; the host holds one tensor of one layer at a
time. Which tensor is which parameter is said in families.py; hf_write.py is the way out.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from earl_jax.models.config import ModelConfig
from earl_jax.models.families import Family, Weight, family_named
from earl_jax.models.hf_settings import read_settings
from earl_jax.models.parameters import ParameterSpec, Params, is_spec, parameter_specs
from earl_jax.sharding.layout import Layout

# Types of tensors, by safetensors' name and by that of config.json.
_READABLE = ("F32", "F16", "BF16")
DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder and what its config.json says. `dtype` is the type that its weights are kept in."""

    folder: Path
    settings: Mapping[str, Any]
    model: ModelConfig
    vocab_size: int
    family: Family
    dtype: str


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads config.json; weights are not looked at.

    Raises:
        ValueError: no such folder, or a model that cannot be computed here.
    """
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no JSON object")
    dtype = settings.get("dtype", settings.get("torch_dtype")) or "float32"
    try:
        model, vocab_size = read_settings(settings)
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Checkpoint(
        folder=folder,
        settings=settings,
        model=model,
        vocab_size=vocab_size,
        family=family_named(settings),
        dtype=dtype,
    )


def load_parameters(checkpoint: Checkpoint, layout: Layout, dtype: str = "float32") -> Params:
    """The checkpoint's weights as parameters of this type, layers stacked, each where it lives.

    Master weights are fp32; weights that are never trained may be "bfloat16".

    Raises:
        ValueError: a file that cannot be read, a tensor that is missing, superfluous, or of
            another shape or type; the tensor and the file are named.
    """
    specs = parameter_specs(checkpoint.model, checkpoint.vocab_size)
    weights = weights_of(specs, checkpoint.family)
    with _Tensors(checkpoint.folder) as tensors:
        _check(tensors, specs, weights, checkpoint.model)

        def load(path: Any, spec: ParameterSpec) -> jax.Array:
            weight = weights[key_of(path)]
            if "{layer}" not in weight.name:
                return _read(tensors, weight.name, weight, spec, layout, dtype)
            one = dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
            stacked = jnp.zeros(spec.shape, DTYPES[dtype], device=layout.parameters(spec.axes))
            for layer in range(spec.shape[0]):
                name = weight.name.replace("{layer}", str(layer))
                placed = _read(tensors, name, weight, one, layout, dtype)
                stacked = _put_layer(stacked.sharding)(stacked, placed, np.int32(layer))
                # The next layer is read when this one has left the host.
                stacked.block_until_ready()
            return stacked

        return jax.tree_util.tree_map_with_path(load, specs, is_leaf=is_spec)


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises what `load_parameters` would, as far as it shows without reading a weight."""
    specs = parameter_specs(checkpoint.model, checkpoint.vocab_size)
    with _Tensors(checkpoint.folder) as tensors:
        _check(tensors, specs, weights_of(specs, checkpoint.family), checkpoint.model)


@functools.lru_cache(maxsize=64)
def _put_layer(sharding: Any) -> Any:
    def put(stacked: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def key_of(path: Any) -> str:
    """A leaf's path in the tree as the keys of a table of weights have it: "layers.query"."""
    return ".".join(entry.key for entry in path)


def weights_of(specs: Any, family: Family) -> dict[str, Weight]:
    """The family's table, as far as this model has the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return {key_of(path): family.weights[key_of(path)] for path, _ in leaves}


class _Tensors:
    """The tensors of a folder: one file, or those that an index names. Opened when first asked."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._open: dict[Path, Any] = {}
        index = folder / INDEX
        if index.is_file():
            try:
                names = json.loads(index.read_text())["weight_map"]
                self.files = {name: folder / file for name, file in names.items()}
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{index} is damaged: {error!r}") from error
        elif (folder / SINGLE).is_file():
            keys = self._handle("its list of tensors", folder / SINGLE).keys()
            self.files = dict.fromkeys(keys, folder / SINGLE)
        else:
            raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}")

    def __enter__(self) -> "_Tensors":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _handle(self, name: str, file: Path) -> Any:
        if file not in self._open:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="np"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{name} cannot be read from {file}: {error}") from error
            self._open[file] = handle
        return self._open[file]

    def slice_of(self, name: str) -> Any:
        """The tensor, of which nothing is read before it is indexed."""
        file = self.files[name]
        try:
            return self._handle(name, file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{name} cannot be read from {file}: {error}") from error


def tensor_sizes(spec: ParameterSpec, weight: Weight) -> tuple[dict[str, int], tuple[int, ...]]:
    """The size of each letter, and the shape that the tensor has in its file."""
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    shape = tuple(math.prod(sizes[letter] for letter in group) for group in weight.axes.split())
    return sizes, shape


def tensor_names(weight: Weight, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a parameter, and its place there: (), layer (2,), layer and expert (2, 5)."""
    layers = range(model.num_layers) if "{layer}" in weight.name else (None,)
    experts = range(model.num_experts) if "{expert}" in weight.name else (None,)
    for layer, expert in itertools.product(layers, experts):
        index = tuple(number for number in (layer, expert) if number is not None)
        yield weight.name.format(layer=layer, expert=expert), index


def _check(
    tensors: _Tensors, specs: Any, weights: Mapping[str, Weight], model: ModelConfig
) -> None:
    """All tensors are there, of the right shape, of a type that can be read; and no others."""
    expected: dict[str, tuple[int, ...]] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        weight = weights[key_of(path)]
        shape = tensor_sizes(spec, weight)[1]
        expected |= {name: shape for name, _ in tensor_names(weight, model)}
    for name, shape in expected.items():
        if name not in tensors.files:
            where = ", ".join(sorted({file.name for file in tensors.files.values()}))
            raise ValueError(f"{name} is missing; it is not in {where}")
        found = tensors.slice_of(name)
        if tuple(found.get_shape()) != shape:
            raise ValueError(
                f"{name} in {tensors.files[name]} has the shape {tuple(found.get_shape())}; "
                f"config.json gives {shape}"
            )
        if found.get_dtype() not in _READABLE:
            raise ValueError(
                f"{name} in {tensors.files[name]} is of type {found.get_dtype()}; only "
                f"{', '.join(_READABLE)} can be read"
            )
    for name, file in tensors.files.items():
        # Old files hold the rotary frequencies, which are computed here, and a copy of a tied head.
        copied = model.tie_embeddings and name == "lm_head.weight"
        if name not in expected and not copied and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{name} in {file} is not part of the model that config.json gives")


def _read(
    tensors: _Tensors, name: str, weight: Weight, spec: ParameterSpec, layout: Layout, dtype: str
) -> jax.Array:
    """One tensor, or one of each expert, on its devices, of this type, in our order of axes.

    Each region is read once.
    """
    sizes, _ = tensor_sizes(spec, weight)
    theirs = weight.axes.replace(" ", "")
    order = [theirs.index(letter) for letter in spec.axes if letter in theirs]

    def read(region: tuple[tuple[int, int], ...]) -> np.ndarray:
        ranges = dict(zip(spec.axes, region, strict=True))
        if "{expert}" not in name:
            return read_one(name, ranges)
        pieces = np.empty([stop - start for start, stop in region], DTYPES[dtype])
        for piece, expert in zip(pieces, range(*ranges["E"]), strict=True):
            piece[...] = read_one(name.replace("{expert}", str(expert)), ranges)
        return pieces

    def read_one(name: str, ranges: Mapping[str, tuple[int, int]]) -> np.ndarray:
        tensor = tensors.slice_of(name)
        cuts, lengths, inner = [], [], []
        for group in weight.axes.split():
            # The first letter of a group is cut in the file; the others are beside it, whole.
            step = math.prod(sizes[letter] for letter in group[1:])
            start, stop = ranges[group[0]]
            cuts.append(slice(start * step, stop * step))
            lengths += [stop - start, *(sizes[letter] for letter in group[1:])]
            inner += [slice(None), *(slice(*ranges[letter]) for letter in group[1:])]
        try:
            values = tensor[tuple(cuts)]
        except (SafetensorError, OSError) as error:
            file = tensors.files[name]
            raise ValueError(f"{name} cannot be read from {file}: {error}") from error
        piece = values.reshape(lengths)[tuple(inner)].transpose(order)
        return np.ascontiguousarray(piece, dtype=DTYPES[dtype])

    sharding = layout.parameters(spec.axes)
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        bounds = [part.indices(size) for part, size in zip(index or (), spec.shape, strict=True)]
        region = tuple((start, stop) for start, stop, _ in bounds)
        devices_of.setdefault(region, []).append(device)
    # Region by region: with all of them at once, the host would hold the tensor twice.
    placed = [
        jax.block_until_ready([jax.device_put(piece, device) for device in devices])
        for piece, devices in ((read(region), devices) for region, devices in devices_of.items())
    ]
    return jax.make_array_from_single_device_arrays(
        spec.shape, sharding, [array for arrays in placed for array in arrays]
    )
