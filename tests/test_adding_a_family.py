# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A family that is not known is one record: its layers, its config.json, and its weights.

Made up: Qwen2's biases beside Qwen3's norms, embeddings of other names, and a query projection that
is stored the other way round.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.families.family import Family
from earl_jax.models.checkpoints.families.table import FAMILIES, family_of
from earl_jax.models.checkpoints.families.weights import BIASES, HEAD_NORMS, PLAIN_WEIGHTS, Weight
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.decoder import forward_rows
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.references import REFERENCE, assert_equal_trees

TULIP = Family(
    model_type="tulip",
    architecture="TulipForCausalLM",
    layers={"attention_bias": True, "query_key_norm": "head"},
    required={"hidden_act": "silu"},
    weights={
        **PLAIN_WEIGHTS,
        **BIASES,
        **HEAD_NORMS,
        "embed": Weight("tulip.words", "V D"),
        "head": Weight("tulip.says", "V D"),
        "layers.query": Weight("tulip.{layer}.asks", "D KGH"),
    },
)
SIZES = {"V": 320, "D": 16, "K": 2, "G": 3, "H": 4, "F": 24}
NUM_LAYERS = 2
SETTINGS = {
    "model_type": "tulip",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of it, every number another one."""
    rng = np.random.default_rng(0)
    tensors = {}
    for weight in TULIP.weights.values():
        shape = [math.prod(SIZES[letter] for letter in group) for group in weight.axes.split()]
        for layer in range(NUM_LAYERS if "{layer}" in weight.name else 1):
            values = rng.normal(size=shape).astype(np.float32)
            tensors[weight.name.format(layer=layer)] = values
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_one_record_is_a_family(folder, monkeypatch):
    """Read onto every device by slice, computed with, and written again bit for bit."""
    with pytest.raises(ValueError, match="model_type is 'tulip', .* known are llama, .*gemma3"):
        open_checkpoint(folder)
    monkeypatch.setitem(FAMILIES, TULIP.model_type, TULIP)
    given = open_checkpoint(folder)
    assert family_of(given.model) is TULIP is given.family
    stored = load_file(folder / "model.safetensors")
    params = load_parameters(given, make_layout(MeshShape()))
    for layer in range(NUM_LAYERS):
        found = {name: np.asarray(leaf[layer]) for name, leaf in params["layers"].items()}
        for name, expected in (
            ("query", stored[f"tulip.{layer}.asks"].reshape(16, 2, 3, 4)),
            ("key", stored[f"model.layers.{layer}.self_attn.k_proj.weight"].T.reshape(16, 2, 4)),
            ("query_bias", stored[f"model.layers.{layer}.self_attn.q_proj.bias"].reshape(2, 3, 4)),
            ("query_norm", stored[f"model.layers.{layer}.self_attn.q_norm.weight"]),
        ):
            np.testing.assert_array_equal(found[name], expected)
    np.testing.assert_array_equal(params["embed"], stored["tulip.words"])
    np.testing.assert_array_equal(params["head"], stored["tulip.says"].T)
    mixed = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
    sharded = load_parameters(given, mixed)
    assert_equal_trees(jax.tree.map(np.asarray, sharded), jax.tree.map(np.asarray, params))
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
    ones = jnp.ones_like(tokens)

    def hidden(layout, params):
        program = jax.jit(lambda params: forward_rows(given.model, layout, params, tokens, ones))
        return np.asarray(program(params))

    np.testing.assert_allclose(
        hidden(mixed, sharded), hidden(make_layout(MeshShape()), params), atol=1e-4
    )
    save_checkpoint(
        folder / "again",
        sharded,
        model=given.model,
        vocab_size=given.vocab_size,
        tokenizer=load_tokenizer(REFERENCE / "qwen2_tied"),
        dtype="float32",
        max_positions=64,
        source=given,
    )
    again = load_file(folder / "again" / "model.safetensors")
    assert again.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(again[name], values)
    assert open_checkpoint(folder / "again").model == given.model


def test_errors_speak_of_its_own_names(folder, monkeypatch):
    monkeypatch.setitem(FAMILIES, TULIP.model_type, TULIP)
    file = folder / "model.safetensors"
    whole, layout = file.read_bytes(), make_layout(MeshShape())
    file.write_bytes(whole[:100])
    with pytest.raises(ValueError, match="^tulip.words cannot be read from .*its list of tensors"):
        load_parameters(open_checkpoint(folder), layout)
    file.write_bytes(whole)
    (folder / "config.json").write_text(json.dumps({**SETTINGS, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="^tulip.says in .* is not the same as tulip.words, but"):
        load_parameters(open_checkpoint(folder), layout)
