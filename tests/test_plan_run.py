# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A plan names the meshes and ways that a run chooses from the same measurements."""

import dataclasses
import random

import pytest
from test_placement import TINY

from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.placement import Placement
from earl_jax.scene import make_scene
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.ladder import Failure, RolloutRung
from earl_jax.selector.prospects import (
    on_rollout_rung,
    on_train_rung,
    rollout_prospect,
    update_footprint,
)
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.telemetry.load import WINDOW, Load
from earl_jax.world import World

ROOMS = (32, 128)
ROWS = 16
GIVEN = {
    "model": TINY,
    "rollout": {
        "num_slots": ROWS,
        "episodes_per_step": ROWS,
        "burst": 2,
        "max_turn_tokens": 4,
        "max_episode_tokens": ROOMS[-1],
        "context_buckets": ROOMS,
    },
}
WORLDS = {
    "by speed": {"page_sizes": (8,), "horizon_steps": 5},
    "with moments in host memory": {"page_sizes": (8,), "offload": "on", "hysteresis": 0.05},
    "listed": {"order": "listed", "offload": "on"},
}
# Of the most that a candidate takes: from what few fit to what all do.
BUDGETS = (0.1, 0.25, 0.5, 2.0)


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    return World(make_config(GIVEN | {"selector": WORLDS[request.param]}))


def planned_for(world, budget, table):
    """The scene of a plan with this table."""
    scene = make_scene(world.config, parse_topology("cpu:8"), world.vocab_size, budget)
    return dataclasses.replace(scene, known=table.measurements, failures=table.failures)


def random_table(world, draw):
    """Every candidate measured, and some of the largest out of memory; and the most that it has."""
    scene, known, sizes = planned_for(world, 1, ThroughputTable(path=None, measurements={})), {}, []
    by_order = world.config.selector.order == "listed"

    def measure(stage, mesh, places, words, num_bytes):
        entry = ThroughputTable.entry(stage, mesh, places, ",".join(filter(None, words)))
        known[entry] = Measurement(
            tokens_per_s=None if by_order else draw.uniform(100, 400),
            program_bytes=int(num_bytes * draw.uniform(1.0, 2.0)),
            switch_s=draw.choice([0.0, draw.uniform(0, 20)]),
            alone_tokens_per_s=None if by_order else draw.choice([None, draw.uniform(20, 100)]),
        )
        sizes.append(known[entry].program_bytes)

    for places in ROOMS:
        for way in scene.ways_to_train:
            on_rung = on_train_rung(scene, way)
            words = [f"micro_batches={way.micro_batches}", f"remat={way.remat}"]
            words = [] if way == scene.ways_to_train[0] else words
            for mesh in on_rung.train_meshes_for(places):
                measure("train", mesh, places, words, update_footprint(on_rung, mesh, places).total)
        for slots in (16, 8):
            for size in (16, *scene.page_sizes):
                rung = RolloutRung(slots, slots // 8 * places // size, False, size)
                on_rung = on_rollout_rung(scene, rung)
                words = [f"slots={slots}" * (slots != 16), f"page={size}" * (size != 16)]
                for mesh in on_rung.rollout_meshes_for(places):
                    program = rollout_prospect(on_rung, mesh, places, rung).footprint.total
                    measure("rollout", mesh, places, words, program)
    failures = (
        Failure(stage="train", mesh=str(draw.choice(scene.train_meshes)), size=(64, 16, 1)),
        Failure(stage="rollout", mesh=str(draw.choice(scene.rollout_meshes)), size=(32, 64, 16, 1)),
    )
    return ThroughputTable(path=None, measurements=known, failures=failures), max(sizes)


def full(places, world):
    """The load of a plan: all episodes are as long as their room, of the policy's own words."""
    rollout = world.config.rollout
    return Load(
        context_tokens_max=places,
        context_tokens_mean=float(places),
        tokens_in_flight_max=rollout.num_slots * places,
        rollout_tokens=rollout.episodes_per_step * places,
    )


def run_of(world, table, rooms, say):
    """What a run is on when it has been at each room for longer than a window; None: nothing."""
    placement = Placement(world, Calibration(world, table, say))
    for places in rooms:
        try:
            for _ in range(3):
                placement.calm_steps = WINDOW
                decision = placement.choose_step(places, full(places, world))
        except BudgetTooSmall:
            yield None
            continue
        rung = placement.rollout_rung
        page_size = world.page(rung.page_size)
        ways = rung._replace(page_size=page_size), placement.train_rung
        yield decision.pair, *ways, decision.predicted_s


def plan_of(stop):
    """The same of a plan."""
    if not stop.fits:
        return None
    return stop.pair, stop.rollout.chosen.rung, stop.train.chosen.rung, stop.step_s


@pytest.mark.parametrize("seed", range(2))
def test_a_plan_names_what_a_run_is_on_at_each_room(world, seed, monkeypatch):
    """Meshes, ways and the step's seconds, of candidates with whatever bytes and speeds."""
    draw, said, found = random.Random(seed), [], []
    table, most = random_table(world, draw)
    for share in BUDGETS:
        budget = int(share * most)
        monkeypatch.setattr(world, "budget_bytes", budget)
        ran = [*run_of(world, table, ROOMS, said.append)]
        stops = make_schedule(planned_for(world, budget, table), ROOMS)
        for stop, run in zip(stops, ran, strict=True):
            plan = plan_of(stop)
            assert (plan is None) == (run is None), (share, stop.places)
            if run is not None:
                assert plan[:3] == run[:3], (share, stop.places)
                # None of both where meshes are listed.
                assert (plan[3] or 0.0) == pytest.approx(run[3] or 0.0, rel=1e-3)
        found += ran
    # The run measured nothing by itself, and it was no single answer.
    assert said == [] and len({run and run[:3] for run in found}) > 3
    if world.config.selector.offload == "on" and not world.config.selector.order == "listed":
        assert any(run[1].offload for run in found if run)
