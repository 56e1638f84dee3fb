# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of both meshes of a step: what a step takes, what fits beside what, when to leave."""

import dataclasses
import itertools
import math
import random
import time

import numpy as np
import pytest

from benchmarks.choose import meshes_of
from earl_jax.selector.choose import NOISE, BudgetTooSmall, Option, Settings
from earl_jax.selector.pairs import Cost, Room, first_two
from earl_jax.selector.step_choice import Pair, Work, choose_step, steps_until_outgrown
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW, Load, LoadHistory

D8 = MeshShape(data=8)
D4T2 = MeshShape(data=4, tensor=2)
D2T4 = MeshShape(data=2, tensor=4)
F8 = MeshShape(fsdp=8)
CALM = WINDOW


def option(mesh, num_bytes, speed, move_s=0.0, impossible=""):
    return Option(
        mesh=mesh,
        bytes_per_device=num_bytes,
        tokens_per_s=speed,
        move_s=move_s,
        impossible=impossible,
    )


def load(longest=40, **fields):
    return Load(
        **{
            "context_tokens_max": longest,
            "context_tokens_mean": 30.0,
            "tokens_in_flight_max": 100,
            "rollout_tokens": 1000,
            **fields,
        }
    )


def work(expected=None, rollout_tokens=1000, train_tokens=1000, places=48):
    return Work(
        load=expected,
        rollout_places=places,
        train_places=places,
        rollout_tokens=rollout_tokens,
        train_tokens=train_tokens,
    )


def decide(rollouts, trains, resident, *, current=None, budget=None, calm=CALM, step=None, **rules):
    return choose_step(
        rollouts,
        trains,
        resident_bytes=resident,
        current=current,
        calm_steps=calm,
        work=step or work(),
        settings=Settings(budget_bytes=budget, **{"hysteresis": 0.0, "horizon_steps": 10, **rules}),
    )


# By hand. 1,000 tokens each: 10 s or 5 s of rollout, 10 s or 8 s of training.
ROLLOUTS = [option(D8, 60, 100.0), option(D4T2, 30, 200.0)]
TRAINS = [option(D8, 80, 100.0), option(F8, 50, 125.0, move_s=6.0)]
RESIDENT = [40, 5]


def test_the_start_takes_the_shortest_step():
    decision = decide(ROLLOUTS, TRAINS, RESIDENT)
    assert decision.pair == Pair(D4T2, F8)
    assert decision.predicted_s == 5 + 8
    assert not decision.rollout.switched and not decision.train.switched
    # The way of the weights belongs to each step: 20 s of it and the slower rollout is faster.
    far = [ROLLOUTS[0], dataclasses.replace(ROLLOUTS[1], move_s=20.0)]
    decision = decide(far, TRAINS, RESIDENT)
    assert (decision.pair, decision.predicted_s) == (Pair(D8, F8), 10 + 8)


def test_what_the_trainer_leaves_decides_where_a_rollout_fits():
    """data=8 rolls out in 60, and beside a trainer on data=8, which leaves 40, needs 100."""
    fast = [option(D8, 60, 900.0), ROLLOUTS[1]]
    assert decide(fast, TRAINS, RESIDENT, budget=100).pair == Pair(D8, F8)
    slow_cut = [option(D8, 80, 500.0), TRAINS[1]]
    assert decide(fast, slow_cut, RESIDENT, budget=100).pair == Pair(D8, D8)
    # One byte less, and it is one or the other: 1.1 s + 8 s against 5 s + 2 s.
    assert decide(fast, slow_cut, RESIDENT, budget=99).pair == Pair(D4T2, D8)
    decision = decide(fast, slow_cut, RESIDENT, budget=99, current=Pair(D8, D8), calm=0)
    assert decision.pair == Pair(D4T2, D8)
    assert "needs 100 B of a budget of 99 B per device beside training on data=8" in (
        decision.rollout.reason
    )
    assert decision.rollout.bytes_per_device == 30 + 40


def test_a_switch_is_spread_over_the_steps_that_the_choice_will_last():
    """The trainer's move takes 6 s and saves 2 s a step: worth it over more than 3 steps."""
    here = Pair(D4T2, D8)
    stays = decide(ROLLOUTS, TRAINS, RESIDENT, current=here, horizon_steps=3)
    assert stays.pair == here
    leaves = decide(ROLLOUTS, TRAINS, RESIDENT, current=here, horizon_steps=4)
    assert leaves.pair == Pair(D4T2, F8)
    assert (leaves.rollout.switched, leaves.train.switched) == (False, True)
    # Contexts of 40 that grow by 4 have outgrown a room of 48 in 2 steps, those by 2 in 4.
    growing = work(load(40, growth_tokens=4.0))
    assert steps_until_outgrown(growing, 20) == 2
    assert decide(ROLLOUTS, TRAINS, RESIDENT, current=here, step=growing).pair == here
    slower = work(load(40, growth_tokens=2.0))
    assert steps_until_outgrown(slower, 20) == 4
    assert decide(ROLLOUTS, TRAINS, RESIDENT, current=here, step=slower).pair == leaves.pair


@pytest.mark.parametrize(
    "growth, places, horizon, steps",
    [(0.0, 48, 20, 20), (1.0, 48, 20, 8), (3.0, 48, 20, 3), (9.0, 40, 20, 1), (0.1, 48, 20, 20)],
)
def test_how_long_a_choice_will_last(growth, places, horizon, steps):
    assert steps_until_outgrown(work(load(40, growth_tokens=growth), places=places), horizon) == (
        steps
    )


def test_a_rollout_moves_between_steps_for_nothing_and_a_pair_is_left_only_after_a_window():
    here = Pair(D8, F8)
    # 18 s against 13 s: 38 % shorter.
    assert decide(ROLLOUTS, TRAINS, RESIDENT, current=here, hysteresis=0.37).pair != here
    assert decide(ROLLOUTS, TRAINS, RESIDENT, current=here, hysteresis=0.39).pair == here
    assert decide(ROLLOUTS, TRAINS, RESIDENT, current=here, calm=CALM - 1).pair == here
    # What no mesh changes counts too: 18 + 20 against 13 + 20 is 15 %.
    waiting = work(load(other_s=20.0))
    assert decide(ROLLOUTS, TRAINS, RESIDENT, current=here, step=waiting, hysteresis=0.2).pair == (
        here
    )


def test_speeds_that_differ_by_noise_are_equal_at_the_start():
    near = [option(D8, 1, 100.0), option(D4T2, 1, 101.5)]
    one = [option(D8, 1, 1e6)]
    assert decide(near, one, [0], hysteresis=0.15).pair.rollout == D8
    assert decide(near, one, [0], hysteresis=0.01).pair.rollout == D4T2


def test_noise_of_a_long_stage_does_not_hide_what_a_short_one_loses():
    """100 s of rollout, and 5 s or 4 s of training: 1 % of the step, and a fifth of the update."""
    long, trains = [option(D8, 1, 10.0)], [option(D8, 1, 200.0), option(F8, 1, 250.0)]
    decision = decide(long, trains, [0, 0], hysteresis=0.15)
    assert (decision.pair.train, decision.predicted_s) == (F8, 100 + 4)
    # The same the other way round; and of a stage that differs by noise the first.
    short = [option(D8, 1, 200.0), option(D4T2, 1, 250.0), option(D2T4, 1, 251.0)]
    decision = decide(short, [option(D8, 1, 10.0)], [0], hysteresis=0.15)
    assert (decision.pair.rollout, decision.predicted_s) == (D4T2, 4 + 100)
    # Environments that take longer than everything hide nothing either.
    busy = work(load(other_s=10_000.0))
    assert decide(long, trains, [0, 0], step=busy, hysteresis=0.15).pair.train == F8


def test_without_speeds_the_fewest_meshes_change():
    rollouts = [option(D8, 60, None), option(D4T2, 30, None), option(D2T4, 20, None)]
    trains = [option(D8, 80, None), option(F8, 50, None)]
    start = decide(rollouts, trains, RESIDENT)
    assert (start.pair, start.predicted_s) == (Pair(D8, D8), None)
    # 60 + 40 do not fit 99: either mesh may change, the training mesh comes first.
    left = decide(rollouts, trains, RESIDENT, budget=99, current=Pair(D8, D8))
    assert left.pair == Pair(D8, F8)
    left = decide(rollouts, trains[:1], RESIDENT[:1], budget=99, current=Pair(D8, D8))
    assert left.pair == Pair(D4T2, D8)
    # What would fit again stays where it is.
    assert decide(rollouts, trains, RESIDENT, current=Pair(D4T2, F8)).pair == Pair(D4T2, F8)


def test_what_failed_before_is_no_candidate():
    failed = [dataclasses.replace(ROLLOUTS[1], impossible="ran out of memory"), ROLLOUTS[0]]
    decision = decide(failed, TRAINS, RESIDENT, current=Pair(D4T2, F8))
    assert decision.pair == Pair(D8, F8)
    assert "leaves data=4,tensor=2, which ran out of memory, for data=8" in decision.rollout.reason
    assert "impossible: rollout on data=4,tensor=2 ran out of memory" in decision.reason
    with pytest.raises(BudgetTooSmall, match=r"are left: rollout on data=4,tensor=2 ran out"):
        decide(failed[:1], TRAINS, RESIDENT)


def test_where_all_failed_the_least_that_was_not_enough_is_named():
    """Of max(rollout + what the trainer leaves, training) the least that is known."""
    failed = [option(D8, 20, None, impossible="ran out of memory"), option(D4T2, 0, None)]
    failed[1] = dataclasses.replace(failed[1], impossible="ran out of memory")
    with pytest.raises(BudgetTooSmall, match="Use devices with more than 50 B of memory each"):
        decide(failed, [option(F8, 50, 1.0)], [5])
    with pytest.raises(BudgetTooSmall, match="Use devices with more memory each"):
        decide(failed[1:], [option(F8, 50, 1.0)], [5])


def test_what_cannot_be_needs_no_speed():
    """The second of the list is chosen because it is faster, though others were never timed."""
    rollouts = [option(D8, 10, 100.0), option(D4T2, 10, 200.0), option(D2T4, 1000, None)]
    trains = [option(D8, 10, 100.0), option(F8, 10, None, impossible="ran out of memory")]
    decision = decide(rollouts, trains, [1, 1], budget=99)
    assert decision.pair == Pair(D4T2, D8)
    assert decision.predicted_s == 1000 / 200 + 1000 / 100


def test_the_smallest_budget_that_would_do_is_named_and_does():
    """The least of max(rollout + what the trainer leaves, training): 30 + 5 and 50."""
    with pytest.raises(BudgetTooSmall, match=r"is 49, .* smallest budget that would do is 50 \("):
        decide(ROLLOUTS, TRAINS, RESIDENT, budget=49)
    assert decide(ROLLOUTS, TRAINS, RESIDENT, budget=50).pair == Pair(D4T2, F8)


def test_the_decision_says_what_was_second_and_what_cannot_be():
    decision = decide(ROLLOUTS, TRAINS, RESIDENT, budget=70, step=work(load()))
    assert decision.reason == (
        "a step of 13.00 s expected; second: rollout on data=8 with training on data=1,fsdp=8, "
        "38% slower; impossible: train on data=8 needs 80 B of a budget of 70 B per device"
    )
    assert decision.rollout.reason == (
        "starts on data=4,tensor=2: fastest that fits; contexts up to 40 tokens, 100 in flight, "
        "room for 48 tokens an episode, 35 B of 70 B per device, 200 tokens/s measured"
    )
    stays = decide(ROLLOUTS, TRAINS, RESIDENT, current=Pair(D8, F8), hysteresis=0.5)
    assert "second: rollout on data=4,tensor=2 with training on data=1,fsdp=8, 28% faster" in (
        stays.reason
    )
    alone = decide(ROLLOUTS[:1], TRAINS[:1], RESIDENT[:1])
    assert "no other meshes are possible" in alone.reason


def test_growing_contexts_are_moved_for_a_step_before_the_wall():
    """The mesh that cannot hold the next room is left when the forecast comes to it."""
    history, current, seen = LoadHistory(), None, []
    for longest in range(20, 60, 4):
        expected = history.forecast()
        places = 48 if expected is None or expected.context_tokens_max <= 48 else 96
        rollouts = [option(D8, places, 200.0), option(D4T2, places // 2, 100.0)]
        decision = decide(
            rollouts, TRAINS, RESIDENT, current=current, budget=100, step=work(expected)
        )
        current = decision.pair
        seen.append((longest, decision.rollout.mesh))
        history = history.add(load(longest))
    # The step whose episodes came to 52 tokens was played where there is room for them.
    assert [mesh for longest, mesh in seen if longest <= 48] == [D8] * 8
    assert [mesh for longest, mesh in seen if longest > 48] == [D4T2] * 2


@pytest.mark.parametrize(("tokens", "sizes"), [(1024, (76, 420)), (131_072, (336, 1540))])
def test_the_choice_for_4096_devices_takes_less_than_100_ms(tokens, sizes):
    """Of up to 517,440 pairs, for a mixture of 128 experts. Timed by benchmarks/choose.py."""
    rollouts, trains = meshes_of(4096, 128, tokens)
    assert (len(rollouts), len(trains)) == sizes
    rng = random.Random(0)
    fast = [option(m, rng.randint(1, 99), rng.uniform(1, 9)) for m in rollouts]
    slow = [option(m, rng.randint(1, 99), rng.uniform(1, 9)) for m in trains]
    resident = [rng.randint(1, 9) for _ in trains]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        decision = decide(fast, slow, resident, budget=70, current=Pair(rollouts[0], trains[0]))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1
    best = min(
        1000 / r.tokens_per_s + 1000 / t.tokens_per_s
        for (r, t), kept in zip(itertools.product(fast, slow), itertools.cycle(resident))
        if r.bytes_per_device + kept <= 70 and t.bytes_per_device <= 70
    )
    assert decision.predicted_s <= best * 1.05


@pytest.mark.parametrize("seed", range(100))
def test_no_pair_is_looked_at_and_the_same_are_found(seed):
    """Against a table of all pairs: what can be, the first as cheap as any, and the next."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 8, 2)
    room = Room(
        bytes_R=rng.integers(1, 60, rows).astype(float),
        can_R=rng.random(rows) < 0.8,
        away_R=rng.integers(0, 2, rows),
        resident_AT=rng.integers(1, 40, (2, columns)).astype(float),
        can_T=rng.random(columns) < 0.8,
        budget=rng.choice([30.0, 60.0, math.inf]),
    )
    # Small whole numbers, so that there are ties; and hundreds, so that there is noise.
    highest = rng.choice([4, 400])
    lowest = highest - 30 if highest == 400 else 1
    train_T, moments_T = rng.integers(lowest, highest, columns), rng.integers(0, 20, columns)
    cost = Cost(
        of_R=rng.integers(1, highest, rows).astype(float),
        of_AT=np.stack([train_T, train_T + moments_T]).astype(float),
        rest=float(rng.integers(0, 2) * 50),
    )
    possible_RT = room.bytes_R[:, None] + room.resident_AT[room.away_R] <= room.budget
    possible_RT &= room.can_R[:, None] & room.can_T
    rollout_RT = np.where(
        possible_RT, cost.of_R[:, None] + moments_T * room.away_R[:, None], math.inf
    )
    in_row_RT = np.where(possible_RT, cost.of_AT[room.away_R], math.inf)
    cost_RT = rollout_RT + train_T + cost.rest
    assert room.possible_R.tolist() == possible_RT.any(axis=1).tolist()
    assert room.possible_T.tolist() == possible_RT.any(axis=0).tolist()
    if not possible_RT.any():
        return
    first, second = first_two(cost, room, Settings(budget_bytes=0, hysteresis=1, horizon_steps=1))
    unbeaten_RT = (
        (cost_RT <= cost_RT.min() * (1 + NOISE))
        & (rollout_RT <= rollout_RT.min(axis=0) * (1 + NOISE))
        & (in_row_RT <= in_row_RT.min(axis=1, keepdims=True) * (1 + NOISE))
    ) & possible_RT
    assert first == divmod(int(unbeaten_RT.argmax()), columns)
    assert cost.of(first, room) == cost_RT[first]
    cost_RT[first] = math.inf
    if second is None:
        assert np.isinf(cost_RT).all()
    else:
        assert second == divmod(int(cost_RT.argmin()), columns)
