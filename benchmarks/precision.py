# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""How far a rollout's log-probs are from the trainer's, by the rollout's precision.

    uv run python -m earl_jax.main --config=configs/connect_four_tiny_cpu.py --workdir=runs/c4
    uv run python benchmarks/precision.py --workdir=runs/c4

The newest checkpoint of a run plays the same games in each precision, against the same opponents,
at the run's temperature; then the trainer scores what was sampled, in its own. Prints two Markdown
tables. In the second the trainer itself has a part of its matrices rounded, and scores the games of
the first row again: where the error comes from.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from earl_jax.config import Config
from earl_jax.config_file import read_workdir_config
from earl_jax.dispatch.pack import dispatch
from earl_jax.dispatch.weights import publish
from earl_jax.engine.config import Sampling
from earl_jax.engine.pages import Pool, dense_pool
from earl_jax.engine.session import Policy, Session, empty_session, relocate
from earl_jax.loop import row_facts
from earl_jax.main import start_jax
from earl_jax.models.parameters import parameter_specs
from earl_jax.models.quantization import INPUTS, dequantize, quantize
from earl_jax.rollout.collect import Collector
from earl_jax.run import read_newest
from earl_jax.selector.memory import resident_bytes
from earl_jax.selector.plans import TrainPlan
from earl_jax.train.step import TrainState
from earl_jax.trajectory import TrajectoryBatch
from earl_jax.world import World

# Of weights, KV cache and matrix work.
PRECISIONS = (
    ("compute", "compute", "float32"),
    ("compute", "compute", "bfloat16"),
    ("int8", "compute", "float32"),
    ("int8", "compute", "bfloat16"),
    ("compute", "int8", "float32"),
    ("int8", "int8", "bfloat16"),
)
CAP = 2.0
# Games that no training step has played.
FIRST_STEP = 2**20

ATTENTION = ("query", "key", "value", "out")
LAYERS = tuple(INPUTS)
PARTS = {
    "attention": ATTENTION,
    "feed-forward": tuple(name for name in LAYERS if name not in ATTENTION),
    "both: what int8 weights are": LAYERS,
    "embedding": ("embed",),
    "head": ("head",),
    "all of them": (*LAYERS, "embed", "head"),
}


class Gap(NamedTuple):
    """Log-probs of the same tokens, by the trainer and by whom it is compared with."""

    trainer: np.ndarray
    other: np.ndarray

    def columns(self) -> list[str]:
        """Cells of the tables."""
        log_ratio = (self.trainer - self.other).astype(np.float64)
        ratio, gap = np.exp(log_ratio), np.abs(log_ratio)
        return [
            f"{gap.mean():.1e}",
            f"{np.quantile(gap, 0.99):.1e}",
            f"{gap.max():.1e}",
            f"{np.mean(ratio - 1 - log_ratio):.1e}",
            f"{ratio.mean():.4f} +- {ratio.std() / np.sqrt(len(ratio)):.4f}",
            f"{np.mean(ratio > CAP):.2%}",
        ]


HEADINGS = ("mean", "99 %", "largest", "KL", "mean importance ratio", f"above {CAP:g}")


def play(world: World, state: TrainState, num_steps: int) -> tuple[list[TrajectoryBatch], float]:
    """The batches of so many steps, and MiB of weights per device of the engine."""
    mesh, rollout = world.problem.rollout_meshes[0], world.config.rollout
    engine = world.engine(mesh)
    params = publish(world.policy(state), engine.parameter_shapes, engine.parameter_shardings)
    policy, size = Policy(params=params.params, version=0), rollout.tokens_a_page

    def make_room(session: Session, tokens: int, pages: int) -> Session:
        max_tokens = max(session.max_tokens, rollout.max_tokens_for(tokens))
        more = Pool(mesh.data, max(session.pool.pages, pages))
        return relocate(session, engine, max_tokens, more)

    batches = []
    for step in range(FIRST_STEP, FIRST_STEP + num_steps):
        collector = Collector(
            rollout,
            world.new_conversation,
            world.pool,
            world.make_environment,
            make_room,
            num_devices=len(world.processes.own_devices),
        )
        max_tokens = rollout.context_buckets[-1]
        pool = dense_pool(mesh.data, rollout.num_slots, max_tokens, size)
        session = empty_session(engine, policy, max_tokens, pool)
        sampling = Sampling(temperature=rollout.temperature)
        played = collector.collect(session, world.training_tasks(step), sampling=sampling)
        longest = max(trajectory.num_tokens for trajectory in played.trajectories)
        layout = world.train_layout(world.problem.train_meshes[0])
        outcomes = [trajectory.outcome for trajectory in played.trajectories]
        facts = row_facts(world, outcomes, rollout.max_tokens_for(longest))
        batches.append(dispatch(played.experience, layout, **facts).batch)
    weights = resident_bytes(engine.parameter_shapes, engine.parameter_shardings)
    return batches, weights / 2**20


def score(world: World, state: TrainState, batches: list[TrajectoryBatch]) -> np.ndarray:
    """The trainer's log-probs of all tokens that the policy sampled."""
    train = world.config.train
    plan = TrainPlan(world.problem.train_meshes[0], train.micro_batches, train.remat)
    scorer = world.learner.scorer(plan, ("proximal",))
    return sampled(batches, lambda batch: scorer(state, batch).proximal)


def sampled(
    batches: list[TrajectoryBatch], field: Callable[[TrajectoryBatch], jax.Array]
) -> np.ndarray:
    """A field where the policy spoke."""
    return np.concatenate([np.asarray(field(b))[np.asarray(b.turn_ids) > 0] for b in batches])


def rounded(world: World, state: TrainState, names: tuple[str, ...]) -> TrainState:
    """The state with these matrices as int8 has them."""
    specs = parameter_specs(world.model, world.vocab_size)
    inputs = {**INPUTS, "embed": "D", "head": "D"}

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        if name not in names:
            return leaf
        axes = (specs if name in specs else specs["layers"])[name].axes
        # Layers are rounded one by one: a letter that is not contracted has its own scales.
        return dequantize(quantize(leaf, axes, inputs[name]))

    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(one, state.params))


def with_rollout(config: Config, **changes: Any) -> Config:
    """The config with another rollout section."""
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **changes))


def main() -> None:
    """Plays, scores and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--num_steps", type=int, default=8, help="batches of episodes (8)")
    flags = parser.parse_args()
    config = read_workdir_config(flags.workdir)
    start_jax(config.devices.platform, config.devices.num_cpu_devices)
    world, position, placement = read_newest(config, flags.workdir)
    state = placement.move_state(position.state)
    trainer = config.model.compute_dtype
    print(f"{flags.workdir} after step {position.step}; the trainer computes in {trainer}\n")
    print("| weights | cache | compute | MiB | tokens |", " | ".join(HEADINGS), "|")
    print("|---" * (5 + len(HEADINGS)) + "|")
    first = None
    for weights, cache, compute in PRECISIONS:
        other = World(
            with_rollout(config, weight_dtype=weights, kv_dtype=cache, compute_dtype=compute),
            flags.workdir / "tokenizer",
        )
        batches, size = play(other, state, flags.num_steps)
        gap = Gap(score(world, state, batches), sampled(batches, lambda b: b.logprobs))
        kinds = [compute if kind == "compute" else kind for kind in (weights, cache)]
        cells = [*kinds, compute, f"{size:.2f}", f"{len(gap.other):,}", *gap.columns()]
        print(f"| {' | '.join(cells)} |", flush=True)
        first = first or (batches, gap.trainer)
    print("\n| rounded to int8 |", " | ".join(HEADINGS[:3]), "|")
    print("|---" * 4 + "|")
    assert first is not None
    batches, exact = first
    for part, names in PARTS.items():
        changed = jax.tree.map(jnp.copy, rounded(world, state, names))
        cells = Gap(exact, score(world, changed, batches)).columns()[:3]
        print(f"| {part} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
