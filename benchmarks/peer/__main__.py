# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on one task from one checkpoint, ours beside TRL's: the reward by step, with several seeds.

    taskset -c 1 uv run python -m benchmarks.peer --trl_python=PATH [--seeds=5] [--steps=30]

Every run of ours is a process of its own, TRL's are one process; they take turns on the cores that
this one has. Before the runs the losses and gradient norms of TRL's first updates are compared with
ours on the same batches; exits if they differ.
"""

import dataclasses
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.pages import machine, parser_of, replace_table, table
from benchmarks.peer import work
from benchmarks.rollout.engines import Engine
from benchmarks.staleness import SETTINGS, curve_row, run_config
from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.envs.text.tokenizer import MIN_VOCAB_SIZE, build_tokenizer, load_tokenizer
from earl_jax.launch.start import start_jax
from earl_jax.models.checkpoints.hf_read import open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.config import ModelConfig
from earl_jax.models.parameters import init_parameters, parameter_specs
from earl_jax.selector.plans import TrainPlan
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.train.config import TrainConfig
from earl_jax.train.learner import Learner
from earl_jax.trajectory import TrajectoryBatch

HERE = Path(__file__).parent
OURS, TRL = "earl_jax", "TRL"
MODEL = ModelConfig(
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_size=128,
    attention_bias=True,
)
GRPO = {
    "clip_low": work.CLIP,
    "clip_high": work.CLIP,
    "aggregation": "sequence",
    "deviation": "sample",
}
TRAIN = {
    "learning_rate": work.LEARNING_RATE,
    "warmup_steps": 0,
    "adam_b1": work.BETAS[0],
    "adam_b2": work.BETAS[1],
    "adam_eps": work.EPS,
    "max_grad_norm": work.MAX_GRAD_NORM,
}
# So many updates are compared; the most by which the loss and the norm of the gradient may differ,
# as a part of the norm. Rounding adds up from one update to the next.
UPDATES = 8
SAME = 3e-5


def write_task(folder: Path) -> None:
    """Writes the prompts, and a checkpoint of random weights with a vocabulary of bytes."""
    lines = [json.dumps({"prompt": text}) for text in work.PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    save_checkpoint(
        folder / "checkpoint",
        init_parameters(parameter_specs(MODEL, MIN_VOCAB_SIZE), jax.random.key(0)),
        model=MODEL,
        vocab_size=MIN_VOCAB_SIZE,
        tokenizer=build_tokenizer(work.PROMPTS, MIN_VOCAB_SIZE),
        dtype="float32",
        max_positions=64,
    )


def settings_of(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Returns the settings of a run of ours."""
    num_episodes = len(work.PROMPTS) * work.GROUP_SIZE
    return {
        "num_steps": steps,
        "seed": seed,
        "env": {"name": "single_turn"},
        "tasks": {
            "path": str(folder / "prompts.jsonl"),
            "reward": "benchmarks.peer.work:reward",
        },
        "algorithm": "grpo",
        "algorithm_args": GRPO,
        "model": {"path": str(folder / "checkpoint"), "compute_dtype": "float32"},
        "rollout": {
            "num_slots": num_episodes,
            "episodes_per_step": num_episodes,
            "group_size": work.GROUP_SIZE,
            "chunk_size": 16,
            "burst": work.MAX_TOKENS,
            "max_turn_tokens": work.MAX_TOKENS,
            "context_buckets": (32,),
            "unfinished_reward": 0.0,
            "stop_token_ids": work.end_ids(load_tokenizer(folder / "checkpoint")),
        },
        "train": TRAIN,
        "devices": {"platform": "cpu", "num_cpu_devices": 1},
        "selector": {"table": "model"},
        **{name: SETTINGS[name] for name in ("eval", "checkpoint", "log")},
    }


def our_updates(folder: Path, batches: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Returns the loss and gradient norm of our updates on TRL's batches, one after the other."""
    checkpoint, grpo = open_checkpoint(folder / "checkpoint"), ALGORITHMS["grpo"]
    learner = Learner(
        checkpoint.model,
        TrainConfig(**TRAIN),
        dataclasses.replace(grpo, settings=dataclasses.replace(grpo.settings, **GRPO)),
        vocab_size=checkpoint.vocab_size,
        temperature=1.0,
        importance_cap=0.0,
        layout=functools.partial(make_layout, row_axes=TRAINING_ROWS),
        checkpoint=checkpoint,
    )
    plan = TrainPlan(MeshShape(), 1, "none")
    layout = make_layout(MeshShape(), row_axes=TRAINING_ROWS)
    state, found = learner.first_state(plan.mesh), []
    for step, batch in enumerate(batches):
        controls = learner.controls(step, len(batches))
        rows = jax.device_put(rows_of(batch), layout.activations("NS"))
        state, metrics = learner.update(plan, state, rows, controls)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return found


def rows_of(batch: dict[str, Any]) -> TrajectoryBatch:
    """Returns a batch of TRL's, whose prompts are padded on the left, as rows of ours."""
    tokens, segments = (np.array(batch[name], np.int32) for name in ("tokens", "attended"))
    replied = np.zeros_like(tokens)
    replied[:, -len(batch["replied"][0]) :] = batch["replied"]
    logprobs = np.zeros(tokens.shape, np.float32)
    logprobs[:, -len(batch["behaviour"][0]) :] = batch["behaviour"]
    return TrajectoryBatch(
        tokens=tokens,
        segment_ids=segments,
        turn_ids=replied,
        logprobs=np.where(replied > 0, logprobs, 0.0),
        versions=np.zeros_like(tokens),
        advantages=np.array(batch["advantages"], np.float32)[:, None] * replied,
    )


def compare_updates(folder: Path, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row of both losses and gradient norms for each update. Exits where they differ."""
    rows, ours = [], our_updates(folder, batches)
    for number, ((loss, norm), trl) in enumerate(zip(ours, batches, strict=True), start=1):
        row = {
            "update": number,
            f"loss, {OURS}": f"{loss:.6f}",
            f"loss, {TRL}": f"{trl['loss']:.6f}",
        }
        row |= {f"norm, {OURS}": f"{norm:.6f}", f"norm, {TRL}": f"{trl['norm']:.6f}"}
        rows.append(row)
        if max(abs(loss - trl["loss"]), abs(norm - trl["norm"])) > SAME * trl["norm"]:
            sys.exit(f"not the same update: {row}")
    return rows


def curve(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row of the table."""
    found = curve_row([run["rewards"] for run in runs])
    seconds = [second for run in runs for second in run["seconds"]]
    row = {"trainer": name, "s a step": statistics.median(seconds), "fastest": min(seconds)}
    return row | found


def main() -> None:
    """Compares updates, runs all seeds and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--trl_python", required=True, help="Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    flags = parser.parse_args()
    start_jax("cpu", 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        script = str(HERE / "trl_grpo.py")
        trl = Engine(TRL, [flags.trl_python, script, str(folder / "checkpoint")])
        versions = trl.versions()
        recorded = trl.ask({"seed": 0, "steps": UPDATES, "record": True})
        losses = table(compare_updates(folder, recorded["batches"]))
        print(losses, flush=True)
        runs: dict[str, list[dict[str, Any]]] = {OURS: [], TRL: []}
        for seed in range(flags.seeds):
            settings = settings_of(folder, seed, flags.steps)
            runs[OURS].append(run_config(settings, folder / f"seed_{seed}"))
            print(OURS, seed, json.dumps(runs[OURS][-1]), flush=True)
            runs[TRL].append(trl.ask({"seed": seed, "steps": flags.steps, "record": False}))
            print(TRL, seed, json.dumps(runs[TRL][-1]), flush=True)
        trl.close()
    curves = table([curve(name, found) for name, found in runs.items()])
    print(curves, versions, machine(), sep="\n")
    if flags.write:
        page = HERE.parent / "peer.md"
        replace_table(page, losses, "losses")
        replace_table(page, f"{curves}\n\n{versions}", "curves")


if __name__ == "__main__":
    main()
