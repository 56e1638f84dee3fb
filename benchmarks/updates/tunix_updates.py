# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Updates with Tunix's trainer in a process and an environment of its own: JAX, on one CPU device.

Argument: the checkpoint's folder. Imports nothing of earl_jax. An update is a call of
`PeftTrainer.train` with one batch, as Tunix's own algorithms train.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]

import jax
import jax.numpy as jnp
import optax
import work
from answering import answer_jobs
from flax import nnx
from tunix.models.qwen2.params import create_model_from_safe_tensors
from tunix.rl.common import selective_log_softmax
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix_sampler import model_config


def loss_of(
    model: Any, tokens: jax.Array, behaviour: jax.Array, advantages: jax.Array
) -> jax.Array:
    """PPO's clipped loss, the mean over tokens."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    logits, _ = model(tokens[:, :-1], positions, None, causal)
    ratio = jnp.exp(selective_log_softmax(logits, tokens[:, 1:]) - behaviour[:, 1:])
    clipped = jnp.clip(ratio, 1 - work.CLIP, 1 + work.CLIP)
    advantages = advantages[:, 1:]
    return -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))


def make_trainer(folder: str) -> PeftTrainer:
    """Returns the trainer of the checkpoint's weights."""
    model = create_model_from_safe_tensors(folder, model_config(folder), dtype=jnp.float32)
    optimizer = optax.chain(
        optax.clip_by_global_norm(work.MAX_GRAD_NORM),
        optax.adamw(work.LEARNING_RATE, *work.BETAS, eps=work.EPS, weight_decay=0.0),
    )
    trainer = PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=10**9))
    # Else it closes behind the first call.
    trainer.is_managed_externally = True
    return trainer.with_loss_fn(loss_of)


def main() -> None:
    """Answers jobs: `updates` from the checkpoint's weights on, of which all but one are timed."""
    trainer = make_trainer(sys.argv[1])
    model, optimizer = trainer.model, trainer.optimizer
    weights, moments = (jax.device_get(nnx.state(each)) for each in (model, optimizer))
    calls = 0

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        nnx.update(model, weights)
        nnx.update(optimizer, moments)
        batch = work.make_batch(job["rows"], job["length"])
        first, seconds = calls, []
        # A loss is logged with the next update: there is one more.
        for _ in range(job["updates"] + 1):
            start_s = time.perf_counter()
            trainer.train([batch])
            seconds.append(time.perf_counter() - start_s)
            calls += 1
        losses = trainer.metrics_logger.get_metric_history("", "loss", Mode.TRAIN)
        return {
            "losses": [float(loss) for loss in losses[first : first + job["updates"]]],
            "seconds": min(seconds[1:-1]),
            "tokens": job["rows"] * job["length"],
        }

    answer_jobs(answer)


if __name__ == "__main__":
    main()
