# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Presets: the sizes of published models, as defaults of the model section."""

import dataclasses
import json

import numpy as np
import pytest

from earl_jax.models.checkpoints.families.table import family_of
from earl_jax.models.checkpoints.hf_settings import read_settings, write_settings
from earl_jax.models.parameters import num_parameters, parameter_specs
from earl_jax.models.presets import PRESETS, preset_vocab_size
from earl_jax.run.build import build_run
from tests.support.placements import one_step
from tests.support.settings import make_config

# Vocabulary and number of parameters of the published checkpoints (Gemma 3 without its images).
PUBLISHED = {
    "qwen2.5-0.5b": (151_936, 494_032_768),
    "qwen2.5-1.5b": (151_936, 1_543_714_304),
    "qwen2.5-3b": (151_936, 3_085_938_688),
    "qwen2.5-7b": (152_064, 7_615_616_512),
    "qwen2.5-14b": (152_064, 14_770_033_664),
    "qwen2.5-32b": (152_064, 32_763_876_352),
    "qwen2.5-72b": (152_064, 72_706_203_648),
    "qwen3-0.6b": (151_936, 596_049_920),
    "qwen3-1.7b": (151_936, 1_720_574_976),
    "qwen3-4b": (151_936, 4_022_468_096),
    "qwen3-8b": (151_936, 8_190_735_360),
    "qwen3-14b": (151_936, 14_768_307_200),
    "qwen3-32b": (151_936, 32_762_123_264),
    "qwen3-30b-a3b": (151_936, 30_532_122_624),
    "qwen3-235b-a22b": (151_936, 235_093_634_560),
    # Without layers for multi-token prediction.
    "qwen3-next-80b-a3b": (151_936, 79_674_391_296),
    # Without images too.
    "qwen3.5-0.8b": (248_320, 752_393_024),
    "qwen3.5-4b": (248_320, 4_205_751_296),
    "qwen3.5-9b": (248_320, 8_953_803_264),
    "qwen3.5-27b": (248_320, 26_895_998_464),
    "qwen3.5-35b-a3b": (248_320, 34_660_610_688),
    "qwen3.5-122b-a10b": (248_320, 122_111_526_912),
    "qwen3.5-397b-a17b": (248_320, 396_346_350_336),
    "llama3.2-1b": (128_256, 1_235_814_400),
    "llama3.2-3b": (128_256, 3_212_749_824),
    "llama3.1-8b": (128_256, 8_030_261_248),
    "llama3.1-70b": (128_256, 70_553_706_496),
    "mistral-7b": (32_000, 7_241_732_096),
    "mixtral-8x7b": (32_000, 46_702_792_704),
    "olmo3-7b": (100_278, 7_298_011_136),
    "olmo3-32b": (100_278, 32_233_522_176),
    "smollm3-3b": (128_256, 3_075_098_624),
    "olmoe-1b-7b": (50_304, 6_919_161_856),
    "gpt-oss-20b": (201_088, 20_914_757_184),
    "gpt-oss-120b": (201_088, 116_829_156_672),
    # Without layers for multi-token prediction.
    "deepseek-v2-lite": (102_400, 15_706_484_224),
    "deepseek-v2": (102_400, 235_741_434_880),
    "deepseek-v3": (129_280, 671_026_419_200),
    "moonlight-16b-a3b": (163_840, 15_960_110_208),
    "kimi-k2": (163_840, 1_026_408_232_448),
    "gemma2-2b": (256_000, 2_614_341_888),
    "gemma2-9b": (256_000, 9_241_705_984),
    "gemma2-27b": (256_000, 27_227_128_320),
    "gemma3-1b": (262_144, 999_885_952),
    "gemma3-4b": (262_208, 3_880_263_168),
    "gemma3-12b": (262_208, 11_766_034_176),
    "gemma3-27b": (262_208, 27_009_346_304),
}
ARCHITECTURES = {
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "qwen3-235b-a22b": "Qwen3MoeForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    # The layers of a mixture of Qwen3.5 are those of Qwen3-Next.
    "qwen3.5-35b-a3b": "Qwen3NextForCausalLM",
    "qwen3.5-122b-a10b": "Qwen3NextForCausalLM",
    "qwen3.5-397b-a17b": "Qwen3NextForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek-v2": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "moonlight": "DeepseekV3ForCausalLM",
    "kimi": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def model(*overrides: str, **section):
    return make_config({"model": section}, overrides).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_of_its_family_and_of_the_published_size(name):
    vocab_size, published = PUBLISHED[name]
    given = PRESETS[name]
    assert preset_vocab_size(name) == vocab_size
    assert num_parameters(parameter_specs(given, vocab_size)) == published
    start = next(start for start in ARCHITECTURES if name.startswith(start))
    assert family_of(given).architecture == ARCHITECTURES[start]
    assert read_settings(write_settings(given, vocab_size)) == (given, vocab_size)


def test_a_mixture_is_named_by_what_it_stores_and_what_a_token_uses():
    given = ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37.5)
    for name, billions in given:
        used = dataclasses.replace(PRESETS[name], num_experts=PRESETS[name].experts_per_token)
        count = num_parameters(parameter_specs(used, PUBLISHED[name][0]))
        assert count / 1e9 == pytest.approx(billions, rel=0.02)


SMALL = {"num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
# Eight groups of experts, in the layers behind three that have none. The sizes of latents, of what
# experts share, and of a head that has rotated numbers of its own, stay the family's.
LATENTS = {**EXPERTS, "num_experts": 16, "ffn_size": 64, "num_layers": 4}
LATENTS |= {"num_kv_heads": 4, "head_size": 192}
# Every fourth layer attends.
LINEAR = {"num_layers": 4, "head_size": 256}
# One of each family, and what beside the sizes has to shrink for a model of its kind to be left.
SHRUNK = {
    "qwen2.5-0.5b": {"ffn_size": 64},
    "qwen3-0.6b": {"ffn_size": 64},
    "qwen3-30b-a3b": EXPERTS,
    "qwen3-next-80b-a3b": {**LINEAR, **EXPERTS},
    "qwen3.5-0.8b": {**LINEAR, "ffn_size": 64},
    "llama3.2-1b": {"ffn_size": 64},
    "mistral-7b": {"ffn_size": 64},
    "mixtral-8x7b": EXPERTS,
    "olmo3-7b": {"ffn_size": 64},
    "olmoe-1b-7b": EXPERTS,
    "gpt-oss-20b": EXPERTS,
    "deepseek-v2-lite": LATENTS,
    "deepseek-v3": LATENTS,
    "gemma2-2b": {"ffn_size": 64},
    "smollm3-3b": {"ffn_size": 64},
    "gemma3-1b": {"ffn_size": 64},
}


@pytest.mark.parametrize("name", SHRUNK)
def test_a_preset_at_a_small_size_is_of_its_family(name):
    small = model(**SMALL | SHRUNK[name], preset=name)
    assert family_of(small) is family_of(PRESETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3-next-80b-a3b"])
def test_a_preset_trains_from_scratch_on_a_mixed_mesh(preset):
    """One RL step of a preset at a small size: what samples is what is trained.

    test_families.py samples with every family on a mesh, and has gradients of each.
    """
    sections = {
        "model": {**SMALL, **SHRUNK[preset], "preset": preset},
        "rollout": {"num_slots": 8, "episodes_per_step": 16},
        "selector": {
            "rollout_meshes": ("data=4,tensor=2",),
            "train_meshes": ("data=2,fsdp=2,tensor=2",),
            "table": "model",
        },
    }
    world = build_run(make_config(sections))
    record = one_step(world)
    assert all(np.isfinite(update["loss"]) and update["grad_norm"] > 0 for update in record.updates)
    assert record.updates[0]["logprob_mismatch_max"] <= 1e-4


def test_settings_beside_a_preset_override_it():
    small = model("model.num_layers=7", preset="gemma3-4b", width=64)
    assert (small.num_layers, small.width, small.head_size) == (7, 64, 256)
    assert small.layer_windows == (1024,) * 5 + (0, 1024) and small.post_norms


def test_a_written_config_with_a_preset_is_read_as_the_same():
    config = make_config({"model": {"preset": "gemma3-1b", "num_layers": 3}})
    assert config.model.preset == "gemma3-1b"
    assert make_config(json.loads(json.dumps(config.as_dict()))).as_dict() == config.as_dict()


@pytest.mark.parametrize(
    "section, words",
    [
        ({"preset": "qwen2.5-8b"}, "config.model.preset is 'qwen2.5-8b'.*did you mean qwen2.5-"),
        ({"preset": "Gemma3-1B"}, "did you mean gemma3-1b"),
        ({"preset": "zzz"}, "'zzz', which is not known; choose one of qwen2.5-0.5b, .*gemma3-27b"),
        ({"preset": 7}, "config.model.preset is 7, a int"),
        ({"preset": "qwen3-8b", "path": "there"}, "config.model.path is 'there'.*remove one of"),
        ({"preset": "qwen3-8b", "num_head": 4}, "config.model.num_head is not.*'num_heads'"),
        ({"preset": "qwen3-8b", "num_kv_heads": 3}, "config.model.num_heads is 32, not a multiple"),
        ({"preset": "qwen3-8b", "rope_scaling": 3}, "config.model.rope_scaling is no setting"),
        ({"latent_size": 12}, "config.model.latent_size is no setting: .* Name a preset"),
        (
            {"preset": "deepseek-v3", "head_size": 8},
            "rope_size is 64.* than config.model.head_size",
        ),
        (
            {"preset": "qwen3.5-0.8b", "num_layers": 2},
            "every is 4.* divide config.model.num_layers",
        ),
    ],
)
def test_mistakes_are_errors(section, words):
    with pytest.raises(ValueError, match=words):
        model(**section)
