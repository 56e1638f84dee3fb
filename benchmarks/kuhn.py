# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exploitability of a policy that learns Kuhn poker in self-play, by step; and of a run's policy.

    uv run python benchmarks/kuhn.py [--seeds=0,1,2] [--steps=300] [--every=25]
    uv run python benchmarks/kuhn.py --workdir=DIR

Plays the run of configs/kuhn_self_play_cpu.py for each seed and writes benchmarks/kuhn.md; or
prints the newest policy of a run's workdir. The policy's probabilities in the 12 information states
are not sampled: the model scores both legal replies in each, whole, with their end of turn.
"""

import argparse
import functools
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from earl_jax.config.file import load_config_file, make_config, read_workdir_config
from earl_jax.envs.chat import ChatRenderer
from earl_jax.envs.kuhn_poker import VALUE, Turns, information_states, nash_conv
from earl_jax.launch.start import start_jax
from earl_jax.loop import rl_step
from earl_jax.models.config import ModelConfig
from earl_jax.placement.moves import move_state
from earl_jax.placement.placement import Placement
from earl_jax.run.build import Run, build_run
from earl_jax.run.workdir import Position, read_newest
from earl_jax.sharding.layout import Layout, MeshShape
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.config import TrainConfig
from earl_jax.train.scoring import score_batch
from earl_jax.train.sft import sft_batch

HERE = Path(__file__).parent
CONFIG = Path("configs/kuhn_self_play_cpu.py")
REPLIES = ("0", "1")


class Exact(NamedTuple):
    """A policy's probability of a bet in each information state, among the legal replies.

    `legal` is the least probability of a legal reply in any state.
    """

    bets: dict[str, float]
    legal: float


def reply_ids(turns: Turns, reply: str, renderer: ChatRenderer) -> tuple[list[int], list[int]]:
    """Returns the ids of a conversation and the reply, and 1 for those of the reply, else 0.

    They are those of a rollout in which the side's earlier replies were written so.
    """
    (_, first), *others = turns
    ids = [*renderer.first(first)]
    for author, text in others:
        ids += renderer.reply(text) if author == "policy" else renderer.answer(text)
    written = renderer.reply(reply)
    return [*ids, *written], [0] * len(ids) + [1] * len(written)


def exact_policy(run: Run, position: Position, mesh: MeshShape) -> Exact:
    """Returns the probabilities of the policy at this position of a run."""
    states, renderer = information_states(), run.actor.renderer
    rows = [reply_ids(turns, reply, renderer) for turns in states.values() for reply in REPLIES]
    layout, length = run.learner.layout(mesh), 1 << max(len(ids) for ids, _ in rows).bit_length()
    batch = sft_batch(rows, layout, length)
    score = _scorer(run.learner.model, layout)
    scores = score(run.learner.policy(position.state), batch)
    spoken = np.asarray(batch.turn_ids) > 0
    logprobs = np.where(spoken, np.asarray(scores.logprobs, np.float64), 0.0).sum(axis=1)
    chances = np.exp(logprobs.reshape(len(states), len(REPLIES)))
    legal = chances.sum(axis=1)
    return Exact(dict(zip(states, chances[:, 1] / legal, strict=True)), float(legal.min()))


@functools.cache
def _scorer(model: ModelConfig, layout: Layout) -> Any:
    return jax.jit(functools.partial(score_batch, model, TrainConfig(), layout, 1.0))


def learn(seed: int, steps: int, every: int) -> dict[int, Exact]:
    """Plays the first steps of the config's run. Returns the policy by step."""
    run = build_run(make_config(load_config_file(CONFIG), [f"seed={seed}"]))
    placement = Placement(run.stages, run.open_table()[0], print)
    placement.choose_step(run.config.rollout.context_buckets[0], None)
    state = move_state(placement, run.learner.first_state(placement.train.mesh), to_play=True)
    position = Position(step=0, state=state, history=LoadHistory())
    found = {0: exact_policy(run, position, placement.train.mesh)}
    for step in range(1, steps + 1):
        position, record = rl_step(run, placement, position)
        if step % every == 0:
            found[step] = exact_policy(run, position, placement.train.mesh)
            won = record.metrics()["env"]["won_as_first"]
            print(f"seed {seed}, step {step}: {_brief(found[step])}, first wins {won:+.3f}")
    return found


def _brief(policy: Exact) -> str:
    return f"NashConv {nash_conv(policy.bets):.3f}, legal {100 * policy.legal:.1f} %"


def _page(found: dict[int, dict[int, Exact]], command: str, cpu_s: float) -> str:
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "open_spiel"))
    last = {seed: policies[max(policies)] for seed, policies in found.items()}
    lines = [
        "# Kuhn poker in self-play: exploitability",
        "",
        f"`{command}`: the run of {CONFIG}, by seed.",
        f"{platform.machine()}, Python {platform.python_version()}, {versions},",
        f"{time.strftime('%Y-%m')}; {cpu_s:.0f} s of CPU time in all.",
        "",
        "NashConv is what both sides together can win more by a best response (exploitability is",
        "half of it), by OpenSpiel's enumeration with the model's exact probabilities in the 12",
        "information states, among the legal replies. Uniform play has 0.917, always passing 2, an",
        f"equilibrium 0; the game's value is {VALUE:.4f} for the first side. The policy is that of",
        "the step, no average over steps.",
        "",
        "| step | " + " | ".join(f"NashConv, seed {seed}" for seed in found) + " | mean |",
        "|---" * (2 + len(found)) + "|",
    ]
    for step in next(iter(found.values())):
        values = [nash_conv(policies[step].bets) for policies in found.values()]
        cells = [f"{value:.3f}" for value in (*values, float(np.mean(values)))]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    least = 100 * min(policy.legal for policy in last.values())
    lines += [
        "",
        f"Behind the last step a reply is legal with a probability of at least {least:.1f} % in",
        "every state and seed. The probabilities of a bet there, by OpenSpiel's names of the",
        "states (the card, then p for a pass and b for a bet):",
        "",
        "| seed | " + " | ".join(information_states()) + " |",
        "|---" * 13 + "|",
        *(_row(str(seed), policy.bets) for seed, policy in last.items()),
        "",
        "At an equilibrium the first side bets 2 three times as often as 0 (at most 1/3), never 1,",
        "and behind a bet it calls with 1 a third more often than it bets 0; the second calls with",
        "1 and bets 0 one time in three.",
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, bets: dict[str, float]) -> str:
    return (
        f"| {name} | " + " | ".join(f"{bets[state]:.2f}" for state in information_states()) + " |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the seeds, or looks at a workdir."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--workdir", type=Path)
    flags = parser.parse_args(arguments)
    if flags.workdir is not None:
        config = read_workdir_config(flags.workdir)
        start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)
        run, position, placement = read_newest(config, flags.workdir)
        policy = exact_policy(run, position, placement.train.mesh)
        print(f"step {position.step}: {_brief(policy)}")
        print(_row("bets", policy.bets))
        return
    config = make_config(load_config_file(CONFIG))
    start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)
    seeds = [int(seed) for seed in flags.seeds.split(",")]
    found = {seed: learn(seed, flags.steps, flags.every) for seed in seeds}
    command = (
        f"uv run python benchmarks/kuhn.py --seeds={flags.seeds} --steps={flags.steps} "
        f"--every={flags.every}"
    )
    page = _page(found, command, time.process_time())
    (HERE / "kuhn.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
