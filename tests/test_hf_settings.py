# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""config.json: read in all spellings, refused where it would be computed wrongly, written back."""

import dataclasses
import math

import pytest

from earl_jax.models.checkpoints.families.table import family_of
from earl_jax.models.checkpoints.hf_read import open_checkpoint
from earl_jax.models.checkpoints.hf_settings import read_settings, write_settings
from earl_jax.models.config import ModelConfig, RopeScaling
from earl_jax.models.presets import PRESETS
from tests.support.references import NAMES, change_config, checkpoint
from tests.support.settings import make_config


@pytest.mark.parametrize("name", NAMES)
def test_a_config_written_from_the_model_alone_describes_it(name):
    given = checkpoint(name)
    # The layers of a mixture of Qwen3.5 are those of Qwen3-Next, which it is without a source.
    assert family_of(given.model) is given.family or name.startswith("qwen3_5_moe")
    assert read_settings(write_settings(given.model, given.vocab_size)) == (
        given.model,
        given.vocab_size,
    )


def test_layers_of_no_known_family_cannot_be_written():
    with pytest.raises(ValueError, match="attention_bias=True.*qwen2 has attention_bias=True"):
        family_of(ModelConfig(attention_bias=True, query_key_norm="head"))
    # `transformers` reads no Llama of such sizes, but a Qwen.
    odd = ModelConfig(width=100, num_heads=3, num_kv_heads=1)
    with pytest.raises(ValueError, match="width=100 is no multiple of num_heads=3.*LlamaFor"):
        family_of(odd)
    assert family_of(dataclasses.replace(odd, query_key_norm="head")).architecture.startswith(
        "Qwen3"
    )


def test_how_a_family_computes_is_no_setting():
    for name in ("rope_scaling.factor=8", "post_norms=True", "activation=relu", "attention_bias=1"):
        with pytest.raises(ValueError, match=f"config.model.{name[:7]}.* is no setting.*preset"):
            make_config({}, [f"model.{name}"])


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'.*llama, mistral, .*, gemma3_text"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3', which reads images.*gemma3_text"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention.*sliding_w"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types has chunked_atte"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* the 2 layers"),
        (
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
            "sliding_window is None",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling .*'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters .*'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": None}}, "parameters.factor is None"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}},
            "rope_parameters.truncate is 'no'; it must be true or false",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.3}},
            "attention_factor is 1.3 with a factor of 1",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is .* each layer"),
        (
            {"model_type": "smollm3", "no_rope_layers": [0, 1]},
            "no_rope_layers is .*only every n-th layer",
        ),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling.factor is 'x'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta is None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "for all layers at once"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta is None; it must be a number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be a number"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None; it must be true or false"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None}
            | {"layer_types": None},
            "max_window_layers is None; it must be a whole number of at least 0",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .*; only None can be read"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config .*; only None"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config .*; only the quant_method 'mxfp4' can be read",
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit is 5.0; only 7.0"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias is False; only True"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": 3}, "num_heads is 3"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "gemma3_text", "hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention is True",
        ),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"] * 2, "sliding_window": 8},
            "layer_types has full_attention; only sliding_attention",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_settings_are_refused(copied, changed, words):
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


GEMMA3_1B = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262_144,
}


def test_older_files_of_gemma_give_a_pattern_and_a_base_for_local_layers():
    model, vocab_size = read_settings(GEMMA3_1B)
    assert vocab_size == 262_144
    assert model.windows == (512, 512, 512, 512, 512, 0) and model.tie_embeddings
    assert model.layer_windows[5::6] == (0,) * 4 and model.layer_windows.count(512) == 22
    assert (model.rope_theta, model.window_rope_theta) == (1e6, 1e4)
    stretched = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    longer, _ = read_settings(GEMMA3_1B | stretched)
    assert longer.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert longer.window_rope_theta == 1e4
    # What a key left out means is as in transformers.
    few = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sparse = {key: GEMMA3_1B[key] for key in (*few, "num_hidden_layers")}
    assert read_settings(sparse)[0] == dataclasses.replace(
        model, num_kv_heads=4, windows=(4096, 4096, 4096, 4096, 4096, 0)
    )


def test_rotary_settings_that_gemma_reads_otherwise_are_refused():
    newer = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    model, _ = read_settings(GEMMA3_1B | {"rope_parameters": newer})
    assert (model.rope_theta, model.window_rope_theta) == (5e5, 2e4)
    both = {"rope_parameters": newer, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    with pytest.raises(ValueError, match="rope_scaling and rope_parameters are both there"):
        read_settings(GEMMA3_1B | both)
    with pytest.raises(ValueError, match="rope_parameters is .* for each layer type"):
        read_settings(GEMMA3_1B | {"rope_parameters": {"rope_theta": 5e5}})


GPT_OSS_20B = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}


def test_gpt_oss_is_read_as_openai_publishes_it():
    assert read_settings(GPT_OSS_20B) == (PRESETS["gpt-oss-20b"], 201_088)
    # What a key left out means is as in transformers.
    left_out = ("head_dim", "layer_types", "num_key_value_heads", "rms_norm_eps", "rope_scaling")
    left_out += ("rope_theta", "sliding_window", "swiglu_limit", "attention_bias")
    sparse = {key: value for key, value in GPT_OSS_20B.items() if key not in left_out}
    for rope in ({}, {"rope_parameters": None}):
        assert read_settings(sparse | rope) == (PRESETS["gpt-oss-20b"], 201_088)
    # Layers of both kinds may come in any order.
    kinds = ["full_attention"] * 12 + ["sliding_attention"] * 12
    assert read_settings(GPT_OSS_20B | {"layer_types": kinds})[0].windows == (0,) * 12 + (128,) * 12


QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def test_yarn_is_read_as_qwen_and_olmo_publish_it():
    settings = dict(checkpoint("qwen2").settings)
    del settings["rope_parameters"]
    model, _ = read_settings(settings | {"rope_theta": 1e6, "rope_scaling": QWEN_YARN})
    assert (model.rope_theta, model.rope_scaling) == (
        1e6,
        RopeScaling(
            kind="yarn",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=32.0,
            original_max_position=32_768,
        ),
    )
    assert model.rope_scaling.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    scales = {"mscale": 2.0, "mscale_all_dim": 1.0, "beta_fast": 16, "attention_factor": None}
    scaling = read_settings(settings | {"rope_scaling": QWEN_YARN | scales})[0].rope_scaling
    assert scaling.high_freq_factor == 16
    assert scaling.magnitude == pytest.approx((1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4)))
    # OLMo 3 in its older spelling: layers with a window have the same base, not stretched.
    settings = dict(checkpoint("olmo3").settings) | {"rope_theta": 500_000}
    del settings["rope_parameters"]
    scaling = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836}
    longest = {"original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0}
    model, _ = read_settings(settings | {"rope_scaling": scaling | longest})
    assert (model.rope_theta, model.window_rope_theta) == (5e5, 5e5)
    assert model.rope_scaling.magnitude == pytest.approx(1 + 0.1 * math.log(8))
    assert model.windows == (16, 16, 16, 0)
    plain, _ = read_settings(settings)
    assert (plain.rope_scaling.factor, plain.window_rope_theta) == (1, 0)


def test_llama3_stretches_from_the_longest_context_where_no_other_is_given():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings = {**checkpoint("llama").settings, "max_position_embeddings": 4096}
    scaling = read_settings(settings | {"rope_parameters": rope})[0].rope_scaling
    assert scaling.original_max_position == 4096


def test_local_layers_that_are_stretched_otherwise_are_refused():
    ropes = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    same = {"full_attention": ropes, "sliding_attention": ropes}
    assert read_settings(GEMMA3_1B | {"rope_parameters": same})[0].window_rope_theta == 0
    other = same | {"sliding_attention": ropes | {"factor": 2.0}}
    with pytest.raises(ValueError, match="rope_parameters.sliding_attention is .*stretched only"):
        read_settings(GEMMA3_1B | {"rope_parameters": other})


@pytest.mark.parametrize(
    "changed, windows",
    [
        ({"sliding_window": 64}, ()),
        ({"use_sliding_window": True, "sliding_window": 64}, ()),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64,)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (0, 64)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, ()),
        ({"model_type": "mistral", "sliding_window": 64}, (64,)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, (4096,)),
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}, (8, 0)),
    ],
)
def test_windows_are_where_each_family_has_them(changed, windows):
    plain = {k: v for k, v in checkpoint("qwen2_tied").settings.items() if "hidden_act" not in k}
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        plain.pop(key)
    plain["rope_parameters"] = None
    model, vocab_size = read_settings(plain | changed)
    assert model.windows == windows
    assert read_settings(write_settings(model, vocab_size))[0] == model


def test_no_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="config.json cannot be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        open_checkpoint(tmp_path)
