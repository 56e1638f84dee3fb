# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Two groups of different devices: steps and prices by hand, and the planner's command."""

import dataclasses
import json
import math
import re

import pytest

from earl_jax.placement.group_planner import TOKEN_BYTES, cheapest, groups_step, plan_groups
from earl_jax.plan import plan_command
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.sizes import Parameter
from earl_jax.sharding.layout import MeshShape
from tests.support.problems import HandProblem, hand_problem

R2, R4, T4, T8 = (MeshShape(data=2), MeshShape(data=4), MeshShape(fsdp=4), MeshShape(fsdp=8))
CONTEXT = 100
TOKENS = 8 * CONTEXT
# Of a device-hour of rollouts and of training.
PRICES = (1.0, 3.0)


def player(mesh: MeshShape, tokens_per_s: float, **settings) -> HandProblem:
    """A group that plays; 250 weights of 4 bytes."""
    problem = hand_problem(
        {},
        {mesh: tokens_per_s},
        hardware=parse_topology(f"cpu:{mesh.num_devices}"),
        num_rollout=mesh.num_devices,
        **settings,
    )
    sizes = dataclasses.replace(problem.sizes, engine=(Parameter("weights", (250,), (None,), 4),))
    return dataclasses.replace(problem, sizes=sizes)


def trainer(mesh: MeshShape, tokens_per_s: float) -> HandProblem:
    """A group that trains."""
    hardware = parse_topology(f"cpu:{mesh.num_devices}")
    return hand_problem({mesh: tokens_per_s}, {}, hardware=hardware)


def step_of(played: HandProblem, trained: HandProblem, link: float) -> dict:
    return groups_step(played, trained, PRICES, CONTEXT, link)


def test_a_step_has_the_seconds_of_both_groups_and_of_the_link():
    step = step_of(player(R4, 100.0), trainer(T8, 80.0), 1000.0)
    # 800 tokens; 1,000 bytes of weights and 24 of each token at 1,000 bytes/s.
    assert (step["rollout_s"], step["train_s"], step["tokens"]) == (8.0, 10.0, TOKENS)
    assert step["link_s"] == 1.0 + TOKENS * TOKEN_BYTES / 1000.0 == 20.2
    # Four data shards that each fetch the weights take 3 s more.
    assert step["link_each_s"] == pytest.approx(23.2)
    assert (step["meshes"], step["devices"]) == ([str(R4), str(T8)], [4, 8])
    # Both stages wait for the link.
    assert (step["step_s"], step["turns_s"]) == (pytest.approx(30.2), pytest.approx(38.2))
    # 4 devices at 1 and 8 at 3 are 28 an hour.
    assert step["hour_price"] == 28.0
    assert step["price"] == pytest.approx(28.0 * 30.2 / 3600 / 800 * 1e6)


def test_a_fast_link_leaves_the_slower_stage():
    for rollout, slower in ((100.0, "train_s"), (50.0, "rollout_s")):
        step = step_of(player(R4, rollout), trainer(T8, 80.0), 1e12)
        assert step["step_s"] == pytest.approx(step[slower])


def test_weights_spread_among_those_that_play_behind_the_link():
    """20,200 bytes at 10,100 bytes/s take 2 s on the link, and the weights 1 s behind it."""
    step = step_of(player(R4, 100.0, weights_s=1.0), trainer(T8, 80.0), 10_100.0)
    assert (step["rollout_s"], step["train_s"]) == (8.0, 10.0)
    assert (step["link_s"], step["spread_s"]) == (2.0, 1.0)
    # All wait for both.
    assert (step["step_s"], step["turns_s"]) == (13.0, 21.0)
    assert step_of(player(R4, 50.0, weights_s=1.0), trainer(T8, 80.0), 10_100.0)["step_s"] == 19.0


def test_training_goes_over_the_batch_as_often_as_the_config_says():
    train = trainer(T8, 80.0)
    work = dataclasses.replace(train.work, epochs=2, has_stream=True)
    train = dataclasses.replace(train, work=work)
    # Two epochs over 800 tokens and a supervised batch as large: 3,200 tokens at 80 a second.
    assert step_of(player(R4, 100.0), train, 1e9)["train_s"] == 40.0


def test_the_cheapest_pair_of_groups_has_the_stages_balanced():
    rollouts = [player(R2, 50.0), player(R4, 100.0)]
    trains = [trainer(T4, 50.0), trainer(T8, 100.0)]
    # Seconds times price an hour: 2 + 4: 16 x 14; 2 + 8: 16 x 26; 4 + 4: 16 x 16; 4 + 8: 8 x 28.
    # Of two that cost 224 the faster one; a link for which both wait 1 s costs it 28, and the other
    # one 14.
    assert cheapest(rollouts, trains, PRICES, CONTEXT, math.inf)["devices"] == [4, 8]
    assert cheapest(rollouts, trains, PRICES, CONTEXT, 20_200.0)["devices"] == [2, 4]
    assert cheapest(rollouts[:1], trains, PRICES, CONTEXT, 1e9)["devices"] == [2, 4]


def test_groups_that_do_not_fit_have_no_step():
    small = player(R4, 100.0, budget_bytes=10)
    with pytest.raises(BudgetTooSmall, match="no mesh for a rollout fits"):
        step_of(small, trainer(T8, 80.0), 1e9)
    assert cheapest([small], [trainer(T8, 80.0)], PRICES, CONTEXT, 1e9) is None


PLAN = (
    "--topology=h20:4x8",
    "--train_topology=h800:2x8",
    "--config.model.preset=qwen2.5-7b",
    "--contexts=32768",
    "--config.rollout.num_slots=256",
    "--config.rollout.episodes_per_step=256",
)


def planned(capsys, *flags):
    plan_command([*PLAN, *flags, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_command_plans_devices_of_two_kinds(capsys):
    """H20s have 1.2 times an H800's bandwidth, and 0.15 of its operations: they decode."""
    values = planned(capsys, "--prices=1,2.85", "--link_gb=10", "--contexts=8192,32768")
    assert values["topologies"] == ["h20:4x8", "h800:2x8"]
    for step in values["all"]:
        assert step["devices"] == [32, 16]
        assert step["hour_price"] == pytest.approx(32 + 16 * 2.85)
        # 15.2 GB of weights in bf16.
        assert 1.5 < step["link_s"] < 1.6
    for step, best in zip(values["all"], values["cheapest"], strict=True):
        assert best["price"] <= step["price"]
    other = ("--topology=h800:4x8", "--train_topology=h20:2x8", "--prices=2.85,1")
    (swapped,) = planned(capsys, *other)["all"]
    step = values["all"][-1]
    assert step["rollout_s"] < swapped["rollout_s"]
    assert 4 < swapped["train_s"] / step["train_s"] < 8


def test_the_table_has_prices_only_where_they_are_known(capsys):
    plan_command([*PLAN])
    text = capsys.readouterr().out
    assert "rollouts on h20:4x8; training on h800:2x8; 800 GB/s between" in text
    assert "million" not in text
    plan_command([*PLAN, "--prices=1,2.85"])
    text = capsys.readouterr().out
    assert "rollouts on h20:4x8, 1 a device-hour; training on h800:2x8, 2.85" in text
    assert "the cheapest tokens" in text


def test_a_plan_that_does_not_fit_is_reported_with_its_stage_and_the_missing_bytes(capsys):
    small = ("--train_topology=h800:1x2", "--contexts=1024,2048")
    words = planned(capsys, *small)["unfit"]["1024"]
    assert re.search(
        r"no mesh for training fits .* would do is about \d+ \([\d.]+ GiB, mesh", words
    )
    plan_command([*PLAN, *small, "--topology=h800:1x1"])
    text = capsys.readouterr().out
    assert re.search("1,024 to 2,048 tokens do not fit: .* no mesh for training fits", text)
    assert text.count("do not fit:") == 1


def test_prices_are_of_two_groups():
    one = [flag for flag in PLAN if not flag.startswith("--train_topology")]
    with pytest.raises(ValueError, match="give --train_topology too"):
        plan_command([*one, "--prices=1,2"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prices=1"], "--prices=1: give the prices of a device-hour of"),
        (["--prices=1,-2"], "as in --prices=1,2.5"),
        (["--link_gb=0"], "--link_gb=0.0; give GB/s"),
        (["--exact"], "--exact or --hbm_gib beside --train_topology"),
        (["--config.devices.num_rollout=8"], "num_rollout is 8 beside --train_topology"),
        (["--train_topology=h900:1x8"], "'h900:1x8' is not known"),
        (["--train_topology="], "--train_topology= has an empty value"),
    ],
)
def test_a_mistake_in_the_flags_is_named(flags, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        plan_command([*PLAN, *flags])


def test_groups_that_no_mesh_cuts_evenly_are_refused():
    from earl_jax.config.config import Config
    from earl_jax.placement.problem import find_model

    config = Config()
    model, vocab_size = find_model(config, 1000)
    rollout = dataclasses.replace(config.rollout, num_slots=8, episodes_per_step=8)
    config = dataclasses.replace(config, rollout=rollout)
    with pytest.raises(ValueError, match=r"h100:1x7 for train: "):
        plan_groups(config, model, vocab_size, ("h100:1x8", "h100:1x7"), [1024])
