# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs, as a user starts them: processes, signals, files, exit codes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from reference.make_checkpoint import write_checkpoint

from earl_jax.config.file import load_config_file, make_config
from earl_jax.evaluate import evaluate_command
from earl_jax.telemetry.episodes import read_trajectories
from earl_jax.telemetry.metrics import read_metrics, truncate_after
from earl_jax.training import train
from tests.support import ROOT
from tests.support.forks import start_python
from tests.support.forward import row_logits
from tests.support.runs import (
    TINY,
    assert_equal,
    config_of,
    cut_off,
    environment,
    final_parameters,
    final_state,
    run,
    steps_of,
    timeless,
    tiny,
)

# Training on data=8 takes about 1.91 MiB per device with contexts of 24 tokens and 2.54 MiB with
# 40; fsdp=8 takes about 1.16 MiB (jax 0.10.2).
BUDGET = 2_460_000
# Episodes of a policy that learns as much as this outgrow 24 tokens within ten steps.
GROWING = {"selector.budget_bytes_per_device": BUDGET, "train.sft_updates": 3, "checkpoint.keep": 5}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run from start to end, whose contexts outgrow the budget on its first mesh."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    train(config_of(TINY | GROWING), workdir)
    return workdir


def test_a_run_writes_what_the_contract_says(uninterrupted):
    files = {path.name for path in uninterrupted.iterdir()}
    assert {"config.json", "metrics.jsonl", "trajectories", "checkpoints", "report.html"} <= files
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    steps = [line for line in lines if "eval" not in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    contract = """step time_s reward_mean reward_std episodes turns_mean context_tokens_mean
        context_tokens_max tokens_in_flight_max rollout_tokens rollout_tokens_per_s prefill_tokens
        env_wait_s train_tokens train_tokens_per_s stage_s rollout_mesh train_mesh switched
        switch_s decision
        dispatch_bytes dispatch_host_bytes publish_bytes publish_host_bytes logprob_mismatch_max
        logprob_mismatch_mean version_lag_max loss kl entropy clip_fraction grad_norm
        peak_bytes_per_device budget_bytes_per_device"""
    for line in steps:
        assert set(contract.split()) <= set(line)
        assert {"select", "publish", "rollout", "dispatch", "train"} <= set(line["stage_s"])
        assert line["logprob_mismatch_max"] <= 1e-4
        assert line["dispatch_host_bytes"] == line["publish_host_bytes"] == 0
        assert line["peak_bytes_per_device"] <= line["budget_bytes_per_device"] == BUDGET
        assert line["version_lag_max"] == 0
    # What the first step needs nobody has compiled ahead.
    assert steps[0]["compile_s"] > 0
    # Behind each save, of which the last one is at the end.
    assert [line["step"] for line in steps if line.get("checkpoint_s", 0) > 0] == [3, 5, 7, 9]
    evaluations = [line for line in lines if "eval" in line]
    assert [line["step"] for line in evaluations] == [0, 4, 8, 10]
    assert {"name", "games", "win", "draw", "loss", "illegal"} <= set(evaluations[-1]["eval"])


def test_nothing_is_prefilled_twice(uninterrupted):
    """`prefill_tokens` equals the environment's tokens, counted in the episodes written down."""
    episodes = [
        json.loads(line)
        for line in (uninterrupted / "trajectories" / "step_000010.jsonl").read_text().splitlines()
    ]
    read = sum(len(episode["token_ids"]) for episode in episodes)
    sampled = sum(lp is not None for episode in episodes for lp in episode["logprobs"])
    line = next(
        row
        for row in read_metrics(uninterrupted / "metrics.jsonl")
        if row["step"] == 10 and "eval" not in row
    )
    assert line["prefill_tokens"] == read - sampled
    assert line["rollout_tokens"] == sampled


def test_the_mesh_changes_because_contexts_grow(uninterrupted):
    steps = steps_of(uninterrupted)
    switch = next(row for row in steps if row["switched"])
    assert switch["switched"] == ["train"]
    before = next(row for row in steps if row["step"] == switch["step"] - 1)
    # When they are expected to outgrow the context of 24 tokens, or do; not before they grow.
    first, *later = [row["context_tokens_max"] for row in steps[: switch["step"]]]
    assert max(first, *later[:-1]) <= 24 and first < max(later)
    assert before["train_mesh"] != switch["train_mesh"]
    assert re.search(
        r"train: data=8 -> .* \(context \d+ needs .*/device, budget .* against data=8 ",
        switch["decision"],
    )


def test_a_short_run_learns(uninterrupted):
    """Random weights talk on without a move; ten steps later most replies are moves, some legal."""
    evaluations = [
        row["eval"] for row in read_metrics(uninterrupted / "metrics.jsonl") if "eval" in row
    ]
    first, last = evaluations[0], evaluations[-1]
    assert first["turn_too_long"] > 0.8 and last.get("turn_too_long", 0.0) < 0.5
    assert first["turns_mean"] < 1.1 and last["turns_mean"] > 1.25


def test_killed_at_any_moment_ends_the_same(uninterrupted, tmp_path, capsys):
    """SIGKILL; the run that was killed ends bit for bit like the one that was not.

    Parameters, optimiser state, meshes, metrics (but for times) and episodes. Its process had gone
    on behind step 4 itself.
    """
    workdir = cut_off(uninterrupted, tmp_path / "killed", 4)
    metrics = workdir / "metrics.jsonl"
    truncate_after(metrics, 4)
    process = start_python(*tiny(workdir, **GROWING)[1:], env=environment())
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if '{"step": 5, "time_s"' in metrics.read_text():
            break
        time.sleep(0.01)
    # Somewhere in the next steps.
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.output()
    train(config_of(TINY | GROWING), workdir)
    assert "resuming" in capsys.readouterr().out
    whole = [timeless(row) for row in read_metrics(uninterrupted / "metrics.jsonl")]
    assert [timeless(row) for row in read_metrics(metrics)] == whole
    assert_equal(final_parameters(workdir, 10), final_parameters(uninterrupted, 10))
    for path in (uninterrupted / "trajectories").iterdir():
        assert (workdir / "trajectories" / path.name).read_text() == path.read_text()


def test_evaluate_plays_the_newest_checkpoint(uninterrupted, monkeypatch, capsys, tmp_path):
    """As the run itself did at its end."""
    before = {path: path.stat().st_mtime for path in uninterrupted.rglob("*") if path.is_file()}
    flags = [f"--workdir={uninterrupted}", "--games=32", "--json"]
    monkeypatch.setattr("earl_jax.evaluate.start_jax", lambda *_: None)
    evaluate_command(flags)
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"step": 10, "eval": read_metrics(uninterrupted / "metrics.jsonl")[-1]["eval"]}
    outcomes = {k: v for k, v in answer["eval"].items() if k in ("win", "draw", "loss", "illegal")}
    assert answer["eval"]["games"] == 32
    assert 0.9 < sum(outcomes.values()) + answer["eval"].get("turn_too_long", 0.0) <= 1.0001
    episodes = tmp_path / "episodes.jsonl"
    own = ["--config.env.args.opponent=minimax", "--config.eval.samples=2"]
    evaluate_command([*flags[:1], "--games=8", "--json", *own, f"--episodes={episodes}"])
    lines = read_trajectories(episodes)
    assert [line["group"] for line in lines] == [2**30 + i // 2 for i in range(16)]
    evaluation = json.loads(capsys.readouterr().out)["eval"]
    assert evaluation["reward_mean"] == pytest.approx(np.mean([line["reward"] for line in lines]))
    evaluate_command([*flags, own[0]])
    assert json.loads(capsys.readouterr().out)["eval"] != answer["eval"]
    after = {path: path.stat().st_mtime for path in uninterrupted.rglob("*") if path.is_file()}
    assert after == before


BUSY_COLLECTIVES = """
from earl_jax.launch.start import start_jax
start_jax("cpu", 8)
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
arrays = [jax.device_put(np.ones((64, 8 * (i + 1)), np.float32), rows) for i in range(20)]
gather = jax.jit(lambda arrays: [array * 2 for array in arrays], out_shardings=everywhere)
for _ in range(600):
    gathered = gather(arrays)
jax.block_until_ready(gathered)
print("through")
"""


@pytest.mark.slow
def test_collectives_do_not_starve_each_other_on_a_busy_machine(tmp_path):
    """Without `start_jax`'s threads this hangs in seconds, and XLA ends the process (exit -6)."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY_COLLECTIVES)
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin) for _ in range(2)]
    try:
        done = run(sys.executable, str(script), as_a_user=True)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr[-2000:]
    assert "through" in done.stdout


ONE_MESH = """
from ml_collections import ConfigDict
from tests.support.settings import small

def get_config():
    config = ConfigDict()
    config.num_steps = 2
    config.rollout = dict(num_slots=16, episodes_per_step=32, context_buckets=(40,))
    config.selector = dict(
        table="model",
        rollout_meshes=("data=4,tensor=2",),
        train_meshes=("data=2,fsdp=2,tensor=2",),
    )
    config.eval = dict(games=32, final_games=32)
    return ConfigDict(small(config.to_dict()))
"""


@pytest.fixture(scope="module")
def qwen2_run(tmp_path_factory):
    """Connect Four from a Qwen2 folder, stopped behind step 1, resumed, exported after step 3."""
    folder = tmp_path_factory.mktemp("qwen2")
    source, workdir = folder / "checkpoint", folder / "run"
    write_checkpoint(source, tied=False, seed=0)
    settings = {
        "model.path": source,
        "num_steps": 3,
        "rollout.num_slots": 16,
        "rollout.episodes_per_step": 16,
        "selector.rollout_meshes": "('data=4,tensor=2',)",
        "selector.train_meshes": "('data=2,fsdp=4',)",
        "train.sft_steps": 1,
        "checkpoint.every_steps": 1000,
        "eval.games": 16,
        "eval.final_games": 16,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    config = make_config(load_config_file(ROOT / "configs/connect_four_qwen2_cpu.py"), overrides)
    end = train(config, workdir, lambda: "SIGTERM" * bool(steps_of(workdir)))
    assert end.stopped.startswith("stopped by SIGTERM after step 1")
    assert not (workdir / "export").exists()
    assert not train(config, workdir).stopped
    return source, workdir


def logits_of(model, params) -> np.ndarray:
    """On 60 tokens, far more than an opening's."""
    tokens_BT = np.random.default_rng(0).integers(0, 321, (2, 60)).astype(np.int32)
    return np.asarray(row_logits(model, params, tokens_BT))


@pytest.mark.slow
def test_a_qwen2_folder_trains_stops_resumes_and_comes_out_again(qwen2_run):
    import jax

    from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
    from earl_jax.sharding.layout import MeshShape, make_layout

    source, workdir = qwen2_run
    steps = steps_of(workdir)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["logprob_mismatch_max"] <= 1e-4 for row in steps)
    assert all(row["dispatch_host_bytes"] == row["publish_host_bytes"] == 0 for row in steps)
    folder = workdir / "export" / "step_000003"
    given, out = open_checkpoint(source), open_checkpoint(folder)
    assert (out.model, out.vocab_size) == (given.model, given.vocab_size)
    assert out.settings["model_type"] == "qwen2" and out.model.attention_bias
    one = make_layout(MeshShape())
    saved = jax.tree.map(np.asarray, final_state(workdir, 3)["params"])
    for mesh in (MeshShape(), MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2)):
        exported = jax.tree.map(np.asarray, load_parameters(out, make_layout(mesh)))
        assert jax.tree.structure(exported) == jax.tree.structure(saved)
        jax.tree.map(np.testing.assert_array_equal, exported, saved)
    logits = logits_of(out.model, load_parameters(out, one))
    np.testing.assert_array_equal(logits, logits_of(out.model, saved))
    assert np.abs(logits - logits_of(given.model, load_parameters(given, one))).max() > 1e-3
    names = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    for name in names:
        assert (folder / name).read_text() == (source / name).read_text(), name


@pytest.mark.slow
def test_episodes_that_fork_are_trained_on_as_they_were_sampled(tmp_path, capsys):
    """The checkpoint's template forgets the moves of the middle: games are rendered anew."""
    (tmp_path / "one_mesh.py").write_text(ONE_MESH)
    source = Path(shutil.copytree(ROOT / "tests/reference/qwen2_tied", tmp_path / "source"))
    template = (source / "chat_template.jinja").read_text()
    words = "{% generation %}{{ message['content']"
    assert words in template
    (source / "chat_template.jinja").write_text(
        template.replace(words, words + " | replace('4', '') | replace('0', '')")
    )
    generation = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(generation | {"top_p": 0.9}))
    workdir = tmp_path / "run"
    settings = {
        "model.path": source,
        "chat.history": "fork",
        # A bucket that holds games rendered anew, so that nothing is compiled twice.
        "rollout.context_buckets": (80,),
        "num_steps": 8,
        "train.sft_steps": 6,
        "train.sft_updates": 4,
        "train.sft_learning_rate": 3e-3,
        "log.trajectories_every_steps": 1,
    }
    given = load_config_file(tmp_path / "one_mesh.py")
    overrides = [f"{name}={value}" for name, value in settings.items()]
    train(make_config(given, overrides), workdir)
    printed = capsys.readouterr().out
    assert printed.count("top_p=0.9 not used") == 1
    assert printed.count("attention in training: our blockwise attention, because") == 1
    assert printed.count("attention in the rollout: our attention over pages, because") == 1
    steps = steps_of(workdir)
    assert len(steps) == 8 and all(row["logprob_mismatch_max"] <= 1e-4 for row in steps)
    episodes = read_trajectories(workdir / "trajectories" / "step_000008.jsonl")
    forked = [episode for episode in episodes if "sample_starts" in episode]
    assert forked and len(forked) < len(episodes)
    for episode in episodes:
        replies = [m["content"] for m in episode["messages"] if m["role"] == "assistant"]
        rewritten = sum("4" in reply or "0" in reply for reply in replies[:-1])
        assert len(episode.get("sample_starts", [0])) == 1 + rewritten
