# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind at once, beside aborts, new weights and changes of the mesh.

Replies are restricted, cut and stopped; requests go on with earlier ones; pages are few; tokens are
guessed; layers have windows and sinks. What each token was drawn from is computed by hand from a
full forward pass.
"""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.soak import talkative
from earl_jax.engine.choices import choice_tree
from earl_jax.engine.config import Sampling
from earl_jax.engine.engine import Engine, Policy
from earl_jax.engine.pages import Pool
from earl_jax.engine.relocation import relocate
from earl_jax.envs.text.conversation import Completion
from earl_jax.rollout.config import Limits, Stops
from earl_jax.rollout.task import Prompt, Task
from earl_jax.sharding.layout import MeshShape
from tests.support.contexts import trainer_params
from tests.support.episodes import (
    WINDOWED,
    check_nothing_is_held,
    check_row,
    engine,
    open_service,
    renderer,
    tokenizer,
)
from tests.support.forward import row_logits

MODEL = dataclasses.replace(WINDOWED, attention_sinks=True)
SLOTS, LONGEST, BRANCHES, NUM_WEIGHTS = 4, 72, 24, 2
# The nine digits, and the end of turn.
CHOICE_WIDTH = 10
MESHES = MeshShape(data=2), MeshShape(context=2)
DIGITS = tokenizer().convert_tokens_to_ids([str(digit) for digit in range(9)])
SAMPLINGS = (
    None,
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=1.3, min_p=0.2),
)


@functools.cache
def player(mesh: MeshShape) -> Engine:
    plain = engine(SLOTS, mesh, draft=2, episodes=SLOTS, model=MODEL)
    rules = plain.config.rules._replace(
        truncates=True, choice_branches=BRANCHES, choice_width=CHOICE_WIDTH
    )
    # Spare rows for two data shards, on either mesh.
    config = dataclasses.replace(plain.config, rules=rules, num_rows=2 * SLOTS)
    return Engine(config, plain.layout)


def draw_task(rng: random.Random, number: int, past: list[list[int]]) -> Task:
    """A task that may go on with the ids of one before, or with some of them."""
    ids = rng.choice(past[-8:]) if past and rng.random() < 0.5 else DIGITS[:3] * rng.choice([0, 8])
    ids = ids[: len(ids) if rng.random() < 0.5 else rng.randint(0, len(ids))]
    count = rng.choice([2, 8, 24, 40])
    ids = [*ids, *rng.choices(DIGITS, k=rng.randint(1, 9))][: LONGEST - count]
    end = renderer().end_of_turn_id
    kind, choices, allowed = rng.random(), (), ()
    if kind < 0.25:
        drawn = {(*rng.choices(DIGITS, k=rng.randint(1, 5)), end) for _ in range(3)}
        choices = tuple(sorted(drawn))
        assert len(choice_tree(choices)[0]) <= BRANCHES
    elif kind < 0.4:
        allowed = (*rng.sample(DIGITS, rng.randint(1, 5)), end)
    return Task(
        episode=number,
        group=number,
        prompt=Prompt(token_ids=tuple(ids), choices=choices, allowed=allowed),
        limits=Limits(max_turn_tokens=count),
        sampling=rng.choice(SAMPLINGS),
        stops=Stops(strings=("34", "0") if rng.random() < 0.2 else ()),
        model_logprobs=True,
    )


def may_follow(prompt: Prompt, reply: tuple[int, ...]) -> list[int]:
    """The tokens of the vocabulary that may come behind so much of a reply."""
    if prompt.choices:
        longer = [each for each in prompt.choices if each[: len(reply)] == reply]
        return sorted({each[len(reply)] for each in longer if len(each) > len(reply)})
    return sorted({*prompt.allowed}) or [*range(320)]


def drawn_from(logits_V: np.ndarray, may: list[int], sampling: Sampling) -> dict[int, float]:
    """The log-prob of each token that could be drawn, by the definition of `Sampling`."""
    scaled = logits_V[may].astype(float) / (sampling.temperature or 1.0)
    mass = np.exp(scaled - scaled.max())
    if 0 < sampling.top_k < len(mass):
        mass[mass < np.sort(mass)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        ordered = np.sort(mass)[::-1]
        sums = np.cumsum(ordered)
        mass[mass < ordered[np.searchsorted(sums, sampling.top_p * sums[-1])]] = 0
    mass[mass < sampling.min_p] = 0
    return {may[i]: float(np.log(mass[i] / mass.sum())) for i in np.flatnonzero(mass)}


def check_reply(task: Task, turn, logits: list[np.ndarray]) -> None:
    """Each token could come, with the log-probs of the weights of its version."""
    assert task.prompt is not None
    first = len(task.prompt.token_ids)
    for place, (token, version) in enumerate(zip(turn.token_ids, turn.versions, strict=True)):
        logits_V = logits[version % NUM_WEIGHTS][first + place - 1]
        may = may_follow(task.prompt, turn.token_ids[:place])
        expected = drawn_from(logits_V, may, task.sampling or Sampling())
        plain = drawn_from(logits_V, may, Sampling())
        assert turn.logprobs[place] == pytest.approx(expected[token], abs=2e-5)
        assert turn.model_logprobs[place] == pytest.approx(plain[token], abs=2e-5)


class Client:
    """Acts before each round, by chance, until so many tokens are sampled."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.rng, self.num_tokens = random.Random(seed), num_tokens
        self.values = [talkative(number, MODEL) for number in range(NUM_WEIGHTS)]
        end = renderer().end_of_turn_id
        self.service = open_service(
            None,
            None,
            params=self._weights(player(MESHES[0]), 0),
            max_tokens=LONGEST,
            num_slots=SLOTS,
            pages=int(1.15 * player(MESHES[0]).config.page_rule.most_pages(LONGEST)),
            grow=lambda session, tokens, pages: session,
            player=player(MESHES[0]),
            num_devices=2,
            max_context=LONGEST,
            new_conversation=lambda: Completion(tokenizer().decode, frozenset({end})),
            episodes_per_step=SLOTS,
            num_draft_tokens=2,
            share_prefixes=True,
            keep_replies=True,
            copy_prefixes="on",
            preemption="host",
            preemption_host_gib=2**19 / 2**30,
        )
        self.owner: dict[int, Task] = {}
        self.played: list[tuple[Task, list[int], object]] = []
        self.counts = dict.fromkeys(("submit", "abort", "update", "move"), 0)

    def _weights(self, there: Engine, version: int):
        return there.load_params(jax.tree.map(jnp.asarray, self.values[version % NUM_WEIGHTS]))

    def play(self) -> None:
        chances = {"submit": 0.5, "abort": 0.03, "update": 0.03, "move": 0.02}
        service = self.service
        while service.stats.rollout_tokens < self.num_tokens or service.is_busy:
            for name, chance in chances.items():
                if self.rng.random() < chance:
                    self.counts[name] += bool(getattr(self, name)())
            for each in service.step():
                check_row(service, each)
                service.release(each.row)
                task, turns = self.owner.pop(each.ticket), each.trajectory.turns
                self.played.append((task, [t for turn in turns for t in turn.token_ids], turns[-1]))

    def submit(self) -> bool:
        if len(self.owner) > 2 * SLOTS or self.service.stats.rollout_tokens >= self.num_tokens:
            return False
        past = [ids for _, ids, _ in self.played if len(ids) < LONGEST - 12]
        task = draw_task(self.rng, self.counts["submit"], past)
        self.owner[self.service.submit([task])[0]] = task
        return True

    def abort(self) -> bool:
        chosen = self.rng.sample(sorted(self.owner), min(2, len(self.owner)))
        return any([self.service.abort([t]) and self.owner.pop(t, None) for t in chosen])

    def update(self) -> bool:
        session = self.service.session
        version = session.policy.version + 1
        params = self._weights(session.engine, version)
        self.service.update_weights(Policy(params=params, version=version), "recompute")
        return True

    def move(self) -> bool:
        session = self.service.session
        there = player(MESHES[session.engine is player(MESHES[0])])
        shards = there.layout.num_row_shards
        pool = Pool(shards, session.pool.total // shards)
        if pool.pages < session.pages.least_pages(shards):
            return False
        self.service.move(relocate(session, there, LONGEST, pool))
        return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_each_token_is_drawn_from_what_its_request_allows(seed):
    client = Client(seed, 1500)
    client.play()
    client.service._blocks._idle.store.clear()
    check_nothing_is_held(client.service, LONGEST)
    params = [trainer_params(each) for each in client.values]
    score = jax.jit(functools.partial(row_logits, MODEL))
    for task, ids, turn in client.played:
        row = np.zeros((1, LONGEST), np.int32)
        row[0, : len(ids)] = ids
        segments = (np.arange(LONGEST)[None] < len(ids)).astype(np.int32)
        check_reply(task, turn, [np.asarray(score(each, row, segments)[0]) for each in params])
    stats = client.service.stats
    assert all(client.counts.values()), client.counts
    for name in ("preempted_episodes", "preempted_host_bytes", "recomputed_tokens"):
        assert getattr(stats, name), name
    assert stats.shared_tokens and stats.copied_tokens and stats.accepted_tokens
    kinds = {bool(task.prompt and task.prompt.choices) for task, _, _ in client.played}
    assert kinds == {True, False}, "or the test shows nothing"
