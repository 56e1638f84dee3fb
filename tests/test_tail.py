# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The last episodes of a rollout move to where so few are faster, and go on as if they had not."""

import dataclasses
import itertools

import pytest
from earl_jax.calibrate import Calibration
from earl_jax.selector.tail import TailOption, choose_tail
from earl_jax.selector.throughput import Measurement, ThroughputTable
from test_survival import GIVEN, PLACES

from earl_jax.config_file import make_config
from earl_jax.envs.environment import Start, StepResult
from earl_jax.envs.pool import EnvironmentPool
from earl_jax.loop import Position, rl_step
from earl_jax.placement import Placement
from earl_jax.rollout.config import Limits, Sampling
from earl_jax.rollout.pages import Pool
from earl_jax.rollout.seat import relocate
from earl_jax.selector.choose import Settings
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load, LoadHistory
from earl_jax.world import World
from tests.support.episodes import CONFIG, assert_same_episodes, check_rows, collect, engine, tasks

D8 = MeshShape(data=8)
D4T2 = MeshShape(data=4, tensor=2)
CUBE = MeshShape(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def pool():
    pool = EnvironmentPool(2, timeout_s=60.0)
    yield pool
    pool.close()


# The choice. Alone a round takes 8 ms on data=8, all 9 slots 16 ms; 4 ms and 20 ms beside it.
WIDE = TailOption(mesh=D8, full_round_s=0.016, alone_round_s=0.008, move_s=1.0, bytes_per_device=10)
CUT = TailOption(
    mesh=D4T2, full_round_s=0.020, alone_round_s=0.004, move_s=0.02, bytes_per_device=20
)


def decide(live, rounds, *, budget=None, hysteresis=0.0, current=D8, options=(WIDE, CUT)):
    return choose_tail(
        options,
        current=current,
        places=48,
        live=live,
        num_slots=9,
        rounds_left=rounds,
        settings=Settings(budget_bytes=budget, hysteresis=hysteresis, horizon_steps=1),
    )


def test_a_round_lies_between_one_episode_and_all_of_them():
    assert [WIDE.round_s(live, 9) for live in (1, 5, 9)] == pytest.approx([0.008, 0.012, 0.016])
    assert WIDE.round_s(1, 1) == 0.008


def test_the_move_must_be_earned_back_in_the_rounds_that_are_left():
    """Alone a round is 4 ms shorter, and the move takes 20 ms: worth it from the sixth on."""
    assert not decide(1, 5).switched
    assert decide(1, 6).switched
    # Of 3 episodes a round is 2 ms shorter (10 ms against 8 ms).
    assert not decide(3, 10).switched
    assert decide(3, 11).switched
    # Of 5 it is no shorter: 12 ms each.
    assert not decide(5, 10**6).switched
    decision = decide(1, 10)
    assert (decision.stage, decision.mesh) == ("tail", D4T2)
    assert decision.predicted_s == pytest.approx(10 * 0.004 + 0.02)
    assert decision.reason == (
        "leaves data=8 for data=4,tensor=2: 1 of 9 slots are busy, for about 10 rounds of 4.0 ms "
        "instead of 8.0 ms, and a move of 0.02 s"
    )


def test_a_tail_keeps_to_the_budget_and_to_its_hysteresis():
    assert not decide(1, 1000, budget=19).switched
    # 8 s against 4.02 s: 99 % longer.
    assert decide(1, 1000, hysteresis=0.98).switched
    assert not decide(1, 1000, hysteresis=1.0).switched
    failed = dataclasses.replace(CUT, impossible="ran out of memory")
    assert not decide(1, 1000, options=(WIDE, failed)).switched
    assert not decide(1, 0).switched


# Real episodes.


class Story:
    """Most episodes end with their first reply, every fifth goes on for three to seven."""

    def __init__(self, task):
        self.left = 1 if task.episode % 5 else 3 + task.episode // 5

    def start(self):
        return Start(text="go.", role="x")

    def step(self, reply: str):
        self.left -= 1
        if not self.left:
            return StepResult(text="", reward=1.0, done=True, stop_reason="win")
        return StepResult(text="on.", reward=0.0, done=False)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_last_episodes_go_on_with_the_same_tokens(pool, temperature):
    """Greedy and sampled, in the middle of their turns, there and back."""
    asked = []

    def move(seat, live, longest):
        asked.append((live, longest))
        target = engine(mesh=D4T2 if seat.engine.layout.shape == D8 else D8)
        shards = target.layout.num_row_shards
        pages = max(seat.pool.total // shards, seat.pages.least_pages(shards))
        return relocate(seat, target, seat.places, Pool(shards, pages))

    common = {"sampling": Sampling(temperature=temperature), "places": 64}
    stayed = collect(pool, tasks(24), Story, **common)
    moved = collect(pool, tasks(24), Story, **common, thin_out=move)
    assert len(asked) >= 2 and asked[0][0] <= CONFIG.num_slots // 4
    # Asked when half as many are left, not in every round.
    assert all(later[0] <= earlier[0] // 2 for earlier, later in itertools.pairwise(asked))
    check_rows(moved, 24)
    assert_same_episodes(stayed.trajectories, moved.trajectories)
    assert moved.stats.prefill_tokens == stayed.stats.prefill_tokens


def test_nobody_is_asked_while_episodes_wait_for_a_slot(pool):
    """The long ones come first, and leave slots to those that wait."""

    def refuse(seat, live, longest):
        raise AssertionError(f"{live} are left, and others wait")

    class Endless(Story):
        def __init__(self, task):
            self.left = 1

    # Six a lane for two slots each: slots are empty only behind the last round.
    collect(pool, tasks(48), Endless, thin_out=refuse, places=64)


@pytest.mark.slow
def test_a_step_whose_tail_moves_is_the_step_that_stays(monkeypatch):
    """By a table in which one episode alone is faster on tensor=2, and one in which it is not.

    Every fifth episode may say 16 tokens, the others two.
    """
    selector = {**GIVEN["selector"], "order": "measured"}
    world = World(make_config({**GIVEN, "selector": selector}))
    monkeypatch.setattr(
        world,
        "training_tasks",
        lambda step: [
            dataclasses.replace(task, limits=Limits(max_turn_tokens=2 if task.episode % 5 else 16))
            for task in World.training_tasks(world, step)
        ],
    )

    def step(alone):
        fast = Measurement(
            tokens_per_s=100.0, program_bytes=1, switch_s=1e-3, alone_tokens_per_s=0.1
        )
        found = {
            f"rollout {D8} {PLACES}": fast,
            f"rollout {D4T2} {PLACES}": dataclasses.replace(
                fast, tokens_per_s=50.0, alone_tokens_per_s=alone
            ),
            f"train {D8} {PLACES}": fast,
            f"train {CUBE} {PLACES}": dataclasses.replace(fast, tokens_per_s=50.0),
        }
        table = ThroughputTable(path=None, measurements=found)
        placement = Placement(world, Calibration(world, table, lambda _: None))
        placement.choose_step(PLACES, None)
        load = Load(
            context_tokens_max=PLACES,
            context_tokens_mean=PLACES,
            tokens_in_flight_max=100,
            rollout_tokens=100,
        )
        state = world.init_train_state(D8)
        position = Position(step=0, state=state, history=LoadHistory(steps=(load,)))
        _, record = rl_step(world, placement, position)
        return record, placement

    moved, placement = step(10.0)
    tails = [d for d in placement.take_log().decisions if d.stage == "tail"]
    assert tails and tails[0].mesh == D4T2 and tails[0].switched
    assert placement.in_rollout == D8, "the next rollout begins where this one began"
    assert moved.rollout_mesh == str(D8)
    stayed, placement = step(0.05)
    assert not [d for d in placement.take_log().decisions if d.stage == "tail"]
    for one, other in zip(moved.trajectories, stayed.trajectories, strict=True):
        assert [t.token_ids for t in one.turns] == [t.token_ids for t in other.turns]
    assert moved.updates[0].loss == pytest.approx(stayed.updates[0].loss, abs=1e-4)
