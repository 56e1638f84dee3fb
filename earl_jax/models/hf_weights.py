# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the format of `transformers`: read by slice onto the devices, and written.

A device gets its slice of each tensor and nothing else; the host holds one tensor of one layer at a
time. Which tensor is which parameter is said in families.py.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from earl_jax.models.config import ModelConfig
from earl_jax.models.families import (
    Family,
    Weight,
    family_named,
    family_of,
    read_settings,
    write_settings,
)
from earl_jax.models.parameters import ParameterSpec, Params, is_spec, parameter_specs
from earl_jax.sharding.layout import Layout

# Types of tensors, by safetensors' name and by that of config.json.
_READABLE = ("F32", "F16", "BF16")
DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
MAX_SHARD_BYTES = 4 * 2**30
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Tokenizer(Protocol):
    """What can write its own files, as every tokenizer of `transformers`."""

    def save_pretrained(self, folder: str, /) -> Any:
        """Writes them."""


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


def load_parameters(checkpoint: Checkpoint, layout: Layout) -> Params:
    """The checkpoint's weights as fp32 master parameters, layers stacked, each where it lives.

    Raises:
        ValueError: a file that cannot be read, a tensor that is missing, superfluous, or of
            another shape or type; the tensor and the file are named.
    """
    specs = parameter_specs(checkpoint.model, checkpoint.vocab_size)
    weights = _weights(specs, checkpoint.family)
    with _Tensors(checkpoint.folder) as tensors:
        _check(tensors, specs, weights, checkpoint.model)

        def load(path: Any, spec: ParameterSpec) -> jax.Array:
            weight = weights[_key(path)]
            if "{layer}" not in weight.name:
                return _read(tensors, weight.name, weight, spec, layout)
            one = dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
            stacked = jnp.zeros(spec.shape, jnp.float32, device=layout.parameters(spec.axes))
            for layer in range(spec.shape[0]):
                name = weight.name.format(layer=layer)
                placed = _read(tensors, name, weight, one, layout)
                stacked = _put_layer(stacked.sharding)(stacked, placed, np.int32(layer))
                # The next layer is read when this one has left the host.
                stacked.block_until_ready()
            return stacked

        return jax.tree_util.tree_map_with_path(load, specs, is_leaf=is_spec)


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises what `load_parameters` would, as far as it shows without reading a weight."""
    specs = parameter_specs(checkpoint.model, checkpoint.vocab_size)
    with _Tensors(checkpoint.folder) as tensors:
        _check(tensors, specs, _weights(specs, checkpoint.family), checkpoint.model)


@functools.lru_cache(maxsize=64)
def _put_layer(sharding: Any) -> Any:
    def put(stacked: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _key(path: Any) -> str:
    return ".".join(entry.key for entry in path)


def _weights(specs: Any, family: Family) -> dict[str, Weight]:
    """The family's table, as far as this model has the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return {_key(path): family.weights[_key(path)] for path, _ in leaves}


class _Tensors:
    """The tensors of a folder: one file, or those that an index names. Opened when first asked."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._open: dict[Path, Any] = {}
        index = folder / _INDEX
        if index.is_file():
            try:
                names = json.loads(index.read_text())["weight_map"]
                self.files = {name: folder / file for name, file in names.items()}
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{index} is damaged: {error!r}") from error
        elif (folder / _SINGLE).is_file():
            keys = self._handle("its list of tensors", folder / _SINGLE).keys()
            self.files = dict.fromkeys(keys, folder / _SINGLE)
        else:
            raise ValueError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")

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


def _sizes(spec: ParameterSpec, weight: Weight) -> tuple[dict[str, int], tuple[int, ...]]:
    """The size of each letter, and the shape of the tensor."""
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    shape = tuple(math.prod(sizes[letter] for letter in group) for group in weight.axes.split())
    return sizes, shape


def _check(
    tensors: _Tensors, specs: Any, weights: Mapping[str, Weight], model: ModelConfig
) -> None:
    """All tensors are there, of the right shape, of a type that can be read; and no others."""
    expected: dict[str, tuple[int, ...]] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        weight = weights[_key(path)]
        layers = range(model.num_layers) if "{layer}" in weight.name else (0,)
        expected |= {weight.name.format(layer=i): _sizes(spec, weight)[1] for i in layers}
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
    tensors: _Tensors, name: str, weight: Weight, spec: ParameterSpec, layout: Layout
) -> jax.Array:
    """One tensor as fp32 on its devices, in our order of axes; each region is read once."""
    tensor = tensors.slice_of(name)
    sizes, _ = _sizes(spec, weight)
    theirs = weight.axes.replace(" ", "")
    order = [theirs.index(letter) for letter in spec.axes]

    def read(region: tuple[tuple[int, int], ...]) -> np.ndarray:
        ranges = dict(zip(spec.axes, region, strict=True))
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
        return np.ascontiguousarray(piece, dtype=np.float32)

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


def save_checkpoint(
    folder: Path,
    params: Params,
    *,
    model: ModelConfig,
    vocab_size: int,
    tokenizer: Tokenizer,
    dtype: str,
    max_positions: int,
    source: Checkpoint | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that `transformers` loads: weights, config, tokenizer, generation settings.

    What the model does not decide (the longest context, generation settings) comes from `source`,
    the checkpoint that training began with, where there is one. The folder appears when all of it
    is written.

    Args:
        folder: must not exist.
        params: the trainer's tree, layers stacked, fp32.
        model: what `params` are; must be of a known family.
        vocab_size: rows of the embedding.
        tokenizer: its files and chat template are written beside the weights.
        dtype: one of DTYPES; "float32" keeps every bit.
        max_positions: the longest context, where there is no source.
        source: see above.
        max_shard_bytes: weights beyond it go into several files, with an index.

    Raises:
        ValueError: no known family has such layers, or the folder exists or cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already")
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(partial, params, model, vocab_size, dtype, max_shard_bytes)
        tokenizer.save_pretrained(str(partial))
        config, generation = _texts(model, vocab_size, tokenizer, dtype, max_positions, source)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        os.replace(partial, folder)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error


def _texts(
    model: ModelConfig,
    vocab_size: int,
    tokenizer: Any,
    dtype: str,
    max_positions: int,
    source: Checkpoint | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json."""
    if source is not None:
        kept = {key: value for key, value in source.settings.items() if key != "torch_dtype"}
        path = source.folder / "generation_config.json"
        if path.is_file():
            return kept | {"dtype": dtype}, json.loads(path.read_text())
        tokens = {key: kept[key] for key in _TOKEN_KEYS if kept.get(key) is not None}
        return kept | {"dtype": dtype}, tokens
    # A token that the tokenizer has not must be said to be none: `transformers` has defaults.
    tokens = {key: getattr(tokenizer, key, None) for key in _TOKEN_KEYS}
    config = write_settings(model, vocab_size) | tokens
    config |= {"max_position_embeddings": max_positions, "dtype": dtype}
    return config, {key: value for key, value in tokens.items() if value is not None}


_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _write_weights(
    folder: Path, params: Params, model: ModelConfig, vocab_size: int, dtype: str, max_bytes: int
) -> None:
    plan = _shards(model, vocab_size, np.dtype(DTYPES[dtype]).itemsize, max_bytes)
    leaves = {_key(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    files: dict[str, str] = {}
    for number, shard in enumerate(plan, start=1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors" if len(plan) > 1 else _SINGLE
        tensors = {
            tensor.name: _tensor(leaves[tensor.key], tensor, np.dtype(DTYPES[dtype]))
            for tensor in shard
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    if len(plan) > 1:
        total = sum(tensor.num_bytes for shard in plan for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planned:
    """A tensor to write: layer `layer` (None: all) of the parameter `key`."""

    name: str
    key: str
    layer: int | None
    weight: Weight
    axes: str
    shape: tuple[int, ...]
    num_bytes: int


def _planned(model: ModelConfig, vocab_size: int, itemsize: int) -> Iterator[_Planned]:
    specs = parameter_specs(model, vocab_size)
    weights = _weights(specs, family_of(model))
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        weight = weights[_key(path)]
        stacked = "{layer}" in weight.name
        shape = _sizes(spec, weight)[1]
        for layer in range(model.num_layers) if stacked else (None,):
            yield _Planned(
                name=weight.name.format(layer=layer),
                key=_key(path),
                layer=layer,
                weight=weight,
                axes=spec.axes[1:] if stacked else spec.axes,
                shape=shape,
                num_bytes=math.prod(shape) * itemsize,
            )


def _shards(
    model: ModelConfig, vocab_size: int, itemsize: int, max_bytes: int
) -> list[list[_Planned]]:
    """Tensors in files of at most `max_bytes`; one that is larger has a file of its own."""
    shards: list[list[_Planned]] = [[]]
    for tensor in _planned(model, vocab_size, itemsize):
        held = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and held + tensor.num_bytes > max_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _tensor(leaf: jax.Array, tensor: _Planned, dtype: np.dtype) -> np.ndarray:
    """The tensor as its file has it."""
    values = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer])
    order = [tensor.axes.index(letter) for letter in tensor.weight.axes.replace(" ", "")]
    return np.ascontiguousarray(values.transpose(order).reshape(tensor.shape).astype(dtype))
