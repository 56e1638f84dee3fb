# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about a throughput table: which runs take it, and what is said where none do."""

import dataclasses
from typing import Any

import pytest

from earl_jax.models.attention.kernels import Choice
from earl_jax.run.build import Run, build_run
from earl_jax.run.saved_position import _table_of
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
def test_settings_that_change_program_bytes_are_facts(run, changes):
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
    assert (dict(table.speeds), note) == ({}, None)
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
    assert (dict(table.speeds), note) == ({}, None)


def test_resumed_run_leaves_what_other_versions_have_observed():
    facts, predicted = {"versions": {"jax": "1"}}, []
    saved = ThroughputTable(facts=facts).with_speed(KEY, 1.0)
    kept = ThroughputTable(facts=facts).with_speed(KEY, 2.0)
    assert _table_of(saved, kept, predicted.append).speeds == saved.speeds
    assert predicted == []
    newer = ThroughputTable(facts={"versions": {"jax": "2"}})
    assert _table_of(saved, newer, predicted.append) == newer
    assert len(predicted) == 1
    assert "of other devices, settings or versions" in predicted[0]
