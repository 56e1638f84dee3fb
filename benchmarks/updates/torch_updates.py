# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Updates with `transformers` and torch, in an environment of its own, on CPU.

Arguments: the checkpoint's folder, the number of torch's threads. Imports nothing of earl_jax.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]
import work  # noqa: E402
from answering import answer_jobs  # noqa: E402


def update(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    """Makes one update by PPO's clipped loss, the mean over tokens. Returns the loss."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).logits
    logprobs = -torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    advantages = batch["advantages"][:, 1:].flatten()
    ratio = torch.exp(logprobs - batch["behaviour"][:, 1:].flatten())
    clipped = ratio.clamp(1 - work.CLIP, 1 + work.CLIP)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), work.MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


def main() -> None:
    """Answers jobs: `updates` from the checkpoint's weights on, of which all but one are timed.

    Or a `profile` of one: the seconds of its operations, each without those that it calls.
    """
    torch.set_num_threads(int(sys.argv[2]))

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        model.config.use_cache = False
        optimizer = torch.optim.AdamW(
            model.parameters(), work.LEARNING_RATE, work.BETAS, work.EPS, weight_decay=0.0
        )
        made = work.make_batch(job["rows"], job["length"])
        batch = {name: torch.from_numpy(array.copy()) for name, array in made.items()}
        batch["tokens"] = batch["tokens"].long()
        if job.get("profile"):
            update(model, optimizer, batch)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
                start_s = time.perf_counter()
                update(model, optimizer, batch)
                seconds = time.perf_counter() - start_s
            operations = {each.key: each.self_cpu_time_total / 1e6 for each in found.key_averages()}
            return {"seconds": seconds, "operations": operations}
        losses, seconds = [], []
        for _ in range(job["updates"]):
            start_s = time.perf_counter()
            losses.append(update(model, optimizer, batch))
            seconds.append(time.perf_counter() - start_s)
        return {"losses": losses, "seconds": min(seconds[1:]), "tokens": batch["tokens"].numel()}

    answer_jobs(answer)


if __name__ == "__main__":
    main()
