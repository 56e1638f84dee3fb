# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in the format of `transformers`; hf_read.py reads them.

The host holds one tensor at a time, which comes from the devices block by block (blocks.py).
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import NamedSharding

from earl_jax.models.blocks import drain
from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.table import family_named, family_of
from earl_jax.models.checkpoints.families.weights import Weight
from earl_jax.models.checkpoints.hf_read import (
    DTYPES,
    Checkpoint,
    axes_order,
    key_of,
    tensor_blocks,
    tensor_names,
    tensor_sizes,
    weights_of,
)
from earl_jax.models.checkpoints.hf_settings import write_settings
from earl_jax.models.checkpoints.hf_tensors import INDEX, SINGLE
from earl_jax.models.checkpoints.hf_tokenizer import Tokenizer, write_tokenizer
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import FP32_PARAMETERS, Params, is_spec, parameter_specs
from earl_jax.models.projection import Adapted, is_adapted, merged
from earl_jax.settings.errors import InputError, is_mistake
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.telemetry.atomic import replacing

# By the names of DTYPES.
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
MAX_SHARD_BYTES = 4 * 2**30
Leaf = jax.Array | Adapted
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
    bring: Callable[[str, Leaf], Leaf] = lambda _, leaf: leaf,
) -> None:
    """Writes a folder that `transformers` loads: weights, config, tokenizer, generation settings.

    What the model does not decide (the longest context, generation settings) comes from `source`,
    the checkpoint that training began with, where there is one. The folder appears when all of it
    is written.

    Args:
        folder: must not exist.
        params: the trainer's tree, layers stacked; adapters are merged, one tensor at a time.
        model: what `params` are; must be of a known family.
        vocab_size: rows of the embedding.
        tokenizer: its files and chat template are written beside the weights (hf_tokenizer.py).
        dtype: one of DTYPES; "float32" keeps every bit.
        max_positions: the longest context, where there is no source.
        source: see above.
        max_shard_bytes: weights beyond it go into several files, with an index.
        bring: what puts a parameter, by its key, on devices of this process. Called for one after
            the other of `parameters_of(params)`, each when the one before has been let go.

    Raises:
        ValueError: no known family has such layers, or the folder exists or cannot be written.
    """
    with whole_folder(folder) as partial:
        leaf_of = _one_at_a_time(parameters_of(params), bring)
        # Layers of one model may be those of several families.
        family = family_of(model) if source is None else family_named(source.settings)
        specs = parameter_specs(model, vocab_size)
        planned = list(_planned(specs, family, model.num_layers, dtype))
        _write_weights(partial, leaf_of, planned, max_shard_bytes)
        config, generation = _texts(model, vocab_size, tokenizer, dtype, max_positions, source)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        write_tokenizer(partial, tokenizer)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder beside it to write to, renamed to it at the end.

    Raises:
        InputError: the folder exists, or may not be written.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as partial:
            partial.mkdir()
            yield partial
    except OSError as error:
        if is_mistake(error):
            raise InputError(f"{folder} cannot be written: {error}") from error
        raise


def _texts(
    model: ModelConfig,
    vocab_size: int,
    tokenizer: Any,
    dtype: str,
    max_positions: int,
    source: Checkpoint | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns config.json and generation_config.json."""
    if source is not None:
        # The code that auto_map names is not copied, nor needed: `transformers` has these families.
        # Weights are written in the type `dtype`, whatever they were read in.
        left_out = ("torch_dtype", "auto_map", "quantization_config")
        kept = {key: value for key, value in source.settings.items() if key not in left_out}
        kept["model_type"] = source.family.model_type
        path = source.folder / "generation_config.json"
        if path.is_file():
            return kept | {"dtype": dtype}, json.loads(path.read_bytes())
        tokens = {key: kept[key] for key in _TOKEN_KEYS if kept.get(key) is not None}
        return kept | {"dtype": dtype}, tokens
    # A token that the tokenizer lacks must be written as null: `transformers` has defaults.
    tokens = {key: getattr(tokenizer, key, None) for key in _TOKEN_KEYS}
    config = write_settings(model, vocab_size) | tokens
    config |= {"max_position_embeddings": max_positions, "dtype": dtype}
    return config, {key: value for key, value in tokens.items() if value is not None}


def parameters_of(params: Any) -> dict[str, Any]:
    """Returns the leaves of a tree of parameters by their keys, in the order of writing."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_adapted)
    return {key_of(path): leaf for path, leaf in leaves}


def _one_at_a_time(
    leaves: dict[str, Leaf], bring: Callable[[str, Leaf], Leaf]
) -> Callable[[str], Leaf]:
    """Returns a function to `bring(key, leaf)` by key, which holds the last result only."""
    held: dict[str, Leaf] = {}

    def leaf_of(key: str) -> Leaf:
        if key not in held:
            held.clear()
            held[key] = bring(key, leaves[key])
        return held[key]

    return leaf_of


def _write_weights(
    folder: Path, leaf_of: Callable[[str], Leaf], parts: "list[_Planned]", max_bytes: int
) -> None:
    plan = _shards({part.name: part for part in parts}, max_bytes)
    starts: dict[str, tuple[Path, int]] = {}
    for number, shard in enumerate(plan, start=1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors" if len(plan) > 1 else SINGLE
        starts |= _make_file(folder / file, shard)
    for part in parts:
        path, start = starts[part.name]
        with path.open("r+b") as file:
            file.seek(start)
            # Not bound to a name, so that it is freed before the next.
            _put(file, part, _tensor(leaf_of(part.key), part, np.dtype(DTYPES[part.dtype])))
    if len(plan) > 1:
        total = sum(tensor.num_bytes for shard in plan for tensor in shard)
        files = {name: path.name for name, (path, _) in starts.items()}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planned:
    """A tensor to write: the part at `index` (see `tensor_names`) of the parameter `key`.

    Or its part of a tensor that parameters share.
    """

    name: str
    key: str
    index: tuple[int, ...]
    weight: Weight
    axes: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def _planned(specs: Any, family: Family, num_layers: int, dtype: str) -> Iterator[_Planned]:
    weights = weights_of(specs, family)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        weight = weights[key_of(path)]
        shape = tensor_sizes(spec, weight)[1]
        own = "float32" if path[-1].key in FP32_PARAMETERS else dtype
        for name, index in tensor_names(path, spec, weight, num_layers):
            yield _Planned(
                name=name,
                key=key_of(path),
                index=index,
                weight=weight,
                axes=spec.axes,
                shape=shape,
                dtype=own,
            )


def _shards(tensors: dict[str, _Planned], max_bytes: int) -> list[list[_Planned]]:
    """Returns tensors in files of at most `max_bytes`; a larger one has a file of its own."""
    shards: list[list[_Planned]] = [[]]
    for tensor in tensors.values():
        held = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and held + tensor.num_bytes > max_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _make_file(path: Path, shard: list[_Planned]) -> dict[str, tuple[Path, int]]:
    """Writes a file of safetensors that are zeros, and returns each one's file and place there.

    They are filled one by one: the library of safetensors would hold all of them, twice.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _STORED[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(begin + end)
    return {t.name: (path, begin + header[t.name]["data_offsets"][0]) for t in shard}


def _put(file: BinaryIO, part: _Planned, values: np.ndarray) -> None:
    """Writes a tensor, or its part beside others, at the file's position."""
    weight = part.weight
    if weight.is_shared:
        # Behind the axis that is cut.
        groups = weight.axes.split()
        [axis] = [axis for axis, group in enumerate(groups) if "|" in group]
        rest = math.prod(part.shape[axis + 1 :])
        shape = math.prod(part.shape) // (weight.total * rest), weight.total * rest
        own = values.reshape(shape[0], -1)
        rows = np.memmap(file, values.dtype, "r+", file.tell(), shape)
        rows[:, weight.first * rest : weight.first * rest + own.shape[1]] = own
    else:
        file.write(values.data)


def _tensor(leaf: Leaf, tensor: _Planned, dtype: np.dtype) -> np.ndarray:
    """Returns the numbers of the tensor in the order of its file, as bits in unsigned numbers."""
    axes, weight, index = tensor.axes, tensor.weight, tensor.index
    if isinstance(leaf, Adapted):
        array, index = _merged_layer(leaf, index[0]), (0, *index[1:])
    else:
        array = leaf
    assert array.is_fully_addressable, "one process must see the whole parameter"
    if not isinstance(array.sharding, NamedSharding):
        device = make_layout(MeshShape(), list(array.devices()))
        array = jax.device_put(array, device.parameters(axes))
    block = tensor_blocks(weight, axes, array.sharding.shard_shape(array.shape))
    sizes = dict(zip(axes, array.shape, strict=True))
    values = np.empty([sizes[letter] for letter in weight.letters], dtype)
    ours = values.transpose(axes_order(weight, axes))
    for region, part in drain(array, block, index):
        ours[tuple(slice(*cut) for cut in region[len(index) :])] = part[(0,) * len(index)]
    return values.reshape(-1).view(f"u{dtype.itemsize}")


def _merged_layer(leaf: Adapted, layer: int) -> jax.Array:
    """Returns one layer of the merged weight on the weight's devices; axis 0 is still layers."""
    return _merge(leaf.weight.sharding)(leaf, np.int32(layer))


@functools.lru_cache(maxsize=64)
def _merge(sharding: Any) -> Any:
    def merge(leaf: Adapted, layer: jax.Array) -> jax.Array:
        take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=layer, slice_size=1)
        return merged(jax.tree.map(take, leaf))

    return jax.jit(merge, out_shardings=sharding)
