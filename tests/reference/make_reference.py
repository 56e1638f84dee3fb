# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the folders beside it: small random models, and what `transformers` computes with them.

    PYTHONPATH=. uv run --with torch python tests/reference/make_reference.py [NAME ...]

Each folder is a checkpoint as `save_pretrained` writes it, and `reference.npz`: `tokens` i32[2, 48]
with their `logits` f32[2, 48, V], and `prompt` i32[8] with its greedy `continuation` i32[64]. All
in fp32 arithmetic, from the weights as they are stored. Made with transformers 5.23.0 and torch
2.13.0 (gemma2, mixtral, olmo*, smollm3: 2.15.0) on CPU, 2026-11; gpt_oss_mxfp4 needs accelerate
1.15.0 too (`--with accelerate`). Beside them mxfp4.npz. `transformers` reads Gemma 3's
attn_logit_softcapping and computes nothing with it; here its own attention is told to.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from earl_jax.config.config import Config
from earl_jax.envs.text.tokenizer import build_tokenizer

HERE = Path(__file__).parent
LENGTH, PROMPT, CONTINUATION = 48, 8, 64
# Between the likeliest token and the next, wherever greedy decoding must agree: 100 times the
# difference that the tests allow in a logit.
MARGIN = 1e-2

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
# Of 72 positions 40 lie past original_max_position; waves are kept, stretched and between the two.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Of the four pairs one is kept, one is divided, and two are between them.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
THETA = {"rope_type": "default", "rope_theta": 1_000_000.0}
# A third of the tokens, and less than a quarter of the prompt with its continuation.
WINDOW = 16
GEMMA3 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

OLMO3 = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": YARN | {"attention_factor": 1.2},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
SMOLLM3 = {"num_hidden_layers": 3, "no_rope_layer_interval": 2}
# One wave is kept, and one divided; the bounds of both are no whole numbers.
GPT_OSS = {
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 4,
    "sliding_window": WINDOW,
    "rope_parameters": YARN | {"truncate": False},
}
# The first layer is dense. Heads have 16 numbers from the latent and 8 that rotate; values have 12.
DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}

# Half of a head rotates. Values of linear attention are longer than keys, two heads of them to one.
# Their results are normalised, small ones too, which takes rounding along.
LINEAR = {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": THETA | {"partial_rotary_factor": 0.5},
}
# Layers of both kinds by turns; and a convolution over two tokens.
BY_TURNS = LINEAR | {"full_attention_interval": 2, "linear_conv_kernel_dim": 2}
SHARED = {"shared_expert_intermediate_size": 24}

TIED = {"tie_word_embeddings": True}

MODELS: dict[str, PreTrainedConfig] = {
    # As large a vocabulary as the tokenizer needs: whole runs begin with this one.
    "qwen2_tied": Qwen2Config(**SIZES | {"vocab_size": 320}, **TIED, rope_parameters=THETA),
    "qwen2": Qwen2Config(**SIZES, rms_norm_eps=1e-5),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, rope_parameters=THETA),
    "qwen3_tied": Qwen3Config(**SIZES, head_dim=8, **TIED),
    # The weights of the chosen experts add up to 1, and to less.
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, rope_parameters=THETA),
    "qwen3_moe_tied": Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 1}, **EXPERTS, norm_topk_prob=False, **TIED
    ),
    "llama": LlamaConfig(**SIZES | {"num_hidden_layers": 3}, rope_parameters=LLAMA3),
    "llama_tied": LlamaConfig(**SIZES, head_dim=16, **TIED, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mistral_tied": MistralConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, **TIED, rope_parameters=THETA
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, rope_parameters=THETA),
    "mixtral_tied": MixtralConfig(
        **SIZES | {"num_hidden_layers": 1},
        num_local_experts=4,
        num_experts_per_tok=3,
        sliding_window=WINDOW,
        **TIED,
    ),
    "olmo2": Olmo2Config(**SIZES, rope_parameters=YARN),
    "olmo2_tied": Olmo2Config(**SIZES, **TIED),
    "olmo3": Olmo3Config(**SIZES | OLMO3),
    "olmo3_tied": Olmo3Config(**SIZES | OLMO3, **TIED),
    "gpt_oss": GptOssConfig(**SIZES | GPT_OSS, num_experts_per_tok=3),
    "gpt_oss_tied": GptOssConfig(**SIZES | GPT_OSS, num_experts_per_tok=2, **TIED),
    # As openai publishes it.
    "gpt_oss_mxfp4": GptOssConfig(**SIZES | GPT_OSS, num_experts_per_tok=2),
    # Queries from a latent, and groups of experts, by their best one and by their best two.
    "deepseek_v2": DeepseekV2Config(
        **SIZES | DEEPSEEK,
        q_lora_rank=20,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 0.9, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2_tied": DeepseekV2Config(
        **SIZES | DEEPSEEK | {"num_hidden_layers": 2, "first_k_dense_replace": 0},
        q_lora_rank=None,
        n_shared_experts=1,
        **TIED,
        rope_parameters=THETA,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | DEEPSEEK,
        q_lora_rank=20,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        rms_norm_eps=1e-5,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3_tied": DeepseekV3Config(
        **SIZES | DEEPSEEK | {"num_hidden_layers": 2},
        q_lora_rank=None,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        **TIED,
        rope_parameters=THETA,
    ),
    "qwen3_next": Qwen3NextConfig(**SIZES | EXPERTS | LINEAR | SHARED),
    "qwen3_next_tied": Qwen3NextConfig(
        **SIZES | EXPERTS | BY_TURNS | SHARED, norm_topk_prob=False, **TIED
    ),
    "qwen3_5": Qwen3_5TextConfig(**SIZES | BY_TURNS),
    "qwen3_5_tied": Qwen3_5TextConfig(**SIZES | LINEAR, **TIED),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES | EXPERTS | BY_TURNS | SHARED),
    "qwen3_5_moe_tied": Qwen3_5MoeTextConfig(**SIZES | EXPERTS | LINEAR | SHARED, **TIED),
    "smollm3": SmolLM3Config(**SIZES | SMOLLM3, tie_word_embeddings=False, rope_parameters=YARN),
    "smollm3_tied": SmolLM3Config(**SIZES | SMOLLM3),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=3, norm_topk_prob=True),
    "olmoe_tied": OlmoeConfig(
        **SIZES | {"num_hidden_layers": 1}, num_experts=4, num_experts_per_tok=2, **TIED
    ),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=2.0,
    ),
    "gemma2_tied": Gemma2Config(
        **SIZES, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
    "qwen2_window": Qwen2Config(
        **SIZES | {"num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES | GEMMA3,
        tie_word_embeddings=False,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=2.0,
    ),
    "gemma3_tied": Gemma3TextConfig(**SIZES | GEMMA3, query_pre_attn_scalar=16),
}
# Of the stored weights; the others are in fp32.
BF16 = """
    qwen3 qwen3_moe llama_tied mistral_tied mixtral olmo2_tied olmo3_tied gpt_oss_tied
    gpt_oss_mxfp4 deepseek_v2_tied deepseek_v3 qwen3_next qwen3_5_tied qwen3_5_moe smollm3_tied
    olmoe_tied gemma2_tied gemma3_tied
""".split()
DTYPES = {"qwen2": torch.float16} | dict.fromkeys(BF16, torch.bfloat16)
# The largest file, where there are several.
FILES = {
    "qwen3": "20KB",
    "qwen3_moe": "40KB",
    "gpt_oss": "40KB",
    "deepseek_v3": "40KB",
    "qwen3_next": "40KB",
}


def make_model(config: PreTrainedConfig, seed: int) -> torch.nn.Module:
    """Weights large enough, biases and norms far enough from their defaults, to matter."""
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gemma = config.model_type.startswith("gemma")
            # Norms that multiply by 1 + w.
            linear = hasattr(config, "linear_num_key_heads")
            from_one = gemma or (linear and "linear" not in name)
            # Large scaled embeddings, tied, would repeat one token for ever.
            size = 0.15 if gemma and "embed" in name else 0.2 if linear else 0.3
            # Of gpt-oss some are clamped.
            size = 1.0 if "gate_up_proj" in name and config.model_type == "gpt_oss" else size
            parameter.copy_(size * noise + ("norm" in name and not from_one))
        for buffer in corrections(model):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def corrections(model: torch.nn.Module) -> list[torch.Tensor]:
    """The corrections of routers, which are no parameters."""
    buffers = model.named_buffers()
    return [buffer for name, buffer in buffers if name.endswith("e_score_correction_bias")]


def pack_experts(folder: Path, seed: int) -> None:
    """Puts random packed numbers in the place of the experts' weights."""
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(seed)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups, least = (experts, outputs, inputs // 32), 122 + 2 * ("gate_up" in name)
        blocks = random.integers(0, 256, (*groups, 16), np.uint8)
        scales = random.integers(least, least + 3, groups, np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(scales)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def unpack() -> dict[str, np.ndarray]:
    """The arrays of mxfp4.npz: every byte and exponents from end to end, and their numbers."""
    blocks = np.arange(256, dtype=np.uint8).reshape(2, 4, 2, 16)
    scales = np.array([0, 1, 2, 63, 120, 126, 127, 128, 129, 130, 140, 190, 200, 250, 251, 252])
    scales = scales.astype(np.uint8).reshape(2, 4, 2)
    given = torch.from_numpy(blocks), torch.from_numpy(scales)
    values = convert_moe_packed_tensors(*given, dtype=torch.float32).numpy()
    return {"blocks": blocks, "scales": scales, "values": values}


@torch.no_grad()
def compute(folder: Path, vocab_size: int) -> tuple[dict[str, np.ndarray], float]:
    """The arrays of reference.npz, and the smallest margin of the greedy choices."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    capped = {} if softcap is None or model.config.model_type == "gemma2" else {"softcap": softcap}
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, LENGTH))
    logits = model(torch.from_numpy(tokens), **capped).logits.numpy()
    ids, margins = torch.from_numpy(tokens[:1, :PROMPT]), []
    for _ in range(CONTINUATION):
        best = model(ids, **capped).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[None, :1]], dim=1)
    found = {
        "tokens": tokens.astype(np.int32),
        "logits": logits.astype(np.float32),
        "prompt": ids[0, :PROMPT].numpy().astype(np.int32),
        "continuation": ids[0, PROMPT:].numpy().astype(np.int32),
    }
    return found, min(margins)


def main() -> None:
    """Writes all folders, or those named; the first seed with clear, varied choices is taken."""
    tokenizer = build_tokenizer(Config().corpus(), 4096)
    np.savez_compressed(HERE / "mxfp4.npz", **unpack())
    for name in sys.argv[1:] or MODELS:
        config, dtype = MODELS[name], DTYPES.get(name, torch.float32)
        folder = HERE / name
        for seed in range(1000):
            shutil.rmtree(folder, ignore_errors=True)
            model = make_model(config, seed).to(dtype)
            for buffer in corrections(model):
                # As `transformers` keeps it.
                buffer.data = buffer.data.float()
            for part, parameter in model.named_parameters():
                # As Qwen3.5 has them, so that no decay is rounded.
                if part.endswith(("A_log", "dt_bias")):
                    parameter.data = parameter.data.float()
            model.save_pretrained(folder, max_shard_size=FILES.get(name, "1GB"))
            if name.endswith("_mxfp4"):
                pack_experts(folder, seed)
            arrays, margin = compute(folder, config.vocab_size)
            varied = len(set(arrays["continuation"].tolist()))
            if margin > MARGIN and varied >= 8:
                break
        np.savez_compressed(folder / "reference.npz", **arrays)
        if config.vocab_size >= len(tokenizer):
            tokenizer.save_pretrained(folder)
        print(f"{name}: seed {seed}, margin {margin:.3f}, {varied} different tokens")


if __name__ == "__main__":
    main()
