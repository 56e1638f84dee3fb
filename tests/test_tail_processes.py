# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The last episodes of a rollout of two processes move in both, in one, or in none.

Every fifth of sixteen episodes may say 16 tokens, the others two: each process has two long ones.
"""

import dataclasses
import socket
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import earl_jax.loop
from earl_jax.loop import rl_step
from earl_jax.placement import delivery, moves
from earl_jax.placement.compile_ahead import CompileAhead, wanted_programs
from earl_jax.placement.moves import move_session, open_session
from earl_jax.placement.placement import Placement
from earl_jax.run.build import Run, build_run
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.compile_clock import compile_clock
from earl_jax.telemetry.host_bytes import HostByteCounter
from earl_jax.telemetry.load import LoadHistory
from earl_jax.telemetry.timing import StageTimer
from tests.support.episodes import check_rows
from tests.support.placements import (
    SIXTEEN_SLOTS,
    TOKENS,
    BriefTasks,
    first_position,
    given,
    hungry,
    load_of,
    place,
    table_of,
)
from tests.support.problems import rollout_key
from tests.support.processes import Processes
from tests.support.settings import make_config

SLOTS, EPISODES = 16, 16
# Two processes of two devices have a half each; two of one device share these.
D4, D2T2 = MeshShape(data=4), MeshShape(data=2, tensor=2)
T2, C2 = MeshShape(tensor=2), MeshShape(context=2)


def run_on(here: MeshShape, there: MeshShape, train: MeshShape, **changes: Any) -> Run:
    run = build_run(make_config(given(SIXTEEN_SLOTS | changes, (here, there), (train,))))
    return dataclasses.replace(run, tasks=BriefTasks(**vars(run.tasks)))


def placed(
    run: Run, here: MeshShape, there: MeshShape, train: MeshShape, few: tuple[int, ...] = (4,)
) -> Placement:
    """A placement on `here`, beside which `there` is faster for these numbers of episodes alone."""
    speeds = {train: 4000.0}, {here: 4000.0, there: 3900.0}
    placement = place(run, table_of(run.problem, *speeds, (TOKENS, 2 * TOKENS)))

    def live_token_s(mesh, slots, live, tokens, appended):
        # With all slots at work as fast as observed.
        if live == slots:
            return slots / speeds[1].get(mesh, 4000.0)
        return (1e-3 if live in few else 1e3) if mesh == there else 1.0

    object.__setattr__(placement.problem, "live_token_s", live_token_s)
    object.__setattr__(placement.problem, "relocate_s", lambda mesh, num_bytes: 1e-3)
    placement.choose_step(TOKENS, None)
    assert placement.rollout.mesh == here
    return placement


def take_steps(run: Run, placement: Placement, number: int = 1) -> dict[str, Any]:
    """Returns this process's part of so many steps: its episodes, rows as they are sent, tail."""
    position = first_position(run, placement)
    # The longest of recent episodes was as long as episodes may become.
    history = LoadHistory(steps=(load_of(TOKENS),))
    rows, bytes_read, found = [], [], []
    play_all, dispatch, relocate = earl_jax.loop.play_all, delivery.dispatch, moves.relocate

    def checked(*arguments, **named):
        own, played = play_all(*arguments, **named)
        check_rows(own, len(own.trajectories))
        return own, played

    def sent(experience, *arguments, **named):
        shards = {str(s.index): np.asarray(s.data) for s in experience.tokens.addressable_shards}
        rows.extend(each.tolist() for _, each in sorted(shards.items()))
        return dispatch(experience, *arguments, **named)

    def counted(*arguments, **named):
        with HostByteCounter() as reads:
            moved = relocate(*arguments, **named)
        bytes_read.append(reads.num_bytes)
        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earl_jax.loop, "play_all", checked)
        patch.setattr(delivery, "dispatch", sent)
        patch.setattr(moves, "relocate", counted)
        for _ in range(number):
            position = dataclasses.replace(position, history=history)
            position, record = rl_step(run, placement, position)
            log = placement.take_log()
            turns = [turn for each in record.trajectories for turn in each.turns]
            found.append(
                {
                    "episodes": [each.episode for each in record.trajectories],
                    "ids": [list(turn.token_ids) for turn in turns],
                    "logprobs": [list(turn.logprobs) for turn in turns],
                    "loss": record.updates[0]["loss"],
                    "host_bytes": [record.dispatch_host_bytes, record.publish_host_bytes],
                    "mesh": [record.rollout_mesh, str(placement.rollout.mesh)],
                    "tails": [str(c.plan.mesh) for c in log.choices if c.stage == "tail"],
                    "failures": log.failures,
                }
            )
    return {"steps": found, "rows": rows, "bytes_read": bytes_read}


def assert_same_steps(one: dict[str, Any], other: dict[str, Any], *, queue: bool = False) -> None:
    """The same tokens, in the same rows; log-probs and losses that differ by rounding.

    Both begin each rollout on the same mesh, and read nothing to the host. With a `queue` a process
    may have played other episodes.
    """
    assert one["rows"] == other["rows"]
    for left, right in zip(one["steps"], other["steps"], strict=True):
        for name in ("mesh",) if queue else ("mesh", "episodes", "ids"):
            assert left[name] == right[name], name
        assert left["host_bytes"] == right["host_bytes"] == [0, 0]
        pairs = [] if queue else zip(left["logprobs"], right["logprobs"], strict=True)
        for mine, yours in pairs:
            np.testing.assert_allclose(mine, yours, atol=1e-5)
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-4)
    assert set(one["bytes_read"] + other["bytes_read"]) <= {0}


def first_step_of(steps: dict[str, Any]) -> dict[str, Any]:
    """Returns the first of two steps."""
    num_rows = len(steps["rows"]) // 2
    return {**steps, "steps": steps["steps"][:1], "rows": steps["rows"][:num_rows]}


def tails_of(steps: dict[str, Any]) -> list[list[str]]:
    return [each["tails"] for each in steps["steps"]]


# An engine in each process.


def with_tails(run: Run) -> dict[str, Any]:
    """Steps whose tails move in no process, in both, and in the second one."""
    index, found = run.cluster.index, {}
    for name, moving in (("none", []), ("both", [0, 1]), ("second", [1])):
        placement = placed(run, D4, D2T2, D4)
        placement.is_compiled = lambda key, moves=index in moving: moves
        found[name] = take_steps(run, placement, 2)
    return found


def steps_of_two() -> dict[str, dict[str, Any]]:
    """In each of two processes: steps with tails, with memory enough and short, and of a queue."""
    run = run_on(D4, D2T2, D4)
    found = {"fifo": with_tails(run), "short": that_are_short(run)}
    queue = run_on(D4, D2T2, D4, order="queue", episodes_per_step=2 * EPISODES)
    return {**found, "queue": with_tails(queue)}


@pytest.fixture(scope="module")
def two() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the first process's part of these steps, and the second one's."""
    first, second = Processes(2, 2, "test_tail_processes:steps_of_two").results(550)
    return {name: (first[name], second[name]) for name in first}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_process_moves_its_last_episodes_by_itself(two):
    first, second = two["fifo"]
    for each in (first, second):
        assert tails_of(each["none"]) == [[], []]
        # Two of each process to the other mesh, and the last one back.
        assert tails_of(each["both"])[0] == [str(D2T2), str(D4)]
        assert_same_steps(each["both"], each["none"])
        assert_same_steps(each["second"], each["none"])
        assert each["both"]["steps"][1]["mesh"] == [str(D4), str(D4)]
    assert tails_of(first["second"]) == [[], []]
    assert tails_of(second["second"])[0] == [str(D2T2), str(D4)]
    assert first["none"]["steps"][0]["episodes"] == list(range(8))
    assert second["none"]["steps"][0]["episodes"] == list(range(8, 16))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_of_a_queue_are_in_order_whoever_moves(two):
    """The process that plays an episode depends on time; the trainer's rows do not."""
    first, second = two["queue"]
    for each in (first, second):
        for name in ("both", "second"):
            assert_same_steps(each[name], each["none"], queue=True)
    assert any(tails_of(second["second"])) and not any(tails_of(first["second"]))
    for step in range(2):
        played = [each["second"]["steps"][step]["episodes"] for each in (first, second)]
        first_of_step = 2 * EPISODES * step
        assert sorted(sum(played, [])) == list(range(first_of_step, first_of_step + 2 * EPISODES))


def that_are_short(run: Run) -> dict[str, Any]:
    """Steps in which the second process has no memory for the move, and then for the tail."""
    is_short, found = run.cluster.index == 1, {}

    def short(*arguments, **named):
        return jax.block_until_ready(hungry(donated=0)(jnp.ones(4)))

    for name in ("move", "round"):
        placement = placed(run, D4, D2T2, D4)
        is_there = name == "move" or is_short
        placement.is_compiled = lambda key, is_there=is_there: is_there
        with pytest.MonkeyPatch.context() as patch:
            if name == "move" and is_short:
                patch.setattr(moves, "relocate", short)
            if name == "round" and is_short:
                patch.setattr(run.stages.engines.engine(D2T2), "_play", hungry(donated=1))
            found[name] = take_steps(run, placement)
        found[name]["known"] = [each.mesh for each in placement.table.failures]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_process_that_is_short_in_its_move_stays_and_in_its_tail_has_all_play_again(two):
    first, second = two["short"]
    for each, whole in zip(two["short"], two["fifo"], strict=True):
        for name in ("move", "round"):
            # One step, of those that were taken without a move.
            assert_same_steps(each[name], first_step_of(whole["none"]))
        (step,) = each["move"]["steps"]
        assert step["tails"][:1] == [str(D2T2)] and each["move"]["known"] == []
        # The plan of the tail, also in the process whose episodes stayed.
        assert set(each["round"]["known"]) == {str(D2T2)}
        assert "ran out of memory" in each["round"]["steps"][0]["failures"][0]
    assert first["move"]["steps"][0]["failures"] == []
    assert all("too little memory" in words for words in second["move"]["steps"][0]["failures"])
    assert second["move"]["steps"][0]["failures"]


def steps_compiled_ahead() -> dict[str, Any]:
    """In each of two processes: what is compiled ahead, and a step that finds it."""
    run = run_on(D4, D2T2, D4, context_buckets=(TOKENS, 2 * TOKENS))
    # The two of a process, as if both had so many; two of sixteen are what is expected of a tail.
    placement = placed(run, D4, D2T2, D4, few=(2, 4))
    # Of a step before: the shape of a longer batch is known.
    placement.trained_tokens = 160
    history = LoadHistory(steps=(load_of(TOKENS),))
    engine, compiled = run.stages.engines.engine(D2T2), []

    def play(*arguments):
        seconds = compile_clock().own_seconds()
        result = original(*arguments)
        compiled.append(compile_clock().own_seconds() - seconds)
        return result

    with CompileAhead(print) as ahead:
        ahead.connect(placement)
        wanted = list(wanted_programs(placement, history))
        ahead.look(placement, history)
        ahead.settle()
        original, engine._play = engine._play, play
        steps = take_steps(run, placement)
    # Where episodes may come to the next context bucket.
    buckets = {"context_buckets": (TOKENS, 2 * TOKENS), "max_episode_tokens": 2 * TOKENS}
    longer = placed(run_on(D4, D2T2, D4, **buckets), D4, D2T2, D4, few=(2, 4))
    longer.trained_tokens = 160
    return {
        "wanted": wanted,
        "longer": list(wanted_programs(longer, history)),
        "tries": placement.may_try is not None,
        "tails": tails_of(steps),
        "compiled": compiled,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_process_finds_the_tail_that_it_has_compiled_ahead():
    """The second, which writes no persistent cache, too."""
    for each in Processes(2, 2, "test_tail_processes:steps_compiled_ahead").results(550):
        tail, longer = rollout_key(D2T2, TOKENS, SLOTS), rollout_key(D4, 2 * TOKENS, SLOTS)
        assert each["wanted"] == [tail]
        # And the rollout of longer contexts, whose update is a program of both.
        assert each["longer"] == [tail, longer]
        assert not each["tries"], "all must choose alike"
        assert each["tails"] == [[str(D2T2)]]
        assert each["compiled"] and not any(each["compiled"])


# An engine that spans both.


def steps_in_lockstep() -> dict[str, Any]:
    """In each of two processes of one device: the tail of the engine that they share."""
    run, found = run_on(T2, C2, MeshShape(data=2)), {}
    for name in ("none", "moves"):
        placement = placed(run, T2, C2, MeshShape(data=2), few=(2, 4))
        assert placement.plays_together
        if name == "moves":
            placement.played.add(rollout_key(C2, TOKENS, SLOTS))
        found[name] = take_steps(run, placement)
        history = LoadHistory(steps=(load_of(TOKENS),))
        found[name]["wanted"] = list(wanted_programs(placement, history))
    with pytest.raises(jax.errors.JaxRuntimeError):
        # The other may be in a program with it.
        placement.attempt(None, lambda: hungry(donated=0)(jnp.ones(4)), live=True)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_share_an_engine_move_its_last_episodes_together():
    first, second = Processes(2, 1, "test_tail_processes:steps_in_lockstep").results(550)
    for each in (first, second):
        assert tails_of(each["none"]) == [[]] and tails_of(each["moves"])[0][0] == str(C2)
        assert each["none"]["wanted"] == each["moves"]["wanted"] == []
        # The first process alone keeps the trajectories.
        assert_same_steps(each["moves"], each["none"])
    assert len(first["none"]["steps"][0]["episodes"]) == EPISODES


def come_to_a_move(lost: int) -> None:
    """Both processes have an engine that they share, and all but one come to move it."""
    train = MeshShape(data=2)
    run = run_on(T2, C2, train)
    placement = placed(run, T2, C2, train)
    policy = run.learner.policy(first_position(run, placement).state)
    session, _ = open_session(placement, policy, version=0)
    assert session is not None
    run.cluster.barrier("the move")
    patient = dataclasses.replace(run.cluster, timeout_s=3.0)
    object.__setattr__(placement.stages, "cluster", patient)
    plan = placement.rollout._replace(mesh=C2)
    placement.plans = placement.plans._replace(rollout=plan)
    with StageTimer()("rollout"):
        if run.cluster.index == lost:
            time.sleep(1000)
        move_session(placement, session)


@pytest.mark.slow
def test_process_that_does_not_come_to_a_move_is_named_and_waited_for_no_longer():
    first, second = Processes(2, 1, "test_tail_processes:come_to_a_move", 1).all
    try:
        _, errors = first.communicate(timeout=200)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 1, errors
    late = f"process 1 on {socket.gethostname()} is still in the stage rollout"
    assert f"{late} (the move of live episodes: nothing came for 3 s" in errors
