# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Every file in configs/ is a run: valid, and its programs trace on every mesh it may choose."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from reference.make_checkpoint import write_checkpoint

from earl_jax.config.file import DEFAULT_CONFIG, load_config_file, make_config
from earl_jax.engine.engine import Engine
from earl_jax.engine.round_inputs import inputs_width
from earl_jax.run import build_run
from earl_jax.sharding.axes import MESH_AXES
from earl_jax.sharding.layout import MeshShape, make_abstract_layout
from earl_jax.train import state as train_state
from earl_jax.train.step import batch_shapes, make_train_step
from tests.support import ROOT

FILES = sorted((ROOT / "configs").glob("*.py"))
PLATFORMS = {"auto": "cpu", "cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The config in a file, with what it leaves to the command line."""
    folder = tmp_path_factory.mktemp("configs") / "checkpoint"
    write_checkpoint(folder, tied=False, seed=0)

    def make(path):
        given = load_config_file(path)
        try:
            return make_config(given)
        except ValueError as error:
            assert "config.model.path is left open by this config; give it: --" in str(error)
            return make_config(given, [f"model.path={folder}"])

    return make


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def world(request, made):
    """The config's Run. Its device count must be that of these tests until a config has more."""
    config = made(request.param)
    assert config.devices.num_cpu_devices == len(jax.devices()) == 8
    return build_run(config)


def placed(shapes, shardings):
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings
    )


def lowered(traced, world):
    return traced.lower(lowering_platforms=(PLATFORMS[world.config.devices.platform],)).as_text()


def mesh_words(shape: MeshShape) -> str:
    """How the lowered program names its mesh."""
    sizes = zip(MESH_AXES, shape.sizes, strict=True)
    return "[" + ", ".join(f'"{axis}"={size}' for axis, size in sizes) + "]"


def test_there_are_configs_and_one_is_the_default():
    assert ROOT / DEFAULT_CONFIG in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_has_the_command_that_runs_it(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert f"python -m earl_jax.main --config=configs/{path.name}" in module.__doc__


@pytest.mark.slow_except("tictactoe_tiny_cpu")
def test_the_training_step_lowers_on_every_mesh_it_may_choose(world):
    config, rows = world.config, world.config.rollout.episodes_per_step
    for shape in world.problem.train_meshes:
        layout = make_abstract_layout(shape)
        state = placed(
            world.learner.state_shapes(),
            train_state.state_shardings(
                world.origin.model, config.train, world.origin.vocab_size, layout
            ),
        )
        step = make_train_step(
            world.origin.model,
            config.train,
            layout,
            vocab_size=world.origin.vocab_size,
            temperature=config.rollout.temperature,
            algorithm=config.make_algorithm(),
        )
        batch = batch_shapes(rows, config.rollout.context_buckets[-1], layout)
        traced = step.trace(state, batch, jax.ShapeDtypeStruct((2,), jnp.float32))
        new_state, metrics = traced.out_info
        assert all((leaf.shape, leaf.dtype) == ((), jnp.float32) for leaf in metrics.values())
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert mesh_words(shape) in lowered(traced, world)


@pytest.mark.slow_except("tictactoe_tiny_cpu")
def test_the_round_of_the_engine_lowers_on_every_mesh_and_room_it_may_choose(world):
    rollout = world.config.rollout
    for shape in world.problem.rollout_meshes:
        engine = Engine(world.stages.engines.engine(shape).config, make_abstract_layout(shape))
        rows = engine.layout.activations("B")
        width = inputs_width(rollout.chunk_size)
        for max_tokens in {rollout.context_buckets[0], rollout.context_buckets[-1]}:
            # `Engine.lower_play` cannot lower for devices that are not there.
            traced = engine._play.trace(
                placed(engine.parameter_shapes, engine.parameter_shardings),
                placed(engine.state_shapes(max_tokens), engine.state_shardings),
                jax.ShapeDtypeStruct((rollout.num_slots, width), jnp.int32, sharding=rows),
                jax.ShapeDtypeStruct((2,), jnp.uint32),
            )
            state, report = traced.out_info
            assert report.shape == (rollout.num_slots, 2 * rollout.burst + 2)
            assert state.experience.tokens.shape == (engine.config.num_rows, max_tokens)
            assert mesh_words(shape) in lowered(traced, world)
