# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, written: in and out again is bitwise equal, and `transformers` reads them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer, dynamic_module_utils

from earl_jax.envs.text.tokenizer import load_tokenizer
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_tokenizer import CODE
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import init_parameters, parameter_specs
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.references import (
    KINDS,
    NAMES,
    REFERENCE,
    assert_equal_trees,
    checkpoint,
    given_softcap,
    loaded,
    mixed,
    reference,
    tensors,
)

TOKENIZERS = Path(__file__).parent / "tokenizers"


def save(folder: Path, name: str, **changed):
    given = checkpoint(name)
    arguments = {
        "model": given.model,
        "vocab_size": given.vocab_size,
        "tokenizer": load_tokenizer(REFERENCE / "qwen2_tied"),
        "dtype": given.dtype,
        "max_positions": 128,
        "source": given,
    }
    params = changed.pop("params", None)
    save_checkpoint(folder, params or loaded(name), **(arguments | changed))


@pytest.mark.slow_except("gemma3", "qwen3_moe", "gpt_oss")
@pytest.mark.parametrize("name", [*(n for n in KINDS if n != "gpt_oss_mxfp4"), "qwen2_tied"])
def test_in_and_out_again_is_bitwise_equal(name, tmp_path):
    params = load_parameters(checkpoint(name), make_layout(mixed(name)))
    save(tmp_path / "out", name, params=params, max_shard_bytes=20_000)
    there, back = tensors(REFERENCE / name), tensors(tmp_path / "out")
    assert there.keys() == back.keys()
    for key, array in there.items():
        assert array.dtype == back[key].dtype
        assert array.tobytes() == back[key].tobytes(), key
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    large = [file for file in files if sum(a.nbytes for a in load_file(file).values()) > 20_000]
    assert all(len(load_file(file)) == 1 for file in large)
    again = open_checkpoint(tmp_path / "out")
    assert (again.model, again.vocab_size) == (checkpoint(name).model, checkpoint(name).vocab_size)
    assert_equal_trees(load_parameters(again, make_layout(MeshShape())), loaded(name))
    assert not (tmp_path / "out.tmp").exists()


def test_packed_experts_go_out_unpacked_and_come_back(tmp_path):
    """Bit by bit: bf16 holds every number of MXFP4."""
    name = "gpt_oss_mxfp4"
    save(tmp_path / "out", name, params=load_parameters(checkpoint(name), make_layout(mixed(name))))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    there, back = tensors(REFERENCE / name), tensors(tmp_path / "out")
    packed = {key.rsplit("_", 1)[0] for key in there if key.endswith(("_blocks", "_scales"))}
    unpacked = back.keys() - there.keys()
    assert unpacked == packed and len(packed) == 2 * checkpoint(name).model.num_layers
    for key in back.keys() - packed:
        assert back[key].dtype == there[key].dtype and back[key].tobytes() == there[key].tobytes()
    again = load_parameters(open_checkpoint(tmp_path / "out"), make_layout(MeshShape()))
    assert_equal_trees(again, loaded(name))


def test_a_model_from_scratch_goes_out_as_llama_and_comes_back(tmp_path):
    model = ModelConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, head_size=16)
    specs = parameter_specs(model, 320)
    params = jax.jit(lambda key: init_parameters(specs, key))(jax.random.key(0))
    save(tmp_path / "out", "qwen2_tied", params=params, model=model, source=None)
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert settings["max_position_embeddings"] == 128
    assert settings["eos_token_id"] == 3 and settings["bos_token_id"] is None
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"eos_token_id": 3, "pad_token_id": 0}
    again = open_checkpoint(tmp_path / "out")
    assert again.model == model
    assert_equal_trees(load_parameters(again, make_layout(MeshShape(fsdp=8))), params)
    tokenizers = [
        load_tokenizer(REFERENCE / "qwen2_tied"),
        load_tokenizer(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    ]
    texts = ("<|user|>move 12 of 3\n x|o<|end|>", "h\u00e9llo \u65e5\u672c")
    first, *others = [[t(text)["input_ids"] for text in texts] for t in tokenizers]
    assert all(other == first for other in others)
    assert len({t.chat_template for t in tokenizers}) == 1
    with pytest.raises(ValueError, match="exists already"):
        save(tmp_path / "out", "qwen2_tied")


QWEN2_FROM_SCRATCH = ModelConfig(
    num_layers=1, width=32, num_heads=4, num_kv_heads=2, head_size=16, attention_bias=True
)


def test_a_qwen2_from_scratch_keeps_the_tokenizer_of_its_run(tmp_path, monkeypatch):
    """`AutoTokenizer` has one of its own for every qwen2, if nothing tells it not to."""
    specs = parameter_specs(QWEN2_FROM_SCRATCH, 320)
    params = jax.jit(lambda key: init_parameters(specs, key))(jax.random.key(0))
    given = {"params": params, "model": QWEN2_FROM_SCRATCH, "source": None}
    save(tmp_path / "first", "qwen2_tied", **given)
    # And once more, from what was read of the folder.
    save(tmp_path / "out", "qwen2_tied", **given, tokenizer=load_tokenizer(tmp_path / "first"))
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen2"
    ours, text = load_tokenizer(REFERENCE / "qwen2_tied"), "<|user|>move 12 of 3\n x|o<|end|>"
    ids = ours(text)["input_ids"]
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    for folder in (tmp_path / "first", tmp_path / "out"):
        for trusts in (None, False, True):
            automatic = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
            assert automatic(text)["input_ids"] == ids and automatic.decode(ids) == text
            assert automatic.chat_template == ours.chat_template
            assert automatic.eos_token_id == ours.eos_token_id
    # Which it does not do by itself.
    path = tmp_path / "out/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {}}))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] != ids


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        *(("qwen2", "qwen2"), ("qwen3", "qwen3"), ("llama3", "llama"), ("gemma3", "gemma3")),
        *(("mistral", "mistral"), ("mistral1", "mistral")),
    ],
)
def test_the_tokenizer_of_a_family_is_the_same_one_for_transformers(tokenizer, name, tmp_path):
    """The same ids and text, also as `AutoTokenizer` goes: by the family of config.json."""
    source = TOKENIZERS / tokenizer
    save(tmp_path / "out", name, tokenizer=load_tokenizer(source))
    assert not (tmp_path / "out" / CODE).exists()
    texts = (
        *("Move 1234 of 3\n x|o", "h\u00e9llo e\u0301 \u65e5\u672c \U0001f642", " a  b ", "\u2581"),
        *(
            "<s>[INST] Hi[/INST] So</s>",
            "<|im_start|>user\nHi<|im_end|>\n",
            "<bos>Hi<end_of_turn>\n",
        ),
    )
    first, *others = [
        load_tokenizer(source),
        AutoTokenizer.from_pretrained(source),
        load_tokenizer(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    ]
    assert len({tuple(first(text)["input_ids"]) for text in texts}) == len(texts)
    for other in others:
        for text in texts:
            ids = first(text)["input_ids"]
            assert other(text)["input_ids"] == ids
            assert other.decode(ids) == first.decode(ids)
        assert other.get_vocab() == first.get_vocab()
        assert other.chat_template == first.chat_template
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(other, token) == getattr(first, token)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_from_what_is_written(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    given = checkpoint(name)
    for kind, source in (("with", given), ("without", None)):
        folder = tmp_path / kind
        save(folder, name, dtype="float32", source=source, max_shard_bytes=30_000)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(report.values()), report
        tokens = torch.from_numpy(reference(name)["tokens"]).long()
        with torch.no_grad():
            logits = model(tokens, **given_softcap(name)).logits.numpy()
        np.testing.assert_allclose(logits, reference(name)["logits"], atol=1e-5)
        assert model.generation_config.eos_token_id == 3
