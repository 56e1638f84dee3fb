# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves in the middle of a run and of a rollout: what is learnt and what is said stay the same.

The policy may say legal moves only, so that games are whole from the first step on.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from earl_jax.calibrate import Calibration
from earl_jax.selector.ladder import TrainRung
from earl_jax.selector.throughput import ThroughputTable
from earl_jax.survival import Ladder

from earl_jax.config_file import make_config
from earl_jax.loop import Position, StepRecord, expected_tokens, play, train
from earl_jax.placement import Placement
from earl_jax.rollout.collect import Collector
from earl_jax.rollout.config import Limits, Sampling
from earl_jax.rollout.pages import pages_for
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.step import TrainState
from earl_jax.world import World
from tests.support.episodes import assert_same_episodes

D8 = MeshShape(data=8)
D4T2 = MeshShape(data=4, tensor=2)
F8 = MeshShape(fsdp=8)
# A whole game is up to 40 tokens.
SMALL, MIDDLE, LARGE = ROOMS = (24, 32, 48)
GIVEN = {
    "num_steps": 9,
    "env": {"mask_illegal": True},
    "model": {
        "num_layers": 1,
        "width": 32,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_size": 8,
        "ffn_size": 64,
    },
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 32,
        "burst": 2,
        "max_turn_tokens": 4,
        "context_buckets": ROOMS,
        # Rounds wait for every answer.
        "patience_s": 60.0,
        "model_logprobs": True,
    },
    "selector": {
        "order": "listed",
        "rollout_meshes": (str(D8), str(D4T2)),
        "train_meshes": (str(D8), str(F8)),
    },
    "train": {"ratio": "model", "learning_rate": 4e-3, "epochs": 2, "demonstration_steps": 0},
}


@pytest.fixture(scope="module")
def world():
    return World(make_config(GIVEN))


@pytest.fixture(scope="module")
def calibration(world):
    """What was compiled for one test is known in the other."""
    return Calibration(world, ThroughputTable(path=None, measurements={}), lambda _: None)


# Training.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a step left: where the trainer was, and its state behind the step."""

    record: StepRecord
    mesh: MeshShape
    rung: str
    switched: bool
    # Of the embedding, on one device.
    shard_shape: tuple[int, ...]
    state: TrainState

    @property
    def numbers(self) -> list[tuple[float, float]]:
        """Loss and norm of the gradients of each update."""
        return [(update.loss, update.grad_norm) for update in self.record.updates]


def learn(world: World, calibration: Calibration, budget: int | None) -> list[Step]:
    """Nine steps with the same tasks, within this budget."""
    world.budget_bytes = budget
    placement = Placement(world, calibration)
    placement.choose_step(expected_tokens(world, None), None)
    steps: list[Step] = []

    def keep(position: Position, record: StepRecord) -> bool:
        embed = position.state.params["embed"]
        steps.append(
            Step(
                record=record,
                mesh=placement.in_training,
                rung=placement.rung,
                switched=any(d.switched for d in placement.take_log().decisions),
                shard_shape=embed.addressable_shards[0].data.shape,
                state=jax.tree.map(np.array, position.state),
            )
        )
        return False

    state = world.first_train_state(placement.in_training)
    train(world, placement, Position(step=0, state=state, history=LoadHistory()), keep)
    return steps


def difference(ours: Any, theirs: Any, least: float = 0.0) -> float:
    """The largest, as a part of the largest number, or of `least` where that is more."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / max(least, np.abs(theirs).max()))


@pytest.mark.slow
def test_a_trainer_that_changes_its_mesh_and_its_rung_learns_as_one_that_stays(
    world, calibration, monkeypatch
):
    """Three steps of short games, three of longer ones, three of whole ones, within a budget.

    What differs is the order of sums: gradients are added over eight devices before or behind the
    optimizer's cut, and over two micro-batches. A number of fp32 is exact to 6e-8, and a step's
    numbers are sums of some hundred tokens, nine times in a row: 1e-5 leaves room for it, and a
    part of a batch that is forgotten or counted twice is off by more than a hundredth.
    """
    longest, tasks = [size for size in ROOMS for _ in range(3)], world.training_tasks
    monkeypatch.setattr(world, "rollout_candidates", [D8])
    monkeypatch.setattr(
        world,
        "training_tasks",
        lambda step: [
            dataclasses.replace(
                task, limits=Limits(max_turn_tokens=4, max_episode_tokens=longest[step])
            )
            for task in tasks(step)
        ],
    )
    monkeypatch.setattr(world, "budget_bytes", None)

    def need(mesh, room, rung=None):
        options = calibration.train_options(room, rung)
        return next(option.bytes_per_device for option in options if option.mesh == mesh)

    half = TrainRung(2, True)
    fits = max(need(D8, SMALL), need(F8, MIDDLE), need(F8, LARGE, half))
    breaks = min(need(D8, MIDDLE), need(F8, LARGE))
    assert fits < breaks
    stays, moves = (learn(world, calibration, n) for n in (None, (fits + breaks) // 2))

    # Both switches happened, each with steps on both sides of it, and in one run only.
    meshes, rungs = [step.mesh for step in moves], [step.rung for step in moves]
    first = meshes.index(F8)
    then = next(number for number, rung in enumerate(rungs) if rung)
    assert 2 <= first < then < len(moves) - 1
    assert meshes == [D8] * first + [F8] * (len(moves) - first)
    assert set(rungs[:then]) == {""} and rungs[then].startswith("training in")
    assert any(step.switched for step in moves[first - 1 : first + 1])
    whole = stays[0].shard_shape
    assert {step.shard_shape for step in stays} == {whole}
    assert all(
        np.prod(step.shard_shape) * (8 if number >= first else 1) == np.prod(whole)
        for number, step in enumerate(moves)
    )
    assert {(step.mesh, step.rung, step.switched) for step in stays} == {(D8, "", False)}

    # The same rollouts, in the same place.
    for one, other in zip(stays, moves, strict=True):
        assert {one.record.rollout_mesh, other.record.rollout_mesh} == {str(D8)}
        for ours, theirs in zip(one.record.trajectories, other.record.trajectories, strict=True):
            assert [t.token_ids for t in ours.turns] == [t.token_ids for t in theirs.turns]
            assert ours.reward == theirs.reward
    assert len({outcome.reward for outcome in moves[-1].record.outcomes}) > 1

    # To the last bit before the switch, and by rounding behind it.
    for one, other in zip(stays[:first], moves[:first], strict=True):
        assert one.numbers == other.numbers
        jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    pairs = list(zip(stays[first:], moves[first:], strict=True))
    # A loss is a mean of terms as large as an advantage, 1, and may itself be about 0.
    curves = max(difference(other.numbers, one.numbers, least=1.0) for one, other in pairs)
    ends = moves[-1].state.params, stays[-1].state.params
    weights = max(map(difference, *map(jax.tree.leaves, ends)))
    print(
        f"switches in steps {first + 1} and {then + 1}; largest difference: loss and norms "
        f"{curves:.1e}, parameters {weights:.1e}"
    )
    assert 0 < curves < 1e-5
    assert 0 < weights < 1e-5


# Rollouts.


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_live_episodes_that_outgrow_the_budget_go_on_elsewhere_with_the_same_tokens(
    world, calibration, monkeypatch, temperature
):
    """On data=8 the budget holds the smallest room only, on tensor=2 the largest too."""
    beside = Ladder(world).trainer_bytes(D8)
    monkeypatch.setattr(world, "budget_bytes", None)

    def need(room):
        least = pages_for(room, world.config.rollout.tokens_a_page)
        options = calibration.rollout_options(room, beside, least)
        return {option.mesh: option.bytes_per_device for option in options}

    # A slot a lane: its pages are those of one episode, and there are no fewer.
    budget = need(MIDDLE)[D8] - 1
    assert need(SMALL)[D8] <= budget and need(LARGE)[D4T2] <= budget

    collectors, moves = [], []

    class Watched(Collector):
        def __init__(self, *given, **settings):
            super().__init__(*given, **settings)
            collectors.append(self)

    monkeypatch.setattr("earl_jax.loop.Collector", Watched)
    params = world.init_train_state(D8).params

    def rollout(budget_bytes):
        monkeypatch.setattr(world, "budget_bytes", budget_bytes)
        placement = Placement(world, calibration)
        placement.train_mesh = D8
        placement.choose_rollout(SMALL, None)
        assert (placement.in_rollout, placement.places) == (D8, SMALL)
        make_room = placement.make_room

        def noting(seat, *wanted):
            grown = make_room(seat, *wanted)
            live = [episode for episode in collectors[-1]._slots if episode is not None]
            begun = {e.task.episode: e.length for e in live if e.num_cached}
            moves.append((seat.engine.layout.shape, grown.engine.layout.shape, begun))
            return grown

        monkeypatch.setattr(placement, "make_room", noting)
        seat, _ = placement.open_seat(params, version=0)
        tasks, sampling = world.training_tasks(0), Sampling(temperature=temperature)
        return play(world, placement, seat, tasks, None, sampling), placement

    stayed, _ = rollout(None)
    assert {(was, is_) for was, is_, _ in moves} == {(D8, D8)}
    moves.clear()
    moved, placement = rollout(budget)
    (went,) = [begun for was, is_, begun in moves if (was, is_) == (D8, D4T2)]
    assert placement.in_rollout == moved.seat.engine.layout.shape == D4T2
    assert any(d.stage == "rollout" and d.switched for d in placement.take_log().decisions)
    # Episodes were played on both sides of the move.
    ends = {t.episode: t.num_tokens for t in moved.trajectories}
    assert len(went) >= 4
    assert sum(ends[episode] > length for episode, length in went.items()) >= 4
    assert max(ends.values()) > MIDDLE
    assert_same_episodes(stayed.trajectories, moved.trajectories)
    for count in ("rollout_tokens", "parked_episodes", "recomputed_tokens"):
        assert getattr(moved.stats, count) == getattr(stayed.stats, count), count
    # Larger row shards share more of what they read.
    assert moved.stats.shared_tokens >= stayed.stats.shared_tokens
    read = [r.stats.prefill_tokens + r.stats.shared_tokens for r in (moved, stayed)]
    assert read[0] == read[1]
