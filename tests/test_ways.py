# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A run chooses how many slots, which pages, micro-batches and remat by speed, beside the mesh."""

import collections
import dataclasses
import itertools
import json

import pytest
from test_placement import D4T2, D8, TINY

from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.loop import Position, rl_step
from earl_jax.placement import Placement
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import Load, LoadHistory
from earl_jax.world import World

FSDP = MeshShape(data=1, fsdp=8)
PLACES = 32

GIVEN = {
    "model": TINY,
    "rollout": {
        "num_slots": 16,
        "episodes_per_step": 16,
        "burst": 2,
        "max_turn_tokens": 4,
        "max_episode_tokens": PLACES,
        "context_buckets": (PLACES,),
        "patience_s": 60.0,
    },
    "selector": {
        "rollout_meshes": (str(D8), str(D4T2)),
        "train_meshes": (str(D8), str(FSDP)),
        "page_sizes": (8, 32),
    },
}
# Of a trainer on data=8 and its rollout there is this much on a device, and room for no more.
BUDGET = 200_000


@pytest.fixture(scope="module")
def world():
    given = GIVEN["selector"] | {"budget_bytes_per_device": BUDGET}
    return World(make_config(GIVEN | {"selector": given}))


def entry(speed, num_bytes=1000, alone=None):
    return Measurement(
        tokens_per_s=speed, program_bytes=num_bytes, switch_s=0.0, alone_tokens_per_s=alone
    )


def placed(world, changes, said=None):
    """A placement that knows all candidates: as fast as each other, but for the changes."""
    rollouts = [
        f"rollout {mesh} {PLACES}{words}"
        for mesh, words in itertools.product(
            (D8, D4T2),
            ["", " slots=8", *(f" {s}page={p}" for s in ("", "slots=8,") for p in (8, 32))],
        )
    ]
    trains = [
        f"train {mesh} {PLACES}{'' if (n, again) == (1, False) else words}"
        for mesh in (D8, FSDP)
        for n, again in itertools.product((1, 2, 4, 8, 16), (False, True))
        for words in [f" micro_batches={n},remat={again}"]
    ]
    known = dict.fromkeys([*rollouts, *trains], entry(100.0))
    unheard = changes.keys() - known.keys()
    assert not unheard
    table = ThroughputTable(path=None, measurements=known | changes)
    say = said.append if said is not None else lambda _: None
    return Placement(world, Calibration(world, table, say))


def load(in_flight=64):
    return Load(
        context_tokens_max=PLACES - 8,
        context_tokens_mean=20.0,
        tokens_in_flight_max=in_flight,
        rollout_tokens=64,
    )


def test_the_first_of_equal_ways_is_the_configs(world):
    placement = placed(world, {})
    decision = placement.choose_step(PLACES, None)
    assert (placement.in_rollout, placement.in_training) == (D8, D8)
    assert placement.rollout_rung == RolloutRung(16, 4) and placement.rung == ""
    assert placement.train_rung == TrainRung(1, False)
    assert "micro-batches" not in decision.train.reason


@pytest.mark.parametrize(
    ("faster", "rung", "words"),
    [
        (" page=32", RolloutRung(16, 2, False, 32), "rollout with pages of 32 tokens"),
        (" page=8", RolloutRung(16, 8, False, 8), "rollout with pages of 8 tokens"),
        (" slots=8", RolloutRung(8, 4), "rollout with 8 of 16 slots"),
        (
            " slots=8,page=32",
            RolloutRung(8, 2, False, 32),
            "rollout with 8 of 16 slots; rollout with pages of 32 tokens",
        ),
    ],
)
def test_the_way_of_a_rollout_that_is_faster_is_taken(world, faster, rung, words):
    placement = placed(world, {f"rollout {D8} {PLACES}{faster}": entry(1000.0)})
    decision = placement.choose_step(PLACES, None).rollout
    assert (decision.mesh, placement.rollout_rung, placement.rung) == (D8, rung, words)
    # 16 episodes of 4 tokens.
    assert decision.predicted_s == pytest.approx(64 / 1000)


def test_the_way_to_train_that_is_faster_is_taken_and_by_less_than_noise_is_not(world):
    two = f"train {D8} {PLACES} micro_batches=2,remat=False"
    assert placed(world, {two: entry(101.5)}).choose_step(PLACES, None).train.rung == (1, False)
    placement = placed(world, {two: entry(130.0)})
    decision = placement.choose_step(PLACES, None)
    assert (decision.train.mesh, placement.train_rung) == (D8, TrainRung(2, False))
    assert f"starts on {D8} in 2 micro-batches: fastest" in decision.train.reason
    assert placement.rung == "training in 2 micro-batches"


def test_a_way_that_fits_keeps_the_mesh_where_the_other_mesh_is_no_faster(world):
    """What no longer fits as the config says goes on in another way, and nothing moves."""
    changes = {
        f"train {D8} {PLACES}": entry(100.0, num_bytes=BUDGET + 1),
        f"train {D8} {PLACES} micro_batches=1,remat=True": entry(80.0),
        f"train {D8} {PLACES} micro_batches=2,remat=False": entry(98.5),
    }
    placement = placed(world, changes)
    placement.rollout_mesh = placement.train_mesh = D8
    decision = placement.choose_step(PLACES, load())
    assert (placement.in_training, placement.train_rung) == (D8, TrainRung(2, False))
    assert not decision.train.switched
    # At the start the other mesh is as good, and before it in the order of ways.
    fresh = placed(world, changes)
    fresh.choose_step(PLACES, load())
    assert (fresh.in_training, fresh.train_rung) == (FSDP, TrainRung(1, False))
    # Where the way is much slower than the other mesh, the mesh is left.
    slow = {key: entry(50.0) for key in changes} | {
        f"train {D8} {PLACES}": entry(100.0, num_bytes=BUDGET + 1)
    }
    slow |= {
        f"train {D8} {PLACES} micro_batches={n},remat={again}": entry(50.0)
        for n, again in itertools.product((2, 4, 8, 16), (False, True))
    }
    left = placed(world, slow)
    left.rollout_mesh, left.train_mesh, left.calm_steps = D8, D8, 100
    assert left.choose_step(PLACES, load()).train.switched and left.in_training == FSDP


@pytest.mark.parametrize(
    ("most_places", "most_length", "moves"),
    [(PLACES, PLACES, False), (PLACES // 2, PLACES, True), (PLACES, PLACES // 2, True)],
)
def test_a_faster_mesh_is_moved_to_at_once_in_a_room_that_is_new(
    world, most_places, most_length, moves
):
    """Elsewhere a pair that fits is left only behind a window of steps."""
    faster = {f"train {FSDP} {PLACES}": entry(200.0)}
    placement = placed(world, faster)
    placement.rollout_mesh = placement.train_mesh = D8
    come_to = {"most_places": most_places, "most_length": most_length}
    placement.restore(placement.as_dict() | {"calm_steps": 1} | come_to)
    decision = placement.choose_step(PLACES, load())
    assert decision.train.switched == moves
    assert placement.in_training == (FSDP if moves else D8)
    saved = placement.as_dict()
    assert (saved["most_places"], saved["most_length"]) == (PLACES, PLACES)


def test_fewer_pages_are_slower_by_the_episodes_that_wait(world):
    """All 16 say 160 a second, one alone 40: 8 of them take 0.1 - 8/15 x (0.1 - 0.025) s a token.

    Twice as many as two pages a lane hold.
    """
    placement = placed(world, {f"rollout {D8} {PLACES}": entry(160.0, alone=40.0)})
    rungs = [RolloutRung(16, 4), RolloutRung(16, 2)]
    options = placement.calibration.rollout_guesses(PLACES, rungs, ())
    by_rung = {o.rung: o.tokens_per_s for o in options if o.mesh == D8}
    assert by_rung[rungs[0]] == pytest.approx(160.0)
    alone_s, full_s = 1 / 40, 16 / 160
    assert by_rung[rungs[1]] == pytest.approx(8 / (alone_s + 7 / 15 * (full_s - alone_s)))


def test_tokens_in_flight_say_how_many_pages_are_wanted(world):
    """300 tokens over 8 devices, a tenth more, in pages of 16: 2.6, and half a page a slot."""
    placement = placed(world, {})
    placement.choose_step(PLACES, load())
    few = placement.pages
    ladder = placement._ladder
    assert ladder.wanted_pages(4 * PLACES, 0, load(300)) == 4 == few
    assert ladder.wanted_pages(4 * PLACES, 0, load(600)) == 7
    # No more than all slots can fill.
    assert ladder.wanted_pages(PLACES, 0, load(10_000)) == 4


class Told(Calibration):
    """Measures nothing: it is told how fast the ways are that are asked for."""

    def __init__(self, world, speeds, took_s=0.0):
        first = dataclasses.replace(entry(100.0), took_s=took_s)
        known = {
            f"{stage} {mesh} {PLACES}{words}": first
            for stage, meshes in (("rollout", (D8, D4T2)), ("train", (D8, FSDP)))
            for mesh in meshes
            for words in ("", " page=8", " page=32")
        }
        super().__init__(world, ThroughputTable(path=None, measurements=known), lambda _: None)
        self.asked, self.doubted, self.parts, self._speeds = [], [], [], speeds

    def measure(self, stage, option, places):
        self.asked.append((stage, option.mesh, option.rung))
        key, _ = self.known_of(stage, option, places)
        self.table = self.table.with_measurement(key, entry(self._speeds.get(option.rung, 50.0)))

    def confirm(self, stage, option, places):
        """It is told the truth at once, and once."""
        self.doubted.append((stage, option.mesh, option.rung))
        key, known = self.known_of(stage, option, places)
        self.table = self.table.with_measurement(key, known.or_faster(known))
        return self.parts.pop(0) if self.parts else 1.0


def ahead(selector="all", budget=0, speeds=None, took_s=0.0, **more):
    """What is tried before the first step, and the way that it then takes, of 128 rows."""
    given = {
        "rollout": GIVEN["rollout"] | {"episodes_per_step": 128},
        "selector": GIVEN["selector"] | {"budget_bytes_per_device": budget, "measure": selector},
    }
    world = World(make_config(GIVEN | given | more))
    ways = {TrainRung(*rung): speed for rung, speed in (speeds or {}).items()}
    told = Told(world, ways, took_s)
    Placement(world, told).measure_ahead()
    # Of rollouts half the slots, on the mesh that would be chosen.
    played = [(mesh, rung.num_slots) for stage, mesh, rung in told.asked if stage == "rollout"]
    assert played in ([], [(D8, 8)])
    # What is known is not asked for again, and nothing else instead.
    first = list(told.asked)
    placement = Placement(world, told)
    placement.measure_ahead()
    placement.choose_step(PLACES, None)
    assert told.asked == first
    trained = [(mesh, tuple(rung)) for stage, mesh, rung in first if stage == "train"]
    assert bool(played) == bool(trained)
    return trained, tuple(placement.train_rung)


def test_ways_beside_the_fastest_are_tried_uphill_with_a_limit_and_without():
    """8 micro-batches are the fastest; computed they are as fast as one, which comes first."""
    rising = {(2, False): 110.0, (4, False): 120.0, (8, False): 130.0, (16, False): 90.0}
    path = [(2, False), (4, False), (8, False), (16, False), (8, True)]
    for budget in (10**9, 0):
        asked, chosen = ahead(budget=budget, speeds=rising)
        assert asked == [(D8, rung) for rung in path] and chosen == (8, False)
    # Of ways that are slower the next ones are not tried.
    assert ahead() == ([(D8, (2, False)), (D8, (1, True))], (1, False))


@pytest.mark.parametrize(("parts", "passes"), [([], 1), ([0.9], 2), ([0.5] * 99, 4)])
def test_what_is_nearly_as_fast_as_the_best_is_doubted_until_the_machine_is_steady(parts, passes):
    """Of 50, 100, 100 and 110 what is above 110 / 1.3; and all rollouts, which are alike.

    Where one was slower than before, all are measured side by side again, four times at most.
    """
    world = World(make_config(GIVEN | {"selector": GIVEN["selector"] | {"measure": "all"}}))
    told = Told(world, {TrainRung(2, False): 110.0})
    told.parts = list(parts)
    Placement(world, told).measure_ahead()
    trained = {(D8, (1, False)), (FSDP, (1, False)), (D8, (2, False))}
    played = {(mesh, size) for mesh in (D8, D4T2) for size in (0, 8, 32)}
    counts = collections.Counter(
        (mesh, tuple(rung) if stage == "train" else rung.page_size)
        for stage, mesh, rung in told.doubted
    )
    assert counts == dict.fromkeys(trained | played, passes)
    Placement(world, told).measure_ahead()
    assert len(told.doubted) == passes * len(counts)


def test_ways_are_tried_as_far_as_the_steps_pay_for_it():
    """A step is (128 x 4 + 128 x 32) / 100 = 46.08 s: a tenth of four is 18 s, of one 4.6 s.

    A try takes as long as the config's way on its mesh took, 5 s where nobody knows.
    """
    rising = {(2, False): 110.0, (4, False): 120.0, (8, False): 130.0}
    path = [(D8, (2, False)), (D8, (4, False)), (D8, (8, False))]
    assert ahead("auto", speeds=rising, num_steps=4)[0] == path
    assert ahead("auto", speeds=rising, took_s=9.0, num_steps=4)[0] == path[:2]
    assert ahead("auto", speeds=rising, num_steps=1) == ([], (1, False))
    assert ahead("likely", speeds=rising, num_steps=1000) == ([], (1, False))


@pytest.mark.slow
def test_what_was_slowed_down_is_found_out_when_it_is_measured_once_more(tmp_path):
    """And written down for the next run."""
    world, said, path = World(make_config(GIVEN)), [], tmp_path / "table.json"
    keys = f"train {D8} {PLACES}", f"rollout {D8} {PLACES}"
    table = ThroughputTable(path=path, measurements=dict.fromkeys(keys, entry(2.0, alone=1.0)))
    calibration = Calibration(world, table, said.append)
    for stage in ("train", "rollout"):
        of = calibration.train_options if stage == "train" else calibration.rollout_options
        (option,) = (o for o in of(PLACES, *((0,) if stage == "rollout" else ())) if o.mesh == D8)
        said.clear()
        assert option.tokens_per_s == 2.0
        assert calibration.confirm(stage, option, PLACES) > 1
        (line,) = said
        assert line.startswith(f"measured again {stage} on data=8 with room for {PLACES} tokens")
    kept = ThroughputTable.from_dict(path, json.loads(path.read_text())).measurements
    for key in keys:
        assert kept[key].times == 2 and kept[key].tokens_per_s > 2.0
    # What is slower the second time keeps the first speed.
    fast = entry(1e9, alone=1e9)
    calibration.table = ThroughputTable(path=None, measurements={keys[0]: fast})
    assert calibration.confirm("train", calibration.train_options(PLACES)[0], PLACES) < 1
    assert calibration.table.measurements[keys[0]] == dataclasses.replace(fast, times=2)


@pytest.mark.slow
def test_a_step_is_the_same_whatever_the_pages_and_the_slots():
    """Token for token, and its loss: by the listed order, and in ways that were chosen."""
    config = make_config(GIVEN)
    records = []
    for changes in (
        {},
        {f"rollout {D8} {PLACES} page=32": entry(500.0)},
        {f"rollout {D8} {PLACES} slots=8,page=8": entry(500.0)},
        {f"train {D8} {PLACES} micro_batches=2,remat=True": entry(500.0)},
    ):
        world = World(config)
        # Without a limit no way but other pages is looked at.
        world.budget_bytes = 10**9
        placement = placed(world, changes)
        state = world.init_train_state(D8)
        position, record = rl_step(
            world, placement, Position(step=0, state=state, history=LoadHistory())
        )
        records.append((record, placement.rung))
    first = records[0][0]
    assert [rung for _, rung in records] == [
        "",
        "rollout with pages of 32 tokens",
        "rollout with 8 of 16 slots; rollout with pages of 8 tokens",
        "training in 2 micro-batches with remat",
    ]
    for record, _ in records[1:]:
        for played, wanted in zip(record.trajectories, first.trajectories, strict=True):
            assert [t.token_ids for t in played.turns] == [t.token_ids for t in wanted.turns]
        assert record.updates[0].loss == pytest.approx(first.updates[0].loss, abs=1e-4)


@pytest.mark.slow
def test_likely_candidates_alone_are_measured_where_the_config_says_so():
    selector = GIVEN["selector"] | {"measure": "likely", "measure_rounds": 1, "page_sizes": ()}
    meshes = ("data=8", "data=4,tensor=2", "data=1,fsdp=8", "data=1,fsdp=4,tensor=2")
    selector["train_meshes"] = meshes
    world = World(make_config(GIVEN | {"selector": selector}))
    said = []
    table = ThroughputTable(path=None, measurements={})
    placement = Placement(world, Calibration(world, table, said.append))
    placement.calibration.measure_all()
    assert said == []
    decision = placement.choose_step(PLACES, None)
    measured = {
        key.split(" ")[1] for key in placement.calibration.table.measurements if "train" in key
    }
    # By the data sheet of virtual devices many small collectives take longest.
    assert str(decision.train.mesh) in measured and measured < set(meshes)
    assert "measured" in decision.train.reason and "measured" in decision.rollout.reason
    # What is known is not measured again.
    before = list(said)
    assert placement.choose_step(PLACES, None).pair == decision.pair and said == before
