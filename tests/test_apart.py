# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs of several processes, of which the first ones play and the others train."""

import collections
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from earl_jax.config.train_flags import parse_flags, replayed_config
from earl_jax.envs.environment import ENVIRONMENT_TIMEOUT
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.placement import delivery, moves
from earl_jax.rollout.event_files import events_file, read_events
from earl_jax.rollout.open_groups import OpenGroups
from earl_jax.rollout.staleness import AsynchronyConfig
from earl_jax.run import build, live_service
from earl_jax.settings.errors import InputError, RunError
from earl_jax.sharding import exchange
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.training import train
from tests.support.clusters import cluster_of
from tests.support.commands import Command
from tests.support.environments import Troubled
from tests.support.placements import begin
from tests.support.processes import Processes
from tests.support.runs import (
    assert_equal,
    check_bound,
    check_lags,
    episodes_of,
    final_parameters,
    most_open,
    rounds_beside_updates,
    steps_of,
    taken_by_step,
)
from tests.support.settings import make_config, small, write_config
from tests.support.simulated import Fate, SimulatedService, Source, check_events, tasks_of
from tests.support.traffic import collectives
from tests.support.wanderers import WANDERERS

STEPS, EPISODES, GROUPS = 4, 16, 8
(BUCKET,) = WANDERERS["rollout"]["context_buckets"]
# For processes that all play and train: settings that differ from `SETTINGS`.
IN_TURN = {
    "devices": WANDERERS["devices"],
    "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("fsdp=8",), "table": "model"},
}
SETTINGS = {
    **WANDERERS,
    "num_steps": STEPS,
    "rollout": {**WANDERERS["rollout"], "patience_s": 0.001},
    "devices": {**WANDERERS["devices"], "num_rollout": 4},
    "checkpoint": {"every_steps": 2},
    "log": {"trajectories_every_steps": 1},
}


def given_of(parts: int = 1, **changes):
    asynchrony = {"max_staleness": 2, "checksums": True, "parts": parts}
    return {**SETTINGS, "asynchrony": asynchrony, **changes}


def run(workdir: str, replay: str, changes: dict) -> dict[str, int]:
    """In each process: trains to the end, by the events of a run if there is one.

    Returns the bytes that went between processes, as `watch_exchanges` counts them.
    """
    config = make_config(given_of(**changes))
    with pytest.MonkeyPatch.context() as patch:
        sent = watch_exchanges(patch)
        train(config, Path(workdir), replay=Path(replay) if replay else None)
    return sent


def watch_exchanges(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the bytes that compiled programs send between processes: "publish 0" of version 0.

    Those of "dispatch 0" are of its rows. The host's facts of them, which travel beside, are not in
    a plan of the rows; they are "facts 0".
    """
    sent, now = collections.Counter[str](), {"stage": "", "version": 0}
    program, publish, dispatch = exchange._program, moves.publish_policy, delivery.dispatch

    @functools.cache
    def bytes_of(run, shapes):
        text = run.lower(list(shapes)).compile().as_text()
        return sum(each.received_bytes for each in collectives(text, jax.device_count()))

    def watched(shipments, mesh, max_bytes):
        run = program(shipments, mesh, max_bytes)

        def counted(rows):
            shapes = (jax.ShapeDtypeStruct(r.shape, r.dtype, sharding=r.sharding) for r in rows)
            # A row has a number for each of its tokens; facts of the host have fewer.
            facts = sum(
                each.plan.moved_bytes
                for each in shipments
                if now["stage"] == "dispatch" and each.move.shape[1:] != (BUCKET,)
            )
            sent[f"{now['stage']} {now['version']}"] += bytes_of(run, tuple(shapes)) - facts
            sent[f"facts {now['version']}"] += facts
            return run(rows)

        return counted

    def published(placement, engine, mesh, params, version):
        now.update(stage="publish", version=version)
        # An evaluation may have published the same version before.
        sent[f"publish {version}"] = 0
        found = publish(placement, engine, mesh, params, version)
        now["stage"] = ""
        return found

    def dispatched(*given, **named):
        now["stage"] = "dispatch"
        found = dispatch(*given, **named)
        now["stage"] = ""
        return found

    patch.setattr(exchange, "_program", watched)
    for module in (moves, live_service):
        patch.setattr(module, "publish_policy", published)
    patch.setattr(delivery, "dispatch", dispatched)
    return sent


def run_twice(workdir: str, again: str, changes: dict) -> None:
    """In each process: a run, and its replay."""
    run(workdir, "", changes)
    run(again, workdir, changes)


def in_processes(
    num: int, devices: int, workdir: Path, replay: Path | str = "", /, **changes
) -> None:
    """Runs `run` in processes. With devices apart each sends what is in the metrics, no more."""
    each = Processes(num, devices, "test_apart:run", str(workdir), str(replay), changes)
    for sent in each.results(900):
        lines = [] if "devices" in changes else steps_of(workdir)
        for version, line in enumerate(lines):
            for stage in ("publish", "dispatch"):
                assert sent[f"{stage} {version}"] == line[f"{stage}_bytes"] > 0
            # The length of each episode, and an advantage for each of its turns.
            assert 0 < sent[f"facts {version}"] < line["dispatch_bytes"] / 4


def check_run(workdir: Path, steps: int = STEPS, *, moved=("dispatch", "publish")) -> None:
    """Each task in the step in which a synchronous run trains on it, within the bound."""
    lines = steps_of(workdir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    check_lags(workdir, 2)
    for step in range(steps):
        played = read_trajectories(workdir / "trajectories" / f"step_{step + 1:06d}.jsonl")
        numbers = [each["episode"] for each in played]
        assert sorted(numbers) == list(range(step * EPISODES, (step + 1) * EPISODES))
    assert episodes_of(workdir) == dict.fromkeys(range(steps * EPISODES), 1)
    for name in ("dispatch", "publish"):
        # Nothing goes through the host.
        assert {line[f"{name}_host_bytes"] for line in lines} == {0}
        assert all((line[f"{name}_bytes"] > 0) == (name in moved) for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_processes_play_and_two_train(tmp_path):
    """Each plays its part of every step, in two parts; the trainer's mesh is over two processes.

    Its first step is that of a synchronous run of one process, within rounding. Environments that
    hang hold none of them.
    """
    first, alone = tmp_path / "run", tmp_path / "alone"
    env = {"name": "tests.support.environments:Troubled", "timeout_s": 5.0}
    changes = {"env": env, "checkpoint": {"every_steps": 1, "keep": STEPS}}
    in_processes(4, 2, first, parts=2, **changes)
    check_run(first)
    reasons = collections.Counter(
        each["stop_reason"]
        for file in (first / "trajectories").iterdir()
        for each in read_trajectories(file)
    )
    assert 0 < reasons[ENVIRONMENT_TIMEOUT] <= 8
    with Troubled.hanging():
        train(make_config(given_of(**changes) | {"asynchrony": {}, "num_steps": 1}), alone)
    tokens, expected = (
        {
            each["episode"]: each["token_ids"]
            for each in read_trajectories(workdir / "trajectories" / "step_000001.jsonl")
        }
        for workdir in (first, alone)
    )
    assert tokens == expected
    ones, others = final_parameters(first, 1), final_parameters(alone)
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=5e-5)
    size, whole, events = GROUPS // 2, [], [read_events(first, process) for process in (0, 1)]
    # Those of three steps, over both processes, whenever each had its most.
    assert sum(map(most_open, events)) == 3 * GROUPS
    for process, found in enumerate(events):
        taken = taken_by_step(found)
        # Both take a step as a whole, or in parts, as both see what was finished.
        assert all(len(each) in (1, 2) for each in taken) and len(taken[0]) == 2
        whole.append([len(each) == 1 for each in taken])
        steps = [sorted(sum(each, [])) for each in taken]
        own = [
            range((2 * step + process) * size, (2 * step + process + 1) * size)
            for step in range(STEPS)
        ]
        assert steps == list(map(list, own))
    assert whole[0] == whole[1]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_each_process_replaces_its_own_groups_of_equal_rewards(tmp_path):
    """DAPO's dynamic sampling: both give groups up, and the metrics count those of both."""
    asynchrony = {"rule": "drop", "refill": 1, "max_staleness": 1}
    selector = {**WANDERERS["selector"], "train_meshes": ("fsdp=2",)}
    changes = {"asynchrony": asynchrony, "algorithm": "dapo", "selector": selector}
    # Two play, and one trains.
    in_processes(3, 2, tmp_path / "run", **changes)
    lines = steps_of(tmp_path / "run")
    check_bound(lines, 1)
    events = [read_events(tmp_path / "run", process) for process in (0, 1)]
    lost = [sum((e["groups"] for e in own if e["event"] == "drop"), []) for own in events]
    assert all(lost) and not {*lost[0]} & {*lost[1]}
    replaced, stale = (
        sum(line.get(name, 0) for line in lines) for name in ("refilled_groups", "stale_episodes")
    )
    assert replaced > 0 and replaced + stale // 2 == len(lost[0]) + len(lost[1])
    taken = [sum((e["groups"] for e in own if e["event"] == "take"), []) for own in events]
    assert [len(own) for own in taken] == [STEPS * EPISODES // 2 // 2] * 2
    assert not {*taken[0], *taken[1]} & {*lost[0], *lost[1]}
    assert sum(map(most_open, events)) == 2 * GROUPS


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("killed", "changes"), [(0, {}), (1, IN_TURN)], ids=["who-plays", "in-turn"]
)
def test_process_that_is_killed_ends_the_run_which_goes_on_and_is_replayed(
    tmp_path, killed, changes
):
    """SIGKILL behind the first checkpoint, between the third step and the last.

    Where processes take turns, live episodes stay open over the updates, which both make on the
    same devices; it goes on with another setting. Its replay, by the events of those that play,
    ends with the same bits.
    """
    workdir, again, steps = tmp_path / "run", tmp_path / "again", 6
    given = given_of(num_steps=steps, **changes)
    file = write_config(tmp_path, small(given))
    settings = {"distributed.heartbeat_s": 15.0}
    command = Command(workdir, 2, config=file, **settings)
    command.after_step(3)
    command.after((workdir / "checkpoints" / "2").exists)
    command.all[killed].kill()
    ends = command.ends(400)
    assert ends[killed][0] == -9, "it was done before"
    status, _, errors = ends[1 - killed]
    assert status == 1 and f"process {killed} on" in errors and "has ended" in errors, errors
    more = {"asynchrony.kv": "keep"} if changes else {}
    Command(workdir, 2, config=file, **settings, **more).done(500)
    # Rows of data=8, where processes take turns, lie where fsdp=8 has them.
    moved, players = (("publish",), (0, 1)) if changes else (("dispatch", "publish"), (0,))
    check_run(workdir, steps, moved=moved)
    assert max(line["version_lag_max"] for line in steps_of(workdir)) > 0
    assert sum(most_open(read_events(workdir, process)) for process in players) == 3 * GROUPS
    for process in players:
        events = read_events(workdir, process)
        check_events(events)
        opened = [event["version"] for event in events if event["event"] == "open"]
        assert opened[0] == 0 and len(opened) == 2 and opened[1] in range(2, steps, 2)
    if killed == 0:
        assert not events_file(workdir, 1).exists(), "who trains decides nothing by the time"
        assert any(rounds_beside_updates(events))
        sums = {event["version"]: event["sum"] for event in events if event["event"] == "checksum"}
        assert list(sums) == list(range(steps)) and len(set(sums.values())) == steps
    asynchrony = given["asynchrony"] | ({"kv": "keep"} if changes else {})
    in_processes(2, 4, again, workdir, num_steps=steps, asynchrony=asynchrony, **changes)
    assert events_file(again, 1).exists() == (1 in players)
    for process in players:
        one, other = (events_file(each, process).read_text() for each in (workdir, again))
        assert one == other
    assert_equal(final_parameters(workdir), final_parameters(again))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_synchronous_run_whose_processes_share_a_queue_is_replayed(tmp_path):
    """Each process plays the groups that it took then."""
    first, again = tmp_path / "run", tmp_path / "again"
    rollout = {**SETTINGS["rollout"], "order": "queue"}
    changes = {**IN_TURN, "num_steps": 2, "asynchrony": {}, "rollout": rollout}
    each = Processes(2, 4, "test_apart:run_twice", str(first), str(again), changes)
    each.results(900)
    for process in (0, 1):
        one, other = (events_file(each, process).read_text() for each in (first, again))
        assert one == other and '"queue"' in one
    assert_equal(final_parameters(first), final_parameters(again))


def run_with_a_leaf_left_out(workdir: str) -> str:
    """In each process: the second policy arrives with one leaf of the first. Returns the error."""
    publish, kept = moves.publish_policy, []

    def leaves_one_out(*given):
        policy, num_bytes = publish(*given)
        if jax.process_index() > 0:
            return policy, num_bytes
        first, *others = jax.tree.leaves(policy.params)
        kept.append(jnp.copy(first))
        tree = jax.tree.structure(policy.params)
        return dataclasses.replace(policy, params=tree.unflatten([kept[0], *others])), num_bytes

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as found:
        for module in (moves, live_service):
            patch.setattr(module, "publish_policy", leaves_one_out)
        run(workdir, "", {"num_steps": 2})
    return str(found.value)


@pytest.mark.slow
def test_both_processes_notice_a_weight_that_did_not_arrive(tmp_path):
    each = Processes(2, 4, "test_apart:run_with_a_leaf_left_out", str(tmp_path / "run"))
    player, trainer = each.results(900)
    assert player == trainer
    assert "the weights of version 1 have checksum" in player
    assert "they were not published whole" in player


# Meshes, parts of a step, and what is refused.


@pytest.mark.slow
def test_live_episodes_follow_those_of_another_process_to_their_mesh():
    both = {"rollout_meshes": ("data=4", "data=2,tensor=2"), "train_meshes": ("fsdp=4",)}
    run = build.build_run(make_config(given_of(selector={**both, "table": "model"})))
    placement, position = begin(run)
    player = AsyncPlayer(run, placement)
    position, _ = rl_step(run, placement, position, player)
    live, service = player._live, player._live.service
    here, other = placement.rollout.mesh, MeshShape(data=4)
    if here == other:
        other = MeshShape(data=2, tensor=2)
    assert service.is_busy and service.session.engine.layout.shape == here
    where = placement.as_dict()
    placement.restore({**where, "rollout": [str(other), *where["rollout"][1:]]})
    live._follow(service)
    live._where = live._mesh_and_slots()
    assert live.error is None and service.session.engine.layout.shape == other
    position, record = rl_step(run, placement, position, player)
    assert live.service is service and record.rollout_mesh == str(other)
    assert [each.episode for each in record.outcomes] == list(range(EPISODES, 2 * EPISODES))


def test_groups_of_a_part_have_their_numbers_in_the_run():
    """Steps of 4 groups of two episodes in two parts; the second part plays 2 3, 6 7, 10 11."""
    tasks = tasks_of(Source(4, {"next": 0}), size=4, group_size=2, num_steps=3)
    groups = OpenGroups(tasks, AsynchronyConfig(max_staleness=1), part=(1, 2))
    service = SimulatedService(4, 1, 4, 2, lambda episode: Fate(rounds=1), version=0)
    groups.open(service, 0)
    taken = groups.next_episodes(groups.size)
    assert [each.trajectory.episode for each in taken] == [4, 5, 6, 7]
    groups.copied(taken)
    assert groups.numbers == [6, 7]
    # Resumed there, of a run whose first part has open groups too.
    tasks = tasks_of(Source(4, {"next": 4}), size=4, group_size=2, num_steps=3)
    groups = OpenGroups(tasks, AsynchronyConfig(max_staleness=1), part=(1, 2))
    service = SimulatedService(4, 1, 4, 2, lambda episode: Fate(rounds=1), version=1)
    groups.open(service, 1, (4, 5, 6, 7))
    assert [each.trajectory.episode for each in groups.next_episodes(2)] == [12, 13, 14, 15]
    assert groups.numbers == [10, 11]


def check(num_rollout: int, *, processes: int = 3, **asynchrony) -> None:
    """Checks processes with two devices each."""
    cluster = cluster_of(0, num_rollout, processes)
    given = given_of(**{"asynchrony": {"max_staleness": 1, **asynchrony}})
    given["devices"] = {**given["devices"], "num_rollout": num_rollout}
    build._check_processes(make_config(given), cluster)


def test_processes_that_cannot_play_ahead_of_each_other_are_an_error_with_the_setting():
    check(2, rule="wait")
    check(4, parts=2)
    check(0, processes=2, rule="drop")
    check(4, rule="wait")
    for num_rollout in (1, 3):
        with pytest.raises(InputError, match=r"config.devices.num_rollout is .*, one of \[2, 4\]"):
            check(num_rollout)
    with pytest.raises(InputError, match="the 8 groups of a step .* are no multiple of 3"):
        check(6, processes=4)
    with pytest.raises(InputError, match="are no multiple of 16, their number times"):
        check(4, parts=8)


def test_replay_may_be_given_its_processes_and_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text('{"num_steps": 3}')
    flags = [f"--replay={tmp_path}", f"--workdir={tmp_path / 'again'}"]
    place = ["--config.distributed.num_processes=2", "--config.devices.num_cpu_devices=4"]
    config, _ = replayed_config(tmp_path, *parse_flags(flags + place))
    assert (config.num_steps, config.distributed.num_processes) == (3, 2)
    assert config.devices.num_cpu_devices == 4
    with pytest.raises(InputError, match="--replay takes the config of that run"):
        replayed_config(tmp_path, *parse_flags([*flags, "--config.num_steps=2"]))
