# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about a throughput table: which runs and plans take it, and what is said where none do."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from earl_jax.models.attention.kernels import Choice
from earl_jax.placement.facts import table_for_plan
from earl_jax.placement.problem import find_model, make_problem
from earl_jax.run.build import Run, build_run
from earl_jax.run.saved_position import _table_of
from earl_jax.selector.hardware import parse_topology
from earl_jax.selector.plans import Failure
from earl_jax.selector.table import ThroughputTable
from earl_jax.sharding.layout import MeshShape
from tests.support.placements import TINY
from tests.support.problems import train_key
from tests.support.settings import make_config

KEY = train_key(MeshShape(data=8), 16, 1, "none")
FAILED = Failure(stage="train", mesh="data=8", size=(4096, 16, 1, 0))
GIVEN = {
    "model": TINY,
    "rollout": {"num_slots": 8, "episodes_per_step": 16, "context_buckets": (16, 32)},
}


@pytest.fixture(scope="module")
def run() -> Run:
    return build_run(make_config(GIVEN))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def facts_of(run: Run) -> dict[str, Any]:
    return run.open_table()[0].facts


def keep(table: ThroughputTable) -> ThroughputTable:
    kept = table.with_speed(KEY, 100.0).with_failure(FAILED)
    kept.write()
    return kept


# The facts of a run.


def test_facts_say_model_devices_versions_and_what_changes_programs(run):
    facts = facts_of(run)
    cpus = {"platform": "cpu", "kind": "cpu", "number": 8}
    assert facts["devices"] == {"rollout": cpus, "train": cpus}
    assert (facts["model"]["width"], facts["vocab_size"]) == (16, run.origin.vocab_size)
    assert facts["versions"].keys() == {"jax", "jaxlib"}
    assert facts["rollout"]["num_slots"] == 8 and facts["train"]["remat"] == "none"
    assert facts["attention"] == [choice.kernel for choice in run.attention]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"optimizer": "lion"}},
        {"train": {"momentum_dtype": "bfloat16"}},
        {"asynchrony": {"max_staleness": 2}},
    ],
    ids=["optimizer", "moments", "rows"],
)
def test_what_changes_the_bytes_of_a_program_is_a_fact(run, changes):
    assert facts_of(build_run(make_config(GIVEN | changes))) != facts_of(run)


def test_flags_are_facts_in_any_order_but_for_those_that_dump(run, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2 --xla_a=1")
    facts = facts_of(run)
    assert facts["flags"]["XLA_FLAGS"] == ["--xla_a=1", "--xla_b=2"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1  --xla_dump_to=/somewhere --xla_b=2")
    assert facts_of(run) == facts


# config.selector.table.


def test_auto_takes_what_earlier_runs_have_observed(run):
    table, note = run.open_table()
    assert (dict(table.entries), note) == ({}, None)
    kept = keep(table)
    assert run.open_table() == (kept, None)


@pytest.mark.parametrize("changed", ["flags", "kernels"])
def test_table_is_not_read_where_programs_may_differ(run, monkeypatch, changed):
    keep(run.open_table()[0])
    if changed == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_fast_math=true")
    else:
        run = dataclasses.replace(run, attention=(Choice(kernel="splash", reason=""),))
    table, note = run.open_table()
    assert (dict(table.entries), note) == ({}, None)


def test_resumed_run_leaves_what_other_versions_have_observed():
    facts, predicted = {"versions": {"jax": "1"}}, []
    saved = ThroughputTable(facts=facts).with_speed(KEY, 1.0)
    kept = ThroughputTable(facts=facts).with_speed(KEY, 2.0)
    assert _table_of(saved, kept, predicted.append).entries == saved.entries
    assert predicted == []
    newer = ThroughputTable(facts={"versions": {"jax": "2"}})
    assert _table_of(saved, newer, predicted.append) == newer
    assert len(predicted) == 1
    assert "of other devices, settings or versions" in predicted[0]


# A table that is given to a plan.


@pytest.fixture
def given(run, tmp_path):
    """`given(change)` writes a table of a run whose facts have this change."""

    def write(change=lambda facts: None) -> Path:
        facts = json.loads(json.dumps(facts_of(run), default=str))
        change(facts)
        path = tmp_path / "table.json"
        ThroughputTable(path=path, facts=facts).with_speed(KEY, 100.0).write()
        return path

    return write


def planned(path: Path, topology: str = "cpu:8"):
    """The table for a plan of the same config on these chips, and its notes."""
    config = make_config(GIVEN)
    model, vocab_size = find_model(config, None)
    problem = make_problem(config, model, vocab_size, parse_topology(topology), budget_bytes=None)
    return table_for_plan(path, problem, model, vocab_size, config)


def test_plan_takes_a_table_of_the_same_chips_and_model(given):
    table, notes = planned(given())
    assert table.entries[KEY].speeds == (100.0,) and notes == []


def test_plan_says_that_other_settings_were_observed(given):
    def change(facts):
        facts["rollout"]["num_slots"] = 4
        facts["versions"]["jax"] = "0.0.1"

    table, (note,) = planned(given(change))
    assert table.entries
    assert note.endswith("than are planned for: rollout.num_slots is 4 there, 8 here")


def other_model(facts):
    facts["model"]["num_layers"] = 28


def other_vocabulary(facts):
    facts["vocab_size"] = 152_064


def a_gpu(facts):
    facts["devices"]["train"] = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "number": 8}


def no_devices(facts):
    del facts["devices"]


def no_kinds(facts):
    facts["devices"] = ["cpu cpu"] * 8


def nothing(facts):
    pass


@pytest.mark.parametrize(
    ("topology", "change", "words"),
    [
        ("cpu:8", other_model, "another model: model.num_layers is 28 there, 1 here. Plan with"),
        ("cpu:8", other_vocabulary, "another model: vocab_size is 152064 there, "),
        ("cpu:8", a_gpu, "is of NVIDIA H100 80GB HBM3 devices, and the plan"),
        ("h100:1x8", nothing, "is of cpu devices, and the plan"),
        ("h100:1x8", a_gpu, "is of cpu devices, and the plan is for h100:1x8"),
        ("v5e:2x4", nothing, "Give a table that a run on v5e has written, or none"),
        ("cpu:8", no_devices, "is of unknown devices"),
        ("cpu:8", no_kinds, "is of unknown devices"),
        ("cpu:8", dict.clear, "is of unknown devices"),
    ],
)
def test_plan_refuses_a_table_of_other_chips_or_another_model(given, topology, change, words):
    path = given(change)
    with pytest.raises(ValueError) as error:
        planned(path, topology)
    assert f"--table={path}" in str(error.value) and words in str(error.value)


def test_plan_refuses_a_damaged_table(given):
    path = given()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"--table={path} cannot be read: "):
        planned(path)
