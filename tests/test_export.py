# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Exports of a run: a model for `transformers`, adapters for PEFT, and the newest of them."""

import collections
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_write import save_checkpoint
from earl_jax.models.checkpoints.peft_adapter import save_adapter
from earl_jax.models.lora import adapt, adapter_specs
from earl_jax.models.lora_config import LoraConfig
from earl_jax.models.parameters import is_spec, parameter_shardings, parameter_specs
from earl_jax.placement.compile_ahead import CompileAhead
from earl_jax.run.build import Run, build_run
from earl_jax.run.evaluation import Evaluator
from earl_jax.run.position import Position
from earl_jax.run.saver import Saver, exporter_of
from earl_jax.sharding.layout import MeshShape, make_layout
from earl_jax.telemetry.load import LoadHistory
from earl_jax.train.export import keep_exports, set_exports_aside
from earl_jax.train.state import TrainState
from earl_jax.training import Training
from tests.support.forward import row_logits
from tests.support.placements import place
from tests.support.references import (
    NAMES,
    REFERENCE,
    checkpoint,
    given_softcap,
    reference,
    tensors,
)
from tests.support.settings import make_config

MIXED = make_layout(MeshShape(data=2, fsdp=2, tensor=2))
LORA = LoraConfig(rank=3, alpha=6.0)
PEFT_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "query_down": "self_attn.q_a_proj",
    "query_up": "self_attn.q_b_proj",
    "latent": "self_attn.kv_a_proj_with_mqa",
    "latent_up": "self_attn.kv_b_proj",
    # The numbers of a query's heads, each with those of its gate behind.
    "attention_gate": "self_attn.q_proj",
    "linear_out": "linear_attn.out_proj",
    **{f"shared_{each}": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
}
OWN_NAMES = {
    "deepseek_v3": {
        f"shared_{each}": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")
    },
    "qwen3_next": {
        f"linear_{each}": "linear_attn.in_proj_qkvz" for each in ("query", "key", "value", "gate")
    },
    "qwen3_5": {
        **{f"linear_{each}": "linear_attn.in_proj_qkv" for each in ("query", "key", "value")},
        "linear_gate": "linear_attn.in_proj_z",
    },
}
OWN_NAMES["qwen3_5_moe"] = OWN_NAMES["qwen3_5"]


def adapted_paths(name: str) -> collections.Counter:
    """The paths of a model's adapted modules, each with the number of its parameters."""
    layers = parameter_specs(checkpoint(name).model, 1)["layers"]
    names = PEFT_NAMES | OWN_NAMES.get(name, {})
    return collections.Counter(path for target, path in names.items() if target in layers)


def some_adapters(name: str, lora: LoraConfig) -> Any:
    """Adapters of a reference model, every number a different one, on a mixed mesh."""
    given = checkpoint(name)
    specs = adapter_specs(parameter_specs(given.model, given.vocab_size), lora)
    rng = np.random.default_rng(0)
    values = jax.tree.map(
        lambda spec: 0.1 * rng.normal(size=spec.shape).astype(np.float32), specs, is_leaf=is_spec
    )
    return jax.device_put(values, parameter_shardings(specs, MIXED))


def write_both(folder: Path, name: str, lora: LoraConfig) -> tuple[Any, Path, Path]:
    """The policy with adapters, its merged folder in fp32 and its PEFT folder."""
    given = checkpoint(name)
    adapters = some_adapters(name, lora)
    policy = adapt(load_parameters(given, MIXED), adapters, lora)
    save_checkpoint(
        folder / "merged",
        policy,
        model=given.model,
        vocab_size=given.vocab_size,
        tokenizer=build_run(
            make_config({"model": {"path": str(REFERENCE / "qwen2_tied")}})
        ).origin.tokenizer,
        dtype="float32",
        max_positions=128,
        source=given,
    )
    save_adapter(
        folder / "adapter",
        adapters,
        model=given.model,
        lora=lora,
        base=str(REFERENCE / name),
        source=given,
    )
    return policy, folder / "merged", folder / "adapter"


@pytest.mark.slow_except("qwen3_next", "qwen3_5_moe", "deepseek_v3")
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe"],
)
def test_the_adapter_folder_is_what_peft_reads(name, tmp_path):
    """Names, shapes and values: base + alpha / r * lora_B @ lora_A is the merged folder.

    A module of several parameters has the rank and alpha of all of them.
    """
    paths = adapted_paths(name)
    _, whole, folder = write_both(tmp_path, name, LORA)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["task_type"] == "CAUSAL_LM"
    assert (settings["r"], settings["lora_alpha"]) == (3, 6.0)
    assert settings["base_model_name_or_path"] == str(REFERENCE / name)
    targets = settings["target_modules"]
    targets += [each.removesuffix(".weight") for each in settings["target_parameters"] or ()]
    assert sorted(targets) == sorted(paths)
    several = {path: number for path, number in paths.items() if number > 1}
    assert settings["rank_pattern"] == {path: 3 * number for path, number in several.items()}
    assert settings["alpha_pattern"] == {path: 6.0 * number for path, number in several.items()}
    adapter, base, after = tensors(folder), tensors(REFERENCE / name), tensors(whole)
    model = checkpoint(name).model
    seen = {key for key in base if key.split(".", 3)[-1].removesuffix(".weight") in paths}
    for weight in seen:
        key = f"base_model.model.{weight.removesuffix('.weight')}.lora_"
        a, b = adapter.pop(f"{key}A.weight"), adapter.pop(f"{key}B.weight")
        outputs, inputs = base[weight].shape
        rank = 3 * paths[weight.split(".", 3)[-1].removesuffix(".weight")]
        assert (a.shape, b.shape) == ((rank, inputs), (outputs, rank))
        assert a.dtype == b.dtype == np.float32
        expected = base[weight].astype(np.float32) + 2.0 * b @ a
        np.testing.assert_allclose(after[weight], expected, atol=1e-6)
        changed = np.abs(after[weight] - base[weight].astype(np.float32))
        assert np.all(changed.max(axis=1) > 0)
    assert seen and not adapter
    for key in base.keys() - seen:
        np.testing.assert_array_equal(after[key], base[key].astype(np.float32))
    assert after.keys() == base.keys()
    with pytest.raises(ValueError, match="exists already"):
        save_adapter(folder, some_adapters(name, LORA), model=model, lora=LORA, base="x")


def test_only_the_targets_are_written(tmp_path):
    """A gate in one tensor with the queries has nothing but zeros."""
    name = "qwen3_5"
    lora = dataclasses.replace(LORA, targets=("query", "down"))
    _, whole, folder = write_both(tmp_path, name, lora)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["mlp.down_proj", "self_attn.q_proj"]
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    assert {key.split(".")[-3] for key in tensors(folder)} == {"q_proj", "down_proj"}
    layer, size = checkpoint(name).model.num_layers - 1, checkpoint(name).model.head_size
    weight = f"model.layers.{layer}.self_attn.q_proj"
    b = tensors(folder)[f"base_model.model.{weight}.lora_B.weight"].reshape(-1, 2, size, 3)
    assert np.all(b[:, 0] != 0) and not np.any(b[:, 1])
    before, after = (tensors(each)[f"{weight}.weight"] for each in (REFERENCE / name, whole))
    changed = (before != after).reshape(-1, 2, size, before.shape[1])
    assert np.all(changed[:, 0].any(axis=-1)) and not np.any(changed[:, 1])


def own_logits(name: str, policy: Any) -> np.ndarray:
    model, tokens = checkpoint(name).model, reference(name)["tokens"]
    return np.asarray(row_logits(model, jax.tree.map(np.asarray, policy), tokens))


# peft 0.21 asks transformers 5.23 for something that has another name now.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_peft_computes_the_same_from_what_is_written(name, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    policy, whole, folder = write_both(tmp_path, name, LORA)
    tokens = torch.from_numpy(reference(name)["tokens"]).long()
    # The soft cap of attention is passed over by "sdpa", and by "eager" unless it is told.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    capped = given_softcap(name)
    base = AutoModelForCausalLM.from_pretrained(REFERENCE / name, **options)
    with torch.no_grad():
        unchanged = base(tokens, **capped).logits.numpy()
    adapted = peft.PeftModel.from_pretrained(base, folder)
    automatic = peft.AutoPeftModelForCausalLM.from_pretrained(folder, **options)
    merged = AutoModelForCausalLM.from_pretrained(whole, **options)
    expected = own_logits(name, policy)
    assert np.abs(expected - unchanged).max() > 0.5
    for model in (adapted, automatic, merged):
        with torch.no_grad():
            logits = model(tokens, **capped).logits.numpy()
        error = np.abs(logits - expected).max()
        print(f"{name}, {type(model).__name__}: largest error of a logit {error:.1e}")
        assert error <= 1e-4


# In a run.


def a_state(run: Run) -> TrainState:
    state = run.learner.first_state(run.problem.meshes("train")[0])
    return dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf + 0.01, state.params))


@pytest.mark.slow
def test_a_base_from_the_seed_is_written_once_beside_the_adapters(tmp_path):
    sizes = {"num_layers": 1, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}
    model = {"preset": "qwen2.5-7b", **sizes, "ffn_size": 64}
    run = build_run(make_config({"model": model, "train": {"lora": {"rank": 2}}}))
    state, exporter = a_state(run), exporter_of(run)
    folder = tmp_path / "export"
    written = exporter.export(state, folder, 4)
    assert [path.name for path in written] == ["step_000004", "base", "step_000004_adapter"]
    for path in written[:2]:
        # Layers of qwen2, and the run's own vocabulary.
        assert json.loads((path / "config.json").read_text())["model_type"] == "qwen2"
        ids = AutoTokenizer.from_pretrained(path)("play x on 4 now")["input_ids"]
        assert ids == run.origin.tokenizer("play x on 4 now")["input_ids"]
    written = exporter.export(state, folder, 6)
    assert [path.name for path in written] == ["step_000006", "step_000006_adapter"]
    assert exporter.export(state, folder, 6) == []
    settings = json.loads((folder / "step_000006_adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder / "base")
    base, after, adapter = (
        tensors(folder / name) for name in ("base", "step_000006", "step_000006_adapter")
    )
    key = "model.layers.0.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{key}.lora_{side}.weight"] for side in "AB")
    expected = base[f"{key}.weight"] + 8.0 * b @ a
    np.testing.assert_allclose(after[f"{key}.weight"], expected, atol=1e-6)
    np.testing.assert_array_equal(
        base["model.embed_tokens.weight"], np.asarray(state.base["embed"])
    )
    again = load_parameters(open_checkpoint(folder / "base"), make_layout(MeshShape()))
    jax.tree.map(np.testing.assert_array_equal, again, state.base)


@pytest.mark.parametrize(
    ("given", "path", "steps"),
    [
        ({}, "qwen2_tied", [5]),
        ({}, None, []),
        ({"export": True}, None, [2, 4, 5]),
        ({"export": False}, "qwen2_tied", []),
    ],
)
def test_a_run_exports_at_its_end_or_with_every_checkpoint(given, path, steps, tmp_path):
    """Unless told otherwise only what began as a checkpoint of `transformers` is one at the end."""
    sections = {"num_steps": 5, "checkpoint": {"every_steps": 2, **given}}
    model = {"path": str(REFERENCE / path)} if path else {"num_layers": 1}
    run = build_run(make_config({**sections, "model": model}))
    state = run.learner.first_state(run.problem.meshes("train")[0])
    notes = []
    with CompileAhead(notes.append, is_on=False) as ahead:
        recorder = SimpleNamespace(note=notes.append, evaluation=lambda step: {})
        parts = {"run": run, "placement": place(run), "recorder": recorder}
        training = Training(
            **parts,
            saver=Saver(**parts, checkpoints=None, workdir=tmp_path),
            evaluator=Evaluator(**parts),
            workdir=tmp_path,
            ahead=ahead,
            log=SimpleNamespace(write_report=lambda: None),
            stop=[],
        )
        for step in range(1, 6):
            training.begin(Position(step=step, state=state, history=LoadHistory()))
    folders = [tmp_path / "export" / f"step_{step:06d}" for step in steps]
    assert notes == [f"exported {folder}" for folder in folders]
    assert all((folder / "config.json").is_file() for folder in folders)


def test_the_newest_exports_are_kept_and_what_is_not_one_is_let_be(tmp_path):
    folder = tmp_path / "export"
    for name in ("step_000002", "step_000002_adapter", "step_000010", "step_000010_adapter"):
        (folder / name).mkdir(parents=True)
    for name in ("base", "step_000002_mine", "step_000012.tmp", "step_000012", "step_1000000"):
        (folder / name).mkdir()
    always = {"base", "step_000002_mine"}
    tens = {"step_000010", "step_000010_adapter"}

    def left():
        return {path.name for path in folder.iterdir()} - always

    keep_exports(tmp_path, newest=3)
    assert left() == tens | {"step_000012.tmp", "step_000012", "step_1000000"}
    assert always <= {path.name for path in folder.iterdir()}
    keep_exports(tmp_path / "no", newest=2)


def test_exports_of_later_steps_are_set_aside_whole_and_none_is_overwritten(tmp_path):
    """A run that goes on from step 4 takes step 6 again; half an export is of no use."""
    folder, aside = tmp_path / "export", tmp_path / "export.dropped"
    for text in ("first", "second"):
        for name in ("base", "step_000004", "step_000006", "step_000006_adapter"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "config.json").write_text(text)
        (folder / "step_000008.tmp").mkdir()
        assert set_exports_aside(tmp_path, 4) == aside
        assert {path.name for path in folder.iterdir()} == {"base", "step_000004"}
    names = {"step_000006": "first", "step_000006.1": "second"}
    names |= {"step_000006_adapter": "first", "step_000006_adapter.1": "second"}
    assert {path.name: (path / "config.json").read_text() for path in aside.iterdir()} == names
    assert set_exports_aside(tmp_path, 4) is None and set_exports_aside(tmp_path / "no", 0) is None
