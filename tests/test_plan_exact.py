# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner's exact mode for chips that are not here, against the programs of a run on them.

Where their compilers are: see test_compile.py.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from test_topology import need_compiler

import earl_jax.world
from earl_jax.config_file import load_config_file, make_config
from earl_jax.main import DEFAULT_CONFIG
from earl_jax.measuring import lower_train
from earl_jax.plan import plan_command
from earl_jax.processes import find_processes
from earl_jax.selector.ladder import TrainRung
from earl_jax.selector.memory import program_bytes
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.topology import make_topology
from earl_jax.world import World

# Longer than a block of our own attention, so that TPUs have their kernel.
LENGTH = 512
SETTINGS = [
    "model.num_layers=2",
    "model.head_size=128",
    "model.compute_dtype=bfloat16",
    "rollout.num_slots=32",
    "rollout.episodes_per_step=32",
    f"rollout.context_buckets=({LENGTH},)",
    "selector.budget_bytes_per_device=0",
]
# 128 million parameters: what is padded, or constant, is nothing beside them.
LARGE = ["model.width=2048", "model.num_heads=16", "model.num_kv_heads=8", "model.ffn_size=8192"]
LARGE += ["train.remat=True", "train.micro_batches=2"]
# For TPUs the same would take minutes to compile.
SMALL = ["model.width=256", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=512"]
CASES = [
    pytest.param(*case, marks=need_compiler(case[0]))
    for case in (
        ("v5e:2x2", "data=4", "data=4", SMALL),
        ("h100:1x2", "data=1,fsdp=2", "data=1,tensor=2", LARGE),
    )
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("topology", "trainer", "player", "model"), CASES)
def test_exact_bytes_are_those_of_the_programs_of_a_run_on_such_chips(
    topology, trainer, player, model, monkeypatch, capsys, tmp_path
):
    settings = [*SETTINGS, *model, f"selector.train_meshes=('{trainer}',)"]
    settings += [f"selector.rollout_meshes=('{player}',)"]
    flags = [f"--topology={topology}", f"--contexts={LENGTH}", "--json"]
    flags += [f"--config.{setting}" for setting in settings]
    exact = prospects(command(flags, tmp_path), "exact")
    plan_command(flags)
    quick = prospects(capsys.readouterr().out, "quick")

    config = make_config(load_config_file(DEFAULT_CONFIG), settings)
    world = world_on(config, make_topology(topology).devices(), monkeypatch)
    rung = TrainRung(config.train.micro_batches, config.train.remat)
    update = lower_train(world, MeshShape.parse(trainer), LENGTH, rung).compile()
    with same_effort(topology):
        round_ = world.engine(MeshShape.parse(player)).lower_play(LENGTH).compile()
    assert exact["train"]["bytes_per_device"] == program_bytes(update)
    # Beside the trainer, of which the round's own program knows nothing.
    beside = exact["rollout"]["bytes"]["trainer"]
    assert exact["rollout"]["bytes_per_device"] - beside == program_bytes(round_)
    for stage in ("train", "rollout"):
        assert (exact[stage]["exact"], quick[stage]["exact"]) == (True, False)
        computed, compiled = (found[stage]["bytes_per_device"] for found in (quick, exact))
        assert model is SMALL or computed == pytest.approx(compiled, rel=0.10), stage


def command(flags: list[str], cache: Any) -> str:
    """What the command prints with --exact, in a process of its own: it sets JAX up by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "earl_jax.plan", "--exact", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def prospects(text: str, mode: str) -> dict[str, Any]:
    """Each stage's only candidate."""
    values = json.loads(text)
    assert values["mode"] == mode
    (context,) = values["contexts"]
    found = {}
    for stage in ("train", "rollout"):
        (found[stage],) = context[stage]["meshes"]
        assert found[stage]["mesh"] == context[stage]["mesh"]
    return found


def world_on(config: Any, devices: list[Any], monkeypatch: pytest.MonkeyPatch) -> World:
    """The world of a run of this config, as it would be on these devices."""
    here = find_processes(0, config.distributed.timeout_s)
    there = dataclasses.replace(here, rollout_devices=tuple(devices), train_devices=tuple(devices))
    monkeypatch.setattr(earl_jax.world, "find_processes", lambda *_: there)
    return World(config)


@contextmanager
def same_effort(topology: str) -> Iterator[None]:
    """A round for TPUs is compiled as the planner does it: at full effort it takes minutes."""
    before = jax.config.jax_optimization_level
    if make_topology(topology).chip.platform == "tpu":
        jax.config.update("jax_optimization_level", "O1")
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)
