# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""`transformers.generate` in a process and an environment of its own: torch, on CPU.

Arguments: the checkpoint's folder, the number of torch's threads. Imports nothing of earl_jax.
"""

import sys
from typing import Any

import torch
from answering import answer_generation
from transformers import AutoModelForCausalLM


class Generator:
    """The model, and the one call that is timed."""

    def __init__(self, folder: str):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Else the model's own is taken where a call says that there is none.
        self._model.generation_config.eos_token_id = None

    def generate(
        self, prompts: list[list[int]], new: int, job: dict[str, Any], seed: int
    ) -> list[list[int]]:
        """`new` tokens behind each of these prompts, which are equally long; nothing ends early."""
        given = torch.tensor(prompts)
        drawn: dict[str, Any] = {"do_sample": False}
        if temperature := job["temperature"]:
            drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                pad_token_id=0,
                **drawn,
            )
        return out[:, given.shape[1] :].tolist()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    answer_generation(Generator(sys.argv[1]).generate)
