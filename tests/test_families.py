# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `transformers`: computed as it computes them, read by slice, written unchanged.

The folders under tests/reference, with what `transformers` makes of them, are written by
tests/reference/make_reference.py.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from earl_jax.config import make_config
from earl_jax.envs.tokenizer import load_tokenizer
from earl_jax.models import hf_weights
from earl_jax.models.config import ModelConfig, RopeScaling
from earl_jax.models.decoder import forward_chunk, forward_rows, head_weights
from earl_jax.models.families import FAMILIES, family_of, read_settings, write_settings
from earl_jax.models.hf_weights import load_parameters, open_checkpoint, save_checkpoint
from earl_jax.models.kv_cache import empty_cache
from earl_jax.models.logprobs import score_tokens
from earl_jax.models.parameters import (
    init_parameters,
    parameter_shardings,
    parameter_specs,
    unstack_layers,
)
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.world import World

REFERENCE = Path(__file__).parent / "reference"
NAMES = sorted(path.name for path in REFERENCE.iterdir() if (path / "config.json").is_file())
MESHES = [
    MeshShape(data=8),
    MeshShape(fsdp=8),
    MeshShape(tensor=2),
    MeshShape(data=2, fsdp=2, tensor=2),
]
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(REFERENCE / name / "reference.npz") as arrays:
        return dict(arrays)


@functools.cache
def checkpoint(name: str) -> hf_weights.Checkpoint:
    return open_checkpoint(REFERENCE / name)


@functools.cache
def loaded(name: str):
    return load_parameters(checkpoint(name), make_layout(MeshShape()))


@functools.cache
def make_logits(model: ModelConfig):
    layout = make_layout(MeshShape())

    @quick_jit
    def logits(params, tokens_BT):
        hidden_BTD = forward_rows(model, layout, params, tokens_BT, jnp.ones_like(tokens_BT))
        return jnp.einsum("BTD,DV->BTV", hidden_BTD, head_weights(params))

    return logits


@pytest.fixture
def copied(tmp_path):
    """A checkpoint in one file, to be damaged."""
    return Path(shutil.copytree(REFERENCE / "qwen2_tied", tmp_path / "checkpoint"))


def assert_equal_trees(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_every_family_has_a_reference_tied_and_untied():
    found = {(c.settings["model_type"], c.model.tie_embeddings) for c in map(checkpoint, NAMES)}
    assert found == {(name, tied) for name in FAMILIES for tied in (True, False)}
    assert {checkpoint(name).dtype for name in NAMES} == {"float32", "float16", "bfloat16"}
    size = sum(path.stat().st_size for path in REFERENCE.rglob("*") if path.is_file())
    assert size < 1.5e6


# As transformers computes.


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    logits = make_logits(checkpoint(name).model)(loaded(name), reference(name)["tokens"])
    error = np.max(np.abs(logits - reference(name)["logits"]))
    print(f"{name}: largest error of a logit {error:.1e}")
    assert error <= 1e-4
    scaling = checkpoint(name).model.rope_scaling
    assert scaling.factor == 1 or logits.shape[1] > scaling.original_max_position


@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding_with_a_cache_is_that_of_transformers(name):
    model, prompt = checkpoint(name).model, reference(name)["prompt"]
    expected = reference(name)["continuation"]
    params = unstack_layers(loaded(name), model.num_layers)

    @quick_jit
    def decode(params, caches, prompt_BT):
        def one(carry, _):
            token_B, cached_B, caches = carry
            logits_BV, caches = forward_chunk(
                model, params, caches, token_B[:, None], cached_B, jnp.ones(1, jnp.int32)
            )
            token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
            return (token_B, cached_B + 1, caches), token_B

        count_B = jnp.full(1, prompt_BT.shape[1], jnp.int32)
        logits_BV, caches = forward_chunk(
            model, params, caches, prompt_BT, jnp.zeros(1, jnp.int32), count_B
        )
        first_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        _, rest = jax.lax.scan(one, (first_B, count_B, caches), length=len(expected) - 1)
        return jnp.concatenate([first_B, rest[:, 0]])

    found = decode(params, empty_cache(model, 1, len(prompt) + len(expected)), prompt[None])
    assert len(expected) == 64
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_cached_decoding_equals_the_full_forward(name):
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    full = make_logits(model)(loaded(name), tokens)
    params = unstack_layers(loaded(name), model.num_layers)
    chunk = quick_jit(functools.partial(forward_chunk, model))
    caches, size = empty_cache(model, len(tokens), tokens.shape[1]), 6
    for start in range(0, tokens.shape[1], size):
        counts = np.full(len(tokens), size, np.int32)
        logits, caches = chunk(
            params, caches, tokens[:, start : start + size], counts * 0 + start, counts
        )
        np.testing.assert_allclose(logits, full[:, start + size - 1], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_the_family_matters(name):
    """Without it the logits are others: the comparison above would have shown its absence."""
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    changes = {"rope_scaling": RopeScaling(), "attention_bias": False, "query_key_norm": False}
    for field, value in changes.items():
        if getattr(model, field) == value:
            continue
        other = dataclasses.replace(model, **{field: value})
        logits = make_logits(other)(loaded(name), tokens)
        assert np.max(np.abs(logits - reference(name)["logits"])) > 0.1, field


def test_biases_begin_at_zero_and_norms_at_one():
    model = ModelConfig(attention_bias=True, query_key_norm=True)
    params = init_parameters(parameter_specs(model, 64), jax.random.key(0))
    assert params["layers"]["query_bias"].shape == (2, 2, 2, 16)
    for name in ("query_bias", "key_bias", "value_bias"):
        assert not np.any(params["layers"][name])
    for name in ("query_norm", "key_norm"):
        np.testing.assert_array_equal(params["layers"][name], np.ones((2, 16)))
    plain = init_parameters(parameter_specs(ModelConfig(), 64), jax.random.key(0))
    for name, leaf in plain["layers"].items():
        np.testing.assert_array_equal(leaf, params["layers"][name])


# Onto the devices.


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_device_reads_its_slice_and_nothing_else(name, mesh, monkeypatch):
    given = checkpoint(name)
    layout = make_layout(mesh)
    read = []
    kept = hf_weights._Tensors.slice_of

    class Counted:
        def __init__(self, tensor):
            self._tensor = tensor
            self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

        def __getitem__(self, cuts):
            values = self._tensor[cuts]
            read.append((np.prod(self.get_shape()), values.size))
            return values

    monkeypatch.setattr(
        hf_weights._Tensors, "slice_of", lambda self, name: Counted(kept(self, name))
    )
    params = load_parameters(given, layout)
    assert_equal_trees(params, loaded(name))
    specs = parameter_specs(given.model, given.vocab_size)
    shardings = parameter_shardings(specs, layout)
    jax.tree.map(
        lambda leaf, where: pytest.fail() if leaf.sharding != where else 0, params, shardings
    )
    jax.tree.map(lambda leaf: pytest.fail() if leaf.dtype != jnp.float32 else 0, params)
    # Every number is read exactly once, a slice at a time where the tensor is cut.
    assert sum(size for _, size in read) == sum(leaf.size for leaf in jax.tree.leaves(params))
    if mesh.fsdp * mesh.tensor > 1:
        cut = [size / whole for whole, size in read]
        assert min(cut) == pytest.approx(1 / (mesh.fsdp * mesh.tensor))
        assert sum(part < 1 for part in cut) > len(cut) / 2


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_gradients_are_finite_and_equal_on_two_meshes(name):
    given = checkpoint(name)
    tokens = np.tile(reference(name)["tokens"][:, :16], (4, 1))

    def gradients(mesh: MeshShape):
        layout = make_layout(mesh)

        def loss(params):
            hidden = forward_rows(given.model, layout, params, tokens, jnp.ones_like(tokens))
            scores = score_tokens(
                layout,
                hidden[:, :-1],
                head_weights(params),
                tokens[:, 1:],
                temperature=1.0,
                chunk_size=64,
            )
            return -jnp.mean(scores.logprobs)

        return quick_jit(jax.grad(loss))(load_parameters(given, layout))

    alone, mixed = gradients(MeshShape()), gradients(MeshShape(data=2, fsdp=2, tensor=2))

    def check(path, left, right):
        assert np.all(np.isfinite(left)) and np.any(left), path
        np.testing.assert_allclose(left, right, atol=2e-5 * float(np.max(np.abs(left))) + 1e-6)

    jax.tree_util.tree_map_with_path(check, alone, mixed)


# Out again.


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


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_in_and_out_again_is_bitwise_equal(name, tmp_path):
    mixed = load_parameters(checkpoint(name), make_layout(MESHES[-1]))
    save(tmp_path / "out", name, params=mixed, max_shard_bytes=20_000)
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
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_config_written_from_the_model_alone_describes_it(name):
    given = checkpoint(name)
    assert family_of(given.model) is given.family
    assert read_settings(write_settings(given.model, given.vocab_size)) == (
        given.model,
        given.vocab_size,
    )


def test_a_model_from_scratch_goes_out_as_llama_and_comes_back(tmp_path):
    model = ModelConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, head_size=16)
    specs = parameter_specs(model, 320)
    params = init_parameters(specs, jax.random.key(0))
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


def test_layers_of_no_known_family_cannot_be_written():
    with pytest.raises(ValueError, match="attention_bias=True.*qwen2 has attention_bias=True"):
        family_of(ModelConfig(attention_bias=True, query_key_norm=True))


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_from_what_is_written(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    given = checkpoint(name)
    for kind, source in (("with", given), ("without", None)):
        folder = tmp_path / kind
        save(folder, name, dtype="float32", source=source, max_shard_bytes=30_000)
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(told.values()), told
        tokens = torch.from_numpy(reference(name)["tokens"]).long()
        with torch.no_grad():
            logits = model(tokens).logits.numpy()
        np.testing.assert_allclose(logits, reference(name)["logits"], atol=1e-5)
        assert model.generation_config.eos_token_id == 3


# In a run.


def with_path(name: str) -> dict:
    return {"model": {"path": str(REFERENCE / name)}}


def test_a_world_is_the_model_of_the_path():
    world = World(make_config(with_path("qwen2_tied"), ["model.compute_dtype=bfloat16"]))
    read = checkpoint("qwen2_tied")
    assert world.model == dataclasses.replace(read.model, compute_dtype="bfloat16")
    assert world.model.path == "" and world.vocab_size == 320
    assert world.renderer.end_of_turn_id == 3
    first, measured = (
        make(world.train_candidates[-1])
        for make in (world.first_train_state, world.init_train_state)
    )
    assert_equal_trees(first.params, loaded("qwen2_tied"))
    shardings = world.train_state_shardings(world.train_candidates[-1])
    for state in (first, measured):
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
        assert int(state.updates) == 0
    assert_equal_trees(first.optimizer, measured.optimizer)
    # Measurements need no reading: theirs are random weights.
    assert not np.array_equal(first.params["embed"], measured.params["embed"])


def test_a_model_without_tokenizer_or_of_too_few_tokens_is_an_error(copied):
    with pytest.raises(ValueError, match=r"qwen3.* holds no tokenizer"):
        World(make_config(with_path("qwen3")))
    change_config(copied, vocab_size=256)
    with pytest.raises(ValueError, match="tokenizer has 299 entries, but whose model has 256"):
        World(make_config({"model": {"path": str(copied)}}))


@pytest.mark.parametrize(
    "override, words",
    [
        ("model.width=32", "config.model.width = 32 has no effect.*config.model.path gives"),
        ("model.rope_scaling.factor=8.0", "config.model.rope_scaling = .*no effect"),
        ("model.attention_bias=True", "config.model.attention_bias = True has no effect"),
        ("model.rope_scaling.factr=8.0", "config.model.rope_scaling.factr .* 'factor'"),
    ],
)
def test_sizes_beside_a_path_are_errors(override, words):
    with pytest.raises(ValueError, match=words):
        make_config(with_path("qwen2_tied"), [override])


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["model.rope_scaling.low_freq_factor=2.0"], "no effect.*rope_scaling.factor is 1"),
        (["model.rope_scaling.factor=0.5"], "config.model.rope_scaling.factor is 0.5"),
        (
            ["model.rope_scaling.factor=8", "model.rope_scaling.high_freq_factor=1"],
            "rope_scaling.high_freq_factor is 1.0",
        ),
        (
            ["model.rope_scaling.factor=8", "model.rope_scaling.original_max_position=0"],
            "original_max_position is 0",
        ),
        (["model.attention_bias=True", "checkpoint.export=True"], "config.checkpoint.export is"),
    ],
)
def test_settings_of_a_model_from_scratch_have_rules(overrides, words):
    with pytest.raises(ValueError, match=words):
        make_config({}, overrides)


# What is wrong is said.


def change_config(folder: Path, **changed):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .*'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters .*'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": 3}, "num_heads is 3"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_computed_wrongly_is_refused(copied, changed, words):
    change_config(copied, **changed)
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        open_checkpoint(copied)


def test_older_files_spell_the_rotary_settings_otherwise():
    settings = dict(checkpoint("llama").settings)
    rope = dict(settings.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    older = settings | {"rope_theta": theta, "rope_scaling": rope}
    assert read_settings(older) == read_settings(checkpoint("llama").settings)
    assert read_settings(settings | {"rope_theta": 5e5})[0].rope_theta == 5e5


def test_no_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="config.json cannot be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        open_checkpoint(tmp_path)


def load(folder: Path):
    return load_parameters(open_checkpoint(folder), make_layout(MeshShape()))


def test_a_folder_without_weights_is_an_error(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index"):
        load(copied)


def test_a_truncated_file_is_an_error(copied, tmp_path):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read from .*/model.safetensors"):
        load(copied)
    several = Path(shutil.copytree(REFERENCE / "qwen3", tmp_path / "several"))
    file = several / "model-00002-of-00004.safetensors"
    name = sorted(load_file(file))[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"model.* cannot be read from .*/{file.name}") as found:
        load(several)
    index = json.loads((several / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[str(found.value).split()[0]] == index[name] == file.name
    file.unlink()
    with pytest.raises(ValueError, match=f"cannot be read from .*/{file.name}"):
        load(several)


def change_tensors(folder: Path, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(BIAS), f"{BIAS} is missing; it is not in model.safetensors"),
        (lambda t: t.update({BIAS: t[BIAS][:-1]}), rf"{BIAS} in .* has the shape \(15,\).*\(16,\)"),
        (lambda t: t.update({BIAS: t[BIAS].astype(np.float64)}), f"{BIAS} in .* of type F64"),
        (lambda t: t.update({"model.extra.weight": t[BIAS]}), "model.extra.weight in .*not part"),
    ],
    ids=["missing", "shape", "type", "extra"],
)
def test_tensors_that_do_not_fit_are_errors(copied, change, words):
    change_tensors(copied, change)
    with pytest.raises(ValueError, match=words):
        load(copied)


def test_leftovers_of_older_files_are_passed_over(copied):
    def add(found):
        found["lm_head.weight"] = found["model.embed_tokens.weight"].copy()
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    change_tensors(copied, add)
    assert_equal_trees(load(copied), loaded("qwen2_tied"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_come_in_as_they_are_stored(copied, dtype):
    def convert(found):
        found.update({key: array.astype(dtype) for key, array in found.items()})

    change_tensors(copied, convert)
    expected = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), loaded("qwen2_tied")
    )
    assert_equal_trees(jax.tree.map(np.asarray, load(copied)), expected)
