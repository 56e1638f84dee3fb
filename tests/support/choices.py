# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Environments that restrict their replies to choices, and an engine that samples them."""

import functools

from earl_jax.engine.config import EngineConfig, SlotRules
from earl_jax.engine.engine import Engine
from earl_jax.envs.environment import Start, StepResult
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.episodes import CONFIG, MODEL, num_rows, renderer

HOT = 300.0
BRANCHES = 18


@functools.cache
def engine_for(
    branches: int, burst: int = CONFIG.burst, mesh: MeshShape | None = None, choice_width: int = 0
):
    rules = SlotRules(
        burst=burst,
        end_of_turn_ids=renderer().end_of_turn_ids,
        model_logprobs=True,
        choice_branches=branches,
        choice_width=choice_width,
    )
    config = EngineConfig(
        model=MODEL,
        vocab_size=320,
        num_slots=CONFIG.num_slots,
        num_rows=num_rows(CONFIG.num_slots, CONFIG.episodes_per_step),
        chunk_size=CONFIG.chunk_size,
        rules=rules,
        seed=3,
    )
    return Engine(config, make_layout(mesh or MeshShape(data=8)))


class Words:
    """Allows words of different lengths that begin alike, then others, then anything."""

    ROUNDS = (("1", "12", "123", "21"), ("0", "00"), ())

    def __init__(self, replies_seen: list[tuple[str, ...]]):
        self.replies_seen, self.replies = replies_seen, []

    def start(self):
        return Start(text="go.", role="x", choices=self.ROUNDS[0])

    def step(self, reply: str):
        self.replies.append(reply)
        self.replies_seen.append(tuple(self.replies))
        if len(self.replies) == len(self.ROUNDS):
            return StepResult(reward=1.0, done=True, stop_reason="win")
        choices = self.ROUNDS[len(self.replies)]
        return StepResult(text="7.", reward=0.0, done=False, choices=choices)
