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

from earl_jax.launch.distributed import RestartNeeded
from earl_jax.loop import rl_step
from earl_jax.placement import moves
from earl_jax.placement.moves import move_state, open_session
from earl_jax.placement.parts import Part
from earl_jax.placement.updates import StepUpdate
from earl_jax.run.build import build_run
from earl_jax.run.position import Position
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.memory import is_out_of_memory
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.carry import carry
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.placing import place as place_array
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.backup import StateLost
from earl_jax.train.learner import Learner
from earl_jax.train.offload import is_offloaded, load_moments, offload_moments
from earl_jax.train.step import batch_shapes
from tests.support.placements import (
    CUBE,
    D4T2,
    D8,
    SIXTEEN_SLOTS,
    TOKENS,
    first_position,
    given,
    hungry,
    place,
    table_of,
)
from tests.support.processes import Processes
from tests.support.settings import make_config

# data=8 is the fastest of both stages, so that the others are what is left.
pytestmark = pytest.mark.usefixtures("few_objects")
TRAIN, PLAY = {D8: 4000.0, CUBE: 3900.0}, {D8: 4000.0, D4T2: 3900.0}
CONTROLS = np.array([1e-2, 0.0], np.float32)


@pytest.fixture(scope="module")
def world():
    return build_run(make_config(given(SIXTEEN_SLOTS, (D8, D4T2), (D8, CUBE))))


def placed(world, say=lambda text: None, speeds=TRAIN, **changes):
    """A placement that has chosen its first plans."""
    table = table_of(world.problem, speeds, PLAY, (TOKENS,))
    placement = place(world, table, say, **changes)
    placement.choose_step(TOKENS, None)
    return placement


def rows_on(world, mesh, seed=0):
    """A batch of random tokens on this mesh."""
    rng = np.random.default_rng(seed)
    shapes = batch_shapes(16, TOKENS, world.stages.layouts.train(mesh))
    values = {
        "tokens": rng.integers(0, world.origin.vocab_size, (16, TOKENS)),
        "segment_ids": np.ones((16, TOKENS)),
        "turn_ids": rng.integers(0, 2, (16, TOKENS)),
        "logprobs": -rng.random((16, TOKENS)),
        "versions": np.zeros((16, TOKENS)),
        "advantages": rng.normal(size=(16, TOKENS)),
    }
    named = dataclasses.replace(
        shapes, **{k: v.astype(getattr(shapes, k).dtype) for k, v in values.items()}
    )
    return jax.tree.map(lambda v, s: jax.device_put(v, s.sharding), named, shapes)


def update(placement, state, batch, controls, length):
    """One update of a whole batch; returns the state, the batch where it is then, and metrics."""
    part = Part(batch=batch, length=length, num_tokens=batch.tokens.size)
    step = StepUpdate(placement=placement, controls=controls, parts=[part])
    state, (metrics,) = step.finish(state)
    return state, step.parts[0].batch, metrics


def assert_updated_as_without_a_failure(world, after, plan, batch):
    """Bit for bit: by the same program from the same state."""
    program = Learner.program(world.learner, plan, sft=False)
    expected, _ = program(world.learner.init_state(plan.mesh), batch, CONTROLS)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.array(a), np.array(b)), after, expected
    )


# The real error.


def test_error_of_the_device_is_known_and_takes_what_was_donated():
    kept, donated = jnp.ones(4), jnp.ones(4)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(hungry(donated=1)(kept, donated))
    assert is_out_of_memory(error.value)
    assert donated.is_deleted() and not kept.is_deleted()
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_update_that_runs_out_of_memory_is_done_by_another_plan(world, monkeypatch):
    """From the same state: what the failed program took with it comes from the backup.

    Four packed rows on the four row shards of a mesh get four of padding for the eight of another.
    """
    notes = []
    placement = placed(world, notes.append, speeds={CUBE: 4000.0, D8: 3900.0})
    assert placement.train == TrainPlan(CUBE, 1, "none")

    def program(plan, *, sft=False):
        if plan.mesh == CUBE:
            return hungry(donated=0)
        return Learner.program(world.learner, plan, sft=sft)

    def packed(mesh, rows):
        where = world.stages.layouts.train(mesh).activations("NS")
        padding = ((0, rows - 4), (0, 0))
        four = jax.tree.map(lambda field: np.asarray(field)[:4], rows_on(world, mesh))
        return jax.tree.map(lambda field: jax.device_put(np.pad(field, padding), where), four)

    monkeypatch.setattr(world.learner, "program", program)
    state, batch = world.learner.init_state(CUBE), packed(CUBE, 4)
    after, moved, metrics = update(placement, state, batch, CONTROLS, TOKENS)
    monkeypatch.undo()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert placement.train == TrainPlan(D8, 1, "none") and np.isfinite(metrics["loss"])
    where = world.stages.layouts.train(D8).activations("NS")
    assert moved.tokens.sharding.is_equivalent_to(where, 2)
    assert moved.tokens.shape == (8, TOKENS)
    np.testing.assert_array_equal(np.asarray(moved.tokens)[:4], batch.tokens)
    assert not np.asarray(moved.segment_ids)[4:].any()
    assert metrics["policy_tokens"] == (np.asarray(batch.turn_ids) > 0).sum()
    assert_updated_as_without_a_failure(world, after, placement.train, packed(D8, 8))

    # It is said, logged, and remembered: here, in a resumed run, and in the next one.
    words = f"train on {CUBE} ran out of memory with rows of {TOKENS} tokens, 1 at a time"
    log = placement.take_log()
    assert log.failures[0] == words and f"{words}; it is not tried again" in notes
    assert log.choices[-1].plan.mesh == D8 and log.choices[-1].switched
    assert f"{CUBE} ran out of memory" in log.choices[-1].reason
    table = placement.table
    again = ThroughputTable.from_dict(json.loads(json.dumps(table.as_dict())))
    assert again.failures == table.failures
    resumed = place(world, again)
    resumed.choose_step(TOKENS, None)
    assert resumed.train == placement.train
    # A checkpoint from before the failure does not forget it.
    assert ThroughputTable().over(table).failures == table.failures


def test_a_lack_of_memory_of_the_last_episodes_is_that_of_the_plan_they_moved_to(world):
    placement = placed(world)
    placement.tail = placement.rollout._replace(mesh=MeshShape(tensor=2))
    assert placement.tail.mesh != placement.rollout.mesh
    assert placement.attempt("rollout", lambda: hungry(donated=0)(jnp.ones(1))) is None
    meshes = [each.mesh for each in placement.table.failures]
    assert meshes == [str(placement.tail.mesh)]


@pytest.mark.slow
def test_smaller_micro_batches_are_used_where_no_mesh_is_left_until_the_run_stops(
    world, monkeypatch
):
    """One mesh, which has memory for 4 rows at a time: micro-batches of 4."""
    placement, tried = placed(world, train_meshes_named=(str(CUBE),)), []
    failing = hungry(donated=0)

    def program(plan, *, sft=False):
        tried.append(plan)
        if plan.micro_batches < 4:
            return failing
        return Learner.program(world.learner, plan, sft=sft)

    monkeypatch.setattr(world.learner, "program", program)
    state, batch = world.learner.init_state(CUBE), rows_on(world, CUBE)
    after, _, _ = update(placement, state, batch, CONTROLS, TOKENS)
    assert len(tried) == len(set(tried)) and {plan.mesh for plan in tried} == {CUBE}
    assert [plan.micro_batches for plan in tried[-1:]] == [4]
    words = [failure.split(" tokens, ")[1] for failure in placement.take_log().failures]
    assert [each.split(",")[0] for each in words] == 3 * ["16 at a time"] + 3 * ["8 at a time"]
    assert placement.train == tried[-1]
    assert placement.words.startswith(f"training on {CUBE} in 4 micro-batches")
    copied = jax.tree.map(jnp.copy, after)
    assert_updated_as_without_a_failure(world, copied, tried[-1], rows_on(world, CUBE))

    # The program has run: next time there is no backup, and the state goes with it.
    monkeypatch.setattr(world.learner, "program", lambda *_, sft: failing)
    with pytest.raises(StateLost, match="goes on from its newest checkpoint"):
        update(placement, after, batch, CONTROLS, TOKENS)
    # 16 rows on 4 row shards: no smaller parts than 4 rows.
    with pytest.raises(BudgetTooSmall, match=r"ran out of memory with rows of 32 tokens"):
        while placement.choose_training():
            placement.fail("train")


def test_trainer_that_cannot_move_goes_to_another_mesh(world, monkeypatch):
    """Bit for bit, from where it was when memory ran out."""
    placement = placed(world, train_meshes_named=(str(CUBE), str(D4T2)))
    state = world.learner.init_state(D8)
    expected = [np.array(leaf) for leaf in jax.tree.leaves(state)]
    first, asked = placement.train, []

    def short(tree, shardings, attempt):
        asked.append(jax.tree.leaves(shardings)[0].mesh)
        return (tree, False) if len(asked) == 1 else carry(tree, shardings, attempt)

    monkeypatch.setattr(moves, "carry", short)
    moved = move_state(placement, state)
    assert placement.train != first
    (words,) = placement.take_log().failures
    assert words.startswith(f"train on {first.mesh} ran out") and words.endswith(
        "in the move there"
    )
    # In this run only: the next one may have the memory.
    assert not placement.table.as_dict()["failures"]
    shardings = world.learner.state_shardings(placement.train.mesh)
    leaves = zip(expected, jax.tree.leaves(moved), jax.tree.leaves(shardings), strict=True)
    for old, new, where in leaves:
        assert new.sharding.is_equivalent_to(where, new.ndim)
        assert old.tobytes() == np.array(new).tobytes()


def test_rollout_that_runs_out_of_memory_is_played_again(world, monkeypatch):
    """The same episodes on another mesh, token for token."""
    placement = placed(world)
    position = first_position(world, placement)
    monkeypatch.setattr(world.stages.engines.engine(D8), "_play", hungry(donated=1))
    position, record = rl_step(world, placement, position)
    monkeypatch.undo()
    (failure,) = placement.take_log().failures
    assert failure.startswith(f"rollout on {D8} ran out of memory with 16 slots")
    assert (placement.rollout.mesh, record.rollout_mesh) == (D4T2, str(D4T2))

    undisturbed = placed(world)
    _, expected = rl_step(world, undisturbed, first_position(world, undisturbed))
    for played, wanted in zip(record.trajectories, expected.trajectories, strict=True):
        assert [t.token_ids for t in played.turns] == [t.token_ids for t in wanted.turns]
        assert (played.reward, played.stop_reason) == (wanted.reward, wanted.stop_reason)
    assert record.updates[0]["loss"] == pytest.approx(expected.updates[0]["loss"], abs=1e-4)


def test_fewer_slots_play_where_no_mesh_is_left(world):
    """Behind all four pages of a row shard, nine tenths or three quarters, and one episode's two.

    test_relocate.py plays the same episodes with other numbers of slots.
    """
    placement = placed(world, rollout_meshes_named=(str(D8),))
    program, plans = hungry(donated=0), []
    while placement.rollout.num_slots == 16:
        plans.append(placement.rollout)
        assert placement.attempt("rollout", lambda: program(jnp.ones(1))) is None
        placement.choose_step(TOKENS, None)
    failures = placement.take_log().failures
    assert all(w.startswith(f"rollout on {D8} ran out of memory with 16 slots") for w in failures)
    assert [plan.pages for plan in plans] == [4, 3, 2] and len(failures) == 3
    assert (placement.rollout.mesh, placement.rollout.num_slots) == (D8, 8)
    assert placement.words == "rollout with 8 of 16 slots"


@pytest.mark.parametrize("own", [True, False], ids=["own program", "new weights"])
def test_only_a_plan_whose_own_program_failed_is_remembered_for_later_runs(world, monkeypatch, own):
    """By XLA's own error, in the first round or in the publication of weights before it."""
    notes = []
    placement = placed(world, notes.append)
    first, params = placement.rollout, world.learner.init_state(placement.train.mesh).params

    def short(*arguments, **settings):
        return jax.block_until_ready(hungry(donated=0)(jnp.ones(4)))

    if not own:
        monkeypatch.setattr(moves, "publish_to_engines", short)

    def publish_and_play():
        open_session(placement, params, version=0)
        return short()

    assert placement.attempt("rollout", publish_and_play) is None
    placement.choose_step(TOKENS, None)
    assert placement.rollout != first, "not again in this run"
    assert len(placement.table.as_dict()["failures"]) == own
    assert notes[-1].endswith(
        "not tried again" if own else "in the move there; it is not tried again in this run"
    )
    kept = ThroughputTable.from_dict(placement.table.as_dict())
    next_run = place(world, kept.over(table_of(world.problem, TRAIN, PLAY, (TOKENS,))))
    next_run.choose_step(TOKENS, None)
    assert (next_run.rollout == first) != own


# Of several processes.


def short_in_one_and_then_in_both() -> dict[str, Any]:
    """One of two processes: the moments to the host and back, a step, and an update that fails."""
    four, cut = MeshShape(data=4), MeshShape(data=2, tensor=2)
    world = build_run(
        make_config(given(SIXTEEN_SLOTS | {"num_slots": 8}, (four, cut), (four,), offload="on"))
    )
    table = table_of(world.problem, {four: 4000.0}, {four: 4000.0, cut: 3900.0}, (TOKENS,))
    placement = place(world, table)
    placement.choose_step(TOKENS, None)
    state = world.learner.init_state(four)

    def own(tree):
        return [np.array(s.data) for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]

    before = own(state)
    offloaded = offload_moments(state)
    was_offloaded = is_offloaded(offloaded)
    state = load_moments(offloaded)
    kept = all(map(np.array_equal, before, own(state)))
    if not world.cluster.is_first:
        world.stages.engines.engine(four)._play = hungry(donated=1)
    position = Position(step=0, state=state, history=LoadHistory())
    position, record = rl_step(world, placement, position)
    failures = placement.take_log().failures
    world.learner.program = lambda *_, sft: hungry(donated=0)  # pyright: ignore
    batch = jax.tree.map(
        lambda shape: place_array(np.ones(shape.shape, shape.dtype), shape.sharding),
        batch_shapes(16, TOKENS, world.stages.layouts.train(four)),
    )
    with pytest.raises(RestartNeeded) as alone:
        update(placement, position.state, batch, CONTROLS, TOKENS)
    return {
        "kept": was_offloaded and not is_offloaded(state) and kept,
        "mesh": record.rollout_mesh,
        "rewards": [outcome.reward for outcome in record.outcomes],
        "failures": failures,
        "alone": str(alone.value),
        "remembered": [str(failure) for failure in placement.table.failures],
    }


@pytest.mark.slow
def test_processes_are_short_together_in_a_rollout_and_end_where_they_cannot_agree():
    one, other = Processes(2, 2, "test_survival:short_in_one_and_then_in_both").results(250)
    assert one["kept"] and other["kept"]
    # Only the second had no memory; both played all again on the other mesh, and know why.
    assert one["mesh"] == other["mesh"] == "data=2,tensor=2"
    assert one["rewards"] == other["rewards"] and len(one["rewards"]) == 16
    whole, without_moments = one["failures"]
    assert other["failures"] == one["failures"]
    assert whole.startswith("rollout on data=4 ran out of memory with 8 slots")
    assert without_moments == f"{whole}, the moments in host memory"
    # An update is all processes' program: each that fails ends, and says it to its next start.
    for lines in (one, other):
        assert lines["alone"].startswith("train on data=4 ran out of memory")
        assert "it is remembered, and not tried again" in lines["alone"]
        assert len(lines["remembered"]) == 3
