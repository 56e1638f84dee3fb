# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner's exact mode: bytes of the compiler, for chips that are not here and for CPU devices.

Where the compilers of chips are: see test_compile.py.
"""

import importlib.util
import json

import pytest

from earl_jax.placement import planner
from earl_jax.plan import plan_command
from tests.support import ROOT, run_python
from tests.support.compilers import need_compiler

# Longer than a block of our own attention, so that TPUs have their kernel.
LENGTH = 512
SETTINGS = (
    "model.num_layers=2",
    "model.head_size=128",
    "rollout.num_slots=32",
    "rollout.episodes_per_step=32",
)
# 128 million parameters: what is padded, or constant, is nothing beside them.
LARGE = ("model.width=2048", "model.num_heads=16", "model.num_kv_heads=8", "model.ffn_size=8192")
LARGE += ("train.remat=full", "train.micro_batches=2")
# For TPUs the same would take minutes to compile.
SMALL = ("model.width=256", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=512")
# On 16 chips of four hosts each weight is cut over eight, so that two hosts share a row shard.
SPANNING = ("model.width=512", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_size=512")
SPANNING += ("selector.rollout_meshes=('data=2,tensor=8',)",)
CASES = [
    pytest.param(*case, marks=need_compiler(case[0]))
    for case in (
        ("v5e:2x2", SMALL),
        # Two hosts: a round is compiled for one of them.
        ("v5e:4x2", SMALL),
        ("v5e:4x4", SPANNING),
        ("h100:1x2", LARGE),
    )
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("topology", "model"), CASES)
def test_bytes_of_what_is_chosen_are_the_compilers(topology, model):
    flags = [f"--topology={topology}", f"--contexts={LENGTH}"]
    flags += [f"--config.{setting}" for setting in (*SETTINGS, *model)]
    exact, quick = command(*flags, "--exact"), command(*flags)
    assert (exact["mode"], quick["mode"]) == ("exact", "quick")
    for stage in ("train", "rollout"):
        chosen = mesh_of(exact, stage, exact["contexts"][0][stage]["mesh"])
        computed = mesh_of(quick, stage, chosen["mesh"])
        assert (chosen["exact"], computed["exact"]) == (True, False)
        assert chosen["fits"] and chosen["bytes_per_device"] == sum(chosen["bytes"].values())
        if model is LARGE:
            both = chosen["bytes_per_device"], computed["bytes_per_device"]
            assert both[0] == pytest.approx(both[1], rel=0.10), stage


ON_CPU = ("--config=configs/tictactoe_tiny_cpu.py", "--topology=cpu:8", "--contexts=40", "--exact")
ON_CPU += ("--config.model.num_layers=1",)


@pytest.fixture
def here(monkeypatch, capsys):
    """`here(*flags)` is what the command prints, in this process: JAX has started."""
    monkeypatch.setattr(planner, "start_jax", lambda platform, devices: None)
    monkeypatch.chdir(ROOT)

    def printed(*flags):
        plan_command(["--json", *flags])
        return json.loads(capsys.readouterr().out)

    return printed


@pytest.mark.slow
def test_a_plan_whose_exact_bytes_break_the_budget_is_left(here):
    exact = command(*ON_CPU)
    chosen = exact["contexts"][0]["train"]
    found = mesh_of(exact, "train", chosen["mesh"])
    assert found["exact"] and found["bytes_per_device"] <= exact["budget_bytes_per_device"]
    tight = found["bytes_per_device"] - 1
    named = "--config.selector.train_meshes=('data=8','data=1,fsdp=8')"
    less = here(*ON_CPU, named, f"--config.selector.budget_bytes_per_device={tight}")
    left = mesh_of(less, "train", less["contexts"][0]["train"]["mesh"])
    assert left["exact"] and left["bytes_per_device"] <= tight
    assert (left["mesh"], left["micro_batches"], left["remat"]) != (
        *(found["mesh"], found["micro_batches"], found["remat"]),
    )


@pytest.mark.slow
def test_rows_of_the_episodes_in_flight_are_in_the_compiled_round(here):
    """An asynchronous run has rows for the episodes of several steps at once."""
    flags = [*ON_CPU, "--config.selector.budget_bytes_per_device=1000000000"]
    flags += [f"--config.selector.{stage}_meshes=('data=8',)" for stage in ("rollout", "train")]
    found = []
    for staleness in (0, 2):
        values = here(*flags, f"--config.asynchrony.max_staleness={staleness}")
        found.append(mesh_of(values, "rollout", "data=8")["bytes"]["activations"])
    # Of each step 16 rows a device, of 40 tokens with four numbers of four bytes.
    assert found[1] - found[0] >= 16 * 40 * 16


@pytest.mark.parametrize(
    ("topology", "extra"), [("v5e:2x4", "tpu-topology"), ("h100:1x8", "gpu-topology")]
)
def test_exact_mode_names_the_extra_that_it_needs(monkeypatch, topology, extra):
    real, compilers = importlib.util.find_spec, {"libtpu", "jax_cuda13_plugin"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *of: None if name in compilers else real(name, *of),
    )
    with pytest.raises(ValueError, match=f"--exact: .*`uv sync --extra {extra}`"):
        plan_command([f"--topology={topology}", "--exact"])


def command(*flags):
    """Returns what the command prints, in a process of its own: it sets JAX up by itself."""
    done = run_python("-m", "earl_jax.plan", "--json", *flags, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mesh_of(values, stage, mesh):
    (found,) = (each for each in values["contexts"][0][stage]["meshes"] if each["mesh"] == mesh)
    return found
