# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The exact results of a policy that learned Tic-Tac-Toe, by enumeration.

uv run python -m benchmarks.exact --workdir=DIR [--workdir=DIR ...]

Follows every game of the newest checkpoint at temperature 1, on both sides, against an opponent
that draws from all legal moves ("random") and one that draws from the best ("minimax"): each legal
reply has its probability by a full forward pass, all others together are illegal. Games less likely
than `LEAST` are not followed; what they are together is in the table. A table of learning.md;
learning.py and kuhn.py take its functions.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyspiel

from benchmarks.pages import parser_of, table
from earl_jax.config.file import read_workdir_config
from earl_jax.envs.games.board_game import ROLES
from earl_jax.envs.games.minimax import best_moves
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.launch.start import start_jax
from earl_jax.models.decoder import forward_rows, head_weights
from earl_jax.run.build import Run
from earl_jax.run.saved_position import read_newest
from earl_jax.sharding.layout import MeshShape, make_layout

LEAST = 1e-6
# Rows of a pass; tokens of a row are a multiple of WIDTH.
ROWS, WIDTH = 1024, 64
# The log-probs of the tokens of each reply, of (prompt, reply).
Score = Callable[[Sequence[tuple[list[int], list[int]]]], list[list[float]]]


class Node(NamedTuple):
    """A position in which the policy is to move, the messages so far, and how likely it is."""

    state: pyspiel.State
    turns: tuple[tuple[str, str], ...]
    probability: float


def prompt_ids(renderer: ChatRenderer, turns: Sequence[tuple[str, str]]) -> list[int]:
    """Returns the ids of a conversation up to the policy's next reply."""
    ids = list(renderer.first(turns[0][1]))
    for author, text in turns[1:]:
        ids += renderer.reply(text) if author == "policy" else renderer.answer(text)
    return ids


def results(
    score: Score, renderer: ChatRenderer, side: int, opponent: str, *, masked: bool = False
) -> dict[str, float]:
    """Returns the probabilities of win, draw, loss, illegal and of what was not followed.

    With `masked` the policy's replies are drawn from the legal ones (`mask_illegal`).
    """
    game = pyspiel.load_game("tic_tac_toe")
    found = collections.Counter[str]()
    start = f"tic_tac_toe. you play {ROLES[side]}. moves are 0 to 8."
    nodes = [Node(game.new_initial_state(), (("environment", start),), 1.0)]
    if side == 1:
        nodes = [
            Node(state, (("environment", f"{start} x plays {move}."),), probability)
            for move, state, probability in _opponent(nodes[0].state, opponent, 1.0)
        ]
    while nodes:
        edges = [(node, move) for node in nodes for move in node.state.legal_actions()]
        pairs = [
            (prompt_ids(renderer, node.turns), list(renderer.reply(str(move))))
            for node, move in edges
        ]
        logprobs = score(pairs)
        replies = [math.exp(sum(each)) for each in logprobs]
        if masked:
            replies = list[float]()
            for _, own in itertools.groupby(zip(edges, pairs, logprobs, strict=True), _node_of):
                _, of_node, values = zip(*own, strict=True)
                replies += masked_probabilities([reply for _, reply in of_node], values)
        found["illegal"] += sum(node.probability for node in nodes)
        nodes_after = list[Node]()
        for (node, move), reply in zip(edges, replies, strict=True):
            probability = node.probability * reply
            found["illegal"] -= probability
            state = node.state.child(move)
            turns = (*node.turns, ("policy", str(move)))
            if probability < LEAST:
                found["not followed"] += probability
            elif state.is_terminal():
                found[_outcome(state, side)] += probability
            else:
                nodes_after += _answered(state, turns, side, opponent, probability, found)
        nodes = nodes_after
    return dict(found)


def _node_of(known: tuple[tuple[Node, int], Any, Any]) -> int:
    return id(known[0][0])


def masked_probabilities(
    replies: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
) -> list[float]:
    """Returns the probability of each reply where others are not allowed, token by token.

    As the engine draws them: each token is one of those with which some reply goes on
    (engine/choices.py). `logprobs` are those of all tokens of the replies, without a mask.
    """
    weights = collections.defaultdict[tuple[int, ...], dict[int, float]](dict)
    for reply, values in zip(replies, logprobs, strict=True):
        for place, (token, value) in enumerate(zip(reply, values, strict=True)):
            weights[tuple(reply[:place])][token] = math.exp(value)
    return [
        math.prod(
            weights[tuple(reply[:place])][token] / sum(weights[tuple(reply[:place])].values())
            for place, token in enumerate(reply)
        )
        for reply in replies
    ]


def _answered(
    state: pyspiel.State,
    turns: tuple[tuple[str, str], ...],
    side: int,
    opponent: str,
    probability: float,
    found: collections.Counter[str],
) -> Iterator[Node]:
    """Yields the positions behind the opponent's moves, and counts games that they end."""
    for move, after, likely in _opponent(state, opponent, probability):
        if after.is_terminal():
            found[_outcome(after, side)] += likely
        else:
            yield Node(after, (*turns, ("environment", str(move))), likely)


def _opponent(
    state: pyspiel.State, opponent: str, probability: float
) -> Iterator[tuple[int, pyspiel.State, float]]:
    """Yields the opponent's moves, what follows, and how likely that is."""
    known = best_moves("tic_tac_toe") if opponent == "minimax" else {}
    moves = known.get(str(state)) or state.legal_actions()
    for move in moves:
        yield move, state.child(move), probability / len(moves)


def _outcome(state: pyspiel.State, side: int) -> str:
    value = state.returns()[side]
    return "win" if value > 0 else "loss" if value < 0 else "draw"


def scorer(run: Run, params: Any) -> Score:
    """Returns the function of the log-probs of a reply's tokens under the policy."""
    layout = make_layout(MeshShape(), jax.devices()[:1])
    model = dataclasses.replace(run.origin.model, compute_dtype="float32")

    @jax.jit
    def token_logprobs(params: Any, tokens: jax.Array) -> jax.Array:
        hidden = forward_rows(model, layout, params, tokens, jnp.ones_like(tokens))
        logits = jnp.einsum("BTD,DV->BTV", hidden, head_weights(params)).astype(jnp.float32)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]

    def score(pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        longest = max(len(prompt) + len(reply) for prompt, reply in pairs)
        found, width = list[list[float]](), -(-longest // WIDTH) * WIDTH
        for first in range(0, len(pairs), ROWS):
            part = pairs[first : first + ROWS]
            tokens = np.zeros((ROWS, width), np.int32)
            for row, (prompt, reply) in enumerate(part):
                tokens[row, : len(prompt) + len(reply)] = [*prompt, *reply]
            values = np.asarray(token_logprobs(params, tokens))
            found += [
                values[row, len(prompt) - 1 : len(prompt) + len(reply) - 1].tolist()
                for row, (prompt, reply) in enumerate(part)
            ]
        return found

    return score


def start_jax_of(workdir: Path) -> None:
    """Starts JAX on the devices of a run's config."""
    config = read_workdir_config(workdir)
    start_jax(config.devices.platform, config.devices.num_cpu_devices, config.distributed)


def open_policy(workdir: Path) -> tuple[Run, Score]:
    """Returns a run, and the log-probs of its newest policy, on one device."""
    run, position, _ = read_newest(read_workdir_config(workdir), workdir)
    policy = jax.device_get(run.learner.policy(position.state))
    return run, scorer(run, jax.device_put(policy, jax.devices()[0]))


def exact_rows(workdirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the results of runs in percent, both sides together, half of the games on each."""
    rows = list[dict[str, Any]]()
    start_jax_of(workdirs[0])
    for workdir in workdirs:
        run, score = open_policy(workdir)
        masked = run.config.env.args.get("mask_illegal", False)
        renderer = ChatRenderer(run.origin.tokenizer)
        play = functools.partial(results, score, renderer, masked=masked)
        for opponent in ("random", "minimax"):
            sides = [play(side, opponent) for side in (0, 1)]
            names = ("win", "draw", "loss", "illegal", "not followed")
            rows.append({"run": workdir.name, "opponent": opponent})
            sums = {name: sum(side.get(name, 0.0) for side in sides) for name in names}
            rows[-1] |= {f"{name} %": max(0.0, 50 * value) for name, value in sums.items()}
    return rows


if __name__ == "__main__":
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--workdir", type=Path, action="append", required=True)
    print(table(exact_rows(parser.parse_args().workdir)))
