# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Running out of memory for real: XLA's own error, donated arrays gone, and the run goes on."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import Processes
from test_placement import D4T2, D8, TINY

from earl_jax import survival
from earl_jax.calibrate import Calibration
from earl_jax.config_file import make_config
from earl_jax.joint import to_checkpoint
from earl_jax.learning import update
from earl_jax.loop import Position, rl_step
from earl_jax.placement import Placement
from earl_jax.rest import from_rest, is_at_rest, to_rest
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.ladder import (
    Failure,
    RolloutRung,
    TrainRung,
    failure_of,
    rollout_rungs,
    train_rungs,
    train_ways,
)
from earl_jax.selector.memory import is_out_of_memory
from earl_jax.selector.throughput import Measurement, ThroughputTable
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import place
from earl_jax.sharding.reshard import reshard
from earl_jax.survival import ShortAlone, StateLost
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.step import batch_shapes
from earl_jax.world import World

CUBE = MeshShape(data=2, fsdp=2, tensor=2)
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
        "train_meshes": (str(D8), str(CUBE)),
        "order": "listed",
    },
}


def hungry(donated):
    """A program that wants an array which no machine has room for.

    XLA's own RESOURCE_EXHAUSTED; what was donated to the program goes with it.
    """

    def run(*arguments):
        seed = jax.tree.leaves(arguments[-1])[0].reshape(-1)[0].astype(jnp.float32)
        kept = jax.tree.map(lambda leaf: leaf, arguments[donated])
        return kept, jnp.zeros((2**23, 2**22)) + seed

    return jax.jit(run, donate_argnums=donated)


def known_table(trainers=(D8, CUBE), players=(D8, D4T2)):
    """A byte for every candidate on every rung: nothing is compiled to find out."""
    rungs = ["", *(f"micro_batches={n},remat=True" for n in (1, 2, 4, 8, 16))]
    entries = [("train", mesh, rung) for mesh in trainers for rung in rungs]
    entries += [("rollout", mesh, rung) for mesh in players for rung in ("", "slots=8")]
    found = Measurement(tokens_per_s=None, program_bytes=1, switch_s=0.0)
    return ThroughputTable(
        path=None,
        measurements={
            ThroughputTable.entry(stage, mesh, PLACES, rung): found for stage, mesh, rung in entries
        },
    )


def placed(world, said=None):
    """A placement on the first meshes of its lists, which knows the bytes of all candidates."""
    table = known_table()
    say = said.append if said is not None else lambda _: None
    placement = Placement(world, Calibration(world, table, say))
    placement.choose_step(PLACES, None)
    return placement


def rows_of(world, mesh, seed=0):
    """A batch of random tokens on this mesh."""
    rng = np.random.default_rng(seed)
    shapes = batch_shapes(16, PLACES, world.train_layout(mesh))
    values = {
        "tokens": rng.integers(0, world.vocab_size, (16, PLACES)),
        "segment_ids": np.ones((16, PLACES)),
        "turn_ids": rng.integers(0, 2, (16, PLACES)),
        "logprobs": -rng.random((16, PLACES)),
        "versions": np.zeros((16, PLACES)),
        "advantages": rng.normal(size=(16, PLACES)),
    }
    named = dataclasses.replace(
        shapes, **{k: v.astype(getattr(shapes, k).dtype) for k, v in values.items()}
    )
    return jax.tree.map(lambda v, s: jax.device_put(v, s.sharding), named, shapes)


CONTROLS = np.array([1e-2, 0.0], np.float32)


def expected_update(world, mesh, rung=None):
    """The same update without an accident."""
    program = world.train_step(mesh, "policy_gradient", rung)
    after, _ = program(world.init_train_state(mesh), rows_of(world, mesh), CONTROLS)
    return jax.tree.map(np.asarray, after)


def assert_near(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


# The rungs.


def test_the_rungs_of_a_rollout_by_hand():
    """16 slots on 8 lanes: fewer pages first, half as many each time; then a slot a lane."""
    assert rollout_rungs(16, 8, [6], 2) == [
        RolloutRung(16, 6),
        RolloutRung(16, 3),
        RolloutRung(16, 2),
        RolloutRung(8, 6),
        RolloutRung(8, 3),
        RolloutRung(8, 2),
    ]
    # Where the moments may leave, they do before anything else is less.
    assert rollout_rungs(16, 8, [6, 5], 5, can_offload=True) == [
        RolloutRung(16, 6),
        RolloutRung(16, 5),
        RolloutRung(16, 6, offload=True),
        RolloutRung(16, 5, offload=True),
        RolloutRung(8, 6, offload=True),
        RolloutRung(8, 5, offload=True),
    ]
    assert rollout_rungs(24, 8, [2], 2) == [RolloutRung(24, 2)]
    assert rollout_rungs(1, 1, [9, 4, 1], 4) == [RolloutRung(1, 9), RolloutRung(1, 4)]


def test_the_rungs_of_training_by_hand():
    assert train_rungs(12, 1, False) == [
        TrainRung(1, False),
        TrainRung(1, True),
        TrainRung(2, True),
        TrainRung(4, True),
    ]
    assert train_rungs(4, 2, True) == [TrainRung(2, True), TrainRung(4, True)]


def test_ways_to_train_are_the_ladders_and_the_same_without_remat():
    assert train_ways(12, 1, False) == [
        TrainRung(1, False),
        TrainRung(1, True),
        TrainRung(2, False),
        TrainRung(2, True),
        TrainRung(4, False),
        TrainRung(4, True),
    ]
    assert train_ways(4, 2, True) == train_rungs(4, 2, True)


def test_what_failed_is_impossible_and_so_is_what_is_no_smaller():
    failure = Failure(stage="rollout", mesh=str(D8), size=(48, 6, 16, 1))
    for size, impossible in (
        ((48, 6, 16, 1), True),
        ((64, 7, 16, 1), True),
        ((32, 6, 16, 1), False),
        ((48, 5, 16, 1), False),
        ((64, 9, 8, 1), False),
        ((48, 6, 16, 0), False),
    ):
        assert bool(failure_of([failure], "rollout", D8, size)) == impossible, size
    assert not failure_of([failure], "rollout", D4T2, (48, 6, 16, 1))
    assert not failure_of([failure], "train", D8, (48, 6, 16, 1))
    assert failure_of([failure], "rollout", D8, (48, 6, 16, 1)) == (
        "ran out of memory with 16 slots, pages for 6 tokens a lane and room for 48 an episode"
    )
    table = ThroughputTable(path=None, measurements={}, failures=(failure,))
    again = ThroughputTable.from_dict(None, json.loads(json.dumps(table.as_dict())))
    assert again == table
    # A checkpoint from before the failure does not forget it.
    assert ThroughputTable(path=None, measurements={}).over(table).failures == (failure,)


# The real error.


@pytest.fixture(scope="module")
def world():
    return World(make_config(GIVEN))


def test_the_error_of_the_device_is_known_and_takes_what_was_donated():
    greedy = hungry(donated=1)
    kept, donated = jnp.ones(4), jnp.ones(4)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(greedy(kept, donated))
    assert is_out_of_memory(error.value)
    assert donated.is_deleted() and not kept.is_deleted()
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


@pytest.mark.slow
def test_an_update_that_runs_out_of_memory_is_done_on_the_next_mesh(world, monkeypatch):
    """From the same state: what the failed program took with it comes from the spare."""
    said = []
    placement = placed(world, said)
    programs = {D8: hungry(donated=0)}

    def train_step(mesh, objective, rung=None):
        return programs.get(mesh) or World.train_step(world, mesh, objective, rung)

    monkeypatch.setattr(world, "train_step", train_step)
    state, batch = world.init_train_state(D8), rows_of(world, D8)
    after, moved, metrics = update(world, placement, state, batch, CONTROLS, "policy_gradient")
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert placement.in_training == CUBE and np.isfinite(metrics.loss)
    where = world.train_layout(CUBE).activations("NS")
    assert moved.tokens.sharding.is_equivalent_to(where, 2)
    monkeypatch.undo()
    assert_near(after, expected_update(world, CUBE))

    # It is said, logged, and remembered: here, in a resumed run, and in the next one.
    words = f"train on {D8} ran out of memory with rows of {PLACES} tokens, 16 at a time"
    log = placement.take_log()
    assert log.failures == [words] and f"{words}; it is not tried again" in said
    assert log.decisions[-1].mesh == CUBE and log.decisions[-1].switched
    table = placement.calibration.table
    again = ThroughputTable.from_dict(None, json.loads(json.dumps(table.as_dict())))
    resumed = Placement(world, Calibration(world, again, said.append))
    decision = resumed.choose_step(PLACES, None)
    assert decision.pair == (D8, CUBE)
    assert f"impossible: train on {D8} ran out of memory" in decision.reason


@pytest.mark.slow
def test_where_no_mesh_is_left_less_is_done_at_a_time_and_then_the_run_stops(world, monkeypatch):
    """One mesh, which has memory for 4 rows at a time with remat: micro-batches of 4."""
    monkeypatch.setattr(world, "train_candidates", [CUBE])
    placement = placed(world)
    tried = []

    def train_step(mesh, objective, rung):
        tried.append(rung)
        if rung.micro_batches < 4:
            return hungry(donated=0)
        return World.train_step(world, mesh, objective, rung)

    monkeypatch.setattr(world, "train_step", train_step)
    state, batch = world.init_train_state(CUBE), rows_of(world, CUBE)
    after, _, _ = update(world, placement, state, batch, CONTROLS, "policy_gradient")
    rungs = [TrainRung(1, False), TrainRung(1, True), TrainRung(2, True), TrainRung(4, True)]
    assert tried == rungs
    assert placement.rung == "training in 4 micro-batches with remat"
    assert placement.as_dict()["train_rung"] == [4, True]
    again = TrainRung(4, True)
    assert_near(after, expected_update(world, CUBE, again))

    # The program has run: next time there is no spare, and the state goes with it.
    monkeypatch.setattr(world, "train_step", lambda *_: hungry(donated=0))
    with pytest.raises(StateLost, match="goes on from the newest checkpoint"):
        update(world, placement, after, batch, CONTROLS, "policy_gradient")
    # 16 rows on 4 row shards: no smaller parts than 4 rows.
    with pytest.raises(BudgetTooSmall, match=r"ran out of memory with rows of 32 tokens, 4 at"):
        placement.choose_training_again()


@pytest.mark.slow
@pytest.mark.parametrize("short_for, mesh", [("all at once", CUBE), ("two devices", D4T2)])
def test_a_trainer_that_cannot_move_at_once_moves_in_pieces_or_elsewhere(
    world, monkeypatch, short_for, mesh
):
    """Bit for bit, whatever had arrived when memory ran out."""
    placement = placed(world)
    placement.train_mesh = CUBE
    monkeypatch.setattr(world, "train_candidates", [CUBE, D4T2])
    moves = []

    def narrow(tree, shardings, **options):
        """Too little for many arrays at once, or for the eighth that goes to this mesh."""
        leaves = jax.tree.leaves(tree)
        moves.append(len(leaves))
        far = jax.tree.leaves(shardings)[0].mesh.shape["fsdp"] > 1
        if len(leaves) > 1 or (short_for == "two devices" and far and len(moves) == 9):
            return hungry(donated=0)(jnp.ones(1))
        return reshard(tree, shardings, **options)

    monkeypatch.setattr(survival, "reshard", narrow)
    state = world.init_train_state(D8)
    expected = jax.tree.map(np.array, state)
    if short_for == "two devices":
        known = {
            ThroughputTable.entry("train", D4T2, PLACES): Measurement(
                tokens_per_s=None, program_bytes=1, switch_s=0.0
            )
        }
        table = dataclasses.replace(
            placement.calibration.table,
            measurements={**placement.calibration.table.measurements, **known},
        )
        placement.calibration.table = table
    moved = placement.move_state(state)
    assert placement.in_training == mesh
    shardings = world.train_state_shardings(mesh)
    for old, new, where in zip(
        jax.tree.leaves(expected), jax.tree.leaves(moved), jax.tree.leaves(shardings), strict=True
    ):
        assert new.sharding.is_equivalent_to(where, new.ndim)
        assert old.tobytes() == np.array(new).tobytes()
    failures = placement.take_log().failures
    assert len(failures) == (short_for == "two devices")


@pytest.mark.slow
@pytest.mark.parametrize("rollout_meshes", [(D8, D4T2), (D8,)])
def test_a_rollout_that_runs_out_of_memory_is_played_again(world, monkeypatch, rollout_meshes):
    """On another mesh, or with fewer slots: the same episodes, token for token."""
    monkeypatch.setattr(world, "rollout_candidates", list(rollout_meshes))
    state = world.init_train_state(D8)
    position = Position(step=0, state=state, history=LoadHistory())
    placement = placed(world)
    # Nothing is guessed in this run.
    monkeypatch.setattr(world.engine(D8), "_play_plain", hungry(donated=1))
    position, record = rl_step(world, placement, position)
    monkeypatch.undo()
    failures = placement.take_log().failures
    assert all(f.startswith(f"rollout on {D8} ran out of memory with 16 slots") for f in failures)
    if len(rollout_meshes) > 1:
        assert (placement.in_rollout, record.rollout_mesh) == (D4T2, str(D4T2))
        assert len(failures) == 1
    else:
        # 4 pages a lane, 2 pages for one whole episode, then half of the slots.
        assert (placement.in_rollout, placement.num_slots, len(failures)) == (D8, 8, 2)
        assert placement.rung == "rollout with 8 of 16 slots"
        assert placement.calibration.table.failures[0].size[2] == 16

    again = Position(step=0, state=world.init_train_state(D8), history=LoadHistory())
    _, expected = rl_step(world, placed(world), again)
    for played, wanted in zip(record.trajectories, expected.trajectories, strict=True):
        assert [t.token_ids for t in played.turns] == [t.token_ids for t in wanted.turns]
        assert (played.reward, played.stop_reason) == (wanted.reward, wanted.stop_reason)
    assert record.updates[0].loss == pytest.approx(expected.updates[0].loss, abs=1e-4)


# Of several processes.


def short_in_one_and_then_in_both() -> dict[str, Any]:
    """One of two processes: the moments to the host and back, a step, and an update that fails."""
    four, cut = MeshShape(data=4), MeshShape(data=2, tensor=2)
    selector = {
        "rollout_meshes": (str(four), str(cut)),
        "train_meshes": (str(four),),
        "order": "listed",
        "offload": "on",
    }
    world = World(make_config(GIVEN | {"selector": selector}))
    calibration = Calibration(world, known_table([four], [four, cut]), lambda _: None)
    placement = Placement(world, calibration)
    placement.choose_step(PLACES, None)
    state = world.init_train_state(four)

    def own(tree):
        return [np.array(s.data) for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]

    before = own(state)
    rested = to_rest(state)
    was_at_rest = is_at_rest(rested)
    state = from_rest(rested)
    kept = all(map(np.array_equal, before, own(state)))
    if not world.processes.is_first:
        # Nothing is guessed in this run.
        world.engine(four)._play_plain = hungry(donated=1)
    position = Position(step=0, state=state, history=LoadHistory())
    position, record = rl_step(world, placement, position)
    failures = placement.take_log().failures
    world.train_step = lambda *_: hungry(donated=0)
    batch = jax.tree.map(
        lambda shape: place(np.ones(shape.shape, shape.dtype), shape.sharding),
        batch_shapes(16, PLACES, world.train_layout(four)),
    )
    with pytest.raises(ShortAlone) as alone:
        update(world, placement, position.state, batch, CONTROLS, "policy_gradient")
    return {
        "kept": was_at_rest and not is_at_rest(state) and kept,
        "mesh": record.rollout_mesh,
        "rewards": [outcome.reward for outcome in record.outcomes],
        "failures": failures,
        "alone": str(alone.value),
        "remembered": [str(failure) for failure in calibration.table.failures],
    }


@pytest.mark.slow
def test_processes_are_short_together_in_a_rollout_and_end_where_they_cannot_agree():
    one, other = Processes(2, 2, "test_survival:short_in_one_and_then_in_both").results(250)
    assert one["kept"] and other["kept"]
    # Only the second had no memory; both played all again on the other mesh, and know why.
    assert one["mesh"] == other["mesh"] == "data=2,tensor=2"
    assert one["rewards"] == other["rewards"] and len(one["rewards"]) == 16
    (words,) = one["failures"]
    assert other["failures"] == [words]
    assert words.startswith("rollout on data=4 ran out of memory with 8 slots")
    # An update is all processes' program: each that fails ends, and says it to its next start.
    for number, told in enumerate((one, other)):
        assert told["alone"].startswith(f"process {number} of 2: train on data=4 ran out of memory")
        assert "start it again, and it goes on from its newest checkpoint" in told["alone"]
        assert len(told["remembered"]) == 2


@pytest.mark.slow
def test_the_moments_wait_on_the_host_where_the_rollout_needs_their_room():
    """A step that is the same bit for bit, beside less of the trainer than without."""
    one = {"train_meshes": (str(D8),), "offload": "on"}
    world = World(make_config(GIVEN | {"selector": GIVEN["selector"] | one}))
    ladder = survival.Ladder(world)
    whole, rest = (ladder.trainer_bytes(D8, offload) for offload in (False, True))
    # Adam's count stays behind with the moments.
    assert whole - rest == 2 * (rest - 4) + 4
    steps = {}
    for budget in (None, whole):
        world.budget_bytes = budget
        placement = placed(world)
        assert placement.offload == (budget is not None)
        said = "the moments in host memory during rollouts"
        assert placement.rung == (said if budget else "")
        assert placement.log.bytes_per_device == 1 + (rest if budget else whole)
        seen = []
        state = placement.move_state(world.init_train_state(D8), to_play=True)
        position = Position(step=0, state=state, history=LoadHistory())
        with pytest.MonkeyPatch.context() as patch:
            open_seat = placement.open_seat

            def look(params, version, state=state, seen=seen, open_seat=open_seat):
                seen.append({leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)})
                return open_seat(params, version)

            patch.setattr(placement, "open_seat", look)
            position, _ = rl_step(world, placement, position)
        kinds = {"device", "pinned_host"} if budget else {"device"}
        assert seen == [kinds]
        assert is_at_rest(position.state) == (budget is not None)
        saved = to_checkpoint(world, position.state)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(saved)} == {"device"}
        steps[budget] = jax.tree.map(np.array, saved)
    for left, right in zip(*map(jax.tree.leaves, steps.values()), strict=True):
        np.testing.assert_array_equal(left, right)
