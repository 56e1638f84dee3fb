# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A run whose rollout has another precision than its trainer: what is logged and served."""

import json

import jax
import jax.numpy as jnp
import pytest

from earl_jax.evaluate import evaluate_command
from earl_jax.models.engine_parameters import INPUTS
from earl_jax.models.parameters import parameter_specs
from earl_jax.models.quantization import dequantize, quantize
from earl_jax.training import train
from tests.support.runs import TINY, config_of, steps_of
from tests.support.served import greedy, ids_of, prompt, request, save_run, serving

# Between one update and the next the policy moves; its log-probs move by far more than rounding.
SETTINGS = {
    "num_steps": 2,
    "rollout.context_buckets": "(40,)",
    "eval.games": 16,
    "eval.final_games": 16,
    "train.epochs": 2,
    "rollout.weight_dtype": "int8",
    "rollout.kv_dtype": "int8",
    "selector.rollout_meshes": "('data=4,tensor=2',)",
    "selector.train_meshes": "('data=2,fsdp=4',)",
    "train.sft_steps": 1,
    "train.sft_updates": 1,
}


@pytest.mark.slow
def test_an_int8_rollout_is_corrected_logged_and_played_on_with(tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "int8"
    train(config_of(TINY | SETTINGS), workdir)
    sampled = "int8 weights, int8 KV cache, float32 against float32; importance weights up to 2"
    assert sampled in capsys.readouterr().out.replace("\n", " ")
    steps = steps_of(workdir)
    assert len(steps) == 2
    for line in steps:
        # Far above the rounding of sums, and far below another policy.
        assert 1e-4 < line["logprob_mismatch_mean"] < 2e-2
        assert 1e-3 < line["logprob_mismatch_max"] < 0.5
        assert 0 < abs(line["importance_mean"] - 1) < 1e-2
        assert line["truncated_fraction"] == 0
        assert line["publish_host_bytes"] == line["dispatch_host_bytes"] == 0
    monkeypatch.setattr("earl_jax.evaluate.start_jax", lambda *_: None)
    evaluate_command([f"--workdir={workdir}", "--games=16", "--json"])
    assert json.loads(capsys.readouterr().out)["eval"]["games"] == 16


@pytest.mark.slow
def test_int8_policy_is_served_with_the_tokens_of_the_dequantised_one(tmp_path):
    folder = tmp_path / "run"
    world, params = save_run(folder, 0)
    axes = {
        name: spec.axes for name, spec in parameter_specs(world.origin.model, 1)["layers"].items()
    }

    def rounded(name, stacked):
        if name not in INPUTS:
            return stacked
        one = [dequantize(quantize(leaf, axes[name][1:], INPUTS[name])) for leaf in stacked]
        return jnp.stack(one)

    layers = {name: rounded(name, jnp.asarray(leaf)) for name, leaf in params["layers"].items()}
    stops = {*world.actor.renderer.end_of_turn_ids, world.actor.renderer.pad_id}
    asked = [prompt(i, 5 + 7 * i) for i in range(6)]
    whole, dequantised = (
        [greedy(world.origin.model, p, ids, 24, stops) for ids in asked]
        for p in (jax.tree.map(jnp.asarray, params), {**params, "layers": layers})
    )
    assert whole != dequantised, "the comparison must mean something"
    flags = ("--mesh=data=2,tensor=2", "--num_slots=4", "--temperature=0", "--weight_dtype=int8")
    with serving(f"--workdir={folder}", *flags) as server:
        calls = [server.stub.Decode(request(ids, 24)) for ids in asked]
        assert [ids_of(call) for call in calls] == dequantised
