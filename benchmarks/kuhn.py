# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The exploitability of a policy that learned Kuhn poker in self-play.

uv run python -m benchmarks.kuhn --workdir=DIR   # a run of configs/kuhn_self_play_cpu.py

Scores both replies in each of the game's 12 information states by a full forward pass of the newest
checkpoint, and prints the probability of a bet beside Kuhn's equilibria, and NashConv by
OpenSpiel's enumeration.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pages import table
from earl_jax.config.file import read_workdir_config
from earl_jax.envs.chat import ChatRenderer
from earl_jax.envs.kuhn_poker import information_states, nash_conv
from earl_jax.launch.start import start_jax
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.run.build import Run
from earl_jax.run.workdir import read_newest
from earl_jax.sharding.layout import MeshShape, make_layout

REPLIES = ("0", "1")
# Kuhn's equilibria (1950), by the probability alpha <= 1/3 with which the first side bets a 0.
EQUILIBRIA = {"0": "a", "1": "0", "2": "3a", "0pb": "0", "1pb": "a + 1/3", "2pb": "1"}
EQUILIBRIA |= {"0b": "0", "1b": "1/3", "2b": "1", "0p": "1/3", "1p": "0", "2p": "1"}


def prompt_ids(renderer: ChatRenderer, turns: Sequence[tuple[str, str]]) -> list[int]:
    """Returns the ids of a conversation up to the policy's next reply."""
    ids = list(renderer.first(turns[0][1]))
    for author, text in turns[1:]:
        ids += renderer.reply(text) if author == "policy" else renderer.answer(text)
    return ids


def reply_logprobs(run: Run, params: object, rows: Sequence[tuple[list[int], list[int]]]) -> list:
    """Returns the log-prob of each (prompt, reply) under the policy."""
    layout = make_layout(MeshShape(), jax.devices()[:1])
    model = dataclasses.replace(run.origin.model, compute_dtype="float32")
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, (prompt, reply) in enumerate(rows):
        tokens[row, : len(prompt) + len(reply)] = [*prompt, *reply]
    hidden = forward_rows(model, layout, params, tokens, jnp.ones_like(tokens))
    logits = jnp.einsum("BTD,DV->BTV", hidden, head_weights(params))
    logprobs = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
    return [
        sum(
            float(logprobs[row, len(prompt) + place - 1, token])
            for place, token in enumerate(reply)
        )
        for row, (prompt, reply) in enumerate(rows)
    ]


def main() -> None:
    """Prints the table and NashConv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True, help="the folder of a run")
    workdir = parser.parse_args().workdir
    config = read_workdir_config(workdir)
    start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)
    run, position, _ = read_newest(config, workdir)
    params = jax.device_put(jax.device_get(run.learner.policy(position.state)), jax.devices()[0])
    renderer, states = ChatRenderer(run.origin.tokenizer), information_states()
    pairs = [
        (prompt_ids(renderer, turns), list(renderer.reply(reply)))
        for turns in states.values()
        for reply in REPLIES
    ]
    logprobs = np.array(reply_logprobs(run, params, pairs)).reshape(-1, 2)
    legal = np.exp(logprobs)
    bets = dict(zip(states, (legal[:, 1] / legal.sum(axis=1)).tolist(), strict=True))
    rows = [
        {"state": name, "bets": bet, "equilibria": EQUILIBRIA[name], "legal": float(both)}
        for (name, bet), both in zip(bets.items(), legal.sum(axis=1), strict=True)
    ]
    print(table(rows))
    uniform = nash_conv(dict.fromkeys(bets, 0.5))
    print(f"\nNashConv {nash_conv(bets):.3f} (uniform play {uniform:.3f}, an equilibrium 0)")


if __name__ == "__main__":
    main()
