# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Files to devices and back, block by block: the right values, and the memory of the host."""

import contextlib
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from earl_jax.envs.text.tokenizer import MIN_VOCAB_SIZE, build_tokenizer
from earl_jax.models import blocks
from earl_jax.models.blocks import drain, fill
from earl_jax.models.checkpoints import hf_tensors
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import init_parameters, parameter_shardings, parameter_specs
from earl_jax.sharding.layout import MeshShape, make_layout

MESH = MeshShape(tensor=2, fsdp=4)
BLOCK = 64 * 1024
# Embedding, head and three projections are tensors of 2 MiB in bf16, 64 blocks of a whole one.
MODEL = ModelConfig(
    num_layers=1,
    width=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_size=8_192,
    tie_embeddings=False,
)
VOCAB = 8_192
LARGEST = VOCAB * MODEL.width * 2


# Blocks.


def test_no_number_changes_on_its_way():
    """Subnormals, infinities, signed zeros."""
    rare = np.array([1e-45, -0.0, np.inf, -np.inf, 1.1754942e-38, 3.4028235e38, 0.1, -1e-40])
    rare = rare.astype(np.float32)
    sharding = make_layout(MeshShape(fsdp=4)).parameters("D")
    array = fill((8,), np.float32, sharding, (1,), lambda region: rare[slice(*region[0])])
    assert np.asarray(array).tobytes() == rare.tobytes()
    back = np.concatenate([part for _, part in drain(array, (2,))])
    assert back.tobytes() == rare.tobytes()
    short = rare.astype(jnp.bfloat16)
    array = fill((8,), jnp.bfloat16, sharding, (1,), lambda region: short[slice(*region[0])])
    assert array.dtype == jnp.bfloat16 and np.asarray(array).tobytes() == short.tobytes()


# The host.


@contextlib.contextmanager
def counted():
    """A list: the bytes that Python and numpy held at most, and at the end; XLA's not."""
    found = []
    tracemalloc.start()
    try:
        yield found
        found += tracemalloc.get_traced_memory()[::-1]
    finally:
        tracemalloc.stop()


@functools.cache
def made():
    specs = parameter_specs(MODEL, VOCAB)
    shardings = parameter_shardings(specs, make_layout(MESH))
    init = jax.jit(lambda key: init_parameters(specs, key), out_shardings=shardings)
    return init(jax.random.key(0))


def save(folder, params, **changed):
    save_checkpoint(
        folder,
        params,
        model=MODEL,
        vocab_size=VOCAB,
        tokenizer=build_tokenizer(["a b"], MIN_VOCAB_SIZE),
        dtype="bfloat16",
        max_positions=128,
        **changed,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """In files of about two tensors."""
    folder = tmp_path_factory.mktemp("loading") / "checkpoint"
    save(folder, made(), max_shard_bytes=5 * 2**20)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return open_checkpoint(folder)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(hf_tensors, "MAX_MAPPED_BYTES", BLOCK)


def test_the_host_holds_a_few_blocks_while_it_loads(checkpoint, small_blocks):
    layout = make_layout(MESH)
    load_parameters(checkpoint, layout)  # compiles
    with counted() as held:
        params = load_parameters(checkpoint, layout)
    # One block as stored, one in fp32, eight that the devices may have taken for their own.
    assert held[0] < 10 * BLOCK + 300_000 < LARGEST / 2
    # What is held is counted: a tensor that is read whole, and in fp32.
    file = checkpoint.folder / "model-00001-of-00003.safetensors"
    with counted() as whole, safe_open(file, framework="np") as tensors:
        assert tensors.get_slice("model.embed_tokens.weight")[:].astype(np.float32).size
    assert whole[0] >= 3 * LARGEST
    jax.tree.map(
        lambda left, right: np.testing.assert_array_equal(left, right.astype(jnp.bfloat16)),
        params,
        made(),
    )


def test_the_host_holds_one_tensor_while_it_writes(small_blocks, tmp_path):
    params = made()
    save(tmp_path / "first", params)
    with counted() as held:
        save(tmp_path / "second", params)
    file = tmp_path / "second" / "model.safetensors"
    # All in one file, of five tensors of this size.
    assert file.stat().st_size > 5 * LARGEST
    assert LARGEST < held[0] < LARGEST + 2 * BLOCK + 1_000_000 < 2 * LARGEST
    assert held[1] < 1_000_000
    again = load_parameters(open_checkpoint(tmp_path / "second"), make_layout(MESH))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, again, rounded)


def test_files_are_let_go_as_they_are_read(checkpoint, small_blocks, monkeypatch):
    """Or all that was read of them would count as this process's memory."""
    opened = []
    monkeypatch.setattr(
        hf_tensors, "safe_open", lambda file, **how: opened.append(file) or safe_open(file, **how)
    )
    load_parameters(checkpoint, make_layout(MeshShape()))
    assert len(opened) > 10 * len(set(opened))
