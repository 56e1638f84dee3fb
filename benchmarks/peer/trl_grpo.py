# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer in a process of its own, in an environment of its own, on CPU.

Argument: the checkpoint's folder. Imports nothing of earl_jax.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]
import work  # noqa: E402
from answering import answer_jobs  # noqa: E402


class Clock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())


def make_trainer(folder: str, output: str, seed: int, steps: int, clock: Clock) -> GRPOTrainer:
    """Returns the trainer, at the checkpoint's weights."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = [tokenizer.eos_token_id, *work.end_ids(tokenizer)]
    model.generation_config.eos_token_id = ends
    # torch gives the pad token's embedding no gradient, though a reply may sample that token.
    model.get_input_embeddings().padding_idx = None

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            work.reward(tokenizer.decode(ids[:-1])) if ids[-1] in ends else 0.0
            for ids in completion_ids
        ]

    args = GRPOConfig(
        output_dir=output,
        seed=seed,
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(work.PROMPTS) * work.GROUP_SIZE,
        num_generations=work.GROUP_SIZE,
        max_completion_length=work.MAX_TOKENS,
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=work.CLIP,
        learning_rate=work.LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta1=work.BETAS[0],
        adam_beta2=work.BETAS[1],
        adam_epsilon=work.EPS,
        weight_decay=0.0,
        max_grad_norm=work.MAX_GRAD_NORM,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in work.PROMPTS]
    return GRPOTrainer(
        model,
        rewards,
        args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[clock],
    )


def learn(trainer: GRPOTrainer, clock: Clock) -> dict[str, Any]:
    """Returns the mean reward of each step, and the seconds of each but the first."""
    trainer.train()
    seconds = [end - begin for begin, end in itertools.pairwise(clock.times)]
    history = trainer.state.log_history
    return {"rewards": [row["reward"] for row in history if "reward" in row], "seconds": seconds}


def one_loss(trainer: GRPOTrainer) -> dict[str, Any]:
    """Returns a batch of TRL's own, and its loss and gradient norm.

    The log-probs that ratios are relative to are a little off the model's, so that ratios are not
    1, and some are clipped.
    """
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in work.PROMPTS]
    grouped = [row for row in rows for _ in range(work.GROUP_SIZE)]
    batch = trainer._generate_and_score_completions(grouped)
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model(tokens, attention_mask=attended).logits[:, -length - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    old = own + 0.15 * torch.randn(own.shape)
    loss = trainer.compute_loss(trainer.model, batch | {"old_per_token_logps": old})
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), float("inf"))
    found = {
        "tokens": tokens,
        "attended": attended,
        "replied": batch["completion_mask"],
        "behaviour": old,
        "advantages": batch["advantages"],
    }
    arrays = {name: array.tolist() for name, array in found.items()}
    return arrays | {"loss": loss.item(), "norm": norm.item()}


def main() -> None:
    """Answers jobs: {"seed", "steps"} learns, and with "steps" 0 makes one loss."""
    torch.set_num_threads(1)

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        clock, steps = Clock(), job["steps"]
        with tempfile.TemporaryDirectory() as output:
            trainer = make_trainer(sys.argv[1], output, job["seed"], steps or 1, clock)
            return learn(trainer, clock) if steps else one_loss(trainer)

    answer_jobs(answer)


if __name__ == "__main__":
    main()
