# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""`transformers.generate` in a process and an environment of its own: torch, on CPU.

Arguments: the checkpoint's folder, the number of torch's threads. Imports nothing of earl_jax.
"""

import sys
import time
from typing import Any

import torch
from answering import answer_jobs, read_again
from transformers import AutoModelForCausalLM


class Generator:
    """The model, and the one call that is timed."""

    def __init__(self, folder: str):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Else the model's own is taken where a call says that there is none.
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], new: int, temperature: float) -> list[list[int]]:
        """`new` tokens behind each of these prompts, which are equally long; nothing ends early."""
        given = torch.tensor(prompts)
        drawn: dict[str, Any] = {"do_sample": False}
        if temperature:
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

    def batches(self, job: dict[str, Any]) -> list[list[int]]:
        """Static batches in order of arrival; each goes on until its longest reply is there."""
        replies: list[list[int]] = []
        prompts, lengths, size = job["prompts"], job["lengths"], job["batch"]
        for first in range(0, len(prompts), size):
            wanted = lengths[first : first + size]
            made = self.generate(prompts[first : first + size], max(wanted), job["temperature"])
            replies += [ids[:length] for ids, length in zip(made, wanted, strict=True)]
        return replies

    def turns(self, job: dict[str, Any]) -> list[list[int]]:
        """Conversations, see `read_again`."""
        return read_again(
            job, lambda contexts, new: self.generate(contexts, new, job["temperature"])
        )


def main() -> None:
    """Answers jobs."""
    torch.set_num_threads(int(sys.argv[2]))
    generator = Generator(sys.argv[1])

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        work = generator.turns if "messages" in job else generator.batches
        start_s = time.perf_counter()
        replies = work(job)
        seconds = time.perf_counter() - start_s
        return {"seconds": seconds, "tokens": sum(map(len, replies)), "replies": replies}

    answer_jobs(answer)


if __name__ == "__main__":
    main()
