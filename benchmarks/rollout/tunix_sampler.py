# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tunix's sampler in a process and an environment of its own: JAX, on one CPU device.

Argument: the checkpoint's folder. Imports nothing of earl_jax.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from answering import answer_generation
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2.params import create_model_from_safe_tensors


class Ids:
    """A tokenizer that costs nothing: texts are ids, written as numbers."""

    def __init__(self, vocab_size: int):
        # What marks padding is looked for in prompt and reply; no id is taken for it.
        self._pad_id = vocab_size

    def encode(self, text: str) -> list[int]:
        """Returns the numbers."""
        return list(map(int, text.split()))

    def decode(self, ids: list[int]) -> str:
        """Returns an empty text."""
        return ""

    def bos_id(self) -> int:
        """0: none."""
        return 0

    def eos_id(self) -> int:
        """No id that is sampled."""
        return self._pad_id

    def pad_id(self) -> int:
        """No id that is sampled."""
        return self._pad_id


def model_config(folder: str) -> qwen2.ModelConfig:
    """Returns Tunix's settings of the checkpoint's model."""
    hf = json.loads((Path(folder) / "config.json").read_text())
    return qwen2.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["hidden_size"] // hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=hf["rope_parameters"]["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
        dtype=jnp.float32,
    )


class Generator:
    """The model, and a sampler for each size of the cache."""

    def __init__(self, folder: str):
        self._config = model_config(folder)
        self._model = create_model_from_safe_tensors(folder, self._config, dtype=jnp.float32)
        self._samplers: dict[int, Sampler] = {}

    def _sampler(self, max_tokens: int) -> Sampler:
        if max_tokens not in self._samplers:
            config = self._config
            cache = CacheConfig(
                cache_size=max_tokens,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            )
            self._samplers[max_tokens] = Sampler(self._model, Ids(config.vocab_size), cache)
        return self._samplers[max_tokens]

    def generate(
        self, prompts: list[list[int]], new: int, job: dict[str, Any], seed: int
    ) -> list[list[int]]:
        """`new` tokens behind each of these prompts, which are equally long; nothing ends early.

        Each turn of a conversation has a cache as long as it needs.
        """
        drawn: dict[str, Any] = {}
        if temperature := job["temperature"]:
            drawn = {"temperature": temperature, "top_p": 1.0, "top_k": None, "seed": seed}
        length = len(prompts[0])
        out = self._sampler(job.get("max_tokens") or length + new)(
            [" ".join(map(str, prompt)) for prompt in prompts],
            max_generation_steps=new,
            max_prompt_length=length,
            **drawn,
        )
        return [np.asarray(ids).tolist() for ids in out.tokens]


if __name__ == "__main__":
    assert len(jax.devices()) == 1
    answer_generation(Generator(sys.argv[1]).generate)
