# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The throughput table: entries, failures, keys, and its file."""

import dataclasses
import json

import pytest

from earl_jax.selector.plans import Failure, RolloutPlan, TrainPlan
from earl_jax.selector.table import (
    KEPT,
    ThroughputTable,
    cache_folder,
    key_of,
    load_table,
    parse_key,
)
from earl_jax.sharding.layout import MeshShape
from tests.support.problems import rollout_key, train_key

D8, D4T2 = MeshShape(data=8), MeshShape(data=4, tensor=2)
ROLLOUT, TRAIN = rollout_key(D4T2, 48, 32), train_key(D8, 48, 2, "full")
# In devices of 70 bytes.
FAILED = Failure(stage="rollout", mesh="data=8", size=(48, 960, 32, 1, -70))
FACTS = {"model": {"width": 64}, "vocab_size": 320, "devices": {"train": {"number": 8}}}
MADE = FACTS | {"versions": {"jax": "1"}, "flags": []}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "earl_jax"


def one_speed(facts=MADE) -> ThroughputTable:
    """A table of these facts with a speed, as it is on disk."""
    table = load_table(facts)[0].with_speed(TRAIN, 1234.5678901234567)
    table.write()
    return table


# Speeds.


def test_newest_speeds_of_a_plan_are_kept():
    table = ThroughputTable()
    for speed in (900.0, 10.0, 30.0, 20.0, 1.0, 2.0, 3.0):
        table = table.with_speed(TRAIN, speed)
    assert table.speeds == {TRAIN: (30.0, 20.0, 1.0, 2.0, 3.0)} and KEPT == 5


def test_prior_counts_as_one_speed_so_that_own_steps_outweigh_it():
    table = ThroughputTable(speeds={TRAIN: (1.0, 9.0, 5.0)}, program_bytes={TRAIN: 7, ROLLOUT: 3})
    prior = table.as_prior()
    assert prior.speeds == {TRAIN: (5.0,)} and prior.program_bytes == table.program_bytes


def test_longest_wait_for_programs_stays_but_for_a_tenth_a_step():
    table = ThroughputTable().with_wait(20.0).with_wait(3.0)
    assert table.compile_s == 18.0 and table.as_prior().compile_s == 18.0
    assert table.with_wait(30.0).over(table).compile_s == 30.0
    assert ThroughputTable().over(table).compile_s == 18.0


def test_own_speeds_and_bytes_come_before_kept_ones_and_failures_are_of_both():
    other = Failure(stage="train", mesh="data=8", size=(48, 8, 1, -70))
    own = ThroughputTable(speeds={TRAIN: (1.0,)}, program_bytes={ROLLOUT: 1}, failures=(FAILED,))
    kept = ThroughputTable(
        speeds={TRAIN: (2.0,), ROLLOUT: (3.0,)},
        program_bytes={TRAIN: 2, ROLLOUT: 2},
        failures=(other, FAILED),
        facts=FACTS,
    )
    both = own.over(kept)
    assert both.speeds == {TRAIN: (1.0,), ROLLOUT: (3.0,)}
    assert both.program_bytes == {TRAIN: 2, ROLLOUT: 1}
    assert both.failures == (other, FAILED) and both.facts == FACTS


# Failures.


@pytest.mark.parametrize(
    ("size", "fails"),
    [
        ((48, 960, 32, 1, -70), True),
        ((96, 960, 32, 1, -70), True),
        ((48, 1920, 64, 1, -70), True),
        # Smaller in one respect: it may run.
        ((40, 1920, 64, 1, -70), False),
        ((96, 950, 64, 1, -70), False),
        ((96, 1920, 16, 1, -70), False),
        ((96, 1920, 64, 0, -70), False),
        # With less memory it fails too, and where its limit is not known; with more it may run.
        ((48, 960, 32, 1, -69), True),
        ((48, 960, 32, 1, 0), True),
        ((48, 960, 32, 1, -71), False),
    ],
)
def test_failure_covers_plans_that_are_no_smaller_in_any_respect(size, fails):
    table = ThroughputTable().with_failure(FAILED)
    plan = Failure(stage="rollout", mesh="data=8", size=size)
    assert bool(table.failure_of(plan)) is fails
    assert table.failure_of(dataclasses.replace(plan, mesh="data=4,tensor=2")) == ""


def test_failure_says_what_ran_out_of_memory():
    table = ThroughputTable(failures=(FAILED,))
    assert table.failure_of(FAILED) == (
        "ran out of memory with 32 slots, a KV cache of 960 tokens per row shard and episodes of "
        "48 tokens"
    )
    with_remat = Failure(stage="train", mesh="data=8", size=(48, 8, 0, -70))
    assert str(with_remat) == "ran out of memory with rows of 48 tokens, 8 at a time, with remat"
    assert not with_remat.covers(FAILED)
    with_dots = Failure(stage="train", mesh="data=8", size=(48, 8, 1, -70))
    assert str(with_dots).endswith(", 8 at a time, with remat but for projections")
    assert str(Failure(stage="train", mesh="data=8", size=(48, 8, 2, -70))).endswith("8 at a time")
    offloaded = Failure(stage="train", mesh="data=8", size=(48, 8, -1, -70))
    assert str(offloaded).endswith(", 8 at a time, with remat, its inputs in host memory")


# Keys.


def test_keys_parse_to_what_they_were_made_of():
    assert ROLLOUT == "rollout data=4,tensor=2 48 slots=32"
    assert TRAIN == "train data=8 48 micro_batches=2,remat=full"
    assert parse_key(ROLLOUT) == (RolloutPlan(D4T2, 32, 0), 48)
    assert parse_key(TRAIN) == (TrainPlan(D8, 2, "full"), 48)
    for key in (ROLLOUT, TRAIN, TRAIN.replace("full", "dots"), TRAIN.replace("full", "none")):
        assert key_of(*parse_key(key)) == key


NO_KEYS = [
    "",
    "train data=8 48",
    "dance data=8 48 slots=8",
    "rollout x 48 slots=8",
    "rollout data=8 many slots=8",
    "rollout data=8 ² slots=8",
    "rollout data=8 48 slots=8 more",
    "rollout data=8 48 lots=8",
    "rollout data=8 48 slots=0",
    "train data=8 48 slots=8",
    "train data=8 48 micro_batches=2",
    "train data=8 48 micro_batches=2,remat=maybe",
]


@pytest.mark.parametrize("text", NO_KEYS)
def test_anything_else_is_no_key(text):
    with pytest.raises(ValueError):
        parse_key(text)


# JSON.


def test_table_comes_back_from_json_bit_for_bit():
    table = ThroughputTable(
        speeds={TRAIN: (0.1, 1 / 3)},
        program_bytes={TRAIN: 10**12, ROLLOUT: 7},
        failures=(FAILED,),
        compile_s=1 / 3,
        facts=FACTS,
    )
    assert ThroughputTable.from_dict(json.loads(json.dumps(table.as_dict()))) == table


def holding(entry, key=TRAIN):
    return {"entries": {key: entry}, "failures": []}


GOOD = {"speeds": [1.0], "program_bytes": 1}


@pytest.mark.parametrize(
    "nonsense",
    [
        [],
        None,
        {},
        holding(3),
        holding({"speeds": [1.0]}),
        holding(GOOD | {"speeds": ["fast"]}),
        holding(GOOD | {"speeds": [0.0]}),
        holding(GOOD | {"speeds": [float("nan")]}),
        holding(GOOD | {"speeds": [float("inf")]}),
        holding(GOOD | {"speeds": 3.0}),
        holding(GOOD | {"program_bytes": None}),
        holding(GOOD | {"program_bytes": -1}),
        *(holding(GOOD, key) for key in NO_KEYS),
        {"entries": {}},
        {"entries": {}, "failures": [3]},
        {"entries": {}, "failures": [{"stage": "rollout", "mesh": "data=8", "size": [1]}]},
        {"entries": {}, "failures": [{"stage": "x", "mesh": "data=8", "size": [1, 2, 3, 4]}]},
        {"entries": {}, "failures": [], "facts": [1]},
        {"entries": {}, "failures": [], "compile_s": -1.0},
    ],
)
def test_nonsense_is_refused(nonsense):
    with pytest.raises(ValueError, match="not a throughput table"):
        ThroughputTable.from_dict(nonsense)


# Files.


def test_cache_folder_is_the_users(cache, monkeypatch, tmp_path):
    assert cache_folder() == cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "earl_jax"


def test_next_run_begins_with_the_medians_of_the_file(cache):
    empty, note = load_table(MADE)
    assert (dict(empty.speeds), note) == ({}, None) and cache in empty.path.parents
    table = one_speed().with_speed(TRAIN, 1000.0).with_bytes(ROLLOUT, 7).with_failure(FAILED)
    table.write()
    found, note = load_table(dict(reversed(MADE.items())))
    assert (found, note) == (table.as_prior(), None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"\xff\xfe\x00garbage",
        lambda whole: b"[1, 2]",
        lambda whole: whole.replace(b"program_bytes", b"program_bites"),
        lambda whole: whole.replace(b"train data=8 48", b"train x 48"),
    ],
)
def test_damaged_file_is_reported_and_begun_anew(damage):
    table = one_speed()
    table.path.write_bytes(damage(table.path.read_bytes()))
    found, note = load_table(MADE)
    assert found == ThroughputTable(path=table.path, facts=table.facts)
    assert str(table.path) in note and "begins anew" in note
    assert one_speed().speeds == table.speeds
    assert load_table(MADE)[1] is None


@pytest.mark.parametrize(
    "change", [{"versions": {"jax": "2"}}, {"flags": ["--a"]}, {"model": {"width": 65}}]
)
def test_other_facts_have_another_file(change):
    one_speed()
    found, note = load_table(MADE | change)
    assert (dict(found.speeds), note) == ({}, None)
    assert load_table(MADE)[0].speeds
