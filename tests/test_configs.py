# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Every file in configs/ is a run: valid, and its programs trace on every mesh it may choose."""

import dataclasses
import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from earl_jax.config.file import DEFAULT_CONFIG, load_config_file, make_config
from earl_jax.engine.engine import Engine
from earl_jax.engine.round_inputs import inputs_width
from earl_jax.placement.problem import find_model, planned_problem
from earl_jax.rollout.config import make_engine_config
from earl_jax.run.build import build_run
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.axes import MESH_AXES
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_abstract_layout
from earl_jax.sharding.placing import placed_shapes
from earl_jax.train import state as train_state
from earl_jax.train.step import batch_shapes, make_train_step
from earl_jax.train.update import Update
from tests.support import ROOT

FILES = sorted((ROOT / "configs").glob("*.py"))
# The hardware that a config of a published model is for, by the names of the planner.
CHIPS = {
    "qwen25_7b_lora": ("qwen2.5-7b", "h100:1x1"),
    "qwen25_7b": ("qwen2.5-7b", "h100:1x8", "v5e:8x8"),
    "qwen3_30b_a3b": ("qwen3-30b-a3b", "h100:2x8"),
    "qwen25_72b": ("qwen2.5-72b", "h100:16x8", "v5p:4x4x8"),
}
# Other tests run these whole, on the meshes that they name or on those of them that cut layers.
RUN = {"trail_tiny_cpu": "test_default_run.py", "connect_four_qwen2_cpu": "test_runs.py"}
LAPTOP = [path for path in FILES if path.stem not in (*CHIPS, *RUN)]
PLATFORMS = {"auto": "cpu", "cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


@pytest.fixture(scope="module", params=LAPTOP, ids=lambda path: path.stem)
def world(request):
    """The config's Run. Its device count must be that of these tests until a config has more."""
    config = make_config(load_config_file(request.param))
    assert config.devices.num_cpu_devices == len(jax.devices()) == 8
    return build_run(config)


def lowered(traced, world):
    return lowered_for(traced, PLATFORMS[world.config.devices.platform])


def lowered_for(traced, platform):
    return traced.lower(lowering_platforms=(platform,)).as_text()


def mesh_words(shape: MeshShape) -> str:
    """Returns the lowered program's name of a mesh."""
    sizes = zip(MESH_AXES, shape, strict=True)
    return "[" + ", ".join(f'"{axis}"={size}' for axis, size in sizes) + "]"


def test_there_are_configs_and_one_is_the_default():
    assert ROOT / DEFAULT_CONFIG in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_has_the_command_that_runs_it(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert f"python -m earl_jax.main --config=configs/{path.name}" in module.__doc__


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem.endswith("_cpu")], ids=lambda path: path.stem
)
def test_plans_of_a_laptop_do_not_follow_observed_speeds(path):
    """So that equal seeds are equal runs (test_same_run.py)."""
    assert load_config_file(path).selector.table == "model"


def traced_update(config, model, train, vocab_size, layout, length):
    """The trainer's step of a config, traced for a batch of rows of this length, and its state."""
    update = Update(
        model,
        train,
        layout,
        vocab_size=vocab_size,
        temperature=config.train_temperature,
        algorithm=config.make_algorithm(),
    )
    state = placed_shapes(
        train_state.state_shapes(model, train, vocab_size),
        train_state.state_shardings(model, train, vocab_size, layout),
    )
    batch = batch_shapes(config.rollout.episodes_per_step, length, layout)
    rates = jax.ShapeDtypeStruct((2,), jnp.float32)
    return make_train_step(update).trace(state, batch, rates), state


def traced_round(engine, rollout, max_tokens):
    """`Engine.lower_play` cannot lower for devices that are not there."""
    rows, width = engine.layout.activations("B"), inputs_width(rollout.chunk_size)
    return engine._play.trace(
        placed_shapes(engine.parameter_shapes, engine.parameter_shardings),
        placed_shapes(engine.state_shapes(max_tokens), engine.state_shardings),
        jax.ShapeDtypeStruct((rollout.num_slots, width), jnp.int32, sharding=rows),
        jax.ShapeDtypeStruct((2,), jnp.uint32),
    )


@pytest.mark.slow_except("tictactoe_tiny_cpu")
def test_the_training_step_lowers_on_every_mesh_it_may_choose(world):
    config, origin = world.config, world.origin
    for shape in world.problem.meshes("train"):
        given = origin.model, config.train, origin.vocab_size, make_abstract_layout(shape)
        traced, state = traced_update(config, *given, config.rollout.context_buckets[-1])
        new_state, metrics = traced.out_info
        assert all((leaf.shape, leaf.dtype) == ((), jnp.float32) for leaf in metrics.values())
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert mesh_words(shape) in lowered(traced, world)


@pytest.mark.slow_except("tictactoe_tiny_cpu")
def test_engine_round_lowers_on_every_mesh_and_context_bucket(world):
    rollout = world.config.rollout
    meshes, buckets = world.problem.meshes("rollout"), rollout.context_buckets
    number = max(len(meshes), len(buckets))
    for shape, max_tokens in itertools.islice(
        zip(itertools.cycle(meshes), itertools.cycle(buckets), strict=True), number
    ):
        engine = Engine(world.stages.engines.engine(shape).config, make_abstract_layout(shape))
        traced = traced_round(engine, rollout, max_tokens)
        state, report = traced.out_info
        assert report.shape == (rollout.num_slots, 2 * rollout.burst + 2)
        assert state.experience.tokens.shape == (engine.config.num_rows, max_tokens)
        assert mesh_words(shape) in lowered(traced, world)


# Published models on the hardware that their configs name.


@functools.cache
def schedule_of(name, topology):
    """The config, its problem on this hardware, and the planner's schedule of its contexts."""
    preset = CHIPS[name][0]
    config = make_config(
        load_config_file(ROOT / "configs" / f"{name}.py"), ["model.path=", f"model.preset={preset}"]
    )
    hardware = parse_topology(topology)
    model, vocab_size = find_model(config, None)
    problem = planned_problem(config, model, vocab_size, hardware, hardware.usable_bytes)
    return (
        config,
        problem,
        make_schedule(problem, ThroughputTable(), config.rollout.context_buckets),
    )


TARGETS = [(name, topology) for name, (_, *all_of) in CHIPS.items() for topology in all_of]
# Of two kinds of chips one.
TRACED = [(name, all_of[-1 if "72b" in name else 0]) for name, (_, *all_of) in CHIPS.items()]


@pytest.mark.parametrize(("name", "topology"), TRACED)
@pytest.mark.slow_except("qwen25_7b-h100:1x8")
def test_every_context_of_a_published_model_traces_on_its_hardware(name, topology):
    config, problem, schedule = schedule_of(name, topology)
    # The layers are alike: two are traced in a tenth of the time of eighty.
    model, vocab_size = find_model(config, None)
    model = dataclasses.replace(model, num_layers=2)
    platform = {"gpu": "cuda", "tpu": "tpu"}[problem.hardware.platform]
    for stop in {s.decision.rollout.plan.mesh: s for s in schedule}.values():
        assert_round_lowers(config, model, vocab_size, problem, stop, platform)
    for stop in {s.decision.train.plan.mesh: s for s in schedule}.values():
        plan = stop.decision.train.plan
        layout = make_abstract_layout(plan.mesh, row_axes=TRAINING_ROWS)
        train = dataclasses.replace(
            config.train, micro_batches=plan.micro_batches, remat=plan.remat
        )
        traced, _ = traced_update(config, model, train, vocab_size, layout, stop.context)
        assert mesh_words(plan.mesh) in lowered_for(traced, platform)


def assert_round_lowers(config, model, vocab_size, problem, stop, platform):
    """A round of one process of the rollout, or of all where its mesh spans them."""
    mesh = stop.decision.rollout.plan.mesh
    num = problem.num_parts(mesh)
    own = mesh._replace(data=mesh.data // num)
    rollout = config.rollout.part(num)
    engine_config = make_engine_config(
        rollout,
        model,
        vocab_size,
        num_devices=problem.hardware.num_devices // num,
        seed=config.seed,
        model_logprobs=False,
    )
    engine = Engine(engine_config, make_abstract_layout(own))
    traced = traced_round(engine, rollout, stop.context)
    assert mesh_words(own) in lowered_for(traced, platform)


@pytest.mark.parametrize(("name", "topology"), TARGETS)
@pytest.mark.slow_except("qwen25_7b-*", "qwen25_7b_lora-*")
def test_docstring_has_the_schedule_of_the_planner(name, topology):
    """Every context fits; the command is in the docstring, and the meshes are what it prints."""
    text = (ROOT / "configs" / f"{name}.py").read_text()
    command = f"--topology={topology} --config.model.path= --config.model.preset={CHIPS[name][0]}"
    assert command in text
    table = text.split(command)[1].split("uv run")[0]
    for stop in schedule_of(name, topology)[2]:
        choice = stop.decision
        assert choice is not None, stop.why
        train, rollout = choice.train.plan, choice.rollout.plan
        row = rf"^ +{stop.context:,} +{train.mesh} +{train.micro_batches}  {rollout.mesh} "
        assert re.search(row, table, re.MULTILINE), row
