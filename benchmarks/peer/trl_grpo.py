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


def make_trainer(
    kind: type[GRPOTrainer], folder: str, output: str, seed: int, steps: int, clock: Clock
) -> GRPOTrainer:
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
    return kind(
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


class Recorded(GRPOTrainer):
    """Notes each batch with its loss.

    The log-probs that ratios are relative to are a little off the model's, so that ratios are not
    1, and some are clipped.
    """

    batches: list[dict[str, Any]]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Returns TRL's loss of a batch."""
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logits = model(tokens, attention_mask=attended).logits[:, -length - 1 : -1]
            own = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        old = own + 0.15 * torch.randn(own.shape)
        loss = super().compute_loss(model, inputs | {"old_per_token_logps": old}, *args, **kwargs)
        found = {
            "tokens": tokens,
            "attended": attended,
            "replied": inputs["completion_mask"],
            "behaviour": old,
            "advantages": inputs["advantages"],
        }
        arrays = {name: array.tolist() for name, array in found.items()}
        self.batches.append(arrays | {"loss": loss.item()})
        return loss


def record(trainer: Recorded) -> dict[str, Any]:
    """Returns the batch of each step, with its loss and gradient norm."""
    trainer.batches = []
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return {"batches": [b | {"norm": n} for b, n in zip(trainer.batches, norms, strict=True)]}


def main() -> None:
    """Answers jobs: {"seed", "steps", "record"} learns, and gives the curve or the batches."""
    torch.set_num_threads(1)

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        clock, kind = Clock(), Recorded if job["record"] else GRPOTrainer
        with tempfile.TemporaryDirectory() as output:
            trainer = make_trainer(kind, sys.argv[1], output, job["seed"], job["steps"], clock)
            return record(trainer) if isinstance(trainer, Recorded) else learn(trainer, clock)

    answer_jobs(answer)


if __name__ == "__main__":
    main()
