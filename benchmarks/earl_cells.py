# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""EARL's table of 30 cells against the selector's own candidates on 128 H100s.

EARL (arXiv 2510.05943) measured by how many per cent tensor parallelism over 8 GPUs decodes more
tokens per second and GPU than over 4, for a context length and a number of responses an engine.
Here both are candidates of one problem, "data=32,tensor=4" and "data=16,tensor=8" over the same
GPUs, with so many slots a row shard: `Candidates.rollouts` says how many pages fit and how
fast each is. EARL's engine is a published one, so that its kernels are `hardware.IDEAL`; the second
table has this project's engine beside it. `python -m benchmarks.plan` prints the tables.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from earl_jax.config.file import make_config
from earl_jax.models.presets import preset_vocab_size
from earl_jax.placement.problem import planned_problem
from earl_jax.selector.candidates import Candidates
from earl_jax.selector.choose import Candidate
from earl_jax.selector.hardware import IDEAL, parse_topology
from earl_jax.selector.plans import RolloutPlan

# EARL's table 1: gain of TP8 over TP4 in per cent, None where TP4 ran out of memory.
RESPONSES = (8, 16, 32, 64, 128)
GAINS: dict[int, tuple[float | None, ...]] = {
    32768: (-1.5, 4.6, 5.0, 6.5, None),
    16384: (-18.8, -5.0, 3.4, 5.5, 3.1),
    8192: (-24.7, -20.8, -4.4, 6.4, 5.2),
    4096: (-18.0, -25.2, -21.9, -5.9, 5.1),
    2048: (-20.0, -28.6, -26.3, -16.6, -5.5),
    1024: (-21.1, -32.2, -30.7, -29.1, -6.9),
}
MODEL, TOPOLOGY = "qwen2.5-72b", "h100:16x8"
TP4, TP8 = "data=32,tensor=4", "data=16,tensor=8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Assumptions that the paper does not state.

    An engine takes `fraction` of each GPU's memory (vLLM's default). Between two answers of 128
    tokens each response has `turn` sampled ones: with many, all is decoding, which EARL measured.
    `is_ours` is this project's engine in place of a published one.
    """

    fraction: float = 0.9
    turn: int = 512
    is_ours: bool = False


class Cell(NamedTuple):
    """One of EARL's: the gain of TP8 over TP4 in per cent, measured; None: TP4 out of memory."""

    context: int
    responses: int
    gain: float | None


class Found(NamedTuple):
    """A computed gain, and whether pages for all responses fit on four GPUs."""

    gain: float
    fits: bool


CELLS = tuple(
    Cell(context, responses, gain)
    for context, gains in GAINS.items()
    for responses, gain in zip(RESPONSES, gains, strict=True)
)
SETUPS = {
    "as above: 0.9 of a GPU's memory, 512 tokens sampled in a row": Setup(),
    "0.75 of a GPU's memory, which JAX takes": Setup(fraction=0.75),
    "0.95 of a GPU's memory": Setup(fraction=0.95),
    "64 tokens in a row": Setup(turn=64),
    "16 tokens in a row": Setup(turn=16),
}


def candidates_for(setup: Setup) -> Candidates:
    """Returns the candidates of both meshes on 128 H100s with nothing beside the rollout."""
    hardware, most = parse_topology(TOPOLOGY), 32 * max(RESPONSES)
    if not setup.is_ours:
        hardware = dataclasses.replace(hardware, kernels=IDEAL)
    config = make_config(
        {
            "model": {"preset": MODEL, "compute_dtype": "bfloat16"},
            "rollout": {
                "num_slots": most,
                "episodes_per_step": most,
                "max_turn_tokens": setup.turn,
                "chunk_size": 128,
                "context_buckets": (1024, 32768),
                "page_size": 16,
            },
            "selector": {"rollout_meshes": (TP4, TP8)},
        }
    )
    budget, vocab_size = int(setup.fraction * hardware.memory_bytes), preset_vocab_size(MODEL)
    problem = planned_problem(config, config.model, vocab_size, hardware, budget)
    return Candidates(problem)


def on_both(candidates: Candidates, cell: Cell) -> dict[str, Candidate[RolloutPlan]]:
    """Returns both meshes with a cell's responses in each row shard, by mesh."""
    problem, found = candidates.problem, {}
    for mesh in problem.meshes("rollout"):
        plan = RolloutPlan(mesh, cell.responses * mesh.data, 0)
        found[str(mesh)] = candidates.rollout(plan, cell.context, None, problem.budget)
    return found


def predicted(candidates: Candidates, cell: Cell) -> Found:
    """Returns a cell's gain in per cent, and whether it fits on four GPUs."""
    four, eight = (on_both(candidates, cell)[name] for name in (TP4, TP8))
    slots = four.plan.num_slots // four.plan.mesh.data
    dense = slots * candidates.problem.least_pages(cell.context)
    gain = 100 * (eight.tokens_per_s / four.tokens_per_s - 1)
    return Found(gain, four.plan.pages == dense)


def is_right(cell: Cell, found: Found) -> bool:
    """Returns True where the sign of the gain is right, or the lack of memory."""
    return not found.fits if cell.gain is None else (cell.gain > 0) == (found.gain > 0)


def wrong_cells(setup: Setup) -> list[tuple[Cell, Found]]:
    """Returns those of the 30 that are not predicted."""
    candidates = candidates_for(setup)
    found = [(cell, predicted(candidates, cell)) for cell in CELLS]
    return [(cell, each) for cell, each in found if not is_right(cell, each)]


def lines() -> Iterator[str]:
    """Yields both tables, in Markdown."""
    candidates = candidates_for(Setup())
    yield f"| context | {' | '.join(map(str, RESPONSES))} |"
    yield "|---" * (1 + len(RESPONSES)) + "|"
    for context in GAINS:
        words = [_words(cell, predicted(candidates, cell)) for cell in CELLS if cell[0] == context]
        yield f"| {context // 1024}K | {' | '.join(words)} |"
    yield ""
    yield "| set-up | engine | cells right | wrong (context x responses: computed gain) |"
    yield "|---|---|---|---|"
    for name, setup in SETUPS.items():
        for engine, is_ours in (("published", False), ("ours", True)):
            wrong = wrong_cells(dataclasses.replace(setup, is_ours=is_ours))
            named = ", ".join(
                f"{c.context // 1024}K x {c.responses}: {f.gain:+.1f}" for c, f in wrong
            )
            right = f"{len(CELLS) - len(wrong)} of {len(CELLS)}"
            yield f"| {name} | {engine} | {right} | {named or 'none'} |"


def _words(cell: Cell, found: Found) -> str:
    measured = "out of memory" if cell.gain is None else f"{cell.gain:+.1f}"
    wrong = "" if is_right(cell, found) else " wrong"
    return f"{measured} ({found.gain:+.1f}{'' if found.fits else ' short'}){wrong}"
