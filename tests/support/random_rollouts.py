# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Random rollouts on simulated devices (simulated_devices.py), to find faults of scheduling.

The service, its scheduler and block manager, the table of pages, the index of prompts, the pages in
host memory, and the moves between meshes are those of the package. Environments are random answers.
"""

import dataclasses
import functools
import random
import types
from collections.abc import Sequence

import numpy as np

from earl_jax.engine.config import EngineConfig, Sampling, SlotRules
from earl_jax.engine.engine import Policy, Session
from earl_jax.engine.pages import PageTable, Pool
from earl_jax.engine.relocation import relocate
from earl_jax.engine.rows import make_rows
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.text.conversation import Conversation, Observation
from earl_jax.rollout.answers import Answer, begin, go_on
from earl_jax.rollout.config import CacheRules, RolloutConfig
from earl_jax.rollout.service import RolloutService
from earl_jax.rollout.task import Prompt, Task
from tests.support.episodes import CONFIG, MODEL, renderer
from tests.support.simulated_devices import Devices, SimulatedEngine, ids_of

NUM_TASKS, MOST_STEPS, NUM_DEVICES = 30, 6000, 4
WINDOWS = (
    (0,), (1,), (4,), (16,), (0, 1), (0, 4), (0, 6), (0, 200), (4, 9), (5, 30), (0, 4, 4),
    (0, 0, 4), (0, 3, 12),
)  # fmt: skip


class RandomCalls:
    """Calls of environments that take a random time, and whose answers are random."""

    def __init__(self, rng: random.Random, prompts: Sequence[Sequence[int]]) -> None:
        self._rng, self._prompts, self._calls = rng, prompts, {}
        self._longest, self._speed = rng.choice([9, 9, 30]), rng.choice([0.3, 0.3, 0.6])

    def submit(self, calls) -> None:
        self._calls |= calls

    def take(self, wait_s: float = 0.0, *, at_least_one: bool = False) -> dict[int, Answer]:
        tickets = sorted(self._calls)
        taken = [ticket for ticket in tickets if self._rng.random() < self._speed]
        if at_least_one and not taken and tickets:
            taken = [self._rng.choice(tickets)]
        return {ticket: self._answer(self._calls.pop(ticket)) for ticket in taken}

    def _answer(self, call: functools.partial) -> Answer:
        rng, ids, result = self._rng, [], StepResult(text="a", reward=0.0, done=False)
        if call.func is begin:
            ids, result = rng.choice(self._prompts)[: rng.randint(3, 24)], Start(text="a")
        elif rng.random() < 0.3:
            result = StepResult(reward=0.0, done=True, stop_reason="end")
        forks = call.func is go_on and rng.random() < 0.25
        if forks:
            sample = ids_of(call.args[0])
            ids = sample[: rng.randint(0, len(sample))]
        ids = (*ids, *rng.choices(range(10, 13), k=rng.randint(1, self._longest)))
        return Answer(environment=None, result=result, observation=Observation(ids, forks))


class RandomRollout:
    """A rollout with settings, episodes, and calls of its client that are drawn with a seed.

    With `rereads` live episodes often read their samples again, and share nothing.
    """

    def __init__(self, seed: int, *, rereads: bool = False) -> None:
        rng = self.rng = random.Random(seed)
        self.num_tasks, self.prompts = 0, [rng.choices(range(10, 14), k=60) for _ in range(3)]
        rules = CacheRules(
            share_prefixes=rng.random() < 0.85,
            copy_prefixes=rng.choice(["on", "off"]),
            preemption=rng.choice(["host", "recompute"]),
            keep_replies=rng.random() < 0.3,
        )
        config, windows = _draw_config(rng), rng.choice(WINDOWS)
        if rereads:
            rules = CacheRules(share_prefixes=False, preemption="recompute")
            config = dataclasses.replace(config, page_size=1, chunk_size=8)
            windows = (4,)
        engine_config = _engine_config(config, windows)
        rule, self.max_tokens = engine_config.page_rule, config.max_episode_tokens
        shards = rng.choice([1, 1, 2, 4])
        # Rollouts that keep replies stay on their mesh, as those of a server do.
        self.grows, self.moves = rng.random() < 0.3, rng.random() < 0.5 and not rules.keep_replies
        self.updates = ["recompute"] if rereads else ["keep", "recompute"]
        self.least_pages = rule.most_pages(self.max_tokens)
        spare = rng.uniform(1, 3)
        if not rereads and rng.random() < 0.5:
            spare = 1
        pool = Pool(shards, int(self.least_pages * spare))
        self.devices = Devices(rng, rule, config.num_slots, pool)
        self.engines = {
            number: SimulatedEngine(engine_config, self.devices, number)
            for number in ((1, 2, 4) if self.moves else (shards,))
        }
        session = Session(
            engine=self.engines[shards],
            policy=Policy(params=None, version=0),
            state=self.devices,
            max_tokens=self.max_tokens,
            pages=PageTable(pool, num_slots=config.num_slots, rule=rule),
        )
        block_bytes = session.engine.page_copies.block_bytes(self.devices)
        host_gib = block_bytes * rng.choice([0, 3, 30, 10**6]) / 2**30
        self.service = RolloutService(
            session,
            dataclasses.replace(config, preemption_host_gib=host_gib),
            lambda: Conversation(renderer()),
            types.SimpleNamespace(calls=lambda look: RandomCalls(rng, self.prompts)),
            lambda task: None,
            self._grow,
            num_devices=NUM_DEVICES,
            sampling=Sampling(),
            cache_rules=rules,
            on_tokens=rng.choice([None, lambda ticket, tokens: None]),
        )
        self.devices.live = self.service._slots

    def play(self) -> None:
        """Plays all tasks, and checks that no page is held behind them."""
        num_steps = 0
        while self.num_tasks < NUM_TASKS or self.service.is_busy:
            self._act()
            for finished in self.service.step():
                self.service.release(finished.row)
                if self.rng.random() < 0.3 and finished.trajectory.turns:
                    ids = [token for turn in finished.trajectory.turns for token in turn.token_ids]
                    self.prompts[self.rng.randrange(3)] = ids
            num_steps += 1
            assert num_steps < MOST_STEPS, "the episodes do not end"
        blocks = self.service._blocks
        for slot in range(len(self.devices.slots)):
            blocks._pages.keep(slot, 0)
        assert not np.any(blocks._pages.holders()), "no slot has pages, and some are held"
        blocks._idle.store.clear()
        assert not blocks._host.held_bytes, "no episode is left, and pages are in host memory"

    def _act(self) -> None:
        """Makes a call of a client, or none."""
        rng, service = self.rng, self.service
        chance = rng.random()
        if chance < 0.35 and self.num_tasks < NUM_TASKS:
            service.submit([self._draw_task() for _ in range(rng.randint(1, 6))])
        elif chance < 0.4 and service.num_live:
            service.abort([rng.choice([e.ticket for e in self.devices.live if e is not None])])
        elif chance < 0.5:
            policy = Policy(params=None, version=service.session.policy.version + 1)
            service.update_weights(policy, rng.choice(self.updates))
        elif chance > 0.95 and self.moves:
            pages = rng.choice([1, self.least_pages * 2])
            service.move(self._relocate(service.session, rng.choice([1, 2, 4]), pages))

    def _draw_task(self) -> Task:
        rng, self.num_tasks = self.rng, self.num_tasks + 1
        prompt = None
        if rng.random() < 0.3:
            beginning = rng.choice(self.prompts)[: rng.randint(1, self.max_tokens - 8)]
            ids = (*beginning, *rng.choices(range(10, 13), k=rng.randint(1, 6)))
            prompt = Prompt(token_ids=ids)
        return Task(episode=self.num_tasks, group=self.num_tasks // 3, prompt=prompt)

    def _grow(self, session: Session, tokens: int, pages: int) -> Session:
        if not self.grows:
            return session
        shards = self.rng.choice(list(self.engines))
        return self._relocate(session, shards, pages * session.pool.shards // shards)

    def _relocate(self, session: Session, shards: int, pages: int) -> Session:
        pages = max(pages, self.least_pages, session.pages.least_pages(shards))
        return relocate(session, self.engines[shards], self.max_tokens, Pool(shards, pages))


def _draw_config(rng: random.Random) -> RolloutConfig:
    num_slots = rng.choice([4, 8, 8])
    return dataclasses.replace(
        CONFIG,
        num_slots=num_slots,
        episodes_per_step=num_slots * 2,
        chunk_size=rng.choice([2, 8]),
        burst=rng.choice([1, 4]),
        num_draft_tokens=rng.choice([0, 0, 2]),
        max_turn_tokens=rng.choice([3, 12, 30]),
        max_episode_tokens=rng.choice([48, 64, 96]),
        page_size=rng.choice([1, 2, 4, 8]),
        stop_strings=rng.choice([(), (renderer().decode((17,)),)]),
        patience_s=0.0,
    )


def _engine_config(config: RolloutConfig, windows: tuple[int, ...]) -> EngineConfig:
    num_slots, num_rows = config.num_slots, config.episodes_per_step
    rows = make_rows(num_rows=num_rows, num_slots=num_slots, num_devices=NUM_DEVICES)
    rules = SlotRules(config.burst, renderer().end_of_turn_ids, draft=config.num_draft_tokens)
    return EngineConfig(
        model=dataclasses.replace(MODEL, num_layers=len(windows), windows=windows),
        vocab_size=320,
        num_slots=num_slots,
        num_rows=rows.total,
        chunk_size=config.chunk_size,
        rules=rules,
        seed=3,
        page_size=config.page_size,
    )
