# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Measured, chosen, moved: a tiny model on eight devices, with two meshes for each stage."""

import dataclasses
import io
import itertools
import json
import random
import types

import jax
import numpy as np
import pytest
from caches import rows_of

from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.estimates import rollout_estimate, train_estimate
from earl_jax.learning import imitate
from earl_jax.loop import expected_tokens, foresee
from earl_jax.measurements import calibrated_by, open_table
from earl_jax.placement import Placement
from earl_jax.rollout.config import Sampling
from earl_jax.rollout.orders import pack_orders
from earl_jax.rollout.pages import pages_for
from earl_jax.rollout.sampling import sampling_rows
from earl_jax.run import _new_placement
from earl_jax.scene import make_scene
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.sharding.layout import Layout, MeshShape
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.telemetry.load import WINDOW, Load, LoadHistory
from earl_jax.telemetry.progress import Progress
from earl_jax.world import World

D8 = MeshShape(data=8)
D4T2 = MeshShape(data=4, tensor=2)
CUBE = MeshShape(data=2, fsdp=2, tensor=2)
SHORT, LONG = 16, 32

TINY = {
    "num_layers": 1,
    "width": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_size": 8,
    "ffn_size": 16,
}
GIVEN = {
    "model": TINY,
    "rollout": {
        "num_slots": 8,
        "episodes_per_step": 16,
        "burst": 2,
        "max_turn_tokens": 4,
        "context_buckets": (SHORT, LONG),
    },
    # A hysteresis that no gain beats: a mesh is left only when it does not fit.
    "selector": {
        "rollout_meshes": (str(D8), str(D4T2)),
        "train_meshes": (str(D8), str(CUBE)),
        "measure_rounds": 1,
        "hysteresis": 1e6,
    },
}
LISTED = {k: v for k, v in GIVEN["selector"].items() if k.endswith("_meshes")}


# A placement on data=8 for both stages, at SHORT places.
STANDING = {
    "rollout_mesh": str(D8),
    "train_mesh": str(D8),
    "places": SHORT,
    "pages": 1,
    "num_slots": 8,
    "page_size": 0,
    "train_rung": [1, False],
    "calm_steps": 0,
    "most_places": SHORT,
    "most_length": SHORT,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A world, its calibration with all rollout entries measured, and what was said meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        world = World(make_config(GIVEN))
        table, damage = open_table(world)
        assert (dict(table.measurements), damage) == ({}, None)
        said = []
        calibration = Calibration(world, table, said.append)
        for places in (SHORT, LONG):
            calibration.rollout_options(places, 0)
        yield types.SimpleNamespace(world=world, calibration=calibration, said=tuple(said))


@pytest.fixture
def place(tiny, monkeypatch):
    """`place(budget)` is a Placement on data=8 for both stages, at SHORT places."""

    def make(budget_bytes, train_mesh=D8):
        monkeypatch.setattr(tiny.world, "budget_bytes", budget_bytes)
        placement = Placement(tiny.world, tiny.calibration)
        placement.restore({**STANDING, "train_mesh": str(train_mesh)})
        return placement

    return make


def measured(tiny, mesh, places):
    return tiny.calibration.table.measurements[f"rollout {mesh} {places}"]


def trainer_bytes(mesh):
    """By hand: fp32 parameters and two moments of each; the number of updates, Adam's count."""
    vocab, width, heads, head_size, ffn, parts = 320, 16, 2, 8, 16, mesh.fsdp * mesh.tensor
    # The norms' weights (two of the layer, the last) are cut over fsdp alone.
    norms = 3 * width // mesh.fsdp
    matrices = 2 * vocab * width + 4 * width * heads * head_size + 3 * width * ffn
    return 3 * 4 * (norms + matrices // parts) + 4 + 4


def biting_budget(tiny):
    """Holds data=8 at SHORT places, one byte too small for it at LONG, where the other fits."""
    budget = trainer_bytes(D8) + measured(tiny, D8, LONG).program_bytes - 1
    assert measured(tiny, D8, SHORT).program_bytes + trainer_bytes(D8) <= budget
    assert measured(tiny, D4T2, LONG).program_bytes + trainer_bytes(D8) <= budget
    return budget


def on_host(tree):
    return jax.tree.map(np.array, tree)


def kib(num_bytes):
    return f"{num_bytes / 1024:.2f} KiB"


# Measuring.


def test_each_candidate_is_measured_once_at_each_room_and_said(tiny):
    assert tiny.world.vocab_size == 320
    entries = [(mesh, places) for places in (SHORT, LONG) for mesh in (D8, D4T2)]
    for (mesh, places), words in zip(entries, tiny.said, strict=True):
        assert f"rollout on {mesh} " in words and f" {places} tokens" in words
    for mesh in (D8, D4T2):
        for places in (SHORT, LONG):
            entry = measured(tiny, mesh, places)
            assert entry.tokens_per_s > 0 and entry.switch_s > 0
            # One slot of 8 says fewer than all of them, and all others are quiet meanwhile.
            assert 0 < entry.alone_tokens_per_s < entry.tokens_per_s
            # Nothing that could fit is refused without a compiler.
            pages = tiny.world.device_pages(places)
            estimate = rollout_estimate(tiny.world, mesh, places, RolloutRung(8, pages))
            assert estimate.given < entry.program_bytes
            assert not estimate.surely_exceeds(entry.program_bytes)


def test_the_bytes_of_a_longer_room_hold_its_cache_and_its_rows(tiny):
    # Per device of data=8: 1 slot, keys and values of 2 heads of 8 f32 a place; 2 rows of
    # experience, 4 numbers a place.
    added = (LONG - SHORT) * (2 * 2 * 8 * 4 + 2 * 4 * 4)
    longer, shorter = measured(tiny, D8, LONG), measured(tiny, D8, SHORT)
    assert added <= longer.program_bytes - shorter.program_bytes <= 4 * added
    # Weights are there whole on data=8, and in halves but for 3 norms of 16 on tensor=2.
    weights = (trainer_bytes(D8) - 8) // 3
    assert shorter.program_bytes >= weights
    assert measured(tiny, D4T2, SHORT).program_bytes < shorter.program_bytes


def test_the_next_run_measures_nothing_and_decides_alike(tiny, place):
    world = World(make_config(GIVEN))
    table, damage = open_table(world)
    assert damage is None
    assert table.measurements == tiny.calibration.table.measurements
    said = []
    second = Placement(world, Calibration(world, table, said.append))
    second.train_mesh = D8
    first = place(None)
    first.rollout_mesh = None
    assert [second.choose_rollout(tokens, None) for tokens in (10, 20)] == [
        first.choose_rollout(tokens, None) for tokens in (10, 20)
    ]
    assert said == []


def test_a_run_says_that_a_damaged_table_is_measured_again(tiny):
    table, _ = open_table(tiny.world)
    whole = table.path.read_bytes()
    shown = io.StringIO()
    try:
        table.path.write_bytes(whole[: len(whole) // 2])
        with Progress(1, shown) as progress:
            placement = _new_placement(tiny.world, progress)
    finally:
        table.path.write_bytes(whole)
    assert dict(placement.calibration.table.measurements) == {}
    assert str(table.path) in shown.getvalue() and "measuring again" in shown.getvalue()


@pytest.mark.parametrize(
    "override",
    [
        "model.width=32",
        "rollout.burst=3",
        "rollout.num_slots=16",
        "rollout.chunk_size=4",
        "rollout.page_size=8",
        "rollout.weight_dtype=int8",
        "rollout.kv_dtype=int8",
        "rollout.compute_dtype=bfloat16",
        "train.correction=truncated",
    ],
)
def test_what_was_measured_for_other_programs_is_not_taken(tiny, override):
    table, _ = open_table(World(make_config(GIVEN, [override])))
    assert dict(table.measurements) == {}


def test_what_was_measured_with_another_kernel_is_not_taken(tiny, monkeypatch):
    monkeypatch.setattr(Layout, "platform", "tpu")
    table, _ = open_table(World(make_config(GIVEN)))
    assert dict(table.measurements) == {}


def test_training_is_measured_where_no_entry_is_and_chosen_from_all(tiny, monkeypatch):
    # One entry is given, hopelessly slow; the other is measured.
    entry = f"train {CUBE} {SHORT}"
    given = Measurement(tokens_per_s=1e-6, program_bytes=1, switch_s=0.5)
    said = []
    table = ThroughputTable(path=None, measurements={entry: given})
    calibration = Calibration(tiny.world, table, said.append)
    placement = Placement(tiny.world, calibration)
    decision = placement.choose_training(None)
    assert len(said) == 1 and f"train on {D8} " in said[0]
    assert (decision.stage, decision.mesh, decision.switched) == ("train", D8, False)
    assert placement.in_training == D8
    found = calibration.table.measurements[f"train {D8} {SHORT}"]
    # The state (donated) and the batch are arguments, gradients are temporaries.
    state, batch = trainer_bytes(D8), 2 * SHORT * 6 * 4
    gradients = (state - 8) // 3
    assert found.program_bytes >= state + batch + gradients
    assert decision.bytes_per_device == found.program_bytes
    estimate = train_estimate(tiny.world, D8, SHORT, TrainRung(1, False))
    assert estimate.given == state - 8 and not estimate.surely_exceeds(found.program_bytes)
    # Parameters and moments alone are too much, however rows come.
    monkeypatch.setattr(tiny.world, "budget_bytes", state - 9)
    smaller = Placement(tiny.world, calibration)
    smaller.train_mesh = D8
    decision = smaller.choose_training(None)
    assert (decision.mesh, decision.switched) == (CUBE, True)
    assert f"{D8}, which needs" in decision.reason and "of a budget" in decision.reason


def test_training_stays_on_its_mesh_in_another_way_where_that_fits_and_is_faster(tiny, monkeypatch):
    """In micro-batches, or with remat: computed to be faster than the other mesh, and measured."""
    first = tiny.calibration.train_options(LONG)[0]
    entry = f"train {CUBE} {LONG}"
    slow = Measurement(tokens_per_s=1e-6, program_bytes=1, switch_s=0.5)
    known = {**tiny.calibration.table.measurements, entry: slow}
    said = []
    calibration = Calibration(
        tiny.world, ThroughputTable(path=None, measurements=known), said.append
    )
    monkeypatch.setattr(tiny.world, "budget_bytes", first.bytes_per_device - 1)
    placement = Placement(tiny.world, calibration)
    placement.train_mesh = D8
    decision = placement._chooser.choose_training(LONG, None, D8)[0]
    assert (decision.mesh, decision.switched) == (D8, False)
    assert decision.rung in placement._ladder.train_ways(LONG)[1:]
    assert decision.bytes_per_device < first.bytes_per_device
    assert f"stays on {D8} in {decision.rung.micro_batches} micro-batch" in decision.reason
    # What was chosen was measured, and on the other mesh nothing had to be.
    assert all(f"measured train on {D8}" in text for text in said)
    micro_batches, remat = decision.rung
    words = f"micro_batches={micro_batches},remat={remat}"
    found = calibration.table.measurements[f"train {D8} {LONG} {words}"]
    assert decision.predicted_s == pytest.approx(16 * LONG / found.tokens_per_s)
    assert len(said) < len(placement._ladder.train_ways(LONG))


def test_a_run_by_the_order_of_its_list_measures_bytes_only(tiny):
    world = World(make_config({**GIVEN, "selector": {**LISTED, "order": "listed"}}))
    calibration = Calibration(world, ThroughputTable(path=None, measurements={}), lambda text: None)
    option = calibration.rollout_options(SHORT, 0)[0]
    assert (option.mesh, option.tokens_per_s) == (D8, None)
    assert option.bytes_per_device == measured(tiny, D8, SHORT).program_bytes
    assert option.move_s == 0.0


def test_what_does_not_fit_is_not_timed_until_it_fits(tiny, monkeypatch):
    calibration = Calibration(
        tiny.world, ThroughputTable(path=None, measurements={}), lambda text: None
    )
    entry, takes = f"rollout {D8} {SHORT}", measured(tiny, D8, SHORT).program_bytes
    for budget, is_timed in ((takes - 1, False), (takes, True), (takes - 1, True)):
        monkeypatch.setattr(tiny.world, "budget_bytes", budget)
        option = calibration.rollout_options(SHORT, 0)[0]
        found = calibration.table.measurements[entry]
        assert option.bytes_per_device == found.program_bytes == takes
        assert (found.tokens_per_s is not None) == is_timed


def test_training_goes_by_the_longest_of_recent_steps(tiny, monkeypatch):
    """The longest episode comes and goes; the mesh that has room for it does not."""
    entries = {
        f"train {mesh} {places}": Measurement(
            tokens_per_s=1.0, program_bytes=num_bytes, switch_s=0.0
        )
        for mesh, places, num_bytes in [
            (D8, SHORT, 10),
            (D8, LONG, 30),
            (CUBE, SHORT, 15),
            (CUBE, LONG, 20),
        ]
    }
    table = ThroughputTable(path=None, measurements=entries)
    monkeypatch.setattr(tiny.world, "budget_bytes", 25)
    placement = Placement(tiny.world, Calibration(tiny.world, table, lambda text: None))
    history, meshes = LoadHistory(), []
    for longest in (SHORT, LONG, SHORT, LONG, SHORT):
        history = history.add(
            Load(
                context_tokens_max=longest,
                context_tokens_mean=1.0,
                tokens_in_flight_max=1,
                rollout_tokens=1,
            )
        )
        meshes.append(placement.choose_training(history.recent()).mesh)
    assert meshes == [D8, CUBE, CUBE, CUBE, CUBE]


def test_rows_longer_than_ever_leave_a_slower_mesh_that_fits_and_others_do_not():
    """In the middle of a step: new programs are needed anyway."""
    selector = {**GIVEN["selector"], "hysteresis": 0.1, "measure": "likely"}
    world = World(make_config({**GIVEN, "selector": selector}))
    speeds = {D8: 10.0, CUBE: 20.0}
    load = Load(
        context_tokens_max=LONG, context_tokens_mean=1.0, tokens_in_flight_max=1, rollout_tokens=1
    )

    def chosen(length, most_length, move_s=0.1):
        entries = {
            f"train {mesh} {places}": Measurement(
                tokens_per_s=speed, program_bytes=10, switch_s=move_s
            )
            for mesh, speed in speeds.items()
            for places in (SHORT, LONG)
        }
        table = ThroughputTable(path=None, measurements=entries)
        placement = Placement(world, Calibration(world, table, lambda text: None))
        placement.restore({**STANDING, "places": LONG, "most_length": most_length})
        recent = dataclasses.replace(load, context_tokens_max=length)
        foreseen = placement.foresee_training(length)
        decision = placement.choose_training(recent)
        assert foreseen == (decision.mesh, placement.train_rung)
        return decision.mesh, decision.switched

    assert chosen(LONG, SHORT) == (CUBE, True)
    assert chosen(LONG, LONG) == (D8, False)
    assert chosen(SHORT, SHORT) == (D8, False)
    # 16 rows of 32 tokens: 51.2 s or 25.6 s a step, so a move of so long is not earned back.
    horizon = world.config.selector.horizon_steps
    assert chosen(LONG, SHORT, 25.5 * horizon) == (CUBE, True)
    assert chosen(LONG, SHORT, 25.7 * horizon) == (D8, False)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_grow_and_shrink_cause_no_storm_of_moves(seed):
    """Forty steps of a placement; what was never come to may move a stage at once, and back.

    Beside that a pair that could stay is left after a window of steps at the earliest.
    """
    rng, rooms = random.Random(seed), (16, 32, 64, 128)
    rollout = {**GIVEN["rollout"], "context_buckets": rooms}
    selector = {**GIVEN["selector"], "hysteresis": 0.1, "measure": "likely"}
    world = World(make_config({**GIVEN, "rollout": rollout, "selector": selector}))
    entries = {
        f"{stage} {mesh} {room}": Measurement(
            tokens_per_s=rng.uniform(500.0, 2000.0), program_bytes=10, switch_s=0.01
        )
        for stage, meshes in (("rollout", (D8, D4T2)), ("train", (D8, CUBE)))
        for mesh in meshes
        for room in rooms
    }
    table = ThroughputTable(path=None, measurements=entries)
    placement = Placement(world, Calibration(world, table, pytest.fail))
    history, longest, moves, most, news = LoadHistory(), 12, [], 0, 0
    for step in range(40):
        longest = max(4, min(120, int(longest * rng.choice([1.0, 1.0, 1.2, 0.8, 2.0, 0.5]))))
        before = placement.train_mesh
        foreseen = foresee(world.config.rollout, history)
        placement.choose_step(expected_tokens(world, foreseen), foreseen)
        history = history.add(
            Load(
                context_tokens_max=longest,
                context_tokens_mean=longest / 2,
                tokens_in_flight_max=8 * longest,
                rollout_tokens=16 * longest,
            )
        )
        between = placement.train_mesh
        placement.choose_training(history.recent())
        room = max(placement.places, world.config.rollout.places_for(longest))
        if room > most:
            most, news = room, news + 1
        pairs = itertools.pairwise([before, between, placement.train_mesh])
        moves += [step for one, other in pairs if one is not None and one != other]
    assert len(moves) <= news + 40 // WINDOW


def test_what_lies_right_by_another_meshs_labels_is_relabelled_and_its_program_made_once():
    """fsdp=8, and fsdp=4 by context=2: the same bytes on the same devices."""
    there = MeshShape(fsdp=4, context=2)
    meshes = {**GIVEN["selector"], "train_meshes": (str(MeshShape(fsdp=8)), str(there))}
    train = {"demonstration_steps": 1, "demonstration_updates": 2}
    world = World(make_config({**GIVEN, "selector": meshes, "train": train}))
    table = ThroughputTable(path=None, measurements={})
    placement = Placement(world, Calibration(world, table, lambda text: None))
    placement.restore({**STANDING, "train_mesh": str(there)})
    state = world.init_train_state(MeshShape(fsdp=8))
    before = [
        shard.data.unsafe_buffer_pointer() for shard in state.params["embed"].addressable_shards
    ]
    moved = placement.move_state(state)
    mesh = world.train_layout(there).mesh
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(moved)} == {mesh}
    after = [
        shard.data.unsafe_buffer_pointer() for shard in moved.params["embed"].addressable_shards
    ]
    assert after == before
    assert int(imitate(world, placement, moved, 0, LONG).updates) == 2
    program = world.train_step(there, "supervised", placement.train_rung)
    assert program._cache_size() == 1


# Choosing.


@pytest.mark.parametrize("train_mesh", [D8, CUBE])
def test_rollout_options_count_what_the_trainer_leaves_on_the_device(tiny, place, train_mesh):
    decision = place(None, train_mesh).choose_rollout(10, None)
    program = measured(tiny, decision.mesh, SHORT).program_bytes
    assert decision.bytes_per_device == program + trainer_bytes(train_mesh)


def test_a_longer_room_that_breaks_the_budget_is_a_switch_with_its_numbers(tiny, place):
    budget = biting_budget(tiny)
    placement = place(budget)
    load = Load(
        context_tokens_max=14,
        context_tokens_mean=12.0,
        tokens_in_flight_max=90,
        rollout_tokens=64,
    )
    stays = placement.choose_rollout(SHORT, load)
    assert (stays.mesh, stays.switched, placement.places) == (D8, False, SHORT)
    leaves = placement.choose_rollout(SHORT + 1, load)
    assert (leaves.mesh, leaves.switched, placement.places) == (D4T2, True, LONG)
    assert placement.in_rollout == D4T2
    assert leaves.reason.startswith(
        f"leaves {D8}, which needs {kib(budget + 1)} of a budget of {kib(budget)} per device, "
        f"for {D4T2}: contexts up to 14 tokens, 90 in flight, room for {LONG} tokens an episode"
    )
    log = placement.take_log()
    assert log.decisions == [stays, leaves]
    assert log.bytes_per_device == max(stays.bytes_per_device, leaves.bytes_per_device) <= budget
    assert placement.take_log().decisions == []


def test_one_byte_more_of_budget_and_it_stays(tiny, place):
    decision = place(biting_budget(tiny) + 1).choose_rollout(LONG, None)
    assert (decision.mesh, decision.switched) == (D8, False)


def test_a_budget_too_small_changes_nothing_and_the_one_it_names_is_enough(tiny, place):
    placement = place(1000)
    before = placement.as_dict()
    with pytest.raises(BudgetTooSmall) as error:
        placement.choose_rollout(LONG, None)
    smallest = measured(tiny, D4T2, LONG).program_bytes + trainer_bytes(D8)
    assert f"the smallest budget that would do is {smallest} (mesh {D4T2})" in str(error.value)
    assert placement.as_dict() == before
    assert place(smallest).choose_rollout(LONG, None).mesh == D4T2


def test_a_placement_comes_back_from_a_checkpoint_and_chooses_alike(tiny, place):
    placement = place(biting_budget(tiny))
    placement.choose_rollout(LONG, None)
    saved = json.loads(json.dumps(placement.as_dict()))
    assert saved == {**STANDING, "rollout_mesh": str(D4T2), "places": LONG, "pages": 2}
    again = Placement(tiny.world, tiny.calibration)
    again.restore(saved)
    assert again.as_dict() == saved
    assert again.choose_rollout(10, None) == placement.choose_rollout(10, None)


# Moving.


def live_orders(engine, **changes):
    """Every slot starts an episode with two tokens of its own, and speaks."""
    slots = engine.config.num_slots
    chunk = np.zeros((slots, engine.config.chunk_size), np.int32)
    chunk[:, :2] = np.arange(2 * slots).reshape(slots, 2)
    orders = {
        "chunk": chunk,
        "count": np.full(slots, 2),
        "restart": np.ones(slots, np.int32),
        "speak": np.ones(slots, np.int32),
        "seed": 1000 + np.arange(slots),
        "row": np.arange(slots),
        "sampling": sampling_rows(Sampling(), slots),
        "version": 3,
    }
    return pack_orders(**{**orders, **changes})


def live_seat(tiny, placement):
    """A seat on data=8 in the middle of every slot's first turn."""
    params = tiny.world.init_train_state(D8).params
    seat, _ = placement.open_seat(params, version=3)
    seat = with_pages(seat)
    state, report = seat.engine.play(seat.policy.params, seat.state, live_orders(seat.engine))
    assert report.count.sum() > 0 and report.active.any()
    return dataclasses.replace(seat, state=state)


def with_pages(seat):
    """The same with pages for every slot's room."""
    for slot in range(seat.engine.config.num_slots):
        seat.pages.hold(slot, seat.places)
    table = seat.pages.as_array(pages_for(seat.places, seat.engine.config.page_size))
    return dataclasses.replace(seat, state=seat.engine.give_pages(seat.state, table))


def go_on(seat):
    """Two more tokens of the turns that are not over."""
    seat = with_pages(seat)
    nothing = np.zeros(seat.engine.config.num_slots, np.int32)
    orders = live_orders(seat.engine, count=nothing, restart=nothing, speak=nothing)
    return seat.engine.play(seat.policy.params, seat.state, orders)


def test_live_episodes_move_to_a_mesh_that_holds_them_and_go_on_as_if_they_had_not(tiny, place):
    placement = place(biting_budget(tiny))
    seat = live_seat(tiny, placement)
    weights, before = on_host(seat.policy.params), on_host(seat.state)
    with HostByteCounter() as counter:
        moved = placement.make_room(seat, SHORT + 1, 2, None)
    assert counter.num_bytes == 0
    assert moved.engine is tiny.world.engine(D4T2) and moved.places == LONG
    assert moved.policy.version == 3
    assert placement.take_log().switch_s > 0

    for tree, shardings in (
        (moved.policy.params, moved.engine.parameter_shardings),
        (moved.state, moved.engine.state_shardings),
    ):
        for leaf, where in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    jax.tree.map(np.testing.assert_array_equal, weights, on_host(moved.policy.params))
    after = on_host(moved.state)
    for old, new in zip(rows_of(before.cache), rows_of(after.cache), strict=True):
        for side in ("key", "value"):
            assert (old[side].shape[2], new[side].shape[2]) == (SHORT, LONG)
            np.testing.assert_array_equal(old[side], new[side][:, :, :SHORT])
            assert old[side].any()
    before, after = (dataclasses.replace(state, cache=None) for state in (before, after))
    leaves = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(leaves, jax.tree.leaves(after), strict=True):
        if "experience" in jax.tree_util.keystr(path):
            assert (old.shape[1], new.shape[1]) == (SHORT, LONG)
            new, rest = np.split(new, [SHORT], axis=1)
            assert not rest.any()
        np.testing.assert_array_equal(old, new)

    # The same episodes with the same room on the mesh that they were on.
    stayed = place(None).make_room(live_seat(tiny, place(None)), SHORT + 1, 2, None)
    assert stayed.engine is tiny.world.engine(D8)
    (_, expected), (_, report) = go_on(stayed), go_on(moved)
    np.testing.assert_array_equal(expected.tokens, report.tokens)
    np.testing.assert_array_equal(expected.count, report.count)
    np.testing.assert_allclose(expected.logprobs, report.logprobs, atol=1e-5)
    assert report.count.sum() > 0


def test_a_larger_room_on_the_same_mesh_moves_nothing(tiny, place):
    placement = place(None)
    seat = live_seat(tiny, placement)
    params, cached = seat.policy.params, np.array(seat.state.cached)
    grown = placement.make_room(seat, SHORT + 1, 2, None)
    assert grown.engine is seat.engine and grown.policy.params is params
    assert grown.state.experience.tokens.shape == (grown.engine.config.num_rows, LONG)
    np.testing.assert_array_equal(np.array(grown.state.cached), cached)
    assert placement.take_log().switch_s == 0.0


def test_the_trainer_moves_bit_for_bit_and_not_through_the_host(tiny, place):
    placement = place(None)
    state = tiny.world.init_train_state(D8)
    # Moments that are not zero, so that a mix-up would show.
    state = dataclasses.replace(
        state, optimizer=jax.tree.map(lambda x: x + x.size, state.optimizer)
    )
    state = jax.device_put(state, tiny.world.train_state_shardings(D8))
    assert placement.move_state(state) is state, "it is there already"
    assert placement.take_log().switch_s == 0.0
    before = on_host(state)
    placement.train_mesh = CUBE
    with HostByteCounter() as counter:
        moved = placement.move_state(state)
    assert counter.num_bytes == 0
    assert placement.take_log().switch_s > 0
    shardings = tiny.world.train_state_shardings(CUBE)
    for old, new, where in zip(
        jax.tree.leaves(before), jax.tree.leaves(moved), jax.tree.leaves(shardings), strict=True
    ):
        assert new.sharding.is_equivalent_to(where, new.ndim)
        assert old.tobytes() == np.array(new).tobytes()
    on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(moved))
    assert on_one == trainer_bytes(CUBE)


@pytest.mark.slow
def test_where_the_budget_holds_no_more_pages_there_are_as_many_as_before(monkeypatch):
    """Half as many again, or what is asked for, where it does; 2 are what one episode needs."""
    rollout = {**GIVEN["rollout"], "num_slots": 16}
    only = {"order": "listed", "rollout_meshes": (str(D8),), "train_meshes": (str(D8),)}
    world = World(make_config({**GIVEN, "rollout": rollout, "selector": only}))
    calibration = Calibration(world, ThroughputTable(path=None, measurements={}), lambda text: None)
    params = world.init_train_state(D8).params

    def pages_with(budget_bytes):
        monkeypatch.setattr(world, "budget_bytes", budget_bytes)
        placement = Placement(world, calibration)
        placement.restore({**STANDING, "pages": 2, "num_slots": 16})
        seat, _ = placement.open_seat(params, version=0)
        return placement.make_room(seat, LONG, 3, None).pool.pages

    two, three, four = (
        calibration.rollout_options(LONG, trainer_bytes(D8), pages)[0].bytes_per_device
        for pages in (2, 3, 4)
    )
    assert [pages_with(n) for n in (None, four, four - 1, three - 1, two)] == [4, 4, 3, 2, 2]
    with pytest.raises(BudgetTooSmall, match=f"the smallest budget that would do is {two} "):
        pages_with(two - 1)


def test_a_page_more_takes_its_bytes(tiny, place):
    shapes = {mesh: tiny.world.engine(mesh) for mesh in (D8, D4T2)}
    placement = place(None)
    seat, _ = placement.open_seat(tiny.world.init_train_state(D8).params, version=0)
    assert (seat.pool.shards, seat.pool.pages, seat.places) == (8, 1, SHORT)
    grown = placement.make_room(seat, LONG, 2, None)
    assert (grown.pool.pages, grown.places, placement.pages) == (2, LONG, 2)
    # One page a lane of this model: keys and values of 1 layer, 2 heads, 16 places, 8 numbers.
    options = [tiny.calibration.rollout_options(LONG, 0, pages) for pages in (2, 3, 5)]
    two, three, five = [{o.mesh: o.bytes_per_device for o in some} for some in options]
    page = 2 * 2 * 16 * 8 * 4
    assert {mesh: three[mesh] - two[mesh] for mesh in shapes} == {D8: page, D4T2: page}
    assert all(five[mesh] - two[mesh] == 3 * page for mesh in shapes)


@pytest.mark.slow
def test_a_plan_with_the_table_of_a_run_names_its_meshes_and_ways(tiny, place):
    """Measured on these devices. What a run knows of its load is as a plan assumes it."""
    config, budget = tiny.world.config, 10**9
    placement, ran = place(budget), []
    placement.rollout_mesh = placement.train_mesh = None
    for places in (SHORT, LONG):
        load = Load(
            context_tokens_max=places,
            context_tokens_mean=float(places),
            tokens_in_flight_max=8 * places,
            rollout_tokens=16 * places,
        )
        for _ in range(2):
            decision = placement.choose_step(places, load)
        ran.append((decision.pair, placement.num_slots, placement.train_rung))
    scene = make_scene(config, parse_topology("cpu:8"), tiny.world.vocab_size, budget)
    scene, notes = calibrated_by(tiny.calibration.table.path, scene, config)
    stops = make_schedule(scene, [SHORT, LONG])
    chosen = [(stop.rollout.chosen, stop.train.chosen) for stop in stops]
    assert notes == [] and ran == [
        (stop.pair, rollout.rung.num_slots, train.rung)
        for stop, (rollout, train) in zip(stops, chosen, strict=True)
    ]
    assert decision.predicted_s == pytest.approx(stops[1].step_s, rel=1e-3)
    assert all(prospect.is_measured for both in chosen for prospect in both)
