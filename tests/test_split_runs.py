# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs whose split of the devices between rollout and training moves with their live episodes."""

import contextlib
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.multihost_utils import process_allgather

from earl_jax.config import file as config_file
from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.placement import moves
from earl_jax.placement.moves import move_session, move_state
from earl_jax.placement.placement import Placement
from earl_jax.placement.updates import StepUpdate
from earl_jax.rollout.event_files import events_file, read_events
from earl_jax.rollout.events import Events
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.run import live_service
from earl_jax.run.build import build_run
from earl_jax.selector.candidates import Candidates
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import WINDOW
from earl_jax.telemetry.trace import Trace, read_trace, trace_file
from earl_jax.training import train
from tests.support.commands import Command
from tests.support.placements import begin, first_position, table_of
from tests.support.processes import Processes
from tests.support.runs import (
    assert_equal,
    check_bound,
    check_replay,
    episodes_of,
    final_parameters,
    kill,
    steps_of,
)
from tests.support.settings import make_config, small, write_config
from tests.support.wanderers import WANDERERS

BUCKET = 256
R2, R4, R6 = (MeshShape(data=number) for number in (2, 4, 6))
T6, T4, T2 = MeshShape(data=6), MeshShape(fsdp=4), MeshShape(fsdp=2)
SETTINGS = {
    **WANDERERS,
    "num_steps": 5,
    "rollout": {
        **WANDERERS["rollout"],
        "num_slots": 12,
        "episodes_per_step": 24,
        "context_buckets": (BUCKET,),
        # All answers are there when a round begins.
        "patience_s": 60.0,
    },
    "asynchrony": {"max_staleness": 2},
    "devices": {**WANDERERS["devices"], "num_rollout": "auto"},
    "selector": {
        "rollout_meshes": tuple(map(str, (R2, R4, R6))),
        "train_meshes": tuple(map(str, (T6, T4, T2))),
        "table": "model",
    },
    "checkpoint": {"every_steps": 2},
    "log": {"trajectories_every_steps": 1},
}


def table_for(run, split: int):
    """Returns speeds by which this split is ten times as fast as the others."""
    rollout = {mesh: 1e4 if mesh.num_devices == split else 1e3 for mesh in (R2, R4, R6)}
    training = {mesh: 1e4 if mesh.num_devices == 8 - split else 1e3 for mesh in (T6, T4, T2)}
    return table_of(run.problem, training, rollout, (BUCKET,))


class Steps:
    """Steps of a run without a workdir; a table says which split is the fastest in each."""

    def __init__(self, run, split: int = 4, events: Events | None = None):
        self.run, self.placement = run, Placement(run.stages, table_for(run, split))
        self.placement.choose_step(BUCKET, None)
        self.position = first_position(run, self.placement)
        self.placement.events = events or Events()
        self.player = AsyncPlayer(run, self.placement)
        self.records = []

    def take(self, split: int):
        self.placement.table = table_for(self.run, split)
        # As after a window of steps.
        self.placement.calm_steps = WINDOW
        self.position, record = rl_step(self.run, self.placement, self.position, self.player)
        self.player.step_ended(self.position.step)
        self.records.append(record)
        return record

    @property
    def meshes(self):
        return self.placement.rollout.mesh, self.placement.train.mesh

    def parameters(self):
        return jax.tree.leaves(process_allgather(self.position.state.params, tiled=True))


@pytest.mark.parametrize("split", [2, 4, 6])
def test_a_run_begins_with_the_split_that_its_table_has_as_the_fastest(world, split):
    placement = Placement(world.stages, table_for(world, split))
    placement.choose_step(BUCKET, None)
    meshes = {2: (R2, T6), 4: (R4, T4), 6: (R6, T2)}
    assert (placement.rollout.mesh, placement.train.mesh) == meshes[split]
    # The first devices play, and the last ones train.
    layouts = world.stages.layouts
    players = layouts.engine(placement.rollout.mesh).mesh.devices.ravel()
    trainers = layouts.train(placement.train.mesh).mesh.devices.ravel()
    assert [*players, *trainers] == jax.devices()
    placement.steps_left = WINDOW - 1
    placement.table = table_for(world, {2: 6, 4: 2, 6: 4}[split])
    placement.calm_steps = WINDOW
    # A move would be of use for too few steps.
    assert not placement.choose_split(BUCKET, None)
    placement.steps_left = WINDOW
    assert placement.choose_split(BUCKET, None)


def tokens_of(record):
    return [[(turn.token_ids, turn.versions) for turn in t.turns] for t in record.trajectories]


@pytest.fixture(scope="module")
def world():
    return build_run(make_config(SETTINGS))


def play_two_rounds(self, is_over):
    """Two rounds are played beside each update, so that runs play alike."""
    for _ in range(2):
        if self._playing.is_busy:
            self.play_round()


@pytest.fixture
def two_rounds(monkeypatch):
    monkeypatch.setattr(OpenGroups, "play_beside", play_two_rounds)


def short(*_, **named):
    raise BudgetTooSmall("live episodes need more pages")


@contextlib.contextmanager
def at_once(player, update):
    """Parts are sent as soon as they are finished, so that the rounds do not depend on time."""
    yield lambda: True


def check_moves() -> list[int]:
    """In each process: the split moves up and down in one of two runs, which learn alike.

    Tokens, versions and weights are those without a move. Live episodes go on from the pages that
    moved. Steps are learnt in two parts. At last memory is too short in the last process, so that
    all stay. Returns the devices of this process that play in the end.
    """
    OpenGroups.play_beside, AsyncPlayer._trainer_ready = play_two_rounds, at_once
    asynchrony = {"max_staleness": 2, "kv": "keep", "parts": 2}
    world = build_run(make_config({**SETTINGS, "asynchrony": asynchrony}))
    live, order = [], []

    def watched(placement, session):
        slots = range(session.engine.config.num_slots)
        live.append(sum(map(session.pages.num_held, slots)))
        order.append("episodes")
        return move_session(placement, session)

    def moved(*arguments, **settings):
        order.append("trainer")
        return move_state(*arguments, **settings)

    live_service.move_session, live_service.move_state = watched, moved
    stays, goes = Steps(world), Steps(world)
    for split, rollout, training in ((4, R4, T4), (6, R6, T2), (2, R2, T6), (6, R2, T6)):
        if len(goes.records) == 3 and world.cluster.index == world.cluster.count - 1:
            moves.relocate_session = short
        there, here = stays.take(4), goes.take(split)
        assert stays.meshes == (R4, T4) and goes.meshes == (rollout, training)
        assert tokens_of(here) == tokens_of(there)
        line = here.metrics()
        assert line["dispatch_host_bytes"] == line["publish_host_bytes"] == 0
        assert line["version_lag_max"] <= 2
        for one, other in zip(goes.parameters(), stays.parameters(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
    # Some lagged, and pages of live episodes moved each time. Who gives devices moves first.
    assert any(record.metrics()["version_lag_max"] > 0 for record in goes.records)
    assert len(live) == 3 and min(live) > 0
    away = ["trainer", "episodes", "trainer"]
    assert order == [*away, "episodes", "trainer", *away]
    devices = world.stages.layouts.engine(R2).mesh.devices.ravel()
    return [jax.local_devices().index(device) for device in devices]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_live_episodes_go_on_with_the_same_tokens_on_other_devices():
    """Each of two processes gives half of the devices, and its episodes stay with it."""
    assert Processes(2, 4, "test_split_runs:check_moves").results(900) == [[0]] * 2


@pytest.mark.slow
def test_both_stages_stay_where_memory_is_too_short_for_the_move(world, two_rounds, monkeypatch):
    stays, tries = Steps(world), Steps(world)

    for split in (4, 6):
        stays.take(4)
        with monkeypatch.context() as patch:
            patch.setattr(moves, "relocate_session", short)
            tries.take(split)
    assert tries.meshes == (R4, T4)
    assert any("too little memory" in each for each in tries.placement.log.failures)
    # It is not tried again at once.
    assert tries.placement.calm_steps < WINDOW
    assert_equal(tries.parameters(), stays.parameters())


@pytest.mark.slow
def test_a_run_in_parts_observes_the_speed_of_its_training(tmp_path, monkeypatch):
    """Its rows over the seconds in which gradients, and then the update, are computed.

    No step comes whole, so that the split is compared by observed speeds all the same.
    """
    selector = {**SETTINGS["selector"], "table": "auto"}
    run = build_run(make_config({**SETTINGS, "asynchrony": {"parts": 2}, "selector": selector}))
    placement, position = begin(run)
    finish, updates, busy_s = StepUpdate.finish, [], []

    def noted(self, state):
        updates.append(self)
        return finish(self, state)

    monkeypatch.setattr(StepUpdate, "finish", noted)
    player, trace = AsyncPlayer(run, placement), Trace(tmp_path)
    for step in range(1, 5):
        before = placement.table
        position, record = rl_step(run, placement, position, player, trace)
        player.step_ended(step)
        assert record.metrics()["train_tokens_per_s"] is None
        new = {
            key: speeds[-1]
            for key, speeds in placement.table.speeds.items()
            if key.startswith("train") and speeds != before.speeds.get(key)
        }
        if not new:
            # Some program was compiled.
            continue
        spans = [
            event
            for event in read_trace(trace_file(tmp_path))
            if event["ph"] == "X" and event["args"]["step"] == step
        ]
        parts = [span for span in spans if span["name"] == "gradients"]
        rest = [span for span in spans if span["name"] == "train"][-1]
        ends = [span["ts"] + span["dur"] for span in (*parts, rest)]
        left_us = max(0, ends[-1] - max(rest["ts"], ends[-2]))
        busy_s.append((sum(span["dur"] for span in parts) + left_us) / 1e6)
        computed = sum(part.batch.tokens.size for part in updates[-1].parts)
        assert len(parts) == len(updates[-1].parts) == 2
        # All but the last part's gradients were computed before the stage began.
        assert busy_s[-1] > rest["dur"] / 1e6
        (speed,) = new.values()
        assert speed == pytest.approx(computed / busy_s[-1], rel=0.05)
    assert busy_s and Candidates(run.problem, placement.table).has_seen("train")


def shifting(steps: int, table: str):
    """Settings of a run whose tasks sample much, then little after long prompts, and so on."""
    # Replies of about five tokens.
    more = {"stop_strings": tuple("abcdef"), "max_turn_tokens": 64, "patience_s": 0.001}
    rollout = {**SETTINGS["rollout"], **more}
    return {
        **SETTINGS,
        "num_steps": steps,
        "env": {"name": "tests.support.environments:Shifting"},
        "rollout": rollout,
        "selector": {**SETTINGS["selector"], "table": table},
    }


def write_table(path, world, rollout: dict, training: dict) -> None:
    table = table_of(world.problem, training, rollout, (BUCKET,))
    path.write_text(json.dumps(table.as_dict()))


def splits_of(lines):
    """The devices that play, step by step, where they change."""
    each = [MeshShape.parse(line["rollout_mesh"]).num_devices for line in lines]
    return each[:1] + [b for a, b in itertools.pairwise(each) if a != b]


@pytest.mark.slow
def test_the_split_follows_a_load_through_a_kill_and_is_replayed_bit_for_bit(
    world, tmp_path, capsys
):
    """SIGKILL when the first move, of step 9 or a little later, is in a checkpoint.

    The load shifts both ways, and the split with it, without a storm of moves. The replay moves
    where the run did, though it has a table by which it would stay.
    """
    table, training = tmp_path / "table.json", {T6: 2700.0, T4: 1800.0, T2: 900.0}
    # Speeds in proportion to devices.
    write_table(table, world, {R2: 100.0, R4: 200.0, R6: 300.0}, training)
    first, steps = tmp_path / "run", 36
    given = small(shifting(steps, str(table)))
    given["checkpoint"] = {"every_steps": 2}
    metrics = first / "metrics.jsonl"

    def has_moved() -> bool:
        lines = steps_of(first) if metrics.exists() else []
        return (first / "checkpoints" / "14").exists() and len(splits_of(lines)) > 1

    kill(tmp_path, first, given, has_moved)
    train(config_file.make_config(given), first)
    assert "resuming" in capsys.readouterr().out
    lines, events = steps_of(first), read_events(first)
    splits = splits_of(lines)
    # Fewer play where texts are long and replies few, from about step 11 to 22, than before, and
    # more again behind that. In a window of steps there is one move at most.
    fewest = splits.index(min(splits))
    assert max(splits[:fewest]) > splits[fewest] < max(splits[fewest:]), splits
    moves = [event["version"] for event in events if event["event"] == "split"]
    assert len(moves) == len(splits) - 1 <= steps // WINDOW
    assert all(later - earlier > WINDOW for earlier, later in itertools.pairwise(moves))
    zero, opened = (event["version"] for event in events if event["event"] == "open")
    # Some steps may have gone on before the kill.
    assert zero == 0 and opened in range(14, 24, 2) and moves[0] in range(8, 14)
    check_bound(lines, 2)
    assert episodes_of(first) == dict.fromkeys(range(steps * 24), 1)
    assert {line["dispatch_host_bytes"] for line in lines} == {0}
    assert {line["publish_host_bytes"] for line in lines} == {0}
    write_table(table, world, {R2: 1.0, R4: 1e4, R6: 1.0}, training)
    check_replay(first, steps)


def repeat(workdir: str, first: str) -> bool:
    """In each process: replays a run."""
    flags = [f"--replay={first}", f"--workdir={workdir}"]
    config, folder = replayed_config(Path(first), *parse_flags(flags))
    return not train(config, folder, replay=Path(first)).stopped


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_processes_move_alike_through_a_kill_and_are_replayed_bit_for_bit(world, tmp_path):
    """SIGKILL of one when a move, of step 9 or later, is in a checkpoint; the run goes on there."""
    table, first, again = tmp_path / "table.json", tmp_path / "run", tmp_path / "again"
    training = {T6: 2700.0, T4: 1800.0, T2: 900.0}
    write_table(table, world, {R2: 100.0, R4: 200.0, R6: 300.0}, training)
    steps = 20
    given = small(shifting(steps, str(table))) | {"checkpoint": {"every_steps": 1}}
    file = write_config(tmp_path, given | {"asynchrony": {"max_staleness": 2, "checksums": True}})
    command = Command(first, 2, config=file)

    def has_moved() -> bool:
        behind = [line["step"] for line in steps_of(first) if line["rollout_mesh"] != str(R6)]
        return bool(behind) and (first / "checkpoints" / str(behind[0] + 1)).exists()

    command.after(has_moved, 900)
    command.all[1].kill()
    assert [status for status, *_ in command.ends(400)] == [1, -9]
    Command(first, 2, config=file).done(900)
    lines, events = steps_of(first), [read_events(first, process) for process in (0, 1)]
    splits = splits_of(lines)
    moves = [[e["version"] for e in own if e["event"] == "split"] for own in events]
    opened = [[e["version"] for e in own if e["event"] == "open"] for own in events]
    assert splits[0] == 6 and len(moves[0]) == len(splits) - 1 >= 1 and moves[0] == moves[1]
    assert opened[0] == opened[1] and 0 < moves[0][0] < opened[0][1]
    check_bound(lines, 2)
    assert episodes_of(first) == dict.fromkeys(range(steps * 24), 1)
    assert {line["dispatch_host_bytes"] for line in lines} == {0}
    assert {line["publish_host_bytes"] for line in lines} == {0}
    write_table(table, world, {R2: 1.0, R4: 1e4, R6: 1.0}, training)
    each = Processes(2, 4, "test_split_runs:repeat", str(again), str(first))
    assert each.results(900) == [True] * 2
    for process in (0, 1):
        one, other = (events_file(folder, process).read_text() for folder in (first, again))
        assert one == other
    assert_equal(final_parameters(first), final_parameters(again))
