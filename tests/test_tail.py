# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The last episodes of a rollout move to where so few are faster, and go on as if they had not."""

import dataclasses
import itertools
import json

import jax
import pytest

from earl_jax.envs.environment import Start, StepResult
from earl_jax.loop import rl_step
from earl_jax.loop_async import AsyncPlayer
from earl_jax.rollout.config import Limits
from earl_jax.rollout.events import Events
from earl_jax.rollout.tasks import Tasks
from earl_jax.run.build import build_run
from earl_jax.selector.problem import Problem
from earl_jax.sharding.layout import MeshShape
from earl_jax.telemetry.load import LoadHistory
from tests.support.episodes import CONFIG, check_rows, collect, tasks
from tests.support.placements import (
    D4T2,
    D8,
    SIXTEEN_SLOTS,
    TOKENS,
    BriefTasks,
    first_position,
    given,
    load_of,
    place,
    table_of,
)
from tests.support.problems import rollout_key
from tests.support.runs import assert_equal
from tests.support.settings import make_config

SLOTS = 16


def few_are_fast_on(there: MeshShape):
    """A token of each of a few episodes takes 1 ms there, 1 s elsewhere; of all as observed."""

    def live_token_s(mesh, slots, live, tokens, appended):
        if live == SLOTS:
            return SLOTS / (3900.0 if mesh == there else 4000.0)
        return 1e-3 if mesh == there else 1.0

    return live_token_s


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


def test_a_move_is_asked_for_when_half_as_many_of_the_last_episodes_are_left(pool):
    asked = []

    def stay(session, live, longest):
        asked.append(live)
        return session

    rollout = collect(pool, tasks(24), Story, shrink=stay, max_tokens=64)
    assert len(asked) >= 2 and asked[0] <= CONFIG.num_slots // 4
    # Not in every round.
    assert all(later <= earlier // 2 for earlier, later in itertools.pairwise(asked))
    check_rows(rollout, 24)


def test_tail_does_not_begin_while_episodes_wait_for_a_slot(pool):
    """The long ones come first, and leave slots to those that wait."""

    def refuse(session, live, longest):
        raise AssertionError(f"{live} are left, and others wait")

    class Brief(Story):
        def __init__(self, task):
            self.left = 1

    # Six a row shard for two slots each: slots are empty only behind the last round.
    collect(pool, tasks(48), Brief, shrink=refuse, max_tokens=64)


@pytest.mark.slow
def test_step_whose_tail_moves_is_the_step_that_stays(tmp_path):
    """It moves only where rounds of few are faster and their program is compiled, or did then.

    Every fifth episode may say 16 tokens, the others two.
    """
    run = build_run(make_config(given(SIXTEEN_SLOTS, (D8, D4T2), (D8,))))
    table = table_of(run.problem, {D8: 4000.0}, {D8: 4000.0, D4T2: 3900.0}, (TOKENS,))
    run = dataclasses.replace(run, tasks=BriefTasks(**vars(run.tasks)))
    key, asked = rollout_key(D4T2, TOKENS, SLOTS), []

    def step(is_compiled, name="stayed", replayed=()):
        placement = place(run, table)
        placement.events = Events(tmp_path / name, replayed)
        object.__setattr__(placement.problem, "live_token_s", few_are_fast_on(D4T2))
        object.__setattr__(placement.problem, "relocate_s", lambda mesh, num_bytes: 1e-3)

        def compiled(key):
            asked.append(key)
            return is_compiled

        placement.is_compiled = compiled
        placement.choose_step(TOKENS, None)
        assert placement.rollout.mesh == D8
        # The longest of recent episodes was as long as episodes may become.
        history = LoadHistory(steps=(load_of(TOKENS),))
        position = dataclasses.replace(first_position(run, placement), history=history)
        _, record = rl_step(run, placement, position)
        placement.events.sync()
        tails = [c for c in placement.take_log().choices if c.stage == "tail"]
        return record, placement, tails

    stayed, placement, tails = step(is_compiled=False)
    assert not tails and asked and set(asked) == {key}
    moved, placement, tails = step(is_compiled=True, name="moved")
    assert tails and tails[0].plan.mesh == D4T2 and tails[0].switched
    assert placement.rollout.mesh == D8, "the next rollout begins where this one began"
    assert moved.rollout_mesh == str(D8)
    for one, other in zip(moved.trajectories, stayed.trajectories, strict=True):
        assert [t.token_ids for t in one.turns] == [t.token_ids for t in other.turns]
    assert moved.stats.prefill_tokens == stayed.stats.prefill_tokens
    assert moved.updates[0]["loss"] == pytest.approx(stayed.updates[0]["loss"], abs=1e-4)
    # A replay moves where that step did.
    events = [json.loads(line) for line in (tmp_path / "moved").read_text().splitlines()]
    again, placement, _ = step(is_compiled=False, name="again", replayed=events)
    assert "tail" in [event["event"] for event in events] and placement.events.is_over
    assert again.updates == moved.updates


D4, D2T2, F4 = MeshShape(data=4), MeshShape(data=2, tensor=2), MeshShape(fsdp=4)


class OneLongGroup(Tasks):
    """The last of a step's eight groups may say 16 tokens, the others two."""

    def training(self, step):
        return [
            dataclasses.replace(
                task, limits=Limits(max_turn_tokens=16 if task.group % 8 == 7 else 2)
            )
            for task in super().training(step)
        ]


@pytest.mark.slow
def test_tail_of_a_stream_moves_in_each_step_and_is_replayed_bit_for_bit(tmp_path, monkeypatch):
    """Two steps in two parts; the second one begins where the first one began."""
    settings = given(SIXTEEN_SLOTS | {"group_size": 2}, (D4, D2T2), (F4,)) | {
        "devices": {"platform": "cpu", "num_cpu_devices": 8, "num_rollout": 4},
        "algorithm": "grpo",
        "asynchrony": {"parts": 2},
    }
    run = build_run(make_config(settings))
    run = dataclasses.replace(run, tasks=OneLongGroup(**vars(run.tasks)))
    table = table_of(run.problem, {F4: 4000.0}, {D4: 4000.0, D2T2: 3900.0}, (TOKENS,))

    token_s = few_are_fast_on(D2T2)
    monkeypatch.setattr(Problem, "live_token_s", lambda problem, *sizes: token_s(*sizes))
    monkeypatch.setattr(Problem, "relocate_s", lambda problem, mesh, num_bytes: 1e-3)

    def steps(name, *, is_compiled, replayed=()):
        placement = place(run, table)
        placement.is_compiled = lambda key: is_compiled
        placement.choose_step(TOKENS, None)
        assert placement.rollout.mesh == D4
        # The longest of recent episodes was as long as episodes may become.
        history = LoadHistory(steps=(load_of(TOKENS),))
        position = dataclasses.replace(first_position(run, placement), history=history)
        placement.events = Events(tmp_path / name, replayed)
        player, tokens = AsyncPlayer(run, placement), []
        for _ in range(2):
            position, record = rl_step(run, placement, position, player)
            tokens.append([[turn.token_ids for turn in t.turns] for t in record.trajectories])
            assert record.rollout_mesh == str(D4) and placement.rollout.mesh == D4
            player.step_ended(position.step)
        noted = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return tokens, jax.device_get(jax.tree.leaves(position.state.params)), noted

    stayed, _, events = steps("stayed", is_compiled=False)
    assert not [event for event in events if event["event"] == "tail"]
    moved, parameters, events = steps("moved", is_compiled=True)
    assert moved[0] == stayed[0]
    tails = [event for event in events if event["event"] == "tail"]
    assert [event["plan"][0] for event in tails] == [str(D2T2)] * 2
    again, same, noted = steps("again", is_compiled=False, replayed=events)
    assert again == moved and noted == events
    assert_equal(same, parameters)
