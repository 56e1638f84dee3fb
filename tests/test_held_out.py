# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The loss on held-out conversations (config.eval.sft_path)."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from earl_jax import evaluate as evaluate_command
from earl_jax.envs.text.chat import ChatRenderer
from earl_jax.envs.text.tokenizer import build_tokenizer, save_tokenizer
from earl_jax.placement.held_out import held_out_loss
from earl_jax.rollout.evaluation import rating_of
from earl_jax.run.build import build_run, with_conversations, with_held_out
from earl_jax.run.evaluation import evaluate
from earl_jax.selector.choose import BudgetTooSmall
from earl_jax.telemetry.metrics import read_metrics
from earl_jax.training import train
from tests.support.forward import row_logits
from tests.support.placements import EIGHT_SLOTS, begin
from tests.support.processes import Processes
from tests.support.runs import cut_off
from tests.support.settings import make_config
from tests.support.talks import sft_run, sums, talk

OURS = build_tokenizer([], 260)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Conversations to learn, and others: 21 of three lengths, some with masked replies."""
    folder = tmp_path_factory.mktemp("talks")
    save_tokenizer(OURS, folder / "tokenizer")
    (folder / "learnt.jsonl").write_text("\n".join(sums(10)))
    masked = ("user", "So?"), ("assistant", "no", 0), ("user", "And?")
    held_out = sums(15, 2) + [talk(*masked, ("assistant", f"yes, {i}")) for i in range(5)]
    held_out.append(talk(("user", "a" * 70), ("assistant", "Indeed.")))
    (folder / "held_out.jsonl").write_text("\n".join(held_out))
    return folder


def settings(folder: Path, **others) -> dict:
    given = {
        "num_steps": 3,
        "rollout": {**EIGHT_SLOTS, "context_buckets": (32, 64, 128)},
        "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
        "eval": {
            "every_steps": 2,
            "games": 8,
            "final_games": 8,
            "sft_path": str(folder / "held_out.jsonl"),
        },
    }
    run = sft_run(folder / "learnt.jsonl", **given)
    run["train"]["learning_rate"] = 3e-3
    return run | others


def built(folder: Path, **others):
    config = make_config(settings(folder, **others))
    return with_held_out(with_conversations(build_run(config, folder / "tokenizer")))


def by_hand(world, state, folder: Path) -> tuple[float, int]:
    """The mean of -log p and the number of tokens, by a whole forward pass of each conversation."""
    params = jax.tree.map(np.asarray, world.learner.policy(state))
    forward = jax.jit(functools.partial(row_logits, world.learner.model))
    found, chat = [], ChatRenderer(OURS)
    for text in (folder / "held_out.jsonl").read_text().splitlines():
        messages, ids, learnt = json.loads(text)["messages"], [], []
        for place in range(0, len(messages), 2):
            asked, reply = messages[place]["content"], messages[place + 1]
            ids += chat.answer(asked) if place else chat.first(asked)
            own = chat.reply(reply["content"])
            if reply.get("weight", 1):
                learnt += range(len(ids), len(ids) + len(own))
            ids += own
        row, segments = np.zeros((2, 1, 128), np.int32)
        row[0, : len(ids)], segments[0, : len(ids)] = ids, 1
        logs = np.asarray(jax.nn.log_softmax(forward(params, row, segments)))[0]
        found += [logs[at - 1, ids[at]] for at in learnt]
    return -float(np.mean(found)), len(found)


@pytest.fixture(scope="module")
def world(folder):
    return built(folder)


def test_it_is_the_mean_over_the_tokens_to_learn_of_all_conversations(world, folder):
    """On eight shards, in three batches of which the last has five conversations."""
    placement, position = begin(world)
    # The longest one is planned for: 70 bytes, 7 bytes and 4 control tokens.
    assert world.stages.held_out_tokens == 81 and placement.length == 128
    found = evaluate(world, placement, position, games=0)
    loss, tokens = by_hand(world, position.state, folder)
    assert found == {"name": "held_out.jsonl", "sft_loss": found["sft_loss"], "sft_tokens": tokens}
    assert abs(found["sft_loss"] - loss) < 1e-5
    # The shapes of updates are as without it.
    assert placement.row_shapes == {}


def test_it_is_the_same_on_another_mesh(world, folder):
    expected = evaluate(world, *begin(world), games=0)
    mesh = "data=1,fsdp=2,tensor=2,context=2"
    selector = {"rollout_meshes": ("data=8",), "train_meshes": (mesh,), "table": "model"}
    given = settings(folder)["train"] | {"micro_batches": 2}
    other = built(folder, selector=selector, train=given)
    found = evaluate(other, *begin(other), games=0)
    assert abs(found["sft_loss"] - expected["sft_loss"]) < 1e-6
    assert found["sft_tokens"] == expected["sft_tokens"]


def in_one_of_two(folder: str) -> list[dict]:
    """Scores them in this process and the other; then where one of them only plays."""
    apart = {
        "algorithm": "reinforce",
        "devices": {"num_rollout": 4},
        "train": {"sft_path": ""},
        "selector": {"rollout_meshes": ("data=4",), "train_meshes": ("data=4",), "table": "model"},
    }
    worlds = [built(Path(folder), **others) for others in ({}, apart)]
    return [evaluate(world, *begin(world), games=0) for world in worlds]


@pytest.mark.slow
def test_it_is_the_same_in_two_processes(world, folder):
    expected = evaluate(world, *begin(world), games=0)
    ones, others = Processes(2, 4, "test_held_out:in_one_of_two", str(folder)).results()
    assert ones == others
    for one in ones:
        assert one == expected | {"sft_loss": one["sft_loss"]}
        assert abs(one["sft_loss"] - expected["sft_loss"]) < 1e-6


@pytest.mark.slow
def test_it_goes_row_by_row_where_memory_is_short(folder, tmp_path, monkeypatch):
    """Sixteen conversations of 81 tokens are two rows on each shard."""
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([talk(("user", "a" * 70), ("assistant", "Indeed."))] * 16))
    rollout = settings(folder)["rollout"] | {"episodes_per_step": 16}
    world = built(folder, rollout=rollout, eval={"sft_path": str(path)})
    placement, position = begin(world)
    held_out = world.tasks.held_out
    expected = held_out_loss(placement, position.state, held_out)
    tried, program = [], world.learner.loss_sums

    def short(plan):
        tried.append(plan.micro_batches)
        if plan == placement.train:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return program(plan)

    monkeypatch.setattr(world.learner, "loss_sums", short)
    found = held_out_loss(placement, position.state, held_out)
    assert abs(found["sft_loss"] - expected["sft_loss"]) < 1e-6
    assert tried == [1, 2] and len(placement.take_log().failures) == 1
    monkeypatch.setattr(world.learner, "loss_sums", lambda plan: short(placement.train))
    with pytest.raises(BudgetTooSmall, match="config.eval.sft_path do not fit on data=8: a row of"):
        held_out_loss(placement, position.state, held_out)


def test_the_best_checkpoints_are_those_of_the_lowest_loss():
    assert rating_of({"episodes": 8, "reward_mean": 0.5, "sft_loss": 2.0}) == 0.5
    assert rating_of({"sft_loss": 2.0}) == -2.0
    assert rating_of({"sft_loss": float("nan")}) is None and rating_of({}) is None


def test_errors_name_the_setting(folder, tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text(talk(("user", "5"), ("assistant", "6")) + "\n{")
    config = make_config(settings(folder, eval={"sft_path": str(path)}))
    with pytest.raises(ValueError, match=r"held_out.jsonl, line 2: .*\(config.eval.sft_path\)"):
        with_held_out(build_run(config, folder / "tokenizer"))


@pytest.mark.slow
def test_a_run_is_scored_first_last_and_between_and_so_is_one_that_goes_on(
    folder, tmp_path, capsys
):
    checkpoint = {"every_steps": 1, "keep": 2, "keep_best": 1}
    config = make_config(settings(folder, checkpoint=checkpoint))
    end = train(config, tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    scored = [(row["step"], row["eval"]) for row in rows if "eval" in row]
    assert [step for step, _ in scored] == [0, 2, 3] and end.evaluation == scored[-1][1]
    losses = [evaluation["sft_loss"] for _, evaluation in scored]
    assert losses[0] > losses[1] > losses[2]
    printed = capsys.readouterr().out
    assert f"eval@3 sft_loss {losses[2]:.3g}" in printed
    assert "held out: " in printed and "has 21 conversations, of up to 81 tokens" in printed
    report = (tmp_path / "whole" / "report.html").read_text()
    assert "held-out loss" in report and "Loss on conversations" in report
    train(config, cut_off(tmp_path / "whole", tmp_path / "again", 2))
    again = read_metrics(tmp_path / "again" / "metrics.jsonl")
    assert [(row["step"], row["eval"]) for row in again if "eval" in row] == scored
    # Without it the run learns the same.
    alone = make_config(settings(folder, eval={"every_steps": 2}))
    train(alone, tmp_path / "alone")
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "alone")]
    whole, alone = ([row["loss"] for row in each if "loss" in row] for each in lines)
    assert whole == alone
    evaluate_command.evaluate_command([f"--workdir={tmp_path / 'whole'}", "--games=0", "--json"])
    shown = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(shown) == {"step": 3, "eval": scored[-1][1]}


@pytest.mark.slow
def test_a_run_with_episodes_is_scored_too(folder):
    world = built(folder, algorithm="reinforce", train={"sft_path": "", "entropy_coefficient": 0.0})
    placement, position = begin(world)
    expected = held_out_loss(placement, position.state, world.tasks.held_out)
    found = evaluate(world, placement, position, games=8)
    assert list(found)[:2] == ["sft_loss", "sft_tokens"]
    assert {name: found[name] for name in expected} == expected
    assert found["episodes"] == 8 and "reward_mean" in found
