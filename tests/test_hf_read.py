# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, read: by slice onto the devices, in a run, and refused where they do not fit."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from earl_jax.engine.config import NO_LIMIT
from earl_jax.models.checkpoints.hf_read import load_parameters, open_checkpoint
from earl_jax.models.checkpoints.hf_tensors import CheckpointTensors
from earl_jax.models.parameters import parameter_shardings, parameter_specs
from earl_jax.placement.rollouts import play
from earl_jax.rollout.load import expected_tokens
from earl_jax.rollout.share import Share
from earl_jax.run.build import build_run
from earl_jax.sharding.layout import MeshShape, make_layout
from tests.support.placements import load_of, with_session
from tests.support.references import (
    REFERENCE,
    assert_equal_trees,
    change_config,
    change_tensors,
    checkpoint,
    loaded,
    mixed,
)
from tests.support.settings import make_config


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "gpt_oss", "gpt_oss_mxfp4", "qwen3_next"])
def test_a_device_reads_its_slice_and_nothing_else(name, monkeypatch):
    given, expected, mesh = checkpoint(name), loaded(name), mixed(name)
    layout = make_layout(mesh)
    read = []
    kept = CheckpointTensors.slice_of

    class Counted:
        def __init__(self, tensor):
            self._tensor = tensor
            self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

        def __getitem__(self, cuts):
            values = self._tensor[cuts]
            read.append((np.prod(self.get_shape()), values.size))
            return values

    monkeypatch.setattr(CheckpointTensors, "slice_of", lambda self, name: Counted(kept(self, name)))
    params = load_parameters(given, layout)
    assert_equal_trees(params, expected)
    specs = parameter_specs(given.model, given.vocab_size)
    shardings = parameter_shardings(specs, layout)
    jax.tree.map(
        lambda leaf, where: pytest.fail() if leaf.sharding != where else 0, params, shardings
    )
    jax.tree.map(lambda leaf: pytest.fail() if leaf.dtype != jnp.float32 else 0, params)
    # Every number is read exactly once, a slice at a time where the tensor is cut.
    assert sum(size for _, size in read) == sum(leaf.size for leaf in jax.tree.leaves(params))
    cut = [size / whole for whole, size in read]
    parts = mesh.fsdp * mesh.tensor
    if name.startswith("gpt_oss"):
        # All experts are one tensor, and two parameters another.
        parts *= 2 * mesh.expert
    if name == "qwen3_next":
        # A head of a query is 8 of 128 rows, of half as many numbers.
        parts = 32
    assert min(cut) == pytest.approx(1 / parts)
    assert sum(part < 1 for part in cut) > len(cut) / 2


def with_path(name: str) -> dict:
    return {"model": {"path": str(REFERENCE / name)}}


def test_a_run_is_the_model_of_the_path():
    world = build_run(make_config(with_path("qwen2_tied"), ["model.compute_dtype=bfloat16"]))
    read = checkpoint("qwen2_tied")
    assert world.origin.model == dataclasses.replace(read.model, compute_dtype="bfloat16")
    assert world.origin.model.path == "" and world.origin.vocab_size == 320
    assert world.actor.renderer.end_of_turn_id == 3
    first, measured = (
        make(world.problem.meshes("train")[-1])
        for make in (world.learner.first_state, world.learner.init_state)
    )
    assert_equal_trees(first.params, loaded("qwen2_tied"))
    shardings = world.learner.state_shardings(world.problem.meshes("train")[-1])
    for state in (first, measured):
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
        assert int(state.updates) == 0
    assert_equal_trees(first.optimizer, measured.optimizer)
    # Measurements need no reading: theirs are random weights.
    assert not np.array_equal(first.params["embed"], measured.params["embed"])


def test_a_model_without_tokenizer_or_of_too_few_tokens_is_an_error(copied):
    with pytest.raises(ValueError, match=r"qwen3.* holds no tokenizer"):
        build_run(make_config(with_path("qwen3")))
    change_config(copied, vocab_size=256)
    with pytest.raises(ValueError, match="tokenizer has 299 entries, but whose model has 256"):
        build_run(make_config({"model": {"path": str(copied)}}))


def test_sizes_beside_a_path_are_errors():
    words = "config.model.width = 32 has no effect.*config.model.path gives"
    with pytest.raises(ValueError, match=words):
        make_config(with_path("qwen2_tied"), ["model.width=32"])


def load(folder: Path):
    return load_parameters(open_checkpoint(folder), make_layout(MeshShape()))


def test_a_folder_without_weights_is_an_error(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index"):
        load(copied)


def tensor_ranges(file: Path) -> dict[str, tuple[int, int]]:
    """Returns the first byte and the end of each tensor of a file."""
    data = file.read_bytes()
    listed = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:listed])
    entries.pop("__metadata__", None)
    return {
        name: tuple(listed + end for end in entry["data_offsets"])
        for name, entry in entries.items()
    }


EMBEDDING = "model.embed_tokens.weight"


def test_a_truncated_file_is_an_error_that_names_the_tensor(copied):
    """The first whose numbers are not all there; the embedding, where not even a list is."""
    file = copied / "model.safetensors"
    whole, found = file.read_bytes(), tensor_ranges(file)
    for name, (start, end) in found.items():
        for size in (start, start + 1, end - 1):
            file.write_bytes(whole[:size])
            first = min((e, n) for n, (_, e) in found.items() if e > size)[1]
            assert first == name
            words = f"^{name} cannot be read from .*/model.safetensors: .* {end - size:,} bytes bef"
            with pytest.raises(ValueError, match=words):
                load(copied)
    list_end = min(start for start, _ in found.values())
    for size in (0, 1, 7, 8, 9, list_end // 2, list_end - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"^{EMBEDDING} .*/model.safe.* within its list of"):
            load(copied)


@pytest.mark.parametrize(
    "listed",
    ["{", "[]", "7", "{}", '{"a": 3}', '{"a": {"data_offsets": ["b", "c"]}}', "[" * 50_000],
)
def test_a_list_of_tensors_that_is_none_is_an_error(copied, listed):
    data = len(listed).to_bytes(8, "little") + listed.encode()
    (copied / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=f"^{EMBEDDING} (cannot be read|is missing)"):
        load(copied)


def change_index(folder: Path, change):
    """Changes the weight_map of a copy of qwen3, which is in four files."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "model-00009.safetensors",
            f"{UP} cannot be read from .*/model-00009.safetensors: No such",
        ),
        ("model-00004-of-00004.safetensors", f"{UP} cannot be .*/model-00004.*not contain .*{UP}"),
        ("empty.safetensors", f"{UP} cannot be read from .*/empty.safetensors: .*header"),
        ("garbage.safetensors", f"{UP} cannot be read from .*/garbage.safetensors: .*header"),
        ("../beside/MODEL", f"index.json says that {UP} is in '../beside/MODEL'; only the name"),
        ("/beside/MODEL", f"index.json says that {UP} is in '/beside/MODEL'; only the name"),
        ("..", f"{UP} cannot be read from .*/several/..: "),
        (3, "index.json is damaged"),
        (None, f"{UP} is missing; it is not in model-00001-of"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_is_an_error(tmp_path, file, words):
    folder = Path(shutil.copytree(REFERENCE / "qwen3", tmp_path / "several"))
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "garbage.safetensors").write_bytes(b"\xff" * 500)
    # A folder beside it has the very tensor: it is not to be read.
    shutil.copytree(REFERENCE / "qwen3", tmp_path / "beside")
    change_index(folder, lambda files: files.pop(UP) if file is None else files.update({UP: file}))
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_one_file_or_several_are_the_same(tmp_path):
    folder = Path(shutil.copytree(REFERENCE / "qwen3", tmp_path / "one"))
    together = {}
    for file in folder.glob("*.safetensors"):
        together |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(together, folder / "model.safetensors")
    assert_equal_trees(load(folder), loaded("qwen3"))


BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(BIAS), f"{BIAS} is missing; it is not in model.safetensors"),
        (lambda t: t.update({BIAS: t[BIAS][:-1]}), rf"{BIAS} in .* has the shape \(15,\).*\(16,\)"),
        (lambda t: t.update({BIAS: t[BIAS].astype(np.float64)}), f"{BIAS} in .* of type F64"),
        (lambda t: t.update({"model.extra.weight": t[BIAS]}), "model.extra.weight in .*not part"),
    ],
    ids=["missing", "shape", "type", "extra"],
)
def test_tensors_that_do_not_fit_are_errors(copied, change, words):
    change_tensors(copied, change)
    with pytest.raises(ValueError, match=words):
        load(copied)


def test_an_untied_head_must_be_there(tmp_path):
    folder = Path(shutil.copytree(REFERENCE / "qwen2", tmp_path / "untied"))
    change_tensors(folder, lambda found: found.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight is missing; it is not in model.safetens"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [lambda head: head[:-1], lambda head: head.astype(np.float16), lambda head: head * 2],
    ids=["shape", "type", "values"],
)
def test_a_tied_head_that_differs_is_an_error(copied, change):
    """`transformers` 5 computes with it, whatever config.json says."""

    def add(found):
        found["lm_head.weight"] = np.ascontiguousarray(change(found["model.embed_tokens.weight"]))

    change_tensors(copied, add)
    with pytest.raises(ValueError, match="lm_head.weight in .*/model.safetensors is not the same"):
        load(copied)


def test_leftovers_of_older_files_are_passed_over(copied):
    def add(found):
        found["lm_head.weight"] = found["model.embed_tokens.weight"].copy()
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    change_tensors(copied, add)
    assert_equal_trees(load(copied), loaded("qwen2_tied"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_come_in_as_they_are_stored(copied, dtype):
    def convert(found):
        found.update({key: array.astype(dtype) for key, array in found.items()})

    change_tensors(copied, convert)
    expected = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), loaded("qwen2_tied")
    )
    assert_equal_trees(jax.tree.map(np.asarray, load(copied)), expected)


def test_no_episode_is_longer_than_the_checkpoint_is_made_for():
    """128 tokens, by its config.json; whoever asks for more is told."""
    assert build_run(make_config(with_path("qwen2_tied"))).origin.max_context == 128
    for most in (128, 20):
        config = make_config(with_path("qwen2_tied"), [f"rollout.max_episode_tokens={most}"])
        assert build_run(config).origin.max_context == 128
    more = make_config(with_path("qwen2_tied"), ["rollout.max_episode_tokens=129"])
    words = r"max_episode_tokens is 129, .*qwen2_tied.* made for 128 \(max_position_embeddings\)"
    with pytest.raises(ValueError, match=words):
        build_run(more)
    forks = dataclasses.replace(more, chat=dataclasses.replace(more.chat, history="fork"))
    assert build_run(forks).origin.max_context == 128, "of each sample, and an episode has several"
    assert build_run(make_config(with_path("qwen2_tied"))).actor.max_context == 128
    free = build_run(make_config({}))
    assert (free.origin.max_context, free.actor.max_context) == (NO_LIMIT, 32768)
    longer = build_run(make_config({}, ["rollout.max_episode_tokens=50000"]))
    assert longer.actor.max_context == 50000


@pytest.mark.parametrize(
    ("given", "history", "tokens", "bucket", "expected"),
    [
        ({}, "append", 41, 80, 128),
        ({}, "append", 81, 128, 128),
        ({}, "append", 128, 128, 128),
        ({}, "append", 129, 160, 128),
        ({"max_episode_tokens": 30}, "append", 1, 30, 30),
        ({"max_episode_tokens": 100}, "append", 81, 100, 100),
        ({}, "fork", 81, 160, 404),
        ({"max_episode_tokens": 150}, "fork", 81, 150, 150),
    ],
)
def test_context_buckets_double_up_to_the_longest_episode(given, history, tokens, bucket, expected):
    """From 40 tokens, with a checkpoint made for 128; longer texts have whatever they need.

    The expectation is after a step with an episode of 400, in rounds of four tokens. An episode
    that forks may have several samples of 128.
    """
    rollout = {"context_buckets": (40,), "max_turn_tokens": 8, "burst": 4, **given}
    settings = {"rollout": rollout, "chat": {"history": history}}
    run = build_run(make_config({**with_path("qwen2_tied"), **settings}))
    assert run.stages.rollout.max_tokens_for(tokens) == bucket
    assert expected_tokens(run.stages.rollout, load_of(400)) == expected
    assert run.config.rollout.max_episode_tokens == given.get("max_episode_tokens", 0)


@pytest.mark.slow
def test_a_game_that_outgrows_the_checkpoint_ends_there(tmp_path):
    """Connect Four by random legal moves, with a model that is made for 64 tokens.

    The context bucket of 40 tokens is outgrown, and the next is the model's and not 80.
    """
    folder = shutil.copytree(REFERENCE / "qwen2_tied", tmp_path / "short")
    change_config(folder, max_position_embeddings=64)
    given = {
        "model": {"path": str(folder)},
        "env": {"name": "connect_four", "args": {"mask_illegal": True}},
        "rollout": {"num_slots": 16, "episodes_per_step": 16, "context_buckets": (40,)},
        "train": {"ratio": "model"},
        "selector": {"rollout_meshes": ("data=8",), "train_meshes": ("data=8",), "table": "model"},
    }
    run, session, placement = with_session(given)
    tasks = run.tasks.training(0)
    share = Share(range(len(tasks)))
    trajectories = play(run.actor, placement, session, tasks, share, None).trajectories
    assert max(t.num_tokens for t in trajectories) == 64 == placement.max_tokens
    ended = {t.stop_reason: t for t in trajectories}
    assert {"win", "episode_too_long"} <= set(ended)
    assert "within 64 tokens" in ended["episode_too_long"].detail
